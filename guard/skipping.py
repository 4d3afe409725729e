"""Lets all ranks skip a step together if torch's GradScaler finds an inf or nan in a gradient on any rank.

Situation: a program trains in fp16. The gradient of an expert, which only some ranks have, becomes inf. Then all ranks
that train the model skip the step. A skipped step calls no hooks, as in torch, and leaves the lr as a scheduler has set
it. Shown by tests/variants/test_skipping.py.

    Chained            an optimizer that steps several optimizers as one, for example an expert's and the other layers'
                       (guard/chained.py); they are its members
    inner optimizer    an optimizer of torch, such as AdamW, which updates this rank's part of the parameters
    main parameter     a tensor that an inner optimizer updates; its `grad` is an averaged gradient
"""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .groups import all_params


def found_inf(optimizer, grad_scaler):
    """Divide this rank's averaged gradients by the scale. Return whether any rank has an inf or nan.

    Collective over all ranks that train the model. The scaler passes itself to `optimizer.step`, which calls this
    function. `optimizer` is a DistributedOptimizer or a Chained.

    Raises RuntimeError:
        - The program has called GradScaler.unscale_() while gradients weren't in param.grad.
        - Other optimizers train the model too, without a Chained. They would step although `optimizer` doesn't.
    """
    scaler_states = grad_scaler._per_optimizer_states  # id of an optimizer that the scaler steps -> dict
    scale = grad_scaler._get_scale_async()  # the factor of the loss, a tensor; this call doesn't wait for a GPU
    if hasattr(optimizer, "optimizers"):  # it is a Chained
        members = optimizer.optimizers
        scaler_has_member = any(id(member) in scaler_states for member in members)
    else:
        members = [optimizer]
        scaler_has_member = is_a_member(optimizer)
    if scaler_has_member:  # instead of the Chained
        raise RuntimeError("GradScaler takes a Chained of all optimizers of the model, not one of them: an inf in one "
                           "must skip all")
    scaler_state = scaler_states[id(optimizer)]
    is_unscaled = scaler_state["stage"] is OptState.UNSCALED  # whether the program has called unscale_()
    # `_grads_elsewhere`: whether gradients of this step were ever outside of param.grad, for example in a buffer.
    if is_unscaled and optimizer._grads_elsewhere:
        raise RuntimeError("GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                           "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()")
    # `member.optimizer` is the inner optimizer of a member.
    main_params = [main for member in members for main in all_params(member.optimizer)]
    grads = [main.grad for main in main_params if main.grad is not None]
    # If unscale_() has noted an inf, it counts, even if the program has changed the gradient since.
    is_inf = torch.zeros_like(scale)  # a number above 0 says that there is an inf or nan
    for number in scaler_state["found_inf_per_device"].values():
        is_inf += number.to(scale.device)
    if grads:
        # The reciprocal is computed in fp64, as unscale_() does it.
        factor = torch.ones_like(scale) if is_unscaled else scale.double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, is_inf, factor)  # multiplies `grads`, sets `is_inf`
    # The ranks that have the other parts of this rank's DTensors. `_agreement_group`: all ranks that train the model.
    mesh_groups = [group for member in members for group in member.state.mesh_groups]
    for group in dict.fromkeys([optimizer._agreement_group, *mesh_groups]):
        dist.all_reduce(is_inf, dist.ReduceOp.MAX, group=group)
    scaler_state["found_inf_per_device"] = {is_inf.device: is_inf}  # GradScaler.update() reads it
    return is_inf.item() > 0


def is_a_member(optimizer):
    """Return whether other optimizers train the same model.

    Either the optimizer belongs to a Chained, or it is an expert's: then fewer ranks have the expert than average its
    gradients.
    """
    # None, or a weak reference: a call returns the Chained, or None if the Chained is gone.
    if optimizer._chain is not None and optimizer._chain() is not None:
        return True
    group = optimizer.average_over  # the group over which gradients are averaged; or a number, or None
    return isinstance(group, dist.ProcessGroup) and group.size() > dist.get_world_size(optimizer._agreement_group)
