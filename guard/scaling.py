"""Scales averaged gradients: clips them, or multiplies them by a factor.

Each rank has a part of the gradients, and the norm is the norm of all parts. The clipping functions of torch.nn.utils,
which Trainer, accelerate, Lightning and many loops call, read `param.grad`. There they would find no gradient, or a
gradient that isn't averaged yet. So a call of them is an error. Shown by tests/stages/test_contract.py,
`test_clipping_equals_torch_on_the_whole_model`, tests/stages/test_users.py, `test_torchs_clipping_is_refused`,
and for DTensors by tests/stages/test_dtensor.py.
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
# Each of CLIPS is a wrapper that torch.no_grad has made. Its closure cell holds the function that clips. `watch_torch`
# replaces the content of the cell, so that programs which have imported the wrapper by name are checked, too.
CELLS = [cell for function in CLIPS for cell in function.__closure__ or ()]
if len(CELLS) != len(CLIPS):
    raise ImportError(f"torch {torch.__version__} wraps clipping anew: see guard/scaling.py")
ALIVE: set[int] = set()  # ids of all DistributedOptimizers that exist


def total_norm(optimizer, norm_type):
    """Return the norm of all averaged gradients, a scalar tensor; each element counts once. Collective.

    The norm of a whole is the norm of the norms of its parts. The ranks of the process group have the parts of a
    gradient. A DTensor's gradient is also cut over the ranks of other process groups, its mesh groups.
    """
    # A norm of type 0 counts tensors. A shard doesn't know how many tensors it has parts of.
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: it must be above 0, shards can't tell the number of tensors")
    norms = []
    state = optimizer.state
    for mesh_groups, main_params in state.main_params_by_mesh_groups.items():
        grads = [main.grad for main in main_params if main.grad is not None]
        if not grads:
            grads = [torch.zeros(1, device=state.device)]  # because torch's norm of an empty list is on the CPU
        norm = torch.nn.utils.get_total_norm(grads, norm_type).to(state.norm_dtype)
        for group in (optimizer.process_group, *mesh_groups):
            norm = torch.linalg.vector_norm(tensors_of_ranks(norm, group), float(norm_type))
        norms.append(norm)
    norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    for group in state.mesh_groups:
        norm = tensors_of_ranks(norm, group).max()  # ranks may round the sum differently, and all ranks must clip alike
    return norm


def tensors_of_ranks(tensor, group):
    """Return the `tensor` of each rank, (d, …). Callers reduce the result: a collective's own MAX may lose a nan."""
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather_into_tensor(gathered.view(-1), tensor.view(-1), group=group)
    return gathered


def multiply_grads(params, factor):
    """Multiply the gradients of `params` by `factor`, in place."""
    grads = [param.grad for param in params if param.grad is not None]
    if grads:  # torch refuses an empty list, and a rank may own nothing
        torch._foreach_mul_(grads, factor)


def clip_grads(params, max_norm, norm, error_if_nonfinite):
    """Scale the gradients of `params` by max_norm / norm, if this factor is below 1, as torch does. Returns norm."""
    if error_if_nonfinite and not norm.isfinite():  # all ranks have the same norm
        raise RuntimeError(f"the norm of all gradients is {norm.item()}: zero_grad() gives this step up")
    multiply_grads(params, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@untraced
def refuse_unseen(clip_name, params):
    """Raise RuntimeError if torch.nn.utils' function `clip_name` wouldn't find averages in the `grad` of `params`.

    A rank may clip its own gradients by value on purpose, so clip_grad_value_() is a warning.

    An optimizer, or its buffer, has a hook on each of its parameters. It says in `_param_grad_holds` what `param.grad`
    holds: "averages"; "own", the gradient of this rank; or "nothing". A parameter has two such owners if a program has
    built a newer optimizer on it.
    """
    for param in params:
        owners = owners_of(param)
        if any(hasattr(owner, "_is_moved") and owner._is_moved(param) for owner in owners):
            raise data_replaced(f"of shape {tuple(param.shape)}")
        holds = {getattr(owner, "_param_grad_holds", None) for owner in owners}
        finds_none = "nothing" in holds and param.grad is None and param.requires_grad
        # Where an owner keeps "nothing" in `param.grad`, a gradient there isn't averaged: no_sync() has left it, say.
        is_local = "averages" not in holds and not holds.isdisjoint(["own", "nothing"])
        finds_own = param.grad is not None and is_local
        if finds_own and clip_name == "clip_grad_value_":
            # One warning is enough for all parameters. The fourth caller is the user's code.
            warnings.warn("torch.nn.utils.clip_grad_value_() clips this rank's own gradient, not the average: call "
                          "finish_grad_sync() of the DistributedOptimizer first", stacklevel=4)
            return
        if finds_none or finds_own:
            finding = "no gradient" if finds_none else "this rank's own gradient, not the average,"
            raise RuntimeError(f"torch.nn.utils.{clip_name}() finds {finding} in param.grad: call "
                               "clip_grad_norm_(max_norm) of the DistributedOptimizer")


def refusing(clip):
    """Return a function that calls `refuse_unseen` and then torch's function `clip`; `unwatch` finds `__wrapped__`."""
    @functools.wraps(clip)
    def clip_or_refuse(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        refuse_unseen(clip.__name__.lstrip("_"), parameters)  # torch defines _clip_grads_with_norm_
        return clip(parameters, *args, **kwargs)

    return clip_or_refuse


def watch_torch(optimizer):
    """Change functions of torch until the last DistributedOptimizer is gone.

    The clipping functions call `refuse_unseen` first. And model.zero_grad() becomes the function of dropping.py, which
    also drops gradients that aren't in param.grad.
    """
    if not ALIVE:
        for cell in CELLS:
            cell.cell_contents = refusing(cell.cell_contents)
        torch.nn.Module.zero_grad = zero_grad
    ALIVE.add(id(optimizer))
    weakref.finalize(optimizer, unwatch, id(optimizer)).atexit = False  # no program clips while Python ends


def unwatch(optimizer_id):
    """Give torch its own functions again if no other optimizer exists."""
    ALIVE.remove(optimizer_id)
    if not ALIVE:
        for cell in CELLS:
            cell.cell_contents = cell.cell_contents.__wrapped__
        torch.nn.Module.zero_grad = TORCHS_ZERO_GRAD
