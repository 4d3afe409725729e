"""Trains a model on all ranks, and beside them a copy in one process that has all data: most stage tests do so."""

import torch
from torch import nn

from harness import STAGE_4, STAGES
from tests.common import Net, batch, loss_of, optimizer_of, trainable

# torch's fused kernels on CPU round a tensor's last elements, those that fill no vector, differently. So a parameter
# that is cut elsewhere than at a multiple of 64 bytes gets other last bits than a whole one. Unfused kernels round all
# elements alike.
UNFUSED = {"foreach": False}
ADAMW = {"lr": 0.01, "weight_decay": 0.1, **UNFUSED}
SGD = {"lr": 0.1, "momentum": 0.9}
SMALL = {"bucket_cap_mb": 1e-6}  # for stage 4: each parameter is a bucket
PREFETCH = [*((stage, False) for stage in STAGES), (STAGE_4, True)]  # a stage, and whether it prefetches parameters


def parameter_of(value, rank, n=5):
    """Return a parameter of n elements, each of which is `value`."""
    return torch.nn.Parameter(torch.full((n,), float(value), device=rank.device))


def sgd_of(stage, params, **kwargs):
    """Return an optimizer of `stage` whose step subtracts the mean gradient."""
    return optimizer_of(stage)(params, torch.optim.SGD, lr=1.0, **kwargs)


class WhenAsked:
    """Has the methods of a Work, but calls `start`, which returns Works, only when somebody waits."""

    def __init__(self, start):
        self.start = start

    def wait(self):
        for work in self.start():
            work.wait()

    def is_completed(self):
        self.wait()
        return True


def deliver_when_asked(optimizer):
    """Let parameters of stage 4 arrive only when a program waits for them. Without a wait a program reads old values.
    """
    transport = optimizer.buckets[0].transport  # all buckets share it
    all_gather = transport.all_gather
    transport.all_gather = lambda shards: [WhenAsked(lambda: all_gather(shards))]


def add(total, grad):
    """Return total + grad, where None counts as 0."""
    if total is None:
        return grad
    return total if grad is None else total + grad


class Replicated:
    """Trains in one process, from rank 0's weights, with the batches of all ranks: the reference for the stages.

    A 16-bit parameter has a main parameter in fp32: the optimizer updates that, and the model gets it rounded.
    Gradients of several ranks are added in fp32 at least. `net`: seed -> the model. `groups`: model -> what an
    optimizer takes.
    """

    def __init__(self, rank, optimizer_cls=torch.optim.AdamW, groups=trainable, net=Net, **kwargs):
        self.world_size = rank.world_size
        self.device = rank.device
        self.model = net(seed=0).to(rank.device)
        self.main = {param: param.detach().float() for param in trainable(self.model) if param.itemsize < 4}
        self.optimizer = optimizer_cls(self.with_main_params(list(groups(self.model))), **kwargs)

    def with_main_params(self, groups):
        """Return `groups` with main parameters in place of 16-bit parameters."""
        if not self.main:
            return groups
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in groups]
        return [{**group, "params": [self.main.get(param, param) for param in group["params"]]} for group in groups]

    def backward(self, *steps, loss_of=loss_of):
        """Add the gradients of `steps`, averaged over the ranks in their order, to .grad; return the mean loss."""
        params = trainable(self.model)
        mean_loss = 0
        means = [None] * len(params)
        for rank in range(self.world_size):
            sums = [None] * len(params)
            for step in steps:
                loss = loss_of(self.model, *batch(step, rank, device=self.device))
                sums = list(map(add, sums, torch.autograd.grad(loss, params, allow_unused=True)))
                mean_loss += loss.detach() / self.world_size
            means = [add(mean, self.share_of(grad)) for mean, grad in zip(means, sums)]
        for param, mean in zip(params, means):
            if mean is not None:
                main = self.main.get(param, param)
                main.grad = add(main.grad, mean)
        return mean_loss

    def share_of(self, grad):
        """Return what a rank's gradient adds to the mean, or None."""
        if grad is None:
            return None
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.world_size

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
    optimizer alone. `seeds`: arguments of `net` on this rank. `of`: stage -> class of the optimizer.
    """

    def __init__(self, rank, stage, optimizer_cls=torch.optim.AdamW, groups=trainable, seeds=None, net=Net, own=None,
                 prefetch=False, of=optimizer_of, **kwargs):
        self.rank = rank
        self.prefetches = prefetch
        kwargs = kwargs or ADAMW
        self.make = lambda groups: of(stage)(groups, optimizer_cls, **own or {}, **kwargs)
        self.model = net(*seeds or [rank.number]).to(rank.device)  # `build` broadcasts rank 0's
        self.replicated = Replicated(rank, optimizer_cls, groups, net, **kwargs)
        self.models = self.model, self.replicated.model
        self.build(groups(self.model))

    def build(self, groups):
        """Make an optimizer of the stage, with the same arguments whenever this is called."""
        self.optimizer = self.make(groups)
        if self.prefetches:
            self.optimizer.prefetch_params(self.model)

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
