"""Keeps main parameters, their gradients and the optimizer's state in the host's memory, and updates them there.

Situation: a GPU has no room for the 12/d or 16/d bytes per parameter, and its host has plenty of memory.
Called elsewhere: offload_optimizer with device "cpu" in DeepSpeed (ZeRO-Offload), optimizer_cpu_offload in Megatron-LM,
CPUOffloadPolicy in FSDP2, which also moves the parameters. modded-nanogpt has no such option.
Wire: as in stage 4; between GPU and host, 4Ψ/d bytes of gradients and pΨ/d of parameters. Memory of the GPU: p bytes
per parameter and two bucket buffers; memory of the host: 16/d.
Costs: the host computes slowly, and the GPU waits for it. DeepSpeed has its own CPU kernel, and can update one step
late. This variant was run on CPUs only; the bytes of a fake GPU are counted.
"""

import torch

import stage4_overlap
from guard.states import update_main_param
from stage4_overlap.buffer import Bucket, BucketBuffer, PartitionedParameter
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class HostParameter(PartitionedParameter):
    def __init__(self, shard):
        """Put `main_shard`, which the inner optimizer steps, on the host. The bucket puts its gradient there, too."""
        self.shard = shard
        self.main_shard = shard.to("cpu", torch.promote_types(shard.dtype, torch.float32), copy=True)


class HostBucket(Bucket):
    parameter_of = HostParameter


class HostBuffer(BucketBuffer):
    def finish_grad_sync(self):
        """Add the parts on the device, in fp32 and in rank order, and copy the sum to the host."""
        for work in self.works:
            work.wait()
        if not self.parts:  # a collective has put the sum into the shard on the host
            return
        first, *rest = self.parts
        total = first.to(self.bucket.parameter.main_shard.dtype, copy=True)
        for part in rest:
            total += part
        self.bucket.gradient.add([total.cpu()])


class ShardedOptimizer(OverlapOptimizer):
    bucket_class = HostBucket
    bucket_buffer_class = HostBuffer


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, which steps on the host."""

    def _take_model_changes(self):
        """Compare the device's shards with the main parameters: writing to `param.data` changes no version counter."""
        self.finish_param_sync()
        for bucket in self.buckets:
            update_main_param(bucket.parameter.main_shard, bucket.parameter.shard)
