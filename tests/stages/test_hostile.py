"""Hostile input: steps out of turn, gradients in odd forms, ranks that disagree, optimizers that can't be cut.

Each is what replicated training with plain torch makes of it, or the same error on every rank: one line that names the
parameter, before anything is changed, after which training can go on. What the constructor refuses is in test_contract.
"""

import copy
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist

from tests.common import STAGES, Net, Replicated, batch, loss_of, optimizer_of, trainable
from tests.stages.test_contract import ADAMW, UNFUSED, Lamb, backward, exact, train

ONE, TWO, THREE, FOUR = STAGES
UNUSED = {FOUR: {"find_unused_parameters": True}}


def same(params, expected, exact):
    """A nan is equal to a nan, in the same place."""
    for i, (param, other) in enumerate(zip(params, expected, strict=True)):
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 2e-6}
        assert torch.allclose(param, other, equal_nan=True, **tolerance), (i, param, other)


def pair(rank, stage, groups=trainable, **kwargs):
    """-> model and optimizer of `stage`, and its reference."""
    model = Net(seed=rank.rank).to(rank.device)
    return model, optimizer_of(stage)(groups(model), **kwargs), Replicated(rank, groups=groups, **kwargs)


def error_of(function, *exceptions):
    """-> the message of the error that `function` must raise: one line."""
    exceptions = exceptions or (RuntimeError,)
    try:
        function()
    except exceptions as error:
        assert str(error) and "\n" not in str(error)
        return str(error)
    raise AssertionError("no error")


# ------------------------------------------------------------------------------------------------- steps out of turn


SCRIPTS = {  # b: backward, s: step, z: zero_grad, c: clip
    "step first of all": "s bsz",
    "step twice": "bss bsz",
    "step twice after zero_grad": "bszs bsz",
    "zero_grad before step": "bzs bsz",
    "zero_grad twice": "zzbszz bsz",
    "never zero_grad": "bsbsbs",
    "backward twice": "bbsz bsz",
    "clip twice": "bccsz bsz",
    "clip, and forget": "bczbsz",
    "clip without backward": "cs bsz",
}


def play(rank, stage, script, kwargs):
    """Plays `script` with an optimizer of `stage`, and as documented with torch's. -> the messages of all errors.

    `step` keeps the gradients in stages 1 and 2, as torch does; in stage 3 it sets them to zero, in stage 4 to None.
    """
    sgd = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **UNFUSED}  # None, zero and twice as much all differ
    model, reference = Net(seed=rank.rank).to(rank.device), Replicated(rank, torch.optim.SGD, **sgd)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, **kwargs, **sgd)

    def forget():
        reference.optimizer.zero_grad(set_to_none=stage != THREE)
        if stage == THREE:
            for param in trainable(reference.model):
                param.grad = torch.zeros_like(param)

    def play_one(letter, step):
        if letter == "b":
            backward(model, rank, step)
        elif letter == "s":
            optimizer.step()
        elif letter == "z":
            optimizer.zero_grad()
        else:
            return optimizer.clip_grad_norm_(0.05)

    def play_reference(letter, step):
        if letter == "b":
            reference.backward(step)
        elif letter == "s":
            reference.optimizer.step()
        elif letter == "c":
            return torch.nn.utils.clip_grad_norm_(trainable(reference.model), 0.05)
        if letter == "z" or letter == "s" and stage in (THREE, FOUR):
            forget()

    errors = []
    forget()
    for step, letter in enumerate(script.replace(" ", "")):
        before = [param.detach().clone() for param in model.parameters()]
        try:
            norm = play_one(letter, step)
        except RuntimeError as error:
            errors.append((letter, str(error)))
            same(model.parameters(), before, exact=True)
        else:
            expected = play_reference(letter, step)
            assert expected is None or torch.allclose(norm, expected, rtol=1e-5), (norm, expected)
        same(model.parameters(), reference.model.parameters(), exact=False)
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("stage, kwargs", [(s, UNUSED.get(s, {})) for s in STAGES], ids=STAGES)
def test_steps_out_of_turn_are_those_of_torch(run, stage, kwargs, script):
    assert run(play, stage, SCRIPTS[script], kwargs)[0] == []


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_without_any_gradient_is_an_error_in_stage_4(run, world_size, script):
    """Only there: in stages 1 and 2 nothing is stepped, in stage 3 the gradient is zero."""
    without = {"step first of all": "s", "step twice": "s", "step twice after zero_grad": "s"}
    without |= {"zero_grad before step": "s", "clip without backward": "cs"}
    for errors in run(play, FOUR, SCRIPTS[script], {}):
        assert [letter for letter, _ in errors] == list(without.get(script, ""))
        for _, message in errors:
            assert re.match("no gradient on some rank for parameter 0 of group 0, .*: call backward", message)


def backward_after_clip(rank, stage):
    """What is added to averaged gradients is averaged with them; stage 3 refuses, its buffer holds a shard only."""
    model, optimizer, reference = pair(rank, stage, **ADAMW)
    backward(model, rank, 0)
    reference.backward(0)
    optimizer.finish_grad_sync()
    if stage == THREE:
        message = error_of(lambda: backward(model, rank, 1))
        assert "call step() or the optimizer's zero_grad() before backward()" in message
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        backward(model, rank, 1)
    else:
        backward(model, rank, 1)
    reference.backward(1)
    optimizer.step()
    reference.optimizer.step()
    same(model.parameters(), reference.model.parameters(), exact=False)


@pytest.mark.parametrize("world_size", [2, 3])
def test_backward_after_gradients_are_averaged(run, stage, world_size):
    run(backward_after_clip, stage)


def no_data_on_one_rank(rank, stage, kwargs):
    """Rank 1 has run out of data: its gradients count as zero. The mean is over all ranks."""
    weight = torch.nn.Parameter(torch.ones(5, device=rank.device))
    optimizer = optimizer_of(stage)([("w", weight)], torch.optim.SGD, lr=1.0, **kwargs)
    if rank.rank != 1:
        weight.sum().backward()
    if stage == FOUR and not kwargs:
        return error_of(optimizer.step)
    optimizer.step()
    return weight.tolist()


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("stage, kwargs", [*((s, UNUSED.get(s, {})) for s in STAGES), (FOUR, {})])
def test_a_rank_without_a_backward_pass(run, stage, kwargs, world_size):
    for answer in run(no_data_on_one_rank, stage, kwargs):
        if stage == FOUR and not kwargs:
            assert "for parameter w:" in answer
        else:
            assert answer == pytest.approx([1 - 2 / 3] * 5)


def zero_in_stage_3(rank):
    """A parameter that nobody uses has a gradient of zero there, and decays; see test_stages for the others."""
    used, unused = (torch.nn.Parameter(torch.ones(6, device=rank.device)) for _ in range(2))
    optimizer = optimizer_of(THREE)([used, unused], torch.optim.SGD, lr=1.0, weight_decay=0.5)
    (used.sum() * 2).backward()
    optimizer.step()
    return used[0].item(), unused[0].item()


@pytest.mark.parametrize("world_size", [2])
def test_an_unused_parameter_of_stage_3_has_a_gradient_of_zero(run, world_size):
    assert run(zero_in_stage_3) == [(-1.5, 0.5)] * 2


# ------------------------------------------------------------------------------------------------ nan and inf


def poisoned(rank, stage, value, where, norm_type, skip):
    """The gradient of parameter `where` of the last rank is `value`. -> parameters after it, as text."""
    model, optimizer, reference = pair(rank, stage, **ADAMW)
    bad = batch(1, rank.world_size - 1, device=rank.device)[0]

    def loss(model, x, y):
        poison = dict(model.named_parameters())[where].sum() * value
        return loss_of(model, x, y) + (poison if torch.equal(x, bad) else 0)

    for step in range(4):
        loss(model, *batch(step, rank.rank, device=rank.device)).backward()
        reference.backward(step, loss_of=loss)
        if norm_type:
            norm = optimizer.clip_grad_norm_(0.05, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(trainable(reference.model), 0.05, norm_type)
            assert torch.allclose(norm, expected, rtol=1e-5, equal_nan=True), (norm, expected)
        if not (skip and step == 1):
            optimizer.step()
            reference.optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        same(model.parameters(), reference.model.parameters(), exact(rank) and not norm_type)
    n_bad = sum(param.isnan().sum().item() for param in model.parameters())
    assert n_bad == 0 if skip else n_bad > 1
    return [param.view(-1).tolist().__repr__() for param in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("skip", [False, True], ids=["", "skipped"])
@pytest.mark.parametrize("norm_type", [None, 1.0, 2.0, torch.inf])
@pytest.mark.parametrize("value, where", [(torch.nan, "scale"), (torch.nan, "tied.bias"), (torch.inf, "scale")])
def test_a_nan_or_inf_on_one_rank_is_what_torch_makes_of_it(run, stage, world_size, value, where, norm_type, skip):
    """In a shard of the first rank, or of the last: a maximum may lose the one or the other."""
    params = run(poisoned, stage, value, where, norm_type, skip)
    assert all(other == params[0] for other in params)


# --------------------------------------------------------------------------------- gradients that nobody expects


FORMS = {
    "as they are": lambda grad: grad,
    "expanded": lambda grad: grad.flatten()[:1].view([1] * grad.dim()).expand_as(grad),
    "transposed": lambda grad: grad.t().contiguous().t() if grad.dim() == 2 else grad,
    "strided": lambda grad: torch.stack([grad, grad + 7], dim=-1)[..., 0],
    "sparse": lambda grad: grad.to_sparse(),
    "sparse on rank 1": lambda grad: grad.to_sparse(),
    "None on rank 1": lambda grad: grad,
}


def by_hand(rank, stage, form, before):
    """Gradients that the user assigns, without a backward pass, or even before there is an optimizer."""
    reference, model = Replicated(rank, **ADAMW), Net(seed=0).to(rank.device)

    def grads_of(r, step):
        generator = torch.Generator().manual_seed(10 * step + r)
        grads = [torch.randn(p.shape, generator=generator).to(rank.device) for p in trainable(model)]
        return [FORMS[form](g) if r == 1 or "rank 1" not in form else g for g in grads]

    def assign(step):
        for param, grad in zip(trainable(model), grads_of(rank.rank, step)):
            param.grad = None if form == "None on rank 1" and rank.rank == 1 else grad

    if before:
        assign(0)
    optimizer = optimizer_of(stage)(trainable(model), **UNUSED.get(stage, {}), **ADAMW)
    for step in range(3):
        if step or not before:
            assign(step)
        optimizer.step()
        optimizer.zero_grad()
        present = [r for r in range(rank.world_size) if form != "None on rank 1" or r != 1]
        for param, *grads in zip(trainable(reference.model), *(grads_of(r, step) for r in present)):
            param.grad = sum(grad.to_dense() / rank.world_size for grad in grads).contiguous()
        reference.optimizer.step()
    same(model.parameters(), reference.model.parameters(), exact(rank))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("before", [False, True], ids=["", "before there is an optimizer"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_assigned_by_hand_in_any_layout(run, stage, world_size, form, before):
    run(by_hand, stage, form, before)


def after_forgetting(rank, stage):
    """Gradients that are assigned after averaged ones were forgotten are to be averaged themselves."""
    weight = torch.nn.Parameter(torch.zeros(5, device=rank.device))
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=1.0)
    weight.sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    weight.grad = torch.full_like(weight, rank.rank)
    optimizer.step()
    return weight.tolist()


@pytest.mark.parametrize("world_size", [3])
def test_gradients_assigned_after_averaged_ones_were_forgotten(run, stage, world_size):
    assert run(after_forgetting, stage) == [[-1.0] * 5] * 3


def replaced(rank, stage):
    """After backward, by one rank only: counts instead of what backward has left there. Stage 4 has sent that off."""
    a, b = (torch.nn.Parameter(torch.zeros(5, device=rank.device)) for _ in range(2))
    optimizer = optimizer_of(stage)([("a", a), ("b", b)], torch.optim.SGD, lr=1.0)
    (a.sum() + b.sum()).backward()
    if rank.rank == 1:
        b.grad = torch.full_like(b, 3.0)
    message = error_of(optimizer.step) if stage == FOUR else optimizer.step()
    if message:
        assert "gradient of parameter b was assigned" in message and a.eq(0).all() and b.eq(0).all()
        optimizer.zero_grad()
        with optimizer.no_sync():
            (a.sum() + b.sum()).backward()
        b.grad = torch.full_like(b, 3.0 if rank.rank == 1 else 1.0)
        optimizer.step()
    return a.tolist() + b.tolist()


@pytest.mark.parametrize("world_size", [2])
def test_gradients_replaced_after_backward_count_or_are_an_error(run, stage, world_size):
    assert run(replaced, stage) == [[-1.0] * 5 + [-2.0] * 5] * 2


def too_late(rank, stage):
    """After averaging: in stages 1 and 2 it is the gradient that the owner steps, as what torch has there would be."""
    a, b = (torch.nn.Parameter(torch.zeros(5, device=rank.device)) for _ in range(2))
    optimizer = optimizer_of(stage)([("a", a), ("b", b)], torch.optim.SGD, lr=1.0)
    (a.sum() + b.sum()).backward()
    optimizer.clip_grad_norm_(1e6)
    b.grad = torch.full_like(b, 2.0)
    if stage in (THREE, FOUR):
        assert "parameter b was assigned after" in error_of(optimizer.step)
        assert a.eq(0).all() and b.eq(0).all()
        optimizer.zero_grad()
        (a.sum() + b.sum() * 2).backward()
    optimizer.step()
    return a.tolist() + b.tolist()


@pytest.mark.parametrize("world_size", [2])
def test_gradients_assigned_after_averaging_count_or_are_an_error(run, stage, world_size):
    assert run(too_late, stage) == [[-1.0] * 5 + [-2.0] * 5] * 2


def refused_by_torch(rank, stage):
    """torch refuses gradients of another dtype, shape or device as they are assigned: nothing has happened."""
    model, optimizer, reference = pair(rank, stage, **ADAMW)
    weight = model.up.weight
    train(model, optimizer, rank, 0)
    reference.step(0)
    for wrong in (weight.detach().double(), weight.detach()[:1], torch.empty_like(weight, device="meta")):
        with pytest.raises(RuntimeError, match="assign a gradient"):
            weight.grad = wrong
    train(model, optimizer, rank, 1)
    reference.step(1)
    same(model.parameters(), reference.model.parameters(), exact(rank))


@pytest.mark.parametrize("world_size", [2])
def test_gradients_that_torch_refuses(run, stage, world_size):
    run(refused_by_torch, stage)


def embedding(rank, stage, momentum, forget):
    """nn.Embedding(sparse=True), words that come twice and ranks that have other ones: as if it were dense."""
    torch.manual_seed(0)
    sparse = torch.nn.Embedding(7, 3, sparse=True).to(rank.device)
    dense = torch.nn.Embedding(7, 3).to(rank.device)
    dense.load_state_dict(sparse.state_dict())
    kwargs = {"lr": 0.5, "momentum": momentum, **UNFUSED}
    optimizer = optimizer_of(stage)(sparse.named_parameters(), torch.optim.SGD, **kwargs)
    plain = torch.optim.SGD(dense.parameters(), **kwargs)
    for step in range(3):
        for micro in range(2):
            for r in range(rank.world_size):
                words = torch.tensor([step, step, r + 1 + micro], device=rank.device)
                (dense(words).square().sum() / rank.world_size).backward()
                if r == rank.rank:
                    sparse(words).square().sum().backward()
        optimizer.step()
        plain.step()
        (sparse if forget == "model.zero_grad" else optimizer).zero_grad()
        plain.zero_grad()
        same(sparse.parameters(), dense.parameters(), exact=False)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("forget", ["zero_grad", "model.zero_grad"])
@pytest.mark.parametrize("momentum", [0, 0.9])
def test_sparse_gradients_of_an_embedding(run, stage, world_size, momentum, forget):
    run(embedding, stage, momentum, forget)


def other_grad_dtype(rank, stage, grad_dtype):
    weight = torch.nn.Parameter(torch.ones(5, device=rank.device))
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=1.0)
    weight.grad = None
    weight.grad_dtype = grad_dtype
    weight.grad = torch.full((5,), rank.rank + 1.0, dtype=torch.bfloat16, device=rank.device)
    try:
        optimizer.step()
    except RuntimeError as error:
        assert weight.eq(1).all()
        return str(error)
    return weight.tolist()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16])
def test_gradients_in_another_dtype_are_right_or_refused(run, stage, world_size, grad_dtype):
    """Since torch 2.10 a tensor may allow them. Stages 1 to 3 hand back a gradient in the dtype of the parameter."""
    if hasattr(torch.Tensor, "grad_dtype"):
        for answer in run(other_grad_dtype, stage, grad_dtype):
            assert answer == [-0.5] * 5 or grad_dtype and stage != FOUR and "attempting to assign a gradient" in answer


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", STAGES[:2])
def test_transposed_parameters_and_parameters_with_gaps(run, stage, world_size):
    for message in run(other_layouts, stage):
        assert "parameter gaps is not contiguous" in message


def other_layouts(rank, stage):
    """torch's fused kernels for the CPU don't look at strides: the gradient must have those of the parameter."""
    values = torch.arange(12.0, device=rank.device).view(3, 4)
    weight, plain = torch.nn.Parameter(values.clone().t()), torch.nn.Parameter(values.t().contiguous())
    optimizer, reference = optimizer_of(stage)([weight], lr=0.1), torch.optim.AdamW([plain], lr=0.1, fused=True)
    for step in range(2):
        weight.grad, plain.grad = ((values.t() - step).contiguous() for _ in range(2))
        optimizer.step()
        reference.step()
        assert torch.allclose(weight, plain, rtol=1e-6), (weight, plain)
    return error_of(lambda: optimizer_of(stage)([("gaps", torch.nn.Parameter(values[:, :3]))]), ValueError)


# ---------------------------------------------------------------------------------------------------- add_param_group


def added(rank, stage, when):
    """A group that is added at an odd moment. Its gradients may be there already."""
    def first(model):
        return [*model.up.parameters(), *model.down.parameters()]

    def second(model):
        return [model.scale, model.head.weight, *model.embed.parameters()]

    model, optimizer, reference = pair(rank, stage, groups=first, **ADAMW)
    model.load_state_dict(reference.model.state_dict())  # those that are not in the optimizer are not broadcast
    if when == "under way":
        optimizer.prefetch_params(model)
    backward(model, rank, 0)
    reference.backward(0)
    if when == "under way":
        optimizer.step()
        reference.optimizer.step()
        model.zero_grad()
        reference.model.zero_grad()
        assert any(bucket.param_sync is not None for bucket in optimizer.buckets)
    if when == "after clipping":
        optimizer.clip_grad_norm_(1e6)
    optimizer.add_param_group({"params": second(model), "lr": 0.02})
    reference.optimizer.add_param_group({"params": second(reference.model), "lr": 0.02})
    if when == "under way":
        backward(model, rank, 1)
        reference.backward(1)
    for step in (2, 3):
        optimizer.step()
        reference.optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        backward(model, rank, step)
        reference.backward(step)
    if when == "under way":
        optimizer.finish_param_sync()
    same(model.parameters(), reference.model.parameters(), exact=False)


ADDED = [(s, when) for s in STAGES[:3] for when in ("after backward", "after clipping")] + [(FOUR, "under way")]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage, when", ADDED)
def test_a_group_is_added_at_an_odd_moment(run, stage, world_size, when):
    run(added, stage, when)


def added_in_between(rank, share):
    """Stage 4, when gradients are on their way, or ready, on some ranks only: an error on all of them."""
    a, b, c = (torch.nn.Parameter(torch.zeros(5, device=rank.device)) for _ in range(3))
    kwargs = {"lr": 1.0, "bucket_cap_mb": 1e-6, "find_unused_parameters": True}
    optimizer = optimizer_of(FOUR)([a, b], torch.optim.SGD, **kwargs)  # two buckets: b's leaves first
    if share == "left on one rank, forgotten" or rank.rank == 1:
        (a + b if rank.rank == 1 else a).sum().backward()
    message = error_of(lambda: optimizer.add_param_group({"params": [c]}))
    assert len(optimizer.param_groups) == 1
    optimizer.zero_grad() if share != "left, and stepped" else optimizer.step()
    optimizer.add_param_group({"params": [c]})
    (a + b + c).sum().backward()
    optimizer.step()
    assert c.eq(-1).all() and b.eq(-1 if "forgotten" in share else -1 - 1 / rank.world_size).all()
    return message


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("share", ["left, and stepped", "left on one rank, forgotten"])
def test_a_group_added_between_backward_and_step_is_an_error_in_stage_4(run, world_size, share):
    for message in run(added_in_between, share):
        assert "between backward() and step()" in message


def module_added_later(rank):
    """A module that is added after prefetch_params, and read through hooks that prefetch_params gives it again."""
    model = torch.nn.ModuleList([torch.nn.Linear(5, 5, bias=False).to(rank.device)])
    optimizer = optimizer_of(FOUR)(model.parameters(), torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    optimizer.prefetch_params(model)
    x = torch.ones(1, 5, device=rank.device)
    model[0](x).sum().backward()
    optimizer.step()
    model.append(torch.nn.Linear(5, 5, bias=False).to(rank.device))
    optimizer.add_param_group({"params": model[1].parameters()})
    optimizer.prefetch_params(model)
    for _ in range(2):
        sum(layer(x).sum() for layer in model).backward()
        optimizer.step()
    optimizer.finish_param_sync()
    everyones = [torch.empty_like(model[1].weight) for _ in range(rank.world_size)]
    dist.all_gather(everyones, model[1].weight.detach())
    assert all(torch.equal(weight, everyones[0]) for weight in everyones)


@pytest.mark.parametrize("world_size", [2])
def test_a_module_added_after_prefetch(run, world_size):
    run(module_added_later)


BAD_GROUPS = {
    "duplicate": lambda rank, weight: weight,
    "another shape": lambda rank, weight: weight.new_ones(2 + (rank.rank == 1)).requires_grad_(),
    "another dtype": lambda rank, weight: weight.new_ones(2, dtype=[torch.float32, torch.float64][rank.rank]),
    "sparse on rank 1": lambda rank, weight: weight.new_ones(2).to_sparse() if rank.rank else weight.new_ones(2),
    "no tensor": lambda rank, weight: "weight",
}


def added_bad(rank, stage, bad):
    weight = torch.nn.Parameter(torch.ones(5, device=rank.device))
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=1.0)
    group = {"params": [BAD_GROUPS[bad](rank, weight)]}
    message = error_of(lambda: optimizer.add_param_group(group), TypeError, ValueError)
    weight.sum().backward()
    optimizer.step()
    assert weight.eq(0).all() and len(optimizer.param_groups) == 1
    return message


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("bad", BAD_GROUPS)
def test_a_bad_group_is_refused_on_every_rank_and_leaves_no_trace(run, stage, world_size, bad):
    for message in run(added_bad, stage, bad):
        assert "0 of group 1" in message


# ------------------------------------------------------------------------------------------------- copies and pickles


COPIES = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda optimizer: torch.save(optimizer, io.BytesIO()),
    "with its scheduler": lambda optimizer: copy.deepcopy(torch.optim.lr_scheduler.StepLR(optimizer, 1)),
}


def copies(rank, stage, way):
    model, optimizer, reference = pair(rank, stage, **ADAMW)
    train(model, optimizer, rank, 0)
    message = error_of(lambda: COPIES[way](optimizer), TypeError)
    again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # the model can be copied, whatever hooks it has
    reference.step(0)
    train(model, optimizer, rank, 1)  # the copies stay as they are
    for other in again:
        same(other.parameters(), reference.model.parameters(), exact(rank))
    return message


@pytest.mark.parametrize("world_size", [1])
@pytest.mark.parametrize("way", COPIES)
def test_an_optimizer_is_not_copied_but_its_model_is(run, stage, world_size, way):
    assert "use state_dict()" in run(copies, stage, way)[0]


# ------------------------------------------------------------------------------- optimizers that can't be cut in pieces


def matrices(model):
    return [param for param in trainable(model) if param.dim() == 2]


PER_TENSOR = {
    "Lamb": (Lamb, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    **({"Muon": (torch.optim.Muon, {"lr": 0.01})} if hasattr(torch.optim, "Muon") else {}),
}


def whole_tensors(rank, stage, name):
    optimizer_cls, kwargs = PER_TENSOR[name]
    model, reference = Net(seed=rank.rank).to(rank.device), Replicated(rank, optimizer_cls, groups=matrices, **kwargs)
    optimizer = optimizer_of(stage)(matrices(model), optimizer_cls, **kwargs)
    model.load_state_dict(Net(seed=0).state_dict())  # those that are not trained are not broadcast
    for step in range(4):
        train(model, optimizer, rank, step)
        reference.step(step)
        reference.model.zero_grad()
        # Muon computes in bfloat16: what differs in a float's last place may differ in its third.
        tolerance = 2e-3 if name == "Muon" and not exact(rank) else 2e-6
        for param, expected in zip(model.parameters(), reference.model.parameters()):
            assert torch.equal(param, expected) if exact(rank) else torch.allclose(param, expected, atol=tolerance)


@pytest.mark.parametrize("name", PER_TENSOR)
@pytest.mark.parametrize("stage", STAGES[:2])
def test_optimizers_that_want_whole_tensors_are_right_in_stages_1_and_2(run, stage, name):
    run(whole_tensors, stage, name)


class Together(torch.optim.Optimizer):
    """Scales its step by the norm of all gradients together."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        norm = sum(param.grad.square().sum() for param in params).sqrt()
        for param in params:
            param -= self.param_groups[0]["lr"] / norm * param.grad


def refuses(rank, stage, optimizer_cls):
    weight = torch.nn.Parameter(torch.full((8, 8), float(rank.rank), device=rank.device))
    message = error_of(lambda: optimizer_of(stage)([weight], optimizer_cls), ValueError)
    assert weight.eq(rank.rank).all()
    return message


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("optimizer_cls", [torch.optim.LBFGS, torch.optim.SparseAdam, Together])
def test_optimizers_that_step_tensors_together_are_refused(run, stage, world_size, optimizer_cls):
    for message in run(refuses, stage, optimizer_cls):
        assert message.startswith(optimizer_cls.__name__)


def accepts(rank, stage):
    for name in "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split():
        optimizer_of(stage)([torch.nn.Parameter(torch.ones(3, device=rank.device))], getattr(torch.optim, name))


@pytest.mark.parametrize("world_size", [1])
@pytest.mark.parametrize("stage", STAGES[:2])
def test_every_optimizer_of_torch_that_steps_tensor_by_tensor_is_accepted(run, stage, world_size):
    run(accepts, stage)
