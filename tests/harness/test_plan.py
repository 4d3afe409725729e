"""make plan: what is counted is what training holds, and modelled seconds are those that a reader adds up by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

import stage3_gradbuffer
from harness import dry_run, models, rows
from harness import plan as command
from harness.alone import state_bytes
from harness.dry_run import Event
from harness.examine import Settings
from harness.replay import Hardware, calibrated, message_seconds, replay
from harness.results import PlanResult, from_json
from harness.rows import Choice
from tests.ranks import run_module

TINY = models.NAMED["tiny"]
COST = dry_run.Cost(activations=1000.0, flops=2000.0)


# ---------------------------------------------------------------------------------------------------------- counted


ROWS = [*(rows.find(name) for name in command.ROWS["fp32"]), *rows.PLANNED]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_counted_bytes_are_those_of_the_formula(row):
    is_sized = row.name in command.STAGE_4
    recorded = dry_run.record(Choice(row.name, 2 if is_sized else None), TINY, 4, COST)
    assert sum(recorded.held.values()) == pytest.approx(recorded.theory, rel=0.02)
    largest = max([event.n_bytes for event in recorded.events if event.kind == "reduce_scatter"], default=0)
    assert not is_sized or recorded.held["buffers"] == pytest.approx(2 * largest, rel=0.02)


@pytest.mark.parametrize("name, dtypes", [("stage 3 grad buffer", ("float32", "float32")),
                                          ("stage 3 bf16/fp32", ("bfloat16", "float32"))])
def test_a_dry_run_holds_what_the_guarded_optimizer_holds_on_real_tensors(name, dtypes):
    recorded = dry_run.record(Choice(name), TINY, 8, COST)
    counted, _ = state_bytes(Settings(), 8, stage3_gradbuffer, *dtypes)
    assert sum(recorded.held.values()) == pytest.approx(counted * recorded.numel, rel=1e-4)


def test_a_llama_has_as_many_parameters_as_its_name_says():
    for name, numel in (("7b", 6_738_415_616), ("13b", 13_015_864_320)):
        spec = models.NAMED[name]
        with dry_run.fake(1):
            assert sum(param.numel() for param in models.build_model(spec, "bfloat16").parameters()) == numel


def test_ranks_that_share_layers_hold_parts_of_them():
    with dry_run.fake(1):
        whole, half = (sum(param.numel() for param in models.build_model(
            models.NAMED["7b"]._replace(n_layers=2, tensor_parallel=share), "bfloat16").parameters())
            for share in (1, 2))
    assert half / whole == pytest.approx(0.5, rel=1e-3)


def launched(events):
    return [event for event in events if event.what == "launch"]


def test_a_step_of_stage_4_sends_gradients_during_backward_and_waits_for_parameters_in_forward():
    events = dry_run.record(Choice("stage 4 overlap", 2), TINY, 4, COST).events
    sent = launched(events)
    assert {event.phase for event in sent if event.kind == "reduce_scatter"} == {"backward"}
    assert {event.phase for event in sent if event.kind == "all_gather"} == {"step"}
    assert [event.lag for event in events if event.what == "wait" and event.phase == "forward"][0] == 1
    assert sum(event.flops for event in events) == pytest.approx(3 * COST.flops)


def test_ddp_reduces_in_buckets_during_backward_and_waits_before_it_steps():
    events = dry_run.record(Choice("ddp"), TINY, 4, COST).events
    sent = launched(events)
    assert {event.kind for event in sent} == {"all_reduce"} and len(sent) > 1
    assert sum(event.n_bytes for event in sent) == 4 * 10_844_160
    assert {event.phase for event in events if event.what == "wait"} == {"backward"}


# --------------------------------------------------------------------------------------------------------- modelled

# Computes 1000 FLOPs a second; sends 100 bytes a second; two ranks, one a node; no latency.
SLOW = Hardware(1000.0, math.inf, math.inf, 100.0, per_node=1, latency_in_node=0.0, latency_between=0.0)


def test_a_message_that_is_waited_for_at_once_is_exposed_whole():
    step = replay([Event("compute", "backward", 1000), Event("launch", "step", n_bytes=200, kind="all_reduce"),
                   Event("wait", "step")], SLOW, 2)
    assert step.seconds == pytest.approx(1 + 2)  # 2 n (d-1)/d = 200 bytes
    assert step.exposed_seconds == pytest.approx(2)


def test_a_message_travels_while_the_device_computes():
    step = replay([Event("launch", "backward", n_bytes=200, kind="reduce_scatter"), Event("compute", "backward", 3000),
                   Event("wait", "step")], SLOW, 2)
    assert (step.seconds, step.exposed_seconds) == (pytest.approx(3), pytest.approx(0))


def test_messages_queue_on_the_line():
    two = [Event("launch", "backward", n_bytes=200, kind="reduce_scatter", index=index) for index in (0, 1)]
    assert replay([*two, Event("wait", "step", index=1)], SLOW, 2).seconds == pytest.approx(2)


def test_parameters_of_the_step_before_are_waited_for_in_this_one():
    events = [Event("compute", "forward", 500), Event("wait", "forward", lag=1), Event("compute", "forward", 500),
              Event("launch", "step", n_bytes=400, kind="all_gather")]
    step = replay(events, SLOW, 2)  # 2 s to travel, of which the first half of the next forward hides 0.5
    assert (step.seconds, step.exposed_seconds) == (pytest.approx(2.5), pytest.approx(1.5))


def test_accumulation_exchanges_once_or_each_time():
    events = [Event("compute", "backward", 1000), Event("launch", "backward", n_bytes=400, kind="reduce_scatter"),
              Event("wait", "backward"), Event("compute", "step", 500)]
    assert replay(events, SLOW, 2, micro_batches=3).seconds == pytest.approx(3 * 1 + 2 + 0.5)
    assert replay(events, SLOW, 2, micro_batches=3, exchange_each=True).seconds == pytest.approx(3 * (1 + 2) + 0.5)


def test_a_ring_passes_every_rank_and_pays_for_every_hop():
    events = [Event("launch", "step", n_bytes=800, kind="all_gather"), Event("wait", "step")]
    nodes = Hardware(1.0, 1.0, in_node=1000.0, between=100.0, per_node=2, latency_in_node=1.0, latency_between=10.0)
    step = replay(events, nodes, 4)  # 0 1 | 2 3: two hops inside nodes, one between; 3/4 of 800 bytes
    assert step.seconds == pytest.approx(2 * 1 + 10 + 6)


def test_an_all_reduce_goes_through_trees_over_the_nodes_where_that_is_nearer():
    nodes = Hardware(1.0, 1.0, in_node=1000.0, between=100.0, per_node=2, latency_in_node=1.0, latency_between=10.0)
    for kind, backend, hops in (("all_gather", "nccl", 8 + 7 * 10), ("all_reduce", "nccl", 2 * (1 + 3 * 10)),
                                ("all_reduce", "exchange", 2 * (8 + 7 * 10))):
        assert message_seconds(kind, 0, 16, nodes._replace(backend=backend)) == pytest.approx(hops)  # 8 nodes


def test_ranks_that_lie_apart_share_the_lines_of_their_nodes():
    nodes = Hardware(1.0, 1.0, in_node=1000.0, between=100.0, per_node=8, latency_in_node=1.0, latency_between=10.0)
    assert message_seconds("all_gather", 800, 8, nodes) == pytest.approx(7 * 1 + 700 / 1000)  # in a node
    assert message_seconds("all_gather", 800, 8, nodes, 64) == pytest.approx(7 * 10 + 700 / (100 / 8))
    assert message_seconds("all_gather", 800, 8, nodes, 4) == pytest.approx(4 * 1 + 3 * 10 + 700 / (100 / 4))


def test_the_hybrid_row_sends_within_neighbours_and_across():
    name = next(row.name for row in rows.PLANNED if row.name.startswith("hybrid"))
    sent = launched(dry_run.record(Choice(name, 2), TINY, 128, COST).events)
    assert {(event.kind, event.group_size, event.stride) for event in sent} == {
        ("reduce_scatter", 64, 1), ("all_reduce", 2, 64), ("all_gather", 64, 1)}


def test_a_bucket_as_large_as_the_model_is_none():
    """However fast: of two buffers that take as much as whole gradients nothing is left to gain in memory."""
    plan = command.Planner.__new__(command.Planner)
    plan.args, plan.room, plan.hardware = SimpleNamespace(world=2, bucket_cap_mb=None, accumulate=1), 1e9, SLOW
    plan.recorded = {}
    for mb, buffers, flops in ((None, 1, 4000), (100, 40, 3000), (400, 50, 2000), (1600, 60, 10), (6400, 200, 1)):
        held, events = {"parameters": 100, "buffers": buffers}, [Event("compute", "step", flops)]
        plan.recorded[Choice("stage 4 bf16", mb), 2] = dry_run.Recorded(1, held, 1, 1, events)
    assert plan.tuned("stage 4 bf16") == Choice("stage 4 bf16", 400)


# --------------------------------------------------------------------------------------------------------- the program


@pytest.mark.waits
def test_the_program_prints_its_tables(tmp_path):
    run = run_module("harness.plan", "--model", "nano", "--sequence-length", "64", "--world", "16",
                     "--json", tmp_path / "plan.json")
    assert run.code == 0, run.stderr
    for title in ("What a rank of 16 holds", "Model state, bytes a parameter", "A step of nano on 16 x h100",
                  "ms a micro-batch, by number of ranks", "Sizes of buckets: "):
        assert title in run.stdout
    plan = from_json(PlanResult, (tmp_path / "plan.json").read_text(encoding="utf-8"))
    for row in plan.rows:
        assert row.ms[16] == pytest.approx(1e3 * row.step.seconds, rel=1e-5) and list(row.ms) == [1, 8, 16]
        assert row.once_ms <= row.each_ms * 1.001
    assert max(row.each_ms / row.once_ms for row in plan.rows) > 1.2  # whose messages are waited for each time


def test_a_copy_reads_one_tensor_and_writes_another():
    with dry_run.fake(1), dry_run.Dry() as dry:
        one, other = (torch.ones(25) for _ in range(2))
        for run, n_bytes in ((lambda: one.copy_(other), 200), (one.zero_, 100), (lambda: one.add_(other), 300),
                             (lambda: torch.div(one, 2, out=other), 200)):
            dry.begin_step(0)
            run()
            assert [event.n_bytes for event in dry.events] == [n_bytes]


def test_who_polls_a_message_does_not_wait_for_it():
    waits = [event for event in dry_run.record(Choice("owner reduce"), TINY, 4, COST).events if event.what == "wait"]
    in_backward = [event for event in waits if event.phase == "backward"]
    assert waits and not in_backward


def test_a_rate_that_nobody_can_calibrate_is_an_error():
    with pytest.raises(ValueError, match="no flops gives 1 s: the model takes 2 s"):
        calibrated("flops", lambda hardware: 2.0, SLOW, 1.0)
