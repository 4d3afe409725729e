"""Trains a model on all ranks by a stage, and a copy of the model in one process, which has all data, to compare them.

Most tests of the stages do so. A rank is one of the processes that train together. A stage is one of the optimizers of
this repository, and the name of its package. A main parameter is the fp32 copy of a 16-bit parameter, which the
optimizer updates. `steps` are numbers of batches: batch(step, rank) always returns the same data.
"""

import torch
from torch import nn

from harness import STAGE_4, STAGES
from tests.common import Net, batch, loss_of, optimizer_of, trainable

# A stage may update a part of a tensor where the copy updates the whole tensor. torch's fused kernels for CPUs round
# the last elements of a tensor, which don't fill a vector register, in another way than the elements before. So a
# parameter that is cut at another place than a multiple of 64 bytes gets other last bits. Kernels that aren't fused
# round all elements alike.
UNFUSED = {"foreach": False}
ADAMW = {"lr": 0.01, "weight_decay": 0.1, **UNFUSED}
SGD = {"lr": 0.1, "momentum": 0.9}
SMALL = {"bucket_cap_mb": 1e-6}  # for stage 4: buckets so small that each parameter is sent in a message of its own
# (stage, whether parameters arrive during the next forward pass, which only stage 4 can do)
PREFETCH = [*((stage, False) for stage in STAGES), (STAGE_4, True)]


def parameter_of(value, rank, n=5):
    """Return a parameter on the rank's device. All its n elements are `value`."""
    return torch.nn.Parameter(torch.full((n,), float(value), device=rank.device))


def sgd_of(stage, params, **kwargs):
    """Return an optimizer of `stage` whose step subtracts the mean gradient."""
    return optimizer_of(stage)(params, torch.optim.SGD, lr=1.0, **kwargs)


class WhenAsked:
    """Has the methods of a torch.distributed.Work, but starts its messages only when somebody waits for them.

    `start()` starts the messages, and returns their Works.
    """

    def __init__(self, start):
        self.start = start

    def wait(self):
        for work in self.start():
            work.wait()

    def is_completed(self):
        self.wait()
        return True


def deliver_when_asked(optimizer):
    """Let the updated parameters of a stage 4 optimizer arrive only when something waits for them.

    Code that forgets to wait then always reads old values, so that a test can see its mistake.
    """
    transport = optimizer.buckets[0].transport  # sends messages; all buckets of an optimizer have the same transport
    all_gather = transport.all_gather  # starts to send and receive parameters, and returns a list of Works
    transport.all_gather = lambda shards: [WhenAsked(lambda: all_gather(shards))]


def add(total, grad):
    """Return total + grad, where None counts as 0."""
    if total is None:
        return grad
    return total if grad is None else total + grad


class Replicated:
    """Trains in one process, from rank 0's weights, with the batches of all ranks. It is what a stage must agree with.

    The optimizer updates main parameters in place of 16-bit parameters, and the model gets them rounded. Gradients of
    the ranks are added in fp32, or in the dtype of the parameters if that is wider.

    Args:
        groups: groups(model) returns what an optimizer takes: parameters, or parameter groups.
        net: net(seed=…) returns the model.
        kwargs: other arguments of `optimizer_cls`.
    """

    def __init__(self, rank, optimizer_cls=torch.optim.AdamW, groups=trainable, net=Net, **kwargs):
        self.world_size = rank.world_size
        self.device = rank.device
        self.model = net(seed=0).to(rank.device)
        # {16-bit parameter: main parameter}; empty for a model without 16-bit parameters.
        self.main = {param: param.detach().float() for param in trainable(self.model) if param.itemsize < 4}
        self.optimizer = optimizer_cls(self.with_main_params(list(groups(self.model))), **kwargs)

    def with_main_params(self, groups):
        """Return parameters, or parameter groups, with main parameters in place of 16-bit parameters."""
        if not self.main:
            return groups
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in groups]
        return [{**group, "params": [self.main.get(param, param) for param in group["params"]]} for group in groups]

    def backward(self, *steps, loss_of=loss_of):
        """Add to .grad what the ranks' batches of `steps` give: sums over the steps, averaged over the ranks.

        Returns the sum over the steps of the loss, averaged over the ranks.
        """
        params = trainable(self.model)
        mean_loss = 0
        means = [None] * len(params)  # of each parameter; None as long as no rank has a gradient for it
        for rank in range(self.world_size):
            sums = [None] * len(params)  # of this rank's gradients
            for step in steps:
                loss = loss_of(self.model, *batch(step, rank, device=self.device))
                # A gradient is None if the loss doesn't use the parameter. Each gradient is added to its sum.
                sums = list(map(add, sums, torch.autograd.grad(loss, params, allow_unused=True)))
                mean_loss += loss.detach() / self.world_size
            means = [add(mean, self.share_of(grad)) for mean, grad in zip(means, sums)]
        for param, mean in zip(params, means):
            if mean is not None:
                updated_param = self.main.get(param, param)  # the main parameter, if there is one
                updated_param.grad = add(updated_param.grad, mean)
        return mean_loss

    def share_of(self, grad):
        """Return what a rank's gradient adds to the average: the gradient in fp32 or wider, divided by the world size.

        Returns None for a parameter without a gradient.
        """
        if grad is None:
            return None
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.world_size

    def step(self, *steps):
        """Train one step on the batches of `steps`; return what `backward` returns.

        Without any `steps` the optimizer takes the gradients that are in .grad already.
        """
        loss = self.backward(*steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for param, main_param in self.main.items():
                param.copy_(main_param)
        return loss


def assert_same(model, reference, exact):
    """Assert that two models have the same parameters: to the bit if `exact`, otherwise up to rounding.

    A nan counts as equal to a nan.
    """
    rtol, atol = (0, 0) if exact else (1e-4, 2e-6)
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        difference = (param.detach() - expected.detach()).abs().max().item()
        assert torch.allclose(param, expected, rtol, atol, equal_nan=True), (
            f"parameter {name} differs by {difference:.3g} from replicated training")


def sums_commute(rank):
    """Return whether a sum over the ranks has the same bits in whatever order it is added up.

    That holds for two ranks. The sum of three or more numbers may depend on the order.
    """
    return rank.world_size <= 2


def backward(model, rank, *steps, loss_of=loss_of):
    """Add the gradients of this rank's batches of `steps` to .grad; return the loss of the last batch."""
    for step in steps:
        loss = loss_of(model, *batch(step, rank.number, device=rank.device))
        loss.backward()
    return loss


def train(model, optimizer, rank, *steps):
    """Train a step on each of this rank's batches of `steps`."""
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


class Pair:
    """Holds a model that all ranks train with the optimizer of `stage`, and a copy that each process trains alone.

    The copy is a Replicated. Each method does the same with both of them.

    Args:
        groups: groups(model) returns what an optimizer takes: parameters, or parameter groups.
        seeds: arguments of `net` for this rank's model; by default the number of the rank.
        own: arguments of the stage's optimizer that the copy's optimizer doesn't get.
        prefetch: whether parameters arrive during the next forward pass, which only stage 4 can do.
        of: of(stage) returns the class of the optimizer.
        kwargs: arguments of both optimizers; without any, ADAMW.
    """

    def __init__(self, rank, stage, optimizer_cls=torch.optim.AdamW, groups=trainable, seeds=None, net=Net, own=None,
                 prefetch=False, of=optimizer_of, **kwargs):
        self.rank = rank
        self.prefetches = prefetch
        kwargs = kwargs or ADAMW
        # make(groups) makes the stage's optimizer, with the same arguments in each call; groups(model) made `groups`.
        self.make = lambda groups: of(stage)(groups, optimizer_cls, **own or {}, **kwargs)
        # Ranks begin with different weights. `build` makes the optimizer, which broadcasts those of rank 0.
        self.model = net(*seeds or [rank.number]).to(rank.device)
        self.replicated = Replicated(rank, optimizer_cls, groups, net, **kwargs)
        self.models = self.model, self.replicated.model
        self.build(groups(self.model))

    def build(self, groups):
        """Make the optimizer of the stage for `groups`. A test may call this again, for a new optimizer."""
        self.optimizer = self.make(groups)
        if self.prefetches:
            self.optimizer.prefetch_params(self.model)

    @property
    def optimizers(self):
        return self.optimizer, self.replicated.optimizer

    def backward(self, *steps, loss_of=loss_of):
        """Add the gradients of `steps` to .grad of both models, on this rank of its own batches, in the copy of all."""
        backward(self.model, self.rank, *steps, loss_of=loss_of)
        self.replicated.backward(*steps, loss_of=loss_of)

    def clip(self, max_norm, norm_type=2.0, rtol=1e-5):
        """Clip the gradients of both models, whose norms must be the same. Returns the norm before clipping."""
        norm = self.optimizer.clip_grad_norm_(max_norm, norm_type)
        updated_params = [self.replicated.main.get(param, param) for param in trainable(self.replicated.model)]
        expected = nn.utils.clip_grad_norm_(updated_params, max_norm, norm_type)
        assert torch.allclose(norm, expected, rtol, equal_nan=True), (norm, expected)
        return norm

    def step(self):
        """Let both optimizers update their parameters, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.replicated.step()

    def train(self, *steps):
        """Train a step on each of `steps`."""
        for step in steps:
            self.backward(step)
            self.step()

    def assert_same(self, is_exact=True):
        """Assert that both models have the same parameters, up to rounding if sums over the ranks may differ."""
        assert_same(*self.models, is_exact and sums_commute(self.rank))
