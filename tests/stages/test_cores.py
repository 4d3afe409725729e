"""The cores: each stage's idea, alone, trains what is well-behaved, on 2 and 3 ranks.

What a core leaves out, its guard adds: the other tests are about both together. With `--stage mine` the tests that take
any stage run on a core of yours.
"""

import importlib
import inspect

import pytest
import torch
from torch import nn

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory
from stage3_gradbuffer.buffer import Holds
from stage4_overlap.buffer import bucket_layout
from tests.common import OPTIMIZERS, Net, on_ranks, one_rank_of, optimizer_of
from tests.pairs import SMALL, UNFUSED, Pair, assert_same
from tests.stages.test_contract import two_groups as by_dimension


def core_of(stage):
    """Return the ShardedOptimizer of a stage, or of a learner's package: `--stage mine` or `--stage mine.optimizer`."""
    module = importlib.import_module(stage)
    if not hasattr(module, "ShardedOptimizer"):
        module = importlib.import_module(f"{stage}.optimizer")
    return module.ShardedOptimizer


def all_trained(seed):
    """Return a model without frozen parameters, which a core doesn't take."""
    return Net(seed).requires_grad_(True)


def equals_replicated(rank, stage, name, groups, prefetch, micro_batches):
    """Train a core for four steps, beside one process that has all data.

    The learning rate falls by a tenth in each step: a core that doesn't pass on a new rate would be seen.
    """
    optimizer_cls, kwargs = OPTIMIZERS[name]
    own = {}
    if "bucket_cap_mb" in inspect.signature(core_of(stage)).parameters:
        own["bucket_cap_mb"] = 2e-4  # some 50 elements: there are several buckets
    pair = Pair(rank, stage, optimizer_cls, groups, net=all_trained, own=own, prefetch=prefetch, of=core_of, **kwargs,
                **UNFUSED)
    assert_same(*pair.models, exact=True)  # the constructor has broadcast rank 0's parameters
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in pair.optimizers]
    for step in range(4):
        first_batch = step * micro_batches
        pair.backward(*range(first_batch, first_batch + micro_batches))
        pair.step()
        for schedule in schedules:
            schedule.step()
    if prefetch:
        assert any(bucket.param_sync for bucket in pair.optimizer.buckets)  # parameters are in flight
        pair.optimizer.finish_param_sync()
    pair.assert_same(is_exact=micro_batches == 1)


@pytest.mark.parametrize("groups, name, micro_batches", [(by_dimension, "AdamW", 1), (nn.Module.parameters, "SGD", 3)])
def test_a_core_equals_replicated_training(run, stage, name, groups, micro_batches):
    run(equals_replicated, stage, name, groups, False, micro_batches)


def test_prefetch_in_the_core(run):
    run(equals_replicated, STAGE_4, "AdamW", nn.Module.parameters, True, 1)


# ------------------------------------------------------------------------------------------- what one stage alone does


@pytest.mark.parametrize("stage", [STAGE_1, STAGE_2])
@on_ranks(2)
def test_the_largest_parameter_goes_first_to_the_rank_that_owns_least(rank, stage):
    params = [nn.Parameter(torch.zeros(numel)) for numel in (11, 35, 12)]
    numels = [[param.numel() for param in shard] for shard in core_of(stage)(params).shards]
    assert numels == [[35], [12, 11]]


@on_ranks(2)
def test_the_buffer_of_the_core_holds_five_things_in_turn(rank):
    """Note what the buffer holds at first, after backward(), and after each method that a step calls."""
    weight = nn.Parameter(torch.arange(21.0))
    optimizer = core_of(STAGE_3)([weight], torch.optim.SGD, lr=1.0)
    (buffer,) = optimizer.buffers
    address = buffer.flat.data_ptr()
    seen = [buffer.holds.name]
    weight.sum().backward()
    seen.append(buffer.holds.name)

    def noting(method):
        def call():
            method()
            seen.append(buffer.holds.name)
        return call

    for name in ("reduce_scatter_grads", "take_main_params", "all_gather_params", "zero"):
        setattr(buffer, name, noting(getattr(buffer, name)))
    optimizer.step()
    assert weight.grad.data_ptr() == buffer.flat.data_ptr() == address
    assert weight.tolist() == [value - 1 for value in range(21)]
    due = [*Holds.__members__, "ZEROS"]
    assert seen == due, f"{seen} == {due}"


@pytest.mark.parametrize("dtype, grad_dtype", [(torch.float32, None), (torch.bfloat16, None),
                                               (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("of", [core_of, optimizer_of], ids=["core", "guard"])
def test_a_step_of_the_core_allocates_nothing_after_the_first(dtype, grad_dtype, of):
    """Count every byte, without messages, because gloo's own reduce-scatter makes a copy."""
    allocated = []  # bytes, in each step
    with one_rank_of(2), Memory("cpu") as memory:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
        optimizer = of(STAGE_3)(model.parameters(), torch.optim.AdamW, grad_dtype=grad_dtype, fused=True)
        for _ in range(3):
            model(torch.ones(2, 64, dtype=dtype)).sum().backward()
            memory.reset_peak()
            before = memory.live
            optimizer.step()
            allocated.append(memory.peak - before)
    assert allocated[0] > 0  # the moments
    assert allocated[1:] == [0, 0]


@on_ranks
def test_buckets_of_the_core_leave_in_order_two_at_a_time_and_release_gradients(rank):
    """Compute gradients of six layers, a bucket each, in another order on each rank: buckets leave in the same one."""
    layers = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(6))
    travelling = []  # how many buckets travel whenever a gradient is ready, before the optimizer's hook
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(lambda _: travelling.append(len(optimizer.travelling)))
    optimizer = core_of(STAGE_4)(layers.parameters(), torch.optim.SGD, lr=1.0, **SMALL)
    send_grads = optimizer.send_grads
    left = []  # numbers of buckets

    def noting_send_grads(bucket):
        left.append(optimizer.buckets.index(bucket))
        send_grads(bucket)

    optimizer.send_grads = noting_send_grads
    before = [layer.weight.detach().clone() for layer in layers]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(rank.number)).tolist()
    loss = sum(layers[i](torch.ones(2, 7)).sum() * (i + 1) for i in order)
    loss.backward()
    assert left == list(range(6)), f"buckets left as {left}"
    assert max(travelling) <= 2
    assert all(layer.weight.grad is None for layer in layers)
    optimizer.step()
    for i, layer in enumerate(layers):
        torch.testing.assert_close(layer.weight.detach(), before[i] - 2 * (i + 1))


MESSAGES = {  # numels of fp32 parameters, a bucket each -> numels of messages of gradients, and of parameters
    (32, 64, 96, 128): ([64, 48, 32, 16], [16, 16, 32, 32, 48, 48, 64, 64]),
    (3 * 2**18,): ([2**18, 2**17], [2**18, 2**18, 2**17, 2**17]),
}


@on_ranks(2, numels=MESSAGES)
def test_parameters_of_stage_4_come_back_in_the_order_of_the_forward_pass(rank, numels):
    """What is read first leaves first: each of 2 ranks has half of a parameter. A message has a MiB at most."""
    params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    optimizer = core_of(STAGE_4)(params, torch.optim.SGD, lr=1.0, **SMALL)
    with Ledger() as ledger:
        sum(param.sum() for param in params).backward()
        optimizer.step()
    sent, broadcast = ([entry.size // 4 for entry in ledger.entries if entry.kind == kind]
                       for kind in ("send", "broadcast"))
    assert (sent, broadcast) == MESSAGES[numels]


@on_ranks(2)
def test_no_parameter_of_stage_4_is_under_way_when_it_is_stepped(rank):
    """Prefetch parameters that no forward pass reads. The next step must wait: it changes what is being sent."""
    params = nn.ParameterList(nn.Parameter(torch.zeros(40)) for _ in range(4))
    optimizer = core_of(STAGE_4)(params, torch.optim.SGD, lr=1.0, **SMALL)
    optimizer.prefetch_params(params)
    in_flight = []  # how many buckets are in flight whenever the inner optimizer steps

    def n_in_flight():
        return sum(bucket.param_sync is not None for bucket in optimizer.buckets)

    optimizer.optimizer.register_step_pre_hook(lambda *_: in_flight.append(n_in_flight()))
    for _ in range(3):
        sum(param.sum() for param in params).backward()
        optimizer.step()
        assert n_in_flight() == 4
    assert in_flight == [0, 0, 0]


def test_buckets_hold_whole_parameters_of_a_dtype_in_reverse_order_and_are_closed_at_the_cap():
    """A bucket is closed at 4 bytes. Parameters have a byte, except that the last one alone exceeds the cap."""
    nbytes = [1] * 11 + [9]
    dtypes = ["bf16", "f32"] * 6
    assert bucket_layout(nbytes, dtypes, 4) == [[11], [10, 8, 6, 4], [9, 7, 5, 3], [2, 0], [1]]
