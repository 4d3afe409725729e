"""make plan: what is counted is what training holds, and modelled seconds are those that a reader adds up by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from harness.measuring.examine import Settings, adamw
from harness.measuring.memory import Memory
from harness.planning import alone
from harness.planning import plan as command
from harness.planning.alone import Event
from harness.planning.replay import Hardware, calibrated, message_seconds, replay
from harness.publishing.tables import from_json
from harness.training import models, options, rows
from harness.training.models import GPT, MODELS
from harness.training.rows import RowId
from tests.common import one_rank_of
from tests.ranks import run_module

TINY, NANO = options.SPECS["tiny"], options.SPECS["nano"]
COST = alone.Cost(activations=1000.0, flops=2000.0)


@pytest.mark.parametrize("row", [*map(rows.find, command.ROWS["fp32"]), *rows.PLANNED], ids=lambda row: row.name)
def test_counted_bytes_are_those_of_the_formula(row):
    has_bucket_size = row.name in command.STAGE_4
    recorded = alone.record(RowId(row.name, 2 if has_bucket_size else None), TINY, 4, COST)
    assert sum(recorded.held.values()) == pytest.approx(recorded.theory, rel=0.02)  # padding
    largest = max([event.n_bytes for event in recorded.events if event.kind == "reduce_scatter"], default=0)
    assert not has_bucket_size or recorded.held["buffers"] == pytest.approx(2 * largest, rel=0.02)


@pytest.mark.parametrize("name", ["stage 2 all-gather", "stage 3 grad buffer", "stage 3 bf16/fp32"])
def test_a_dry_run_holds_what_the_guarded_optimizer_holds_on_real_tensors(name):
    recorded, configuration = alone.record(RowId(name), NANO, 8), rows.find(name)
    with one_rank_of(8), Memory("cpu") as memory:
        model = GPT(MODELS["nano"]).to(getattr(torch, configuration.dtype))
        training = configuration.build(model, adamw(Settings("nano")))
        training.forward_backward(torch.zeros(2, 1, 1, dtype=torch.int64))
        training.update()
        assert sum(recorded.held.values()) == pytest.approx(memory.live, rel=0.001)


def test_a_llama_has_as_many_parameters_as_its_name_says_and_ranks_that_share_layers_hold_parts():
    with alone.fake(1):
        for spec, numel in ((options.SPECS["7b"], 6_738_415_616), (options.SPECS["13b"], 13_015_864_320),
                            (options.SPECS["7b"]._replace(tensor_parallel=2), 6_738_415_616 / 2)):
            counted = sum(param.numel() for param in models.model_of(spec, "bfloat16").parameters())
            assert counted == pytest.approx(numel, rel=1e-4 if spec.tensor_parallel == 2 else 0)


@pytest.mark.parametrize("row_id, model, d, sent, waits", [
    (RowId("stage 4 overlap", 2), TINY, 4, {("reduce_scatter", "backward", 4, 1), ("all_gather", "step", 4, 1)},
     {("backward", 0), ("step", 0), ("forward", 1)}),
    (RowId("ddp"), TINY, 4, {("all_reduce", "backward", 4, 1)}, {("backward", 0)}),
    (RowId("owner reduce"), NANO, 4, {("reduce", "backward", 4, 1), ("broadcast", "step", 4, 1)}, {("step", 0)}),
    (RowId(rows.HYBRID_BF16, 2), NANO, 128, {("reduce_scatter", "backward", 64, 1), ("all_reduce", "step", 2, 64),
                                                   ("all_gather", "step", 64, 1)}, {("step", 0), ("forward", 1)})])
def test_when_messages_leave_among_which_ranks_and_when_they_are_waited_for(row_id, model, d, sent, waits):
    """`sent`: kind, phase, number of ranks, stride. `waits`: phase, and 1 for what the step before has sent."""
    recorded, itemsize = alone.record(row_id, model, d, COST), getattr(torch, rows.find(row_id.base).dtype).itemsize
    launched = [event for event in recorded.events if event.what == "launch"]
    assert {(event.kind, event.phase, event.group_size, event.stride) for event in launched} == sent
    assert {(event.phase, event.lag) for event in recorded.events if event.what == "wait"} == waits
    assert sum(event.n_bytes for event in launched if event.phase == "backward") == pytest.approx(
        itemsize * recorded.numel, rel=0.05 if row_id.bucket_mb else 0)  # padding of buckets that are cut
    assert sum(event.flops for event in recorded.events) == pytest.approx(3 * COST.flops)
    assert len(launched) > 1


def test_a_copy_reads_one_tensor_and_writes_another():
    with alone.fake(1), alone.Dry() as dry:
        one, other = (torch.ones(25) for _ in range(2))
        for run, n_bytes in ((lambda: one.copy_(other), 200), (one.zero_, 100), (lambda: one.add_(other), 300),
                             (lambda: torch.div(one, 2, out=other), 200)):
            dry.begin_step(0)
            run()
            assert [event.n_bytes for event in dry.events] == [n_bytes]

# One rank per node, 1000 FLOPs and 100 bytes a second.
SLOW = Hardware(flops=1000.0, memory_rate=math.inf, in_node=math.inf, between=100.0, per_node=1, latency_in_node=0.0,
                latency_between=0.0)
NODES = Hardware(1.0, 1.0, in_node=1000.0, between=100.0, per_node=2, latency_in_node=1.0, latency_between=10.0)


def computes(phase, flops):
    return Event("compute", phase, flops)


def sends(phase, n_bytes, kind="reduce_scatter", index=0):  # a reduce-scatter or all-gather of 200 bytes takes 1 s
    return Event("launch", phase, n_bytes=n_bytes, kind=kind, index=index)


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
    step = replay(events, SLOW, 2, **options)
    assert (step.seconds, step.exposed_seconds) == (pytest.approx(seconds), pytest.approx(exposed))


@pytest.mark.parametrize("kind, n_bytes, d, stride, changes, seconds", [
    pytest.param("all_gather", 800, 4, 1, {}, 2 * 1 + 10 + 6, id="0 1 | 2 3: two hops in nodes, one between"),
    pytest.param("all_gather", 0, 16, 1, {}, 8 + 7 * 10, id="a ring over 8 nodes"),
    pytest.param("all_reduce", 0, 16, 1, {}, 2 * (1 + 3 * 10), id="a tree has fewer hops"),
    pytest.param("all_reduce", 0, 16, 1, {"backend": "exchange"}, 2 * (8 + 7 * 10), id="NCCL alone has trees"),
    pytest.param("all_gather", 800, 8, 1, {"per_node": 8}, 7 * 1 + 700 / 1000, id="in a node"),
    pytest.param("all_gather", 800, 8, 64, {"per_node": 8}, 7 * 10 + 700 / (100 / 8), id="lines are shared"),
    pytest.param("all_gather", 800, 8, 4, {"per_node": 8}, 4 * 1 + 3 * 10 + 700 / (100 / 4), id="two on a node")])
def test_a_message_passes_every_rank_and_pays_for_every_hop(kind, n_bytes, d, stride, changes, seconds):
    assert message_seconds(kind, n_bytes, d, NODES._replace(**changes), stride) == pytest.approx(seconds)


def test_a_bucket_as_large_as_the_model_is_not_taken():
    """Skip such a size however fast it is, because two buffers that take as much as all gradients save no memory."""
    args = SimpleNamespace(world=2, bucket_cap_mb=None, accumulate=1, device="h100", device_memory=1, dtype="bf16",
                           tensor_parallel=1)
    buckets = ((None, 1, 4e18), (100, 40, 3e18), (400, 50, 2e18), (1600, 60, 1e16), (6400, 200, 1e15))
    planner = command.Planner(args, {
        (RowId("stage 4 bf16", mb), 2): alone.Recorded(1, {"parameters": 100, "buffers": buffers}, 1, 1,
                                                       [computes("step", flops)]) for mb, buffers, flops in buckets})
    assert planner.best_size("stage 4 bf16") == RowId("stage 4 bf16", 400)


def test_a_rate_that_nobody_can_calibrate_is_an_error():
    with pytest.raises(ValueError, match="no flops gives 1 s: the model takes 2 s"):
        calibrated("flops", lambda hardware: 2.0, SLOW, 1.0)


@pytest.mark.waits
def test_the_program_prints_its_tables(tmp_path):
    run = run_module("harness.planning.plan", "--model", "nano", "--sequence-length", "64", "--world", "16",
                     "--json", tmp_path / "plan.json")
    assert run.code == 0, run.stderr
    for title in ("GB on a rank of 16", "A step of nano on 16 x h100",
                  "ms a micro-batch, by number of ranks", "Sizes of buckets: "):
        assert title in run.stdout
    sheets = from_json((tmp_path / "plan.json").read_text(encoding="utf-8")).sheets
    ms, once, each = map(sheets["time"].numbers, ("ms", "once", "each"))
    assert [column.key for column in sheets["ranks"].columns] == ["name", "8", "16"]
    assert sheets["ranks"].numbers("16") == pytest.approx(ms, rel=1e-5)
    assert all(once[name] <= each[name] * 1.001 for name in ms)
    assert max(each[name] / once[name] for name in ms) > 1.2  # of rows that wait for messages in every micro-batch
