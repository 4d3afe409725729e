"""What programs see of a step: torch's hooks run once, the profiler has names for what happens, and repr() counts."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import variants.finite
from harness import STAGE_4
from tests.common import STAGES, one_rank_of, optimizer_of
from tests.pairs import SMALL
from tests.stages.test_cores import core_of


@pytest.mark.parametrize("core, guarded", [
    (core_of(STAGE_4), optimizer_of(STAGE_4)),
    (variants.finite.ShardedOptimizer, variants.finite.DistributedOptimizer),
    (variants.finite.ShardedOptimizer, optimizer_of(STAGE_4))], ids=lambda cls: cls.__module__)
@pytest.mark.parametrize("is_core_first", [True, False])
def test_a_step_hook_runs_once_a_step_whichever_class_is_built_first(core, guarded, is_core_first, monkeypatch):
    """torch wraps the `step` of a class when it builds the first optimizer of it: here no class has been built."""
    for cls in {*core.__mro__, *guarded.__mro__}:
        if cls.__name__ == "ShardedOptimizer" and hasattr(vars(cls).get("step"), "hooked"):
            monkeypatch.setattr(cls, "step", cls.step.__wrapped__)
    calls = []

    def step_of(cls):
        weight = nn.Parameter(torch.zeros(64))
        optimizer = cls([weight], torch.optim.SGD, lr=1.0)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        weight.sum().backward()
        calls.clear()
        optimizer.step()

    handle = register_optimizer_step_post_hook(lambda *_: calls.append("of all"))
    try:
        with one_rank_of(2):
            if is_core_first:
                step_of(core)
            step_of(guarded)
            assert calls == ["before", "after", "of all"]
            step_of(core)
            step_of(guarded)
            assert calls == ["before", "after", "of all"]
    finally:
        handle.remove()


@pytest.mark.parametrize("number, n_own, buckets", [
    (1, 128, ""), (2, 128, ""), (3, 64, ""), (4, 64, "; buckets: 1, with buffers of 1,024 bytes")])
def test_its_text_has_stage_ranks_elements_buckets_and_bytes_beside_torchs_groups(number, n_own, buckets):
    with one_rank_of(2):
        weight = nn.Parameter(torch.zeros(128))
        optimizer = optimizer_of(STAGES[number - 1])([weight], torch.optim.SGD, lr=0.5, momentum=0.5)
        weight.sum().backward()
        optimizer.step()
        of_torch = repr(torch.optim.SGD([weight], lr=0.5, momentum=0.5)).replace("SGD", "DistributedOptimizer", 1)
        line = f"Stage {number}, rank 0 of 2: updates {n_own} of 128 elements; state: {4 * n_own} bytes{buckets}"
        assert repr(optimizer) == f"{line}\n{of_torch}"


def test_the_profiler_shows_what_stage_4_does():
    with one_rank_of(2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = optimizer_of(STAGE_4)(model.parameters(), torch.optim.SGD, lr=0.5, **SMALL)
        optimizer.prefetch_params(model)
        with torch.profiler.profile() as profile:
            for _ in range(2):
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
    names = {event.name for event in profile.events()}
    assert "inner step" in names
    for number in range(4):
        for work in ("reduce-scatter", "all-gather", "wait"):
            assert f"bucket {number}: {work}" in names
