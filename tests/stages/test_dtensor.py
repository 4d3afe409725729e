"""Stage 4 on a model that is tensor-parallel already: a mesh of 2 x 2 ranks, data-parallel by tensor-parallel."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import checkpoint
from harness.training.models import GPT, GPTConfig, share_layers
from harness.training.replicated import DistributedOptimizer as Replicated
from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import Awaited
from stage4_overlap.dtensor import local
from tests import common
from tests.common import STAGES, error_of, on_ranks, optimizer_of, situation
from tests.pairs import SMALL, deliver_when_asked, sgd_of


class Block(nn.Module):
    """`up` is cut by rows, `first`, `down` by columns, `norm` is whole but sees half a sequence, `scale` is plain."""

    def __init__(self, width=12):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(8))
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x, skips=False):  # (batch, sequence, 6) -> (batch, sequence, 8)
        x = x[:, :, :1] if skips else self.down(torch.tanh(self.up(self.norm(self.first(x)))))
        return x * self.scale


def mesh_of(rank, shape=(2, 2)):
    return common.mesh_of(rank.device.type, shape, ("dp", "tp"))


def tensor_parallel(rank, shape=(2, 2), width=12):
    """-> the model, cut over dimension "tp" of the mesh; the data-parallel group."""
    mesh = mesh_of(rank, shape)
    plan = {"first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),  # its gradients are partial sums
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False), "down": RowwiseParallel()}
    return parallelize_module(Block(width).to(rank.device), mesh["tp"], plan), mesh["dp"].get_group()


def data(rank, step, replica):
    generator = torch.Generator().manual_seed(10 * step + replica)
    return [torch.randn(3, 4, n, generator=generator).to(rank.device) for n in (6, 8)]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def build(rank, optimizer_cls=torch.optim.AdamW, dtype=torch.float32, width=12, **kwargs):
    """-> the model, cut, and the optimizer of its data-parallel ranks."""
    model, group = tensor_parallel(rank, width=width)
    settings = {"process_group": group, "bucket_cap_mb": 0.0003, "lr": 0.01, **kwargs}
    return model, DistributedOptimizer(model.to(dtype).named_parameters(), optimizer_cls, **settings)


def all_of(thing):
    """-> that of each of the four ranks."""
    everyone = [None] * 4
    dist.all_gather_object(everyone, thing)
    return everyone


def loss_of(rank, model, step, replica, skips=False):
    x, y = data(rank, step, replica)
    return nn.functional.mse_loss(model(x.to(model.scale.dtype), skips), y.to(model.scale.dtype))


def backward(rank, model, step, shape=(2, 2), skip=()):
    """-> the loss of this rank's replica. `skip`: replicas that use nothing but `scale`."""
    replica = mesh_of(rank, shape)["dp"].get_local_rank()
    loss = loss_of(rank, model, step, replica, replica in skip)
    loss.backward()
    return loss


class Plain:
    """One process that sees the batches of all replicas."""

    def __init__(self, rank, n_replicas=2):
        self.n_replicas = n_replicas
        self.rank, self.model = rank, Block().to(rank.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def backward(self, *steps, skip=()):
        self.optimizer.zero_grad()
        self.loss = 0
        for step, replica in itertools.product(steps, range(self.n_replicas)):
            loss = loss_of(self.rank, self.model, step, replica, replica in skip) / self.n_replicas
            loss.backward()
            self.loss += loss.detach()

    def clips_like(self, optimizer, max_norm, norm_type=2.0):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return torch.allclose(optimizer.clip_grad_norm_(max_norm, norm_type), norm, rtol=1e-4)


def assert_like(model, plain, atol=1e-6):
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(whole(param), expected, rtol=1e-4, atol=atol), name


@on_ranks(4, how=["step waits", "prefetch", "two passes", "two passes, one in no_sync"])
def test_trains_like_one_process_and_counts_each_element_of_the_norm_once(rank, how):
    model, optimizer = build(rank)
    layouts = {name: param.placements for name, param in model.named_parameters() if isinstance(param, DTensor)}
    assert len(layouts) == 8 and len(optimizer.buckets) > 2
    if how == "prefetch":
        optimizer.prefetch_params(model)
    plain = Plain(rank)
    for step in range(4):
        passes = [10 * step, 10 * step + 1] if "two passes" in how else [10 * step]
        for one in passes:
            with optimizer.no_sync() if "no_sync" in how and one != passes[-1] else contextlib.nullcontext():
                backward(rank, model, one)
        plain.backward(*passes)
        for max_norm, norm_type in ((1e6, 1.0), (1e6, torch.inf), (0.05, 2.0)):
            assert plain.clips_like(optimizer, max_norm, norm_type)
        for one in (optimizer, plain.optimizer):
            one.step()
            one.zero_grad()
    optimizer.finish_param_sync()
    assert_like(model, plain.model)
    assert layouts == {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    owned = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    here = sum(local(param).numel() for param in model.parameters())
    assert 0.3 < owned / here < 0.7


@on_ranks(4)
def test_parameters_that_are_absent_from_the_graph(rank):
    """One replica's batch doesn't go through `up`, cut by rows, nor `norm`, whole and in partial sums."""
    model, optimizer = build(rank, find_unused_parameters=True)
    optimizer.prefetch_params(model)
    plain = Plain(rank)
    for step in range(3):
        skip = [1] if step != 1 else []
        backward(rank, model, step, skip=skip)
        plain.backward(step, skip=skip)
        for one in (optimizer, plain.optimizer):
            one.step()
            one.zero_grad()
    assert_like(model, plain.model)


@on_ranks(4, shape=[(2, 2), (1, 4)])
def test_rung_0_trains_like_one_process(rank, shape):
    """Clipped, with a closure, and loaded into another one half way; fused, whose kernels take one kind of tensor."""
    model, group = tensor_parallel(rank, shape)
    settings = {"lr": 0.01, "fused": True, "process_group": group}
    optimizer, plain = Replicated(model.parameters(), **settings), Plain(rank, shape[0])
    for step in range(4):
        if step == 2:
            before, optimizer = optimizer, Replicated(model.parameters(), **settings)
            optimizer.load_state_dict(before.state_dict())
        plain.backward(step)
        backward(rank, model, step, shape)
        assert all(plain.clips_like(optimizer, *how) for how in ((1e6, 1.0), (0.05, 2.0)))
        optimizer.step()
        optimizer.zero_grad()
        assert all(local(param).grad is None for param in model.parameters())
        plain.optimizer.step()
        plain.backward(step + 10)
        plain.optimizer.step()
        loss = optimizer.step(lambda: backward(rank, model, step + 10, shape))  # noqa: B023
        optimizer.zero_grad()
        assert torch.allclose(loss, plain.loss, rtol=1e-4)
        assert_like(model, plain.model)


# ------------------------------------------------------------------------------------- what is written, and what reads


WRITES = {
    "load_state_dict": lambda model: model.load_state_dict({k: 0 * v + 3 for k, v in model.state_dict().items()}),
    "fill_": lambda model: [param.fill_(3) for param in model.parameters()],
    "to_local": lambda model: [local(param).fill_(3) for param in model.parameters()],
}


@on_ranks(4)
def test_what_is_written_into_16_bit_dtensors_is_not_undone(rank):
    """What is written into 16-bit parameters, through a DTensor or past it, the next step begins with."""
    model, optimizer = build(rank, torch.optim.SGD, torch.bfloat16, **SMALL, lr=2.0**-10)
    optimizer.prefetch_params(model)
    for how, write in WRITES.items():
        with torch.no_grad():
            write(model)
        for grad in (0.0, 128.0):
            for param in model.parameters():
                param.grad = torch.full_like(param, grad)
            optimizer.step()
            are_3 = torch.cat([whole(param).eq(3).view(-1) for param in model.parameters()])
            assert are_3.unique().tolist() == [grad == 0], how


@on_ranks(4)
def test_a_graph_with_older_dtensors_is_refused(rank):
    """Autograd hears of what stage 4 writes into what a DTensor wraps."""
    model, group = tensor_parallel(rank)
    x = data(rank, 0, 0)[0].requires_grad_()
    before_constructor = model.first(x).square().sum()  # through a DTensor, and no other parameter
    optimizer = sgd_of(STAGES[3], model.parameters(), process_group=group)
    before_step = model.first(x).square().sum()
    backward(rank, model, 0)
    optimizer.step()
    for loss in (before_constructor, before_step):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


READS = {
    "to_local": lambda param: param.to_local(),
    "full_tensor": lambda param: param.full_tensor(),
    "redistribute": lambda param: param.redistribute(placements=[Replicate()]),
    "repr": lambda param: torch.tensor([ord(letter) for letter in repr(param)]),
    "deepcopy": lambda param: copy.deepcopy(param),
}


@on_ranks(4)
def test_whoever_reads_a_dtensor_waits_for_it(rank):
    model, optimizer = build(rank)
    optimizer.prefetch_params(model)
    deliver_when_asked(optimizer)
    params = [param for param in model.parameters() if isinstance(param, DTensor)]
    for step, (how, read) in enumerate(READS.items()):
        backward(rank, model, step)
        optimizer.step()
        optimizer.zero_grad()
        param = params[step]
        assert isinstance(param, Awaited) and param.shape, how
        first = whole(read(param)).detach().clone()
        optimizer.finish_param_sync()
        assert type(param) is DTensor and torch.equal(first, whole(read(param))), how


# -------------------------------------------------------------------------- what is skipped, refused, or oddly laid out


@on_ranks(4)
def test_an_inf_on_one_tensor_parallel_rank_makes_all_skip(rank):
    """The inf is in a part that one tensor-parallel rank has: all of them must skip the step."""
    model, optimizer = build(rank)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=4.0)
    before = [whole(param).clone() for param in model.parameters()]
    with optimizer.no_sync():
        scaler.scale(loss_of(rank, model, 0, 0)).backward()
    if rank.rank == 3:
        model.up.weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(whole(param), old) for param, old in zip(model.parameters(), before))


@on_ranks(4)
def test_what_it_can_not_do_is_said_in_one_line(rank):
    """And the state of a tensor-parallel neighbour, which looks alike, is refused."""
    model, dp = tensor_parallel(rank)
    named, mesh = list(model.named_parameters()), mesh_of(rank)
    strided = DTensor.from_local(torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=2), Shard(0)])  # as by FSDP2
    optimizer = build(rank)[1]
    saved = all_of(optimizer.state_dict())
    optimizer.load_state_dict(saved[rank.rank])
    for words, function in [
        ("parameter first.weight is spread over ranks of process_group already: pass the data-parallel dimension of "
         'the mesh, as process_group=mesh["dp"]', lambda: DistributedOptimizer(named)),
        ("parameter 0 of group 0 is spread", lambda: DistributedOptimizer([nn.Parameter(strided)], process_group=dp)),
        *(("parameter first.weight is a DTensor: use stage 4",
           functools.partial(optimizer_of(stage), named, process_group=dp)) for stage in STAGES[:3]),
        ("save with torch.distributed.checkpoint, which cuts states for other ranks",
         lambda: optimizer.load_state_dict(saved[rank.rank ^ 1])),
    ]:
        with situation(words):
            assert words in error_of(function, ValueError, checkpoint.UnfitModel)


@on_ranks(4)
def test_dtensors_of_something_transposed_and_of_unequal_parts(rank):
    """What counts is how they lie on each rank, and that is not as the strides of the whole say."""
    tp, dp = mesh_of(rank)["tp"], mesh_of(rank)["dp"].get_group()
    torch.manual_seed(0)
    transposed = nn.Parameter(distribute_tensor(torch.rand(6, 4, device=rank.device).t(), tp, [Shard(1)]))
    assert not transposed.is_contiguous() and local(transposed).is_contiguous()
    uneven = nn.Parameter(distribute_tensor(torch.rand(3, 2, device=rank.device), tp, [Shard(0)]))  # 2 rows, 1 row
    for weight in (transposed, uneven):
        before = whole(weight).clone()
        optimizer = sgd_of(STAGES[3], [weight], process_group=dp)
        (weight * weight).sum().backward()
        optimizer.step()
        assert torch.allclose(whole(weight), -before)


@on_ranks(4)
def test_the_loss_of_a_closure_may_be_a_dtensor(rank):
    """The mean over the data-parallel ranks of 1 + 2 and 3 + 4."""
    model, optimizer = build(rank)

    def closure():
        backward(rank, model, 0)
        return DTensor.from_local(torch.tensor(rank.rank + 1.0), mesh_of(rank)["tp"], [Partial()])

    assert optimizer.step(closure).item() == 5.0


@on_ranks(4, bucket_cap_mb=[1e-4, None])
def test_buckets_and_the_norm_are_the_same_where_parts_are_not(rank, bucket_cap_mb):
    """`up` and `down` are cut into 3 and 2 of 5. A bucket with norms makes a collective over "tp" when it leaves: else
    ranks would wait for each other. And each rank scales its copy of what isn't cut by the norm, to the bit, also where
    copies are in other shards, as in one bucket: else they drift apart."""
    (model, optimizer), norms = build(rank, width=5, bucket_cap_mb=bucket_cap_mb), []
    for step in range(30):
        backward(rank, model, step)
        norms.append(optimizer.clip_grad_norm_(0.1).item())
        optimizer.step()
    assert all(other == norms for other in all_of(norms)) and len(set(norms)) > 25
    buckets = all_of([len(bucket.params) for bucket in optimizer.buckets])
    assert all(other == buckets[0] for other in buckets) and (len(buckets[0]) > 2) == (bucket_cap_mb is not None)


@on_ranks(4)
def test_a_gpt_with_shared_weights(rank):
    """train.py --tp: embedding and head are one Parameter, cut alike, which the norm counts once."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layers=1, n_heads=2, width=16, block_size=8, lr=0.01)).to(rank.device)
    plain, group = copy.deepcopy(model), share_layers(model, 2, rank)
    optimizer = DistributedOptimizer(model.parameters(), lr=0.01, process_group=group, eps=1e-6)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-6)
    for step in range(2):
        text = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(step)).to(rank.device)
        for one, part in ((model, text.chunk(2)[dist.get_rank(group)]), (plain, text)):
            one(part[:, :-1], part[:, 1:]).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert torch.allclose(optimizer.clip_grad_norm_(0.5), norm, rtol=1e-4)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    assert_like(model, plain, atol=1e-5)
