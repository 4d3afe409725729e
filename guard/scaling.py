"""Averaged gradients are scaled: clipped, or unscaled for torch.amp.GradScaler.

Each rank has a part of them. The norm is that of the whole model, an inf on any rank makes all of them skip the step,
and what looks into `param.grad` itself is refused, for it finds no gradient there, or this rank's own: torch.nn.utils'
clipping, as Trainer, accelerate, Lightning and many a loop do, and GradScaler.unscale_(). Shown by
tests/stages/test_contract.py, `test_clipping_equals_torch_on_the_whole_model`, tests/stages/test_users.py,
`test_torchs_clipping_is_refused`, tests/stages/test_dtypes.py, `test_unscale_that_sees_no_gradient_is_refused`, and of
DTensors by tests/stages/test_dtensor.py.
"""

import functools
import warnings
import weakref

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .groups import all_params, spread_over
from .hooks import untraced

CLIPS = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grads_with_norm_
CELLS = [cell for clip in CLIPS for cell in clip.__closure__ or ()]  # of a decorator of torch: what it calls
ALIVE: set[int] = set()  # ids of the optimizers that have not been dropped


def total_norm(optimizer, norm_type):
    """-> the norm of the averaged gradients, a scalar tensor: each element counts once. Collective."""
    params = all_params(optimizer)
    dtype = functools.reduce(torch.promote_types, {param.dtype for param in params}, torch.float32)
    grads = {spread_over(param): [] for param in params}  # by process groups; the same on every rank
    for param, main in optimizer.state.main_param.items():
        if main.grad is not None:
            grads[spread_over(param)].append(main.grad)
    norms = []
    for groups, part in grads.items():
        part = part or [torch.zeros(1, device=params[0].device)]  # torch's norm of nothing is on the host
        norm = torch.nn.utils.get_total_norm(part, norm_type).to(dtype)
        for group in (optimizer.process_group, *groups):
            norm = torch.linalg.vector_norm(gather_scalar(norm, group), float(norm_type))
        norms.append(norm)
    norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    for group in dict.fromkeys(group for groups in grads for group in groups):
        norm = gather_scalar(norm, group).max()  # shards of unlike sizes round otherwise: copies would drift apart
    return norm


def gather_scalar(scalar, group):
    """-> that of each rank, (d,). Not reduced on the way: a collective's MAX may lose a nan."""
    everyone = scalar.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, scalar.view(1), group=group)
    return everyone


def found_inf(optimizer, grad_scaler):
    """Unscale the gradients that this rank steps. Collective. -> whether any rank found an inf or nan in its own."""
    state, scale = grad_scaler._per_optimizer_states[id(optimizer)], grad_scaler._get_scale_async()
    unscaled = state["stage"] is OptState.UNSCALED
    if unscaled and optimizer._grads_elsewhere:
        raise RuntimeError("GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                           "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()")
    grads = [param.grad for param in all_params(optimizer.optimizer) if param.grad is not None]
    found = torch.zeros_like(scale)
    for before in state["found_inf_per_device"].values():  # by unscale_(): gradients may have been mended since
        found += before.to(found.device)
    if grads:
        factor = torch.ones_like(scale) if unscaled else scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
    others = [group for param in all_params(optimizer) for group in spread_over(param)]
    for group in dict.fromkeys([optimizer.process_group, *others]):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    state["found_inf_per_device"] = {found.device: found}  # where GradScaler.update() looks
    return found.item() > 0


@untraced
def refuse_unseen(clip, params):
    """RuntimeError where `clip`, a name in torch.nn.utils, can't see the gradients whole. By value a rank may clip its
    own on purpose: a warning, of which Python shows one.

    The owner of a hook of ours says what `param.grad` holds: "averages"; "own", of this rank; or "nothing".
    """
    for param in params:
        holds = {getattr(getattr(hook, "owner", type(None))(), "_param_grad_holds", None)
                 for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()}
        finds_none = "nothing" in holds and param.grad is None and param.requires_grad
        # there may be an older optimizer, and a newer one
        finds_own = param.grad is not None and holds & {"own", "nothing"} and "averages" not in holds
        if finds_own and clip == "clip_grad_value_":
            return warnings.warn("torch.nn.utils.clip_grad_value_() clips this rank's own gradient, not the average: "
                                 "call finish_grad_sync() of the DistributedOptimizer first", stacklevel=4)
        if finds_none or finds_own:
            what = "no gradient" if finds_none else "this rank's own gradient, not the average,"
            raise RuntimeError(f"torch.nn.utils.{clip}() finds {what} in param.grad: call clip_grad_norm_(max_norm) of "
                               "the DistributedOptimizer")


def refusing(clip):
    @functools.wraps(clip)
    def clip_or_refuse(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        refuse_unseen(clip.__name__.lstrip("_"), parameters)
        return clip(parameters, *args, **kwargs)

    return clip_or_refuse


def watch_torchs_clipping(optimizer):
    """While any optimizer lives torch's functions ask whose gradients they are given.

    They themselves, no names in a module: programs import them by name, often before the first optimizer is built.
    """
    if not ALIVE:
        for cell in CELLS:
            cell.cell_contents = refusing(cell.cell_contents)
    ALIVE.add(id(optimizer))
    weakref.finalize(optimizer, unwatch, id(optimizer)).atexit = False


def unwatch(number):
    ALIVE.remove(number)
    if not ALIVE:
        for cell in CELLS:
            cell.cell_contents = cell.cell_contents.__wrapped__
