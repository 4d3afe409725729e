"""What users bring: schedulers of each rank's own, hooks, other layouts, torch's clipping.

The situations come from public reports and from third-party optimizers; test_probe.py has the trial of these.
"""

import functools
import gc
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import checkpoint
from checkpoint import full_state_dict
from guard.dropping import TORCHS_ZERO_GRAD
from guard.scaling import ALIVE, CELLS
from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from tests.common import Net, error_of, on_ranks, optimizer_of, trainable
from tests.pairs import Pair, parameter_of, sgd_of, train


def clip_in_two_parts(params):
    norm = get_total_norm([param.grad for param in params if param.grad is not None])
    clip_grads_with_norm_(params, 0.1, norm)


CLIPS = {
    "at once": lambda params: clip_grad_norm_(params, 0.1),  # imported before there is an optimizer
    "in two parts": clip_in_two_parts,
    "compiled": torch.compile(lambda params: clip_grad_norm_(params, 0.1), backend="eager"),
}


@on_ranks(2, how=CLIPS)
def test_torchs_clipping_is_refused(rank, stage, how):
    """Clip with torch's functions before the average: an error, or a warning. They find a rank's own gradient, or none.

    After the average, stages 1 and 2 have it in param.grad. When no optimizer exists, torch's functions are its own.
    """
    weight = parameter_of(1, rank)
    own_arguments = {}
    if stage == STAGE_3:  # whose gradients of 16-bit parameters may be in main_grad
        weight = nn.Parameter(weight.detach().bfloat16())
        own_arguments = {"grad_dtype": torch.float32}
    optimizer = sgd_of(stage, [weight], **own_arguments)
    clip_by_norm = functools.partial(CLIPS[how], [weight])
    clip_by_value = functools.partial(clip_grad_value_, [weight], 10)
    weight.sum().backward()
    if stage in (STAGE_1, STAGE_2):
        refusal = "finds this rank's own gradient, not the average, in param.grad: call clip_grad_norm_("
        assert refusal in error_of(clip_by_norm)
        with pytest.warns(UserWarning, match="clips this rank's own gradient.*: call finish_grad_sync.. of the Distr"):
            clip_by_value()
        optimizer.finish_grad_sync()
        clip_by_norm()
    else:
        for clip in (clip_by_norm, clip_by_value):
            refusal = "() finds no gradient in param.grad: call clip_grad_norm_(max_norm) of the Distr"
            assert refusal in error_of(clip)
    if stage == STAGE_4:
        optimizer.zero_grad()
        with optimizer.no_sync():
            weight.sum().backward()
        assert "finds this rank's own gradient" in error_of(clip_by_norm)
    del optimizer
    gc.collect()
    weight.sum().backward()
    clip_by_norm()
    if not ALIVE:
        assert not any(hasattr(cell.cell_contents, "__wrapped__") for cell in CELLS)
        assert nn.Module.zero_grad is TORCHS_ZERO_GRAD


def test_a_torch_whose_clipping_cannot_be_watched_is_refused_at_the_import(monkeypatch):
    monkeypatch.setattr(nn.utils, "clip_grad_value_", lambda parameters, clip_value: None)  # wrapped by nothing
    spec = importlib.util.find_spec("guard.scaling")
    with pytest.raises(ImportError, match="wraps clipping anew"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@on_ranks(3, dtype=[torch.float32, torch.bfloat16])
def test_a_state_that_is_reset_as_in_torch(rank, stage, dtype):
    """Assign a moment of the whole parameter's shape, 0 to 19, as ReLoRA does: each rank takes its piece, if any."""
    param = nn.Parameter(torch.ones(20, device=rank.device, dtype=dtype))
    optimizer = optimizer_of(stage)([param], lr=0.1)
    for _ in range(2):
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state[param]["exp_avg"] = torch.arange(20.0, device=rank.device).to(dtype)
    for _, start, stop, main in optimizer.pieces():
        moment = optimizer.optimizer.state[main]["exp_avg"]
        assert moment.tolist() == list(range(start, stop)) and moment.dtype == main.dtype
    optimizer.state["of mine"] = 3  # a text as a key, as torch has it
    assert optimizer.state.pop("of mine") == 3
    assert "n" not in optimizer.state.setdefault(param, {"n": 1})  # this rank or another has the state


@pytest.mark.shared_guard
@on_ranks(3)
def test_settings_that_differ_between_ranks_are_an_error_on_every_rank(rank, stage, tmp_path):
    """Lower the lr on the last rank alone, as its scheduler does when only its loss has stopped falling.

    Stage 4 has a message before each step, and refuses that. The others refuse when ranks talk of the state. What the
    CPUs of ranks round otherwise is no error. A group that differs isn't added.
    """
    model = Net(seed=0)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.25)
    train(model, optimizer, rank, 0)
    (group,) = optimizer.param_groups
    other_group = {"params": [parameter_of(0, rank, n=2 + rank.number)]}
    error = error_of(lambda: optimizer.add_param_group(other_group), ValueError)
    assert "0 of group 1 (2,) torch.float32 on rank 0 and 0 of group 1 (3,) torch.float32 on rank 1" in error
    assert optimizer.param_groups == [group]
    group["lr"] = 0.125 if rank.number == 2 else 0.25
    words = "lr of group 0 is 0.25 on rank 0 and 0.125 on rank 2"
    calls = [lambda: full_state_dict(optimizer), lambda: checkpoint.save(tmp_path / "step-1", model, optimizer)]
    if stage == STAGE_4:
        calls.append(lambda: train(model, optimizer, rank, 1))
    for call in calls:
        assert f"{words}: set the same" in error_of(call)
    assert not list(tmp_path.glob("step-*"))
    group["lr"] = 0.25 * (1 + 1e-9 * rank.number)
    optimizer.zero_grad()
    train(model, optimizer, rank, 2)
    full_state_dict(optimizer)


@on_ranks(3)
def test_errors_name_ranks_by_their_number_in_the_program(rank):
    """Not by their place in a process group."""
    group = dist.new_group([1, 2])
    if rank.number == 0:
        return
    params = [parameter_of(0, rank, n=rank.number)]
    error = error_of(lambda: sgd_of(STAGE_4, params, process_group=group), ValueError)
    assert "(1,) torch.float32 on rank 1 and 0 of group 0 (2,) torch.float32 on rank 2" in error
    if rank.number == 2:
        params = [torch.ones(3, dtype=torch.int)]
    error = error_of(lambda: sgd_of(STAGE_4, params, process_group=group), ValueError)
    assert error.startswith("rank 2: " if rank.number == 1 else "parameter 0")


@pytest.mark.shared_guard
@on_ranks(2)
def test_what_an_optimizer_writes_into_its_groups_must_be_alike(rank, stage):
    """Write a number on rank 1 alone. Stage 4 compares it in the next step, others in a save."""
    param = parameter_of(0, rank)
    optimizer = sgd_of(stage, [param])
    if rank.number == 1:
        written = {"seen": torch.tensor(1.5)}  # a tensor of one element, as the lr of a compiled optimizer
        optimizer.optimizer.register_step_post_hook(lambda inner, *_: inner.param_groups[0].update(written))

    def step():
        param.sum().backward()
        optimizer.step()

    step()
    error = error_of(step if stage == STAGE_4 else lambda: full_state_dict(optimizer))
    assert "seen of group 0 is None on rank 0 and 1.5 on rank 1" in error
    assert param.eq(-1).all()


@pytest.mark.shared_guard
@on_ranks(2)
def test_hooks_of_all_optimizers_are_called_once_a_step(rank, stage):
    """A subclass that has a step of its own calls them once, and the constructor's trial doesn't call them.

    test_what_runs.py has the classes themselves.
    """
    class OwnStep(optimizer_of(stage)):
        def step(self, closure=None, **kwargs):
            return super().step(closure, **kwargs)

    calls = []
    hooks = [register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
             register_optimizer_step_post_hook(lambda *_: calls.append("after"))]
    try:
        model = Net(seed=0)
        optimizer = OwnStep(trainable(model), torch.optim.SGD, lr=1.0)
        optimizer.register_step_post_hook(lambda *_: calls.append("own"))
        train(model, optimizer, rank, 0, 1)
    finally:
        for hook in hooks:
            hook.remove()
    assert calls == ["before", "own", "after"] * 2


@on_ranks(2)
def test_empty_parameter_groups_are_taken_as_torch_takes_them(rank, stage):
    """Leave a group empty, as a split by decay may: at first, and one that is added later."""
    pair = Pair(rank, stage, groups=lambda model: [{"params": [], "weight_decay": 0.1}, {"params": trainable(model)}])
    pair.optimizer.add_param_group({"params": [], "lr": 0.5})
    pair.train(0, 1)
    pair.assert_same()


@pytest.mark.parametrize("stage", [STAGE_1, STAGE_2])
@on_ranks(2)
def test_gradients_and_loaded_states_are_laid_out_like_a_channels_last_parameter(rank, stage):
    """Assign a contiguous gradient, and load contiguous moments: torch's fused kernels don't look at strides.

    A parameter with other strides is refused.
    """
    values = torch.arange(48.0, device=rank.device).view(2, 3, 4, 2)
    weight = nn.Parameter(values.clone(memory_format=torch.channels_last))
    optimizer = optimizer_of(stage)([weight], lr=0.1)
    weight.grad = values
    optimizer.step()
    assert weight.grad.stride() == weight.stride() and torch.equal(weight.grad, values)
    loaded = {"step": torch.tensor(1.0), "exp_avg": values, "exp_avg_sq": values}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: loaded}})
    for _, _, _, main in optimizer.pieces():
        moment = optimizer.optimizer.state[main]["exp_avg"]
        assert moment.stride() == weight.stride() and torch.equal(moment, values)
    transposed = nn.Parameter(values[0, 0].t())
    refusal = error_of(lambda: optimizer_of(stage)([transposed]), ValueError)
    assert "parameter 0 of group 0 is not contiguous" in refusal
