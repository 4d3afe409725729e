"""What one stage does and others don't: use beneath DDP, dtypes of stage 3, buckets, unused parameters, prefetch."""

import copy
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from stage3_gradbuffer.buffer import Holds
from tests.common import Net, Replicated, add, assert_same, batch, loss_of, optimizer_of, trainable
from tests.stages.test_contract import ADAMW, Lamb, backward, exact, train

FOUR = "stage4_overlap"


# -------------------------------------------------------------------------------------- stages 1 and 2 beneath DDP


def beneath_ddp(rank, stage):
    model, reference = Net(seed=0).to(rank.device), Replicated(rank, **ADAMW)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(stage)(trainable(model), average_gradients=False, **ADAMW)
    for step in range(4):
        loss_of(wrapped, *batch(step, rank.rank, device=rank.device)).backward()
        reference.backward(step)
        if step == 2:
            norm = optimizer.clip_grad_norm_(1e6)
            assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(trainable(reference.model), 1e6), rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    assert_same(model, reference.model, exact=False)


@pytest.mark.parametrize("stage", ["stage1_naive_broadcast", "stage2_allgather"])
def test_beneath_ddp(run, stage):
    run(beneath_ddp, stage)


def mixed_dtypes(rank, stage):
    dtypes = torch.float32, torch.bfloat16
    params = [torch.nn.Parameter(torch.ones(5, dtype=dtype, device=rank.device)) for dtype in dtypes]
    try:
        optimizer_of(stage)(params)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", ["stage1_naive_broadcast", "stage2_allgather"])
def test_mixed_dtypes_are_refused_where_one_flat_tensor_holds_all(run, stage):
    for message in run(mixed_dtypes, stage):
        assert "parameter 1 of group 0 is torch.bfloat16" in message


def unused_on_some_or_all_ranks(rank, stage, kwargs):
    """`b` is used on rank 0 only, `c` nowhere: `b` counts as zero elsewhere, `c` is skipped, weight decay and all."""
    a, b, c = (torch.nn.Parameter(torch.ones(6, device=rank.device)) for _ in range(3))
    optimizer = optimizer_of(stage)([a, b, c], torch.optim.SGD, lr=1.0, weight_decay=0.5, **kwargs)
    for _ in range(2):
        (a.sum() + (b.sum() * 2 if rank.rank == 0 else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return a[0].item(), b[0].item(), c[0].item()


@pytest.mark.parametrize(
    "stage, kwargs",
    [("stage1_naive_broadcast", {}), ("stage2_allgather", {}), (FOUR, {"find_unused_parameters": True})],
)
def test_unused_parameters_as_in_ddp_with_find_unused_parameters(run, stage, kwargs, world_size):
    def twice(value, grad):  # two steps of SGD with weight decay 0.5
        for _ in range(2):
            value -= grad + 0.5 * value
        return value

    for values in run(unused_on_some_or_all_ranks, stage, kwargs):
        assert values == pytest.approx((twice(1, 1), twice(1, 2 / world_size), 1.0))


# --------------------------------------------------------------------------------------------------- stages 3 and 4


def refuses(rank, stage, make):
    weight = torch.nn.Parameter(torch.ones(8, 8, device=rank.device) * rank.rank)
    before = weight.detach().clone()
    try:
        optimizer_of(stage)([weight], NOT_ELEMENTWISE.get(make, WantsRequiresGrad))
    except ValueError as error:
        assert torch.equal(weight, before)
        return str(error)


class CountsInGroups(torch.optim.Optimizer):
    """As apex's and schedule-free optimizers do, and it steps by 1 / count."""

    def __init__(self, params, lr=0.1, count=0):
        super().__init__(params, {"lr": lr, "count": count})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in (param for param in group["params"] if param.grad is not None):
                param -= group["lr"] / group["count"] * param.grad


class WantsRequiresGrad(torch.optim.SGD):
    def step(self, closure=None):
        if any(param.requires_grad for group in self.param_groups for param in group["params"]):
            super().step()


class LambWhereItDecays(Lamb):
    """timm's: the ratio of norms is for groups with weight decay only."""

    def __init__(self, params, lr=0.1, weight_decay=0):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                ratio = param.norm() / param.grad.norm() if group["weight_decay"] else 1
                param -= group["lr"] * ratio * param.grad


def counted_in_groups(rank, stage):
    params = [torch.nn.Parameter(torch.ones(40, device=rank.device)) for _ in range(3)]
    optimizer = optimizer_of(stage)(params, CountsInGroups)
    for _ in range(4):
        sum(param.sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [param[0].item() for param in params] == pytest.approx([1 - 0.1 * (1 + 1 / 2 + 1 / 3 + 1 / 4)] * 3)
    return moved and optimizer.param_groups[0]["count"] == optimizer.state_dict()["param_groups"][0]["count"] == 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_an_optimizer_counts_in_its_groups(run, stage):
    assert all(run(counted_in_groups, stage))


class NotesInGroups(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["last_lr"] = group["lr"]


def noted_in_groups(rank, stage):
    weight = torch.nn.Parameter(torch.ones(40, device=rank.device))
    optimizer, noted = optimizer_of(stage)([weight], NotesInGroups, lr=0.5), []
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        weight.sum().backward()
        optimizer.step()
        noted.append(optimizer.param_groups[0]["last_lr"])
    return noted


def test_what_an_optimizer_notes_in_its_groups(run, stage):
    assert all(noted == [0.5, 0.25] for noted in run(noted_in_groups, stage))


def refuses_a_group(rank, stage):
    """An optimizer that is element-wise with its defaults, and not with what a group says."""
    params = [torch.nn.Parameter(torch.ones(8, 8, device=rank.device)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}]
    with pytest.raises(ValueError, match="LambWhereItDecays is not element-wise"):
        optimizer_of(stage)(groups, LambWhereItDecays)
    optimizer = optimizer_of(stage)(groups[:1], LambWhereItDecays)
    with pytest.raises(ValueError, match="LambWhereItDecays is not element-wise"):
        optimizer.add_param_group(groups[1])
    return len(optimizer.param_groups)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", ["stage3_gradbuffer", FOUR])
def test_each_group_must_be_elementwise(run, stage):
    assert run(refuses_a_group, stage) == [1, 1]


NOT_ELEMENTWISE = {
    "Lamb": Lamb,
    "Adafactor": torch.optim.Adafactor,
    **({"Muon": torch.optim.Muon} if hasattr(torch.optim, "Muon") else {}),
}


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("make", NOT_ELEMENTWISE)
@pytest.mark.parametrize("stage", ["stage3_gradbuffer", FOUR])
def test_optimizers_that_are_not_elementwise_are_refused(run, stage, make):
    for message in run(refuses, stage, make):
        assert "not element-wise" in message


@pytest.mark.parametrize("world_size", [1])
@pytest.mark.parametrize("stage", ["stage3_gradbuffer", FOUR])
def test_an_optimizer_that_would_not_step_shards_is_refused(run, stage):
    (message,) = run(refuses, stage, "wants requires_grad")
    assert "WantsRequiresGrad doesn't step tensors with requires_grad=False" in message


def accepts(rank, stage):
    for name in ELEMENTWISE:
        optimizer_of(stage)([torch.nn.Parameter(torch.ones(3, device=rank.device))], getattr(torch.optim, name))


ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()


@pytest.mark.parametrize("world_size", [1])
@pytest.mark.parametrize("stage", ["stage3_gradbuffer", FOUR])
def test_every_elementwise_optimizer_of_torch_is_accepted(run, stage):
    run(accepts, stage)


def not_contiguous(rank, stage):
    try:
        optimizer_of(stage)([("conv", torch.nn.Parameter(torch.ones(4, 6, device=rank.device).t()))])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [1])
@pytest.mark.parametrize("stage", ["stage3_gradbuffer", FOUR])
def test_parameters_that_are_not_contiguous_are_refused(run, stage):
    assert "conv is not contiguous" in run(not_contiguous, stage)[0]


def model_zero_grad(rank, stage):
    """p.grad may be dropped or replaced by the user: what it holds at `step` is what counts."""
    model, reference = Net(seed=0).to(rank.device), Replicated(rank, **ADAMW)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    with optimizer.no_sync():
        backward(model, rank, 5)
        model.zero_grad()  # sets p.grad to None: these gradients are gone
        backward(model, rank, 0)
    for param in trainable(model):
        param.grad = param.grad.clone() * 2
    model.scale.grad = None if stage != FOUR else torch.zeros_like(model.scale)  # None is an error in stage 4
    for _ in range(2):
        reference.backward(0)
    # Without gradient a parameter is not stepped in stages 1 and 2; in stage 3 the buffer is zero there.
    reference.model.scale.grad = torch.zeros_like(model.scale) if stage in (FOUR, "stage3_gradbuffer") else None
    optimizer.step()
    reference.optimizer.step()
    assert_same(model, reference.model, exact(rank))


@pytest.mark.parametrize("stage", ["stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", FOUR])
def test_what_p_grad_holds_at_step_counts(run, stage):
    run(model_zero_grad, stage)


def states_of_the_buffer(rank):
    weight = torch.nn.Parameter(torch.arange(21.0, device=rank.device))
    optimizer = optimizer_of("stage3_gradbuffer")([weight], torch.optim.SGD, lr=1.0)
    buffer, seen = optimizer.buffers[0], []
    address = buffer.flat.data_ptr()
    assert weight.grad.data_ptr() == address and buffer.holds == Holds.ZEROS
    weight.sum().backward()
    assert weight.grad.data_ptr() == address and buffer.holds == Holds.GRADS
    for name in ("reduce_scatter_grads", "take_main_params", "all_gather_params", "zero"):

        def watched(method=getattr(buffer, name)):
            method()
            seen.append((buffer.holds, buffer.flat[21:].abs().sum().item()))

        setattr(buffer, name, watched)
    optimizer.step()
    assert buffer.flat.data_ptr() == address and weight.grad.data_ptr() == address
    assert [holds for holds, padding in seen] == [Holds.GRAD_SHARD, Holds.PARAM_SHARD, Holds.PARAMS, Holds.ZEROS]
    assert seen[0][1] == seen[-1][1] == 0  # padding


def test_five_states_of_one_buffer(run):
    run(states_of_the_buffer)


def backward_after_clip(rank):
    weight = torch.nn.Parameter(torch.ones(3, device=rank.device))
    optimizer = optimizer_of("stage3_gradbuffer")([weight], torch.optim.SGD, lr=1.0)
    weight.sum().backward()
    optimizer.clip_grad_norm_(1.0)
    try:
        weight.sum().backward()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [2])
def test_backward_into_the_reduced_shard_is_refused(run):
    assert all("call step() or the optimizer's zero_grad()" in message for message in run(backward_after_clip))


def step_after_a_refused_backward(rank):
    weight = torch.nn.Parameter(torch.ones(3, device=rank.device))
    optimizer = optimizer_of("stage3_gradbuffer")([weight], torch.optim.SGD, lr=0.25)
    weight.sum().backward()
    optimizer.clip_grad_norm_(100.0)
    with pytest.raises(RuntimeError, match="the optimizer's zero_grad"):
        (weight.sum() * 100).backward()
    with pytest.raises(RuntimeError, match="a backward pass after finish_grad_sync.. was refused"):
        optimizer.step()
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.clip_grad_norm_(100.0)
    optimizer.step()
    return weight.tolist()


@pytest.mark.parametrize("world_size", [2])
def test_what_a_refused_backward_has_added_is_not_stepped(run):
    assert run(step_after_a_refused_backward) == [[0.75] * 3] * 2


def step_without_what_a_hook_took(rank, stage, grad_dtype):
    """A user's hook, there before the optimizer's, drops the gradient of one parameter: a filter say."""
    dtype = torch.bfloat16 if grad_dtype else None
    params = [torch.nn.Parameter(torch.ones(3, device=rank.device, dtype=dtype)) for _ in range(2)]
    params[0].register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    kwargs = {"grad_dtype": grad_dtype} if grad_dtype else {}
    optimizer = optimizer_of(stage)(params, torch.optim.SGD, lr=0.25, **kwargs)
    for _ in range(2):
        sum(param.sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param[0].item() for param in params]


THREE = "stage3_gradbuffer"
KINDS = [("stage1_naive_broadcast", None), ("stage2_allgather", None), (THREE, None), (THREE, torch.float32)]


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage, grad_dtype", KINDS)
def test_a_hook_may_take_the_gradient_first(run, stage, grad_dtype):
    assert run(step_without_what_a_hook_took, stage, grad_dtype) == [[1.0, 0.5]] * 2


def change_a_gradient(rank, stage, how):
    """Outside of no_grad, as torch allows it; and then go on, as if nothing had been."""
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
    return weight[0].item()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("how, expected", [("add", 0.59375), ("detach", 0.5), ("data", 0.5)])
@pytest.mark.parametrize("stage", ["stage1_naive_broadcast", "stage2_allgather", THREE])
def test_a_gradient_may_be_changed_in_every_way(run, stage, how, expected):
    """SGD, 2 -> 2 - (2 + 0.5 · 2) / 4 = 1.25 -> 1.25 - (2 + 0.5 · 1.25) / 4, or 2 -> 2 - 3/4 -> 2 - 6/4."""
    assert run(change_a_gradient, stage, how) == [expected] * 2


def replace_main_grad(rank, how):
    params = [torch.nn.Parameter(torch.ones(3, device=rank.device, dtype=torch.bfloat16)) for _ in range(2)]
    named = list(zip(("first", "second"), params))
    optimizer = optimizer_of(THREE)(named, torch.optim.SGD, lr=0.25, grad_dtype=torch.float32)
    if how == "later":
        later = optimizer_of(THREE)(named[1:], torch.optim.SGD, lr=0.25, grad_dtype=torch.float32)
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


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("how", ["assigned", "data", "later"])
def test_a_main_grad_that_is_not_of_the_buffer_is_an_error(run, how):
    run(replace_main_grad, how)


def differentiate_a_gradient(rank, stage):
    """A penalty on `param.grad`: 2 * weight + the gradient of 4 * weight² is 10 * weight."""
    weight = torch.nn.Parameter(torch.full((3,), 2.0, device=rank.device))
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=0.05)
    for _ in range(2):
        weight.square().sum().backward(create_graph=True)
        penalty = weight.grad.square().sum()
        penalty.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.tolist()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", ["stage1_naive_broadcast", "stage2_allgather", THREE])
def test_a_gradient_may_be_differentiated(run, stage):
    assert run(differentiate_a_gradient, stage) == [[0.5] * 3] * 2


def forget_what_was_written(rank, grad_dtype):
    """Past every hook, into the view."""
    weight = torch.nn.Parameter(torch.ones(3, device=rank.device, dtype=torch.bfloat16 if grad_dtype else None))
    optimizer = optimizer_of("stage3_gradbuffer")([weight], torch.optim.SGD, lr=0.25, grad_dtype=grad_dtype)
    (weight.main_grad if grad_dtype else weight.grad).fill_(8)
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    return weight.tolist()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_zero_grad_forgets_what_was_written_into_the_buffer(run, grad_dtype):
    assert run(forget_what_was_written, grad_dtype) == [[0.75] * 3] * 2


def to_the_bit(rank, stage, optimizer_cls):
    """Sizes that fill no vector, in shards that cut them. Equal gradients: their sum is the same in any order."""
    generator = torch.Generator().manual_seed(0)
    d = rank.world_size
    for _ in range(20):
        sizes = torch.randint(1, 200, (6,), generator=generator).tolist()
        params = [torch.randn(numel, generator=generator).to(rank.device) for numel in sizes]
        ours, plain = ([param.clone().requires_grad_() for param in params] for _ in range(2))
        optimizer = optimizer_of(stage)(ours, optimizer_cls, lr=0.01, fused=True)
        reference = optimizer_cls(plain, lr=0.01, fused=True)
        for step in range(3):
            for param, expected in zip(ours, plain):
                grad = torch.randn(param.shape, generator=generator).to(rank.device)
                (param * grad).sum().backward()
                expected.grad = sum([grad / d] * d)
            optimizer.step()
            reference.step()
            assert all(torch.equal(param, expected) for param, expected in zip(ours, plain)), (sizes, step)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("stage", ["stage3_gradbuffer", FOUR])
def test_fused_kernels_round_a_shard_as_they_round_the_whole(run, stage, name):
    run(to_the_bit, stage, getattr(torch.optim, name))


# ------------------------------------------------------------------------------------------------------------ stage 4


class Layers(torch.nn.Module):
    """Eight layers that are called in another order than they are registered, one of them twice, and one never."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(8))
        self.never = torch.nn.Linear(7, 7)
        self.gain = torch.nn.Parameter(torch.ones(7))  # of a module that has children

    def forward(self, x):
        for i in (3, 1, 0, 2, 1, 7, 5, 6, 4):
            x = x + torch.tanh(self.layers[i](x))
        return x * self.gain


def many_buckets(rank, cap_mb, in_hooks):
    """Every parameter arrives on every rank, in eval, in state_dict, and in the next forward pass."""
    model, alone = Layers(seed=rank.rank).to(rank.device), Layers(seed=0).to(rank.device)
    kwargs = {"bucket_cap_mb": cap_mb, "find_unused_parameters": True, **ADAMW}
    optimizer = optimizer_of(FOUR)(model.parameters(), **kwargs)
    if in_hooks:
        optimizer.prefetch_params(model)
    plain = torch.optim.AdamW(alone.parameters(), **ADAMW)
    for step in range(4):
        loss = loss_of(model, *batch(step, rank.rank, device=rank.device))
        loss.backward()
        optimizer.step()
        assert not in_hooks or any(bucket.param_sync for bucket in optimizer.buckets)
        optimizer.zero_grad()
        total = [None] * len(list(alone.parameters()))
        for r in range(rank.world_size):
            loss = loss_of(alone, *batch(step, r, device=rank.device))
            grads = torch.autograd.grad(loss, list(alone.parameters()), allow_unused=True)
            total = [add(t, None if g is None else g / rank.world_size) for t, g in zip(total, grads)]
        for param, grad in zip(alone.parameters(), total):
            param.grad = grad
        plain.step()
        if step % 2:
            x = batch(99, 0, device=rank.device)[0]
            model.eval(), alone.eval()
            assert torch.equal(model(x), alone(x))
            model.train(), alone.train()
        else:
            for name, value in model.state_dict().items():
                assert torch.equal(value, alone.state_dict()[name]), name
    return len(optimizer.buckets)


@pytest.mark.parametrize("in_hooks", [True, False], ids=["prefetch", "step waits"])
@pytest.mark.parametrize("cap_mb", [1e-6, 0.0004, None])
def test_buckets_of_any_size_give_the_same_bits_as_one_process(run, cap_mb, in_hooks):
    """At any world size: gradients are summed in rank order, whatever the bucket."""
    assert run(many_buckets, cap_mb, in_hooks)[0] == {1e-6: 19, 0.0004: 5, None: 1}[cap_mb]


def missing_gradient(rank):
    a, b = (torch.nn.Parameter(torch.ones(6, device=rank.device)) for _ in range(2))
    optimizer = optimizer_of(FOUR)([("first", a), ("second", b)], torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    (a.sum() if rank.rank == 0 else a.sum() + b.sum()).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert a.eq(1).all() and b.eq(1).all()
        (a.sum() + b.sum()).backward()  # and training can go on
        optimizer.step()
        assert a.eq(0).all() and b.eq(0).all()
        return str(error)


def test_a_parameter_without_gradient_is_an_error_on_every_rank(run):
    for message in run(missing_gradient):
        assert "second" in message and "first" not in message and "find_unused_parameters" in message


def micro_batches_differ(rank):
    """Rank 0 uses all layers; the others leave two out, one always and one in turn. None is lost or counted twice.

    A bucket is one layer. The first ones of a micro-batch have left when the next micro-batch begins, while the one
    that was left out has not; and rank 0, whose buckets are all full, must not wait for the others for ever.
    """
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(7, 7, bias=False) for _ in range(6)).to(rank.device)
    kwargs = {"lr": 1.0, "bucket_cap_mb": 1e-6, "find_unused_parameters": True}
    optimizer = optimizer_of(FOUR)(layers.parameters(), torch.optim.SGD, **kwargs)
    start = copy.deepcopy(layers)

    def uses(r, micro):
        return [i for i in range(6) if r == 0 or i not in (2, 3 + micro % 2)]

    for micro in range(3):
        sum(layers[i].weight.sum() * (1 + rank.rank) for i in uses(rank.rank, micro)).backward()
    optimizer.step()
    for i, (layer, before) in enumerate(zip(layers, start)):
        expected = sum((1 + r) * (i in uses(r, micro)) for r in range(rank.world_size) for micro in range(3))
        assert torch.allclose(layer.weight, before.weight - expected / rank.world_size, atol=1e-5), i


def test_micro_batches_that_use_other_parameters(run):
    run(micro_batches_differ)


def no_warning(rank, stage):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = Net(seed=0).to(rank.device)
        optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, rank, 0)
        scheduler.step()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", ["stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", FOUR])
def test_no_warnings_in_a_plain_loop(run, stage):
    run(no_warning, stage)
