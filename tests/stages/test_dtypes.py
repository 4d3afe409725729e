"""GradScaler in all stages, and 16-bit parameters in stage 3: what is refused, and what the state weighs.

That 16-bit parameters train as fp32 main parameters do is in test_stages.py and test_overlap.py. That every arrangement
of ranks and optimizers skips a step together is in tests/variants/test_skipping.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from harness import STAGE_3, STAGE_4, STAGES
from harness.planning.alone import STATES, record
from harness.training.options import MODELS
from harness.training.rows import RowId
from stage3_gradbuffer import DistributedOptimizer
from tests.common import batch, error_of, on_its_device, on_ranks, optimizer_of
from tests.pairs import ADAMW, sgd_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# ------------------------------------------------------------------------------------------------------- GradScaler


class Case(NamedTuple):
    stage: str
    after_unscale: Callable | None = None  # is called with (optimizer, model) after unscale_(); None: no unscale_()
    dtype: torch.dtype = FP32
    arguments: dict = {}  # of the optimizer


def clip(optimizer, model):
    optimizer.clip_grad_norm_(1e6)


def remove_infs(optimizer, model):
    for param in model.parameters():
        param.grad.nan_to_num_(0, 0, 0)


CASES = [*(Case(stage, after_unscale) for stage in STAGES[:3] for after_unscale in (clip, remove_infs)),
         Case(STAGE_3, dtype=FP16), Case(STAGE_3, dtype=FP16, arguments={"grad_dtype": FP32}), Case(STAGE_4)]


def scaler_of(rank, scale):
    """Return a GradScaler that begins with `scale`. A scaler of 1 does nothing."""
    return torch.amp.GradScaler(rank.device.type, init_scale=scale, enabled=scale != 1)


def train_under(scaler, rank, case, steps):
    """Train in the steps with these numbers. In step 1 rank 1 has an inf. Return the parameters after each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Linear(11, 7)).to(case.dtype)
    optimizer = optimizer_of(case.stage)(model.parameters(), **case.arguments, **ADAMW)
    after_each_step = []
    for step in steps:
        x, y = batch(step, rank.number)
        loss = (model(x.to(case.dtype)).float() - y).square().mean()
        if step == 1 and rank.number == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if case.after_unscale and scaler.is_enabled():
            scaler.unscale_(optimizer)
            case.after_unscale(optimizer, model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after_each_step.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    return after_each_step


@on_ranks(3, case=CASES)
@on_its_device
def test_a_scale_leaves_no_trace_and_an_inf_on_one_rank_skips_the_step_on_every_rank(rank, case):
    """A scale is a power of two: parameters have the same bits as in training without a scaler and without step 1.

    An inf that unscale_() has found counts, even if the program has removed this inf since.
    """
    scaler = scaler_of(rank, 64.0)
    first, after_skipped_step, *others = train_under(scaler, rank, case, [0, 1, 2, 3])
    assert scaler.get_scale() == 32
    assert torch.equal(after_skipped_step, first)
    expected = train_under(scaler_of(rank, 1), rank, case, [0, 2, 3])
    assert all(map(torch.equal, [first, *others], expected))
    assert not torch.equal(first, others[0])


UNSEEN = {STAGE_3: (FP16, {"grad_dtype": FP32}), STAGE_4: (FP32, {"find_unused_parameters": True})}


@on_ranks(2, stage=UNSEEN)
@on_its_device
def test_unscale_that_sees_no_gradient_is_refused(rank, stage):
    """Stage 3 has the gradient in main_grad. Stage 4 has sent the gradient of rank 0; rank 1 has none, and is told."""
    dtype, arguments = UNSEEN[stage]
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = sgd_of(stage, [weight], **arguments)
    scaler = scaler_of(rank, 4.0)
    loss = scaler.scale(weight.sum())
    if stage == STAGE_3 or rank.number == 0:
        loss.backward()
    scaler.unscale_(optimizer)
    assert "clip_grad_norm_(max_norm * scaler.get_scale())" in error_of(lambda: scaler.step(optimizer))


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("d", [2, 64])
@pytest.mark.parametrize("name, row, formula", STATES)
def test_bytes_a_parameter_are_those_of_the_formula(name, row, formula, d):
    """Stage 4 holds two bucket buffers besides: b."""
    counted = record(RowId(row), MODELS["tiny"], d)
    b = counted.held["buffers"] / counted.numel
    expected = eval(formula, {"d": d, "b": b})
    assert counted.bytes_per_param == pytest.approx(expected, rel=0.01)
    assert (b > 0) == name.startswith("stage 4")


# ------------------------------------------------------------------------------------------- the buffer and its users


@on_ranks(2)
@on_its_device
def test_a_grad_dtype_that_the_buffer_cannot_take_is_refused(rank):
    params = [torch.nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in (FP16, FP64)]
    refusal = error_of(lambda: DistributedOptimizer(params, grad_dtype=FP32), ValueError)
    assert "parameter 1 of group 0 is torch.float64: its gradients can't be kept in torch.float32" in refusal


@on_ranks(2)
@on_its_device
def test_16_bit_gradients_that_were_changed_after_their_average_are_an_error(rank):
    """They have been copied to fp32 gradients by then."""
    weight = torch.nn.Parameter(torch.zeros(64, dtype=BF16))
    optimizer = sgd_of(STAGE_3, [weight])
    weight.sum().backward()
    optimizer.finish_grad_sync()
    weight.grad.mul_(0.5)
    assert "16-bit gradients were changed after finish_grad_sync" in error_of(optimizer.step)
