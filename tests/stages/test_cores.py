"""The cores: each stage's idea, alone, trains what is well-behaved, on 2 and 3 ranks; and where an element lies.

What a core leaves out, its guard adds: the other tests are about both together. With `--stage mine` those that are
about no stage in particular run on a core of yours.
"""

import importlib
import inspect

import pytest
import torch
from torch import nn

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory
from stage3_gradbuffer.buffer import padded_numel, param_starts, ranges_in_shard
from stage4_overlap.buffer import bucket_layout
from tests.common import OPTIMIZERS, Net, on_ranks, one_rank_of, optimizer_of
from tests.pairs import UNFUSED, Pair, assert_same
from tests.stages.test_contract import moments_are_sharded, steps_by_hand
from tests.stages.test_contract import two_groups as by_dimension


def core_of(stage):
    """The ShardedOptimizer of a stage, or of a learner's package: of `--stage mine`, `--stage mine.optimizer`."""
    module = importlib.import_module(stage)
    return getattr(module, "ShardedOptimizer", None) or importlib.import_module(f"{stage}.optimizer").ShardedOptimizer


def all_trained(seed):
    """What every batch uses, the layer too that others freeze."""
    return Net(seed).requires_grad_(True)


def equals_replicated(rank, stage, name, groups, prefetch, micro_batches):
    """A constant schedule would hide that the rate isn't passed on: it falls by a tenth a step."""
    optimizer_cls, kwargs = OPTIMIZERS[name]
    has_buckets = "bucket_cap_mb" in inspect.signature(core_of(stage)).parameters
    pair = Pair(rank, stage, optimizer_cls, groups, net=all_trained, prefetch=prefetch, of=core_of,
                own={"bucket_cap_mb": 2e-4} if has_buckets else {}, **kwargs, **UNFUSED)  # some 50 elements: several
    if not prefetch:
        assert_same(*pair.models, exact=True)  # the constructor has broadcast those of rank 0
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in pair.optimizers]
    for step in range(4):
        pair.backward(*range(step * micro_batches, (step + 1) * micro_batches))
        pair.step()
        for schedule in schedules:
            schedule.step()
    if prefetch:
        assert any(bucket.param_sync for bucket in pair.optimizer.buckets)  # the last step's are still under way
        pair.optimizer.finish_param_sync()
    pair.assert_same(micro_batches == 1)


@pytest.mark.parametrize("groups, name, micro_batches", [
    (nn.Module.parameters, "AdamW", 1), (nn.Module.parameters, "AdamW", 3), (by_dimension, "AdamW", 1),
    (nn.Module.parameters, "SGD", 1), (by_dimension, "Adagrad", 1)])
def test_a_core_equals_replicated_training(run, stage, name, groups, micro_batches):
    run(equals_replicated, stage, name, groups, False, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_prefetch_in_the_core(run, micro_batches):
    run(equals_replicated, STAGE_4, "AdamW", nn.Module.parameters, True, micro_batches)


@on_ranks(2)
def test_what_a_step_of_a_core_leaves_of_gradients(rank, stage):
    """Step twice without zero_grad(): stages 3 and 4 use gradients up, and a learner's core may do so, too."""
    weight = nn.Parameter(torch.zeros(40))
    optimizer = core_of(stage)([weight], torch.optim.SGD, lr=1.0)
    for _ in range(2):
        weight.sum().backward()
        optimizer.step()
    assert weight[0] in {STAGE_1: [-3.0], STAGE_2: [-3.0], STAGE_3: [-2.0], STAGE_4: [-2.0]}.get(stage, [-2.0, -3.0])


@on_ranks(shapes=[[()], [(1,)], [(3,), (2, 1)], [(0,), (7,)]])
def test_a_core_with_fewer_parameters_or_elements_than_ranks(rank, stage, shapes):
    steps_by_hand(rank, core_of(stage), shapes)


@on_ranks
def test_the_state_of_a_core_is_spread(rank, stage):
    moments_are_sharded(rank, core_of(stage), lambda optimizer: optimizer.optimizer.state)


# ------------------------------------------------------------------------------------------- what one stage alone does


@pytest.mark.parametrize("stage", [STAGE_1, STAGE_2])
@on_ranks(2)
def test_the_largest_parameter_goes_first_to_the_rank_that_owns_least(rank, stage):
    params = [nn.Parameter(torch.zeros(numel)) for numel in (11, 35, 12)]
    assert [[len(param) for param in shard] for shard in core_of(stage)(params).shards] == [[35], [12, 11]]


@on_ranks(2)
def test_the_buffer_of_the_core_holds_five_things_in_turn(rank):
    weight = nn.Parameter(torch.arange(21.0))
    optimizer = core_of(STAGE_3)([weight], torch.optim.SGD, lr=1.0)
    buffer = optimizer.buffers[0]
    address, seen = buffer.flat.data_ptr(), [buffer.holds.name]
    weight.sum().backward()
    seen.append(buffer.holds.name)
    for name in ("reduce_scatter_grads", "take_main_params", "all_gather_params", "zero"):

        def watched(method=getattr(buffer, name)):
            method()
            seen.append(buffer.holds.name)

        setattr(buffer, name, watched)
    optimizer.step()
    assert weight.grad.data_ptr() == buffer.flat.data_ptr() == address
    assert weight.tolist() == [value - 1 for value in range(21)]
    due = ["ZEROS", "GRADS", "GRAD_SHARD", "PARAM_SHARD", "PARAMS", "ZEROS"]
    assert seen == due, f"{seen} == {due}"


@pytest.mark.parametrize("dtype, grad_dtype", [(torch.float32, None), (torch.bfloat16, None),
                                               (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("d", [2, 64])
@pytest.mark.parametrize("of", [core_of, optimizer_of], ids=["core", "guard"])
def test_a_step_of_the_core_allocates_nothing_after_the_first(d, dtype, grad_dtype, of):
    """Count every byte, without messages, because gloo's own reduce-scatter makes a copy."""
    with one_rank_of(d), Memory("cpu") as memory:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(dtype)
        optimizer = of(STAGE_3)(model.parameters(), torch.optim.AdamW, grad_dtype=grad_dtype, fused=True)
        for step in range(3):
            model(torch.ones(2, 64, dtype=dtype)).sum().backward()
            memory.reset_peak()
            before = memory.live
            optimizer.step()
            more = memory.peak - before
            assert more == 0 if step else more > 0  # the first one makes the moments


@on_ranks
def test_buckets_of_the_core_leave_in_order_two_at_a_time_and_release_gradients(rank):
    """Each rank calls the layers in another order; buckets leave in the same one, two at a time, and let go."""
    layers = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(6))
    travelling, left = [], []
    for layer in layers:  # before the optimizer's
        layer.weight.register_post_accumulate_grad_hook(lambda _: travelling.append(len(optimizer.travelling)))
    optimizer = core_of(STAGE_4)(layers.parameters(), torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    send_grads = optimizer.send_grads
    optimizer.send_grads = lambda bucket: (left.append(optimizer.buckets.index(bucket)), send_grads(bucket))
    before = [layer.weight.detach().clone() for layer in layers]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(rank.number)).tolist()
    outputs = {i: layers[i](torch.ones(2, 7)) * (i + 1) for i in order}
    sum(outputs[i].sum() for i in range(6)).backward()
    assert left == list(range(6)), f"buckets left as {left}"
    assert max(travelling) <= 2
    assert all(layer.weight.grad is None for layer in layers)
    optimizer.step()
    for i, (layer, old) in enumerate(zip(layers, before)):
        torch.testing.assert_close(layer.weight.detach(), old - 2 * (i + 1))


@on_ranks(2, numels=[[32, 64, 96, 128], [3 * 2**18]])
def test_parameters_of_stage_4_come_back_in_the_order_of_the_forward_pass(rank, numels):
    """What is read first leaves first: each of 2 ranks has half of a parameter. A message has a MiB at most."""
    params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    optimizer = core_of(STAGE_4)(params, torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    with Ledger() as ledger:
        sum(param.sum() for param in params).backward()
        optimizer.step()
    numels_of = {kind: [entry.size // 4 for entry in ledger.entries if entry.kind == kind]
                 for kind in ("send", "broadcast")}
    if len(numels) == 4:
        assert numels_of == {"send": [64, 48, 32, 16], "broadcast": [16, 16, 32, 32, 48, 48, 64, 64]}
    else:
        assert numels_of == {"send": [2**18, 2**17], "broadcast": [2**18, 2**18, 2**17, 2**17]}


@on_ranks(2)
def test_no_parameter_of_stage_4_is_under_way_when_it_is_stepped(rank):
    """Prefetched, and read by no forward pass since: the next step changes the memory that is sent from."""
    params = nn.ParameterList(nn.Parameter(torch.zeros(40)) for _ in range(4))
    optimizer = core_of(STAGE_4)(params, torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    optimizer.prefetch_params(params)

    def under_way():
        return sum(bucket.param_sync is not None for bucket in optimizer.buckets)

    in_step = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: in_step.append(under_way()))
    for _ in range(3):
        sum(param.sum() for param in params).backward()
        optimizer.step()
        assert under_way() == 4
    assert in_step == [0] * 3


# ------------------------------------------------------------------- which element belongs to whom: pure functions


@pytest.mark.parametrize("alignment, starts, shard_numel, ranges_of_shards", [
    (1, [0, 5, 7, 16], 4, [[(0, 0, 4, 0)], [(0, 4, 5, 0), (1, 0, 2, 1), (2, 0, 1, 3)], [(2, 1, 5, 0)], [(2, 5, 9, 0)]]),
    (4, [0, 8, 12, 24], 8, [[(0, 0, 5, 0)], [(1, 0, 2, 0), (2, 0, 4, 4)], [(2, 4, 9, 0)]])])
def test_where_parameters_begin_and_what_of_them_lies_in_a_shard(alignment, starts, shard_numel, ranges_of_shards):
    """Cut parameters of 5, 2 and 9 elements for 4 ranks; and for 3 ranks, where each begins at a multiple of 4.

    A range: a parameter, its first element, the one after its last, and where the range begins in the shard.
    """
    numels = [5, 2, 9]
    assert param_starts(numels, alignment) == starts
    for place, ranges in enumerate(ranges_of_shards):
        start = place * shard_numel
        assert ranges_in_shard(numels, starts, start, start + shard_numel) == ranges


@pytest.mark.parametrize("numel, n_ranks, alignment, expected", [
    (16, 4, 1, 16), (17, 4, 1, 20), (16, 4, 16, 64), (0, 3, 4, 0), (100, 3, 16, 144)])
def test_a_buffer_is_padded_to_equal_shards_of_whole_lines(numel, n_ranks, alignment, expected):
    assert padded_numel(numel, n_ranks, alignment) == expected


MIB = 2**20


@pytest.mark.parametrize("sizes, dtypes, expected", [  # in MiB, with a cap of 4
    ([1] * 11, ["f32"] * 11, [[10, 9, 8, 7], [6, 5, 4, 3], [2, 1, 0]]),
    ([1, 9, 1], ["f32"] * 3, [[2, 1], [0]]),  # one is larger than the cap
    ([1, 3, 4], ["f32"] * 3, [[2], [1, 0]]),
    ([2] * 6, ["bf16", "f32"] * 3, [[5, 3], [4, 2], [1], [0]])])
def test_buckets_hold_whole_parameters_of_a_dtype_in_reverse_order_and_are_closed_at_the_cap(sizes, dtypes, expected):
    assert bucket_layout([size * MIB for size in sizes], dtypes, 4 * MIB) == expected
