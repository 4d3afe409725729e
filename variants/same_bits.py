"""Computes the same bits on 1, 2, 4 and 8 ranks, for more memory than stage 4 takes.

Stage 4 (stage4_overlap/) sends gradients in buckets, lists of parameters, during each backward pass. Each of d ranks
owns 1/d of a bucket, its shard, adds up the gradients of its shard, and updates it. (a + b) + c isn't a + (b + c), so
the sum changes with the number of ranks.

Here a step has a fixed number of micro-batches on all ranks together, the *leaves*. Rank r computes leaves / d of them,
from leaf r * leaves / d on, in one backward pass per leaf. Their gradients are added in a fixed binary tree: first
neighbouring leaves, then the sums of neighbours, and so on. The sum is divided by `leaves`, once.

Situation: a run on 8 ranks goes on with 2 ranks, and its losses, norms, parameters and moments must be the same as on 8
ranks. Or runs on different numbers of ranks are compared, and rounding must not make them differ.

Names in other libraries: none has the same bits. Related: --deterministic-mode (Megatron-LM), EasyScale.

Wire (what a rank sends), in bytes per step, for Ψ parameters: 4Ψ · (d-1)/d of gradients, in fp32, and the parameters as
in stage 4. A norm takes 4 bytes per leaf and bucket.

Memory, in bytes per fp32 parameter: 4 (parameter) + 4/d (gradient) + 8/d (two moments), as in stage 4. During a step
with n = leaves / d micro-batches per rank also up to 4 · log2(n) (sums of some leaves), beside the gradients of the
leaf that is computed.

Costs: one addition of whole gradients per micro-batch, and gradients are sent only in the last backward pass of a step.

Limits: experts (`average_over`), DTensors, closures and `reshard` are refused. Bits may differ on another kind of
processor, with other kernels or another torch, with other shapes under torch.compile, or with another number of
threads. Random numbers must depend on the step and the leaf alone: see docs/same_bits.md.

    optimizer = DistributedOptimizer(model.parameters(), torch.optim.AdamW, leaves=8, lr=1e-3)
    for leaf in optimizer.own_leaves():          # of this rank
        model(batch_of(step, leaf)).backward()   # not divided by the number of micro-batches
    optimizer.step()
"""

import torch
import torch.distributed as dist

import stage4_overlap
from guard.scaling import tensors_of_ranks
from stage4_overlap.buffer import Bucket, BucketBuffer, cut_ranges, padded_numel, param_starts, ranges_in_shard
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer
from stage4_overlap.transport import transport_for as usual_transport


def add_in_pairs(parts):
    """Add neighbours, then the sums of neighbours, and so on. Return the sum. `parts`, tensors, are overwritten."""
    while len(parts) > 1:  # the number of parts is a power of two
        left_neighbours = parts[::2]
        torch._foreach_add_(left_neighbours, parts[1::2])  # adds each right neighbour to its left one, in place
        parts = left_neighbours
    return parts[0]


class TreeBucket(Bucket):
    """A bucket that adds the gradients of this rank's leaves.

    Attributes:
        n_added: number of leaves that this rank has added since it sent the last sum.
        partial_sums: the sums of complete subtrees of the binary tree, the largest subtree first. A sum is a list of
            tensors, shaped like the parameters.
        numels: for each parameter its number of elements.

    Attributes of stage 4's Bucket:
        params, tensors: the parameters, and for each the tensor to store, here the parameter itself.
        starts, numel: where each parameter begins, and the number of all elements and padding.
        ranges: the Ranges, parts of parameters, that this rank owns.
        ready: the parameters whose gradients have come in this backward pass. The optimizer adds them.
        gradient: the averaged gradients of this rank's shard; `gradient.shard` is one flat tensor.
    """

    def __init__(self, params, transport):
        self.drop_sums()  # sets n_added and partial_sums
        super().__init__(params, transport)

    def lay_out(self, alignment):
        """Set where parameters begin. Pad for a shard per leaf: equally for any number of ranks."""
        self.numels = [tensor.numel() for tensor in self.tensors]
        *self.starts, end = param_starts(self.numels, alignment)
        self.numel = padded_numel(end, self.transport.n_leaves, alignment)
        self.ranges = self.ranges_in(self.transport.rank, self.transport.world_size)

    def ranges_in(self, part, n_parts):
        """Cut the bucket into `n_parts` equal parts. Return the Ranges of parameters that lie in part number `part`."""
        part_numel = self.numel // n_parts
        return ranges_in_shard(self.numels, self.starts, part * part_numel, (part + 1) * part_numel)

    def grads_of_leaf_shards(self, leaves):
        """Cut this rank's averaged gradients into a shard for each of `leaves`. Return a list of views per leaf."""
        shards = self.gradient.shard.view(len(leaves), -1)
        return [cut_ranges(shard, self.ranges_in(leaf, self.transport.n_leaves)) for leaf, shard in zip(leaves, shards)]

    def add_leaf(self):
        """Take the gradients of a leaf out of the parameters, and add them to the sums of the leaves before."""
        total = [grad.to(self.gradient.shard.dtype) for grad in self.grads()]
        self.n_added += 1
        n_subtrees = self.n_added  # of one leaf each; after a turn of the loop of two leaves, then of four, and so on
        while n_subtrees % 2 == 0:  # the last two subtrees are neighbours: they become one
            total = list(torch._foreach_add(self.partial_sums.pop(), total))
            n_subtrees //= 2
        self.partial_sums.append(total)
        for param in self.params:
            param.grad = None
        self.ready.clear()  # for the backward pass of the next leaf

    def take_sum(self):
        """Return the sum of this rank's leaves, a list of tensors, and begin the next sum."""
        (total,) = self.partial_sums  # one tree, because all leaves were added
        self.drop_sums()
        return total

    def drop_sums(self):
        """Begin to add anew."""
        self.n_added = 0
        self.partial_sums = []


class TreeBuffer(BucketBuffer):
    """A buffer in which the sums of a bucket are sent and received.

    Attributes of stage 4's BucketBuffer:
        places: bucket -> (slots, sent, received): the memory to send, and the memory to receive in, a row for each
            rank; `slots` are views of `sent`, shaped like the parameters.
        works: what torch's asynchronous collectives have returned. Each has wait().
        parts: the ranks' sums, in rank order, when the works have ended.
    """

    def wire_dtype(self, bucket):
        """Return the dtype in which sums are sent: fp32 for parameters of 16 bits."""
        return torch.promote_types(bucket.flat_params.dtype, torch.float32)

    def start_grad_sync(self, bucket):
        """Send this rank's sum, undivided."""
        self.bucket = bucket
        slots, sent, received = self.places[bucket]
        torch._foreach_copy_(slots, bucket.take_sum())
        self.works, self.parts = self.transport.exchange(sent, received)

    def finish_grad_sync(self):
        """Wait for the ranks' sums, and add them in pairs, because each is the sum of a subtree."""
        for work in self.works:
            work.wait()
        self.bucket.gradient.add([add_in_pairs(self.parts)])


class SumsLeaves:
    """Adds an argument to both optimizers.

    Args:
        leaves: the number of micro-batches per step on all ranks together, a power of two and a multiple of the number
            of ranks.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, leaves, **kwargs):
        self.leaves = leaves
        super().__init__(params, optimizer_cls, **kwargs)

    def own_leaves(self):
        """Return the numbers of the leaves that this rank computes, a range, in the order of computing."""
        rank = dist.get_rank(self.process_group)
        n_own = self.leaves // dist.get_world_size(self.process_group)
        return range(rank * n_own, (rank + 1) * n_own)

    def mean_over_leaves(self, losses):
        """Return the mean loss of all leaves, for a log. losses: of this rank's leaves, scalar tensors. Collective."""
        own_losses = torch.stack([loss.detach() for loss in losses])
        all_losses = tensors_of_ranks(own_losses, self.process_group).flatten()
        return add_in_pairs(list(all_losses)) / self.leaves


class TreeOfLeaves(OverlapOptimizer):
    """Stage 4's core, with buckets that add the gradients of leaves. The core calls all methods here."""

    bucket_class = TreeBucket
    bucket_buffer_class = TreeBuffer

    def transport_for(self, process_group, device, _):
        """Return the transport, which sends messages. By its `divisor` a bucket divides the sum."""
        # float32: on NCCL, too, the ranks exchange their sums, and each rank adds up its shard.
        transport = usual_transport(process_group, device, torch.float32)
        transport.n_leaves = self.leaves  # TreeBucket reads it
        transport.divisor = self.leaves
        return transport

    def send_grads(self, bucket):
        """Add the bucket's gradients of this leaf, which are all ready. Send the sum after this rank's last leaf."""
        bucket.add_leaf()
        if bucket.n_added == len(self.own_leaves()):
            super().send_grads(bucket)

    def zero_grad(self, set_to_none=True):
        """Drop the gradients, and the sums of leaves."""
        for bucket in self.buckets:
            bucket.drop_sums()
        super().zero_grad(set_to_none)


# The core: the bare optimizer.
class ShardedOptimizer(SumsLeaves, TreeOfLeaves):
    """Stage 4's core, which adds gradients in a fixed order."""


# The guard, with its checks, in front of the core. It reads the names that begin with an underscore.
class DistributedOptimizer(SumsLeaves, stage4_overlap.DistributedOptimizer, TreeOfLeaves):
    """Stage 4's DistributedOptimizer, which adds gradients in a fixed order.

    Raises:
        ValueError: `leaves` is no power of two, or no multiple of the number of ranks; `average_over` (for experts) is
            given; a parameter is a DTensor, whose elements are spread over ranks; `step` gets a closure; or `reshard`
            is called.
        RuntimeError: a rank has run more or fewer backward passes than it has leaves. Raised on every rank by `step`
            and `clip_grad_norm_`, which drop the gradients.
    """

    def _prepare(self, *args, **settings):
        """Check the constructor's arguments. All ranks must have passed the same `leaves`."""
        return super()._prepare(*args, leaves=self.leaves, **settings)

    def _refuse(self, named):
        """Refuse what the class docstring lists. named: the parameters, [(name, parameter), …]."""
        world_size = dist.get_world_size(self.process_group)
        is_power_of_two = self.leaves > 0 and self.leaves.bit_count() == 1
        if not is_power_of_two or self.leaves % world_size:
            raise ValueError(f"leaves is {self.leaves}: it must be a power of two, a multiple of {world_size} ranks")
        if self.average_over is not None:
            raise ValueError("variants/same_bits.py takes no average_over: it divides by the number of leaves")
        for name, param in named:
            if hasattr(param, "placements"):  # only DTensors have them
                raise ValueError(f"parameter {name} is a DTensor, and the order of its sums would depend on the mesh")
        return super()._refuse(named)

    def move_to(self, process_group):
        """Refuse `reshard`, which calls this method."""
        raise ValueError("reshard() moves no optimizer of variants/same_bits.py: save, and load on the other ranks")

    def step(self, closure=None, *, grad_scaler=None):
        """Step as stage 4 does, but refuse a closure."""
        if closure is not None:
            raise ValueError("step() takes no closure here: run the leaves, and pass the losses to mean_over_leaves()")
        return super().step(grad_scaler=grad_scaler)

    def set_requires_gradient_sync(self, requires_gradient_sync):
        """Do nothing, so that `no_sync` does nothing. Gradients are sent once per step anyway, as a sum of leaves."""

    def _before_average(self, arguments):
        """Agree with the other ranks as stage 4 does, also on how many backward passes each rank has run.

        Returns whether the gradients weren't averaged before in this step.
        """
        rounds = self._rounds  # stage 4's counts of backward passes
        n_own = len(self.own_leaves())
        n_passes = n_own  # checked already if the ranks have agreed before, in `clip_grad_norm_` for example
        if not rounds.is_synced:  # the ranks haven't agreed since the last gradient came
            n_passes = rounds.n_ended - rounds.n_dropped  # less those whose gradients model.zero_grad() has dropped
            if rounds.is_open:  # a pass has failed
                n_passes += 1
        was_new = super()._before_average({**arguments, "backward passes since the last step": n_passes})
        if n_passes != n_own:
            self.zero_grad()
            raise RuntimeError(f"{n_passes} backward passes since the last step: each rank computes {n_own} of "
                               f"{self.leaves} leaves, in one backward pass each")
        return was_new

    def _total_norm(self, norm_type):
        """Return the norm of all gradients. Each bucket is cut into a shard per leaf; this is the norm of their norms.

        The order of these norms doesn't depend on the number of ranks.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type}: it must be above 0, shards can't tell the number of tensors")
        # In place of an empty list, for which torch returns a norm on the CPU.
        no_grads = [self.buckets[0].gradient.shard.new_zeros(1)]
        norms = []
        for bucket in self.buckets:
            for grads in bucket.grads_of_leaf_shards(self.own_leaves()):
                norms.append(torch.nn.utils.get_total_norm(grads or no_grads, norm_type))
        norms_of_ranks = tensors_of_ranks(torch.stack(norms), self.process_group)  # a row for each rank
        by_rank = norms_of_ranks.view(self.world_size, len(self.buckets), -1)  # (ranks, buckets, leaves of a rank)
        by_bucket = by_rank.transpose(0, 1).flatten()  # for each bucket the norms of all leaves, in order
        return torch.linalg.vector_norm(by_bucket, float(norm_type))
