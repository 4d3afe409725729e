"""Lets all ranks skip a step together if torch's GradScaler finds an inf or nan in a gradient on any rank.

Situation: a program trains in fp16. The gradient of an expert, which only some ranks have, becomes inf. Then all ranks
that train the model skip the step. If the model has several optimizers, for the expert and for the rest, a `Chained`
(guard/chained.py) steps them as one, and all of them skip the step. A skipped step calls no hooks, as in torch, and the
lr stays what a scheduler has set. Shown by tests/variants/test_skipping.py.
"""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .groups import all_params


def found_inf(optimizer, grad_scaler):
    """Divide the averaged gradients that this rank has by the scale. Return whether any rank has an inf or nan.

    Collective over all ranks that train the model. `step` of a DistributedOptimizer, or of a Chained, calls this
    function if `grad_scaler` has passed itself to `step`.

    Raises:
        RuntimeError: GradScaler.unscale_() hasn't seen the gradients; or other optimizers train the model too, which
            would step although `optimizer` doesn't.
    """
    states = grad_scaler._per_optimizer_states  # id of an optimizer that the scaler steps -> dict
    scale = grad_scaler._get_scale_async()  # the factor of the loss, a tensor; this call doesn't wait for a GPU
    is_chained = hasattr(optimizer, "optimizers")
    members = optimizer.optimizers if is_chained else [optimizer]
    # Whether the scaler steps an optimizer that belongs to a Chained, instead of the Chained.
    steps_a_member = any(id(member) in states for member in members) if is_chained else is_a_member(optimizer)
    if steps_a_member:
        raise RuntimeError("GradScaler takes a Chained of all optimizers of the model, not one of them: an inf in one "
                           "must skip all")
    state = states[id(optimizer)]
    is_unscaled = state["stage"] is OptState.UNSCALED  # whether the program has called unscale_()
    if is_unscaled and optimizer._grads_elsewhere:
        raise RuntimeError("GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                           "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()")
    # Main parameters are the tensors that the inner optimizers of this rank step: their `grad` is an averaged gradient.
    main_params = [main for member in members for main in all_params(member.optimizer)]
    grads = [main.grad for main in main_params if main.grad is not None]
    # If unscale_() has noted an inf, it counts, even if the program has changed the gradient since.
    is_inf = torch.zeros_like(scale)  # a number above 0 says that there is an inf or nan
    for number in state["found_inf_per_device"].values():
        is_inf += number.to(scale.device)
    if grads:
        # The reciprocal is computed in fp64, as unscale_() does it.
        factor = torch.ones_like(scale) if is_unscaled else scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, is_inf, factor)  # multiplies `grads`, sets `is_inf`
    # The ranks of these groups have other parts of the DTensors of which this rank has a part.
    mesh_groups = [group for member in members for group in member.state.mesh_groups]
    for group in dict.fromkeys([optimizer._agreement_group, *mesh_groups]):
        dist.all_reduce(is_inf, dist.ReduceOp.MAX, group=group)
    state["found_inf_per_device"] = {is_inf.device: is_inf}  # GradScaler.update() reads it
    return is_inf.item() > 0


def is_a_member(optimizer):
    """Return whether other optimizers train the same model, for example one for experts, and one for the other layers.

    `optimizer._chain` is a weak reference to the Chained that has the optimizer, or None. Without a Chained,
    `average_over` shows it, because an expert is on fewer ranks than the group over which its gradients are averaged.
    """
    if optimizer._chain is not None and optimizer._chain() is not None:
        return True
    divisor = optimizer.average_over
    return isinstance(divisor, dist.ProcessGroup) and divisor.size() > dist.get_world_size(optimizer._agreement_group)
