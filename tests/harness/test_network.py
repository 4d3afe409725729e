"""WHAT=network: two hosts that exist while it runs and not after it, however it ends; and no host where it can't."""

import argparse
import dataclasses
import os
import shutil
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

NANO = ["--model", "nano", "--sequence-length", "16", "--batch-size", "2", "--rounds", "1", "--steps", "2"]


def can_make_hosts():
    """Whether this machine lets us: root alone doesn't, in most containers."""
    try:
        with Hosts("1gbit"):
            return two_hosts.missing_requirement() is None
    except OSError:
        return False


needs_hosts = pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and iproute2")


def start(*args, **kwargs):
    """Ahead of the ranks of other tests: each host has one core, on which every message would wait for theirs."""
    command = ["nice", "-n", "-10", sys.executable, "-m", "harness.measuring.two_hosts", *args]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)


def hosts(process=""):
    """The namespaces that there are: of that number of a process, or of whoever."""
    there = os.listdir("/run/netns") if Path("/run/netns").exists() else []
    return sorted(name for name in there if f"-{process}" in name)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Run the program at a rate of its own."""
    path = tmp_path_factory.mktemp("results") / "network.json"
    with start("--rate", "80mbit", *NANO, "--json", str(path)) as process:
        try:
            stdout, stderr = process.communicate(timeout=900)
        finally:
            process.kill()
    assert process.returncode == 0, stdout + stderr
    assert not hosts(process.pid)
    assert "A link of 80 Mbit/s" in stdout
    return from_json(path.read_text())


@needs_hosts
def test_what_a_killed_run_has_left_is_gone_when_the_next_begins_and_its_own_when_it_ends():
    ended, before = subprocess.Popen(["true"]), list(map(signal.getsignal, signal.valid_signals()))
    ended.wait()
    name = f"dopt-{ended.pid}-a"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with two_hosts.Hosts("1gbit") as there:
        assert name not in hosts() and set(there.names) <= set(hosts())
    assert not set(there.names) & set(hosts())
    assert list(map(signal.getsignal, signal.valid_signals())) == before  # some of which it ignores meanwhile


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
    """As Linux says: a line of that rate, cubic whatever this machine has set, and no core that both have."""
    with Hosts("12mbit") as made, Workers(2, enter=made.enter) as workers:
        cores = list(map(set, workers.run(affinity)))
        for host, (name, link) in enumerate(zip(made.names, made.links)):
            shown = two_hosts.run("tc", "-n", name, "qdisc", "show", "dev", link)
            assert "qdisc tbf" in shown and "rate 12Mbit" in shown
            assert "congctl cubic" in two_hosts.run("ip", "-n", name, "route", "get", two_hosts.ADDRESSES[1 - host])
    assert cores[0] and cores[1] and (len(os.sched_getaffinity(0)) == 1 or not cores[0] & cores[1])
    assert f"on 2 hosts of {len(cores[0])} core(s), TCP cubic" in report.conditions


@needs_hosts
@pytest.mark.parametrize("number, n_signals", [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_an_interrupted_run_leaves_nothing_behind(number, n_signals):
    """Nor where somebody has no patience: a second signal comes while it cleans up, to all of its process group."""
    process = start("--rate", "10mbit", *NANO[:6], "--rounds", "50", preexec_fn=hears_ctrl_c, start_new_session=True)
    try:
        for line in iter(lambda: process.stderr.read(1), ""):
            if line == "r":  # of "round" or "stage 1 …": the ranks are at work
                break
        assert len(hosts(process.pid)) == 2
        os.killpg(process.pid, number)
        for _ in range(n_signals - 1):
            threading.Event().wait(0.02)
            os.killpg(process.pid, number)
        process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode != 0 and not hosts(process.pid)


def test_what_it_needs_is_said_in_one_line(tmp_path, monkeypatch):
    """No iproute2 on the PATH; and iproute2, but no root."""
    monkeypatch.setattr(sys, "argv", ["network", "--json", str(tmp_path / "network.json")])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setenv("PATH", str(tmp_path))
        two_hosts.main()
    assert end.value.code == "network: ip and tc not found: install iproute2 (Linux only)"
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in two_hosts.missing_requirement()


def test_the_curve_measures_the_rates_that_have_no_file(tmp_path, monkeypatch, capsys):
    measured = []

    def measure_rate(args):
        measured.append((args.rate, args.rows, args.sweep, args.rounds, args.steps))
        shutil.copy(ROOT / "results" / "network_2.5gbit.json", args.json)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured").mkdir()
    shutil.copy(ROOT / "results" / "network_1gbit.json", "measured")
    monkeypatch.setattr(two_hosts, "measure_rate", measure_rate)
    monkeypatch.setattr(sys, "argv", ["network", "--curve", "1gbit,2.5gbit", "--rounds", "7"])
    with pytest.raises(SystemExit) as end:
        two_hosts.main()
    assert end.value.code == 0 and measured == [("2.5gbit", "curve", True, 7, 4)]
    printed = capsys.readouterr().out
    assert "1gbit: in measured/network_1gbit.json already" in printed and "DDP, tuned buckets" in printed


SETTINGS = Settings("nano", rounds=2, steps=3)
CONDITIONS = Conditions(Made("machine", "2", "abc", "today"), "gloo, 2 rank(s)", "cpu", 1000)
LINK = Link("300mbit", 3e8)


def rows_of(*timed):
    """Make Rows of (RowId, ms by round); no time is a row that failed. The bytes of each take 100 ms on LINK."""
    examined = Examined(0.0, 1.0, {"send": 3}, 0, 3_750_000, {"peak": 5e6}, 12.0, 12.0)
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
    """Tuned where a size was better than the default, the default where it was best, and none without a sweep."""
    default_is_best = dataclasses.replace(MEASURED, rows=[MEASURED.rows[0], MEASURED.rows[1], *MEASURED.rows[3:]])
    for measured, sweep, size, over in ((MEASURED, MEASURED, "2 MiB", "0.96"), (MEASURED, None, "2 MiB", "0.96"),
                                        (default_is_best, MEASURED, "default", "0.78"),
                                        (default_is_best, None, "–", "–")):
        lines = dict(texts_of(links.curve_sheet(measured, LINK, sweep)))
        assert (lines["DDP's best buckets"], lines["stage 4 over tuned DDP"]) == (size, over)
    assert lines["FSDP2"] == "–" and lines["floor"] == "1.25"
    ladder = links.ladder_sheet(MEASURED, LINK, None)
    assert ladder.numbers("time")["4 overlap"] == pytest.approx(0.9615, abs=1e-3) and "2 MiB" in ladder.notes[0]


def test_the_rows_of_a_tuned_size_stand_behind_the_default():
    swept = rows_of((RowId("ddp"), (3, 3)), (RowId("ddp", 2), (1, 1)), (RowId("ddp", 4), (2, 2)))
    tuned = two_hosts.tuned_row_ids(swept)
    assert tuned == [RowId("ddp", 2), RowId("ddp + torch ZeRO", 2)]
    args = argparse.Namespace(rows="ddp", accumulation=False)
    listed = two_hosts.rows_to_measure(args, tuned)
    assert listed[listed.index(RowId("ddp")) + 1] == tuned[0]
    assert all(catalogue.find(*row_id).name == row_id.base for row_id in two_hosts.SWEPT + listed)
    assert two_hosts.tuned_row_ids(rows_of((RowId("ddp"), (1, 1)), (RowId("ddp", 2), (3, 3)))) == []


def test_accumulation_marks_noise_and_says_what_communication_takes():
    """One micro-batch, both ways the same: 4 % apart, so 1.03 is noise, and 1.05 is not. Computing takes 20 ms."""
    each = [96, 100, 101], [106, 105, 105], [103, 103, 103]
    found = [links.Accumulated(n, [100] * 3, times, [20], ddp, stage3)
             for n, times, ddp, stage3 in zip((1, 2, 4), each, ([80], [32], [25]), ([100], [50], [40]))]
    sheets = links.accumulation_sheets(found, RowId("ddp", 2), LINK)
    assert [row[-1] for row in texts_of(sheets["accumulation"])] == ["1.00~", "1.05", "1.03~"]
    assert "up to 4% apart" in sheets["accumulation"].footnotes[-1]
    assert [row[1:] for row in texts_of(sheets["shares"])] == [
        ["20", "75%", "80%", "80%"], ["20", "38%", "60%", "80%"], ["20", "20%", "50%", "80%"]]


def test_a_sweep_is_drawn_by_size():
    sweep = rows_of((RowId("ddp", 2), (7,)), (RowId("ddp"), (9,)), (RowId("ddp", 1), (8,)))
    assert links.swept_times(sweep, "ddp") == [(2, 8), (3, 7), (6, 9)]  # the default is 25 MB
    assert "sweep" not in links.to_draw(MEASURED, LINK, sweep)  # stage 4 isn't in it


def test_what_is_wrong_gets_no_time_in_the_table_of_accumulation():
    assert two_hosts.accumulation_sheets(None, MEASURED, [], LINK) == {}  # there is no row of stage 3
