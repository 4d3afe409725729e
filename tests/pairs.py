"""A model that all ranks train, beside one process that has all data: how most tests of the stages begin."""

import torch
from torch import nn

from tests.common import Net, batch, loss_of, optimizer_of, trainable

# torch's fused kernels on CPU round a tensor's last elements, those that fill no vector, differently: a parameter cut
# elsewhere than at a multiple of 64 bytes is then not what the whole one would be. Unfused, all are rounded alike.
UNFUSED = {"foreach": False}
ADAMW = {"lr": 0.01, "weight_decay": 0.1, **UNFUSED}
SGD = {"lr": 0.1, "momentum": 0.9}
SMALL = {"bucket_cap_mb": 1e-6}  # stage 4: each parameter is a bucket


def parameter_of(value, rank, n=5):
    return torch.nn.Parameter(torch.full((n,), float(value), device=rank.device))


def sgd_of(stage, params, **kwargs):
    """A step of it subtracts the mean gradient."""
    return optimizer_of(stage)(params, torch.optim.SGD, lr=1.0, **kwargs)


class WhenAsked:
    """Works that begin when somebody waits for them."""

    def __init__(self, start):
        self.start = start

    def wait(self):
        for work in self.start():
            work.wait()

    def is_completed(self):
        self.wait()
        return True


def deliver_when_asked(optimizer):
    """Parameters of stage 4 arrive when somebody waits for them, not before: who reads them early reads old ones."""
    transport = optimizer.buckets[0].transport  # of all buckets
    all_gather = transport.all_gather
    transport.all_gather = lambda shards: [WhenAsked(lambda: all_gather(shards))]


def add(total, grad, dtype=None):
    """In `dtype`, or in the gradients' own. Either may be None."""
    grad = grad if grad is None or dtype is None else grad.to(dtype)
    return grad if total is None else total if grad is None else total + grad


class Replicated:
    """What one process does with the batches of all ranks: the reference. Weights are those of rank 0.

    Parameters of 16 bits have main parameters, in fp32, which are stepped: what they are rounded to is the model's.
    `net`: seed -> the model. `grad_dtype`: in which gradients add up on a rank. `sum_dtype`: in which ranks average.
    """

    def __init__(self, rank, optimizer_cls=torch.optim.AdamW, groups=trainable, net=Net, grad_dtype=None,
                 sum_dtype=None, **kwargs):
        self.world_size, self.device = rank.world_size, rank.device
        self.grad_dtype, self.sum_dtype = grad_dtype, sum_dtype
        self.model = net(seed=0).to(rank.device)
        self.main = {param: param.detach().float() for param in trainable(self.model) if param.itemsize < 4}
        groups = list(groups(self.model))
        if self.main:
            groups = [one if isinstance(one, dict) else {"params": [one]} for one in groups]
            groups = [{**group, "params": [self.main.get(p, p) for p in group["params"]]} for group in groups]
        self.optimizer = optimizer_cls(groups, **kwargs)

    def backward(self, *steps, loss_of=loss_of):
        """Gradients added up over `steps`, and their average over the ranks, in rank order. -> mean loss"""
        params, total, means = trainable(self.model), 0, []
        for rank in range(self.world_size):
            sums = [None] * len(params)
            for step in steps:
                loss = loss_of(self.model, *batch(step, rank, device=self.device))
                grads = torch.autograd.grad(loss, params, allow_unused=True)
                sums = [add(old, new, self.grad_dtype) for old, new in zip(sums, grads)]
                total += loss.detach() / self.world_size
            shares = [None if grad is None else grad.to(self.sum_dtype or grad.dtype) / self.world_size
                      for grad in sums]
            means = [add(old, new, self.sum_dtype) for old, new in zip(means or [None] * len(params), shares)]
        for param, grad in zip(params, means):
            if grad is not None:
                main = self.main.get(param, param)
                main.grad = add(main.grad, grad, main.dtype)
        return total

    def step(self, *steps):
        """-> the loss of `steps`; without any the gradients that are there are stepped."""
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


def exact(rank):
    """Sums over two ranks commute. Over three or more their order depends on the layout: equal up to rounding."""
    return rank.world_size <= 2


def backward(model, rank, *steps, loss_of=loss_of):
    """Gradients of this rank's batches add up. -> the last loss"""
    for step in steps:
        loss = loss_of(model, *batch(step, rank.rank, device=rank.device))
        loss.backward()
    return loss


def train(model, optimizer, rank, *steps):
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


class Pair:
    """A model that all ranks train with the optimizer of `stage`, and beside it one that a process trains alone.

    `own`: arguments that the stage's optimizer alone has, `rounds`: that Replicated alone has. `of`: stage -> a class.
    What is called here is called of both.
    """

    def __init__(self, rank, stage, optimizer_cls=torch.optim.AdamW, groups=trainable, seeds=None, net=Net, own=None,
                 rounds=None, prefetch=False, of=optimizer_of, **kwargs):
        self.rank, kwargs = rank, kwargs or ADAMW
        self.model = net(*seeds or [rank.rank]).to(rank.device)  # the constructor broadcasts what rank 0 has
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
        """-> the norm, which is the same of both."""
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
        assert_same(*self.models, is_exact and exact(self.rank))
