"""What one stage does and others don't: gradients that are users' to write in stages 1 to 3, the buffer of stage 3."""

import functools

import pytest
import torch

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from tests.common import error_of, on_ranks, one_rank_of, optimizer_of, trainable
from tests.pairs import ADAMW, Pair, parameter_of, sgd_of
from tests.stages.test_overlap import Branches


@on_ranks(3)
def test_unused_parameters_as_in_ddp_with_find_unused_parameters(rank, stage):
    """`b` is used on rank 0 only, `c` nowhere, and rank 1 has run out of data: it makes no backward pass.

    What a rank has no gradient of counts as zero there, and the mean is over all ranks; `c` is skipped, weight decay
    and all. In stage 3 its gradient is zero, and it decays.
    """
    a, b, c = (parameter_of(1, rank) for _ in range(3))
    own = {"find_unused_parameters": True} if stage == STAGE_4 else {}
    optimizer = sgd_of(stage, [("a", a), ("b", b), ("c", c)], weight_decay=0.5, **own)
    if rank.number == 0:
        (a.sum() + 2 * b.sum()).backward()
    elif rank.number == 2:
        a.sum().backward()
    optimizer.step()
    after = [0.5 - 2 / 3, 0.5 - 2 / 3, 0.5 if stage == STAGE_3 else 1]
    assert [param[0].item() for param in (a, b, c)] == pytest.approx(after)


ONE = [torch.nn.Parameter(torch.ones(3))]
OF_TWO_DTYPES = [*ONE, torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]
CHANNELS_LAST = [torch.nn.Parameter(torch.ones(2, 3, 4, 2).to(memory_format=torch.channels_last))]


@pytest.mark.parametrize("stage, params, kwargs, words", [
    (STAGE_1, OF_TWO_DTYPES, {}, "parameter 1 of group 0 is torch.float64, 0 of group 0 is torch.float32: use one"),
    (STAGE_3, CHANNELS_LAST, {}, "0 of group 0 is not contiguous"),
    (STAGE_4, ONE, {"reduce_dtype": torch.float16}, "reduce_dtype is torch.float16"),
    (STAGE_4, ONE, {"bucket_cap_mb": 0}, "bucket_cap_mb is 0")])
def test_what_a_stage_cannot_do_is_refused(stage, params, kwargs, words):
    with one_rank_of(2), pytest.raises(ValueError, match=words):
        optimizer_of(stage)(params, **kwargs)


@on_ranks(2)
def test_what_p_grad_holds_at_step_counts(rank, stage):
    """Drop gradients, double others, and drop that of `scale`.

    Without a gradient a parameter is not stepped in stages 1 and 2; in stage 3 the buffer is zero there. Stage 4 takes
    none, so it has zeros here.
    """
    pair = Pair(rank, stage)
    with pair.optimizer.no_sync():
        pair.backward(5)
        for model in pair.models:
            model.zero_grad()
        pair.backward(0)
    for model in pair.models:
        for param in trainable(model):
            param.grad = param.grad.clone() * 2
    model, reference = pair.models
    zeros = torch.zeros_like(model.scale)
    model.scale.grad = zeros if stage == STAGE_4 else None
    reference.scale.grad = None if stage in (STAGE_1, STAGE_2) else zeros
    pair.step()
    pair.assert_same()


CHANGES = {  # SGD, 2 -> 2 - (2 + 0.5 · 2) / 4 = 1.25 -> 1.25 - (2 + 0.5 · 1.25) / 4, or 2 -> 2 - 3/4 -> 2 - 6/4
    "by a graph": (lambda weight: weight.grad.add_(0.5 * weight), 0.59375),
    "its data": (lambda weight: setattr(weight.grad, "data", weight.grad.data * 2), 0.5),
}


@on_ranks(2, how=CHANGES)
def test_a_gradient_may_be_changed_in_every_way_in_stage_3(rank, how):
    """Change param.grad outside of no_grad, as torch allows it, and run another backward pass. Then train on."""
    change, expected = CHANGES[how]
    weight = parameter_of(2, rank)
    optimizer = optimizer_of(STAGE_3)([weight], torch.optim.SGD, lr=0.25)
    for _ in range(2):
        weight.sum().backward()
        change(weight)
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight.grad is None or not weight.grad.requires_grad
    assert weight[0].item() == expected


@on_ranks(2, dtype=[torch.bfloat16, torch.float16])
def test_16_bit_parameters_have_fp32_main_gradients_in_stage_3(rank, dtype):
    """Train, train while a layer is frozen, and train all: parameters are to the bit those of one process."""
    pair = Pair(rank, STAGE_3, net=functools.partial(Branches, dtype=dtype), own={"grad_dtype": torch.float32}, **ADAMW)
    for first, is_trained in [(0, True), (2, False), (4, True)]:
        for model in pair.models:
            model.layers[0].requires_grad_(is_trained)
        pair.train(first, first + 1)
        pair.assert_same()


@on_ranks(2)
def test_an_assigned_main_grad_is_an_error(rank):
    param = parameter_of(1, rank).bfloat16().detach().requires_grad_()
    optimizer = sgd_of(STAGE_3, [("second", param)], grad_dtype=torch.float32)
    param.sum().backward()
    param.main_grad = param.main_grad / 2
    assert "main_grad of parameter second was replaced, or a later optimizer has" in error_of(optimizer.step)
    assert param.eq(1).all()
