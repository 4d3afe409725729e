"""make bench WHAT=network: two hosts that exist only while the program runs, and the tables of what a link allows."""

import argparse
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.measuring import links, two_hosts
from harness.measuring.every_row import Row, Rows
from harness.measuring.examine import Conditions, Examined, Settings
from harness.measuring.links import Link
from harness.measuring.two_hosts import Hosts
from harness.publishing import pictures
from harness.publishing.tables import Made, from_json, texts_of
from harness.ranks.workers import Workers
from harness.training import rows as catalogue
from harness.training.rows import RowId
from tests.ranks import ROOT, hears_ctrl_c

pytestmark = pytest.mark.waits

NANO = ["--model", "nano", "--sequence-length", "16", "--batch-size", "2"]


def can_make_hosts():
    """Return whether this machine allows network namespaces: in most containers root alone isn't enough."""
    try:
        with Hosts("1gbit"):
            return True
    except OSError:
        return False


needs_hosts = pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")


def start(*args, **kwargs):
    """Start the program with priority over other tests, because each host has only one core."""
    command = ["nice", "-n", "-10", sys.executable, "-m", "harness.measuring.two_hosts", *args]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


def hosts_of(process):
    """Return the namespaces that a process has made."""
    folder = Path("/run/netns")
    names = os.listdir(folder) if folder.exists() else []
    return [name for name in names if f"-{process.pid}-" in name]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Run the program at a rate that no other test has."""
    path = tmp_path_factory.mktemp("results") / "network.json"
    with start("--rate", "80mbit", *NANO, "--rounds", "1", "--steps", "2", "--json", str(path)) as process:
        try:
            stdout, stderr = process.communicate(timeout=900)
        finally:
            process.kill()
    assert process.returncode == 0, stdout + stderr
    assert not hosts_of(process)
    assert "A link of 80 Mbit/s" in stdout
    return from_json(path.read_text())


@needs_hosts
def test_every_row_is_right_and_the_steps_of_the_ladder_are_drawn(report):
    sheet = report.sheets["rows"]
    names = [row_id.name for row_id in two_hosts.ROWS]
    failed = [note for note in sheet.notes if note.partition(":")[0] in names]
    assert len(sheet.rows) == len(names) and not failed
    assert all(difference in (0, None) for difference in sheet.numbers("difference").values())
    steps, title = pictures.read_steps(report.drawn)
    assert [name for name, _ in steps] == catalogue.LADDER and "80 Mbit/s" in title
    for _, step in steps:
        assert [name for name, _, _ in step.phases] == ["forward", "backward", "step"]
        assert 0 <= step.exposed_seconds <= step.seconds
    assert {"link", "curve", "ladder"} <= set(report.sheets)


def affinity(rank):
    return os.sched_getaffinity(0)


@needs_hosts
def test_hosts_are_as_the_conditions_say(report):
    """Ask Linux: the link has the rate, TCP is cubic whatever this machine has set, and the hosts share no core."""
    with Hosts("12mbit") as made, Workers(2, enter=made.enter) as workers:
        cores, other_cores = workers.run(affinity)
        for host, (name, link) in enumerate(zip(made.names, made.links)):
            shown = two_hosts.run("tc", "-n", name, "qdisc", "show", "dev", link)
            assert "qdisc tbf" in shown and "rate 12Mbit" in shown
            assert "congctl cubic" in two_hosts.run("ip", "-n", name, "route", "get", two_hosts.ADDRESSES[1 - host])
    assert len(os.sched_getaffinity(0)) == 1 or not cores & other_cores
    assert f"on 2 hosts of {len(cores)} core(s), TCP cubic" in report.conditions


@needs_hosts
@pytest.mark.parametrize("number, n_signals", [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_an_interrupted_run_leaves_nothing_behind(number, n_signals):
    """Signals reach the whole process group. The second signal comes while the program cleans up."""
    process = start("--rate", "10mbit", *NANO, "--rounds", "50", preexec_fn=hears_ctrl_c, start_new_session=True)
    try:
        while process.stderr.read(1) not in ("r", ""):  # the r of a row's name: the ranks are at work
            pass
        assert len(hosts_of(process)) == 2
        os.killpg(process.pid, number)
        for _ in range(n_signals - 1):
            threading.Event().wait(0.02)
            os.killpg(process.pid, number)
        process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode != 0 and not hosts_of(process)


def test_what_it_needs_is_said_in_one_line(monkeypatch):
    """There is no iproute2 on the PATH."""
    monkeypatch.setattr(sys, "argv", ["network"])
    monkeypatch.setattr(two_hosts, "exit_on_signals", lambda: None)  # the signals of this process stay as they are
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="^network: .*'ip': two hosts need Linux, iproute2, and root: sudo make bench"):
        two_hosts.main()


SETTINGS = Settings("nano", rounds=2, steps=3)
CONDITIONS = Conditions(Made("machine", "2", "abc", "today"), "gloo, 2 rank(s)", "cpu", 1000)
LINK = Link("300mbit", 3e8)


def rows_of(*timed):
    """Make Rows of (RowId, ms by round). A row without ms has failed. The bytes of a row take 100 ms on LINK."""
    examined = Examined(0.0, {"send": 3}, 0, 3_750_000, {"peak": 5e6}, 12.0, 12.0)
    rows = [Row(row_id, rounds_ms=list(ms), drain_ms=list(ms), examined=examined) if ms
            else Row(row_id, error="rank 1: it broke") for row_id, ms in timed]
    return Rows(SETTINGS, CONDITIONS, 2, rows)


MEASURED = rows_of((RowId("compute only"), (80, 80)), (RowId("ddp"), (160, 160)), (RowId("ddp", 2), (130, 130)),
                   (RowId("stage 2 all-gather"), (200, 200)), (RowId("stage 4 overlap"), (120, 130)),
                   (RowId("fsdp2"), ()))


def test_a_link_has_a_floor_and_a_row_that_failed_has_no_figures():
    sheet = links.link_sheet(MEASURED, LINK)
    assert sheet.numbers("over_floor")["stage 4 overlap"] == 1.25  # the bytes take longer than computing
    assert sheet.numbers("stage4_over")["ddp"] == pytest.approx(0.78125)
    assert sheet.rows[-1] == ["fsdp2", [], None, None, None] and sheet.notes[-1] == "fsdp2: rank 1: it broke"


def test_stage_4_is_compared_with_the_ddp_that_is_best():
    """DDP is tuned where a size beat the default, has the default where that was faster, and is unknown unswept."""
    default_is_best = dataclasses.replace(MEASURED, rows=[MEASURED.rows[0], MEASURED.rows[1], *MEASURED.rows[3:]])
    slower = Row(RowId("ddp", 2), rounds_ms=[170, 170])
    size_is_slower = dataclasses.replace(default_is_best, rows=[*default_is_best.rows, slower])
    for measured, sweep, size, over in ((MEASURED, None, "2 MiB", "0.96"),
                                        (default_is_best, MEASURED, "default", "0.78"),
                                        (size_is_slower, MEASURED, "default", "0.78"),
                                        (default_is_best, None, "–", "–")):
        tuned = links.tuned_ddp(measured, sweep)
        lines = dict(texts_of(links.curve_sheet(measured, LINK, tuned)))
        assert (lines["DDP's best buckets"], lines["stage 4 over tuned DDP"]) == (size, over)
        assert lines["FSDP2"] == "–" and lines["floor"] == "1.25"
    ladder = links.ladder_sheet(MEASURED, links.tuned_ddp(MEASURED, None))
    assert ladder.numbers("time")["4 overlap"] == pytest.approx(0.9615, abs=1e-3)


def test_a_tuned_size_is_measured_behind_the_default():
    swept = rows_of((RowId("ddp"), (3, 3)), (RowId("ddp", 2), (1, 1)), (RowId("ddp", 4), (2, 2)))
    tuned = two_hosts.tuned_row_ids(swept)
    assert tuned == [RowId("ddp", 2), RowId("ddp + torch ZeRO", 2)]
    listed = two_hosts.rows_to_measure(argparse.Namespace(rows="ddp"), tuned)
    assert listed[listed.index(RowId("ddp")) + 1] == tuned[0]
    assert two_hosts.tuned_row_ids(rows_of((RowId("ddp"), (1, 1)), (RowId("ddp", 2), (3, 3)))) == []


def test_a_sweep_is_drawn_by_size():
    sweep = rows_of((RowId("ddp", 2), (7,)), (RowId("ddp"), (9,)), (RowId("ddp", 1), (8,)))
    assert links.swept_times(sweep, "ddp") == [(2, 8), (3, 7), (6, 9)]  # the default is 25 MiB
    assert "sweep" not in links.to_draw(MEASURED, LINK, sweep, None)  # stage 4 isn't in the sweep


@pytest.mark.parametrize("left_out", ["compute only", "stage 2 all-gather", "stage 4 overlap"])
def test_what_was_measured_is_reported_without_a_row_that_a_curve_needs(left_out):
    measured = dataclasses.replace(MEASURED, rows=[row for row in MEASURED.rows if row.row_id.base != left_out])
    broken = rows_of((RowId("ddp", 2), (7,)), (RowId("stage 4 overlap", 2), ()))
    report = two_hosts.report_of(measured, LINK, broken, n_cores=1)
    assert "curve" not in report.sheets and "curve" not in report.drawn
    assert report.sheets["buckets"].notes[-1].endswith("it broke")
    assert "curve" in two_hosts.report_of(MEASURED, LINK, None, n_cores=1).drawn
