"""Stage 4 on a model that is tensor-parallel already: a mesh of 2 x 2 ranks, data-parallel by tensor-parallel."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import Awaited
from stage4_overlap.dtensor import local
from tests import common
from tests.common import STAGES, error_of, no_sync_if, on_ranks, optimizer_of, situation
from tests.pairs import SMALL, deliver_when_asked


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


def backward(rank, model, step, skip=()):
    """Run the backward pass of this rank's replica. `skip`: replicas that use nothing but `scale`."""
    replica = mesh_of(rank)["dp"].get_local_rank()
    loss_of(rank, model, step, replica, replica in skip).backward()


class Plain:
    """One process that sees the batches of both replicas."""

    def __init__(self, rank):
        self.rank, self.model = rank, Block().to(rank.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def backward(self, *steps, skip=()):
        for step, replica in itertools.product(steps, range(2)):
            (loss_of(self.rank, self.model, step, replica, replica in skip) / 2).backward()

    def clips_like(self, optimizer, max_norm, norm_type=2.0):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return torch.allclose(optimizer.clip_grad_norm_(max_norm, norm_type), norm, rtol=1e-4)


def assert_like(model, plain, atol=1e-6):
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(whole(param), expected, rtol=1e-4, atol=atol), name


@on_ranks(4, how=["step waits", "prefetch", "two passes", "two passes, one in no_sync", "unused"])
def test_trains_like_one_process_and_counts_each_element_of_the_norm_once(rank, how):
    """Train four steps. "unused": the batch of one replica uses neither what is cut nor what is whole, but `scale`."""
    model, optimizer = build(rank, find_unused_parameters=how == "unused")
    layouts = {name: param.placements for name, param in model.named_parameters() if isinstance(param, DTensor)}
    assert len(layouts) == 8 and len(optimizer.buckets) > 2
    if how in ("prefetch", "unused"):
        optimizer.prefetch_params(model)
    plain = Plain(rank)
    for step in range(4):
        passes = [10 * step, 10 * step + 1] if "two passes" in how else [10 * step]
        skip = [1] if how == "unused" and step != 1 else []
        for number in passes:
            with no_sync_if(optimizer, "no_sync" in how and number != passes[-1]):
                backward(rank, model, number, skip)
        plain.backward(*passes, skip=skip)
        for max_norm, norm_type in ((1e6, 1.0), (1e6, torch.inf), (0.05, 2.0)):
            assert plain.clips_like(optimizer, max_norm, norm_type)
        for one in (optimizer, plain.optimizer):
            one.step()
            one.zero_grad()
    optimizer.finish_param_sync()
    assert_like(model, plain.model)
    assert layouts == {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    numel_owned = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    numel_here = sum(local(param).numel() for param in model.parameters())
    assert 0.3 < numel_owned / numel_here < 0.7


# ------------------------------------------------------------------------------------- what is written, and what reads


@on_ranks(4)
def test_what_is_written_into_16_bit_dtensors_is_not_undone(rank):
    """Write 3 into all parameters, past the DTensors: the next step begins with that."""
    model, optimizer = build(rank, torch.optim.SGD, torch.bfloat16, **SMALL, lr=2.0**-10)
    optimizer.prefetch_params(model)
    with torch.no_grad():
        for param in model.parameters():
            local(param).fill_(3)
    for grad in (0.0, 128.0):
        for param in model.parameters():
            param.grad = torch.full_like(param, grad)
        optimizer.step()
        are_3 = torch.cat([whole(param).eq(3).view(-1) for param in model.parameters()])
        assert are_3.unique().tolist() == [grad == 0]


@on_ranks(4)
def test_a_graph_with_older_dtensors_is_refused(rank):
    """Step after a forward pass: its backward pass is an error, because stage 4 tells autograd what it has written."""
    model, optimizer = build(rank)
    x = data(rank, 0, 0)[0].requires_grad_()
    older = model.first(x).square().sum()  # through a DTensor, and no other parameter
    backward(rank, model, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.backward()


READS = {
    "to_local": lambda param: param.to_local(),
    "full_tensor": lambda param: param.full_tensor(),
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
    """Put an inf into a part that one tensor-parallel rank has: no rank steps."""
    model, optimizer = build(rank)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=4.0)
    before = [whole(param).clone() for param in model.parameters()]
    with optimizer.no_sync():
        scaler.scale(loss_of(rank, model, 0, 0)).backward()
    if rank.number == 3:
        model.up.weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, map(whole, model.parameters()), before))


@on_ranks(4)
def test_what_it_can_not_do_is_said_in_one_line(rank):
    """Refuse a wrong group, DTensors as FSDP2 cuts them, other stages, and the state of a tensor-parallel neighbour."""
    model, dp = tensor_parallel(rank)
    named = list(model.named_parameters())
    as_by_fsdp = nn.Parameter(
        DTensor.from_local(torch.ones(2, 2), mesh_of(rank), [_StridedShard(0, split_factor=2), Shard(0)]))
    optimizer = build(rank)[1]
    of_neighbour = all_of(optimizer.state_dict())[rank.number ^ 1]
    for words, function in [
        ("parameter first.weight is spread over ranks of process_group already: pass the data-parallel dimension of "
         'the mesh, as process_group=mesh["dp"]', lambda: DistributedOptimizer(named)),
        ("parameter 0 of group 0 is spread", lambda: DistributedOptimizer([as_by_fsdp], process_group=dp)),
        *(("parameter first.weight is a DTensor: use stage 4",
           functools.partial(optimizer_of(stage), named, process_group=dp)) for stage in STAGES[:3]),
        ("save with torch.distributed.checkpoint, which cuts states for other ranks",
         lambda: optimizer.load_state_dict(of_neighbour)),
    ]:
        with situation(words):
            assert words in error_of(function, ValueError)


@on_ranks(4, bucket_cap_mb=[1e-4, None])
def test_buckets_and_the_norm_are_the_same_where_parts_are_not(rank, bucket_cap_mb):
    """Cut `up` and `down` into 3 and 2 of 5. Ranks have the same buckets, or they would wait for each other; and the
    same norms to the bit, or their copies of what isn't cut would drift apart."""
    model, optimizer = build(rank, width=5, bucket_cap_mb=bucket_cap_mb)
    norms = []
    for step in range(20):
        backward(rank, model, step)
        norms.append(optimizer.clip_grad_norm_(0.1).item())
        optimizer.step()
    n_params = [len(bucket.params) for bucket in optimizer.buckets]
    assert all_of((norms, n_params)) == [(norms, n_params)] * 4
    assert len(set(norms)) > 15 and (len(n_params) > 2) == (bucket_cap_mb is not None)


class TiedModel(nn.Module):
    """An embedding and a head that share one Parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):  # (batch, sequence) -> (batch, sequence, 16)
        return self.head(self.embedding(tokens))


@on_ranks(4)
def test_a_weight_of_embedding_and_head_is_trained_and_counts_once_in_the_norm(rank):
    """Cut both modules alike, and tie the weights again, because parallelize_module makes a DTensor for each."""
    mesh = mesh_of(rank)
    group = mesh["dp"].get_group()
    plain = TiedModel().to(rank.device)
    model = parallelize_module(TiedModel().to(rank.device), mesh["tp"], {
        "embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())})
    model.head.weight = model.embedding.weight
    optimizer = DistributedOptimizer(model.parameters(), lr=0.01, process_group=group, eps=1e-6)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-6)
    for step in range(2):
        text = torch.randint(16, (4, 9), generator=torch.Generator().manual_seed(step)).to(rank.device)
        own_text = text.chunk(2)[dist.get_rank(group)]
        for trained, tokens in ((model, own_text), (plain, text)):
            logits = trained(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert torch.allclose(optimizer.clip_grad_norm_(0.5), norm, rtol=1e-4)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    assert_like(model, plain, atol=1e-5)
