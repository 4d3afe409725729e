"""WHAT=network: two hosts that exist while it runs and not after it, however it ends; and no host where it can't."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.measuring import every_row, examine, timeline, two_hosts
from harness.measuring.two_hosts import Hosts
from harness.publishing import results, row_names
from harness.publishing.results import AccumulatedRow, Result, Row, Sweep
from harness.publishing.row_names import RowId
from harness.ranks.workers import Workers
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
def result(tmp_path_factory):
    """Of a run that finds results of other rates, ours."""
    path = tmp_path_factory.mktemp("results") / "network.json"
    shutil.copy(ROOT / "results" / "network.json", path)
    with start("--rate", "80mbit", "--rows", "stage 4", *NANO, "--json", str(path)) as process:
        try:
            stdout, stderr = process.communicate(timeout=900)
        finally:
            process.kill()
    assert process.returncode == 0, stdout + stderr
    assert not hosts(process.pid)
    assert "A link of 80 Mbit/s" in stdout and "computes" in stdout
    return results.from_json(Result, path.read_text())


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
def test_network_json_is_like_bench_json_with_the_steps_of_both_ranks(result):
    assert result.conditions.rate == "80mbit" and result.conditions.bits_per_second == 8e7
    others = results.load("network.json").at_all_rates()
    for other in others:
        results.keep_exposed_only(other.rows)  # the picture is of the lowest rate, and that is this run's
    others[0].other_rates = []
    assert result.other_rates == others
    names = [row.name for row in result.rows]
    assert names == ["compute only", "ddp", *row_names.HALF_OVERLAPS, "stage 4 overlap", "stage 4 overlap bf16"]
    assert not any(row.error for row in result.rows)
    assert [row.max_abs_diff for row in result.rows[2:]] == [0] * 5  # of ddp, of replicated fp32 copies
    for row in result.rows[1:]:  # the interface counts headers too: much around small messages
        assert row.wire_bytes_theory < row.line_bytes < 2 * row.wire_bytes_theory + 50_000, row.name
    assert result.rows[0].line_bytes < 50_000
    row = result.find("stage 4 overlap")
    assert result.find("stage 4 overlap bf16").wire_bytes < 0.6 * row.wire_bytes
    assert len(row.timeline) == 2  # of both ranks, and what travelled
    for step in row.timeline:
        assert [name for name, _, _ in step.phases] == ["forward", "backward", "step"]
        assert {message.kind for message in step.communication} == {"send", "recv", "all_reduce", "broadcast"}
        assert 0 <= step.exposed_seconds <= step.seconds


def affinity(rank):
    return os.sched_getaffinity(0)


@needs_hosts
def test_hosts_are_as_the_conditions_say(result, tmp_path):
    """As Linux says: a line of that rate, cubic whatever this machine has set, and no core that both have."""
    with Hosts("12mbit") as made, Workers(2, enter=made.enter) as workers:
        cores = list(map(set, workers.run(affinity)))
        for host, (name, link) in enumerate(zip(made.names, made.links)):
            shown = two_hosts.run("tc", "-n", name, "qdisc", "show", "dev", link)
            assert "qdisc tbf" in shown and "rate 12Mbit" in shown
            assert "congctl cubic" in two_hosts.run("ip", "-n", name, "route", "get", two_hosts.ADDRESSES[1 - host])
    assert cores[0] and cores[1] and (len(os.sched_getaffinity(0)) == 1 or not cores[0] & cores[1])
    assert (result.conditions.cores_per_host, result.conditions.tcp) == (len(cores[0]), "cubic")


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


def test_the_file_keeps_what_was_not_measured_again(tmp_path, monkeypatch):
    """Keep this rate's sweep, whose best sizes are rows, and another rate, which a second run has written meanwhile."""
    def of_rate(rate):
        found = next(result for result in results.at_all_rates() if result.conditions.rate == rate)
        found.other_rates = []
        return found

    def measured(args):
        tuned.append(args.tuned_ids)
        path.write_text(results.to_json(dataclasses.replace(before, other_rates=[other])))
        now = of_rate("300mbit")
        now.conditions.date, now.accumulation, now.sweep = "3000-01-01", None, None
        return now

    path, tuned, other, before = tmp_path / "network.json", [], of_rate("1gbit"), of_rate("300mbit")
    times = [("ddp", None, 3.0), ("ddp", 2, 1.0), ("ddp", 4, 2.0), ("stage 4 overlap", 1, 0.5)]
    sweep = Sweep(before.conditions, [Row(base, mb, "peer", rounds_ms=[ms]) for base, mb, ms in times])
    monkeypatch.setattr(two_hosts, "missing_requirement", lambda: None)
    monkeypatch.setattr(two_hosts, "measure_on_two_hosts", measured)
    monkeypatch.setattr(two_hosts, "exit_on_signals", lambda: None)
    for swept, asked, kept in ((None, [], (before.accumulation, None)), (sweep, [], (before.accumulation, sweep)),
                               (sweep, ["--accumulation", "--sweep"], (None, None))):  # which has failed
        before.sweep = swept
        path.write_text(results.to_json(before))
        monkeypatch.setattr(sys, "argv", ["network", "--rate", "300mbit", "--json", str(path), *asked])
        with pytest.raises(SystemExit) as end:
            two_hosts.main()
        found = results.from_json(Result, path.read_text())
        assert (end.value.code, found.conditions.date, found.other_rates) == (False, "3000-01-01", [other])
        assert before.accumulation and (found.accumulation, found.sweep) == kept
    assert tuned == [[], [RowId("ddp", 2), RowId("ddp + torch ZeRO", 2)], []]


def test_the_curve_measures_the_rates_that_its_file_lacks(tmp_path, monkeypatch, capsys):
    path, measured = tmp_path / "network.json", []
    first, *others = [result for result in results.at_all_rates() if result.conditions.rate != "2.5gbit"]
    path.write_text(results.to_json(dataclasses.replace(first, other_rates=others)))
    monkeypatch.setattr(two_hosts, "measure_rate", measured.append)
    monkeypatch.setattr(sys, "argv", ["network", "--curve", "1gbit,2.5gbit", "--rounds", "7", "--json", str(path)])
    with pytest.raises(SystemExit) as end:
        two_hosts.main()
    assert not end.value.code
    assert [(one.rate, one.rows, one.sweep, one.rounds, one.steps, one.json) for one in measured] == [
        ("2.5gbit", "curve", True, 7, 4, path)]
    printed = capsys.readouterr().out
    assert f"1gbit: in {path} already" in printed and "DDP, tuned buckets" in printed


@pytest.mark.parametrize("error", [None, "wrong: by 1"])
def test_what_is_wrong_gets_no_time_in_the_table_of_accumulation(error, monkeypatch):
    row, conditions = Row("stage 4 overlap", kind="stage", error=error), results.load("network.json").conditions
    monkeypatch.setattr(two_hosts, "on_rank_0", lambda *_: 1)
    monkeypatch.setattr(timeline, "record_rows", lambda *_: None)
    monkeypatch.setattr(every_row, "measure_rows", lambda *_: Result(conditions, [row]))
    monkeypatch.setattr(examine, "time_rows", lambda *_: [AccumulatedRow(1)])
    monkeypatch.setattr(sys, "argv", ["network", "--accumulation", "--rows", "fsdp2"])
    args = two_hosts.parse("")
    args.tuned_ids = []
    result = two_hosts.measure(args, workers=None)
    assert (result.accumulation is not None) == (error is None)
