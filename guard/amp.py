"""For whoever trains in fp16 with torch.amp.GradScaler: an inf on any rank makes all of them skip the step.

GradScaler.unscale_() looks into `param.grad`; where the gradients were elsewhere it has seen nothing, and is refused.
Shown by tests/stages/test_models.py, and tests/stages/test_dtypes.py,
`test_unscale_that_sees_no_gradient_is_refused`.
"""

import warnings

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .groups import all_params

# GradScaler must be told of an inf that another rank has found; that it passes itself to `step` is the only way so far.
warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)


class Scaled:
    _step_supports_amp_scaling = True  # GradScaler then calls step() on every rank, whatever it finds on this one
    _grads_elsewhere = False  # whether there were gradients that are not in param.grad; stages 3 and 4 know

    def _found_inf(self, grad_scaler):
        """Unscale the gradients that this rank steps. -> whether any rank found an inf or nan in its own."""
        state, scale = grad_scaler._per_optimizer_states[id(self)], grad_scaler._get_scale_async()
        unscaled = state["stage"] is OptState.UNSCALED
        if unscaled and self._grads_elsewhere:
            raise RuntimeError("GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                               "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()")
        grads = [param.grad for param in all_params(self.optimizer) if param.grad is not None]
        found_inf = torch.zeros_like(scale)
        for found in state["found_inf_per_device"].values():  # by unscale_(): gradients may have been mended since
            found_inf += found.to(found_inf.device)
        if grads:
            factor = torch.ones_like(scale) if unscaled else scale.double().reciprocal().float()
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
        for group in self._groups_of_ranks():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
        state["found_inf_per_device"] = {found_inf.device: found_inf}  # where GradScaler.update() looks
        return found_inf.item() > 0

    def _groups_of_ranks(self):
        """-> the process groups over which the gradients of the model are spread."""
        return [self.process_group]
