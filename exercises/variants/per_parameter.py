"""Each parameter is cut into d parts: a reduce-scatter and an all-gather a parameter. Stage 3 without one flat buffer.

Situation: gradients of 1/d are enough, as in stage 3, but nobody wants a buffer, nor shards across parameters.
Called elsewhere: DistAdam in modded-nanogpt, DistAdamW in nanochat. Megatron-LM and DeepSpeed have one buffer from the
start; FSDP2 cuts each parameter too, but sends those of a module together.
Wire: 2 · 4Ψ · (d-1)/d bytes, as stage 3, each parameter padded to d · 64 bytes; but two messages a parameter and
not two in all: 2n, of n parameters. Memory: as stage 3, 8 + 8/d bytes a parameter.
Costs: latency. A message of a bias takes as long as one of 100 KB; a GPT has twelve parameters a layer.

Exercise: fill in 1 body, see docs/exercise.md. The solution is variants/per_parameter.py.
"""

import torch

import stage3_gradbuffer
from stage3_gradbuffer.optimizer import ShardedOptimizer as GradBufferOptimizer


class ShardedOptimizer(GradBufferOptimizer):
    @torch.no_grad()
    def shard(self, groups):
        """A buffer for each parameter. The core adds an inner group for each of them; they become one again."""
        raise RuntimeError("fill in shard: a buffer for each parameter, one inner group for each group")


class DistributedOptimizer(stage3_gradbuffer.DistributedOptimizer, ShardedOptimizer):
    """Stage 3's, with a buffer for each parameter."""
