"""make plan: what is counted is what training holds, and modelled seconds are those that a reader adds up by hand."""

import math

import pytest
import torch

from harness.planning import alone, plan
from harness.planning import replay as replaying
from harness.planning.alone import Event
from harness.planning.replay import Hardware, message_seconds, replay
from harness.publishing.tables import from_json
from harness.training import models, rows
from harness.training.options import LLAMAS, MODELS
from harness.training.rows import RowId
from tests.ranks import run_module

COST = alone.Cost(activations=1000.0, flops=2000.0)


# ------------------------------------------------------------------------------------------------------ What is counted


@pytest.mark.parametrize("row", [*map(rows.find, plan.ROWS["fp32"]), *rows.PLANNED], ids=lambda row: row.name)
def test_counted_bytes_are_those_of_the_formula(row):
    """Compare with formulas, which tests/harness/test_peers.py compares with real tensors. Padding adds up to 2 %."""
    is_stage_4 = row.name in {rows.OVERLAP, rows.STAGE_4_BF16, rows.HYBRID_BF16}
    recorded = alone.record(RowId(row.name, 2 if is_stage_4 else None), MODELS["tiny"], 4, COST)
    assert sum(recorded.held.values()) == pytest.approx(recorded.theory, rel=0.02)
    if is_stage_4:
        largest = max(event.n_bytes for event in recorded.events if event.kind == "reduce_scatter")
        assert recorded.held["buffers"] == pytest.approx(2 * largest, rel=0.02)


def test_a_llama_has_as_many_parameters_as_its_name_says_and_ranks_that_share_layers_hold_parts():
    def numel_of(config):
        return sum(param.numel() for param in models.model_of(config, "bfloat16").parameters())

    with alone.fake(1):
        assert numel_of(LLAMAS["7b"]) == 6_738_415_616
        assert numel_of(LLAMAS["13b"]) == 13_015_864_320
        assert numel_of(LLAMAS["7b"]._replace(tensor_parallel=2)) == pytest.approx(6_738_415_616 / 2, rel=1e-4)


@pytest.mark.parametrize("row_id, model, d, sent, waits", [
    (RowId("stage 4 overlap", 2), "tiny", 4, {("reduce_scatter", "backward", 4, 1), ("all_gather", "step", 4, 1)},
     {("backward", 0), ("step", 0), ("forward", 1)}),
    (RowId("ddp"), "tiny", 4, {("all_reduce", "backward", 4, 1)}, {("backward", 0)}),
    (RowId(rows.HYBRID_BF16, 2), "nano", 128,
     {("reduce_scatter", "backward", 64, 1), ("all_reduce", "step", 2, 64), ("all_gather", "step", 64, 1)},
     {("step", 0), ("forward", 1)})], ids=["stage 4", "ddp", "hybrid"])
def test_when_messages_leave_among_which_ranks_and_when_they_are_waited_for(row_id, model, d, sent, waits):
    """`sent`: kind, phase, number of ranks, stride. `waits`: phase, and 1 for what the step before has sent."""
    recorded = alone.record(row_id, MODELS[model], d, COST)
    launches = [event for event in recorded.events if event.what == "launch"]
    assert {(event.kind, event.phase, event.group_size, event.stride) for event in launches} == sent
    assert {(event.phase, event.lag) for event in recorded.events if event.what == "wait"} == waits
    assert sum(event.flops for event in recorded.events) == pytest.approx(3 * COST.flops)


@pytest.mark.parametrize("run, n_bytes", [
    (lambda tensor, other: tensor.copy_(other), 200), (lambda tensor, other: tensor.zero_(), 100),
    (lambda tensor, other: tensor.add_(other), 300), (lambda tensor, other: torch.div(tensor, 2, out=other), 200)])
def test_an_operator_reads_and_writes_so_many_bytes(run, n_bytes):
    """Run an operator on two tensors of 100 bytes."""
    with alone.fake(1), alone.DryRun() as dry_run:
        tensor = torch.ones(25)
        other = torch.ones(25)
        dry_run.begin_step(0)
        run(tensor, other)
        assert [event.n_bytes for event in dry_run.events] == [n_bytes]


# ----------------------------------------------------------------------------------------------------- What is modelled


# One rank per node, 1000 FLOPs and 100 bytes a second.
SLOW = Hardware(flops=1000.0, memory_rate=math.inf, in_node=math.inf, between=100.0, per_node=1, latency_in_node=0.0,
                latency_between=0.0)
NODES = Hardware(1.0, 1.0, in_node=1000.0, between=100.0, per_node=2, latency_in_node=1.0, latency_between=10.0)


def computes(phase, flops):
    return Event("compute", phase, flops)


def sends(phase, n_bytes, kind="reduce_scatter", index=0):  # a reduce-scatter or all-gather of 200 bytes takes 1 s
    return Event("launch", phase, n_bytes=n_bytes, kind=kind, index=index, group_size=2)


ACCUMULATING_STEP = [computes("backward", 1000), sends("backward", 400), Event("wait", "backward"),
                     computes("step", 500)]


@pytest.mark.parametrize("events, options, seconds, exposed", [
    pytest.param([computes("backward", 1000), sends("step", 200, "all_reduce"), Event("wait", "step")], {}, 1 + 2, 2,
                 id="a message that is waited for at once is exposed whole"),
    pytest.param([sends("backward", 200), computes("backward", 3000), Event("wait", "step")], {}, 3, 0,
                 id="a message travels while the device computes"),
    pytest.param([*(sends("backward", 200, index=index) for index in (0, 1)), Event("wait", "step", index=1)], {}, 2,
                 2, id="messages queue on the line"),
    pytest.param([computes("forward", 500), Event("wait", "forward", lag=1), computes("forward", 500),
                  sends("step", 400, "all_gather")], {}, 2.5, 1.5,  # half of the next forward pass hides 0.5 of 2 s
                 id="parameters of the step before are waited for in this one"),
    pytest.param(ACCUMULATING_STEP, {"micro_batches": 3}, 3 * 1 + 2 + 0.5, 2, id="accumulation exchanges once"),
    pytest.param(ACCUMULATING_STEP, {"micro_batches": 3, "exchange_each": True}, 3 * (1 + 2) + 0.5, 6,
                 id="or each time")])
def test_a_step_takes_what_a_reader_adds_up(events, options, seconds, exposed):
    step = replay(events, SLOW, **options)
    assert step.seconds == pytest.approx(seconds) and step.exposed_seconds == pytest.approx(exposed)


@pytest.mark.parametrize("kind, n_bytes, d, stride, per_node, seconds", [
    pytest.param("all_gather", 800, 4, 1, 2, 2 * 1 + 10 + 6, id="0 1 | 2 3: two hops in nodes, one between"),
    pytest.param("all_gather", 0, 16, 1, 2, 8 + 7 * 10, id="a ring over 8 nodes"),
    pytest.param("all_reduce", 0, 16, 1, 2, 2 * (1 + 3 * 10), id="a tree has fewer hops"),
    pytest.param("all_gather", 800, 8, 1, 8, 7 * 1 + 700 / 1000, id="in a node"),
    pytest.param("all_gather", 800, 8, 64, 8, 7 * 10 + 700 / (100 / 8), id="lines are shared"),
    pytest.param("all_gather", 800, 8, 4, 8, 4 * 1 + 3 * 10 + 700 / (100 / 4), id="two on a node")])
def test_a_message_passes_every_rank_and_pays_for_every_hop(kind, n_bytes, d, stride, per_node, seconds):
    assert message_seconds(kind, n_bytes, d, NODES._replace(per_node=per_node), stride) == pytest.approx(seconds)


@pytest.mark.parametrize("d, dtype, mib", [(1, "bf16", 76), (40, "fp32", 153), (1024, "bf16", 1953)])
def test_a_bucket_has_megatrons_default_size(d, dtype, mib):
    """40 million parameters of 2 bytes are 76.3 MiB, and of 4 bytes 152.6; 1024 million of 2 bytes are 1953.1 MiB."""
    assert plan.default_bucket_mb(d, dtype) == mib


def test_flops_are_calibrated_by_a_published_run(monkeypatch):
    """Two GPUs share the layers, so each of 256 GPUs has 2048 * 2048 / 256 tokens, and 128 ranks 4 micro-batches."""
    monkeypatch.setattr(replaying, "events_of", lambda optimizer, d, batch: [computes("forward", 1e9)])
    run = replaying.PublishedRun("distributed", 256, 2048, 4, tokens_per_s=2**15)  # 0.5 s for 16384 tokens
    assert replaying.calibrated(run, SLOW).flops == pytest.approx(4e9 / 0.5)


@pytest.mark.waits
def test_the_program_prints_and_saves_its_tables(tmp_path):
    run = run_module("harness.planning.plan", "--model", "nano", "--sequence-length", "64", "--world", "16",
                     "--bucket-cap-mb", "0.02", "--json", tmp_path / "plan.json")
    assert run.code == 0, run.stderr
    report = from_json((tmp_path / "plan.json").read_text(encoding="utf-8"))
    sheets = report.sheets
    assert report.figures == {"fitting": f"{len(plan.ROWS['bf16'])}"}
    assert list(sheets) == ["memory", "time"] and "A step of nano on 16 x h100, buckets of 0.02 MiB" in run.stdout
    held = {kind: sheets["memory"].numbers(kind)["stage 4 bf16"] for kind in ("parameters", "buffers")}
    assert held["buffers"] < held["parameters"]  # two buckets of the default size would hold twice as much
    ms = sheets["time"].numbers("ms")
    once = sheets["time"].numbers("once")
    each = sheets["time"].numbers("each")
    assert all(once[name] <= each[name] * 1.001 for name in ms)
    assert max(each[name] / once[name] for name in ms) > 1.2  # of rows that wait for messages in every micro-batch
