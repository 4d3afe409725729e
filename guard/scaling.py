"""Scales averaged gradients: clips them, or multiplies them by a factor.

Each rank has a part of the gradients. The norm is that of the whole model. torch.nn.utils' clipping, as in Trainer,
accelerate, Lightning and many loops, reads `param.grad` itself. It is refused, because it would find no gradient, or
the rank's own one. Shown by tests/stages/test_contract.py, `test_clipping_equals_torch_on_the_whole_model`,
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
# Programs import these functions by name. So the functions stay, and what they call is replaced: torch.no_grad has
# wrapped each of them, and the wrapper keeps the function itself in a closure cell.
CELLS = [cell for function in CLIPS for cell in function.__closure__ or ()]
if len(CELLS) != len(CLIPS):
    raise ImportError(f"torch {torch.__version__} wraps clipping anew: see guard/scaling.py")
ALIVE: set[int] = set()  # ids of the optimizers that are alive


def total_norm(optimizer, norm_type):
    """Return the norm of all averaged gradients, a scalar tensor; each element counts once. Collective.

    The norm of a whole is the norm of the norms of its parts. The parts are on the ranks of the process group; those of
    a DTensor also on the ranks of the groups in its mesh.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: it must be above 0, shards can't tell the number of tensors")
    norms = []
    state = optimizer.state
    for groups, main_params in state.main_params_by_mesh_groups.items():
        # torch's norm of an empty list would be on the CPU.
        grads = [main.grad for main in main_params if main.grad is not None] or [torch.zeros(1, device=state.device)]
        norm = torch.nn.utils.get_total_norm(grads, norm_type).to(state.norm_dtype)
        for group in (optimizer.process_group, *groups):
            norm = torch.linalg.vector_norm(gather(norm, group), float(norm_type))
        norms.append(norm)
    norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    for group in dict.fromkeys(group for groups in state.main_params_by_mesh_groups for group in groups):
        norm = gather(norm, group).max()  # sums may be rounded differently by rank, and all ranks must clip alike
    return norm


def gather(tensor, group):
    """Return the tensor of each rank, (d, …). It isn't reduced, because a collective's MAX may lose a nan."""
    gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather_into_tensor(gathered.view(-1), tensor.view(-1), group=group)
    return gathered


def multiply_grads(params, factor):
    grads = [param.grad for param in params if param.grad is not None]
    if grads:  # a rank may own nothing
        torch._foreach_mul_(grads, factor)


def clip_grads(params, max_norm, norm, error_if_nonfinite):
    """Scale the gradients of `params` by max_norm / norm, if that is less than 1, as torch does. Returns norm."""
    if error_if_nonfinite and not norm.isfinite():  # the same on every rank
        raise RuntimeError(f"the norm of all gradients is {norm.item()}: zero_grad() gives this step up")
    multiply_grads(params, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@untraced
def refuse_unseen(clip_name, params):
    """Raise RuntimeError if that function of torch.nn.utils wouldn't find averaged gradients in `param.grad`.

    A rank may clip its own gradients by value on purpose, so clip_grad_value_() is a warning. Each owner of a hook of
    ours says what `param.grad` holds: "averages"; "own", the gradient of this rank; or "nothing". A parameter has two
    owners if a newer optimizer has been built on it.
    """
    for param in params:
        owners = owners_of(param)
        if any(hasattr(owner, "_is_moved") and owner._is_moved(param) for owner in owners):
            raise data_replaced(f"of shape {tuple(param.shape)}")
        holds = {getattr(owner, "_param_grad_holds", None) for owner in owners}
        finds_none = "nothing" in holds and param.grad is None and param.requires_grad
        finds_own = param.grad is not None and holds & {"own", "nothing"} and "averages" not in holds
        if finds_own and clip_name == "clip_grad_value_":
            # One warning is enough for all parameters. The fourth caller is the user's code.
            warnings.warn("torch.nn.utils.clip_grad_value_() clips this rank's own gradient, not the average: call "
                          "finish_grad_sync() of the DistributedOptimizer first", stacklevel=4)
            return
        if finds_none or finds_own:
            what = "no gradient" if finds_none else "this rank's own gradient, not the average,"
            raise RuntimeError(f"torch.nn.utils.{clip_name}() finds {what} in param.grad: call "
                               "clip_grad_norm_(max_norm) of the DistributedOptimizer")


def refusing(clip):
    """Return torch's function `clip`, preceded by `refuse_unseen`."""
    @functools.wraps(clip)
    def clip_or_refuse(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        refuse_unseen(clip.__name__.lstrip("_"), parameters)  # torch's own name of one begins with _
        return clip(parameters, *args, **kwargs)

    return clip_or_refuse


def watch_torch(optimizer):
    """Let torch's clipping functions check what they are given, and model.zero_grad() drop what has left `param.grad`.

    This lasts as long as any optimizer is alive. It changes the functions and not their names in torch.nn.utils,
    because programs import them by name, often before they build an optimizer.
    """
    if not ALIVE:
        for cell in CELLS:
            cell.cell_contents = refusing(cell.cell_contents)
        torch.nn.Module.zero_grad = zero_grad
    ALIVE.add(id(optimizer))
    weakref.finalize(optimizer, unwatch, id(optimizer)).atexit = False  # as Python ends nobody clips


def unwatch(optimizer_id):
    ALIVE.remove(optimizer_id)
    if not ALIVE:
        for cell in CELLS:
            cell.cell_contents = cell.cell_contents.__wrapped__
        torch.nn.Module.zero_grad = TORCHS_ZERO_GRAD
