"""What the tests share: a model that is awkward to shard, data, and the reference that does it all in one process."""

import contextlib
import functools
import importlib
import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness import STAGES as STAGES
from harness import alone

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}
# torch's fused kernels on CPU round a tensor's last elements, those that fill no vector, differently: a parameter cut
# elsewhere than at a multiple of 64 bytes is then not what the whole one would be. Unfused, all are rounded alike.
UNFUSED = {"foreach": False}
ADAMW = {"lr": 0.01, "weight_decay": 0.1, **UNFUSED}
SGD = {"lr": 0.1, "momentum": 0.9}
SMALL = {"bucket_cap_mb": 1e-6}  # stage 4: each parameter is a bucket


def optimizer_of(stage):
    """The DistributedOptimizer of the package called `stage`."""
    package = importlib.import_module(stage)
    if not hasattr(package, "DistributedOptimizer"):
        package = importlib.import_module(f"{stage}.optimizer")
    return package.DistributedOptimizer


class Net(nn.Module):
    """Tied, frozen, scalar and odd-sized parameters: 208 elements to train, in pieces of 1, 5, 11, 35 and 55."""

    def __init__(self, seed, frozen_seed=0):
        super().__init__()
        torch.manual_seed(frozen_seed)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        torch.manual_seed(seed)
        self.embed = nn.Linear(7, 5, bias=False)
        self.up = nn.Linear(5, 11)
        self.down = nn.Linear(11, 5)
        self.scale = nn.Parameter(torch.rand(()))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = nn.Parameter(torch.rand(7, 5))
        self.tied = nn.Linear(5, 11)
        self.tied.weight = self.up.weight

    def forward(self, x):  # (batch, 7) -> (batch, 7)
        x = self.embed(x)
        x = x + self.down(torch.tanh(self.up(x))) * self.scale
        x = x + self.down(torch.tanh(self.tied(x)))
        return self.head(x) + self.frozen(x).sum(dim=1, keepdim=True)


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def on_its_device(function):
    """What `function(rank, ...)` makes without saying where, it makes on the rank's device."""
    @functools.wraps(function)
    def wrapper(rank, *args, **kwargs):
        with rank.device if rank.device.type != "cpu" else contextlib.nullcontext():
            return function(rank, *args, **kwargs)
    return wrapper


def of_cpus(rank):
    """-> the same rank with the CPU for a device, and a group of gloo: for tests of when a CPU does what."""
    group = None if rank.backend == "gloo" else dist.new_group(backend="gloo")
    return rank._replace(device=torch.device("cpu"), backend="gloo"), group


def batch(step, rank, size=4, device=None):
    """-> x, y: (size, 7) each; the same for the same step and rank, another one for every other."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    device = device or torch.get_default_device()
    return [torch.randn(size, 7, generator=generator, device="cpu").to(device) for _ in range(2)]


def loss_of(model, x, y):
    return F.mse_loss(model(x), y)


one_rank_of = alone.rank_0_of  # of d: the real code runs, and nothing is sent


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
    `net`: seed -> the model. `grad_dtype`: in which gradients add up on a rank. `sum_dtype`: in which over the ranks.
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
            shares = [None if grad is None else grad / self.world_size for grad in sums]
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


def padding(flat, pieces):
    """The elements of `flat`, (numel,), that lie in none of `pieces`, of (offset, number)."""
    is_padding = torch.ones_like(flat, dtype=torch.bool)
    for offset, numel in pieces:
        is_padding[offset : offset + numel] = False
    return flat[is_padding]


def assert_same(model, reference, exact):
    """Every parameter equal to the reference's: to the bit, or where sums may be in another order, up to rounding.

    A nan is equal to a nan, in the same place.
    """
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

    `own`: arguments that the stage's optimizer alone has; `rounds`: that Replicated alone has. What is called here is
    called of both.
    """

    def __init__(self, rank, stage, optimizer_cls=torch.optim.AdamW, groups=trainable, seeds=None, net=Net, own=None,
                 rounds=None, prefetch=False, **kwargs):
        self.rank, kwargs = rank, kwargs or ADAMW
        self.model = net(*seeds or [rank.rank]).to(rank.device)  # the constructor broadcasts what rank 0 has
        self.replicated = Replicated(rank, optimizer_cls, groups, net, **rounds or {}, **kwargs)
        self.optimizer = optimizer_of(stage)(groups(self.model), optimizer_cls, **own or {}, **kwargs)
        if prefetch:
            self.optimizer.prefetch_params(self.model)
        self.models = self.model, self.replicated.model

    @property
    def optimizers(self):
        return self.optimizer, self.replicated.optimizer

    def backward(self, *steps, loss_of=loss_of):
        backward(self.model, self.rank, *steps, loss_of=loss_of)
        self.replicated.backward(*steps, loss_of=loss_of)

    def clip(self, max_norm, norm_type=2.0):
        """-> the norm, which is the same of both."""
        norm = self.optimizer.clip_grad_norm_(max_norm, norm_type)
        main = [self.replicated.main.get(param, param) for param in trainable(self.replicated.model)]
        expected = nn.utils.clip_grad_norm_(main, max_norm, norm_type)
        assert torch.allclose(norm, expected, rtol=1e-5, equal_nan=True), (norm, expected)
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


# ------------------------------------------------------------------------------------- how a test of stages is written


def on_ranks(*world_sizes, **situations):
    """The test below runs on each rank: its first argument. Without world sizes it is as any test that takes one.

    `situations`: argument -> its values. All combinations are played one after the other in one test, since each takes
    a moment, and a failure names its own.
    """
    if world_sizes and callable(world_sizes[0]):  # @on_ranks without brackets
        return on_ranks()(world_sizes[0])

    def decorate(body):
        names = ["run", "world_size", *(name for name in inspect.signature(body).parameters if name not in situations)]
        names.remove("rank")

        @functools.wraps(body)
        def test(run, world_size, **kwargs):
            run(play_situations, body.__module__, body.__name__, kwargs)

        test.situations = situations
        test.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
                                                for name in names])
        return pytest.mark.parametrize("world_size", world_sizes)(test) if world_sizes else test
    return decorate


def play_situations(rank, module, name, kwargs):
    test = getattr(importlib.import_module(module), name)
    for values in itertools.product(*test.situations.values()):
        played = dict(zip(test.situations, values))
        with situation(played) if played else contextlib.nullcontext():
            test.__wrapped__(rank, **kwargs, **played)


@contextlib.contextmanager
def situation(name):
    """One of several in a test: an error says in which it came."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__} {error}") from error


def parameter_of(value, rank, n=5):
    return torch.nn.Parameter(torch.full((n,), float(value), device=rank.device))


def sgd_of(stage, params, **kwargs):
    """A step of it subtracts the mean gradient."""
    return optimizer_of(stage)(params, torch.optim.SGD, lr=1.0, **kwargs)


def error_of(function, *exceptions):
    """-> the message of the error that `function` must raise: one line."""
    exceptions = exceptions or (RuntimeError,)
    try:
        function()
    except exceptions as error:
        assert str(error) and "\n" not in str(error)
        return str(error)
    raise AssertionError("no error")
