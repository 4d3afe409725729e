"""bench.py: the json that it promises, counts that equal the formulas, and no time for what is wrong."""

import contextlib
import functools
import re
import sys
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bench
from harness.measuring import every_row, examine, host_time
from harness.measuring.examine import Settings
from harness.planning import alone
from harness.publishing import results, row_names
from harness.publishing.pictures import PARAMETERS
from harness.publishing.results import Made, Result, Row
from harness.publishing.row_names import RowId
from harness.publishing.tables import conditions_line
from harness.training import models
from harness.training.models import MODELS
from stage4_overlap.transport import Exchange
from tests.common import on_ranks
from tests.ranks import git

pytestmark = pytest.mark.waits

SETTINGS, MADE = Settings("nano", 2, 16, 1, 1), Made("machine", "2", "abc", "today")
NANO = ["--model", "nano", "--sequence-length", "16", "--batch-size", "2", "--rounds", "1", "--steps", "1"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of bench.py in this process, whose ranks then start at once. Host time of few tensors, state on few ranks."""
    path, hook = tmp_path_factory.mktemp("results") / "bench.json", sys.excepthook
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["bench.py", *NANO, "--json", str(path)])
        patch.setattr(host_time, "measure_ranks", functools.partial(host_time.measure_ranks, n_tensors=40, n_steps=1))
        patch.setattr(alone, "STATE_RANKS", (1, 4, 1024))
        bench.main()
    assert not end.value.code and sys.excepthook is hook  # it has played ranks, of groups that wrap the hook
    return results.from_json(Result, path.read_text())


def test_every_row_has_every_figure(result):
    for row in result.rows:
        assert row.rounds_ms and row.vs_reference and row.error is None, row.name
        assert len(row.drain_ms) == len(row.rounds_ms)
        assert {"model", "optimizer", "backward", "step", "peak"} <= set(row.memory_bytes)
        assert list(row.peak_bytes) == ["build", "forward", "backward", "step"]
        assert list(row.held_bytes) == ["parameters", "gradients", "state", "buffers"]
        assert [step.seconds for step in row.timeline] == [None] * 2  # of the recorded step the exposed time is kept
    assert Counter(row.kind for row in result.rows) == {"floor": 1, "reference": 1, "stage": 7, "peer": 4, "noise": 1}
    assert set(result.sheets) == {"model_state", "gathered", "caps"} and set(result.host) == {1, 8, 64}
    assert (result.conditions.ranks, result.conditions.model, result.conditions.dtype) == (2, "nano", "float32")


@pytest.fixture
def quick(monkeypatch):
    """-> function: bench.main() with such arguments, and `measured` in place of measuring -> its exit code."""
    def quick(*arguments, measured, device="cpu", show=lambda _: None, is_quick=True):
        ranks = SimpleNamespace(run=lambda function, *_: [function(SimpleNamespace(device=torch.device(device)))])
        monkeypatch.setattr(bench, "Workers", lambda *_: contextlib.nullcontext(ranks))
        monkeypatch.setattr(every_row, "measure_rows", measured)
        monkeypatch.setattr(every_row, "show", show)
        monkeypatch.setattr(sys, "argv", ["bench.py", *["--quick"] * is_quick, *arguments])
        with pytest.raises(SystemExit) as end:
            bench.main()
        return end.value.code
    return quick


def test_the_model_is_one_that_shows_something_on_the_device(quick, capsys):
    """As the ranks find it: a machine with a GPU may run them on its processor still. Medium takes sequences of 512."""
    measured = mock.Mock(side_effect=lambda *_: Result(MADE, [Row("ddp")]))
    for device, given, model in (("cuda", [], "medium"), ("cpu", [], "tiny"), ("cuda", ["--model", "small"], "small"),
                                 ("cpu", ["--model", "nano"], "nano")):
        quick("--sequence-length", "64", *given, device=device, measured=measured)
        assert measured.call_args.args[1].model == model
    assert quick("--sequence-length", "512", measured=measured) == 2
    assert "--sequence-length 512: tiny takes at most 256" in capsys.readouterr().err


def test_a_result_says_of_which_code_it_is(result, tmp_path):
    """A file of the code that has changed since is a +, one of the results is none; without git there is no answer."""
    assert result.conditions.commit == results.commit()
    for name in ("code.py", "table.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "--quiet")
    assert results.commit(tmp_path) == "unknown"  # nothing is committed yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    for name, expected in (("table.json", head), ("code.py", f"{head}+")):
        (tmp_path / name).write_text("2")
        assert results.commit(tmp_path) == expected
    assert results.commit(tmp_path / "nowhere") == "unknown"
    assert f"commit {results.commit()}" in conditions_line(result.conditions)


def test_what_is_compared_with_ddp(result):
    """A stage is equal to it, who sends nothing has nothing exposed, and the noise is DDP beside itself."""
    assert [row.max_abs_diff for row in result.rows if row.kind == "stage"] == [0.0] * 7
    assert [step.exposed_seconds for step in result.find("compute only").timeline] == [0, 0]
    rounds = {row.kind: row.rounds_ms for row in result.rows}
    noise = [one / other for one, other in zip(rounds["noise"], rounds["reference"])]
    assert result.conditions.noise == pytest.approx(noise, rel=1e-8)


def test_what_is_counted_is_what_the_formula_says(result):
    """Up to what the formulas leave out: scalars (step counts, flags of used parameters), and padding, which is much
    in a tiny model; in its state at one rank there is little."""
    for row in result.rows:
        theory, slack = row.wire_bytes_theory, 8 * 32  # 30 parameters
        assert row.wire_bytes == pytest.approx(theory, rel=0.01, abs=slack), row.name
        assert row.bytes_per_param == pytest.approx(row.bytes_per_param_theory, rel=0.005), row.name
        assert row.message_bytes.keys() == row.collectives.keys()
    counted = result.sheets["model_state"].numbers("1")
    for name, row_id, _ in alone.STATES:
        recorded = alone.record(row_id, models.NAMED["nano"], 1, transport=Exchange)
        assert counted[name] == pytest.approx(recorded.theory / recorded.numel, rel=0.02), name


HELD = {  # times the bytes of all parameters, in fp32, on 2 ranks: parameters, gradients, state
    "compute only": (1, 1, 2), "ddp": (1, 1, 2), "replicated": (1, 1, 2),
    "ddp + stage 1": (1, 1, 1), "ddp + stage 2": (1, 1, 1), "ddp + torch ZeRO": (1, 1, 1),
    "stage 1 naive broadcast": (1, 1, 1), "stage 2 all-gather": (1, 1, 1), "stage 3 grad buffer": (1, 1, 1),
    "stage 4 overlap": (1, 0.5, 1), "owner reduce": (1, 0.5, 1), "fsdp2": (0.5, 0.5, 1), "fsdp2 reshard": (0.5, 0.5, 1)}


def test_what_is_held_is_of_the_kinds_that_the_formulas_have(result):
    """And activations are those of the same model."""
    numel, rows = result.conditions.parameters, {row.name: row for row in result.rows}
    for name, shares in HELD.items():
        *held, _ = rows[name].held_bytes.values()
        assert [n_bytes / (4 * numel) for n_bytes in held] == pytest.approx(shares, rel=0.03), name  # padding, shares
        assert rows[name].activation_bytes == pytest.approx(rows["compute only"].activation_bytes, rel=0.1), name
    assert {name for name in HELD if rows[name].held_bytes["buffers"] > 0.05 * 4 * numel} == {
        "stage 4 overlap"}


def test_a_peak_is_within_its_phase(result):
    """No less than what is held meanwhile, and the largest is that of the whole: only the first step may have more."""
    for row in result.rows:
        peaks, held = row.peak_bytes, sum(row.held_bytes.values())
        assert peaks["step"] >= 0.99 * held and max(peaks.values()) <= row.memory_bytes["peak"], row.name
        assert peaks["forward"] >= row.held_bytes["state"] + row.activation_bytes, row.name
        assert peaks["build"] >= 0.99 * row.held_bytes["parameters"], row.name
        if row.base in ("fsdp2", "fsdp2 reshard"):  # whole parameters are there in the passes only
            assert peaks["step"] < peaks["forward"] and peaks["step"] < peaks["backward"]


def test_collectives(result):
    counted = {row.name: row.collectives for row in result.rows}
    assert counted["stage 2 all-gather"] == {"all_reduce": 1, "send": 1, "recv": 1}
    assert counted["stage 3 grad buffer"] == {"send": 2, "recv": 2}
    n_units = MODELS["nano"].n_layers + 1
    assert (counted["fsdp2"]["send"], counted["fsdp2 reshard"]["send"]) == (2 * n_units, 3 * n_units)
    assert counted["compute only"] == {}


def test_a_row_is_that_of_the_rank_that_holds_most_and_of_the_mean_that_is_sent():
    def of_rank(n):
        return Row("ddp", memory_bytes={"model": n, "peak": 10 - n}, peak_bytes={"build": 9 - n, "step": n},
                   held_bytes={"state": n, "buffers": 5 - 2 * n}, activation_bytes=n, wire_bytes=n,
                   bytes_per_param=n / 2, max_abs_diff=n)
    assert every_row.over_ranks([of_rank(1), of_rank(4)]) == Row(
        "ddp", memory_bytes={"model": 4, "peak": 9}, peak_bytes={"build": 8, "step": 4},
        held_bytes={"state": 1, "buffers": 3}, activation_bytes=4, wire_bytes=2, bytes_per_param=1.25, max_abs_diff=1)


def test_a_ratio_is_the_median_of_ratios_and_not_that_of_medians():
    row = Row("fsdp2", rounds_ms=[100, 400, 900])
    assert row.over(Row("ddp", rounds_ms=[100, 200, 100])) == 2 and row.median_ms == 400


def test_ddp_and_the_stages_are_shown_first_and_ctrl_c_keeps_what_was_measured(quick, tmp_path, monkeypatch, capsys):
    """After their first round: what is to come has its minutes, and no other row has run. Ctrl-C comes among those."""
    conditions, path, shown = results.load("bench.json").conditions, tmp_path / "bench.json", []

    def measured(workers, settings, row_ids, progress, after_round=None):
        rows = [Row(*row_id, rounds_ms=[1.0], vs_reference=1.0) for row_id in row_ids]
        for row in rows:
            progress(row.name)
        if any(row.name == "fsdp2" for row in rows):
            raise KeyboardInterrupt
        after_round(Result(conditions, rows))
        for row in rows:
            row.time(2.0, 0.0)
        return Result(conditions, rows)
    with pytest.raises(KeyboardInterrupt):
        quick("--rounds", "2", "--json", str(path), measured=measured, show=shown.append, is_quick=False)
    printed = capsys.readouterr().out
    first = {row_id.name for row_id in map(RowId, [*row_names.LADDER, "compute only", "ddp again"])}
    assert [{row.name for row in result.rows} for result in shown] == [first, first]
    assert re.search(r"round 1 of 2.*\n +[\d.]+ min  the other rounds\n +[\d.]+ min  \d+ more rows\n", printed)
    assert f"what was measured until Ctrl-C is above, and in {path}; not all of: " in printed
    assert [row.rounds_ms for row in results.from_json(Result, path.read_text()).rows] == [[1.0, 2.0]] * len(first)


@pytest.mark.parametrize("kind, error, code", [
    ("stage", None, 0), ("stage", "it failed", 1), ("peer", "it failed", 0), ("peer", "wrong: by 1", 1)])
def test_what_ends_with_1(quick, kind, error, code):
    rows = [Row("compute only", kind="floor"), Row("fsdp2", kind=kind, error=error, is_wrong=error == "wrong: by 1")]
    assert quick(*NANO, measured=lambda *_: Result(MADE, list(rows))) == code


def measured(*row_ids, movement=1.0, difference=0.0):
    """Three rounds of ranks that note what they time, and whose rows move and differ so -> result, what was timed."""
    timed = []

    def run(function, settings, *row_id):
        if function is examine.describe:
            return [SimpleNamespace()]
        if function is examine.examine:
            return [(Row(*row_id, kind="peer", max_abs_diff=difference, activation_bytes=0, wire_bytes=0,
                         bytes_per_param=0), movement)]
        timed.append(RowId(*row_id))
        return [(1, 0)]
    return every_row.measure_rows(SimpleNamespace(run=run, world_size=2), Settings(rounds=3), row_ids), timed


def test_no_row_always_comes_first():
    row_ids = RowId("ddp"), RowId("stage 1 naive broadcast"), RowId("ddp", 2)
    _, timed = measured(*row_ids)
    assert timed == [*row_ids, *row_ids[1:], row_ids[0], *row_ids[2:], *row_ids[:2]]


@pytest.mark.parametrize("found, reason", [({"movement": 0.0}, "wrong: its weights did not move"),
                                           ({"difference": 1.0}, "wrong: a parameter differs from ddp's by 1.0e+00")])
def test_what_is_wrong_is_not_timed(found, reason):
    result, timed = measured(RowId("ddp"), RowId("fsdp2"), **found)
    assert timed == [] and all(row.error.startswith(reason) for row in result.rows)


@on_ranks(2)
def test_a_time_is_that_of_the_slowest_rank_and_the_drain_is_no_step_s(rank):
    """By a clock that the steps of rank 1 move on, all but the first, as where the next forward waits; and the end."""
    now = [0.0]

    def takes(seconds):
        now[0] += seconds * rank.rank
    with mock.patch.object(examine.time, "perf_counter", lambda: now[0]):
        found = examine.time_warm_steps(rank, lambda number: takes(0.05 * (number > 0)), range(5), lambda: takes(0.2))
    assert found == pytest.approx([50, 200])


@on_ranks(2, name=["stage 2 all-gather", "stage 3 grad buffer", "stage 4 overlap"])
def test_whoever_does_not_broadcast_the_weights_is_wrong(rank, name):
    with mock.patch.object(dist, "broadcast"):
        assert examine.examine(rank, SETTINGS, name)[0].max_abs_diff > 0.01


def by_gloo(rank, *row):
    return examine.examine.__wrapped__(rank, *row)  # collectives are what they are called


@pytest.mark.parametrize("world_size", [4])
def test_what_is_gathered_is_what_was_shared_out(run, world_size, result):
    """On 4 ranks stage 2 gathers 3 % of padding."""
    rows = {"stage 2": "stage 2 all-gather", "stage 3": "stage 3 grad buffer", "stage 4": "stage 4 overlap"}
    gathered, on_1024 = (result.sheets["gathered"].numbers(d) for d in (f"{world_size}", "1024"))
    for stage, name in rows.items():
        for row, _ in run(by_gloo, SETTINGS, name):
            n_bytes = sum(row.message_bytes.get(kind, 0) for kind in PARAMETERS)
            assert n_bytes / 4 / result.conditions.parameters == pytest.approx(gathered[stage], rel=1e-8)
        assert on_1024[stage] > 1.3  # a shard is a multiple of 64 bytes, in stage 2 as long as a parameter
    assert gathered["stage 2"] > 1.03
