"""model.zero_grad() after gradients were sent: the loop equals plain torch's, or every rank raises an error.

In a GAN's loop the generator's backward pass computes gradients of the discriminator too. `netD.zero_grad()` must drop
them, although stage 4 has sent them by then.
"""

import contextlib
from typing import NamedTuple

import pytest
import torch
from torch import nn

from guard.chained import Chained
from harness import STAGE_3, STAGE_4
from tests.common import STAGES, batch, error_of, on_ranks, optimizer_of
from tests.pairs import SMALL, Pair, parameter_of, sgd_of


class Kind(NamedTuple):
    """An optimizer, and the model's dtype."""
    package: str
    arguments: dict = {}  # of the optimizer
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5


IN_16_BITS = {"dtype": torch.bfloat16, "tolerance": 2e-2}
KINDS = {
    **{stage: Kind(stage) for stage in STAGES},
    "stage 3, main_grad": Kind(STAGE_3, {"grad_dtype": torch.float32}, **IN_16_BITS),
    "stage 4, small buckets": Kind(STAGE_4, SMALL),
    "chain": Kind(STAGE_4),
    **{name: Kind(name) for name in ("variants.finite", "variants.muon", "variants.offload", "variants.per_parameter",
                                     "tests.variants.on_pairs")},
    "variants.remainder16": Kind("variants.remainder16", **IN_16_BITS),
    "variants.wire16": Kind("variants.wire16", tolerance=2e-2),
}


class Critic(nn.Sequential):
    """Two layers that take inputs of any dtype."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))

    def forward(self, x):
        return super().forward(x.to(self[0].weight.dtype)).float()


def chain_of(package):
    """Return a function that makes a Chained, with an optimizer for each layer of a Critic."""
    def chain(params, *args, **kwargs):
        first_layer, second_layer = params[:2], params[2:]
        return Chained(*(optimizer_of(package)(layer, *args, **kwargs) for layer in (first_layer, second_layer)))

    return chain


def pair_of(rank, kind):
    package, arguments, dtype, _ = KINDS[kind]
    return Pair(rank, package, torch.optim.SGD, net=lambda seed: Critic(seed).to(dtype), own=arguments,
                of=chain_of if kind == "chain" else optimizer_of, lr=1.0)


def step(pair):
    """Step both optimizers. Unlike Pair.step(), don't call zero_grad() of the sharded optimizer."""
    pair.optimizer.step()
    pair.replicated.step()


def drop(pair):
    """Call zero_grad() of the model. In the reference the optimizer drops the gradients, of main parameters too."""
    pair.model.zero_grad()
    pair.replicated.optimizer.zero_grad()


def gan(pair):
    """Step without zero_grad(), and run a second backward pass, as the generator's is. Then drop all gradients."""
    for number in range(3):
        drop(pair)
        pair.backward(number)
        step(pair)
        pair.backward(10 + number)
    drop(pair)


def drop_micro_batches(pair):
    """Drop two micro-batches that were sent and one that was not, and one more. The last micro-batch counts."""
    pair.backward(0, 1)
    with pair.optimizer.no_sync():
        pair.backward(2)
    drop(pair)
    pair.backward(3)
    drop(pair)
    pair.backward(4)


def drop_what_was_averaged(pair):
    """Drop gradients that were averaged: before a step, and after a step."""
    pair.backward(0)
    pair.optimizer.clip_grad_norm_(0.1)
    drop(pair)
    pair.backward(1)
    pair.optimizer.finish_grad_sync()
    step(pair)
    drop(pair)


def drop_what_was_not_sent(pair):
    """Drop nothing, and then the gradients of one layer."""
    drop(pair)
    with pair.optimizer.no_sync():
        pair.backward(0)
        pair.model[2].zero_grad()
    for param in pair.replicated.model[2].parameters():
        pair.replicated.main.get(param, param).grad = None
    pair.backward(1)


def fail(grad):
    raise ZeroDivisionError


def drop_what_has_failed(pair):
    """Let a backward pass fail, on rank 0 when it has only computed the gradients of the last layer."""
    x, _ = batch(0, pair.rank.number, device=pair.rank.device)
    inputs = x.to(pair.model[0].weight.dtype).requires_grad_().clone()  # a clone is no leaf: its hook runs in the pass
    hidden = pair.model[0](inputs)
    fails_at = hidden if pair.rank.number == 0 else inputs
    fails_at.register_hook(fail)
    with contextlib.suppress(ZeroDivisionError):
        pair.model[2](hidden).sum().backward()
    drop(pair)


LOOPS = [gan, drop_micro_batches, drop_what_was_averaged, drop_what_was_not_sent, drop_what_has_failed]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(loop=LOOPS)
def test_a_loop_with_zero_grad_of_the_model_is_that_of_torch(rank, kind, loop):
    """Drop gradients in each way, and take two steps: parameters are those of one process, and have moved."""
    if kind == "chain" and loop is drop_what_has_failed:
        return  # docs/reference.md refuses it: rank 0 would run fewer backward passes of the first layer's optimizer
    pair = pair_of(rank, kind)
    start = nn.utils.parameters_to_vector(pair.model.parameters()).detach()
    loop(pair)
    for number in (20, 21):
        pair.backward(number)
        step(pair)
        drop(pair)
    own, expected = [nn.utils.parameters_to_vector(model.parameters()) for model in pair.models]
    torch.testing.assert_close(own, expected, rtol=0, atol=KINDS[kind].tolerance)
    assert (own - start).abs().max() > 0.1


@on_ranks(2)
def test_the_leaves_of_same_bits_are_counted_anew(rank):
    """Drop one leaf of this rank before the first step, and two before the second. Then compute two leaves of 1."""
    weight = parameter_of(0, rank)
    optimizer = sgd_of("variants.same_bits", [weight], leaves=4)
    for n_dropped in (1, 2):
        for _ in range(n_dropped):
            (weight * 100).sum().backward()
        nn.ParameterList([weight]).zero_grad()
        for _ in range(2):
            weight.sum().backward()
        optimizer.step()
    assert weight.eq(-2).all()  # two steps, each with a mean gradient of 1


# --------------------------------------------------------------------------------------------- an error on every rank


def two_layers(rank, stage, **kwargs):
    """Return a module of parameters of zeros, and SGD with a learning rate of 1."""
    module = nn.ModuleList(nn.ParameterList([parameter_of(0, rank) for _ in range(3)]) for _ in range(2))
    return module, sgd_of(stage, module.named_parameters(), **SMALL if stage == STAGE_4 else {}, **kwargs)


def backward(module):
    """Add 1 to each gradient."""
    sum(param.sum() for param in module.parameters()).backward()


@on_ranks(stage=[STAGE_3, STAGE_4])
def test_a_part_of_what_was_sent_cannot_be_dropped(rank, stage):
    """Stage 3 sends when it clips."""
    module, optimizer = two_layers(rank, stage)
    backward(module)
    if stage == STAGE_3:
        optimizer.clip_grad_norm_(1e6)
    module[1].zero_grad()
    assert "drop the gradient of parameter 1.0 alone" in error_of(optimizer.step)
    assert all(param.eq(0).all() for param in module.parameters())
    optimizer.zero_grad()
    backward(module)
    optimizer.step()
    assert all(param.eq(-1).all() for param in module.parameters())


@on_ranks(n_later=[0, 1])
def test_ranks_of_which_some_drop_gradients_are_an_error_on_every_rank(rank, n_later):
    """Rank 0 drops them. Then all ranks step, or first run another backward pass, which sends more buckets."""
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


# ---------------------------------------------------------------------------------------------- what zero_grad() leaves


@on_ranks(set_to_none=[True, False], by=["optimizer", "module"])
def test_an_unused_parameter_has_zeros_or_nothing_as_zero_grad_left_it(rank, stage, set_to_none, by):
    """With a gradient of zeros a step halves the parameter, by weight decay. Without a gradient nothing changes.

    Stage 3 has no None: its missing gradients are zeros.
    """
    used, unused = parameter_of(1, rank), parameter_of(1, rank)
    arguments = {"find_unused_parameters": True} if stage == STAGE_4 else {}
    optimizer = sgd_of(stage, [used, unused], weight_decay=0.5, **arguments)
    owner = optimizer if by == "optimizer" else nn.ParameterList([used, unused])
    factor = 1.0 if set_to_none and stage != STAGE_3 else 0.5  # what a step without a new gradient multiplies by
    (used.sum() + unused.sum()).backward()
    optimizer.step()  # 1 - (1 + 0.5) = -0.5
    owner.zero_grad(set_to_none=set_to_none)
    used.sum().backward()
    optimizer.step()  # -0.5 - (1 - 0.25) = -1.25
    owner.zero_grad(set_to_none=set_to_none)
    assert used.eq(-1.25).all() and unused.eq(-0.5 * factor).all()
    (used.sum() + unused.sum()).backward()
    owner.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    assert used.eq(-1.25 * factor).all() and unused.eq(-0.5 * factor * factor).all()
