"""The rows that are no stage as it is: rung 0, tuned peers, overlap taken apart, gradients that go to an owner."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

import stage4_overlap
from harness import alone, examine, rows
from harness.alone import rank_0_of
from harness.examine import Settings, adamw, make_batches, make_model
from harness.ledger import Ledger
from harness.owner_reduce import owner_buckets
from harness.reference import DistributedOptimizer
from harness.rows import ONE_PARAMETER, Choice
from stage4_overlap import optimizer
from tests.common import Net, batch, loss_of, on_its_device, trainable
from tests.pairs import Replicated, assert_same

SETTINGS = Settings("nano", 2, 16, 1, 1)
SIZED = [Choice("ddp", 0.01), Choice("ddp + torch ZeRO", 0.01), Choice("ddp + stage 1", ONE_PARAMETER),
         Choice("ddp + stage 2", 0.01), Choice("stage 4 overlap", ONE_PARAMETER), Choice("owner reduce", 0.01)]
OTHERS = [Choice(row.name) for row in (*rows.APART, *rows.UNTUNED, rows.find("rung 0 replicated"))]


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("choice", [*SIZED, *OTHERS, Choice("owner reduce")], ids=lambda choice: choice.name)
def test_a_row_is_ddp_to_the_bit_and_costs_what_it_says(run, choice):
    for found, movement in run(examine.examine, SETTINGS, *choice):
        assert found.choice == choice and found.max_abs_diff == 0 and movement > 0
        assert found.wire_bytes == pytest.approx(found.wire_bytes_theory, rel=0.01, abs=8 * 32)
        # Shares that differ, buckets that are padded: much in a tiny model.
        rel = 0.05 if choice.base.startswith(("owner", "stage 4")) else 0.005
        assert found.bytes_per_param == pytest.approx(found.bytes_per_param_theory, rel=rel)


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("choice", [Choice("owner reduce"), SIZED[-1]], ids=lambda choice: choice.name)
def test_an_owner_is_right_on_three_ranks(run, choice):
    for found, _ in run(examine.examine, SETTINGS, *choice):
        assert found.max_abs_diff <= examine.tolerance(3)


@pytest.mark.parametrize("world_size", [2])
def test_without_its_tuning_stage_4_has_longer_messages(run, world_size):
    """The half of 16 MiB is 8 pieces, or one message."""
    assert run(untuned)[0] == (8, 1)


def untuned(rank):
    """-> messages, messages in one piece."""
    def sent():
        with Ledger() as ledger:
            param.sum().backward()
            optimizer.step()
        return ledger.collectives["send"]

    param = torch.nn.Parameter(torch.ones(2**22))
    optimizer = stage4_overlap.DistributedOptimizer([param], torch.optim.AdamW)
    pieces = sent()
    with rows.whole_messages():
        return pieces, sent()


def messages(rank, choice):
    training = rows.find(*choice).build(make_model(SETTINGS, rank, "float32"), adamw(SETTINGS))
    for data in make_batches(SETTINGS, rank)[:2]:  # DDP makes its buckets anew after the first step
        training.step(data)
    with Ledger() as ledger:
        training.forward_backward(make_batches(SETTINGS, rank)[2])
    n_params = sum(1 for _ in training.model.parameters())
    training.update()
    training.finish()
    return ledger.collectives, n_params


@pytest.mark.parametrize("world_size", [2])
def test_smaller_buckets_are_more_messages(run, world_size):
    choices = [Choice("ddp"), SIZED[0], Choice("owner reduce"), SIZED[-1]]
    (default, _), (small, _), (each, n_params), (gathered, _) = [run(messages, choice)[0] for choice in choices]
    assert default["all_reduce"] < small["all_reduce"]
    assert each == {"reduce": n_params} and 2 < gathered["reduce"] < n_params


def test_a_bucket_has_one_owner_and_leaves_when_it_is_full():
    params = [torch.zeros(numel) for numel in (1, 2, 3, 4)]  # of 4 bytes each
    owners = dict(zip(params, (0, 1, 0, 1)))
    found = owner_buckets(params, owners, 16)
    assert [(owner, [param.numel() for param in bucket]) for owner, bucket in found] == [
        (1, [4]), (0, [3, 1]), (1, [2])]
    assert len(owner_buckets(params, owners, 0)) == 4


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name, leaves_late, prefetches", [
    ("stage 4 neither", True, False), ("stage 4 only gradients", False, False),
    ("stage 4 only parameters", True, True), ("stage 4 overlap", False, True)])
def test_gradients_leave_late_and_parameters_come_late_where_the_row_says_so(run, name, leaves_late, prefetches):
    """By the order in which it happens: the first bucket leaves behind the last gradient, or before it."""
    for order, is_under_way in run(order_of, name, 0.01):
        first_leaves, last_gradient = order.index("leaves"), len(order) - 1 - order[::-1].index("gradient")
        assert (first_leaves > last_gradient, is_under_way) == (leaves_late, prefetches)


def order_of(rank, name, bucket_mb):
    """-> what happens in a step, and whether parameters are under way after it."""
    training = rows.find(name, bucket_mb).build(make_model(SETTINGS, rank, "float32"), adamw(SETTINGS))
    optimizer, order = training.optimizer, []
    send_grads = optimizer.send_grads
    for param in training.model.parameters():
        param.register_hook(lambda grad: order.append("gradient"))
    optimizer.send_grads = lambda bucket: (order.append("leaves"), send_grads(bucket))
    training.step(make_batches(SETTINGS, rank)[0])
    is_under_way = any(bucket.param_sync is not None for bucket in optimizer.buckets)
    training.finish()
    return order, is_under_way


# ---------------------------------------------------------------------------------------------------------- rung 0


@on_its_device
def train_rung_0(rank, beneath_ddp):
    """Clipped, accumulated, by a schedule, and loaded into another one half way."""
    model, reference = Net(seed=rank.rank), Replicated(rank, lr=0.01)
    optimizer = DistributedOptimizer(trainable(model), lr=0.01, average_gradients=not beneath_ddp)
    forward = DistributedDataParallel(model) if beneath_ddp else model
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, reference.optimizer)]
    for step in range(4):
        if step == 2:
            before, optimizer = optimizer, DistributedOptimizer(trainable(model), lr=0.01,
                                                                average_gradients=not beneath_ddp)
            optimizer.load_state_dict(before.state_dict())
            schedules[0].optimizer = optimizer
        for micro in (2 * step, 2 * step + 1):
            with optimizer.no_sync():
                loss_of(forward, *batch(micro, rank.rank)).backward()
        reference.backward(2 * step, 2 * step + 1)
        norm = optimizer.clip_grad_norm_(0.1)
        expected = torch.nn.utils.clip_grad_norm_(trainable(reference.model), 0.1)
        torch.testing.assert_close(norm, expected)
        optimizer.step()
        reference.optimizer.step()
        for schedule, one in zip(schedules, (optimizer, reference.optimizer)):
            schedule.step()
            one.zero_grad()
        assert optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"]
    assert_same(model, reference.model, exact=False)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("beneath_ddp", [False, True])
def test_rung_0_is_replicated_training_with_the_face_of_a_stage(run, beneath_ddp):
    run(train_rung_0, beneath_ddp)


# ------------------------------------------------------------------------------------- accumulation, default buckets


def gradients_sent(rank, name, in_no_sync):
    with Ledger() as ledger:
        examine.time_accumulation(rank, SETTINGS, Choice(name), 4, in_no_sync)
    return sum(entry.wire_bytes for entry in ledger.entries if entry.kind in ("all_reduce", "reduce_scatter", "send"))


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("name", ["ddp", "stage 3 grad buffer", "stage 4 overlap"])
def test_in_no_sync_micro_batches_share_an_exchange(run, name):
    once, each = run(gradients_sent, name, True)[0], run(gradients_sent, name, False)[0]
    assert each > (2 if name == "ddp" else 3) * once > 0 or name == "stage 3 grad buffer" and each == once


def cap_of(monkeypatch, nbytes):
    """-> bytes at which stage 4 closes a bucket of parameters that are as large together."""
    caps = []
    monkeypatch.setattr(optimizer, "bucket_layout", lambda sizes, dtypes, cap: caps.append(cap) or [range(len(sizes))])
    with rank_0_of(2), FakeTensorMode():
        optimizer.ShardedOptimizer([torch.zeros(nbytes // 8, requires_grad=True) for _ in range(2)])
    return caps[0]


@pytest.mark.parametrize("model_mb, cap_mb", [(1, 1), (20, 1), (40, 2), (400, 20), (500, 25), (5000, 25)])
def test_a_bucket_is_a_twentieth_of_the_model_within_bounds(monkeypatch, model_mb, cap_mb):
    assert cap_of(monkeypatch, model_mb * 2**20) == pytest.approx(cap_mb * 2**20)


def test_default_buckets_hold_little_of_every_model_that_is_worth_sharding():
    nano, *others = alone.caps()
    assert nano.buckets == 1 and [row.model for row in others] == ["tiny", "small", "medium", "large"]
    for row in others:
        assert row.buckets >= 15 and row.bytes_per_param < 11  # of stages 1 to 3: 12
        assert row.b_exchanged == pytest.approx(2 * row.b_native)
