"""For whoever has gradients that are missing on some ranks, sparse or laid out otherwise, clips them, or has DDP.

Of stages 1 and 2. A parameter that a rank doesn't use counts as zero there; one that no rank uses keeps None, and isn't
stepped. Shown by tests/stages/test_stages.py, `test_unused_parameters_as_in_ddp_with_find_unused_parameters` and
`test_beneath_ddp`, and tests/stages/test_hostile.py, `test_gradients_assigned_by_hand_in_any_layout`.
"""

import torch

from .groups import all_params
from .hooks import hook_gradient


class AnyGrads:
    _grads_synced = False  # whether param.grad holds the average already

    @torch.no_grad()
    def shard(self, groups):
        super().shard(groups)
        self._grads_synced = False  # what the new ones have in param.grad is local
        for group in groups:
            for param in group["params"]:
                hook_gradient(param, self._on_grad_ready)

    @property
    def _param_grad_holds(self):
        return "averages" if self._grads_synced or not self.average_gradients else "own"

    def _on_grad_ready(self, param):
        self._grads_synced = False  # a backward pass after finish_grad_sync: what it added is local

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Average the gradients over the ranks, in place. Idempotent; `step` and `clip_grad_norm_` call it. Collective.

        A gradient that is missing on some ranks counts as zero there; one that is missing on all of them stays None.
        Sparse gradients become dense.
        """
        if self._grads_synced or not self.average_gradients:
            return
        params = all_params(self)  # frozen ones too: maybe only here
        grads = [dense_grad(param) for param in params]
        used = torch.tensor([param.grad is not None for param in params]).to(grads[0])
        self.average([*grads, used])  # a flag for each parameter travels behind the gradients
        for param, grad, is_used in zip(params, grads, used.tolist()):
            if is_used:
                param.grad = grad
        self._grads_synced = True

    def sync_params(self):
        super().sync_params()
        self._grads_synced = False

    def _skip_step(self):
        self._grads_synced = False

    def zero_grad(self, set_to_none=True):
        """Forget the gradients, averaged or not.

        After `clip_grad_norm_`, `model.zero_grad()` isn't enough: gradients that are assigned by hand then are not
        averaged, and where a backward pass follows on some ranks only, they wait for the others.
        """
        super().zero_grad(set_to_none)
        self._grads_synced = False

    def _averaged_params(self):
        return all_params(self)

    def _total_norm(self, norm_type):
        """Each rank has all of them."""
        return torch.nn.utils.get_total_norm([p.grad for p in all_params(self) if p.grad is not None], norm_type)


def dense_grad(param):
    """The gradient of `param`, or zeros, in the layout of `param`: fused kernels don't look at strides."""
    if param.grad is None:
        return torch.zeros_like(param)
    grad = param.grad.to_dense()  # itself unless it is sparse
    alike = grad.stride() == param.stride() and grad.dtype == param.dtype
    return grad if alike else torch.empty_like(param).copy_(grad)
