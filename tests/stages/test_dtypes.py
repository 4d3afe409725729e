"""GradScaler in all stages, and 16-bit parameters in stage 3: what is refused, and what the state weighs.

That 16-bit parameters train as fp32 main parameters do is in test_stages.py and test_overlap.py.
"""


import pytest
import torch

from harness import STAGE_3, STAGE_4, STAGES
from harness.planning.alone import STATES, record
from harness.training.options import SPECS
from stage3_gradbuffer import DistributedOptimizer
from tests.common import batch, error_of, on_its_device, on_ranks, optimizer_of, situation
from tests.pairs import ADAMW, sgd_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
UNUSED = {"find_unused_parameters": True}


# ------------------------------------------------------------------------------------------------------- GradScaler


def scaler_of(rank, scale=1024.0):
    return torch.amp.GradScaler(rank.device.type, init_scale=scale, growth_interval=1000, enabled=scale != 1)


def after_each_step(rank, stage, row, after_unscale, explodes, scale):
    """Four steps under a GradScaler, which does nothing where `scale` is 1. -> the scale in the end, parameters

    after_unscale: what is done to the optimizer and the model after unscale_, which isn't called otherwise. explodes:
    in the second step rank 1 has an inf; without a scaler that step is left out.
    """
    dtype, grad_dtype = row
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 11), torch.nn.Linear(11, 7)).to(dtype)
    optimizer = optimizer_of(stage)(model.parameters(), **({"grad_dtype": grad_dtype} if grad_dtype else {}), **ADAMW)
    scaler, history = scaler_of(rank, scale), []
    for step in [0, 2, 3] if explodes and scale == 1 else range(4):
        x, y = batch(step, rank.number)
        loss = (model(x.to(dtype)).float() - y).square().mean()
        scaler.scale(loss * torch.inf if explodes and step == rank.number == 1 else loss).backward()
        if after_unscale and scale > 1:
            scaler.unscale_(optimizer)
            after_unscale(optimizer, model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append(torch.cat([param.detach().float().view(-1) for param in model.parameters()]))
    return scaler.get_scale(), history


UNSCALE = [None, lambda optimizer, model: optimizer.clip_grad_norm_(1e6),
           lambda optimizer, model: [param.grad.nan_to_num_(0, 0, 0) for param in model.parameters()]]
CASES = [*((stage, (FP32, None), unscale) for stage in STAGES[:3] for unscale in UNSCALE),
         (STAGE_4, (FP32, None), None), (STAGE_3, (FP16, None), None), (STAGE_3, (FP16, FP32), None)]


@on_ranks(3, case=CASES, explodes=[False, True])
@on_its_device
def test_a_scale_leaves_no_trace_and_an_inf_on_one_rank_skips_the_step_on_every_rank(rank, case, explodes):
    """A power of two: the same bits as without a scaler. Of a step that is skipped nothing is left either."""
    scale, found = after_each_step(rank, *case, explodes, 64.0)
    _, expected = after_each_step(rank, *case, explodes, 1)
    assert scale == (32.0 if explodes else 64.0)
    assert not explodes or torch.equal(found[0], found.pop(1))
    assert all(map(torch.equal, found, expected)) and not torch.equal(found[0], found[1])


def backward_inside(optimizer, loss):
    with optimizer.no_sync():
        loss.backward()


SEES_NONE = {  # stage, dtype, arguments; backward: of the optimizer, losses and rank
    # Those of 16-bit parameters are in main_grad: clipping would use scaled ones.
    "main_grad": (STAGE_3, FP16, {"grad_dtype": FP32}, lambda optimizer, losses, rank: losses[0].backward()),
    # One pass has left, and unscale_ finds the gradients of another, inside no_sync.
    "of some": (STAGE_4, FP32, UNUSED, lambda optimizer, losses, rank: (
        losses[0].backward(), backward_inside(optimizer, losses[1]))),
    # Gradients have left on rank 0; the other ranks had none, and must hear of it.
    "of a rank": (STAGE_4, FP32, UNUSED, lambda optimizer, losses, rank: rank == 0 and losses[0].backward()),
}


@on_ranks(2, what=SEES_NONE)
@on_its_device
def test_unscale_that_sees_no_gradient_is_refused(rank, what):
    """On every rank, also where it sees some of the gradients, or a rank has none."""
    stage, dtype, kwargs, go_backward = SEES_NONE[what]
    params, scaler = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2)], scaler_of(rank)
    optimizer = sgd_of(stage, params, **kwargs)
    go_backward(optimizer, [scaler.scale(param.sum()) for param in params], rank.number)
    scaler.unscale_(optimizer)
    assert "clip_grad_norm_(max_norm * scaler.get_scale())" in error_of(lambda: scaler.step(optimizer))


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name, choice, formula", STATES)
def test_bytes_a_parameter_are_those_of_the_formula(name, choice, formula):
    """Stage 4 holds two bucket buffers besides: b."""
    for d in (2, 64):
        with situation((name, d)):
            found = record(choice, SPECS["tiny"], d)
            b = found.held["buffers"] / found.numel
            assert sum(found.held.values()) / found.numel == pytest.approx(eval(formula, {"d": d, "b": b}), rel=0.01)
            assert bool(b) == name.startswith("stage 4")


# ------------------------------------------------------------------------------------------- the buffer and its users


@on_ranks(2, dtypes_and_grad_dtype=[([FP32], BF16), ([BF16], FP64), ([FP16, FP64], FP32)])
@on_its_device
def test_a_grad_dtype_that_the_buffer_cannot_take_is_refused(rank, dtypes_and_grad_dtype):
    """Refuse it before anything changes, in the constructor and for a group that is added."""
    dtypes, grad_dtype = dtypes_and_grad_dtype
    params = [torch.nn.Parameter(torch.full((5,), rank.number + 1.0, dtype=dtype)) for dtype in dtypes]
    words = f"of group 0 is {dtypes[-1]}: its gradients can't be kept in {grad_dtype}"
    with pytest.raises(ValueError, match=f"parameter {len(dtypes) - 1} {words}"):
        DistributedOptimizer(params, grad_dtype=grad_dtype)
    assert all(param.eq(rank.number + 1).all() for param in params)
    optimizer = DistributedOptimizer([torch.nn.Parameter(torch.ones(5, dtype=grad_dtype))], grad_dtype=grad_dtype)
    with pytest.raises(ValueError, match="of group 1 is .* can't be kept in"):
        optimizer.add_param_group({"params": params})


CHANGES = {  # of gradients of 5, after their synchronization: dtype, the change, what is stepped
    "unscale": (FP32, lambda scaler, optimizer, weight: scaler.unscale_(optimizer), -5.0),
    "clip 16 bits": (BF16, lambda scaler, optimizer, weight: torch.nn.utils.clip_grad_value_([weight], 0.5), None),
}


@on_ranks(2, change=CHANGES)
@on_its_device
def test_a_change_of_gradients_after_their_synchronization(rank, change):
    """16-bit gradients have been copied to fp32 ones by then: an error. fp32 ones are the buffer's own."""
    dtype, make_change, expected = CHANGES[change]
    weight, scaler = torch.nn.Parameter(torch.zeros(64, dtype=dtype)), scaler_of(rank, 4.0)
    optimizer = sgd_of(STAGE_3, [weight])
    scaler.scale((weight * 5).sum()).backward()
    optimizer.finish_grad_sync()
    make_change(scaler, optimizer, weight)
    if expected is None:
        assert "16-bit gradients were changed after finish_grad_sync" in error_of(lambda: scaler.step(optimizer))
    else:
        scaler.step(optimizer)
        assert weight.unique().tolist() == [expected]
