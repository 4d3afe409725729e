"""Checkpoints of a tensor-parallel model: a file knows no mesh, and loads on any, or in plain torch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import checkpoint
import stage4_overlap
from tests.checkpoint.compare import equal, weights
from tests.common import on_ranks
from tests.stages.test_dtensor import Block, data, local, mesh_of, whole


@pytest.fixture
def on(pools):
    """`on(n, function, *args)` runs it on n ranks -> what rank 0 returns."""
    return lambda n, function, *args: pools.run(n, function, *args)[0]


class Odd(Block):
    """11 isn't divided by any number of ranks; and there is what the optimizer doesn't have."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 11), nn.Linear(11, 8)
        self.register_buffer("seen", torch.arange(3.0))
        self.frozen = nn.Linear(3, 5, bias=False).requires_grad_(False)


PLAN = {"first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False), "down": RowwiseParallel(),
        "frozen": ColwiseParallel()}


def build(rank, shape, dtype=torch.float32, seed=0, process_group=None):
    """-> model, optimizer; on data-parallel x tensor-parallel ranks, or, with shape None, of plain torch."""
    torch.manual_seed(seed)
    model = Odd().to(rank.device, dtype)
    for param in model.parameters():  # of each seed others
        param.data += 0.01 * seed
    if shape:
        mesh = mesh_of(rank, shape)
        parallelize_module(model, mesh["tp"], PLAN)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if shape is None:
        return model, torch.optim.AdamW(trained, lr=0.01)
    groups = {"process_group": process_group or mesh["dp"].get_group(), "bucket_cap_mb": 0.0003, "lr": 0.01}
    return model, stage4_overlap.DistributedOptimizer(trained, torch.optim.AdamW, **groups)


def step(rank, model, optimizer, shape, number):
    """One on four replicas' data, however many ranks share them."""
    dtype = model.scale.dtype
    n = shape[0] if shape else 1
    place = rank.rank // shape[1] if shape else 0
    for replica in range(place * 4 // n, (place + 1) * 4 // n):
        x, y = data(rank, number, replica)
        (nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype)) * n / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def leg(rank, shape, dtype, before, after):
    """Loaded, or trained if there is nothing before, saved, and one more step -> what that makes of the parameters."""
    model, optimizer = build(rank, shape, dtype, seed=1 if before else 0)
    if before:
        assert checkpoint.load(before, model, optimizer) == {"step": 2}
    else:
        for number in range(2):
            step(rank, model, optimizer, shape, number)
    checkpoint.save(after, model, optimizer, {"step": 2}, asynchronous=before is None).result()
    step(rank, model, optimizer, shape, 9)
    return [whole(param).float() for param in model.parameters()]


def converted(folder):
    dcp_to_torch_save(folder, folder.with_name("one.pt"))
    return torch.load(folder.with_name("one.pt"), weights_only=True)


JOURNEY = [(4, (4, 1)), (2, (1, 2)), (1, None), (4, (1, 4))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_mesh_to_mesh_to_plain_torch_and_back(on, tmp_path, dtype):
    """What is in the files is the same to the bit all the way; the next step is, up to the order of sums."""
    folders = [tmp_path / f"{number}" / "saved" for number in range(len(JOURNEY) + 1)]
    expected = on(4, leg, (2, 2), dtype, None, folders[0])
    first = converted(folders[0])
    assert first["model"]["up.weight"].shape == (11, 8) and len(first["optimizer"]["state"]) == 9
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 2e-3}
    for number, (n, shape) in enumerate(JOURNEY if dtype is torch.float32 else JOURNEY[:3]):
        found = on(n, leg, shape, dtype, folders[number], folders[number + 1])
        torch.testing.assert_close(found, expected, **tolerance, msg=f"a step on {shape}")
        again = converted(folders[number + 1])
        if shape is None and dtype is not torch.float32:  # plain torch steps the 16 bits, and has them alone
            return
        assert equal(again["model"], first["model"]) and equal(again["optimizer"], first["optimizer"]), shape


@on_ranks(4)
def test_a_running_program_moves_along_the_data_parallel_dimension(rank, tmp_path):
    """From 2 x 2, to the bit: to the last ranks and back, and to the first and back, with a step and a file there."""
    (model, optimizer), (other, straight) = build(rank, (2, 2)), build(rank, (2, 2))
    for number in range(2):
        step(rank, model, optimizer, (2, 2), number)
        step(rank, other, straight, (2, 2), number)
    both, singles = mesh_of(rank)["dp"].get_group(), [dist.new_group([n]) for n in range(4)]
    dist.new_group([1])  # ranks that save together may be in unlike numbers of groups
    alone, last = singles[rank.rank % 2], singles[2 + rank.rank % 2]
    checkpoint.reshard(optimizer, last)
    if rank.rank < 2:  # the first of the group that comes back has nothing
        assert not optimizer.optimizer.state and optimizer.rank == -1
        with torch.no_grad():
            [local(param).zero_() for param in model.parameters() if param.requires_grad]
    checkpoint.reshard(optimizer, both)
    step(rank, model, optimizer, (2, 2), 5)
    step(rank, other, straight, (2, 2), 5)
    assert equal(weights(model), weights(other))
    checkpoint.save(tmp_path / "2x2", model, optimizer)
    checkpoint.reshard(optimizer, alone)
    if rank.rank < 2:
        loaded, by = build(rank, (2, 2), seed=1, process_group=alone)
        checkpoint.load(tmp_path / "2x2", loaded, by)
        step(rank, model, optimizer, (1, 2), 6)
        step(rank, loaded, by, (1, 2), 6)
        assert equal(weights(model), weights(loaded))
        checkpoint.save(tmp_path / "1x2", model, optimizer)
    else:
        with pytest.raises(checkpoint.CheckpointError, match="in no process group since reshard"):
            checkpoint.save(tmp_path / "1x2", model, optimizer)
    checkpoint.reshard(optimizer, both)
    checkpoint.load(tmp_path / "1x2", other, straight)
    step(rank, model, optimizer, (2, 2), 7)
    step(rank, other, straight, (2, 2), 7)
    assert equal(weights(model), weights(other))
    if rank.rank:
        alone = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(RuntimeError, match="must be called with it, and no other|must move to as many"):
        checkpoint.reshard(optimizer, alone)


@on_ranks(4)
def test_what_tensor_parallel_ranks_have_alike_is_written_once(rank, tmp_path):
    """Three rows on two ranks are two and one: ranges of the parameter behind them begin elsewhere on each."""
    def build(value):
        rows = distribute_tensor(torch.full((3, 32), value), mesh["tp"], [Shard(0)])
        params = nn.ParameterList([nn.Parameter(rows), nn.Parameter(torch.full((200,), value))])
        return params, stage4_overlap.DistributedOptimizer(params.parameters(), process_group=mesh["dp"].get_group())

    mesh = mesh_of(rank)
    (params, optimizer), (others, again) = build(1.0), build(2.0)
    (params[0].to_local().square().sum() + params[1].square().sum()).backward()
    optimizer.step()
    checkpoint.save(tmp_path / "one", params, optimizer)
    checkpoint.load(tmp_path / "one", others, again)
    assert all(torch.equal(local(one), local(other)) for one, other in zip(params, others))
    shards = [own.state_dict()["state"][1]["exp_avg"] for own in (optimizer, again)]
    assert torch.equal(*(shard.full_tensor() for shard in shards))
