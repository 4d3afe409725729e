"""Stage 4 on a model that is tensor-parallel already: a mesh of 2 x 2 ranks, data-parallel by tensor-parallel.

Two replicas of the model train on different batches. Each replica is cut over two ranks. That `train.py --tp` has the
losses of DDP, with a shared embedding and after a stop, is in tests/harness/test_train.py.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from harness import STAGE_3
from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import Awaited
from stage4_overlap.dtensor import local
from tests import common
from tests.common import error_of, no_sync_if, on_ranks, optimizer_of
from tests.pairs import SMALL, deliver_when_asked


class Block(nn.Module):
    """`up` is cut by rows, `first`, `down` by columns, `norm` is whole but sees half a sequence, `scale` is plain."""

    def __init__(self, width=12):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(8))
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)

    def forward(self, x, skips=False):  # (batch, sequence, 6) -> (batch, sequence, 8)
        if skips:
            return x[:, :, :1] * self.scale
        return self.down(torch.tanh(self.up(self.norm(self.first(x))))) * self.scale


def mesh_of(rank, shape=(2, 2)):
    return common.mesh_of(rank.device.type, shape, ("dp", "tp"))


def tensor_parallel(rank, shape=(2, 2), width=12):
    """Return the model, cut over dimension "tp" of the mesh, and the data-parallel group."""
    mesh = mesh_of(rank, shape)
    plan = {"first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),  # its gradients are partial sums
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False), "down": RowwiseParallel()}
    return parallelize_module(Block(width).to(rank.device), mesh["tp"], plan), mesh["dp"].get_group()


def build(rank, optimizer_cls=torch.optim.AdamW, dtype=torch.float32, width=12, **kwargs):
    """Return the model, cut, and the optimizer of its data-parallel ranks."""
    model, group = tensor_parallel(rank, width=width)
    settings = {"process_group": group, "bucket_cap_mb": 0.0003, "lr": 0.01, **kwargs}
    return model, DistributedOptimizer(model.to(dtype).named_parameters(), optimizer_cls, **settings)


def loss_of(model, step, replica, skips=False):
    """Return the loss of a replica's batch. `skips`: use nothing but `scale`."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, y = [torch.randn(3, 4, n, generator=generator).to(model.scale.device) for n in (6, 8)]
    return nn.functional.mse_loss(model(x, skips), y)


def own_replica(rank):
    return mesh_of(rank)["dp"].get_local_rank()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def of_all_ranks(value):
    """Return this value of each of the four ranks."""
    values = [None] * 4
    dist.all_gather_object(values, value)
    return values


@on_ranks(4, how=["step waits", "prefetch", "two passes", "two passes, one in no_sync", "unused"])
def test_trains_like_one_process_and_counts_each_element_of_the_norm_once(rank, how):
    """Train four steps. "unused": the batch of one replica uses neither what is cut nor what is whole, but `scale`."""
    model, optimizer = build(rank, find_unused_parameters=how == "unused")
    assert len(optimizer.buckets) > 2
    if how in ("prefetch", "unused"):
        optimizer.prefetch_params(model)
    plain = Block().to(rank.device)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(4):
        skipping_replica = 1 if how == "unused" and step != 1 else None
        numbers = [10 * step, 10 * step + 1] if "two passes" in how else [10 * step]
        for number in numbers:
            with no_sync_if(optimizer, "no_sync" in how and number != numbers[-1]):
                loss_of(model, number, own_replica(rank), own_replica(rank) == skipping_replica).backward()
            for replica in range(2):
                (loss_of(plain, number, replica, replica == skipping_replica) / 2).backward()
        for max_norm, norm_type in ((1e6, 1.0), (1e6, torch.inf), (0.05, 2.0)):
            norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            assert torch.allclose(optimizer.clip_grad_norm_(max_norm, norm_type), norm, rtol=1e-4)
        for each_optimizer in (optimizer, reference):
            each_optimizer.step()
            each_optimizer.zero_grad()
    optimizer.finish_param_sync()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach(), rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------- what is written, and what reads


@on_ranks(4)
def test_what_is_written_into_16_bit_dtensors_is_not_undone(rank):
    """Write 3 into all parameters, past the DTensors: the next step begins with that, and subtracts 2."""
    model, optimizer = build(rank, torch.optim.SGD, torch.bfloat16, **SMALL, lr=1.0)
    optimizer.prefetch_params(model)
    with torch.no_grad():
        for param in model.parameters():
            local(param).fill_(3)
    for param in model.parameters():
        param.grad = torch.full_like(param, 2)
    optimizer.step()
    assert all(whole(param).eq(1).all() for param in model.parameters())


@on_ranks(4)
def test_whoever_reads_a_dtensor_waits_for_it(rank):
    model, optimizer = build(rank)
    optimizer.prefetch_params(model)
    deliver_when_asked(optimizer)
    for step, method in enumerate(["to_local", "full_tensor"]):
        loss_of(model, step, own_replica(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        param = model.up.weight
        assert isinstance(param, Awaited)
        first = getattr(param, method)().detach().clone()
        optimizer.finish_param_sync()
        assert type(param) is DTensor and torch.equal(first, getattr(param, method)())


# -------------------------------------------------------------------------- what is skipped, refused, or oddly laid out


@on_ranks(4)
def test_an_inf_on_one_tensor_parallel_rank_makes_all_skip(rank):
    """Put an inf into a part that one tensor-parallel rank has: each rank lowers its scale, as after a skipped step."""
    model, optimizer = build(rank)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=4.0)
    with optimizer.no_sync():
        scaler.scale(loss_of(model, 0, 0)).backward()
    if rank.number == 3:
        model.up.weight.grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


@on_ranks(4)
def test_what_it_can_not_do_is_said_in_one_line(rank):
    """Stage 4 refuses a wrong group, and the state of a tensor-parallel neighbour. Stage 3 refuses DTensors."""
    model, optimizer = build(rank)
    named = list(model.named_parameters())
    of_neighbour = of_all_ranks(optimizer.state_dict())[rank.number ^ 1]
    error = error_of(lambda: DistributedOptimizer(named), ValueError)
    assert "parameter first.weight is spread over ranks of process_group already" in error
    error = error_of(lambda: optimizer_of(STAGE_3)(named), ValueError)
    assert "parameter first.weight is a DTensor: use stage 4" in error
    error = error_of(lambda: optimizer.load_state_dict(of_neighbour), ValueError)
    assert "save with torch.distributed.checkpoint, which cuts states for other ranks" in error


@on_ranks(4)
def test_buckets_and_the_norm_are_the_same_where_parts_are_not(rank):
    """Cut `up` and `down` into 3 and 2 of 5.

    With different buckets, ranks would wait for each other. If norms differed in the last bit, the ranks' copies of
    what isn't cut would drift apart.
    """
    model, optimizer = build(rank, width=5, bucket_cap_mb=1e-4)
    norms = []
    for step in range(20):
        loss_of(model, step, own_replica(rank)).backward()
        norms.append(optimizer.clip_grad_norm_(0.1).item())
        optimizer.step()
    n_params = [len(bucket.params) for bucket in optimizer.buckets]
    assert of_all_ranks((norms, n_params)) == [(norms, n_params)] * 4
    assert len(set(norms)) > 15 and len(n_params) > 2
