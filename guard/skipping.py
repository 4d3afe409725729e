"""Decides whether a step happens: in one place, over all ranks that train the model.

Situation: a program trains in fp16, and finds an inf in one expert, which other ranks don't have. Then all ranks leave
the step out, in all optimizers of a `Chained`. A step that is left out calls no hooks, as in torch, and keeps the lr
that a scheduler has set. Shown by tests/variants/test_skipping.py.
"""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .groups import all_params


def found_inf(optimizer, grad_scaler):
    """Unscale the gradients of this rank's shards. Returns whether any rank has found an inf or nan. Collective.

    Raises:
        RuntimeError: gradients can't be unscaled; or other optimizers train the model too, and a step of `optimizer`
            that is left out wouldn't be left out there.
    """
    states = grad_scaler._per_optimizer_states
    scale = grad_scaler._get_scale_async()
    is_chained = hasattr(optimizer, "optimizers")
    parts = optimizer.optimizers if is_chained else [optimizer]
    steps_a_part = any(id(part) in states for part in parts) if is_chained else is_a_part(optimizer)
    if steps_a_part:
        raise RuntimeError("GradScaler takes a Chained of all optimizers of the model, not one of them: an inf in one "
                           "must skip all")
    state = states[id(optimizer)]
    is_unscaled = state["stage"] is OptState.UNSCALED
    if is_unscaled and optimizer._grads_elsewhere:
        raise RuntimeError("GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                           "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()")
    params = [param for part in parts for param in all_params(part.optimizer)]
    grads = [param.grad for param in params if param.grad is not None]
    # An inf that unscale_() has found counts, even if the program has replaced it since.
    found_before = state["found_inf_per_device"].values()
    is_inf = sum((number.to(scale.device) for number in found_before), torch.zeros_like(scale))
    if grads:
        factor = torch.ones_like(scale) if is_unscaled else scale.double().reciprocal().float()  # as unscale_() does
        torch._amp_foreach_non_finite_check_and_unscale_(grads, is_inf, factor)
    mesh_groups = [group for part in parts for group in part.state.mesh_groups]
    for group in dict.fromkeys([optimizer._agreement_group, *mesh_groups]):
        dist.all_reduce(is_inf, dist.ReduceOp.MAX, group=group)
    state["found_inf_per_device"] = {is_inf.device: is_inf}  # GradScaler.update() reads it
    return is_inf.item() > 0


def is_a_part(optimizer):
    """Return whether other optimizers train the same model: experts have one, and the rest of the model another."""
    if optimizer._chain is not None and optimizer._chain() is not None:
        return True
    divisor = optimizer.average_over
    return isinstance(divisor, dist.ProcessGroup) and divisor.size() > dist.get_world_size(optimizer._agreement_group)
