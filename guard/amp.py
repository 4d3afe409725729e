"""torch.amp.GradScaler, for fp16: an inf on any rank makes all of them skip the step.

GradScaler.unscale_() looks into `param.grad`; where the gradients were elsewhere it has seen nothing, and is refused.
Shown by tests/stages/test_models.py, and tests/stages/test_dtypes.py,
`test_unscale_that_sees_no_gradient_is_refused`.
"""

import warnings

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .groups import all_params, spread_over

# GradScaler must be told of an inf that another rank has found; that it passes itself to `step` is the only way so far.
warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)


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
