"""What you read is what runs: a guarded step is the core's step, with what makes it reliable between its phases.

And the profiler shows the step's parts.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import stage4_overlap
import variants.finite
from harness import STAGE_4
from harness.measuring.ledger import Ledger
from harness.publishing.stages import CORE
from tests.common import STAGES, on_ranks, one_rank_of, optimizer_of
from tests.pairs import parameter_of, sgd_of
from tests.ranks import ROOT
from tests.stages.test_cores import core_of


def calls_in_a_step(optimizer_cls):
    """Return (file, function) of each call in stages and guard, in order, of one steady step on one of two ranks."""
    with one_rank_of(2):
        model = nn.Linear(64, 64)
        optimizer = optimizer_cls(model.parameters(), torch.optim.AdamW, lr=1e-3)
        calls = []

        def note(frame, event, _):
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in (*STAGES, "guard"):
                calls.append((str(path.relative_to(ROOT)), getattr(frame.f_code, "co_qualname", frame.f_code.co_name)))

        for _ in range(3):
            model(torch.ones(4, 64)).sum().backward()
            calls.clear()
            sys.setprofile(note)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
    return calls


@pytest.mark.parametrize("stage", STAGES)
def test_a_guarded_step_calls_the_functions_of_the_core_in_their_order(stage):
    """Each call in a step of the core is one in a step of the guard, too, and none of these is out of order."""
    of_core = calls_in_a_step(core_of(stage))
    of_guard = iter(calls_in_a_step(optimizer_of(stage)))
    assert (f"{stage}/optimizer.py", "ShardedOptimizer.step") in of_core or sys.version_info < (3, 11)
    assert not [call for call in of_core if call not in of_guard]  # `in` reads on to the call that it finds


def test_a_guarded_step_of_stage_4_stays_in_few_files():
    """Comprehensions are calls, too. The core has 17 calls in 3 files."""
    calls = calls_in_a_step(optimizer_of(STAGE_4))
    files = {file for file, _ in calls}
    assert len(files) <= len(CORE) + 4, files
    assert len(calls) <= 60


@pytest.mark.parametrize("core, guarded", [
    *[(core_of(stage), optimizer_of(stage)) for stage in STAGES],
    (variants.finite.ShardedOptimizer, variants.finite.DistributedOptimizer),
    (variants.finite.ShardedOptimizer, stage4_overlap.DistributedOptimizer)], ids=lambda cls: cls.__module__)
@pytest.mark.parametrize("is_core_first", [True, False])
def test_a_step_hook_runs_once_a_step_whichever_class_is_built_first(core, guarded, is_core_first, monkeypatch):
    """torch wraps the `step` of a class when it builds the first optimizer of it: here no class has been built."""
    for cls in {*core.__mro__, *guarded.__mro__}:
        if "step" in vars(cls) and cls.__name__ == "ShardedOptimizer" and hasattr(cls.step, "hooked"):
            monkeypatch.setattr(cls, "step", cls.step.__wrapped__)
    calls = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("of all"))
    try:
        with one_rank_of(2):
            for cls in [core, guarded] if is_core_first else [guarded, core]:
                weight = nn.Parameter(torch.zeros(64))
                optimizer = cls([weight], torch.optim.SGD, lr=1.0)
                optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
                optimizer.register_step_post_hook(lambda *_: calls.append("after"))
                for _ in range(2):
                    weight.sum().backward()
                    calls.clear()
                    optimizer.step()
                    if cls is guarded:
                        assert calls == ["before", "after", "of all"]
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------------------------- the profiler


def test_the_profiler_shows_what_stage_4_does():
    with one_rank_of(2):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = optimizer_of(STAGE_4)(model.parameters(), torch.optim.SGD, lr=0.5, bucket_cap_mb=1e-6)
        optimizer.prefetch_params(model)
        with torch.profiler.profile() as profile:
            for _ in range(2):
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
    names = {event.name for event in profile.events()}
    works = ("reduce-scatter", "all-gather", "wait")
    assert {"inner step", *(f"bucket {number}: {work}" for number in range(4) for work in works)} <= names


@on_ranks(2)
def test_set_requires_gradient_sync_is_no_sync_in_two_calls(rank, stage):
    """The first of two backward passes sends nothing; the step has the average of both."""
    weight = parameter_of(0, rank, n=64)
    optimizer = sgd_of(stage, [weight])
    with Ledger() as ledger:
        optimizer.set_requires_gradient_sync(False)
        (weight.sum() * rank.number).backward()
        assert not ledger.entries
        optimizer.set_requires_gradient_sync(True)
        weight.sum().backward()
        assert stage != STAGE_4 or ledger.entries
    optimizer.step()
    assert weight.unique().tolist() == [-1.5]
