"""What rung 0 does with DTensors: inside it is what lies on this rank, outside what users gave, and ranks agree."""

import contextlib

import torch
import torch.distributed as dist


def local(tensor):
    """Of a DTensor what lies on this rank; of anything else, itself."""
    return getattr(tensor, "_local_tensor", tensor)  # to_local() would be another tensor each time


class OfDTensors:
    """Before the class that averages and steps. Its inner optimizer sees tensors, and has its state by them: torch's
    kernels refuse lists of both kinds.
    """

    @torch.no_grad()
    def sync_grads(self):
        """Sequence parallelism leaves partial sums: a gradient is laid out as its parameter is. Collective."""
        for param in self.params():
            if hasattr(param, "placements"):
                param.grad = param.grad.redistribute(placements=param.placements)
        super().sync_grads()

    def step_own(self):
        with self._local_params():
            super().step_own()

    def state_dict(self):
        """This rank's part, in tensors, where parameters are DTensors."""
        with self._local_params():
            return super().state_dict()

    def load_state_dict(self, state_dict):
        with self._local_params():
            super().load_state_dict(state_dict)

    @contextlib.contextmanager
    def _local_params(self):
        """Without what has no element on this rank, which CUDA's fused kernels refuse."""
        outside = [group["params"] for group in self.param_groups]
        spread = [param for param in sum(outside, []) if local(param) is not param]
        for group in self.param_groups:
            group["params"] = [local(param) for param in group["params"] if local(param).numel()]
        for param in spread:
            local(param).grad = local(param.grad)
        try:
            yield
        finally:
            for param in spread:
                local(param).grad = None
            for group, params in zip(self.param_groups, outside):
                group["params"] = params


def clip_grad_norm_(params, max_norm, norm_type):
    """As torch's, of tensors and DTensors. -> the norm before, a scalar tensor. Collective over meshes."""
    grads = [param.grad for param in params]
    norms = torch.stack([as_tensor(torch.linalg.vector_norm(grad, float(norm_type))) for grad in grads])
    norm = torch.linalg.vector_norm(norms, float(norm_type))
    torch._foreach_mul_([local(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


def as_tensor(value):
    """A number, a tensor or a DTensor, maybe of partial sums -> a tensor that every rank of its mesh has."""
    return value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)


def mean_over_ranks(loss, process_group):
    """-> the mean of what the ranks of `process_group` pass, a scalar tensor; None: nothing. Collective."""
    if loss is None:
        return None
    loss = as_tensor(loss).detach().clone()
    dist.all_reduce(loss, group=process_group)
    return loss / dist.get_world_size(process_group)
