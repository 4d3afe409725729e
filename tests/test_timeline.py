"""The timeline: spans by hand, and one real step."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import timeline
from harness.ledger import Collective

ROOT = Path(__file__).resolve().parents[1]


def message(kind, launched_at, completed_at):
    return Collective(kind, 8, None, 2, "gloo", 8.0, launched_at, completed_at)


def recorded():
    """Three steps of 10 seconds. In the second, from 10 to 20, nothing computes from 13 to 14 and from 18 to 19."""
    phases = [(name, 10 * step + start, 10 * step + end) for step in range(3)
              for name, start, end in (("forward", 0, 3), ("backward", 3, 8), ("step", 8, 10))]
    entries = [message("all_gather", 9, 11), message("recv", 12, 15), message("all_reduce", 17.5, 18.5),
               message("all_gather", 19.5, 21), message("recv", 22, 23)]
    return SimpleNamespace(phases=phases, busy=[[0, 13], [14, 18], [19, 30]], entries=entries)


def test_spans_by_hand():
    assert timeline.union([(3, 4), (0, 1), (0.5, 2)]) == [[0, 2], [3, 4]]
    assert timeline.overlap([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert timeline.length([(0, 2), (3, 4)]) == 3


def test_one_step_by_hand():
    """Exposed: from 13 to 14 something is received, from 18 to 18.5 flags are reduced, while nothing computes."""
    step = timeline.one_step(recorded())
    assert step["seconds"] == 10
    assert step["phases"] == [("forward", 0, 3), ("backward", 3, 8), ("step", 8, 10)]
    assert step["busy"] == [[0, 3], [4, 8], [9, 10]]
    assert [(one["kind"], one["start"], one["end"]) for one in step["communication"]] == [
        ("all_gather", -1, 1), ("recv", 2, 5), ("all_reduce", 7.5, 8.5), ("all_gather", 9.5, 11)]
    assert step["exposed_seconds"] == 1.5


def test_drawings_have_what_was_recorded():
    step = timeline.one_step(recorded())
    assert timeline.lanes(step) == [
        ("computes", [(0, 3, "forward"), (4, 8, "backward"), (9, 10, "step")]),
        ("gradients", [(2, 5, "gradients"), (7.5, 8.5, "gradients")]),
        ("parameters", [(0, 1, "parameters"), (9.5, 11, "parameters")]),
    ]
    lines = timeline.text([("a row", step)], width=10).splitlines()
    assert lines[0].startswith("a row: 10000 ms, 1500 ms of communication")
    assert [line.split()[1] for line in lines[1:4]] == ["FFF·BBBB·S", "··▒▒▒··▒▒·", "▓········▓"]
    root = ElementTree.fromstring(timeline.svg([("a <row>", step)], "title"))
    classes = [rect.get("class") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert classes.count("forward") == 2 and classes.count("gradients") == 3  # one of each in the legend
    events = timeline.trace([("a row", step)])["traceEvents"]
    assert {"ph": "X", "name": "recv 8 bytes", "pid": 0, "tid": 3, "ts": 2e6, "dur": 3e6} in events


@pytest.mark.parametrize("row", ["stage 4", "fsdp2"])
def test_the_command_writes_a_picture_and_a_trace(row, tmp_path):
    out = tmp_path / "timeline.svg"
    run = subprocess.run(
        [sys.executable, "-m", "harness.timeline", "--rows", row, "--model", "nano", "--sequence-length", "16", "--out",
         str(out)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "rank 1: " in run.stdout and "F" in run.stdout and "B" in run.stdout
    ElementTree.fromstring(out.read_text())
    events = json.loads(out.with_suffix(".json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
