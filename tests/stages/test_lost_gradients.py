"""model.zero_grad() where gradients have left param.grad: the loop equals plain torch's, or every rank has an error.

In a GAN's loop the generator's backward pass computes gradients of the discriminator too. `netD.zero_grad()` must drop
them, although stage 4 has sent them by then.
"""

import contextlib

import pytest
import torch
from torch import nn

from guard.chained import Chained
from harness import STAGE_3, STAGE_4
from tests.common import STAGES, error_of, on_ranks, optimizer_of
from tests.pairs import SMALL, parameter_of, sgd_of

BF16 = {"dtype": torch.bfloat16}
KINDS = {  # name -> package, dtype, arguments
    **{stage: (stage, torch.float32, {}) for stage in STAGES},
    "stage 3, main_grad": (STAGE_3, torch.bfloat16, {"grad_dtype": torch.float32}),
    "stage 4, small buckets": (STAGE_4, torch.float32, SMALL),
    **{f"variants.{name}": (f"variants.{name}", torch.float32, {})
       for name in ("finite", "muon", "offload", "per_parameter", "wire16")},
    "variants.remainder16": ("variants.remainder16", torch.bfloat16, {}),
    "hybrid": ("tests.variants.on_pairs", torch.float32, {}),
}


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


class Loop:
    """A generator and a discriminator: on all ranks, or with all their data in one process, where `make` is torch's."""

    def __init__(self, make, ranks, dtype):
        torch.manual_seed(0)
        self.ranks = ranks
        self.generator, self.critic = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(dtype)
                                       for _ in range(2))
        self.of_generator = make(self.generator)
        self.of_critic = make(self.critic)
        self.n_batches = 0

    @property
    def is_plain(self):
        return len(self.ranks) > 1

    def backward(self, loss_of):
        """Run the backward pass of `loss_of`, of a tensor (4, 6), over the next batch of each rank, and average."""
        self.n_batches += 1
        for rank in self.ranks:
            generator = torch.Generator().manual_seed(100 * self.n_batches + rank)
            x = torch.randn(4, 6, generator=generator, device="cpu").to(self.generator[0].weight)
            (loss_of(x) / len(self.ranks)).backward()

    def train_critic(self):
        self.backward(lambda x: (self.critic(x) - 1).square().mean())

    def fail(self):
        """Run a backward pass that fails, on rank 0 when it has only computed gradients of the critic's last layer."""
        def loss_of(x):
            x.requires_grad_()
            hidden = Fails.apply(self.critic[0](x)) if 0 in self.ranks else self.critic[0](Fails.apply(x))
            return self.critic[2](hidden).square().mean()
        with contextlib.suppress(ZeroDivisionError):
            self.backward(loss_of)

    def clip(self):
        if self.is_plain:
            nn.utils.clip_grad_norm_(self.critic.parameters(), 0.1)
        else:
            self.of_critic.clip_grad_norm_(0.1)

    def no_sync(self):
        return contextlib.nullcontext() if self.is_plain else self.of_critic.no_sync()

    def step(self):
        self.train_critic()
        self.of_critic.step()
        self.critic.zero_grad()


def gan(loop):
    for _ in range(3):
        loop.critic.zero_grad()
        loop.backward(lambda x: (loop.critic(loop.generator(x).detach()) - 1).square().mean())
        loop.of_critic.step()
        loop.generator.zero_grad()
        loop.backward(lambda x: loop.critic(loop.generator(x)).square().mean())
        loop.of_generator.step()
    loop.critic.zero_grad()


def drop_micro_batches(loop):
    loop.train_critic()
    loop.train_critic()
    with loop.no_sync():
        loop.train_critic()
    nn.ModuleList([loop.generator, loop.critic]).zero_grad()
    loop.train_critic()
    loop.critic.zero_grad()
    loop.train_critic()  # counts, with the one of the step


def drop_what_was_clipped(loop):
    loop.train_critic()
    loop.clip()
    loop.critic.zero_grad()
    loop.train_critic()
    loop.clip()
    loop.of_critic.step()
    loop.critic.zero_grad()


def drop_what_was_not_sent(loop):
    loop.critic.zero_grad()
    with loop.no_sync():
        loop.train_critic()
        loop.critic[2].zero_grad()
    loop.train_critic()


def drop_what_has_failed(loop):
    loop.fail()
    loop.critic.zero_grad()


SITUATIONS = {function.__name__: function for function in (
    gan, drop_micro_batches, drop_what_was_clipped, drop_what_was_not_sent, drop_what_has_failed)}


@pytest.mark.parametrize("kind", [*KINDS, "chain"])
@on_ranks(situation=SITUATIONS)
def test_a_loop_with_zero_grad_of_the_model_is_that_of_torch(rank, kind, situation):
    """Drop gradients in each way, and take two steps: both networks are those of one process. chain: for each layer."""
    if (kind, situation) == ("chain", "drop_what_has_failed"):
        return  # rank 0 runs no pass of the first layer's optimizer: docs/reference.md, all ranks run equally many
    package, dtype, kwargs = KINDS.get(kind, KINDS[STAGE_4])

    def build(module):
        return optimizer_of(package)(module.parameters(), torch.optim.SGD, lr=0.5, **kwargs)

    def make(net):
        return Chained(build(net[0]), build(net[2])) if kind == "chain" else build(net)

    ours = Loop(make, [rank.number], dtype)
    plain = Loop(lambda net: torch.optim.SGD(net.parameters(), lr=0.5), range(rank.world_size), torch.float32)
    for loop in (ours, plain):
        start = nn.utils.parameters_to_vector(loop.critic.parameters()).detach()
        SITUATIONS[situation](loop)
        loop.step()
        loop.step()
        assert (nn.utils.parameters_to_vector(loop.critic.parameters()) - start).abs().max() > 0.1
    tolerance = 2e-2 if dtype is torch.bfloat16 or "wire16" in kind else 1e-5
    for net, expected in ((ours.generator, plain.generator), (ours.critic, plain.critic)):
        for param, other in zip(net.parameters(), expected.parameters()):
            torch.testing.assert_close(param.float(), other, rtol=0, atol=tolerance)


@on_ranks(2)
def test_the_leaves_of_same_bits_are_counted_anew(rank):
    """Drop one of two leaves, before it was sent; then both. Each step has two of them, of 1, on each rank."""
    param = parameter_of(0, rank)
    optimizer = optimizer_of("variants.same_bits")([param], torch.optim.SGD, lr=1.0, leaves=4)
    for n_dropped in (1, 2):
        for _ in range(n_dropped):
            (param * 100).sum().backward()
        nn.ParameterList([param]).zero_grad()
        for _ in range(2):
            param.sum().backward()
        optimizer.step()
    assert param.unique().tolist() == [-2]


# --------------------------------------------------------------------------------------------- an error on every rank


def two_layers(rank, stage, **kwargs):
    """Return a module of parameters of zeros, and SGD with a learning rate of 1."""
    module = nn.ModuleList(nn.ParameterList([parameter_of(0, rank) for _ in range(3)]) for _ in range(2))
    return module, sgd_of(stage, module.named_parameters(), **(SMALL if stage == STAGE_4 else {}), **kwargs)


def backward(module):
    sum(param.sum() for param in module.parameters()).backward()


@on_ranks(ending=["step", "clip_grad_norm_", "zero_grad"], stage=[STAGE_3, STAGE_4])
def test_a_part_of_what_was_sent_cannot_be_dropped(rank, stage, ending):
    """Stage 3 sends when it clips. optimizer.zero_grad() makes up for it."""
    module, optimizer = two_layers(rank, stage)
    backward(module)
    if stage == STAGE_3:
        optimizer.clip_grad_norm_(1e6)
    module[1].zero_grad()
    if ending == "zero_grad":
        optimizer.zero_grad()
    else:
        error = error_of(optimizer.step if ending == "step" else lambda: optimizer.clip_grad_norm_(1.0))
        assert "drop the gradient of parameter 1.0 alone" in error and "call optimizer.zero_grad()" in error
        assert all(param.eq(0).all() for param in module.parameters())
        optimizer.zero_grad()
    backward(module)
    optimizer.step()
    assert all(param.eq(-1).all() for param in module.parameters())


@on_ranks(n_later=[0, 1])
def test_ranks_of_which_some_drop_gradients_are_an_error_on_every_rank(rank, n_later):
    """Also where they run another backward pass, over more buckets than may be under way, before the step."""
    module, optimizer = two_layers(rank, STAGE_4, find_unused_parameters=True)
    backward(module)
    if rank.number == 0:
        module.zero_grad()
    for _ in range(n_later):
        backward(module)
    error = error_of(optimizer.step)
    assert "backward passes dropped by model.zero_grad() is 1.0 on rank 0 and 0.0 on rank 1" in error
    backward(module)
    optimizer.step()
    assert all(param.eq(-1).all() for param in module.parameters())


# ------------------------------------------------------------------------------------------------ what torch does else


@on_ranks(set_to_none=[True, False], by=["optimizer", "module"])
def test_an_unused_parameter_has_zeros_or_nothing_as_zero_grad_left_it(rank, stage, set_to_none, by):
    """Step as torch does, where momentum and decay move a parameter by a gradient of zeros, and not by None.

    Stage 3 has no None: its missing gradients are zeros.
    """
    params, plain = ([parameter_of(1, rank) for _ in range(3)] for _ in range(2))
    kwargs = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "foreach": False}
    own = {"find_unused_parameters": True} if stage == STAGE_4 else {}
    optimizer = optimizer_of(stage)(params, torch.optim.SGD, **kwargs, **own)
    reference = torch.optim.SGD(plain, **kwargs)

    def zero_grad():
        for one, its_params in ((optimizer, params), (reference, plain)):
            (one if by == "optimizer" else nn.ParameterList(its_params)).zero_grad(set_to_none=set_to_none)

    def step():
        for param in plain if stage == STAGE_3 else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
        reference.step()

    for used, drops_first in (([0, 1], False), ([0], False), ([1], False), ([0, 1], True), ([], False), ([1], False)):
        for its_params in (params, plain):
            if used:
                sum(its_params[i].sum() for i in used).backward()
        if drops_first:
            zero_grad()
        step()
        zero_grad()
    for param, expected in zip(params, plain):
        torch.testing.assert_close(param, expected)


@on_ranks(2)
def test_zero_grad_of_modules_is_torchs_own_when_no_optimizer_is_alive(rank, stage):
    from guard.dropping import TORCHS_ZERO_GRAD, zero_grad
    from guard.scaling import ALIVE
    optimizer = sgd_of(stage, [parameter_of(0, rank)])
    assert nn.Module.zero_grad is zero_grad
    del optimizer
    assert ALIVE or nn.Module.zero_grad is TORCHS_ZERO_GRAD
