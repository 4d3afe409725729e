"""Keeps main parameters, their gradients and the optimizer's state in the host's memory, and updates them there.

The host is the CPU of a GPU's machine. Stage 4 (stage4_overlap/) spreads its state over d ranks. The inner optimizer,
torch's, updates main parameters. Here these are fp32 copies of the parts of parameters that this rank owns.

Situation: a GPU has no room for the 12/d or 16/d bytes per parameter, and its host has plenty of memory.

Names in other libraries: `offload_optimizer` and ZeRO-Offload (DeepSpeed), `optimizer_cpu_offload` (Megatron-LM),
`CPUOffloadPolicy` (FSDP2).

Wire (what is sent): between ranks as in stage 4. Between a GPU and its host, in bytes per step, for Ψ parameters of p
bytes: 4Ψ/d of gradients and pΨ/d of parameters.

Memory of the GPU, in bytes per parameter: p, and the two buffers in which gradients are sent.
Memory of the host, in bytes per parameter: 4/d (main parameter) + 4/d (gradient) + 8/d (two moments).

Costs: the GPU waits for the host, which computes slowly. Tested on CPUs only, with a fake GPU whose bytes are counted.
"""

import torch

import stage4_overlap
from guard.states import update_main_param
from stage4_overlap.buffer import Bucket, BucketBuffer, PartitionedParameter
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class HostParameter(PartitionedParameter):
    """What this rank owns of a bucket. A bucket is a list of parameters that are sent together.

    Attributes:
        shard: the parameters on the GPU, one flat tensor, which is sent.
        main_shard: the main parameters, an fp32 copy on the host. Their gradients are put on the same device.
    """

    def __init__(self, shard):
        self.shard = shard
        self.main_shard = shard.to("cpu", torch.promote_types(shard.dtype, torch.float32), copy=True)


class HostBucket(Bucket):
    """A bucket whose main parameters are on the host. Stage 4's Bucket calls `parameter_of` with its shard."""

    parameter_of = HostParameter


class HostBuffer(BucketBuffer):
    """A buffer in which the gradients of a bucket are sent and received.

    Attributes of stage 4's BucketBuffer, which sets them when it sends:
        works: what torch's asynchronous collectives have returned. Each has wait().
        parts: the tensors to add up then, one from each rank.
    """

    def finish_grad_sync(self):
        """Wait for the gradients, add them on the GPU, in fp32 and in rank order, and copy the sum to the host."""
        for work in self.works:
            work.wait()
        if not self.parts:  # there is no GPU, so a collective has put the average into the host's memory itself
            return
        first, *rest = self.parts
        total = first.to(self.bucket.parameter.main_shard.dtype, copy=True)
        for part in rest:
            total += part
        self.bucket.gradient.add([total.cpu()])


# The core: the bare optimizer.
class ShardedOptimizer(OverlapOptimizer):
    """Stage 4's core, which steps on the host."""

    bucket_class = HostBucket
    bucket_buffer_class = HostBuffer


# The guard, with its checks, in front of the core. It reads the names that begin with an underscore.
class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, which steps on the host."""

    def _take_model_changes(self):
        """Copy what other code has written into the model into the main parameters. The guard calls this before a step.

        Stage 4 reads autograd's version counters, which writing to `param.data` doesn't change. This method compares
        the values on the GPU with the main parameters.
        """
        self.finish_param_sync()
        for bucket in self.buckets:
            update_main_param(bucket.parameter.main_shard, bucket.parameter.shard)
