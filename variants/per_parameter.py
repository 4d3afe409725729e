"""Cuts each parameter into d parts, with its own reduce-scatter and all-gather: stage 3 without the flat buffer.

Stage 3 (stage3_gradbuffer/) puts all parameters into one flat buffer, and cuts it into d shards, one for each rank. The
inner optimizer, torch's, updates this rank's shard.
Situation: a rank should receive only 1/d of the gradients, as in stage 3, but without a buffer, and without shards that
cross parameters.
Called elsewhere: `DistAdam` in modded-nanogpt, `DistAdamW` in nanochat. Megatron-LM and DeepSpeed have had one buffer
from the start. FSDP2 also cuts each parameter, but sends all parameters of a module together.
Wire (what a rank sends per step): 2 · 4Ψ · (d-1)/d bytes as in stage 3, for Ψ elements in n parameters, but in 2n
messages instead of two. Each parameter is padded to a multiple of d · 64 bytes. Memory: as in stage 3, 8 + 8/d bytes
per element.
Costs: latency. A message with a bias takes as long as a message of 100 KB, and a GPT has twelve parameters per layer.
"""

import torch

import stage3_gradbuffer
from stage3_gradbuffer.optimizer import ShardedOptimizer as GradBufferOptimizer
from stage3_gradbuffer.optimizer import hyperparameters


class ShardedOptimizer(GradBufferOptimizer):
    """Stage 3's core, with a buffer for each parameter."""

    @torch.no_grad()
    def shard(self, groups):
        """Let the core shard each parameter as a group of its own, for which it makes a buffer.

        Returns the groups of the inner optimizer, one for each of `groups`.
        """
        own_groups = []
        for group in groups:
            own_params = []
            for param in group["params"]:
                (own_group,) = super().shard([{**group, "params": [param]}])
                own_params += own_group["params"]
            own_groups.append({**hyperparameters(group), "params": own_params})
        return own_groups


class DistributedOptimizer(stage3_gradbuffer.DistributedOptimizer, ShardedOptimizer):
    """Stage 3's DistributedOptimizer, with a buffer for each parameter."""
