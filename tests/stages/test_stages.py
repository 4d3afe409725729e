"""What one stage does and others don't: gradients that are users' to write in stages 1 to 3, the buffer of stage 3."""

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.common import STAGES, Net, batch, error_of, loss_of, on_ranks, one_rank_of, optimizer_of, trainable
from tests.pairs import ADAMW, Pair, parameter_of, sgd_of, train

ONE, TWO, THREE, FOUR = STAGES


@pytest.mark.parametrize("stage", [ONE, TWO])
@on_ranks(2)
def test_beneath_ddp(rank, stage):
    """The gradients are averages already, and the norm is theirs."""
    pair = Pair(rank, stage, own={"average_gradients": False})
    wrapped = DistributedDataParallel(pair.model, gradient_as_bucket_view=True)
    for step in range(3):
        loss_of(wrapped, *batch(step, rank.rank, device=rank.device)).backward()
        pair.replicated.backward(step)
        pair.clip(0.1)
        pair.step()
    pair.assert_same(is_exact=False)


UNUSED = {FOUR: {"find_unused_parameters": True}}


@pytest.mark.parametrize("stage, kwargs", [*((s, UNUSED.get(s, {})) for s in STAGES), (FOUR, {})])
@on_ranks(3)
def test_unused_parameters_as_in_ddp_with_find_unused_parameters(rank, stage, kwargs):
    """`b` is used on rank 0 only, `c` nowhere, and rank 1 has run out of data: it makes no backward pass.

    What a rank has no gradient of counts as zero there, and the mean is over all ranks; `c` is skipped, weight decay
    and all. In stage 3 its gradient is zero, and it decays.
    """
    params = [parameter_of(1, rank) for _ in range(3)]
    optimizer = sgd_of(stage, zip("abc", params), weight_decay=0.5, **kwargs)
    expected = [1.0, 1.0, 1.0]
    for _ in range(2):
        if rank.rank != 1:
            (params[0].sum() + (params[1].sum() * 2 if rank.rank == 0 else 0)).backward()
        if stage == FOUR and not kwargs:
            assert "no gradient on some rank for parameter a, b, c:" in error_of(optimizer.step)
            continue
        optimizer.step()
        optimizer.zero_grad()
        decay = 0.5 if stage == THREE else 0
        expected = [value - grad - rate * value for value, grad, rate in zip(expected, (2 / 3, 2 / 3, 0),
                                                                            (0.5, 0.5, decay))]
    assert [param[0].item() for param in params] == pytest.approx(expected)


class CountsInGroups(torch.optim.Optimizer):
    """As apex's and schedule-free optimizers do, and it steps by 1 / count; and it notes the rate that it took."""

    def __init__(self, params, lr=0.1, count=0):
        super().__init__(params, {"lr": lr, "count": count})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["last_lr"] = group["lr"]
            for param in (param for param in group["params"] if param.grad is not None):
                param -= group["lr"] / group["count"] * param.grad


@on_ranks(2)
def test_what_an_optimizer_counts_and_notes_in_its_groups(rank, stage):
    params = [parameter_of(1, rank, n=40) for _ in range(3)]
    optimizer = optimizer_of(stage)(params, CountsInGroups)
    for lr in (0.1, 0.1, 0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        sum(param.sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["last_lr"] == lr
    assert [param[0].item() for param in params] == pytest.approx([1 - 0.1 * (1 + 1 / 2 + 1 / 3) - 0.2 / 4] * 3)
    assert optimizer.param_groups[0]["count"] == optimizer.state_dict()["param_groups"][0]["count"] == 4


class WantsRequiresGrad(torch.optim.SGD):
    def step(self, closure=None):
        if any(param.requires_grad for group in self.param_groups for param in group["params"]):
            super().step()


@pytest.mark.parametrize("stage", [THREE, FOUR])
def test_what_would_not_be_stepped_or_does_not_lie_in_one_piece_is_refused(stage):
    with one_rank_of(2):
        weight = torch.nn.Parameter(torch.ones(8, 8))
        with pytest.raises(ValueError, match="WantsRequiresGrad is not element-wise"):
            optimizer_of(stage)([weight], WantsRequiresGrad)
        with pytest.raises(ValueError, match="conv is not contiguous"):
            optimizer_of(stage)([("conv", torch.nn.Parameter(torch.ones(4, 6).t()))])


@on_ranks(2)
def test_what_p_grad_holds_at_step_counts(rank, stage):
    """p.grad may be dropped or replaced by the user."""
    pair = Pair(rank, stage)
    model, reference = pair.models
    with pair.optimizer.no_sync():
        pair.backward(5)
        for one in pair.models:
            one.zero_grad()  # sets p.grad to None: these gradients are gone
        pair.backward(0)
    for param in [*trainable(model), *trainable(reference)]:
        param.grad = param.grad.clone() * 2
    model.scale.grad = None if stage != FOUR else torch.zeros_like(model.scale)  # None is an error in stage 4
    # Without gradient a parameter is not stepped in stages 1 and 2; in stage 3 the buffer is zero there.
    reference.scale.grad = torch.zeros_like(model.scale) if stage in (THREE, FOUR) else None
    pair.step()
    pair.assert_same()


@pytest.mark.parametrize("stage", [ONE, TWO])
@on_ranks(2)
def test_a_hook_may_take_the_gradient_first(rank, stage):
    """A user's hook, there before the optimizer's, drops the gradient of one parameter: a filter say."""
    params = [torch.nn.Parameter(torch.ones(3, device=rank.device)) for _ in range(2)]
    params[0].register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    optimizer = optimizer_of(stage)(params, torch.optim.SGD, lr=0.25)
    for _ in range(2):
        sum(param.sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [param[0].item() for param in params] == [1.0, 0.5]


@pytest.mark.parametrize("stage", [ONE, TWO, THREE])
@on_ranks(2, how_and_expected=[("add", 0.59375), ("detach", 0.5), ("data", 0.5)])
def test_a_gradient_may_be_changed_in_every_way(rank, stage, how_and_expected):
    """Outside of no_grad, as torch allows it; and then training goes on, as if nothing had been.

    SGD, 2 -> 2 - (2 + 0.5 · 2) / 4 = 1.25 -> 1.25 - (2 + 0.5 · 1.25) / 4, or 2 -> 2 - 3/4 -> 2 - 6/4.
    """
    how, expected = how_and_expected
    weight = torch.nn.Parameter(torch.full((3,), 2.0, device=rank.device))
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=0.25)
    for _ in range(2):
        weight.sum().backward()
        if how == "add":
            weight.grad += 0.5 * weight  # by a graph
        elif how == "detach":
            weight.grad.detach_().mul_(2)
        else:
            weight.grad.data = weight.grad.data * 2
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight.grad is None or not weight.grad.requires_grad
    assert weight[0].item() == expected


@on_ranks(2, how=["assigned", "data", "later"])
def test_a_main_grad_that_is_not_of_the_buffer_is_an_error(rank, how):
    params = [torch.nn.Parameter(torch.ones(3, device=rank.device, dtype=torch.bfloat16)) for _ in range(2)]
    named, kwargs = list(zip(("first", "second"), params)), {"lr": 0.25, "grad_dtype": torch.float32}
    optimizer = optimizer_of(THREE)(named, torch.optim.SGD, **kwargs)
    if how == "later":
        later = optimizer_of(THREE)(named[1:], torch.optim.SGD, **kwargs)
    sum(param.sum() for param in params).backward()
    if how == "assigned":
        params[1].main_grad = params[1].main_grad / 2
    elif how == "data":
        params[1].main_grad.data = params[1].main_grad.data / 2
    with pytest.raises(RuntimeError, match="main_grad of parameter second was replaced, or a later optimizer has"):
        optimizer.step()
    assert all(param.eq(1).all() for param in params)
    if how == "later":
        later.step()
        assert params[1].eq(0.75).all()


@pytest.mark.parametrize("stage", [THREE, FOUR])
@pytest.mark.parametrize("dtype, starts", [(torch.float32, [0, 64, 192]), (torch.bfloat16, [0, 64, 128])], ids=str)
def test_parameters_and_shards_begin_at_multiples_of_64_bytes(stage, dtype, starts):
    """5, 17 and 9 elements take 64, 128 and 64 bytes in fp32, 64 each in 16 bits, and 2 shards are equal."""
    with one_rank_of(2):
        params = [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for numel in (5, 17, 9)]
        optimizer = optimizer_of(stage)(params if stage == THREE else params[::-1], lr=0.1)  # the last one goes first
        flat = optimizer.buffers[0].flat if stage == THREE else optimizer.buckets[0].flat_params
        places = optimizer.buffers[0].grads if stage == THREE else optimizer.buckets[0].views
    assert [(place.data_ptr() - flat.data_ptr()) for place in places] == starts
    assert flat.nbytes == 256


@pytest.mark.parametrize("stage", [THREE, FOUR])
@on_ranks(optimizer_cls=[torch.optim.AdamW, torch.optim.SGD], seed=range(8))
def test_fused_kernels_round_a_shard_as_they_round_the_whole(rank, stage, optimizer_cls, seed):
    """Sizes that fill no vector, in shards that cut them. Equal gradients: their sum is the same in any order."""
    generator, d = torch.Generator().manual_seed(seed), rank.world_size
    sizes = torch.randint(1, 200, (6,), generator=generator).tolist()
    params = [torch.randn(numel, generator=generator).to(rank.device) for numel in sizes]
    ours, plain = ([param.clone().requires_grad_() for param in params] for _ in range(2))
    optimizer = optimizer_of(stage)(ours, optimizer_cls, lr=0.01, fused=True)
    reference = optimizer_cls(plain, lr=0.01, fused=True)
    for step in range(2):
        for param, expected in zip(ours, plain):
            grad = torch.randn(param.shape, generator=generator).to(rank.device)
            (param * grad).sum().backward()
            expected.grad = sum([grad / d] * d)
        optimizer.step()
        reference.step()
        assert all(map(torch.equal, ours, plain)), (sizes, step)


@on_ranks(2)
def test_no_warnings_in_a_plain_loop(rank, stage):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = Net(seed=0).to(rank.device)
        optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, rank, 0)
        scheduler.step()
