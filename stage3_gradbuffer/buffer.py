"""The one buffer of stage 3. Gradients and parameters take turns in it, and every collective is in place.

Source of the idea: the grad buffer of Megatron-LM's distributed optimizer.
"""

import enum
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

from .checks import named_params
from .inner import hook_gradient


class Holds(enum.Enum):
    """What the buffer holds at the moment; a step goes through the five from top to bottom."""

    GRADS = "all gradients of this rank"
    GRAD_SHARD = "this rank's shard of the reduced gradients, and garbage"
    PARAM_SHARD = "this rank's shard of the updated parameters, and garbage"
    PARAMS = "all updated parameters"
    ZEROS = "zeros"


class Range(NamedTuple):
    """The part of a parameter that lies in a shard: `param.view(-1)[start:stop]` is `shard[offset:][:stop - start]`."""

    index: int  # which parameter
    start: int
    stop: int
    offset: int


def padded_numel(numel: int, world_size: int, alignment: int) -> int:
    """The least length of at least `numel` that cuts into `world_size` equal shards, each a multiple of `alignment`."""
    unit = world_size * alignment
    return -(-numel // unit) * unit


def param_starts(numels: list[int], alignment: int) -> list[int]:
    """Where parameters begin that lie one after the other, each at a multiple of `alignment`; and where they end."""
    return list(itertools.accumulate((padded_numel(numel, 1, alignment) for numel in numels), initial=0))


def ranges_in_shard(numels: list[int], starts: list[int], shard_start: int, shard_stop: int) -> list[Range]:
    """Which parts of parameters fall between two positions. Shards ignore parameter boundaries."""
    ranges = []
    for index, (numel, param_start) in enumerate(zip(numels, starts)):
        start, stop = max(shard_start, param_start), min(shard_stop, param_start + numel)
        if start < stop:
            ranges.append(Range(index, start - param_start, stop - param_start, start - shard_start))
    return ranges


class GradBuffer:
    """One flat buffer for the gradients of `params`, and then for the parameters that come out of the step.

    Args:
        params: tensors of one dtype on one device, contiguous.
        grad_dtype: dtype of the buffer: that of the parameters, or torch.float32 to sum 16-bit gradients in fp32.
        process_group: the d ranks that own a shard each.
        alignment: bytes, of which a shard is a multiple and at which each parameter begins. 64 is a cache line and the
            widest vector of a CPU: what a fused kernel makes of a part is then, to the bit, what it makes of the whole.
            GPUs and NCCL want 16.

    Attributes:
        flat: (padded_numel,) of grad_dtype: the buffer. Between and after gradients there are zeros.
        grads: for each parameter its view of the buffer, of its shape.
        main_params, main_grads: for each range in this rank's shard what the inner optimizer steps, and with which
            gradient; (range numel,) each. Of 16-bit parameters they are fp32; of fp32 ones they are views of the
            model's own tensors, and of the buffer.
        ranges: where in the parameters those are.
    """

    def __init__(self, params, grad_dtype, process_group, alignment=64):
        self.params = params
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        rank, dtype = dist.get_rank(process_group), params[0].dtype
        numels = [param.numel() for param in params]
        alignment //= min(dtype.itemsize, grad_dtype.itemsize)  # in elements
        *self.starts, end = param_starts(numels, alignment)
        numel = padded_numel(end, self.world_size, alignment)
        shard_numel = numel // self.world_size

        self.in_main_grad = grad_dtype != dtype  # autograd insists on the dtype of the parameter for param.grad
        self.flat = torch.zeros(numel, dtype=grad_dtype, device=params[0].device)
        self.holds, self.zero_version = Holds.ZEROS, self.flat._version
        self.grads = views_of(self.flat, params, self.starts)
        self.grad_shard = self.flat.view(self.world_size, shard_numel)[rank]  # (shard_numel,)
        self.flat_params = self.flat.view(dtype)[:numel]  # the same bytes, read as parameters
        self.param_shard = self.flat_params.view(self.world_size, shard_numel)[rank]  # (shard_numel,)

        self.ranges = ranges_in_shard(numels, self.starts, rank * shard_numel, (rank + 1) * shard_numel)
        self.main_params = self.model_params()
        self.main_grads, self.main_grad_shard = cut_ranges(self.grad_shard, self.ranges), None
        if dtype.itemsize < 4:
            main_shard = torch.zeros(shard_numel, dtype=torch.float32, device=self.flat.device)
            self.main_params = cut_ranges(main_shard, self.ranges)
            copy_all(self.main_params, self.model_params())
        if grad_dtype.itemsize < 4:
            self.main_grad_shard = torch.zeros(shard_numel, dtype=torch.float32, device=self.flat.device)
            self.main_grads = cut_ranges(self.main_grad_shard, self.ranges)

        self.note_new_params()
        self.param_views = [param.detach() for param in params]  # share_memory() moves these along, and nothing else

        self.index_of = {id(param): index for index, param in enumerate(params)}
        self.received = set()  # indices of the parameters whose gradient has come since the last step
        self.hooks = []
        for index, param in enumerate(params):
            self.hooks.append(hook_gradient(param, self.take_grad, takes=True))
            if self.in_main_grad:
                param.main_grad = self.grads[index].detach()
            elif param.requires_grad and param.grad is None:  # one that is there already counts, as in torch
                param.grad = self.grads[index].detach()  # not the view itself: a user may detach_() it, or set its data

    @torch.no_grad()  # backward(create_graph=True) calls it with grad
    def take_grad(self, param):
        """Bring a gradient into the buffer, wherever autograd or the user has put it. Called when it is ready."""
        if self.holds not in (Holds.ZEROS, Holds.GRADS):
            self.shard_version = None  # autograd has added to the view already
            raise RuntimeError(
                f"the buffer holds {self.holds.value}: call step() or the optimizer's zero_grad() before backward()"
            )
        if param.grad is None:  # an earlier hook has taken it
            return
        self.holds = Holds.GRADS
        index = self.index_of[id(param)]
        grad = self.grads[index]
        self.received.add(index)
        if self.in_main_grad:
            grad.add_(param.grad)
            param.grad = None
        elif not is_same(param.grad, grad):  # after model.zero_grad(), say
            grad.copy_(param.grad.to_dense())  # nn.Embedding(sparse=True) makes sparse ones
            # If it requires grad, backward(create_graph=True) made it, to be differentiated.
            if not param.grad.requires_grad and is_same(param, self.param_views[index]):
                param.grad = grad.detach()

    def collect_grads(self):
        """To GRADS: whatever happened to `param.grad` outside of backward counts too.

        But the view that a parameter had when it was frozen is no gradient, unless backward has put one there.
        """
        self.holds = Holds.GRADS
        for index, param in enumerate(self.params):
            if param.grad is None and not self.in_main_grad:
                self.grads[index].zero_()  # set to None by the user
                self.received.discard(index)
            elif param.grad is not None and (param.requires_grad or not is_same(param.grad, self.grads[index])):
                self.take_grad(param)
                if not self.in_main_grad:
                    param.grad = self.grads[index].detach()  # its graph, if it has one, has been used

    def refuse_new_grads(self, groups):
        """While the buffer holds a shard: what is assigned to `param.grad` now can't be averaged any more.

        What is written into it counts where main gradients are views of the buffer. Where they are copies it wouldn't.
        """
        if self.shard_version is None:
            raise RuntimeError("a backward pass after finish_grad_sync() was refused: call the optimizer's zero_grad()")
        if self.main_grad_shard is not None and self.flat._version != self.shard_version:
            raise RuntimeError(
                "16-bit gradients were changed after finish_grad_sync(), by clip_grad_value_() say: too late"
            )
        names = {id(param): name for name, param in named_params(groups)}
        for param, grad in zip(self.params, self.grads):
            if param.grad is not None and not is_same(param.grad, grad):
                raise RuntimeError(
                    f"the gradient of parameter {names[id(param)]} was assigned after finish_grad_sync(): too late"
                )

    def refuse_new_data(self, groups):
        """Refuse a parameter whose `data` somebody has replaced, or whose `main_grad`: we use the memory before."""
        names = {id(param): name for name, param in named_params(groups)}
        for param, view, grad in zip(self.params, self.param_views, self.grads):
            if not is_same(param, view):
                raise RuntimeError(
                    f"the data of parameter {names[id(param)]} was replaced, by model.to() or vector_to_parameters(), "
                    "and this optimizer steps the old one: write into it with copy_(), or build the optimizer "
                    "afterwards"
                )
            if self.in_main_grad and not is_same(getattr(param, "main_grad", None), grad):
                raise RuntimeError(
                    f"main_grad of parameter {names[id(param)]} was replaced, or a later optimizer has the gradients: "
                    "write into it with copy_(), or build this one anew"
                )

    def reduce_scatter_grads(self):
        """To GRAD_SHARD: each rank's shard of the buffer becomes the average over the ranks. In place."""
        self.flat /= self.world_size
        dist.reduce_scatter_tensor(self.grad_shard, self.flat, group=self.process_group)
        self.holds = Holds.GRAD_SHARD

    def hand_out_main_grads(self):
        """Give each main parameter its gradient; the buffer keeps holding GRAD_SHARD."""
        self.shard_version = self.flat._version
        if self.main_grad_shard is not None:
            self.main_grad_shard.copy_(self.grad_shard)
        for r, main_param, main_grad in zip(self.ranges, self.main_params, self.main_grads):
            frozen = not self.params[r.index].requires_grad and r.index not in self.received
            main_param.grad = None if frozen else main_grad

    def take_main_params(self):
        """To PARAM_SHARD: the stepped main parameters, in the dtype of the model's."""
        copy_all(cut_ranges(self.param_shard, self.ranges), self.main_params)
        self.holds = Holds.PARAM_SHARD

    def all_gather_params(self):
        """To PARAMS. In place."""
        dist.all_gather_into_tensor(self.flat_params, self.param_shard, group=self.process_group)
        self.holds = Holds.PARAMS

    def copy_params_to_model(self):
        """The buffer keeps holding PARAMS."""
        copy_all(self.params, views_of(self.flat_params, self.params, self.starts))
        self.note_new_params()

    def note_new_params(self):
        """Remember autograd's count of the writes into each parameter, to see later ones."""
        self.versions = [param._version for param in self.params]

    def model_params(self):
        """Views of the parameters, one for each of this rank's ranges."""
        return [self.params[r.index].detach().view(-1)[r.start : r.stop] for r in self.ranges]

    def take_model_changes(self):
        """Where somebody has written into the parameters since, model.load_state_dict() say, main_params follow."""
        if self.versions == [param._version for param in self.params]:
            return
        for now, main_param in zip(self.model_params(), self.main_params):
            changed = now != main_param.to(now.dtype)  # an element that it still rounds to keeps its fp32 value
            main_param.copy_(torch.where(changed, now, main_param))

    def zero(self):
        """To ZEROS, ready for the next backward pass to add to."""
        if self.flat._version != self.zero_version:  # autograd counts the writes, by whomever
            self.flat.zero_()
            self.holds, self.zero_version = Holds.ZEROS, self.flat._version
        self.received.clear()
        for param, grad in zip(self.params, self.grads):
            param.grad = grad.detach() if param.requires_grad and not self.in_main_grad else None

    def let_go(self):
        """Hand the parameters back to torch: gradients stay where autograd, or the user, puts them."""
        for hook in self.hooks:
            hook.remove()
        for param, grad in zip(self.params, self.grads):
            if is_same(param.grad, grad):
                param.grad = None
            vars(param).pop("main_grad", None)


def cut_ranges(shard, ranges):
    """Cut a shard into views, one for each of its `ranges`; what is left is padding."""
    return [shard[r.offset : r.offset + r.stop - r.start] for r in ranges]


def copy_all(targets, sources):
    if targets:  # a shard may be all padding
        torch._foreach_copy_(targets, sources)


def views_of(flat, params, starts):
    """Views of `flat`, shaped like `params`, which begin at `starts`."""
    return [flat[start : start + param.numel()].view(param.shape) for param, start in zip(params, starts)]


def is_same(tensor, view):
    """Whether it is the same view of the same memory; None is not."""
    if tensor is None or (tensor.layout, tensor.device) != (view.layout, view.device):
        return False
    return tensor.is_set_to(view)
