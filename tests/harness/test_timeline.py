"""The timeline: spans by hand, and one real step."""

import gc
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch

from harness.measuring import timeline
from harness.measuring.examine import Settings, adamw, make_batches, make_model
from harness.measuring.ledger import Collective
from harness.measuring.memory import Memory
from harness.publishing import pictures
from harness.publishing.pictures import Message, RecordedStep, length, overlap, union
from harness.ranks.exchange import in_place_of_gloos
from harness.training import rows
from tests.common import on_ranks


def recorded():
    """Two steps of 10 seconds. In the second, from 10 to 20, nothing computes from 13 to 14 and from 18 to 19."""
    phases = [(name, 10 * step + start, 10 * step + end) for step in range(2)
              for name, start, end in (("forward", 0, 3), ("backward", 3, 8), ("step", 8, 10))]
    messages = [("all_gather", 9, 11), ("reduce", 12, 15), ("all_reduce", 17.5, 18.5), ("all_gather", 19.5, 21),
                ("recv", 22, 23)]
    entries = [Collective(kind, 8, None, 2, "gloo", 8.0, *span) for kind, *span in messages]
    live = [(0, 100), (12, 300), (13.5, 50), (25, 900)]
    return SimpleNamespace(phases=phases, busy=[[0, 13], [14, 18], [19, 30]], entries=entries, live=live)


def test_spans_by_hand():
    assert union([(3, 4), (0, 1), (0.5, 2)]) == [[0, 2], [3, 4]]
    assert overlap([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert length([(0, 2), (3, 4)]) == 3


def test_one_step_by_hand():
    """Exposed: from 13 to 14 something is received, from 18 to 18.5 flags are reduced, while nothing computes."""
    step = timeline.one_step(recorded(), 1)
    assert step.seconds == 10
    assert step.phases == [("forward", 0, 3), ("backward", 3, 8), ("step", 8, 10)]
    assert step.busy == [(0, 3), (4, 8), (9, 10)]
    assert [(one.kind, one.start, one.end) for one in step.communication] == [
        ("all_gather", -1, 1), ("reduce", 2, 5), ("all_reduce", 7.5, 8.5), ("all_gather", 9.5, 11)]
    assert step.exposed_seconds == 1.5
    assert step.memory == [100] * 40 + [300] * 31 + [50] * 129  # 50 ms each; what comes first in one is in it too


@on_ranks(2)
def test_the_step_of_median_length_is_shown_on_every_rank(rank):
    """Of the slowest rank's lengths 9, 5, 2, 7, 6, the first step aside, that is 6."""
    phases = []
    for seconds in [3, *((9, 1, 2, 7, 6), (1, 5, 1, 1, 1))[rank.number]]:
        now = phases[-1][2] if phases else 0
        phases += [("forward", now, now), ("backward", now, now), ("step", now, now + seconds)]
    assert timeline.median_step(SimpleNamespace(phases=phases)) == 5


def test_drawings_have_what_was_recorded():
    step = timeline.one_step(recorded(), 1)
    assert pictures.lanes(step) == [
        ("computes", [(0, 3, "forward"), (4, 8, "backward"), (9, 10, "step")]),
        ("gradients", [(2, 5, "gradients"), (7.5, 8.5, "gradients")]),
        ("parameters", [(0, 1, "parameters"), (9.5, 11, "parameters")]),
    ]


def test_a_rank_waits_where_no_operator_runs_for_a_while(monkeypatch):
    """Operators at these milliseconds, which take no time: the gap of 0.4 is Python's, that of 0.6 is none."""
    now = [0.0]
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with Memory(torch.device("cpu")) as memory, timeline.Recorder(memory) as found:
        for moment in (1.0, 1.4, 2.0):
            now[0] = moment / 1000
            torch.ones(3)
    assert found.busy == [[0.001, 0.0014], [0.002, 0.002]]


@on_ranks(2, name=["compute only", "ddp", "stage 3 grad buffer"])
def test_the_memory_curve_ends_where_the_counter_ends(rank, name):
    """Up to the loss of the step before, which only the recorded loop still knows. Model and state are in it."""
    settings, configuration = Settings("nano", batch_size=2, sequence_length=16), rows.find(name)
    recorded, batches = max(timeline.record(rank, settings, rows.RowId(name)).memory), make_batches(settings, rank)
    gc.collect()
    with in_place_of_gloos(), Memory(rank.device) as memory:
        training = configuration.build(make_model(settings, rank, "float32"), adamw(settings))
        for batch in (*batches[:2], batches[1]):
            memory.reset_peak()
            training.step(batch)
    assert recorded == pytest.approx(memory.peak, abs=64)
    assert recorded > {"stage 3 grad buffer": 3}.get(name, 4) * sum(
        param.nbytes for param in training.model.parameters())


def test_a_picture_has_what_was_recorded_at_its_place(monkeypatch):
    """10 seconds: gradients travel from 2 to 5 and from 7.5 to 8.5; 300, 100 and 50 bytes are held."""
    from matplotlib.colors import to_hex

    monkeypatch.setattr(pictures, "drawn_as_svg", lambda figure: figure)
    (axis,) = pictures.svg([("a row", timeline.one_step(recorded(), 1))], "title").axes
    assert axis.get_title("left").startswith("a row: 10000 ms; for 4000") and axis.get_xlim() == (0, 10_000)
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "computes", "gradients", "parameters", "memory ≤ 0 MB"]
    spans = [tuple(path.get_extents().intervalx) for bars in axis.collections for path in bars.get_paths()
             if to_hex(bars.get_facecolor()[0]) == pictures.COLOURS["gradients"]]
    assert spans == [pytest.approx(span, abs=10) for span in ((2000, 5000), (7500, 8500))]
    (curve,) = axis.patches
    held = [100] * 40 + [300] * 31 + [50] * 129
    assert list(curve.get_data().values) == pytest.approx([0.85 * n_bytes / 300 for n_bytes in held])
    assert (curve.get_data().edges[0], curve.get_data().edges[-1]) == (0, 10_000)


@pytest.mark.waits
@pytest.mark.parametrize("row, drawn", [("fsdp2", ["ddp", "fsdp2", "fsdp2 reshard"]),
                                        ("all", rows.LADDER)])
def test_the_command_writes_a_picture(row, drawn, tmp_path, monkeypatch, capsys):
    out = tmp_path / "timeline.svg"
    monkeypatch.setattr(sys, "argv", ["timeline.py", "--rows", row, "--model", "nano", "--sequence-length", "16",
                                      "--out", str(out)])
    timeline.main()
    printed = capsys.readouterr().out
    bands = [line.split(":")[0] for line in printed.splitlines() if " the network is busy " in line]
    assert bands == [f"{name}, rank {rank}" for name in drawn for rank in range(1 if row == "all" else 2)]
    ElementTree.fromstring(out.read_text())


def test_what_is_exchanged_after_the_optimizers_step_is_parameters():
    """Messages of a reduce-scatter, sums between them, the step, an all-gather, and a copy out of it at the end."""
    step = RecordedStep(0.0, 10.0, phases=[("forward", 0, 1), ("backward", 1, 2), ("step", 2, 10)],
                        busy=[(0, 2), (3.0, 3.1), (4, 5), (8, 10)],
                        communication=[Message("send", 4, start, start + 0.5) for start in (2, 3, 5, 6, 0.5, 1.5)])
    spans = {lane: [start for start, _, _ in its] for lane, its in pictures.lanes(step)[1:]}
    assert spans == {"gradients": [1.5, 2, 3], "parameters": [0.5, 5, 6]}
