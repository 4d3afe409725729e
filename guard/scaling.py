"""Scales averaged gradients: clips them, or multiplies them by a factor.

In a distributed optimizer of this project each rank has a part of the averaged gradients of the model. Clipping needs
the norm of all parts together.

Trainer, accelerate, Lightning and many loops call the clipping functions of torch.nn.utils, which read `param.grad`.
There they would find no gradient, or a gradient that isn't averaged yet. So the second half of this file makes such a
call an error. Shown by tests/stages/test_contract.py, `test_clipping_equals_torch_on_the_whole_model`,
tests/stages/test_users.py, `test_torchs_clipping_is_refused`, and for DTensors by tests/stages/test_dtensor.py.
"""

import functools
import warnings
import weakref

import torch
import torch.distributed as dist

from .dropping import TORCHS_ZERO_GRAD, zero_grad
from .hooks import owners_of, untraced
from .refuse import data_replaced

CLIPS = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grads_with_norm_
# Each of CLIPS is a wrapper that torch.no_grad has made. The wrapper's closure has one cell, which holds the function
# that clips. `watch_torch` replaces the content of the cell and leaves the wrapper, because a program may have imported
# the wrapper by name. In another release of torch a wrapper may have no closure (None): then there are too few cells.
CELLS = [cell for function in CLIPS for cell in function.__closure__ or ()]
if len(CELLS) != len(CLIPS):
    raise ImportError(f"torch {torch.__version__} wraps clipping anew: see guard/scaling.py")
ALIVE: set[int] = set()  # ids of all DistributedOptimizers that exist; `watch_torch` adds to it, `unwatch` removes


def total_norm(optimizer, norm_type):
    """Return the norm of all averaged gradients, a scalar tensor. Collective.

    The norm of a vector is the norm of the norms of its parts. The ranks of the optimizer's process group have the
    parts of each gradient. A DTensor's gradient is also cut over its mesh groups, the process groups of its device
    mesh.

    A *main parameter* is a tensor that this rank updates: a parameter or a piece of it. Its `grad` is averaged.
    `optimizer.state`, a ByParameter of states.py, has lists of the main parameters.
    """
    # torch's norm of type 0 counts tensors. A rank can't tell how many tensors its parts belong to.
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: it must be above 0, shards can't tell the number of tensors")
    norms = []
    state = optimizer.state
    for mesh_groups, main_params in state.main_params_by_mesh_groups.items():
        grads = [main.grad for main in main_params if main.grad is not None]
        if not grads:
            grads = [torch.zeros(1, device=state.device)]  # because torch's norm of an empty list is on the CPU
        # Compute the norm of this rank's parts, and then, for one group after the other, the norm of its ranks' norms.
        norm = torch.nn.utils.get_total_norm(grads, norm_type).to(state.norm_dtype)
        for group in (optimizer.process_group, *mesh_groups):
            norm = torch.linalg.vector_norm(tensors_of_ranks(norm, group), float(norm_type))
        norms.append(norm)
    norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    # The ranks of a mesh may have rounded the sum differently, but all ranks must clip by the same number.
    for group in state.mesh_groups:
        norm = tensors_of_ranks(norm, group).max()
    return norm


def tensors_of_ranks(tensor, group):
    """Return a tensor of shape (d, …) with the `tensor` of each of the d ranks of the group. Collective.

    Callers compute the norm or the maximum of the result, because an all-reduce with MAX may lose a nan.
    """
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather_into_tensor(gathered.view(-1), tensor.view(-1), group=group)
    return gathered


def multiply_grads(params, factor):
    """Multiply the gradients of `params` by `factor`, in place."""
    grads = [param.grad for param in params if param.grad is not None]
    if grads:  # a rank may own no parameters, and torch's function refuses an empty list
        torch._foreach_mul_(grads, factor)


def clip_grads(params, max_norm, norm, error_if_nonfinite):
    """Multiply the gradients of `params` by max_norm / norm if this factor is below 1, as torch does. Return `norm`.

    norm: the norm of the gradients on all ranks, so all ranks have the same number.
    """
    if error_if_nonfinite and not norm.isfinite():  # so all ranks raise
        raise RuntimeError(f"the norm of all gradients is {norm.item()}: zero_grad() gives this step up")
    multiply_grads(params, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@untraced
def refuse_unseen(clip_name, params):
    """Raise RuntimeError if torch.nn.utils' function `clip_name` wouldn't find averages in the `grad` of `params`.

    A program may clip each rank's own gradients by value on purpose, so for clip_grad_value_() this is a warning.

    An owner of a parameter is an optimizer, or its buffer, that has a gradient hook on the parameter. There are two if
    a program has built a newer optimizer on the parameter. An owner may have:
        _param_grad_holds    what is in `param.grad`: "averages"; "own", the gradient of this rank; or "nothing"
        _is_moved(param)     whether a program has replaced `param.data`, which stage 4 can't update then
    """
    for param in params:
        owners = owners_of(param)
        if any(hasattr(owner, "_is_moved") and owner._is_moved(param) for owner in owners):
            raise data_replaced(f"of shape {tuple(param.shape)}")
        holds = {getattr(owner, "_param_grad_holds", None) for owner in owners}
        finds_none = "nothing" in holds and param.grad is None and param.requires_grad
        # With "nothing", too, there may be a gradient that isn't averaged: a backward pass in no_sync() leaves it
        # there, to be sent later.
        is_local = "averages" not in holds and not holds.isdisjoint(["own", "nothing"])
        finds_own = param.grad is not None and is_local
        if finds_own and clip_name == "clip_grad_value_":
            # One warning is enough for all parameters. stacklevel=5 names the line of the program: from here up come
            # the wrapper that `untraced` has made, clip_or_refuse(), torch's wrapper, and the program.
            warnings.warn("torch.nn.utils.clip_grad_value_() clips this rank's own gradient, not the average: call "
                          "finish_grad_sync() of the DistributedOptimizer first", stacklevel=5)
            return
        if finds_none or finds_own:
            finding = "no gradient" if finds_none else "this rank's own gradient, not the average,"
            raise RuntimeError(f"torch.nn.utils.{clip_name}() finds {finding} in param.grad: call "
                               "clip_grad_norm_(max_norm) of the DistributedOptimizer")


def refusing(clip):
    """Return a function that calls `refuse_unseen` and then torch's function `clip`."""
    @functools.wraps(clip)  # it sets the attribute `__wrapped__` to `clip`, which `unwatch` reads
    def clip_or_refuse(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # torch defines clip_grads_with_norm_ under the name _clip_grads_with_norm_.
        refuse_unseen(clip.__name__.lstrip("_"), parameters)
        return clip(parameters, *args, **kwargs)

    return clip_or_refuse


def watch_torch(optimizer):
    """Change functions of torch until the last DistributedOptimizer is gone. The constructor of `optimizer` calls this.

    The clipping functions then call `refuse_unseen` first. And model.zero_grad() becomes the function of dropping.py,
    which also drops gradients that aren't in param.grad.
    """
    if not ALIVE:
        for cell in CELLS:
            cell.cell_contents = refusing(cell.cell_contents)
        torch.nn.Module.zero_grad = zero_grad
    ALIVE.add(id(optimizer))
    # Python calls unwatch() when `optimizer` is gone, but not at exit, because no program clips then.
    weakref.finalize(optimizer, unwatch, id(optimizer)).atexit = False


def unwatch(optimizer_id):
    """Give torch its own functions again if no other optimizer exists."""
    ALIVE.remove(optimizer_id)
    if not ALIVE:
        for cell in CELLS:
            cell.cell_contents = cell.cell_contents.__wrapped__
        torch.nn.Module.zero_grad = TORCHS_ZERO_GRAD
