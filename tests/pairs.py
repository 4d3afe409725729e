"""Trains a model on all ranks, and beside them on one process that has all data: most tests of the stages do so."""

import torch
from torch import nn

from tests.common import Net, batch, loss_of, optimizer_of, trainable

# torch's fused kernels on CPU round a tensor's last elements, those that fill no vector, differently. So a parameter
# that is cut elsewhere than at a multiple of 64 bytes gets other last bits than a whole one. Unfused kernels round all
# elements alike.
UNFUSED = {"foreach": False}
ADAMW = {"lr": 0.01, "weight_decay": 0.1, **UNFUSED}
SGD = {"lr": 0.1, "momentum": 0.9}
SMALL = {"bucket_cap_mb": 1e-6}  # for stage 4: each parameter is a bucket


def parameter_of(value, rank, n=5):
    return torch.nn.Parameter(torch.full((n,), float(value), device=rank.device))


def sgd_of(stage, params, **kwargs):
    """Return an optimizer of `stage` whose step subtracts the mean gradient."""
    return optimizer_of(stage)(params, torch.optim.SGD, lr=1.0, **kwargs)


class WhenAsked:
    """Looks like a Work, but calls `start`, which returns Works, only when somebody waits."""

    def __init__(self, start):
        self.start = start

    def wait(self):
        for work in self.start():
            work.wait()

    def is_completed(self):
        self.wait()
        return True


def deliver_when_asked(optimizer):
    """Let parameters of stage 4 arrive only when a program waits for them: read earlier, they are the old ones."""
    transport = optimizer.buckets[0].transport  # all buckets share it
    all_gather = transport.all_gather
    transport.all_gather = lambda shards: [WhenAsked(lambda: all_gather(shards))]


def add(total, grad, dtype=None):
    """Return total + grad, where None counts as 0. dtype: of `grad` before it is added; None: its own."""
    if grad is None:
        return total
    if dtype is not None:
        grad = grad.to(dtype)
    return grad if total is None else total + grad


class Replicated:
    """Trains in one process, from rank 0's weights, with the batches of all ranks: the reference for the stages.

    A 16-bit parameter has a main parameter in fp32: the optimizer updates that, and the model gets it rounded.
    `net`: seed -> the model. `groups`: model -> what an optimizer takes. `grad_dtype`: in which a rank adds up its
    micro-batches' gradients. `sum_dtype`: in which the ranks' gradients are averaged.
    """

    def __init__(self, rank, optimizer_cls=torch.optim.AdamW, groups=trainable, net=Net, grad_dtype=None,
                 sum_dtype=None, **kwargs):
        self.world_size, self.device = rank.world_size, rank.device
        self.grad_dtype, self.sum_dtype = grad_dtype, sum_dtype
        self.model = net(seed=0).to(rank.device)
        self.main = {param: param.detach().float() for param in trainable(self.model) if param.itemsize < 4}
        groups = list(groups(self.model))
        if self.main:
            groups = [item if isinstance(item, dict) else {"params": [item]} for item in groups]
            groups = [{**group, "params": [self.main.get(p, p) for p in group["params"]]} for group in groups]
        self.optimizer = optimizer_cls(groups, **kwargs)

    def backward(self, *steps, loss_of=loss_of):
        """Add the gradients of `steps`, averaged over the ranks in their order, to .grad; return the mean loss."""
        params = trainable(self.model)
        mean_loss = 0
        means = [None] * len(params)
        for rank in range(self.world_size):
            sums = [None] * len(params)
            for step in steps:
                loss = loss_of(self.model, *batch(step, rank, device=self.device))
                grads = torch.autograd.grad(loss, params, allow_unused=True)
                sums = [add(old, new, self.grad_dtype) for old, new in zip(sums, grads)]
                mean_loss += loss.detach() / self.world_size
            shares = [None if grad is None else grad.to(self.sum_dtype or grad.dtype) / self.world_size
                      for grad in sums]
            means = [add(old, new) for old, new in zip(means, shares)]
        for param, grad in zip(params, means):
            if grad is not None:
                main = self.main.get(param, param)
                main.grad = add(main.grad, grad, main.dtype)
        return mean_loss

    def step(self, *steps):
        """Train on `steps`; return their loss. Without steps the optimizer takes .grad as it is."""
        loss = self.backward(*steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for param, main in self.main.items():
                param.copy_(main)
        return loss


def assert_same(model, reference, exact):
    """Compare parameters with the reference's: to the bit if `exact`, or up to rounding. A nan is equal to a nan."""
    rtol, atol = (0, 0) if exact else (1e-4, 2e-6)
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        difference = (param.detach() - expected.detach()).abs().max().item()
        assert torch.allclose(param, expected, rtol, atol, equal_nan=True), (
            f"parameter {name} differs by {difference:.3g} from replicated training")


def sums_commute(rank):
    """Return whether sums over the ranks have the same bits in any order: over three or more ranks they haven't."""
    return rank.world_size <= 2


def backward(model, rank, *steps, loss_of=loss_of):
    """Add up the gradients of this rank's batches; return the loss of the last one."""
    for step in steps:
        loss = loss_of(model, *batch(step, rank.number, device=rank.device))
        loss.backward()
    return loss


def train(model, optimizer, rank, *steps):
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


class Pair:
    """Holds a model that all ranks train with the optimizer of `stage`, and a copy that each process trains alone.

    A method calls both optimizers. `kwargs`: arguments of both, ADAMW without any. `own`: arguments of the stage's
    optimizer alone. `rounds`: arguments of Replicated alone. `seeds`: arguments of `net` on this rank. `of`: stage ->
    class of the optimizer.
    """

    def __init__(self, rank, stage, optimizer_cls=torch.optim.AdamW, groups=trainable, seeds=None, net=Net, own=None,
                 rounds=None, prefetch=False, of=optimizer_of, **kwargs):
        self.rank = rank
        kwargs = kwargs or ADAMW
        self.model = net(*seeds or [rank.number]).to(rank.device)  # the constructor below broadcasts rank 0's
        self.replicated = Replicated(rank, optimizer_cls, groups, net, **rounds or {}, **kwargs)
        self.optimizer = of(stage)(groups(self.model), optimizer_cls, **own or {}, **kwargs)
        if prefetch:
            self.optimizer.prefetch_params(self.model)
        self.models = self.model, self.replicated.model

    @property
    def optimizers(self):
        return self.optimizer, self.replicated.optimizer

    def backward(self, *steps, loss_of=loss_of):
        backward(self.model, self.rank, *steps, loss_of=loss_of)
        self.replicated.backward(*steps, loss_of=loss_of)

    def clip(self, max_norm, norm_type=2.0, rtol=1e-5):
        """Clip both models' gradients; return their norm, which must be the same."""
        norm = self.optimizer.clip_grad_norm_(max_norm, norm_type)
        main = [self.replicated.main.get(param, param) for param in trainable(self.replicated.model)]
        expected = nn.utils.clip_grad_norm_(main, max_norm, norm_type)
        assert torch.allclose(norm, expected, rtol, equal_nan=True), (norm, expected)
        return norm

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.replicated.step()

    def train(self, *steps):
        for step in steps:
            self.backward(step)
            self.step()

    def assert_same(self, is_exact=True):
        assert_same(*self.models, is_exact and sums_commute(self.rank))
