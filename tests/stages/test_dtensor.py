"""Stage 4 on a model that is tensor-parallel already: a mesh of 2 x 2 ranks, data-parallel by tensor-parallel."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import checkpoint
import stage4_overlap
from checkpoint import full_state_dict, load_full_state_dict
from harness.gpt import GPT, GPTConfig, share_layers
from harness.reference import DistributedOptimizer as Replicated
from stage4_overlap.awaited import Awaited
from stage4_overlap.dtensor import local
from tests.common import STAGES, leave_late, optimizer_of

pytestmark = pytest.mark.parametrize("world_size", [4])


class Block(nn.Module):
    """`up` is cut by rows, `first`, `down` by columns, `norm` is whole but sees half a sequence, `scale` is plain."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(8))
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):  # (batch, sequence, 6) -> (batch, sequence, 8)
        return self.down(torch.tanh(self.up(self.norm(self.first(x))))) * self.scale


@functools.lru_cache(maxsize=3)
def mesh_of(rank, shape=(2, 2)):
    return init_device_mesh(rank.device.type, shape, mesh_dim_names=("dp", "tp"))


def tensor_parallel(rank, shape=(2, 2)):
    """-> the model, cut over dimension "tp" of the mesh; the mesh."""
    mesh = mesh_of(rank, shape)
    plan = {"first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),  # its gradients are partial sums
            "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
    return parallelize_module(Block().to(rank.device), mesh["tp"], plan), mesh


def data(rank, step, replica):
    generator = torch.Generator().manual_seed(10 * step + replica)
    return [torch.randn(3, 4, n, generator=generator).to(rank.device) for n in (6, 8)]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def build(rank, **kwargs):
    model, mesh = tensor_parallel(rank)
    groups = {"process_group": mesh["dp"].get_group(), "bucket_cap_mb": 0.0003, **kwargs}
    optimizer = stage4_overlap.DistributedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.01, **groups)
    return model, optimizer


def backward(rank, model, step, shape=(2, 2)):
    x, y = data(rank, step, mesh_of(rank, shape)["dp"].get_local_rank())
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


class Plain:
    """One process that sees the batches of all replicas."""

    def __init__(self, rank, n_replicas=2):
        self.n_replicas = n_replicas
        self.rank, self.model = rank, Block().to(rank.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def backward(self, step):
        """-> the gradients."""
        self.optimizer.zero_grad()
        self.loss = 0
        for replica in range(self.n_replicas):
            x, y = data(self.rank, step, replica)
            loss = nn.functional.mse_loss(self.model(x), y) / self.n_replicas
            loss.backward()
            self.loss += loss.detach()
        return [param.grad for param in self.model.parameters()]

    def step(self, step, max_norm):
        self.backward(step)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return norm


def assert_like(model, plain):
    for (name, param), expected in zip(model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(whole(param), expected, rtol=1e-4, atol=1e-6), name


def trains(rank, prefetch):
    model, optimizer = build(rank)
    layouts = {name: param.placements for name, param in model.named_parameters() if isinstance(param, DTensor)}
    assert len(layouts) == 8 and len(optimizer.buckets) > 2
    if prefetch:
        optimizer.prefetch_params(model)
    plain = Plain(rank)
    for step in range(4):
        backward(rank, model, step)
        for norm_type in (1.0, float("inf")):
            expected = nn.utils.get_total_norm(plain.backward(step), norm_type)
            assert torch.allclose(optimizer.clip_grad_norm_(float("inf"), norm_type), expected, rtol=1e-4)
        norm = optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(norm, plain.step(step, 0.05), rtol=1e-4)
    optimizer.finish_param_sync()
    assert_like(model, plain)
    assert layouts == {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}
    owned = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    here = sum(local(param).numel() for param in model.parameters())
    assert 0.3 < owned / here < 0.7


@pytest.mark.parametrize("prefetch", [False, True])
def test_trains_like_one_process_and_counts_each_element_of_the_norm_once(run, prefetch):
    run(trains, prefetch)


def of_pass(rank, model, step, replica):
    """The loss of a batch, in which `scale` or `norm` may have no part."""
    x, y = data(rank, step, replica)
    return nn.functional.mse_loss(model(x.to(model.scale.dtype)), y.to(model.scale.dtype))


def accumulates(rank, in_no_sync):
    """Two micro-batches a step, in one exchange or one each."""
    model, optimizer = build(rank)
    plain = Plain(rank)
    replica = mesh_of(rank)["dp"].get_local_rank()
    for step in range(3):
        for micro in (10 * step, 10 * step + 1):
            is_last = micro % 10 == 1
            with optimizer.no_sync() if in_no_sync and not is_last else contextlib.nullcontext():
                of_pass(rank, model, micro, replica).backward()
            for other in range(2):
                (of_pass(rank, plain.model, micro, other) / 2).backward()
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.05)
        assert torch.allclose(optimizer.clip_grad_norm_(0.05), norm, rtol=1e-4)
        for one in (optimizer, plain.optimizer):
            one.step()
            one.zero_grad()
    assert_like(model, plain)


@pytest.mark.parametrize("in_no_sync", [False, True])
def test_micro_batches_add_up(run, in_no_sync):
    run(accumulates, in_no_sync)


def absent(rank):
    """One replica's batch doesn't go through `up`, cut by rows, nor `norm`, whole and in partial sums."""
    model, optimizer = build(rank, find_unused_parameters=True)
    optimizer.prefetch_params(model)
    plain = Plain(rank)
    for step in range(3):
        for replica in range(2):
            skips = replica == 1 and step != 1
            ours = [model] if replica == mesh_of(rank)["dp"].get_local_rank() else []
            for one, share in [(plain.model, 2), *((one, 1) for one in ours)]:
                x, y = data(rank, step, replica)
                hidden = one.first(x) if not skips else None
                out = one.down(torch.tanh(one.up(one.norm(hidden)))) if not skips else y[:, :, :1]
                (nn.functional.mse_loss(out * one.scale, y) / share).backward()
        for one in (optimizer, plain.optimizer):
            one.step()
            one.zero_grad()
    assert_like(model, plain)
    strict_model, strict = build(rank)
    x, y = data(rank, 0, 0)
    nn.functional.mse_loss(y[:, :, :1] * strict_model.scale, y).backward()
    with pytest.raises(RuntimeError, match="parameter first.weight"):
        strict.step()


def test_parameters_that_are_absent_from_the_graph(run):
    run(absent)


def sixteen(rank):
    """The fp32 sum of 16-bit gradients goes to fp32 main parameters, of which the model has what they round to."""
    model = tensor_parallel(rank)[0].bfloat16()
    groups = {"process_group": mesh_of(rank)["dp"].get_group(), "bucket_cap_mb": 0.0005, "lr": 0.01}
    optimizer = stage4_overlap.DistributedOptimizer(model.named_parameters(), torch.optim.AdamW, **groups)
    main_params = {name: whole(param).float() for name, param in model.named_parameters()}
    reference = torch.optim.AdamW(main_params.values(), lr=0.01)
    for step in range(3):
        with optimizer.no_sync():
            of_pass(rank, model, step, mesh_of(rank)["dp"].get_local_rank()).backward()
        for name, param in model.named_parameters():
            grad = param.grad.redistribute(placements=param.placements) if isinstance(param, DTensor) else param.grad
            own = whole(grad).clone().div_(2).float()  # of this replica
            dist.all_reduce(own, group=groups["process_group"])
            main_params[name].grad = own
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(whole(param), main_params[name].bfloat16(), rtol=2**-7, atol=0, msg=name)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_16_bit_parameters_have_fp32_main_parameters(run):
    run(sixteen)


def named_mesh(rank):
    """As those of FSDP2's users: two dimensions of replicas, which are one for an optimizer."""
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh(rank.device.type, (2, 1, 2), mesh_dim_names=names)
    group = mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group()
    model = parallelize_module(Block().to(rank.device), mesh["tp"], {
        "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()})
    optimizer = stage4_overlap.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, process_group=group)
    plain = Plain(rank)
    for step in range(2):
        of_pass(rank, model, step, dist.get_rank(group)).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step(step, float("inf"))
    assert_like(model, plain)


def test_a_mesh_of_three_names(run):
    run(named_mesh)


def language_model(rank, prefetch):
    """A GPT with a tied embedding and head, cut alike."""
    config = GPTConfig(n_layers=2, n_heads=2, width=16, block_size=8, lr=0.01)
    torch.manual_seed(0)
    model, plain = (GPT(config).to(rank.device) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    group = share_layers(model, 2, rank)
    assert model.head.weight is model.token_embedding.weight and isinstance(model.head.weight, DTensor)
    optimizer = stage4_overlap.DistributedOptimizer(model.parameters(), lr=0.01, process_group=group, eps=1e-6)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-6)
    if prefetch:
        optimizer.prefetch_params(model)
    for step in range(3):
        text = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(step)).to(rank.device)
        own = text.chunk(2)[dist.get_rank(group)]
        model(own[:, :-1], own[:, 1:]).backward()
        plain(text[:, :-1], text[:, 1:]).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert torch.allclose(optimizer.clip_grad_norm_(0.5), norm, rtol=1e-4)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(whole(param), expected, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_gpt_with_shared_weights(run, prefetch):
    run(language_model, prefetch)


MESHES = [(2, 2), (1, 4), (4, 1)]


def replicated(rank, shape):
    """Clipped, with a closure, and loaded into another one half way; fused, whose kernels take one kind of tensor."""
    model, mesh = tensor_parallel(rank, shape)
    settings = {"lr": 0.01, "fused": True, "process_group": mesh["dp"].get_group()}
    optimizer, plain = Replicated(model.parameters(), **settings), Plain(rank, shape[0])
    for step in range(4):
        if step == 2:
            before, optimizer = optimizer, Replicated(model.parameters(), **settings)
            optimizer.load_state_dict(before.state_dict())
        expected = nn.utils.get_total_norm(plain.backward(step), 1.0)
        backward(rank, model, step, shape)
        assert torch.allclose(optimizer.clip_grad_norm_(float("inf"), 1.0), expected, rtol=1e-4)
        assert torch.allclose(optimizer.clip_grad_norm_(0.05), plain.step(step, 0.05), rtol=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        assert all(local(param).grad is None for param in model.parameters())
        plain.step(step + 10, float("inf"))
        loss = optimizer.step(lambda: backward(rank, model, step + 10, shape))  # noqa: B023
        optimizer.zero_grad()
        assert torch.allclose(loss, plain.loss, rtol=1e-4)
        assert_like(model, plain)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_rung_0_trains_like_one_process(run, shape):
    run(replicated, shape)


WRITES = {
    "load_state_dict": lambda model: model.load_state_dict({k: 0 * v + 3 for k, v in model.state_dict().items()}),
    "fill_": lambda model: [param.fill_(3) for param in model.parameters()],
    "to_local": lambda model: [local(param).fill_(3) for param in model.parameters()],
}


def keeps(rank):
    """What is written into 16-bit parameters, through a DTensor or past it, the next step begins with."""
    model = tensor_parallel(rank)[0].bfloat16()
    groups = {"process_group": mesh_of(rank)["dp"].get_group(), "lr": 2.0**-10, "bucket_cap_mb": 1e-6}
    optimizer = stage4_overlap.DistributedOptimizer(model.named_parameters(), torch.optim.SGD, **groups)
    optimizer.prefetch_params(model)
    for how, write in WRITES.items():
        with torch.no_grad():
            write(model)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert all(whole(param).eq(3).all() for param in model.parameters()), how
        for param in model.parameters():
            param.grad = torch.full_like(param, 128.0)
        optimizer.step()
        assert not any(whole(param).eq(3).any() for param in model.parameters()), how


def test_what_is_written_into_16_bit_dtensors_is_not_undone(run):
    run(keeps)


def outdated(rank):
    """Autograd hears of what stage 4 writes into what a DTensor wraps."""
    model, mesh = tensor_parallel(rank)
    x = data(rank, 0, 0)[0].requires_grad_()
    before_constructor = model.first(x).square().sum()  # through a DTensor, and no other parameter
    groups = {"process_group": mesh["dp"].get_group(), "lr": 1.0}
    optimizer = stage4_overlap.DistributedOptimizer(model.named_parameters(), torch.optim.SGD, **groups)
    before_step = model.first(x).square().sum()
    backward(rank, model, 0)
    optimizer.step()
    for loss in (before_constructor, before_step):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_with_older_dtensors_is_refused(run):
    run(outdated)


READS = {
    "to_local": lambda param: param.to_local(),
    "full_tensor": lambda param: param.full_tensor(),
    "redistribute": lambda param: param.redistribute(placements=[Replicate()]),
    "repr": lambda param: torch.tensor([ord(letter) for letter in repr(param)]),
    "sum": lambda param: param.sum(),
    "deepcopy": lambda param: copy.deepcopy(param),
}


def reads(rank):
    """Whoever reads a DTensor that is under way waits for it."""
    model, optimizer = build(rank)
    optimizer.prefetch_params(model)
    if mesh_of(rank)["dp"].get_local_rank() == 0:
        leave_late(optimizer)
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


def test_whoever_reads_a_dtensor_waits_for_it(run):
    run(reads)


def travels(rank):
    """The full state is that of torch's own optimizer over the same DTensors, and goes into another optimizer."""
    model, optimizer = build(rank)
    other = tensor_parallel(rank)[0]
    plain = torch.optim.AdamW(other.named_parameters(), lr=0.01)
    for step in range(2):
        for param in other.parameters():
            param.grad = None
        backward(rank, model, step)
        backward(rank, other, step)
        for param in other.parameters():
            grad = param.grad.redistribute(placements=param.placements) if isinstance(param, DTensor) else param.grad
            dist.all_reduce(local(grad), group=mesh_of(rank)["dp"].get_group())
            param.grad = grad / 2
        optimizer.step()
        plain.step()
    full, expected = full_state_dict(optimizer, to_all=True), plain.state_dict()
    assert full["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    for index, state in expected["state"].items():
        assert state.keys() == full["state"][index].keys()
        for key, value in state.items():
            assert type(value) is type(full["state"][index][key]) and value.shape == full["state"][index][key].shape
            assert torch.allclose(whole(value), whole(full["state"][index][key]), rtol=1e-5, atol=1e-8), (index, key)
    again_model, again = build(rank, bucket_cap_mb=1)
    again_model.load_state_dict(model.state_dict())
    load_full_state_dict(again, expected)
    for trained, by in ((model, optimizer), (again_model, again)):
        backward(rank, trained, 5)
        by.step()
    for one, two in zip(model.parameters(), again_model.parameters()):
        assert torch.allclose(whole(one), whole(two), rtol=1e-5, atol=1e-7)


def test_the_full_state_is_that_of_the_plain_optimizer_over_the_same_dtensors(run):
    run(travels)


def skips(rank):
    """The inf is in a part that one tensor-parallel rank has: all of them must skip the step."""
    model, optimizer = build(rank)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=4.0)
    before = [whole(param).clone() for param in model.parameters()]
    x, y = data(rank, 0, 0)
    with optimizer.no_sync():
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    if rank.rank == 3:
        model.up.weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(whole(param), old) for param, old in zip(model.parameters(), before))


def test_an_inf_on_one_tensor_parallel_rank_makes_all_skip(run):
    run(skips)


def refused(rank):
    model, mesh = tensor_parallel(rank)
    named, dp = list(model.named_parameters()), mesh["dp"].get_group()
    with pytest.raises(ValueError, match=r'parameter first.weight is spread .* process_group=mesh\["dp"\]'):
        stage4_overlap.DistributedOptimizer(named)
    for stage in STAGES[:3]:
        with pytest.raises(ValueError, match="parameter first.weight is a DTensor: use stage 4"):
            optimizer_of(stage)(named, process_group=dp)
    with pytest.raises(checkpoint.UnfitModel, match="parameters are DTensors: torch.distributed.checkpoint.state_dict"):
        checkpoint.save("never", model, torch.optim.SGD(named))
    strided = DTensor.from_local(torch.ones(2, 2), mesh, [_StridedShard(0, split_factor=2), Shard(0)])  # as by FSDP2
    with pytest.raises(ValueError, match="parameter 0 of group 0 is spread over ranks of process_group already"):
        stage4_overlap.DistributedOptimizer([nn.Parameter(strided)], process_group=dp)
    uneven = nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh["tp"], [Shard(0)]))  # 2 rows here, 1 row there
    optimizer = stage4_overlap.DistributedOptimizer([uneven], torch.optim.SGD, lr=1.0, process_group=dp)
    uneven.to_local().sum().backward()
    optimizer.step()
    assert torch.equal(whole(uneven), torch.zeros(3, 2))


def test_what_it_can_not_do_is_said_in_one_line(run):
    run(refused)


def transposed(rank):
    """What counts is how it lies on each rank, and that is not as the strides of the whole say."""
    mesh = mesh_of(rank)
    weight = nn.Parameter(distribute_tensor(torch.rand(6, 4, device=rank.device).t(), mesh["tp"], [Shard(1)]))
    assert not weight.is_contiguous() and local(weight).is_contiguous()
    before = whole(weight).clone()
    groups = {"process_group": mesh["dp"].get_group(), "lr": 1.0}
    optimizer = stage4_overlap.DistributedOptimizer([weight], torch.optim.SGD, **groups)
    (weight * weight).sum().backward()
    optimizer.step()
    assert torch.allclose(whole(weight), -before)


def test_a_dtensor_of_something_transposed(run):
    run(transposed)


def another_rank(rank):
    """The state_dicts of two tensor-parallel neighbours look alike."""
    model, optimizer = build(rank)
    backward(rank, model, 0)
    optimizer.step()
    everyone = [None] * 4
    dist.all_gather_object(everyone, optimizer.state_dict())
    optimizer.load_state_dict(everyone[rank.rank])
    with pytest.raises(ValueError, match="other shards, by another bucket_cap_mb, grad_dtype or tensor-parallel rank"):
        optimizer.load_state_dict(everyone[rank.rank ^ 1])


def test_the_state_of_a_tensor_parallel_neighbour_is_refused(run):
    run(another_rank)


def closure_loss(rank):
    model, optimizer = build(rank)
    mesh = mesh_of(rank)["tp"]

    def closure():
        backward(rank, model, 0)
        return DTensor.from_local(torch.tensor(rank.rank + 1.0), mesh, [Partial()])
    return optimizer.step(closure).item()


def test_the_loss_of_a_closure_may_be_a_dtensor(run):
    assert run(closure_loss) == [5.0] * 4  # the mean of 1 + 2 and 3 + 4


class Uneven(nn.Module):
    """`up` and `down` are cut into 2 and 1 of 3: parts of a parameter are not equally large on all ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def build_uneven(rank):
    mesh = mesh_of(rank)
    model = nn.Sequential(*(Uneven() for _ in range(4))).to(rank.device)
    for block in model:
        parallelize_module(block, mesh["tp"], {
            "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1))})
    groups = {"process_group": mesh["dp"].get_group(), "bucket_cap_mb": 0.0003}
    return model, optimizer_of(STAGES[3])(model.parameters(), **groups)


def buckets_of_uneven_parts(rank):
    model, optimizer = build_uneven(rank)
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(rank.rank // 2)).to(rank.device)
    part = x.chunk(2, dim=1)[rank.rank % 2]
    model(part).square().sum().backward()  # a bucket with norms makes a collective over "tp" when it leaves
    optimizer.step()
    return [len(bucket.params) for bucket in optimizer.buckets]


def test_buckets_are_the_same_where_parts_are_not(run):
    first, *others = run(buckets_of_uneven_parts)
    assert all(other == first for other in others) and len(first) > 2


def norms_of_uneven_parts(rank):
    model, optimizer = build_uneven(rank)
    generator = torch.Generator().manual_seed(rank.rank)
    norms = []
    for _ in range(60):
        for param in model.parameters():
            grad = torch.randn(local(param).shape, generator=generator).to(rank.device)
            if not isinstance(param, DTensor):
                dist.broadcast(grad, group=mesh_of(rank)["tp"].get_group(), group_src=0)  # what copies have is alike
            param.grad = grad if not isinstance(param, DTensor) else DTensor.from_local(
                grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())
        norms.append(optimizer.clip_grad_norm_(0.1).item())
        optimizer.step()
    return norms


def test_the_norm_is_the_same_to_the_bit_where_parts_are_not(run):
    """Each rank scales its copy of what isn't cut by it: else copies drift apart."""
    first, *others = run(norms_of_uneven_parts)
    assert all(other == first for other in others) and len(set(first)) > 50
