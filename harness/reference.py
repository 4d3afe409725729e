"""What rows must agree with: nothing is sharded, every rank steps every parameter; in 32 bits, in 16, and rounded."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like
from torch.nn.parallel import DistributedDataParallel

from harness.training import MainParamsTraining


def local(tensor):
    """Of a DTensor what lies on this rank; of anything else, itself."""
    return getattr(tensor, "_local_tensor", tensor)  # to_local() would be another tensor each time


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


class DistributedOptimizer(torch.optim.Optimizer):
    """Averages gradients over the ranks, unless DDP has, and steps all parameters. Arguments: those of stage 1.

    Of a tensor-parallel model `process_group` is the data-parallel dimension of the mesh, mesh["dp"].get_group(). The
    inner optimizer sees tensors, and has its state by them: torch's kernels refuse lists of both kinds.
    Without: parameters that some ranks don't use, several dtypes, loss scaling, errors that say what is wrong.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, average_gradients=True,
                 **optimizer_kwargs):
        self.process_group, self.average_gradients = process_group, average_gradients
        self.grads_synced = False
        self.optimizer = optimizer_cls([{"params": []}], **optimizer_kwargs)
        self.optimizer.param_groups.clear()  # torch wants a group; `add_param_group` adds the real ones
        super().__init__(params, self.optimizer.defaults)
        self.share()

    def share(self):
        """Our groups and state are the inner optimizer's, which steps everything."""
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    @torch.no_grad()
    def add_param_group(self, param_group):
        self.optimizer.add_param_group(param_group)
        for param in self.optimizer.param_groups[-1]["params"]:
            dist.broadcast(local(param), group=self.process_group, group_src=0)

    def params(self):
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]

    @contextlib.contextmanager
    def local_params(self):
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

    @torch.no_grad()
    def sync_grads(self):
        """Sequence parallelism leaves partial sums: a gradient is laid out as its parameter is. Collective."""
        for param in self.params():
            if hasattr(param, "placements"):
                param.grad = param.grad.redistribute(placements=param.placements)
        grads = [local(param.grad) for param in self.params()]
        flat = flatten(grads)  # (numel of all,)
        flat /= dist.get_world_size(self.process_group)
        dist.all_reduce(flat, group=self.process_group)
        torch._foreach_copy_(grads, cut_like(flat, grads))

    def step_own(self):
        with self.local_params():
            self.optimizer.step()

    def sync_params(self):
        """Every rank has stepped them all."""

    def finish_grad_sync(self):
        if self.average_gradients and not self.grads_synced:
            self.sync_grads()
            self.grads_synced = True

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = mean_over_ranks(closure(), self.process_group)
        self.finish_grad_sync()
        self.step_own()
        self.sync_params()
        self.grads_synced = False
        return loss

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.grads_synced = False

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        self.finish_grad_sync()
        return clip_grad_norm_(self.params(), max_norm, norm_type)

    def no_sync(self):
        """Gradients travel in `step` only: there is nothing to leave out."""
        return contextlib.nullcontext()

    def state_dict(self):
        """This rank's part, in tensors, where parameters are DTensors."""
        with self.local_params():
            return super().state_dict()

    def load_state_dict(self, state_dict):
        with self.local_params():
            self.optimizer.load_state_dict(state_dict)
            self.share()


def in_ddp(model, bucket_cap_mb=None, hook=None, **options):
    """`bucket_cap_mb`: of DDP, in MiB; None is its default, 25. `hook`: a communication hook of DDP."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def bf16_sum(_, bucket):
    """What torch's bf16_compress_hook does, which refuses gloo."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def in_16_bits(alone=False, **how):
    """AdamW on fp32 copies, on every rank. `alone`: gradients stay there. `how`: see MainParamsTraining."""
    return lambda model, adamw: MainParamsTraining(model, adamw, 1 if alone else dist.get_world_size(), **how)


# What rows of variants must agree with, of 32 bits: the same, with what they round, rounded.
rounded = functools.partial(in_16_bits, divided_in=torch.float32)


def ddp_16bit(bucket_cap_mb=None):
    """DDP averages 16-bit gradients while backward runs, and AdamW steps fp32 copies on every rank."""
    def build(model, adamw):
        training = MainParamsTraining(model, adamw, world_size=1)
        training.forward = in_ddp(model, bucket_cap_mb)
        return training
    return build
