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
        RuntimeError: gradients can't be unscaled; or other optimizers train the model too, which would step although
            `optimizer` doesn't.
    """
    states = grad_scaler._per_optimizer_states  # id of an optimizer that the scaler steps -> dict
    scale = grad_scaler._get_scale_async()  # a tensor, without waiting for a GPU
    is_chained = hasattr(optimizer, "optimizers")
    members = optimizer.optimizers if is_chained else [optimizer]
    steps_a_member = any(id(member) in states for member in members) if is_chained else is_a_member(optimizer)
    if steps_a_member:
        raise RuntimeError("GradScaler takes a Chained of all optimizers of the model, not one of them: an inf in one "
                           "must skip all")
    state = states[id(optimizer)]
    is_unscaled = state["stage"] is OptState.UNSCALED
    if is_unscaled and optimizer._grads_elsewhere:
        raise RuntimeError("GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                           "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()")
    main_params = [main for member in members for main in all_params(member.optimizer)]
    grads = [main.grad for main in main_params if main.grad is not None]
    # An inf that unscale_() has noted counts, even if the program has replaced it since.
    is_inf = torch.zeros_like(scale)  # above 0: there is an inf or nan
    for number in state["found_inf_per_device"].values():
        is_inf += number.to(scale.device)
    if grads:
        factor = torch.ones_like(scale) if is_unscaled else scale.double().reciprocal().float()  # as unscale_() does
        torch._amp_foreach_non_finite_check_and_unscale_(grads, is_inf, factor)  # multiplies `grads`, sets `is_inf`
    mesh_groups = [group for member in members for group in member.state.mesh_groups]  # other parts of DTensors
    for group in dict.fromkeys([optimizer._agreement_group, *mesh_groups]):
        dist.all_reduce(is_inf, dist.ReduceOp.MAX, group=group)
    state["found_inf_per_device"] = {is_inf.device: is_inf}  # GradScaler.update() reads it
    return is_inf.item() > 0


def is_a_member(optimizer):
    """Return whether other optimizers train the same model: experts have one, and the rest of the model another."""
    if optimizer._chain is not None and optimizer._chain() is not None:  # a weak reference to a Chained
        return True
    divisor = optimizer.average_over
    return isinstance(divisor, dist.ProcessGroup) and divisor.size() > dist.get_world_size(optimizer._agreement_group)
