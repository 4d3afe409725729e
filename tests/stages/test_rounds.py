"""Stage 4: buckets go round once in each backward pass, on every rank, whatever the passes are like.

A rank that goes round more often than another waits for it for ever, since the third bucket waits for the first.
"""

import contextlib
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from checkpoint import reshard
from stage4_overlap import DistributedOptimizer
from stage4_overlap.awaited import AwaitedBucket
from tests.common import assert_same, of_cpus, on_its_device

ONE_PARAM = 1e-6  # a bucket_cap_mb at which each parameter is a bucket


def zeros(rank, n=6, **kwargs):
    """Parameters of zeros, a bucket each, stepped by SGD with a learning rate of 1."""
    params = [torch.nn.Parameter(torch.zeros(5, device=rank.device)) for _ in range(n)]
    return params, DistributedOptimizer(params, torch.optim.SGD, lr=1.0, bucket_cap_mb=ONE_PARAM, **kwargs)


def moved_by(params, uses):
    """Whether each of `params` has moved by minus the mean of `uses` over the ranks: (d, number of parameters)."""
    expected = -torch.tensor(uses, dtype=torch.float32).mean(dim=0)
    return torch.allclose(torch.stack([param.detach().cpu()[0] for param in params]), expected)


PASSES = {  # what a rank uses in each of its backward passes between two steps
    "halves": lambda rank: [[5, 4], [3, 2, 1, 0]],
    "the last bucket first": lambda rank: [[0], [5, 1], [3]],
    "halves on rank 0, all elsewhere": lambda rank: [range(6)] * 2 if rank else [[5, 4], [3, 2, 1, 0]],
    "all on rank 0, one elsewhere": lambda rank: [[min(rank, 5)]] * 4 if rank else [range(6)] * 4,
    "one a pass on rank 0": lambda rank: [range(6)] * 6 if rank else [[i] for i in range(6)],
}


def passes_by_hand(rank, passes, checkpointed):
    params, optimizer = zeros(rank, find_unused_parameters=True)
    factor = torch.ones((), device=rank.device, requires_grad=True)  # a re-entrant checkpoint wants one that does
    for _ in range(2):
        for used in PASSES[passes](rank.rank):
            losses = [lambda factor, i=i: params[i].sum() * factor for i in used]
            sum(checkpoint(f, factor, use_reentrant=True) if checkpointed else f(factor) for f in losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert moved_by(params, [[2 * sum(i in used for used in PASSES[passes](r)) for i in range(6)]
                             for r in range(rank.world_size)])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("passes", PASSES)
def test_micro_batches_whose_parameters_depend_on_the_rank(run, world_size, passes, checkpointed):
    run(passes_by_hand, passes, checkpointed)


def random_schedules(rank, seeds):
    """Passes over what each rank draws, inside and outside of no_sync, and everything else between them, by hand."""
    for seed in seeds:
        draw = random.Random(seed)  # the same on every rank
        n = draw.choice([1, 2, 3, 5])
        params, optimizer = zeros(rank, n, find_unused_parameters=True)
        if draw.random() < 0.5:
            optimizer.prefetch_params(torch.nn.ParameterList(params))
        waiting, moved = [0.0] * n, [0.0] * n
        actions = [draw.choice("bbbbnnnsszfcr") for _ in range(15)] + ["s", "r"]
        for position, action in enumerate(actions):
            if action in "bn":  # a backward pass, outside and inside of no_sync
                uses = [{i: draw.randint(1, 4) for i in draw.sample(range(n), draw.randint(1, n))}
                        for _ in range(rank.world_size)]
                with optimizer.no_sync() if action == "n" else contextlib.nullcontext():
                    sum(params[i].sum() * times for i, times in uses[rank.rank].items()).backward()
                waiting = [old + sum(use.get(i, 0) for use in uses) / rank.world_size for i, old in enumerate(waiting)]
            elif action == "s":
                optimizer.step()
                waiting, moved = [0.0] * n, [old + more for old, more in zip(moved, waiting)]
            elif action == "z":
                optimizer.zero_grad()
                waiting = [0.0] * n
            elif action == "f":
                optimizer.finish_grad_sync()
            elif action == "c":
                dist.all_reduce(torch.ones((), device=rank.device))
            elif action == "r":
                assert moved_by(params, [moved]), (seed, actions[: position + 1])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_random_schedules(run, world_size):
    run(random_schedules, range(20))


def collective_before_step(rank, how):
    """All ranks but 0 use one parameter of six: rank 0 may not wait in backward() while they wait elsewhere."""
    params, optimizer = zeros(rank, find_unused_parameters=True)

    def closure():
        loss = sum(params[i].sum() for i in (range(1) if rank.rank else range(6)))
        loss.backward()
        return loss.detach()
    if how == "of a closure's loss":
        optimizer.step(closure)
    else:
        dist.all_reduce(closure())
        optimizer.step()
    assert moved_by(params, [[1] * 6] + [[1] + [0] * 5] * (rank.world_size - 1))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["of a closure's loss", "of the user's"])
def test_a_collective_between_backward_and_step(run, world_size, how):
    run(collective_before_step, how)


def given_up(rank):
    """One rank has its gradients in no_sync, those of the others have left: to give the step up is for all of them."""
    params, optimizer = zeros(rank)
    for given_up in (True, False):
        with optimizer.no_sync() if rank.rank == 0 else contextlib.nullcontext():
            sum(param.sum() for param in params).backward()
        if given_up:
            optimizer.zero_grad()
    optimizer.step()
    assert moved_by(params, [[1] * 6])


@pytest.mark.parametrize("world_size", [2])
def test_a_step_is_given_up_though_one_rank_has_let_nothing_leave(run, world_size):
    run(given_up)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def failed_pass(rank, checkpointed):
    """A pass fails on all ranks, on rank 0 when all gradients are there. They count, as in torch; so does the pass.

    The graph of the pass that failed, with the node of a re-entrant checkpoint in it, lives on.
    """
    params, optimizer = zeros(rank, find_unused_parameters=True)
    leaf = torch.ones((), device=rank.device, requires_grad=True)
    factor = torch.ones((), device=rank.device, requires_grad=True)
    failing = Fail.apply(leaf)  # what comes first in the forward pass is the last one to go backward

    def uses(factor):
        return sum(params[i].sum() for i in ([5] if rank.rank else range(6))) * factor

    loss = failing + (checkpoint(uses, factor, use_reentrant=True) if checkpointed else uses(factor))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    sum(params[i].sum() for i in ([0] if rank.rank else range(6))).backward()
    dist.all_reduce(torch.ones((), device=rank.device))
    optimizer.step()
    assert moved_by(params, [[2] * 6] + [[1, 0, 0, 0, 0, 1]] * (rank.world_size - 1))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_passes_after_one_that_failed(run, world_size, checkpointed):
    run(failed_pass, checkpointed)


def shared_in_checkpoints(rank):
    """Parameters are used more often on some ranks, each time in a re-entrant checkpoint: gradients come each time."""
    params, optimizer = zeros(rank)
    factor = torch.ones((), device=rank.device, requires_grad=True)
    uses = [3 - min(r, 2) for r in range(rank.world_size)]
    losses = [checkpoint(lambda factor: sum(param.sum() for param in params) * factor, factor, use_reentrant=True)
              for _ in range(uses[rank.rank])]
    sum(losses).backward()
    optimizer.step()
    assert moved_by(params, [[n] * 6 for n in uses])


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_layer_in_as_many_checkpoints_as_the_rank_likes(run, world_size):
    run(shared_in_checkpoints)


def dropped(rank):
    """Between backward() and step(), with ranks that used other parameters: it leaves nothing behind."""
    params, optimizer = zeros(rank, find_unused_parameters=True)
    sum(100 * params[i].sum() for i in (range(1) if rank.rank else range(6))).backward()
    with pytest.raises(RuntimeError, match="between backward"):  # on every rank, or the others would wait
        reshard(optimizer, None)
    del optimizer
    for param in params:
        param.grad = None
    optimizer = DistributedOptimizer(params, torch.optim.SGD, lr=1.0, bucket_cap_mb=ONE_PARAM)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    assert moved_by(params, [[1] * 6])


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_optimizer_that_is_dropped_where_ranks_used_other_parameters(run, world_size):
    run(dropped)


def two_optimizers(rank):
    """Rank 0 goes backward through the parameters of the first one first, the others through those of the second.

    On gloo, where messages have tags: NCCL's collectives must have one order on all ranks, DDP's too.
    """
    rank, group = of_cpus(rank)
    both = [zeros(rank, n=2, process_group=group) for _ in range(2)]
    losses = [sum(param.sum() * (i + 1) for param in params) for i, (params, _) in enumerate(both)]
    for loss in (losses[::-1] if rank.rank else losses):
        loss.backward()
    for i, (params, optimizer) in enumerate(both):
        optimizer.step()
        assert moved_by(params, [[i + 1] * 2])


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages_of_two_optimizers_do_not_mix(run, world_size):
    run(two_optimizers)


def beside_other_messages(rank):
    """The user's own irecv, which has torch's default tag, and was there before any of the optimizer's."""
    group = dist.new_group()
    params, optimizer = zeros(rank, n=3, process_group=group)  # the first one on this group
    got, other = torch.zeros(5, device=rank.device), 1 - rank.rank
    work = dist.irecv(got, other, group)
    sum(param.sum() for param in params).backward()
    dist.isend(torch.full((5,), 100.0 + rank.rank, device=rank.device), other, group).wait()
    optimizer.step()
    work.wait()
    assert got.tolist() == [100.0 + other] * 5 and moved_by(params, [[1] * 3] * 2)


@pytest.mark.parametrize("world_size", [2])
def test_messages_of_the_user_are_not_taken_for_gradients(run, world_size):
    run(beside_other_messages)


def by_other_names(rank):
    """-> the averaged gradient, in groups whose backend is gloo by these names."""
    torch.manual_seed(rank.rank)
    values, found = torch.randn(99, dtype=torch.bfloat16), []
    for backend in ("gloo", "cpu:gloo"):
        params = [torch.nn.Parameter(torch.zeros(99, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = DistributedOptimizer(params, process_group=dist.new_group(backend=backend))
        ((params[0] + params[1]) * values).sum().backward()
        optimizer.finish_grad_sync()
        found.append(torch.cat([bucket.gradient.shard for bucket in optimizer.buckets]))
    assert torch.equal(*found) and not torch.equal(found[0], found[0].bfloat16().float())


@pytest.mark.parametrize("world_size", [2])
def test_gloo_by_another_name_sums_in_fp32_too(run, world_size):
    run(by_other_names)


@on_its_device
def not_stepped(rank):
    """Graphs through parameters that a step leaves alone, since they are unused or frozen, live on, as in torch."""
    torch.manual_seed(0)
    one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    params = [*one.parameters(), *other.parameters()]
    optimizer = DistributedOptimizer(params, lr=0.1, find_unused_parameters=True)
    x = torch.ones(2, 3, requires_grad=True)
    later = one(one(x)).sum()
    other(other(x)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    later.backward()
    optimizer.step()
    optimizer.zero_grad()
    one.requires_grad_(False)
    features = one(one(x))
    other(features.detach()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    features.sum().backward()


def test_graphs_through_what_was_not_stepped(run):
    run(not_stepped)


@on_its_device
def interrupted(rank):
    """Ctrl-C where a bucket leaves, on every rank: what is given up is gone, and the rest is as if it had not been."""
    models, calls = [], itertools.count()
    for interrupt in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(4)))
        optimizer = DistributedOptimizer(model.parameters(), lr=0.1, bucket_cap_mb=1e-4)
        for step in range(4):
            x = torch.full((2, 5), float(rank.rank + step))
            if interrupt and step == 2:
                grads = AwaitedBucket.grads

                def watched(bucket):
                    if next(calls) == 3:
                        raise KeyboardInterrupt
                    return grads(bucket)

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(AwaitedBucket, "grads", watched)
                    with pytest.raises(KeyboardInterrupt):
                        model(x).square().sum().backward()
                optimizer.zero_grad()
                model.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_same(*models, exact=True)


def test_an_interrupt_where_a_bucket_leaves(run):
    run(interrupted)
