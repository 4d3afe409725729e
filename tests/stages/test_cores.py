"""The cores: each stage's idea, alone, trains what is well-behaved, and sends what its formula says. On 1 to 4 ranks.

What a core leaves out, its guard adds: the other tests are about both together. With `--stage mine` those that are
about no stage in particular run on a core of yours.
"""

import importlib
import inspect

import pytest
import torch
from torch import nn

from harness.measure.ledger import Ledger
from harness.measure.memory import Memory
from tests.common import OPTIMIZERS, STAGES, add, assert_same, batch, loss_of, one_rank_of

UNFUSED = {"foreach": False}
ONE, TWO, THREE, FOUR = STAGES


def core_of(stage):
    """The ShardedOptimizer of a stage, or of a learner's package: of `--stage mine`, `--stage mine.optimizer`."""
    module = importlib.import_module(stage)
    return getattr(module, "ShardedOptimizer", None) or importlib.import_module(f"{stage}.optimizer").ShardedOptimizer


def small_buckets(stage):
    """Arguments of the constructor of a core that has buckets: some 50 elements, several buckets."""
    return {"bucket_cap_mb": 2e-4} if "bucket_cap_mb" in inspect.signature(core_of(stage)).parameters else {}


class Tied(nn.Module):
    """Tied weights, a scalar, odd sizes: 215 elements. All are trained, and every batch uses all."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(7, 5, bias=False)
        self.up, self.down, self.tied = nn.Linear(5, 11), nn.Linear(11, 5), nn.Linear(5, 11)
        self.scale = nn.Parameter(torch.rand(()))
        self.head = nn.Linear(5, 7)
        self.tied.weight = self.up.weight

    def forward(self, x):  # (batch, 7) -> (batch, 7)
        x = self.embed(x)
        x = x + self.down(torch.tanh(self.up(x))) * self.scale
        return self.head(x + self.down(torch.tanh(self.tied(x))))


def by_dimension(model):
    """Matrices in one group; vectors and the scalar in another, without weight decay."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.03}]


class Replicated:
    """One process with the batches of all ranks."""

    def __init__(self, world_size, groups, optimizer_cls, kwargs):
        self.world_size, self.model = world_size, Tied(seed=0)
        self.optimizer = optimizer_cls(groups(self.model), **kwargs)

    def step(self, *steps):
        for step in steps:
            total = [None] * len(list(self.model.parameters()))
            for rank in range(self.world_size):
                grads = torch.autograd.grad(loss_of(self.model, *batch(step, rank)), list(self.model.parameters()))
                total = [add(before, grad / self.world_size) for before, grad in zip(total, grads)]
            for param, grad in zip(self.model.parameters(), total):
                param.grad = add(param.grad, grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def equals_replicated(rank, stage, name, groups, prefetch, micro_batches):
    """A constant schedule would hide that the rate isn't passed on: it falls by a tenth a step."""
    optimizer_cls, kwargs = OPTIMIZERS[name][0], {**OPTIMIZERS[name][1], **UNFUSED}
    model, reference = Tied(seed=rank.rank), Replicated(rank.world_size, groups, optimizer_cls, kwargs)
    optimizer = core_of(stage)(groups(model), optimizer_cls, **small_buckets(stage), **kwargs)
    if prefetch:
        optimizer.prefetch_params(model)
    else:
        assert_same(model, reference.model, exact=True)  # the constructor has broadcast those of rank 0
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (optimizer, reference.optimizer)]
    for step in range(4):
        steps = range(step * micro_batches, (step + 1) * micro_batches)
        for micro in steps:
            loss_of(model, *batch(micro, rank.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(*steps)
        for schedule in schedules:
            schedule.step()
    if prefetch:
        assert any(bucket.param_sync for bucket in optimizer.buckets)  # the last step's are still under way
        optimizer.finish_param_sync()
    assert_same(model, reference.model, exact=rank.world_size <= 2 and micro_batches == 1)


@pytest.mark.parametrize("groups", [nn.Module.parameters, by_dimension], ids=["one group", "two groups"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_core_equals_replicated_training(run, stage, name, groups):
    run(equals_replicated, stage, name, groups, prefetch=False, micro_batches=1)


def never_zeroed(rank, stage):
    """Two steps of SGD without zero_grad(): gradients add up, as in torch, but stages 3 and 4 use them up in a step."""
    weight = nn.Parameter(torch.zeros(40))
    optimizer = core_of(stage)([weight], torch.optim.SGD, lr=1.0)
    for _ in range(2):
        weight.sum().backward()
        optimizer.step()
    return weight[0].item()


def test_what_a_step_of_a_core_leaves_of_gradients(run, stage):
    """Either is right in a learner's core."""
    expected = {ONE: [-3.0], TWO: [-3.0], THREE: [-2.0], FOUR: [-2.0]}.get(stage, [-2.0, -3.0])
    (weight,) = set(run(never_zeroed, stage))
    assert weight in expected


def test_a_core_adds_up_micro_batches(run, stage):
    run(equals_replicated, stage, "AdamW", nn.Module.parameters, prefetch=False, micro_batches=3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_prefetch_in_the_core(run, micro_batches):
    run(equals_replicated, FOUR, "AdamW", nn.Module.parameters, prefetch=True, micro_batches=micro_batches)


def few(rank, stage, shapes):
    """The gradient of rank r is r + 1 everywhere: the mean is (d + 1) / 2."""
    params = [nn.Parameter(torch.full(shape, float(rank.rank))) for shape in shapes]
    optimizer = core_of(stage)(params, torch.optim.SGD, lr=1.0)
    for _ in range(2):
        (sum(param.sum() for param in params) * (rank.rank + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().flatten().tolist() for param in params]


@pytest.mark.parametrize("shapes", [[()], [(1,)], [(3,), (2, 1)], [(0,), (7,)]], ids=str)
def test_a_core_with_fewer_parameters_or_elements_than_ranks(run, stage, shapes, world_size):
    for params in run(few, stage, shapes):
        assert all(value == -(world_size + 1) for param in params for value in param)


def state_elements(rank, stage):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    optimizer = core_of(stage)(model.parameters(), lr=0.01)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    tensors = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    return sum(tensor.numel() for tensor in tensors if tensor.dim())


def test_the_state_of_a_core_is_spread(run, stage, world_size):
    counts, numel = run(state_elements, stage), 12 * (16 * 16 + 16)
    assert sum(counts) == 2 * numel
    assert max(counts) <= 2 * (numel / world_size + 16 * 16)  # 1/d, up to one matrix


def counted(rank, stage, dtype, grad_dtype):
    """-> collectives of a backward pass and a step, bytes that this rank sends, padded elements, number of buckets."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(dtype)
    kwargs = {FOUR: {"bucket_cap_mb": 0.01}, THREE: {"grad_dtype": grad_dtype}}.get(stage, {})
    optimizer = core_of(stage)(model.parameters(), lr=0.01, **kwargs)
    with Ledger() as ledger:
        model(torch.ones(2, 64, dtype=dtype)).sum().backward()
        optimizer.step()
    d, numel = rank.world_size, 8 * (64 * 64 + 64)
    if stage == TWO:
        numel = max(sum(param.numel() for param in shard) for shard in optimizer.shards) * d
    elif stage == THREE:
        numel = optimizer.buffers[0].flat.numel()
    elif stage == FOUR:
        numel = sum(bucket.numel for bucket in optimizer.buckets)
    n_buckets = len(getattr(optimizer, "buckets", []))
    return ledger.collectives, ledger.wire_bytes, numel, n_buckets


WIRES = [(stage, dtype, None) for stage in STAGES for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("stage, dtype, grad_dtype", [*WIRES, (THREE, torch.bfloat16, torch.float32)], ids=str)
def test_collectives_and_bytes_of_a_core_are_those_of_its_formula(run, stage, world_size, dtype, grad_dtype):
    collectives, wire_bytes, padded, n_buckets = run(counted, stage, dtype, grad_dtype)[0]
    d, numel, p, g = world_size, 8 * (64 * 64 + 64), dtype.itemsize, (grad_dtype or dtype).itemsize
    kinds = {  # gloo's reduce-scatter is an all-reduce underneath: the ledger counts it twice
        ONE: ({"all_reduce": 1, "broadcast": d}, 2 * g * numel + p * numel),
        TWO: ({"all_reduce": 1, "all_gather": 1}, 2 * g * numel + p * padded),
        THREE: ({"reduce_scatter": 1, "all_gather": 1}, 2 * g * padded + p * padded),
        FOUR: ({"send": n_buckets * (d - 1), "recv": n_buckets * (d - 1), "broadcast": d * n_buckets},
               g * padded + p * padded),
    }
    expected, n_bytes = kinds[stage]
    assert collectives == {kind: count for kind, count in expected.items() if count}
    assert wire_bytes == round(n_bytes * (d - 1) / d)
    assert padded <= numel * 1.25 and (stage != FOUR or n_buckets >= 4)


# ------------------------------------------------------------------------------------------- what one stage alone does


def five_states(rank):
    weight = nn.Parameter(torch.arange(21.0))
    optimizer = core_of(THREE)([weight], torch.optim.SGD, lr=1.0)
    buffer, seen = optimizer.buffers[0], []
    address = buffer.flat.data_ptr()
    seen.append(buffer.holds.name)
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
    return seen


def test_the_buffer_of_the_core_holds_five_things_in_turn(run):
    for seen in run(five_states):
        assert seen == ["ZEROS", "GRADS", "GRAD_SHARD", "PARAM_SHARD", "PARAMS", "ZEROS"]


@pytest.mark.parametrize("dtype, grad_dtype", [(torch.float32, None), (torch.bfloat16, None),
                                               (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("d", [1, 2, 64])
def test_a_step_of_the_core_allocates_nothing_after_the_first(d, dtype, grad_dtype):
    """Not a byte. As one of d ranks whose messages go nowhere: gloo's own reduce-scatter makes a copy."""
    with one_rank_of(d), Memory("cpu") as memory:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(dtype)
        optimizer = core_of(THREE)(model.parameters(), torch.optim.AdamW, grad_dtype=grad_dtype, fused=True)
        for step in range(3):
            model(torch.ones(2, 64, dtype=dtype)).sum().backward()
            memory.reset_peak()
            before = memory.live
            optimizer.step()
            more = memory.peak - before
            assert more == 0 if step else more > 0  # the first one makes the moments


def order_and_memory(rank):
    """Each rank calls the layers in another order; buckets leave in the same one, two at a time, and let go."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(6))
    travelling, left = [], []
    for layer in layers:  # before the optimizer's
        layer.weight.register_post_accumulate_grad_hook(lambda _: travelling.append(len(optimizer.travelling)))
    optimizer = core_of(FOUR)(layers.parameters(), torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    send_grads = optimizer.send_grads
    optimizer.send_grads = lambda bucket: (left.append(optimizer.buckets.index(bucket)), send_grads(bucket))
    before = [layer.weight.detach().clone() for layer in layers]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(rank.rank)).tolist()
    x = torch.ones(2, 7, requires_grad=True)
    outputs = {i: layers[i](x) * (i + 1) for i in order}
    sum(outputs[i].sum() for i in range(6)).backward()
    assert left == list(range(6)), f"buckets left as {left}"
    assert max(travelling) <= 2
    assert all(layer.weight.grad is None for layer in layers)
    optimizer.step()
    for i, (layer, old) in enumerate(zip(layers, before)):
        torch.testing.assert_close(layer.weight.detach(), old - 2 * (i + 1))


def test_buckets_of_the_core_leave_in_order_two_at_a_time_and_release_gradients(run):
    run(order_and_memory)
