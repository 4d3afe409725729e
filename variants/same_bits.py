"""Computes the same bits on 1, 2, 4 and 8 ranks, for more memory than stage 4's: partial sums are whole gradients.

Stage 4 (stage4_overlap/) sends gradients in buckets, lists of parameters, during each backward pass. Each of d ranks
owns 1/d of a bucket, its shard, adds up the gradients of its shard, and updates it.

(a + b) + c isn't a + (b + c), so a sum over ranks changes with the number of ranks. Here a step has a fixed number of
micro-batches on all ranks together, the *leaves*. Each rank computes leaves / d neighbouring leaves, rank r from leaf
r * leaves / d on, in one backward pass per leaf. A fixed binary tree adds the leaves' gradients: neighbours first, then
the sums of neighbours, on whichever rank these are. The sum is divided by `leaves`, once.

Situation: a run on 8 ranks goes on with 2 ranks, and its losses, norms, parameters and moments must be the same as on 8
ranks. Or two runs on different numbers of ranks are compared, and rounding must not make them differ.
Called elsewhere: no other system has the same bits. Megatron-LM's --deterministic-mode repeats a run on the same ranks
(issue 5785). EasyScale promises the same accuracy. DeepSpeed, FSDP2 and modded-nanogpt add in the order of their
collectives.
Wire (what a rank sends): 4Ψ · (d-1)/d bytes of gradients in fp32 once per step, for Ψ parameters, and the parameters as
in stage 4. A norm takes 4 bytes per leaf and bucket.
Memory: stage 4's 4 + 12/d bytes per parameter between steps. During a step with n = leaves / d micro-batches per rank,
up to log2(n) partial sums of 4Ψ bytes each wait, beside the gradients that are being computed.
Costs: one addition of whole gradients per micro-batch, and gradients are sent in the last backward pass of a step.
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
from stage4_overlap.transport import transport_for


def add_in_pairs(parts):
    """Return the sum of tensors: add neighbours, then the sums of neighbours, and so on. Overwrites the tensors."""
    while len(parts) > 1:  # the number of parts is a power of two
        left_neighbours = parts[::2]
        torch._foreach_add_(left_neighbours, parts[1::2])  # in place
        parts = left_neighbours
    return parts[0]


class TreeBucket(Bucket):
    """A bucket that adds the gradients of this rank's leaves.

    Attributes:
        n_added: number of leaves that this rank has added since it sent the last sum.
        partial_sums: the sums of complete subtrees of the binary tree, the largest subtree first. A sum is a list of
            tensors, shaped like the parameters.
        numels: for each parameter its number of elements.
    """

    def __init__(self, params, transport):
        self.drop_sums()
        super().__init__(params, transport)

    def place(self, alignment):
        """Set where parameters begin. Pad for a shard per leaf, so that this is the same for any number of ranks."""
        self.numels = [tensor.numel() for tensor in self.tensors]
        *self.starts, end = param_starts(self.numels, alignment)
        self.numel = padded_numel(end, self.transport.n_leaves, alignment)
        self.ranges = self.ranges_in(self.transport.rank, self.transport.world_size)

    def ranges_in(self, part, n_parts):
        """Cut the bucket into `n_parts` equal parts. Return which ranges of parameters lie in part number `part`."""
        part_numel = self.numel // n_parts
        return ranges_in_shard(self.numels, self.starts, part * part_numel, (part + 1) * part_numel)

    def grads_of_leaf_shards(self, leaves):
        """Cut this rank's averaged gradients into a shard for each of its `leaves`. Return a list of views per leaf."""
        shards = self.gradient.shard.view(len(leaves), -1)
        return [cut_ranges(shard, self.ranges_in(leaf, self.transport.n_leaves)) for leaf, shard in zip(leaves, shards)]

    def add_leaf(self):
        """Take the gradients out of the parameters, and add them to the subtrees that this leaf completes."""
        total = [grad.to(self.gradient.shard.dtype) for grad in self.grads()]
        self.n_added += 1
        n_subtrees = self.n_added  # of one leaf; then of two, of four and so on
        while n_subtrees % 2 == 0:  # the last two are neighbours: they become one subtree
            total = list(torch._foreach_add(self.partial_sums.pop(), total))
            n_subtrees //= 2
        self.partial_sums.append(total)
        for param in self.params:
            param.grad = None
        self.ready.clear()  # for the next leaf: the optimizer adds parameters whose gradients have come

    def take_sum(self):
        """Return the sum of this rank's leaves, a list of tensors, and begin the next sum."""
        (total,) = self.partial_sums  # with all leaves added, there is one tree
        self.drop_sums()
        return total

    def drop_sums(self):
        """Begin to add anew."""
        self.n_added = 0
        self.partial_sums = []


class TreeBuffer(BucketBuffer):
    """A buffer in which the sums of a bucket are sent and received. `works` are what to wait for until they arrive."""

    def wire_dtype(self, bucket):
        """Return the dtype in which sums are sent: fp32 for parameters of 16 bits."""
        return torch.promote_types(bucket.flat_params.dtype, torch.float32)

    def start_grad_sync(self, bucket):
        """Send this rank's sum, undivided."""
        self.bucket = bucket
        slots, sent, received = self.places[bucket]  # slots: views of `sent`, shaped like the parameters
        torch._foreach_copy_(slots, bucket.take_sum())
        self.works, self.parts = self.transport.exchange(sent, received)

    def finish_grad_sync(self):
        """Wait for the ranks' sums, `parts`, and add them in pairs, because each is the sum of a subtree."""
        for work in self.works:
            work.wait()
        self.bucket.gradient.add([add_in_pairs(self.parts)])


class SumsLeaves:
    """Adds an argument `leaves` to both optimizers: the number of micro-batches per step on all ranks together.

    It is a power of two and a multiple of the number of ranks.
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
        """Return the mean loss of all leaves, for a log. `losses`: scalar tensors of this rank's leaves. Collective."""
        own_losses = torch.stack([loss.detach() for loss in losses])
        all_losses = tensors_of_ranks(own_losses, self.process_group).flatten()
        return add_in_pairs(list(all_losses)) / self.leaves


class TreeOfLeaves(OverlapOptimizer):
    """Stage 4's core, with buckets that add leaves. The core calls all methods here."""

    bucket_class = TreeBucket
    bucket_buffer_class = TreeBuffer

    def transport_for(self, process_group, device, _):
        """Return the transport, which sends messages. Its divisor, and `n_leaves`, are the number of leaves."""
        transport = transport_for(process_group, device, torch.float32)  # on NCCL, too, the ranks exchange their sums
        transport.n_leaves = self.leaves
        transport.divisor = self.leaves
        return transport

    def send_grads(self, bucket):
        """Add the bucket's gradients, which have all come. Send the sum after this rank's last leaf."""
        bucket.add_leaf()
        if bucket.n_added == len(self.own_leaves()):
            super().send_grads(bucket)

    def zero_grad(self, set_to_none=True):
        """Drop the gradients, and the sums of leaves."""
        for bucket in self.buckets:
            bucket.drop_sums()
        super().zero_grad(set_to_none)


class ShardedOptimizer(SumsLeaves, TreeOfLeaves):
    """Stage 4's core, which adds gradients in a fixed order."""


class DistributedOptimizer(SumsLeaves, stage4_overlap.DistributedOptimizer, TreeOfLeaves):
    """Stage 4's DistributedOptimizer, which adds gradients in a fixed order.

    The guard calls the methods that begin with an underscore.

    Raises:
        ValueError: `leaves` is no power of two, or no multiple of the number of ranks; `average_over` is given; a
            parameter is a DTensor; `step` gets a closure, whose losses it would average in another order; or
            `reshard` is called.
        RuntimeError: a rank has run more or fewer backward passes than it has leaves. Raised on every rank by `step`
            and `clip_grad_norm_`, which drop the gradients.
    """

    def _prepare(self, *args, **settings):
        """Check the arguments. The ranks compare `leaves`, too."""
        return super()._prepare(*args, leaves=self.leaves, **settings)

    def _refuse(self, named):
        """Refuse arguments and parameters, [(name, parameter), …], as the class docstring says."""
        world_size = dist.get_world_size(self.process_group)
        is_power_of_two = self.leaves > 0 and self.leaves & (self.leaves - 1) == 0  # only one bit is 1
        if not is_power_of_two or self.leaves % world_size:
            raise ValueError(f"leaves is {self.leaves}: it must be a power of two, a multiple of {world_size} ranks")
        if self.average_over is not None:
            raise ValueError("variants/same_bits.py takes no average_over: it divides by the number of leaves")
        for name, param in named:
            if hasattr(param, "placements"):
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
        """Do nothing, so that `no_sync` does nothing: gradients are sent once per step anyway, as a sum of leaves."""

    def _before_average(self, arguments):
        """Agree as stage 4 does, and also on the number of backward passes that each rank has run.

        `_rounds` counts them. Returns whether the gradients weren't averaged before in this step.
        """
        rounds = self._rounds
        n_own = len(self.own_leaves())
        n_passes = n_own  # the number if the ranks have agreed before, in `clip_grad_norm_` for example
        if not rounds.is_synced:
            n_passes = rounds.n_ended - rounds.n_dropped
            if rounds.is_open:  # a pass has failed
                n_passes += 1
        was_new = super()._before_average({**arguments, "backward passes since the last step": n_passes})
        if n_passes != n_own:
            self.zero_grad()
            raise RuntimeError(f"{n_passes} backward passes since the last step: each rank computes {n_own} of "
                               f"{self.leaves} leaves, in one backward pass each")
        return was_new

    def _total_norm(self, norm_type):
        """Return the norm of all gradients: the norm of the norms of each leaf's shard of each bucket.

        The order of these norms doesn't depend on d, the number of ranks.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type}: it must be above 0, shards can't tell the number of tensors")
        no_grads = [self.buckets[0].gradient.shard.new_zeros(1)]  # torch's norm of an empty list is on the CPU
        norms = []
        for bucket in self.buckets:
            for grads in bucket.grads_of_leaf_shards(self.own_leaves()):
                norms.append(torch.nn.utils.get_total_norm(grads or no_grads, norm_type))
        norms_of_ranks = tensors_of_ranks(torch.stack(norms), self.process_group)  # (d, buckets · leaves of a rank)
        by_rank = norms_of_ranks.view(self.world_size, len(self.buckets), -1)  # (d, buckets, leaves of a rank)
        by_bucket = by_rank.transpose(0, 1).flatten()  # for each bucket the norms of all leaves, in order
        return torch.linalg.vector_norm(by_bucket, float(norm_type))
