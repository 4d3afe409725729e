"""bench.py: the json that it promises, counts that equal the formulas, and no time for what is wrong."""

import contextlib
import functools
import os
import resource
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bench
from harness import alone, command_line, every_row, examine, host_time, results, tables
from harness.examine import Settings
from harness.gpt import GPT, MODELS
from harness.ledger import Ledger
from harness.pictures import PARAMETERS
from harness.results import Result, Row
from harness.rows import Choice
from harness.tables import conditions_line
from tests.common import STAGES, on_ranks, one_rank_of, optimizer_of
from tests.ranks import git

pytestmark = pytest.mark.waits

NOTHING = Result(None, [])
SETTINGS = Settings("nano", 2, 16, 1, 1)
NANO = ["--model", "nano", "--sequence-length", "16", "--batch-size", "2", "--rounds", "1", "--steps", "1"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of bench.py in this process, whose ranks then start at once. Host time of few tensors, state on few ranks."""
    path = tmp_path_factory.mktemp("results") / "bench.json"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["bench.py", *NANO, "--json", str(path)])
        short = functools.partial(host_time.measure_ranks, n_tensors=40, n_steps=1)
        patch.setattr(host_time, "measure_ranks", short)
        patch.setattr(alone, "STATE_RANKS", (1, 4, 1024))
        bench.main()
    assert not end.value.code
    return results.from_json(Result, path.read_text())


def test_every_row_has_every_figure(result):
    for row in result.rows:
        assert row.rounds_ms and row.vs_reference and row.error is None, row.name
        assert len(row.drain_ms) == len(row.rounds_ms)
        assert {"model", "optimizer", "backward", "step", "peak"} <= set(row.memory_bytes)
        assert list(row.peak_bytes) == ["build", "forward", "backward", "step"]
        assert list(row.held_bytes) == ["parameters", "gradients", "state", "buffers"]
        assert [step.seconds for step in row.timeline] == [None] * 2  # of the recorded step the exposed time is kept
    assert Counter(row.kind for row in result.rows) == {"floor": 2, "reference": 1, "stage": 9, "peer": 5, "noise": 1}
    assert result.model_state and result.gathered and result.host and result.caps
    assert (result.conditions.ranks, result.conditions.model, result.conditions.dtype) == (2, "nano", "float32")


@pytest.fixture
def quick(monkeypatch):
    """-> function: bench.main() with such arguments, `measured` in place of measuring, `shown` of showing -> its exit
    code."""
    def quick(*arguments, measured=lambda *_: NOTHING, shown=lambda _: None, device="cpu"):
        ranks = SimpleNamespace(run=lambda function, *_: [function(SimpleNamespace(device=torch.device(device)))])
        monkeypatch.setattr(bench, "Workers", lambda *_: contextlib.nullcontext(ranks))
        monkeypatch.setattr(every_row, "measure_rows", measured)
        monkeypatch.setattr(tables, "show", shown)
        monkeypatch.setattr(sys, "argv", ["bench.py", "--quick", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            bench.main()
        return end.value.code
    return quick


def test_the_model_is_one_that_shows_something_on_the_device(quick, capsys):
    """As the ranks find it: a machine with a GPU may run them on its processor still. Medium takes sequences of 512."""
    def asked(device, *given):
        models = []
        quick("--sequence-length", 64, *given, device=device,
              measured=lambda _, settings, *__: models.append(settings.model) or NOTHING)
        return models
    assert (asked("cuda"), asked("cpu")) == (["medium"], ["tiny"])
    assert asked("cuda", "--model", "small") == ["small"] and asked("cpu", "--model", "nano") == ["nano"]
    assert quick("--sequence-length", 512) == 2
    assert "--sequence-length 512: tiny takes at most 256" in capsys.readouterr().err


def test_a_result_says_of_which_code_it_is(result, tmp_path):
    """A file of the code that has changed since is a +, one of the results is none; without git there is no answer."""
    assert result.conditions.commit == examine.commit()
    for name in ("code.py", "table.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "--quiet")
    assert examine.commit(tmp_path) == "unknown"  # nothing is committed yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    (tmp_path / "table.json").write_text("2")
    assert examine.commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert examine.commit(tmp_path) == f"{head}+"
    assert examine.commit(tmp_path / "nowhere") == "unknown"
    assert f"commit {examine.commit()}" in conditions_line(result.conditions)


def test_what_is_compared_with_ddp(result):
    """A stage is equal to it, who sends nothing has nothing exposed, and the noise is DDP beside itself."""
    assert [row.max_abs_diff for row in result.rows if row.kind == "stage"] == [0.0] * 9
    assert [step.exposed_seconds for step in result.find("compute only").timeline] == [0, 0]
    rounds = {row.kind: row.rounds_ms for row in result.rows}
    noise = [one / other for one, other in zip(rounds["noise"], rounds["reference"])]
    assert result.conditions.noise == pytest.approx(noise, rel=1e-8)


def test_what_is_counted_is_what_the_formula_says(result):
    """Up to what the formulas leave out: scalars (step counts, flags of used parameters) and padding."""
    for row in result.rows:
        theory, slack = row.wire_bytes_theory, 8 * 32  # 30 parameters
        assert ("reduce_scatter" in row.collectives) == (row.name in ("stage 3, gloo's own", "fsdp2, gloo's own"))
        if "reduce_scatter" in row.collectives:  # an all-reduce underneath: one trip more
            theory += row.wire_bytes_theory / 2
        assert row.wire_bytes == pytest.approx(theory, rel=0.01, abs=slack), row.name
        assert row.bytes_per_param == pytest.approx(row.bytes_per_param_theory, rel=0.005), row.name
        assert row.message_bytes.keys() == row.collectives.keys()


HELD = {  # times the bytes of all parameters, in fp32, on 2 ranks: parameters, gradients, state
    "compute only": (1, 1, 2), "compute + bytes": (1, 1, 2), "ddp": (1, 1, 2), "rung 0 replicated": (1, 1, 2),
    "ddp + stage 1": (1, 1, 1), "ddp + stage 2": (1, 1, 1), "ddp + torch ZeRO": (1, 1, 1),
    "stage 1 naive broadcast": (1, 1, 1), "stage 2 all-gather": (1, 1, 1), "stage 3 grad buffer": (1, 1, 1),
    "stage 4 overlap": (1, 0.5, 1), "owner reduce": (1, 0.5, 1), "fsdp2": (0.5, 0.5, 1), "fsdp2 reshard": (0.5, 0.5, 1)}


def test_what_is_held_is_of_the_kinds_that_the_formulas_have(result):
    """The kinds add up to what was counted before they were told apart; activations are those of the same model."""
    numel, rows = result.conditions.parameters, {row.name: row for row in result.rows}
    for name, shares in HELD.items():
        *held, buffers = rows[name].held_bytes.values()
        assert [n_bytes / (4 * numel) for n_bytes in held] == pytest.approx(shares, rel=0.03), name  # padding, shares
        assert sum(held) + buffers == pytest.approx(rows[name].bytes_per_param * numel, rel=0.01), name
        assert rows[name].activation_bytes == pytest.approx(rows["compute only"].activation_bytes, rel=0.1), name
    assert {name for name in HELD if rows[name].held_bytes["buffers"] > 0.05 * 4 * numel} == {
        "compute + bytes", "stage 4 overlap"}


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
    assert counted["stage 1 naive broadcast"] == {"all_reduce": 1, "broadcast": 2}
    assert counted["stage 2 all-gather"] == {"all_reduce": 1, "send": 1, "recv": 1}
    assert counted["stage 3 grad buffer"] == {"send": 2, "recv": 2}
    assert counted["stage 2, gloo's own"] == {"all_reduce": 1, "all_gather": 1}
    assert counted["stage 3, gloo's own"] == {"reduce_scatter": 1, "all_gather": 1}
    n_units = counted["fsdp2, gloo's own"]["reduce_scatter"]
    assert (counted["fsdp2"]["send"], counted["fsdp2 reshard"]["send"]) == (2 * n_units, 3 * n_units)
    assert "reduce_scatter" not in counted["fsdp2"] | counted["fsdp2 reshard"]
    assert counted["compute only"] == {} and set(counted["compute + bytes"]) == {"send", "recv"}


# ------------------------------------------------------------------------------ what the figures are, without any ranks


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


@pytest.mark.parametrize("kind, error, code", [
    ("stage", None, 0), ("stage", "it failed", 1), ("peer", "it failed", 0), ("peer", "wrong: by 1", 1)])
def test_what_ends_with_1(quick, kind, error, code):
    rows = [Row("compute only", kind="floor"), Row("fsdp2", kind=kind, error=error, is_wrong=error == "wrong: by 1")]
    assert quick(*NANO, measured=lambda *_: Result(None, rows)) == code


class Recorded:
    """In place of ranks: notes what is timed, in order; `movement` and `difference` are those of each row."""
    world_size = 2

    def __init__(self, movement=1.0, difference=0.0):
        self.movement, self.difference, self.timed = movement, difference, []

    def run(self, function, settings, *choice):
        if function is examine.describe:
            return [SimpleNamespace()] * 2
        if function is examine.examine:
            row = Row(*choice, kind="peer", max_abs_diff=self.difference, activation_bytes=0, wire_bytes=0,
                      bytes_per_param=0)
            return [(row, self.movement)] * 2
        self.timed.append(Choice(*choice))
        return [(len(self.timed), 0)] * 2


def test_no_row_always_comes_first():
    choices, ranks = [Choice("ddp"), Choice("stage 1 naive broadcast"), Choice("ddp", 2)], Recorded()
    every_row.measure_rows(ranks, Settings("nano", 1, 1, 3, 1), choices)
    assert ranks.timed == [*choices, *choices[1:], choices[0], *choices[2:], *choices[:2]]


@pytest.mark.parametrize("found, reason", [({"movement": 0.0}, "wrong: its weights did not move"),
                                           ({"difference": 1.0}, "wrong: a parameter differs from ddp's by 1.0e+00")])
def test_what_is_wrong_is_not_timed(found, reason):
    ranks = Recorded(**found)
    result = every_row.measure_rows(ranks, Settings("nano", 1, 1, 3, 1), [Choice("ddp"), Choice("fsdp2")])
    assert ranks.timed == [] and all(row.error.startswith(reason) for row in result.rows)


@on_ranks(2)
def test_a_time_is_that_of_the_slowest_rank_and_the_drain_is_no_step_s(rank):
    """By a clock that the steps of rank 1 move on, all but the first, as where the next forward waits; and the end."""
    now = [0.0]

    def takes(seconds):
        now[0] += seconds * rank.rank
    with mock.patch.object(examine.time, "perf_counter", lambda: now[0]):
        found = examine.steady(rank, lambda number: takes(0.05 * (number > 0)), range(5), lambda: takes(0.2))
    assert found == pytest.approx([50, 200])


@on_ranks(2, name=["stage 2 all-gather", "stage 3 grad buffer", "stage 4 overlap"])
def test_whoever_does_not_broadcast_the_weights_is_wrong(rank, name):
    with mock.patch.object(dist, "broadcast"):
        assert examine.examine(rank, SETTINGS, name)[0].max_abs_diff > 0.01


def gathered_elements(rank, stage):
    model = GPT(MODELS["nano"]).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters())
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=rank.device)
    model(tokens, tokens).backward()
    with Ledger() as ledger:
        optimizer.step()
    gathered = sum(entry.size // entry.dtype.itemsize for entry in ledger.entries if entry.kind in PARAMETERS)
    return gathered / sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("world_size", [4])
def test_what_is_gathered_is_what_was_shared_out(run, world_size, result):
    """On 4 ranks stage 2 gathers 3 % of padding."""
    for row, stage in zip(result.gathered, STAGES[1:], strict=True):
        assert run(gathered_elements, stage) == pytest.approx([row.over_numel[world_size]] * world_size, rel=1e-8)
        assert row.over_numel[world_size] > 1.03 or row.name != "stage 2"
        assert row.over_numel[1024] > 1.3  # a shard is a multiple of 64 bytes, in stage 2 as long as a parameter


def test_the_model_state_is_that_of_the_formula(result):
    """Up to padding, which is much in a tiny model: at one rank there is little of it."""
    for row in result.model_state:
        assert row.bytes_per_param[1] == pytest.approx(row.bytes_per_param_theory[1], rel=0.02), row.name


def test_what_was_measured_is_written_before_it_is_shown(tmp_path, quick, capsys):
    """As in `make bench | head -1`: nobody may read what is printed any more. And [a] in a path is no markup."""
    def broken_pipe(_):
        raise BrokenPipeError
    path = tmp_path / "[a]" / "bench.json"
    with pytest.raises(BrokenPipeError):
        quick(*NANO, "--json", path, shown=broken_pipe)
    assert path.read_text() == results.to_json(NOTHING)
    quick(*NANO, "--json", path)
    assert capsys.readouterr().out == f"written to {path}\n"


def test_on_a_full_disk_the_result_before_stays_and_the_new_one_is_shown(tmp_path, quick, capsys):
    """Here a file grows to 100 bytes, and no further."""
    path, shown, before = tmp_path / "bench.json", [], resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        code = quick(*NANO, "--json", path, measured=lambda *_: Result(None, [Row("x" * 1000)]), shown=shown.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err.strip()  # the progress bar has left an empty line
    assert code == 2 and len(shown) == 1 and error.count("\n") == 0
    assert error.startswith(f"bench.py: error: --json {path}: not written: ")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_what_is_written_is_behind_a_link_and_no_device_is_replaced(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    target.write_text("before")
    link.symlink_to(target)
    command_line.write("--json", link, "é", pytest.fail)
    assert link.is_symlink() and target.read_text(encoding="utf-8") == "é"
    read, write = os.pipe()
    with open(read, encoding="utf-8") as opened:
        command_line.write("--json", Path(f"/dev/fd/{write}"), "é", pytest.fail)
        os.close(write)
        assert opened.read() == "é"
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_played_rank_leaves_the_excepthook_as_it_was():
    before = sys.excepthook
    with one_rank_of(4):
        assert dist.get_world_size() == 4
    assert sys.excepthook is before
