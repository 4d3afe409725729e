"""For whoever clips gradients: the norm is that of the whole model, though each rank has a part of the gradients.

Shown by tests/stages/test_contract.py, `test_clipping_equals_torch_on_the_whole_model`.
"""

import functools

import torch
import torch.distributed as dist

from .groups import all_params


class Clipped:
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the averaged gradients of the whole model to a norm of at most `max_norm`. Collective.

        Returns the norm before clipping, a scalar tensor.
        """
        self.finish_grad_sync()
        total_norm = self._total_norm(norm_type)
        torch.nn.utils.clip_grads_with_norm_(self._averaged_params(), max_norm, total_norm)
        return total_norm

    def _averaged_params(self):
        """-> those whose averaged gradients this rank has."""
        return all_params(self.optimizer)

    def _total_norm(self, norm_type):
        grads = [param.grad for param in all_params(self.optimizer) if param.grad is not None]
        return self._norm_over_ranks(grads, norm_type, [self.process_group])

    def _norm_over_ranks(self, grads, norm_type, process_groups):
        """-> the norm of what all ranks of `process_groups` pass: that of their norms."""
        params = all_params(self)
        dtype = functools.reduce(torch.promote_types, {param.dtype for param in params}, torch.float32)
        norm = torch.nn.utils.get_total_norm(grads, norm_type).to(params[0].device, dtype)
        for group in process_groups:
            norm = torch.linalg.vector_norm(gather_scalar(norm, group), float(norm_type))
        return norm


def gather_scalar(scalar, group):
    """-> that of each rank, (d,). Not reduced on the way: a collective's MAX may lose a nan."""
    everyone = scalar.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, scalar.view(1), group=group)
    return everyone
