"""For whoever calls GradScaler.unscale_() to clip: it looks into param.grad, where the gradients are not any more.

The same file stands in stages 3 and 4. Shown by tests/stages/test_dtypes.py,
`test_unscale_that_sees_no_gradient_is_refused`.
"""

from torch.amp.grad_scaler import OptState


class RefusesUnscale:
    """`grads_elsewhere`, of the stage: whether there were gradients that are not in `param.grad`."""

    def found_inf(self, grad_scaler):
        if grad_scaler is not None and self.grads_elsewhere:
            if grad_scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED:
                raise RuntimeError(
                    "GradScaler.unscale_() looks into param.grad, and gradients were elsewhere: call "
                    "clip_grad_norm_(max_norm * scaler.get_scale()) instead, which needs no unscale_()"
                )
        return super().found_inf(grad_scaler)
