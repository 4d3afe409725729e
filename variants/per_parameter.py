"""Cuts each parameter into d parts, with its own reduce-scatter and all-gather: stage 3 without the flat buffer.

Stage 3 (stage3_gradbuffer/) puts all parameters into one flat buffer, and cuts it into d shards, one for each rank. The
inner optimizer, torch's, updates this rank's shard.

Situation: a rank should receive only 1/d of the gradients, as in stage 3, but without a buffer, and without shards that
cross parameters.

Names in other libraries: `DistAdam` (modded-nanogpt), `DistAdamW` (nanochat).

Wire (what a rank sends), in bytes per step, for Ψ fp32 elements: 4Ψ · (d-1)/d of gradients and 4Ψ · (d-1)/d of
parameters, as in stage 3, but in two messages for each parameter instead of two in all.

Memory, in bytes per fp32 element: 4 (parameter) + 4 (gradient) + 8/d (two moments), as in stage 3. Each parameter is
padded to a multiple of d · 64 bytes.

Costs: latency. A message with a bias takes as long as a message of 100 KB, and a GPT has twelve parameters per layer.
"""

import torch

import stage3_gradbuffer
from stage3_gradbuffer.optimizer import ShardedOptimizer as GradBufferOptimizer
from stage3_gradbuffer.optimizer import hyperparameters


# The core: the bare optimizer.
class ShardedOptimizer(GradBufferOptimizer):
    """Stage 3's core, with a buffer for each parameter."""

    @torch.no_grad()
    def shard(self, groups):
        """Let the core shard each parameter as a group of its own, for which the core makes a buffer.

        Returns the groups of the inner optimizer, one for each of `groups`.
        """
        own_groups = []
        for group in groups:
            own_params = []
            for param in group["params"]:
                # The core returns a group for each group that it gets.
                (own_group,) = super().shard([{**group, "params": [param]}])
                own_params += own_group["params"]
            own_groups.append({**hyperparameters(group), "params": own_params})
        return own_groups


# The guard, with its checks, in front of the core.
class DistributedOptimizer(stage3_gradbuffer.DistributedOptimizer, ShardedOptimizer):
    """Stage 3's DistributedOptimizer, with a buffer for each parameter."""
