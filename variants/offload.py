"""Keeps main parameters, their gradients and the optimizer's state in the host's memory, and updates them there.

The host is the CPU of a GPU's machine. Stage 4 (stage4_overlap/) shards state over d ranks. Its inner optimizer,
torch's, updates main parameters: the parts of parameters that this rank owns, or fp32 copies. Here all are copies.
Situation: a GPU has no room for the 12/d or 16/d bytes per parameter, and its host has plenty of memory.
Called elsewhere: `offload_optimizer` with device "cpu" in DeepSpeed (ZeRO-Offload), `optimizer_cpu_offload` in
Megatron-LM, `CPUOffloadPolicy` in FSDP2, which also moves the parameters. modded-nanogpt has no such option.
Wire (what is sent per step): between ranks, as in stage 4; between GPU and host, 4Ψ/d bytes of gradients and pΨ/d of
parameters, for Ψ parameters of p bytes. Memory of the GPU: p bytes per parameter, and the two buffers in which
gradients are sent. Memory of the host: 16/d bytes per parameter.
Costs: the host computes slowly, and the GPU waits for it. DeepSpeed has its own CPU kernel, and can update one step
late. This variant was run on CPUs only. Tests count the bytes on a fake GPU.
"""

import torch

import stage4_overlap
from guard.states import update_main_param
from stage4_overlap.buffer import Bucket, BucketBuffer, PartitionedParameter
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class HostParameter(PartitionedParameter):
    """This rank's part of a bucket, a list of parameters that are sent together.

    Attributes:
        shard: on the GPU, from where it is sent.
        main_shard: main parameters on the host. The bucket puts their gradients there, too.
    """

    def __init__(self, shard):
        self.shard = shard
        self.main_shard = shard.to("cpu", torch.promote_types(shard.dtype, torch.float32), copy=True)


class HostBucket(Bucket):
    """A bucket whose main parameters are on the host."""

    parameter_of = HostParameter


class HostBuffer(BucketBuffer):
    """A buffer in which the gradients of a bucket are sent and received.

    `works` are what to wait for, and `parts` the tensors to add up then, from all ranks.
    """

    def finish_grad_sync(self):
        """Add the parts on the device, in fp32 and in rank order, and copy the sum to the host."""
        for work in self.works:
            work.wait()
        if not self.parts:  # a collective has put the average into the shard, which it can only if there is no GPU
            return
        first, *rest = self.parts
        total = first.to(self.bucket.parameter.main_shard.dtype, copy=True)
        for part in rest:
            total += part
        self.bucket.gradient.add([total.cpu()])


class ShardedOptimizer(OverlapOptimizer):
    """Stage 4's core, which steps on the host."""

    bucket_class = HostBucket
    bucket_buffer_class = HostBuffer


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, which steps on the host."""

    def _take_model_changes(self):
        """Take values that other code has written into the model into the main parameters.

        This compares the shards on the GPU with the main parameters, because writing to `param.data` changes no version
        counter of autograd, which stage 4 reads. The guard calls this method before each step.
        """
        self.finish_param_sync()
        for bucket in self.buckets:
            update_main_param(bucket.parameter.main_shard, bucket.parameter.shard)
