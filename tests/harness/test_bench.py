"""bench.py: the tables that it promises, and no time for what is wrong."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

import bench
from harness.measuring import every_row, examine, overhead
from harness.measuring.every_row import Row, Rows
from harness.measuring.examine import Conditions, Examined, Settings
from harness.planning import alone
from harness.publishing import tables
from harness.publishing.tables import Made, from_json, sheet_text
from harness.training import rows
from harness.training.rows import RowId
from tests.common import on_ranks
from tests.ranks import git

pytestmark = pytest.mark.waits

SETTINGS = Settings("nano", 2, 16, 1, 1)
CONDITIONS = Conditions(Made("machine", "2", "abc", "today"), "gloo, 2 rank(s)", "cpu", 1000)
MEMORY = dict.fromkeys(("model", "optimizer", "backward", "step", "peak"), 0)
EXAMINED = Examined(0.0, {}, 0, 0, MEMORY, 1.0, 1.0)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Run bench.py in this process, whose ranks start at once. Its small tables are made of few tensors and ranks."""
    path = tmp_path_factory.mktemp("results") / "bench.json"
    hook = sys.excepthook
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["bench.py", "--model", "nano", "--sequence-length", "16", "--batch-size", "2",
                                    "--rounds", "2", "--steps", "1", "--json", str(path)])
        patch.setattr(overhead, "N_TENSORS", 40)
        patch.setattr(overhead, "HOST_STEPS", 1)
        patch.setattr(alone, "STATE_RANKS", (1, 4, 1024))
        bench.main()
    assert end.value.code == 0
    assert sys.excepthook is hook  # although torch's groups of played ranks have wrapped the hook
    return from_json(path.read_text())


def test_every_row_is_right_and_timed_in_each_round(report):
    """What a row sends and holds is a promise of test_rows.py."""
    assert set(report.sheets) == {"rows", "phases", "model_state", "ladder", "host"}
    assert "2 round(s) of 1 steps" in report.conditions
    assert report.made.commit.rstrip("+") == tables.commit().rstrip("+")
    sheet = report.sheets["rows"]
    assert sheet.row_keys == [row.name for row in rows.ROWS if row.dtype == "float32"]
    assert all(len(rounds_ms) == 2 for rounds_ms in sheet.numbers("ms").values())
    assert all(sheet.numbers("over_ddp").values())
    differences = sheet.numbers("difference")
    assert differences.pop("compute only") is None and set(differences.values()) == {0}


def test_a_commit_is_that_of_the_code(tmp_path):
    """Changed code adds a + to the commit, and a changed result doesn't. Without a commit, the answer is unknown."""
    for name in ("code.py", "table.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "init", "--quiet")
    assert tables.commit(tmp_path) == "unknown"  # nothing is committed yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    for name, expected in (("table.json", head), ("code.py", f"{head}+")):
        (tmp_path / name).write_text("2")
        assert tables.commit(tmp_path) == expected


def test_a_row_is_that_of_the_rank_that_holds_most_and_of_the_mean_that_is_sent():
    def of_rank(n):
        return EXAMINED._replace(memory_bytes={"model": n, "peak": 10 - n}, wire_bytes=n, bytes_per_param=n / 2)
    assert every_row.over_ranks([of_rank(1), of_rank(4)]) == EXAMINED._replace(
        memory_bytes={"model": 4, "peak": 9}, wire_bytes=2, bytes_per_param=1.25)


def measured(*timed):
    """Make Rows of (name, ms by round), examined and right."""
    return Rows(SETTINGS, CONDITIONS, 2,
                [Row(RowId(name), rounds_ms=list(ms), examined=EXAMINED) for name, ms in timed])


def test_a_ratio_is_the_median_of_ratios_and_what_lies_within_the_noise_is_marked():
    """In the second round ddp again is 5 % from ddp. So a row 5 % from ddp gets a mark, and a row 6 % away doesn't."""
    of_rows = measured(("ddp", (100, 200)), ("ddp again", (104, 190)), ("stage 1 naive broadcast", (105, 210)),
                       ("fsdp2", (106, 212)))
    text = sheet_text(every_row.rows_sheet(of_rows))
    assert "1.05~" in text and "1.06 " in text and "took 0.95 to 1.04 times as long" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= tables.BLOCK_WIDTH and "…" not in text
    first, second = measured(("ddp", (100, 200, 100)), ("fsdp2", (100, 400, 900))).rows
    assert second.over(first) == 2 and second.median_ms == 400


def test_what_failed_has_no_figures_and_says_why():
    of_rows = measured(("ddp", (1,)))
    of_rows.rows.append(Row(RowId("fsdp2"), error="rank 1: it broke"))
    sheet = every_row.rows_sheet(of_rows)
    assert sheet.rows[-1][1:] == [[], [], *[None] * 6] and "fsdp2: rank 1: it broke" in sheet.notes
    assert (of_rows.exit_code(), measured(("ddp", (1,))).exit_code()) == (1, 0)


def test_a_variant_is_timed_over_its_base():
    of_rows = measured(("stage 4 overlap", (10.0, 20.0)), ("variants wire16", (5.0, 10.0)), ("variants blocks", ()))
    sheet = every_row.times_sheet(of_rows)
    assert [*sheet.numbers("time").values()] == ["15 ms", "× 0.50", None]


def run_rows(*row_ids, difference=0.0):
    """Measure three rounds on ranks that only note which row is timed. Returns Rows, and the rows in that order."""
    timed = []

    def run(function, settings, row_id=None):
        if function is examine.describe:
            return [CONDITIONS]
        if function is examine.examine:
            return [EXAMINED._replace(difference=difference)]
        timed.append(row_id)
        return [(1, 0)]
    return every_row.measure_rows(SimpleNamespace(run=run, world_size=2), Settings(rounds=3), row_ids), timed


def test_no_row_always_comes_first():
    row_ids = RowId("ddp"), RowId("stage 1 naive broadcast"), RowId("ddp", 2)
    _, timed = run_rows(*row_ids)
    assert timed == [*row_ids, *row_ids[1:], row_ids[0], *row_ids[2:], *row_ids[:2]]


def test_what_is_wrong_is_not_timed():
    of_rows, timed = run_rows(RowId("ddp"), RowId("fsdp2"), difference=1.0)
    assert timed == []
    assert all(row.error.startswith("wrong: a parameter differs from ddp's by 1.0e+00") for row in of_rows.rows)


@on_ranks(2)
def test_a_time_is_that_of_the_slowest_rank_and_the_drain_is_no_step_s(rank):
    """On rank 1 a clock moves on: by 50 ms in each step but the first, and by 200 ms while the last step drains."""
    now = [0.0]

    def take(seconds):
        now[0] += seconds * rank.number

    def step(number):
        take(0.05 if number > 0 else 0)

    with mock.patch.object(examine.time, "perf_counter", lambda: now[0]):
        times = examine.time_warm_steps(rank, step, range(5), lambda: take(0.2))
    assert times == pytest.approx([50, 200])


@on_ranks(2, name=["stage 2 all-gather", "stage 3 grad buffer", "stage 4 overlap"])
def test_whoever_does_not_broadcast_the_weights_is_wrong(rank, name):
    with mock.patch.object(dist, "broadcast"):
        assert examine.examine(rank, SETTINGS, RowId(name)).difference > 0.01
