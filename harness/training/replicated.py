"""Trains without sharding, for rows to agree with: every rank steps every parameter, in 32 bits, in 16, or rounded.

`Training` is the loop of every train.py, in halves that can be measured.
"""

import contextlib

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like
from torch.nn.parallel import DistributedDataParallel

from guard.groups import all_params, hyperparameters
from guard.guarded import mean_loss
from stage4_overlap.dtensor import local


class Training:
    """Runs a model and an optimizer in the loop of every train.py, in two halves so that memory can be read between.

    `forward` is called with (tokens, targets) and returns the loss: the model, or what is wrapped around it.
    """

    def __init__(self, model, forward, optimizer):
        self.model, self.forward, self.optimizer = model, forward, optimizer

    def forward_backward(self, batch):
        tokens, targets = batch  # (B, T) int64, (B, T) int64
        self.forward(tokens, targets).backward()

    def update(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def no_sync(self):
        """Return a context in which gradients add up and aren't sent."""
        for owner in (self.forward, self.optimizer):
            if hasattr(owner, "no_sync"):
                return owner.no_sync()
        return contextlib.nullcontext()

    def step(self, batch):
        self.forward_backward(batch)
        self.update()
        self.zero_grad()

    def finish(self):
        """Wait for what the last step has left in flight: parameters, and kernels on the GPU."""
        for optimizer in getattr(self.optimizer, "optimizers", [self.optimizer]):  # a pair: see variants/muon_rows.py
            getattr(optimizer, "finish_param_sync", lambda: None)()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def full_params(self):
        """Return the list of parameters, whole, as they are on this rank. Collective, of DTensors."""
        self.finish()
        return [getattr(param, "full_tensor", lambda: param)().detach() for param in self.model.parameters()]


class MainParamsTraining(Training):
    """Steps fp32 copies of the parameters, the main parameters; fp32 parameters are stepped themselves.

    Args:
        world_size: 1 is without communication.
        divided_in, summed_in: the dtypes in which gradients are averaged; None is that of the parameters.
        moments_in: the dtype that AdamW's moments are rounded to.
        ties_away: a parameter is its main parameter rounded, at ties away from zero, as in variants/remainder16.py.
    """

    def __init__(self, model, adamw, world_size, divided_in=None, summed_in=torch.float32, moments_in=None,
                 ties_away=False):
        self.main_params = [param.detach().float() for param in model.parameters()]
        super().__init__(model, model, torch.optim.AdamW(self.main_params, **adamw))
        self.world_size, self.divided_in, self.summed_in = world_size, divided_in, summed_in
        self.moments_in, self.ties_away = moments_in, ties_away

    @torch.no_grad()
    def update(self):
        params = list(self.model.parameters())
        for param, main_param in zip(params, self.main_params):
            grad = (param.grad.to(self.divided_in or param.dtype) / self.world_size).to(self.summed_in or param.dtype)
            if self.world_size > 1:
                grad = sum_in_rank_order(grad, self.world_size)
            main_param.grad = grad.float()
        self.optimizer.step()
        for state in self.optimizer.state.values() if self.moments_in else ():
            state.update({name: state[name].to(self.moments_in).float() for name in ("exp_avg", "exp_avg_sq")})
        torch._foreach_copy_(params, self.main_params)
        for param, main_param in zip(params, self.main_params) if self.ties_away else ():
            param.view(torch.int16).copy_((main_param.view(torch.int32) + 2**15) >> 16)

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.model.zero_grad()


def sum_in_rank_order(tensor, world_size):
    """Return the sum over the ranks, added up from rank 0 on: gloo's all-reduce of three ranks has another order."""
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    total, *others = parts
    for part in others:
        total += part
    return total


# ------------------------------------------------------------- The baseline: an optimizer that shards nothing, and DDP


def clip_grad_norm_(params, max_norm, norm_type):
    """Clip as torch does, tensors and DTensors. Returns the norm before, a scalar tensor. Collective over meshes."""
    grads = [param.grad for param in params]
    norms = [torch.linalg.vector_norm(grad, float(norm_type)) for grad in grads]  # of a DTensor one of partial sums
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    torch._foreach_mul_([local(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1))
    return norm


class DistributedOptimizer(torch.optim.Optimizer):
    """Averages gradients over the ranks, unless DDP has, and steps all parameters. It takes the arguments of stage 1.

    Of a tensor-parallel model `process_group` is the data-parallel dimension of the mesh, mesh["dp"].get_group(). The
    inner optimizer sees what of a DTensor lies on this rank: torch's kernels refuse lists of both kinds.
    Without: parameters that some ranks don't use, several dtypes, loss scaling, errors that say what is wrong.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, average_gradients=True,
                 **optimizer_kwargs):
        self.process_group, self.average_gradients = process_group, average_gradients
        self._agreement_group = process_group  # which Chained asks each of its optimizers for
        self.grads_synced = False
        self.optimizer = optimizer_cls([{"params": []}], **optimizer_kwargs)
        self.optimizer.param_groups.clear()  # torch wants a group; `add_param_group` adds the real ones
        super().__init__(params, self.optimizer.defaults)
        self.state = self.optimizer.state

    @torch.no_grad()
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            dist.broadcast(local(param), group=self.process_group, group_src=0)
        not_empty = [local(param) for param in group["params"] if local(param).numel()]  # as CUDA's kernels require
        self.optimizer.add_param_group({**hyperparameters(group), "params": not_empty})

    def params(self):
        return [param for param in all_params(self) if param.grad is not None]

    @torch.no_grad()
    def sync_grads(self):
        """Average. Of sequence parallelism, a gradient is first laid out as its parameter is. Collective."""
        for param in self.params():
            if hasattr(param, "placements"):
                param.grad = param.grad.redistribute(placements=param.placements)
        grads = [local(param.grad) for param in self.params()]
        flat = flatten(grads)  # (numel of all,)
        flat /= dist.get_world_size(self.process_group)
        dist.all_reduce(flat, group=self.process_group)
        torch._foreach_copy_(grads, cut_like(flat, grads))

    def step_own(self):
        copy_hyperparameters(self.param_groups, self.optimizer.param_groups)
        spread = [param for param in self.params() if local(param) is not param]
        for param in spread:
            local(param).grad = local(param.grad)
        self.optimizer.step()
        copy_hyperparameters(self.optimizer.param_groups, self.param_groups)  # some optimizers count steps there
        for param in spread:
            local(param).grad = None

    def sync_params(self):
        """Do nothing: every rank has stepped all parameters."""

    def finish_grad_sync(self):
        if self.average_gradients and not self.grads_synced:
            self.sync_grads()
            self.grads_synced = True

    def step(self, closure=None):
        loss = None if closure is None else mean_loss(self, closure, self.process_group)
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
        """Do nothing: gradients are sent in `step` only."""
        return contextlib.nullcontext()

    def state_dict(self):
        """Return the state; of DTensors, this rank's part in tensors."""
        copy_hyperparameters(self.param_groups, self.optimizer.param_groups)
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
        copy_hyperparameters(self.optimizer.param_groups, self.param_groups)
        self.state = self.optimizer.state


def copy_hyperparameters(sources, targets):
    """Copy the hyperparameters of the groups `sources` into the groups `targets`, of which there are as many."""
    for source, target in zip(sources, targets):
        target.update(hyperparameters(source))


def in_ddp(model, bucket_cap_mb=None, hook=None, **options):
    """Wrap a model in DDP. `bucket_cap_mb`: in MiB; None is DDP's default, 25. `hook`: a communication hook of DDP."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def bf16_sum(_, bucket):
    """Do what torch's bf16_compress_hook does, which refuses gloo."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def in_16_bits(alone=False, **options):
    """Step fp32 copies by AdamW on every rank. `alone`: gradients stay there. `options`: see MainParamsTraining."""
    def build(model, adamw, bucket_mb=None):
        return MainParamsTraining(model, adamw, 1 if alone else dist.get_world_size(), **options)
    return build


def ddp_16bit(model, adamw, bucket_mb=None):
    """Let DDP average 16-bit gradients while backward runs, and AdamW step fp32 copies on every rank."""
    training = MainParamsTraining(model, adamw, world_size=1)
    training.forward = in_ddp(model, bucket_mb)
    return training
