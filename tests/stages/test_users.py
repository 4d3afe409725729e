"""What users bring: schedulers of each rank's own, hooks, other layouts, and what fails.

The situations come from public reports and from third-party optimizers; test_probe.py has the trial of these.
"""

import functools
import gc
import importlib.util
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import checkpoint
from checkpoint import full_state_dict, load_full_state_dict
from guard.scaling import ALIVE, CELLS
from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from tests.common import Net, batch, error_of, on_ranks, optimizer_of, trainable
from tests.pairs import Pair, parameter_of, sgd_of, train

CLIPS = {
    "by a module": lambda params: nn.utils.clip_grad_norm_(params, 0.1),
    "imported before": lambda params: clip_grad_norm_(params, 0.1),
    "in two parts": lambda params: clip_grads_with_norm_(params, 0.1, get_total_norm([p.grad for p in params if
                                                                                      p.grad is not None])),
    "compiled": torch.compile(lambda params: clip_grad_norm_(params, 0.1), backend="eager"),
}


@on_ranks(2, spelling=CLIPS)
def test_torchs_clipping_is_refused(rank, stage, spelling):
    """Clip with torch's functions before the average: an error, or a warning. It sees a rank's own gradients, or none.

    After the average stages 1 and 2 have that in param.grad. What is no longer an optimizer's, torch clips.
    """
    model = Net(seed=0).to(torch.bfloat16 if stage == STAGE_3 else torch.float32)
    optimizer = sgd_of(stage, trainable(model), **({"grad_dtype": torch.float32} if stage == STAGE_3 else {}))
    params = list(model.parameters())
    clip_by_norm = functools.partial(CLIPS[spelling], params)
    clip_by_value = functools.partial(clip_grad_value_, params, 10)

    def go_backward():
        model(batch(0, rank.number)[0].to(model.scale.dtype)).square().mean().backward()

    go_backward()
    if stage in (STAGE_1, STAGE_2):
        refusal = "finds this rank's own gradient, not the average, in param.grad: call clip_grad_norm_("
        assert refusal in error_of(clip_by_norm)
        with pytest.warns(UserWarning, match="clips this rank's own gradient.*: call finish_grad_sync.. of the Distr"):
            clip_by_value()
        optimizer.clip_grad_norm_(0.1)
        clip_by_norm()
        clip_by_value()
    else:
        for clip in (clip_by_norm, clip_by_value):
            refusal = "() finds no gradient in param.grad: call clip_grad_norm_(max_norm) of the Distr"
            assert refusal in error_of(clip)
    if stage == STAGE_4:
        optimizer.zero_grad()
        with optimizer.no_sync():
            go_backward()
        assert "finds this rank's own gradient" in error_of(clip_by_norm)
    del optimizer
    gc.collect()
    go_backward()
    clip_by_norm()
    assert ALIVE or not any(hasattr(cell.cell_contents, "__wrapped__") for cell in CELLS)  # torch is as it was


def test_a_torch_whose_clipping_cannot_be_watched_is_refused_at_the_import(monkeypatch):
    monkeypatch.setattr(nn.utils, "clip_grad_value_", lambda parameters, clip_value: None)  # wrapped by nothing
    with pytest.raises(ImportError, match="wraps clipping anew"):
        importlib.util.find_spec("guard.scaling").loader.exec_module(importlib.util.module_from_spec(
            importlib.util.find_spec("guard.scaling")))


@on_ranks(3, dtype=[torch.float32, torch.bfloat16])
def test_a_state_that_is_reset_as_in_torch(rank, stage, dtype):
    """Assign a moment of the whole parameter's shape, 0 to 19, as ReLoRA does: each rank takes its pieces, if any."""
    p, q = (nn.Parameter(torch.full((n,), 2.0, device=rank.device, dtype=dtype)) for n in (20, 16))
    twin = nn.Parameter(p.detach().float())
    optimizer = optimizer_of(stage)([p, q], lr=0.1)
    plain = torch.optim.AdamW([twin], lr=0.1)
    optimizer.state["steps of mine"] = 0  # a name for a key, as torch has it
    for _ in range(3):
        for one, param in ((optimizer, p), (plain, twin)):
            (param.square().sum() + q.sum()).backward()
            one.step()
            one.zero_grad()
            one.state[param]["exp_avg"] = torch.arange(20.0, device=rank.device).to(param.dtype)
        optimizer.state_dict()
        for start, stop, main in [piece[1:] for piece in optimizer.pieces() if piece[0] is p]:
            moment = optimizer.optimizer.state[main]["exp_avg"]
            assert moment.tolist() == list(range(start, stop)) and moment.dtype == main.dtype
    torch.testing.assert_close(p.detach().float(), twin.detach(), rtol=0, atol=1e-6 if dtype.itemsize == 4 else 0.03)
    assert optimizer.state.pop("steps of mine") == 0
    assert "n" not in optimizer.state.setdefault(q, {"n": 1})  # it is there, or on another rank


@pytest.mark.shared_guard
@on_ranks(2)
def test_a_closure_may_return_anything_and_a_number_is_averaged(rank, stage):
    param = parameter_of(0, rank)
    optimizer = sgd_of(stage, [param])
    for result, expected in [({"loss": 1}, {"loss": 1}), (rank.number, 0.5), (True, True)]:
        assert optimizer.step(lambda: (param.sum().backward(), result)[1]) == expected
    with pytest.raises(TypeError, match="unexpected keyword argument 'inv_scale'"):
        optimizer.step(inv_scale=2.0)


@pytest.mark.shared_guard
@on_ranks(3)
def test_settings_that_differ_between_ranks_are_an_error_on_every_rank(rank, stage, tmp_path):
    """Lower the lr on the last rank alone, as its scheduler does when only its loss has stopped falling.

    Stage 4 has a message before each step, and refuses that. The others refuse when ranks talk of the state, or of a
    group that is added. What the CPUs of ranks round otherwise is no error.
    """
    model = Net(seed=0)
    optimizer = optimizer_of(stage)(trainable(model), torch.optim.SGD, lr=0.25)
    train(model, optimizer, rank, 0)
    (group,) = optimizer.param_groups
    group["lr"] = 0.125 if rank.number == 2 else 0.25
    words = "lr of group 0 is 0.25 on rank 0 and 0.125 on rank 2"
    error = error_of(lambda: optimizer.add_param_group({"params": parameter_of(0, rank)}), ValueError)
    assert f"the ranks disagree on parameters or arguments: {words}" in error
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
    error = error_of(lambda: sgd_of(STAGE_4, [parameter_of(0, rank, n=rank.number)], process_group=group), ValueError)
    assert "(1,) torch.float32 on rank 1 and 0 of group 0 (2,) torch.float32 on rank 2" in error
    bad = [torch.ones(3, dtype=torch.int)] if rank.number == 2 else [parameter_of(0, rank)]
    assert error_of(lambda: sgd_of(STAGE_4, bad, process_group=group), ValueError).startswith(
        "rank 2: " if rank.number == 1 else "parameter 0")


@pytest.mark.shared_guard
@on_ranks(2, writer=[None, 1])
def test_what_an_optimizer_writes_into_its_groups_must_be_alike(rank, stage, writer):
    """Write something else on each rank, or on one alone. Stage 4 compares it in the next step, others in a save."""
    param = parameter_of(0, rank)
    optimizer = sgd_of(stage, [param])
    if writer in (None, rank.number):
        own = {"seen": torch.tensor(0.5 + rank.number)}  # of one element: as the lr of a compiled optimizer
        optimizer.optimizer.register_step_post_hook(lambda inner, *_: inner.param_groups[0].update(own))

    def step():
        param.sum().backward()
        optimizer.step()

    step()
    error = error_of(step if stage == STAGE_4 else lambda: full_state_dict(optimizer))
    assert f"seen of group 0 is {None if writer else 0.5} on rank 0 and 1.5 on rank 1" in error
    assert "an optimizer that writes the same" in error and param.eq(-1).all()


@pytest.mark.shared_guard
@on_ranks(2, has_own_step=[False, True])
def test_hooks_of_all_optimizers_are_called_once_a_step(rank, stage, has_own_step):
    """Also where a subclass has a step of its own, and not by the constructor's trial."""
    class OwnStep(optimizer_of(stage)):
        def step(self, closure=None, **kwargs):
            return super().step(closure, **kwargs)

    calls = []
    model = Net(seed=0)
    hooks = [register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
             register_optimizer_step_post_hook(lambda *_: calls.append("after"))]
    try:
        kind = OwnStep if has_own_step else optimizer_of(stage)
        optimizer = kind(trainable(model), torch.optim.SGD, lr=1.0)
        optimizer.register_step_post_hook(lambda *_: calls.append("own"))
        train(model, optimizer, rank, 0, 1)
    finally:
        for hook in hooks:
            hook.remove()
    train(model, optimizer, rank, 2)
    assert calls == ["before", "own", "after"] * 2 + ["own"]


@on_ranks(2)
def test_empty_parameter_groups_are_taken_as_torch_takes_them(rank, stage):
    """Leave a group empty, as a split by decay may: at first, and one that is added later."""
    pair = Pair(rank, stage, groups=lambda model: [{"params": [], "weight_decay": 0.1}, {"params": trainable(model)}])
    pair.optimizer.add_param_group({"params": [], "lr": 0.5})
    pair.train(0, 1)
    pair.assert_same()
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    assert [len(group["params"]) for group in pair.optimizer.param_groups] == [0, len(trainable(pair.model)), 0]


@pytest.mark.parametrize("stage", [STAGE_1, STAGE_2])
@on_ranks(2)
def test_gradients_and_loaded_states_are_laid_out_like_a_channels_last_parameter(rank, stage):
    """Assign a contiguous gradient, and load a contiguous state: torch's fused kernels don't look at strides."""
    values = torch.arange(48.0, device=rank.device).view(2, 3, 4, 2)
    plain = nn.Parameter(values.clone())
    reference = torch.optim.AdamW([plain], lr=0.1, fused=True)
    plain.grad = values
    reference.step()
    weight = nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    optimizer = optimizer_of(stage)([weight], lr=0.1, fused=True)
    load_full_state_dict(optimizer, reference.state_dict())
    for one, param in ((optimizer, weight), (reference, plain)):
        param.grad = values - 1
        one.step()
    torch.testing.assert_close(weight, plain, check_stride=False)
    for other in (values[0, 0].t(), values[0, 0, :, :1]):  # a broadcast takes neither
        named = [("other", nn.Parameter(other))]
        assert "parameter other is not contiguous" in error_of(lambda: optimizer_of(stage)(named), ValueError)


@pytest.mark.waits
@pytest.mark.parametrize("stage", [STAGE_2, STAGE_3])
@on_ranks(2)
def test_after_a_failure_the_model_can_be_read_and_trained_anew(rank, stage):
    """Let rank 1 run out of memory in its step, while the other waits for its parameters in vain."""
    model, group = Net(seed=0), dist.new_group(timeout=timedelta(seconds=60))
    optimizer = sgd_of(stage, trainable(model), process_group=group)

    def run_out_of_memory(*_):
        raise torch.OutOfMemoryError("out of memory")

    if rank.number == 1:
        optimizer.optimizer.register_step_pre_hook(run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError if rank.number == 1 else RuntimeError):
        train(model, optimizer, rank, 0)
    dist.barrier()
    model.load_state_dict(Net(seed=0).state_dict())  # a checkpoint
    pair = Pair(rank, stage, torch.optim.SGD, net=lambda seed: model if seed else Net(0), seeds=["trained before"],
                lr=1.0)
    pair.optimizer.zero_grad()
    pair.train(0, 1)
    pair.assert_same()
