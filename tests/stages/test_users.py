"""What users bring: optimizers with modes, schedulers of each rank's own, hooks, other layouts, and what fails.

The situations come from public reports and from third-party optimizers; test_probe.py has the trial that refuses
some of these.
"""

import contextlib
import copy
import gc
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import checkpoint
from checkpoint import full_state_dict, load_full_state_dict
from tests.common import STAGES, Net, Replicated, assert_same, batch, loss_of, optimizer_of, trainable

ONE, TWO, THREE, FOUR = STAGES


def train(model, optimizer, rank, *steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, *batch(step, rank.rank)).backward()
        optimizer.step()


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------- as frameworks call torch


def clipped_by_torch(rank, stage):
    """-> the errors of torch's two functions, after backward(); that of norms before and after the average."""
    options = {ONE: {}, TWO: {}, THREE: {"grad_dtype": torch.float32}, FOUR: {}}[stage]
    model = Net(seed=0).to(torch.bfloat16 if stage == THREE else torch.float32)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.1, **options)
    x, _ = batch(0, rank.rank)
    model(x.to(model.scale.dtype)).square().mean().backward()
    clips = [lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
             lambda: nn.utils.clip_grad_value_(model.parameters(), 10)]
    errors = [error_of(clip) for clip in clips]
    optimizer.clip_grad_norm_(0.1)
    return errors + [error_of(clip) for clip in clips]


@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_clipping_is_refused(run, stage, world_size):
    """It sees a rank's own gradients, or none. After the average stages 1 and 2 have that in param.grad."""
    for norm, value, later_norm, later_value in run(clipped_by_torch, stage):
        if stage in (ONE, TWO):
            assert "finds this rank's own gradient, not the average, in param.grad: call clip_grad_norm_(max_n" in norm
            assert value is later_norm is later_value is None
        else:
            for error in (norm, value, later_norm, later_value):
                assert "() finds no gradient in param.grad: call clip_grad_norm_(max_norm) of the Distr" in error


def clipped_else(rank, stage):
    """What torch clips rightly: other models, averages of DDP, and parameters whose optimizer is gone."""
    model, plain = Net(seed=0), nn.Linear(3, 3)
    plain(torch.ones(3)).sum().backward()
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.1)
    assert nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1
    with optimizer.no_sync() if stage == FOUR else contextlib.nullcontext():
        loss_of(model, *batch(0, rank.rank)).backward()
    assert stage == THREE or "own gradient" in error_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1))
    nn.utils.clip_grad_value_(model.parameters(), 1)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    loss_of(model, *batch(0, rank.rank)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1)


@pytest.mark.parametrize("world_size", [2])
def test_torchs_clipping_of_other_gradients_goes_on(run, stage, world_size):
    run(clipped_else, stage)


def reset(rank, stage):
    """ReLoRA's reset: zeros of the parameter's shape. -> the error, after which a delete helps."""
    model, reference = Net(seed=0), Replicated(rank, lr=0.01)
    optimizer = optimizer_of(stage)(trainable(model), lr=0.01)
    train(model, optimizer, rank, 0)
    reference.step(0)
    for one, params in ((optimizer, trainable(model)), (reference.optimizer, trainable(reference.model))):
        for param in params:
            one.state[param]["exp_avg"] = torch.zeros_like(param)
            one.state[param]["exp_avg_sq"] = torch.zeros_like(param)
    error = error_of(lambda: train(model, optimizer, rank, 1))
    if stage in (THREE, FOUR):
        for one, params in ((optimizer, trainable(model)), (reference.optimizer, trainable(reference.model))):
            for param in params:
                one.state.pop(param, None) if rank.rank % 2 else one.state.__delitem__(param)
        optimizer.zero_grad()
        train(model, optimizer, rank, 1)
    reference.step(1)
    assert_same(model, reference.model, exact=rank.world_size == 1)
    assert len(full_state_dict(optimizer, to_all=True)["state"]) == len(trainable(model))
    return error


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_that_is_reset_as_in_torch(run, stage, world_size):
    for error in run(reset, stage):
        assert error is None if stage in (ONE, TWO) else error.startswith(
            "RuntimeError: exp_avg of parameter ") and ".zero_(), or delete optimizer.state[param]" in error


def odd_loss(rank, stage):
    """-> what step returns of a closure that returns something else than a loss."""
    model = Net(seed=rank.rank)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.1)

    def closure(result):
        loss_of(model, *batch(0, rank.rank)).backward()
        return result
    return [optimizer.step(lambda: closure(result)) for result in ({"loss": 1}, (2, "a"), rank.rank, True)]


@pytest.mark.parametrize("world_size", [2])
def test_a_closure_may_return_anything(run, stage, world_size):
    assert run(odd_loss, stage) == [[{"loss": 1}, (2, "a"), 0.5, True]] * 2


def of_rank_0(rank, stage):
    """-> errors of what rank 0's state_dict() is given to, on every rank: it was saved by a framework, for all."""
    model = Net(seed=0)
    optimizer = optimizer_of(stage)(trainable(model), lr=0.01)
    train(model, optimizer, rank, 0)
    saved, full = [optimizer.state_dict()], full_state_dict(optimizer, to_all=True)
    dist.broadcast_object_list(saved)
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    errors = [error_of(lambda: optimizer.load_state_dict(saved[0])), error_of(lambda: optimizer.load_state_dict(full)),
              error_of(lambda: get_optimizer_state_dict(model, optimizer)),
              error_of(lambda: set_optimizer_state_dict(model, optimizer, full))]
    assert str(before) == str((optimizer.state_dict(), model.state_dict()))
    return errors


@pytest.mark.parametrize("world_size", [2])
def test_a_state_dict_says_whose_part_it_is_and_is_refused_on_every_rank(run, stage, world_size):
    for errors in run(of_rank_0, stage):
        one, whole, got, put = errors
        assert "is of (rank, world size) (0, 2), this is (1, 2)" in one
        assert "has one part of 2, save checkpoint.full_state_dict(optimizer) for the whole" in one
        assert "is for checkpoint.load_full_state_dict(optimizer, state_dict)" in whole
        assert "KeyError" in got and "of 2: checkpoint.full_state_dict(optimizer) has the whole" in got
        assert put is not None


# --------------------------------------------------------------------------------------- settings that differ by rank


def plateau(rank, stage):
    """The loss of the last rank has stopped falling: its scheduler lowers the lr, and those of the others don't.

    Stage 4 has a message before each step, and refuses that. The others refuse when ranks talk of the state.
    """
    model = Net(seed=0)
    groups = [{"params": trainable(model)[:3]}, {"params": trainable(model)[3:], "lr": 0.5}]
    optimizer = optimizer_of(stage)(groups, torch.optim.SGD, lr=0.25)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    train(model, optimizer, rank, 0)
    for step in range(2):
        scheduler.step(1.0 if rank.rank == rank.world_size - 1 else 1.0 - step)
    errors = [error_of(lambda: train(model, optimizer, rank, 1))]
    errors += [error_of(lambda: full_state_dict(optimizer)), error_of(lambda: full_state_dict(optimizer, to_all=True))]
    for group, lr in zip(optimizer.param_groups, (0.25, 0.5)):
        group["lr"] = lr
    errors += [error_of(lambda: full_state_dict(optimizer)), error_of(lambda: train(model, optimizer, rank, 2))]
    return errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_settings_that_differ_between_ranks_are_an_error_on_every_rank(run, stage, world_size):
    for step, *saves, mended_save, mended_step in run(plateau, stage):
        for error in saves + [step] * (stage == FOUR):
            assert f"lr of group 0 is 0.25 on rank 0 and 0.125 on rank {world_size - 1}: set the same" in error
        assert mended_save is None and mended_step is None and (stage == FOUR or step is None)


def saves_what_differs(rank, stage, folder):
    model = Net(seed=0)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.25)
    optimizer.param_groups[0]["lr"] = 0.25 + rank.rank
    return error_of(lambda: checkpoint.save(folder / "step-1", model, optimizer))


@pytest.mark.parametrize("world_size", [2])
def test_settings_that_differ_are_not_saved(run, stage, tmp_path):
    for error in run(saves_what_differs, stage, tmp_path):
        assert "lr of group 0 is 0.25 on rank 0 and 1.25 on rank 1" in error
    assert not list(tmp_path.glob("step-*"))


def built_with_what_differs(rank, stage, later):
    model = Net(seed=0)
    groups = [{"params": [param], "lr": 0.5 + rank.rank * (not later)} for param in trainable(model)]
    optimizer = optimizer_of(stage)
    if not later:
        return error_of(lambda: optimizer(groups, torch.optim.SGD))
    optimizer = optimizer(groups[1:], torch.optim.SGD)
    optimizer.param_groups[0]["lr"] = 0.5 + rank.rank
    return error_of(lambda: optimizer.add_param_group(groups[0]))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("later", [False, True], ids=["constructor", "add_param_group"])
def test_settings_that_differ_are_refused_where_groups_are_added(run, stage, later):
    for error in run(built_with_what_differs, stage, later):
        assert "the ranks disagree" in error and "lr of group 0=0.5" in error and "lr of group 0=1.5" in error


class WritesLater(torch.optim.SGD):
    """From its 34th step on it keeps a sum of what it steps: the trial of the constructor has fewer."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            if group["steps"] > 33:
                group["seen"] = sum(param.abs().sum().item() for param in group["params"])


def writes_later(rank, stage):
    model = Net(seed=0)
    optimizer = optimizer_of(stage)(trainable(model), WritesLater, lr=0.01)
    train(model, optimizer, rank, *range(33))
    errors = [error_of(lambda: train(model, optimizer, rank, step)) for step in (33, 34, 35)]
    return errors[:2] if stage == FOUR else [errors[0], error_of(lambda: full_state_dict(optimizer))]


@pytest.mark.parametrize("world_size", [2])
def test_what_an_optimizer_writes_into_its_groups_must_be_alike(run, stage):
    """Stage 4 compares it in the step that follows, the others before a save."""
    for errors in run(writes_later, stage):
        assert errors[0] is None
        assert "seen of group 0 is " in errors[1] and "an optimizer that writes the same" in errors[1]


def last_bits(rank, stage):
    """Schedules of CPUs whose cosines round otherwise: no error, and the values are asked for once more only."""
    model = Net(seed=0)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.25)
    optimizer.param_groups[0]["lr"] = 0.1234567895 + (1e-9 if rank.rank else 0)
    train(model, optimizer, rank, 0, 1)


@pytest.mark.parametrize("world_size", [2])
def test_settings_that_differ_by_rounding_are_no_error(run, stage):
    run(last_bits, stage)


# -------------------------------------------------------------------------------------------------------------- hooks


def global_hooks(rank, stage, kwargs):
    calls, model = [], Net(seed=0)
    hooks = [register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
             register_optimizer_step_post_hook(lambda *_: calls.append("after"))]
    try:
        optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.1, **kwargs)
        optimizer.register_step_post_hook(lambda *_: calls.append("own"))
        train(model, optimizer, rank, 0, 1, 2)
    finally:
        for hook in hooks:
            hook.remove()
    train(model, optimizer, rank, 3)
    return calls


@pytest.mark.parametrize("world_size", [2])
def test_hooks_of_all_optimizers_are_called_once_a_step(run, stage):
    """And not by the constructor's trial."""
    kwargs = {"bucket_cap_mb": 1e-4} if stage == FOUR else {}
    for calls in run(global_hooks, stage, kwargs):
        assert calls == ["before", "own", "after"] * 3 + ["own"]


# ------------------------------------------------------------------------------------------------------- empty groups


def empty_groups(rank, stage):
    """What a split into decay and no decay leaves: at first, and added later."""
    model, reference = Net(seed=rank.rank), Replicated(rank, lr=0.01)
    groups = [{"params": [], "weight_decay": 0.1}, {"params": trainable(model)}]
    optimizer = optimizer_of(stage)(groups, lr=0.01)
    optimizer.add_param_group({"params": [], "lr": 0.5})
    for step in range(3):
        train(model, optimizer, rank, step)
        reference.step(step)
    assert_same(model, reference.model, exact=rank.world_size <= 2)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="the parameter list is empty"):
        optimizer_of(stage)([{"params": []}, {"params": []}])
    return [len(group["params"]) for group in optimizer.param_groups]


def test_empty_parameter_groups_are_taken_as_torch_takes_them(run, stage):
    assert all(numbers == [0, len(trainable(Net(0))), 0] for numbers in run(empty_groups, stage))


# ------------------------------------------------------------------------------------------------------ train and eval


class Averages(torch.optim.Optimizer):
    """Steps, and keeps the mean of all steps in the place of the weights in eval mode: as schedule-free ones do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "training": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["training"]:
                raise Exception("Optimizer was not in train mode when step is called")
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                param -= group["lr"] * param.grad
                state["n"] = state.get("n", 0) + 1
                state["mean"] = torch.lerp(state.get("mean", torch.zeros_like(param)), param, 1 / state["n"])

    def train(self):
        self.switch(True)

    def eval(self):
        self.switch(False)

    @torch.no_grad()
    def switch(self, training):
        for group in self.param_groups:
            if group["training"] is not training:
                group["training"] = training
                for param in (param for param in group["params"] if "mean" in self.state[param]):
                    mean = self.state[param]["mean"].clone()
                    self.state[param]["mean"].copy_(param)
                    param.copy_(mean)


def train_and_eval(rank, stage, prefetch):
    model, reference = Net(seed=rank.rank), Replicated(rank, Averages)
    optimizer = optimizer_of(stage)(trainable(model), Averages)
    if prefetch:
        optimizer.prefetch_params(model)
    trained = []
    for epoch in range(2):
        for switched in (optimizer, reference.optimizer):
            switched.train()
        if epoch:
            assert_same(model, trained[-1], exact=True)  # back from the means
        for step in range(3):
            loss_of(model, *batch(3 * epoch + step, rank.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.step(3 * epoch + step)
        assert_same(model, reference.model, exact=False)
        trained.append(copy.deepcopy(model))
        for switched in (optimizer, reference.optimizer):
            switched.eval()
        assert_same(model, reference.model, exact=False)
        assert optimizer.param_groups[0]["training"] is False
    assert not torch.equal(model.scale, trained[-1].scale)
    with pytest.raises(Exception, match="not in train mode"):
        loss_of(model, *batch(0, rank.rank)).backward()
        optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage, prefetch", [(ONE, False), (TWO, False), (THREE, False), (FOUR, False), (FOUR, True)])
def test_train_and_eval_reach_the_parameters_of_all_ranks(run, stage, prefetch):
    run(train_and_eval, stage, prefetch)


def between_backward_and_step(rank, stage):
    weight = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of(stage)([weight], Averages)
    optimizer.train()
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"train\(\) or eval\(\) between backward\(\) and step\(\)"):
        optimizer.eval()
    optimizer.step()
    optimizer.eval()
    assert weight[0].item() == pytest.approx(0.9)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage", [THREE, FOUR])
def test_no_mode_is_switched_while_gradients_are_in_the_buffers(run, stage):
    run(between_backward_and_step, stage)


def no_modes(rank, stage):
    optimizer = optimizer_of(stage)([nn.Parameter(torch.ones(40))])
    return hasattr(optimizer, "train"), hasattr(optimizer, "eval")


@pytest.mark.parametrize("world_size", [1])
def test_there_are_no_modes_where_the_optimizer_class_has_none(run, stage):
    assert run(no_modes, stage) == [(False, False)]


def odd_arguments(rank, stage):
    weight = nn.Parameter(torch.ones(40))
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=0.5)
    weight.sum().backward()
    with pytest.raises(TypeError, match="unexpected keyword argument 'inv_scale'"):
        optimizer.step(inv_scale=2.0)
    optimizer.step()
    return weight[0].item()


@pytest.mark.parametrize("world_size", [2])
def test_an_argument_of_step_that_nobody_takes_is_an_error(run, stage):
    """ZeroRedundancyOptimizer passes on what the inner optimizer takes. Nothing has been stepped or sent then."""
    assert run(odd_arguments, stage) == [0.5, 0.5]


# -------------------------------------------------------------------------------------------------------------- layouts


def channels_last(rank, stage, how, fused):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))

    def step(model, optimizer, n, ranks):
        optimizer.zero_grad()
        for r in ranks:
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * n + r))
            (model(x).pow(2).mean() / len(ranks)).backward()
        optimizer.step()

    model, reference, kwargs = make(), make(), {"lr": 0.01, "fused": fused}
    optimizer = optimizer_of(stage)(model.parameters(), **kwargs)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for n in range(4):
        if n == 3 and how == "to":
            model.to(memory_format=torch.channels_last)
        elif n == 3:
            state = full_state_dict(optimizer, to_all=True)
            model = copy.deepcopy(model).to(memory_format=torch.channels_last)
            optimizer = optimizer_of(stage)(model.parameters(), **kwargs)
            load_full_state_dict(optimizer, state)
        step(model, optimizer, n, [rank.rank])
        step(reference, plain, n, range(rank.world_size))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), reference.parameters()))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("how, fused", [("to", False), ("load", False), ("load", True)])
@pytest.mark.parametrize("stage", [ONE, TWO])
def test_states_that_are_loaded_are_laid_out_like_their_parameters(run, stage, how, fused):
    """fused=True is torch's kernel that doesn't look at strides; after model.to() that is torch's trap, too."""
    assert max(run(channels_last, stage, how, fused)) < 1e-5


# ------------------------------------------------------------------------------------------------------------- failures


def failed_in_step(rank, stage, prefetch):
    """Rank 1 is out of memory in its step, so the others wait for its parameters until the time-out."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = Net(seed=0)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.1, process_group=group)
    if prefetch:
        optimizer.prefetch_params(model)
    train(model, optimizer, rank, 0)
    if rank.rank == 1:
        def out_of_memory(*_):
            raise torch.OutOfMemoryError("out of memory")
        optimizer.optimizer.register_step_pre_hook(out_of_memory)

    def step_and_read():
        train(model, optimizer, rank, 1)
        for param in model.parameters():
            param.sum()

    error = error_of(step_and_read)
    assert error and ("OutOfMemoryError" in error) == (rank.rank == 1)
    with torch.no_grad():
        for param in model.parameters():
            param.sum()  # is no error any more
    if stage == FOUR and rank.rank == 0:
        with pytest.raises(RuntimeError, match="an all-gather has failed, and parameters of this rank are incomplete"):
            optimizer.finish_grad_sync()
    dist.barrier()
    model.load_state_dict(Net(seed=0).state_dict())  # a checkpoint
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.1)
    reference = Replicated(rank, torch.optim.SGD, lr=0.1)
    for step in range(3):
        train(model, optimizer, rank, step)
        reference.step(step)
    assert_same(model, reference.model, exact=True)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage, prefetch", [(ONE, False), (TWO, False), (THREE, False), (FOUR, False), (FOUR, True)])
def test_after_a_failure_the_model_can_be_read_and_trained_anew(run, stage, prefetch):
    run(failed_in_step, stage, prefetch)


def dropped_after_step(rank, stage, prefetch):
    """A search over hyperparameters trains one model after the other."""
    def train_one():
        model = nn.Linear(64, 64)
        optimizer = optimizer_of(stage)(model.parameters(), lr=1e-3)
        if prefetch:
            optimizer.prefetch_params(model)
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weakref.ref(model.weight)

    gc.collect()
    gc.disable()
    try:
        models = [train_one() for _ in range(5)]
        for _ in range(100):  # gloo's thread lets go of a message a moment after it has arrived
            if any(model() is not None for model in models):
                threading.Event().wait(0.02)
        return sum(model() is not None for model in models)
    finally:
        gc.enable()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage, prefetch", [(ONE, False), (TWO, False), (THREE, False), (FOUR, False), (FOUR, True)])
def test_a_model_that_is_dropped_right_after_a_step_is_freed_at_once(run, stage, prefetch):
    assert run(dropped_after_step, stage, prefetch) == [0, 0]


def unused_once(rank):
    a, b = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = optimizer_of(FOUR)([a, b], torch.optim.SGD, lr=0.1, find_unused_parameters=True)
    a.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = (b**2).sum()
    (a.sum() + b.sum()).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@pytest.mark.parametrize("world_size", [2])
def test_a_parameter_that_was_unused_once_is_told_to_autograd_when_it_is_stepped(run):
    run(unused_once)


# ------------------------------------------------------------------------------------------------------- model.bfloat16


def other_dtype(rank, stage, zero):
    model = Net(seed=0)
    optimizer = optimizer_of(stage)(trainable(model))
    train(model, optimizer, rank, 0)
    model.bfloat16()
    if zero:
        optimizer.zero_grad()
    loss_of(model, *[tensor.bfloat16() for tensor in batch(1, rank.rank)]).backward()
    return error_of(optimizer.step)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("stage", [THREE, FOUR])
def test_a_model_whose_dtype_has_changed_is_an_error_that_says_so(run, stage, zero):
    assert all("the data of parameter 0 of group 0 was replaced, by model.to()" in error
               for error in run(other_dtype, stage, zero))
