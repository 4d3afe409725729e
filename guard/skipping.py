"""Decides whether a step happens: in one place, over all ranks that train the model.

Situation: fp16, with an inf in one expert, which other ranks don't have; or a nan that variants/finite.py finds in one
optimizer of several. Then all ranks leave the step out, or raise the same error, in all optimizers of a `Chained`. A
step that is left out calls no hooks, as in torch, and keeps the lr that a scheduler has set. Shown by
tests/variants/test_skipping.py.
"""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .groups import all_params
from .refuse import agree


def is_left_out(optimizer, grad_scaler):
    """Return whether all ranks leave out this step, after the gradients were averaged. Collective.

    Args:
        optimizer: an optimizer, or a `Chained`.
        grad_scaler: the torch.amp.GradScaler that calls `step`, or None.
    """
    has_inf = grad_scaler is not None and found_inf(optimizer, grad_scaler)
    return has_inf or bool(optimizer._bad_grads)


def found_inf(optimizer, grad_scaler):
    """Unscale the gradients of this rank's shards. Collective. Returns whether any rank found an inf or nan.

    Raises:
        RuntimeError: gradients can't be unscaled, or other ranks or optimizers of the model would not hear of an inf.
    """
    states, scale = grad_scaler._per_optimizer_states, grad_scaler._get_scale_async()
    parts = getattr(optimizer, "optimizers", [])
    if not parts and is_a_part(optimizer) or any(id(part) in states for part in parts):
        raise RuntimeError("GradScaler takes a Chained of all optimizers of the model, not one of them: an inf in one "
                           "must skip all")
    state = states[id(optimizer)]
    is_unscaled = state["stage"] is OptState.UNSCALED
    if is_unscaled and optimizer._grads_elsewhere:
        raise RuntimeError("GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                           "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()")
    params = [param for part in parts or [optimizer] for param in all_params(part.optimizer)]
    grads = [param.grad for param in params if param.grad is not None]
    # An inf that unscale_() has found counts, even if the gradient was repaired since.
    found_before = state["found_inf_per_device"].values()
    is_inf = sum((number.to(scale.device) for number in found_before), torch.zeros_like(scale))
    if grads:
        factor = torch.ones_like(scale) if is_unscaled else scale.double().reciprocal().float()  # as unscale_() does
        torch._amp_foreach_non_finite_check_and_unscale_(grads, is_inf, factor)
    mesh_groups = [group for part in parts or [optimizer] for groups in part.state.main_params_by_mesh_groups
                   for group in groups]
    for group in dict.fromkeys([optimizer._agreement_group, *mesh_groups]):
        dist.all_reduce(is_inf, dist.ReduceOp.MAX, group=group)
    state["found_inf_per_device"] = {is_inf.device: is_inf}  # GradScaler.update() reads it
    return is_inf.item() > 0


def is_a_part(optimizer):
    """Return whether other optimizers, as those of experts, train the same model, on more ranks maybe."""
    if optimizer._chain is not None and optimizer._chain() is not None:
        return True
    over, n_ranks = optimizer.average_over, dist.get_world_size(optimizer._agreement_group)
    return isinstance(over, dist.ProcessGroup) and over.size() > n_ranks


def agree_on_bad_grads(chain):
    """Return whether any optimizer of `chain` found a nan or inf, on any rank. Collective.

    Raises:
        RuntimeError: on every rank, with the gradients dropped, if one that found it doesn't skip steps.
    """
    device = all_params(chain)[0].device
    bad = [part for part in chain.optimizers if part._bad_grads]
    errors = [RuntimeError(part._bad_grads) for part in bad if not part.skip]
    try:
        agree(errors[0] if errors else None, {}, chain._agreement_group, device)
    except RuntimeError:
        chain.zero_grad()
        raise
    return is_true_anywhere(bool(bad), chain._agreement_group, device)


def is_true_anywhere(flag, process_group, device):
    flag = torch.tensor(int(flag), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=process_group)
    return flag.item() > 0
