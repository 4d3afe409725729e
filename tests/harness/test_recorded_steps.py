"""A recorded step: what is in a step, which step is shown, and what a picture shows of it."""

from types import SimpleNamespace

import torch

from harness.measuring import examine
from harness.measuring.examine import Recording
from harness.publishing import pictures
from harness.publishing.pictures import Message
from tests.common import on_ranks

# Two steps of 10 seconds. In the second, from 10 to 20, nothing computes from 13 to 14 and from 18 to 19.
RECORDING = Recording(
    phases=[("forward", 0, 3), ("backward", 3, 8), ("step", 8, 10),
            ("forward", 10, 13), ("backward", 13, 18), ("step", 18, 20)],
    busy=[[0, 13], [14, 18], [19, 30]],
    messages=[Message("all_gather", 8, 9, 11), Message("reduce", 8, 12, 15), Message("all_reduce", 8, 17.5, 18.5),
              Message("all_gather", 8, 19.5, 21), Message("recv", 8, 22, 23)])


def test_one_step_by_hand():
    """Exposed are a reduce from 13 to 14 and an all-reduce from 18 to 18.5: nothing computes then."""
    step = examine.recorded_step(RECORDING, 1)
    assert step.seconds == 10
    assert step.phases == [("forward", 0, 3), ("backward", 3, 8), ("step", 8, 10)]
    assert step.busy == [(0, 3), (4, 8), (9, 10)]
    assert [(message.kind, message.start, message.end) for message in step.communication] == [
        ("all_gather", -1, 1), ("reduce", 2, 5), ("all_reduce", 7.5, 8.5), ("all_gather", 9.5, 11)]
    assert step.exposed_seconds == 1.5


@on_ranks(2)
def test_the_step_of_median_length_is_shown_on_every_rank(rank):
    """Steps 1 to 5 last 9, 5, 2, 7 and 6 seconds on the slower rank, so step 5 is chosen."""
    seconds_of_rank = [(3, 9, 1, 2, 7, 6), (3, 1, 5, 1, 1, 1)]
    phases = []
    start = 0
    for seconds in seconds_of_rank[rank.number]:
        end = start + seconds
        phases += [("forward", start, start), ("backward", start, start), ("step", start, end)]
        start = end
    assert examine.median_step(phases) == 5


def test_drawings_have_what_was_recorded():
    step = examine.recorded_step(RECORDING, 1)
    assert pictures.lanes(step) == {
        "computes": [(0, 3, "forward"), (4, 8, "backward"), (9, 10, "step")],
        "gradients": [(2, 5, "gradients"), (7.5, 8.5, "gradients")],
        "parameters": [(0, 1, "parameters"), (9.5, 11, "parameters")],
    }


def test_a_rank_waits_where_no_operator_runs_for_a_while(monkeypatch):
    """Operators run at 1, 1.4 and 2 ms. Python takes a gap of 0.4 ms, and in a gap of 0.6 ms the rank waits."""
    now = [0.0]
    monkeypatch.setattr(examine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with examine.Recorder() as recorder:
        for ms in (1.0, 1.4, 2.0):
            now[0] = ms / 1000
            torch.ones(3)
    assert recorder.busy == [[0.001, 0.0014], [0.002, 0.002]]
