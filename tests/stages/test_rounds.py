"""Stage 4: each backward pass sends all buckets once, on every rank, whatever the passes are like.

A rank that sends them more often than another waits for ever: with two buffers, the third bucket waits for the first.
"""

import contextlib
import functools
import random
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from stage4_overlap import DistributedOptimizer, rounds
from tests.common import STAGES, Net, batch, error_of, loss_of, of_cpus, on_ranks, optimizer_of, trainable
from tests.pairs import SMALL, parameter_of, sgd_of


def zero_params_and_sgd(rank, n=6, **kwargs):
    """Make parameters of zeros, a bucket each, and SGD with a learning rate of 1."""
    params = [parameter_of(0, rank) for _ in range(n)]
    return params, sgd_of(STAGES[3], params, **SMALL, **kwargs)


def backward(params, places=None):
    """Run the backward pass of the sum of `params`, or of those whose places are in `places`."""
    sum(param.sum() for place, param in enumerate(params) if places is None or place in places).backward()


def moved_by(params, grads):
    """Return whether each of `params` has moved by minus its mean gradient. `grads`: a list of numbers per rank."""
    expected = -torch.tensor(grads, dtype=torch.float32).mean(dim=0)
    return torch.allclose(torch.stack([param.detach().cpu()[0] for param in params]), expected)


WEIGHTS = {"backward": 4, "backward checkpointed": 2, "backward in no_sync": 3, "step": 2, "zero_grad": 1,
           "finish_grad_sync": 1, "another collective": 1, "compare": 1}  # how often each is drawn


@on_ranks
def test_random_schedules(rank):
    """Run actions that are drawn, with backward passes over parameters that each rank draws, beside a running sum."""
    factor = torch.ones((), device=rank.device, requires_grad=True)  # a re-entrant checkpoint needs such an input
    for seed in range(20):
        draw = random.Random(seed)  # the same on every rank
        n = draw.choice([1, 2, 3, 5])
        params, optimizer = zero_params_and_sgd(rank, n, find_unused_parameters=True)
        if draw.random() < 0.5:
            optimizer.prefetch_params(torch.nn.ParameterList(params))
        expected_grads, expected_moves = [0.0] * n, [0.0] * n
        actions = [*draw.choices([*WEIGHTS], WEIGHTS.values(), k=15), "step", "compare"]
        for position, action in enumerate(actions):
            if action.startswith("backward"):
                times_used = [{i: draw.randint(1, 4) for i in draw.sample(range(n), draw.randint(1, n))}
                              for _ in range(rank.world_size)]  # on each rank: place of a parameter -> number
                losses = [lambda factor, i=i: params[i].sum() * factor
                          for i, times in times_used[rank.rank].items() for _ in range(times)]
                if action == "backward checkpointed":
                    losses = [functools.partial(checkpoint, loss, use_reentrant=True) for loss in losses]
                with optimizer.no_sync() if action == "backward in no_sync" else contextlib.nullcontext():
                    sum(loss(factor) for loss in losses).backward()
                added = [sum(times.get(i, 0) for times in times_used) / rank.world_size for i in range(n)]
                expected_grads = [old + new for old, new in zip(expected_grads, added)]
            elif action == "step":
                optimizer.step()
                expected_moves = [old + new for old, new in zip(expected_moves, expected_grads)]
                expected_grads = [0.0] * n
            elif action == "zero_grad":
                optimizer.zero_grad()
                expected_grads = [0.0] * n
            elif action == "finish_grad_sync":
                optimizer.finish_grad_sync()
            elif action == "another collective":
                dist.all_reduce(torch.ones((), device=rank.device))
            elif action == "compare":
                assert moved_by(params, [expected_moves]), (seed, actions[: position + 1])


# ------------------------------------------------------------------------ a step that is given up, and what follows it


@on_ranks
def test_a_step_that_is_given_up_changes_nothing_and_training_goes_on(rank):
    """Give a step up that one rank has in no_sync and the others have sent, and one with a gradient that is late."""
    params, optimizer = zero_params_and_sgd(rank)
    with optimizer.no_sync() if rank.rank == 0 else contextlib.nullcontext():
        backward(params)
    optimizer.zero_grad()
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        backward(params)
        assert all(param.grad is not None for param in params)  # the inner no_sync() hasn't ended the outer one
    backward(params)  # sends the gradients from no_sync() too, so one that is there now was assigned by a user
    params[3].grad = torch.full((5,), 100.0, device=rank.device)
    assert "the gradient of parameter 3 of group 0 was assigned after" in error_of(optimizer.step)
    assert moved_by(params, [[0] * 6])
    with optimizer.no_sync() if rank.rank == 0 else contextlib.nullcontext():
        backward(params)
    optimizer.step()
    assert moved_by(params, [[1] * 6])


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


@on_ranks(checkpointed=[False, True])
def test_passes_after_one_that_failed(rank, checkpointed):
    """Train on after a backward pass that has raised on every rank. It is a round, and its gradients count as in torch.

    Rank 0 has computed all gradients by then. `loss` stays alive, and with it the graph that has failed.
    """
    params, optimizer = zero_params_and_sgd(rank, find_unused_parameters=True)
    leaf, factor = (torch.ones((), device=rank.device, requires_grad=True) for _ in range(2))
    failing = Fail.apply(leaf)  # the first operator of the forward pass is the last one of the backward pass
    first_used, then_used = (range(6), range(6)) if rank.rank == 0 else ([5], [0])  # places of parameters

    def loss_of_params(factor):
        return sum(params[i].sum() for i in first_used) * factor

    later = checkpoint(loss_of_params, factor, use_reentrant=True) if checkpointed else loss_of_params(factor)
    loss = failing + later
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    backward(params, then_used)
    dist.all_reduce(torch.ones((), device=rank.device))
    optimizer.step()
    assert moved_by(params, [[2] * 6] + [[1, 0, 0, 0, 0, 1]] * (rank.world_size - 1))


@on_ranks(3)
def test_messages_of_two_optimizers_do_not_mix(rank):
    """Run backward passes of two optimizers, in one order on rank 0 and in the other order on the other ranks.

    This needs gloo, where messages have tags: NCCL's collectives, and so DDP's, must come in one order on all ranks.
    """
    rank, group = of_cpus(rank)
    pairs = [zero_params_and_sgd(rank, n=2, process_group=group) for _ in range(2)]
    losses = [sum(param.sum() * (i + 1) for param in params) for i, (params, _) in enumerate(pairs)]
    for loss in (losses[::-1] if rank.rank else losses):
        loss.backward()
    for i, (params, optimizer) in enumerate(pairs):
        optimizer.step()
        assert moved_by(params, [[i + 1] * 2])


@on_ranks(2)
def test_gloo_by_another_name_sums_in_fp32_too(rank):
    torch.manual_seed(rank.rank)
    values, shards = torch.randn(99, dtype=torch.bfloat16), []
    for backend in ("gloo", "cpu:gloo"):
        params = [torch.nn.Parameter(torch.zeros(99, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = DistributedOptimizer(params, process_group=dist.new_group(backend=backend))
        ((params[0] + params[1]) * values).sum().backward()
        optimizer.finish_grad_sync()
        shards.append(torch.cat([bucket.gradient.shard for bucket in optimizer.buckets]))
    assert torch.equal(*shards) and not torch.equal(shards[0], shards[0].bfloat16().float())


# ------------------------------------------------------------------------------------ a step that waits for no device


READS_A_VALUE = {getattr(torch.Tensor, name) for name in (
    "item", "tolist", "numpy", "cpu", "nonzero", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__",
    "__index__", "__contains__", "__array__")} | {torch.equal, torch.allclose, torch.nonzero, torch.is_nonzero}


class OnADevice(TorchFunctionMode):
    """Pretend that tensors are on a GPU, with NCCL: raise where Python reads a value, because that would wait.

    With --gpu torch raises. Tensors from torch.tensor(…) are on the host, until an all-reduce on the GPUs writes them.
    """

    def __enter__(self):
        self.host_tensors = {}  # id -> tensor
        self.host_groups = weakref.WeakKeyDictionary()  # process group -> the gloo group that rounds.py made for it
        self.patches = contextlib.ExitStack()
        for module, name, value in [(rounds, "backends_of", lambda _: {"cuda": "nccl"}),
                                    (rounds, "HOST_GROUPS", self.host_groups), (dist, "all_reduce", self.all_reduce)]:
            self.patches.enter_context(mock.patch.object(module, name, value))
        if torch.cuda.is_available():
            self.patches.callback(torch.cuda.set_sync_debug_mode, "default")
            torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS_A_VALUE and not torch.cuda.is_available() and id(args[0]) not in self.host_tensors:
            raise AssertionError(f"{function.__name__} waits for the device")
        result = function(*args, **(kwargs or {}))
        if function is torch.tensor:
            self.host_tensors[id(result)] = result
        return result

    def all_reduce(self, tensor, *args, group=None, all_reduce=dist.all_reduce, **kwargs):
        if group in (None, dist.group.WORLD):
            self.host_tensors.pop(id(tensor), None)
        return all_reduce(tensor, *args, group=group, **kwargs)


@on_ranks(3)
def test_ranks_in_other_numbers_of_groups_meet_on_the_host(rank):
    """Make the gloo group beside NCCL's, though rank 0 is in more groups, by whose number new_group() names a group."""
    rank, group = of_cpus(rank)
    if rank.rank == 0:
        alone = dist.new_group([0], backend="gloo", use_local_synchronization=True)
    params, optimizer = zero_params_and_sgd(rank, process_group=group)
    with OnADevice() as device:
        for _ in range(2):
            backward(params)
            optimizer.step()
    (host_group,) = device.host_groups.values()
    assert host_group.name() == "gloo" and host_group.size() == 3 and moved_by(params, [[2] * 6])
    if rank.rank == 0:
        dist.destroy_process_group(alone)


@on_ranks(2, stage=STAGES[2:], kind=["plain", "16 bits", "prefetched", "unused"])
def test_no_step_waits_for_the_device(rank, stage, kind):
    """Train as on a GPU, where the process group is NCCL's: the host runs ahead, and a CUDA graph can take the step."""
    model, is_stage_4 = Net(seed=0).to(torch.bfloat16 if kind == "16 bits" else torch.float32), stage == STAGES[3]
    params = trainable(model)
    unused = {"find_unused_parameters": True} if is_stage_4 else {}
    optimizer = optimizer_of(stage)(params, lr=0.01, fused=True, **unused)
    if is_stage_4 and kind == "prefetched":
        optimizer.prefetch_params(model)
    before = [param.detach().clone() for param in params]
    batches = [[values.to(model.scale.dtype) for values in batch(step, rank.rank)] for step in range(5)]
    with OnADevice() as device:
        for x, y in batches:
            for is_first in (True, False):  # of two micro-batches
                with optimizer.no_sync() if kind == "plain" and is_first else contextlib.nullcontext():
                    loss = model.scale.square() if kind == "unused" and is_first else loss_of(model, x, y)
                    loss.backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        after = [param.detach().clone() for param in params]
        if is_stage_4 and kind == "plain":  # a gradient that one rank lacks is an error on all, and changes nothing
            optimizer.find_unused_parameters = False
            backward(params[rank.rank :])
            assert "no gradient on some rank for parameter 0 of group 0: " in error_of(optimizer.step)
    assert all(map(torch.equal, after, params)) and not any(map(torch.equal, before, params))
    assert len(device.host_groups) == (1 if is_stage_4 else 0) and None not in device.host_groups.values()
