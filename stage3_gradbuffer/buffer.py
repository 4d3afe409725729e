"""The buffer of stage 3: gradients and parameters take turns in it, so both collectives work in place.

The buffer is padded, and cut into d equal shards, one for each rank. The inner optimizer is a usual torch optimizer,
which updates only the main parameters of this rank: the ranges of parameters that lie in its shard, or fp32 copies of
them if they have 16 bits.
Source of the idea: the grad buffer of Megatron-LM's distributed optimizer.
"""

import enum
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

# Bytes: the widest vector of a CPU. A parameter begins at a multiple of it, because torch's fused kernels may round an
# element differently if the element is in no full vector.
ALIGNMENT = 64


class Holds(enum.Enum):
    """What the buffer holds at the moment. A training step goes through the five values from top to bottom."""

    ZEROS = "zeros"
    GRADS = "all gradients of this rank"
    GRAD_SHARD = "this rank's shard of the reduced gradients, and garbage"
    PARAM_SHARD = "this rank's shard of the updated parameters, and garbage"
    PARAMS = "all updated parameters"


class Range(NamedTuple):
    """The part of a parameter that lies in a shard: `param.view(-1)[start:stop]` is `shard[offset:][:stop - start]`."""

    index: int  # of the parameter, in a list of parameters
    start: int  # in the parameter, flattened
    stop: int
    offset: int  # in the shard, where the range begins


class GradBuffer:
    """A flat buffer for the gradients of `params`, and then for the updated parameters.

    This is the buffer of rank 0 after each method, with d = 2 and three parameters. The second parameter lies in both
    shards. a, b and c are gradients, A and B averages, p, q and r parameters, `_` is padding, `.` is garbage:

                                 rank 0's shard   | rank 1's
        zero                    | 0 0 0 0 0 0 0 0 | 0 0 0 0 0 0 0 0 |  ZEROS
        backward                | a a a _ b b b b | b _ _ _ c c _ _ |  GRADS        of this rank's batch
        reduce_scatter_grads    | A A A _ B B B B | . . . . . . . . |  GRAD_SHARD   averages, and garbage
        take_main_params        | p p p _ q q q q | . . . . . . . . |  PARAM_SHARD  stepped, and garbage
        all_gather_params       | p p p _ q q q q | q _ _ _ r r _ _ |  PARAMS

    The inner optimizer updates main parameters, and reads main gradients. Both have at least 32 bits. There are three
    cases:

        parameters  gradients   main gradients          main parameters
        fp32        fp32        the shard itself        this rank's ranges of the model's own parameters
        16 bits     fp32        the shard itself        an fp32 copy of those ranges
        16 bits     16 bits     an fp32 copy of it      an fp32 copy of those ranges

    Args:
        params: tensors of one dtype on one device, contiguous.
        grad_dtype: dtype of the gradients: that of the parameters, or torch.float32.
        process_group: the d ranks, each of which owns a shard.

    Attributes:
        holds: which of the five values of Holds is true now. Below, GRADS -> GRAD_SHARD means: `holds` is GRADS before
            the call, and GRAD_SHARD afterwards.
        flat, flat_params: (padded numel,): the buffer, and the same bytes read as parameters: the first half of them if
            gradients have twice as many bits.
        grad_shard, param_shard: (padded numel / d,): this rank's part of `flat`, and of `flat_params`.
        grads, new_params: for each parameter a view of `flat`, and a view of `flat_params`, in its shape. The view of
            `flat` is also `param.grad`, or `param.main_grad` if gradients have another dtype than parameters.
        ranges: which parts of which parameters lie in this rank's shard.
        main_grad_shard: `grad_shard`, or an fp32 copy of it if gradients have 16 bits.
        main_params, main_grads: for each range what the inner optimizer updates, (range numel,), and its gradient.
    """

    def __init__(self, params, grad_dtype, process_group):
        self.params, self.process_group = params, process_group
        rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        dtype, numels = params[0].dtype, [param.numel() for param in params]
        alignment = ALIGNMENT // min(dtype.itemsize, grad_dtype.itemsize)  # in elements
        *starts, end = param_starts(numels, alignment)
        numel = padded_numel(end, self.world_size, alignment)
        shard_numel = numel // self.world_size
        self.ranges = ranges_in_shard(numels, starts, rank * shard_numel, (rank + 1) * shard_numel)

        self.holds = Holds.ZEROS
        self.flat = torch.zeros(numel, dtype=grad_dtype, device=params[0].device)
        self.flat_params = self.flat.view(dtype)[:numel]
        self.grad_shard = self.flat.view(self.world_size, -1)[rank]
        self.param_shard = self.flat_params.view(self.world_size, -1)[rank]

        self.grads = views_of(self.flat, params, starts)
        self.new_params = views_of(self.flat_params, params, starts)
        self.make_main_tensors()
        for param, grad in zip(params, self.grads):
            self.watch(param)
            self.attach(param, grad)

    def make_main_tensors(self):
        """Make the main gradients and main parameters. `to` copies only if the dtype differs."""
        self.main_grad_shard = self.grad_shard.to(at_least_fp32(self.grad_shard.dtype))
        self.main_grads = cut_ranges(self.main_grad_shard, self.ranges)
        self.main_params = [part.to(at_least_fp32(part.dtype)) for part in self.model_ranges()]
        for main_param, main_grad in zip(self.main_params, self.main_grads):
            main_param.grad = main_grad

    def model_ranges(self):
        """Return views of the model's parameters, (range numel,) each: the ranges that this rank owns."""
        return [self.params[r.index].detach().view(-1)[r.start : r.stop] for r in self.ranges]

    def watch(self, param):
        """Let autograd call `take_grad` whenever it has added to `param.grad`."""
        param.register_post_accumulate_grad_hook(self.take_grad)

    def attach(self, param, grad):
        """Let autograd, or else `take_grad`, add gradients of `param` to `grad`, a view of the buffer."""
        if grad.dtype == param.dtype:
            param.grad = grad
        else:
            param.main_grad = grad  # autograd insists on the parameter's dtype for param.grad

    def take_grad(self, param):
        """ZEROS or GRADS -> GRADS. Autograd calls this method whenever it has added to `param.grad`."""
        if self.flat_params.dtype != self.flat.dtype:
            param.main_grad += param.grad
            param.grad = None
        self.holds = Holds.GRADS

    def reduce_scatter_grads(self):
        """GRADS -> GRAD_SHARD: average over the ranks, in place."""
        self.flat /= self.world_size
        dist.reduce_scatter_tensor(self.grad_shard, self.flat, group=self.process_group)
        if self.main_grad_shard is not self.grad_shard:
            self.main_grad_shard.copy_(self.grad_shard)
        self.holds = Holds.GRAD_SHARD

    def take_main_params(self):
        """GRAD_SHARD -> PARAM_SHARD: copy the updated main parameters into the shard, rounded to the model's dtype."""
        copy_all(cut_ranges(self.param_shard, self.ranges), self.main_params)
        self.holds = Holds.PARAM_SHARD

    def all_gather_params(self):
        """PARAM_SHARD -> PARAMS: receive the other ranks' shards, in place."""
        dist.all_gather_into_tensor(self.flat_params, self.param_shard, group=self.process_group)
        self.holds = Holds.PARAMS

    def copy_params_to_model(self):
        """Copy the updated parameters from the buffer into the model's parameters."""
        copy_all(self.params, self.new_params)

    def zero(self):
        """Any state -> ZEROS, to which the next backward pass adds. Padding is zero again, too."""
        self.flat.zero_()
        self.holds = Holds.ZEROS


def param_starts(numels, alignment):
    """Lay parameters one after the other, at multiples of `alignment`. Return where each begins, and the end."""
    return list(itertools.accumulate((padded_numel(numel, 1, alignment) for numel in numels), initial=0))


def padded_numel(numel, world_size, alignment):
    """Round `numel` up to a length that cuts into `world_size` equal shards of multiples of `alignment`."""
    unit = world_size * alignment
    return -(-numel // unit) * unit  # -(-a // b) rounds a / b up


def ranges_in_shard(numels, starts, shard_start, shard_stop):
    """Return, as Ranges, the parts of parameters between two positions. A shard may begin or end within a parameter."""
    ranges = []
    for index, (numel, param_start) in enumerate(zip(numels, starts)):
        start, stop = max(shard_start, param_start), min(shard_stop, param_start + numel)
        if start < stop:
            ranges.append(Range(index, start - param_start, stop - param_start, start - shard_start))
    return ranges


def views_of(flat, params, starts):
    """Return views of `flat` that are shaped like `params` and begin at `starts`."""
    return [flat[start : start + param.numel()].view(param.shape) for param, start in zip(params, starts)]


def cut_ranges(shard, ranges):
    """Return for each of `ranges` a view of `shard`, (range numel,). Padding may lie between them."""
    return [shard[r.offset : r.offset + r.stop - r.start] for r in ranges]


def at_least_fp32(dtype):
    """Return fp32 for a dtype of 16 bits, and any other dtype unchanged."""
    return torch.promote_types(dtype, torch.float32)


def copy_all(targets, sources):
    """Copy each tensor of `sources` into the tensor of `targets` at the same place."""
    if targets:  # a rank may own nothing but padding, and torch refuses an empty list
        torch._foreach_copy_(targets, sources)
