"""What one stage does and others don't: gradients that are users' to write in stages 1 to 3, the buffer of stage 3."""

import pytest
import torch

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from tests.common import error_of, on_ranks, one_rank_of, optimizer_of, trainable
from tests.pairs import Pair, parameter_of, sgd_of


@on_ranks(3)
def test_unused_parameters_as_in_ddp_with_find_unused_parameters(rank, stage):
    """`b` is used on rank 0 only, `c` nowhere, and rank 1 has run out of data: it makes no backward pass.

    What a rank has no gradient of counts as zero there, and the mean is over all ranks; `c` is skipped, weight decay
    and all. In stage 3 its gradient is zero, and it decays.
    """
    params = [parameter_of(1, rank) for _ in range(3)]
    own = {"find_unused_parameters": True} if stage == STAGE_4 else {}
    optimizer = sgd_of(stage, zip("abc", params), weight_decay=0.5, **own)
    if rank.number != 1:
        (params[0].sum() + (params[1].sum() * 2 if rank.number == 0 else 0)).backward()
    optimizer.step()
    after = [0.5 - 2 / 3, 0.5 - 2 / 3, 0.5 if stage == STAGE_3 else 1]
    assert [param[0].item() for param in params] == pytest.approx(after)


@pytest.mark.parametrize("stage", [STAGE_3, STAGE_4])
def test_what_does_not_lie_in_one_piece_is_refused(stage):
    with one_rank_of(2), pytest.raises(ValueError, match="conv is not contiguous"):
        optimizer_of(stage)([("conv", torch.nn.Parameter(torch.ones(4, 6).t()))])


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
            model.zero_grad()  # sets p.grad to None: these gradients are gone
        pair.backward(0)
    model, reference = pair.models
    for param in [*trainable(model), *trainable(reference)]:
        param.grad = param.grad.clone() * 2
    zeros = torch.zeros_like(model.scale)
    model.scale.grad = zeros if stage == STAGE_4 else None
    reference.scale.grad = None if stage in (STAGE_1, STAGE_2) else zeros
    pair.step()
    pair.assert_same()


CHANGES = {  # SGD, 2 -> 2 - (2 + 0.5 · 2) / 4 = 1.25 -> 1.25 - (2 + 0.5 · 1.25) / 4, or 2 -> 2 - 3/4 -> 2 - 6/4
    "by a graph": (lambda weight: weight.grad.add_(0.5 * weight), 0.59375),
    "its data": (lambda weight: setattr(weight.grad, "data", weight.grad.data * 2), 0.5),
}


@pytest.mark.parametrize("stage", [STAGE_1, STAGE_2, STAGE_3])
@on_ranks(2, how=CHANGES)
def test_a_gradient_may_be_changed_in_every_way(rank, stage, how):
    """Outside of no_grad, as torch allows it; and then training goes on, as if nothing had been."""
    change, expected = CHANGES[how]
    weight = parameter_of(2, rank)
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=0.25)
    for _ in range(2):
        weight.sum().backward()
        change(weight)
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight.grad is None or not weight.grad.requires_grad
    assert weight[0].item() == expected


@on_ranks(2, how=["assigned", "later"])
def test_a_main_grad_that_is_not_of_the_buffer_is_an_error(rank, how):
    """Assign main_grad, or build a later optimizer of the same parameter, which then has it."""
    param = parameter_of(1, rank).bfloat16().detach().requires_grad_()
    optimizer = sgd_of(STAGE_3, [("second", param)], grad_dtype=torch.float32)
    if how == "later":
        later = sgd_of(STAGE_3, [param], grad_dtype=torch.float32)
    param.sum().backward()
    if how == "assigned":
        param.main_grad = param.main_grad / 2
    words = "main_grad of parameter second was replaced, or a later optimizer has"
    assert words in error_of(optimizer.step) and param.eq(1).all()
    if how == "later":
        later.step()
        assert param.eq(0).all()
