"""The state as one dict, and on other ranks. Nothing is lost: the next step is the same."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint
from checkpoint import full_state_dict, load_full_state_dict, reshard
from tests.checkpoint import ADAMW, SHARDED, a_run, small, train
from tests.checkpoint.compare import close, equal, full, nothing_changes, weights
from tests.common import OPTIMIZERS, STAGES, batch, error_of, loss_of, on_ranks, optimizer_of, trainable
from tests.pairs import Pair, Replicated, assert_same

F, B, H = torch.float32, torch.bfloat16, torch.float16


def two_named_groups(model):
    named = list(model.named_parameters())
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.003}]


@on_ranks(2, 3, stage=STAGES, case=OPTIMIZERS)
def test_the_full_state_dict_is_that_of_the_plain_torch_optimizer(rank, stage, case):
    cls, kwargs = OPTIMIZERS[case]
    own = {"bucket_cap_mb": 0.0003} if stage == STAGES[3] else {}
    pair = Pair(rank, stage, cls, two_named_groups, own=own, **kwargs)
    pair.train(0, 1, 2)
    for optimizer in pair.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # as schedulers do
    on_one = full_state_dict(pair.optimizer)
    on_all = full(pair.optimizer)
    plain = pair.replicated.optimizer.state_dict()
    assert equal(on_one, on_all) if rank.number == 0 else on_one == {}
    assert on_all["param_groups"] == plain["param_groups"] and close(on_all["state"], plain["state"])


def to_plain_and_back(rank, stage):
    """Two steps in the stage, one in plain torch, two in a new instance of the stage: as five in plain torch."""
    pair = Pair(rank, stage, **ADAMW)
    plain = Replicated(rank, **ADAMW)
    pair.train(0, 1)
    plain.optimizer.load_state_dict(full(pair.optimizer))
    plain.model.load_state_dict(pair.model.state_dict())
    for replicated in (plain, pair.replicated):
        replicated.step(2)
    model = copy.deepcopy(plain.model)
    optimizer = optimizer_of(stage)(trainable(model), lr=1.0)
    is_first = dist.get_rank(optimizer.process_group) == 0
    load_full_state_dict(optimizer, plain.optimizer.state_dict() if is_first else {})
    assert optimizer.param_groups[0]["lr"] == ADAMW["lr"]
    pair.model, pair.optimizer, pair.models = model, optimizer, (model, pair.replicated.model)
    pair.train(3, 4)
    pair.assert_same()


@on_ranks(2, 3, stage=STAGES)
def test_a_run_goes_on_in_plain_torch_and_back(rank, stage):
    to_plain_and_back(rank, stage)


@on_ranks(3, stage=SHARDED, saved=[F, B, H])
def test_what_is_saved_is_loaded_to_the_bit_with_any_dtype_and_bucket_size(rank, stage, saved, tmp_path):
    """By files, by a dict, by a move. Main parameters of 16-bit ones travel in fp32: nothing else rounds them."""
    path = tmp_path / f"{stage}{saved}"
    model, optimizer = a_run(rank, stage, dtype=saved, cls=torch.optim.SGD, lr=1e-3, momentum=0.9, steps=3)
    checkpoint.save(path, model, optimizer)
    found = full(optimizer)
    precise = [found["state"].get(index, {}).get("main_param", param.detach().float())
               for index, param in enumerate(model.parameters())]
    for dtype in (F, B):
        sizes = {"bucket_cap_mb": 0.0006} if stage == STAGES[3] else {}
        its_model, its_optimizer = a_run(rank, stage, seed=1, dtype=dtype, cls=torch.optim.SGD, momentum=0.1, **sizes)
        checkpoint.load(path, its_model, its_optimizer)
        assert equal([*its_model.parameters()], [value.to(dtype) for value in precise])
        for index, entries in full(its_optimizer)["state"].items():
            assert equal(entries.get("main_param", precise[index]), precise[index])
            assert equal(entries["momentum_buffer"], found["state"][index]["momentum_buffer"])
    by_dict = a_run(rank, stage, seed=1, dtype=saved, cls=torch.optim.SGD, momentum=0.1)
    by_dict[0].load_state_dict(model.state_dict())
    load_full_state_dict(by_dict[1], found)
    reshard(optimizer, None)
    for run in ((model, optimizer), by_dict):
        assert equal(full(run[1]), found)
        train(rank, *run, (3, 4))
    assert equal(weights(model), weights(by_dict[0])) and equal(full(optimizer), full(by_dict[1]))


@on_ranks(1)
def test_what_was_loaded_is_not_changed_in_the_dict_that_it_came_from(rank):
    """So a run can go back twice. Ranks that are sent a state have a copy anyhow."""
    model, optimizer = a_run(rank, STAGES[3], lr=torch.tensor(0.5), steps=1)
    state_dict = full_state_dict(optimizer)
    before = copy.deepcopy(state_dict)
    load_full_state_dict(optimizer, state_dict)
    optimizer.param_groups[0]["lr"].fill_(9)
    train(rank, model, optimizer, (1,))
    assert equal(state_dict, before)


@on_ranks(2, stage=SHARDED)
def test_a_state_that_one_rank_has_cleared_is_not_put_together(rank, stage):
    _, optimizer = small(rank, stage, torch.nn.Linear(40, 40))
    if rank.number == 1:
        optimizer.optimizer.state.clear()
    line = error_of(lambda: full(optimizer))
    assert "elements only: some ranks have stepped it and others not, or cleared it" in line


# ------------------------------------------------------------------------------------------------------- other ranks


@on_ranks(4, stage=SHARDED, name=OPTIMIZERS)
def test_a_live_optimizer_moves_to_other_ranks(rank, stage, name):
    """4 -> 2 -> 3 -> 4 ranks. With a scheduler, whose optimizer stays the same object."""
    cls, kwargs = OPTIMIZERS[name]
    runs = [a_run(rank, its, cls=cls, **kwargs) for its in (None, stage)]
    (plain, plain_optimizer), (model, optimizer) = runs
    schedulers = [torch.optim.lr_scheduler.StepLR(its, 1, gamma=0.9) for its in (plain_optimizer, optimizer)]
    for turn, ranks in enumerate([range(4), [1, 3], [0, 1, 2], range(4)]):
        if turn:
            reshard(optimizer, None if len(ranks) == 4 else dist.new_group([*ranks]))
        for its, scheduler in zip(runs, schedulers):
            if its[0] is plain or rank.number in ranks:
                train(rank, *its, (2 * turn, 2 * turn + 1))
            scheduler.step()
        if rank.number in ranks:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(plain_optimizer.param_groups[0]["lr"])
            assert close(weights(model), weights(plain))
        else:
            assert "in no process group since reshard" in error_of(lambda: train(rank, model, optimizer, [0]))
            model.zero_grad()
        dist.barrier()


@on_ranks(3, stage=SHARDED)
def test_gradients_are_not_lost_by_moving(rank, stage):
    """Not those of backward(), on whichever rank. A rank that was outside steps with those of the next pass only."""
    (model, optimizer), (plain, plain_optimizer) = a_run(rank, stage, **ADAMW), a_run(rank, None, **ADAMW)
    reshard(optimizer, dist.new_group([0, 1]))
    loss_of(model, *batch(7, 0)).backward()
    assert "between backward() and step()" in error_of(lambda: reshard(optimizer, None))
    optimizer.zero_grad()
    if optimizer.rank < 0:
        loss_of(model, *batch(8, 0)).backward()
    reshard(optimizer, None)
    train(rank, model, optimizer, range(2))
    train(rank, plain, plain_optimizer, range(2))
    assert_same(model, plain, exact=False)


# Of each of three ranks: which group it moves to, see the test.
ELSEWHERE = {"not on a member": "011", "another on a member": "0a0", "destroyed": "000", "no group on one": "aa7",
             "none": "111", "from several": "aaa"}


@on_ranks(3, stage=SHARDED, what=ELSEWHERE)
def test_a_move_to_different_groups_or_from_several_is_refused_on_every_rank(rank, stage, what):
    """Nobody waits for a rank that is elsewhere, and nothing is lost."""
    groups = {"0": dist.new_group([0, 1]), "1": dist.GroupMember.NON_GROUP_MEMBER, "a": None, "7": 7}
    last = dist.new_group([2])
    here = last if rank.number == 2 else groups["0"]
    group = groups[ELSEWHERE[what][rank.number]]
    model, optimizer = a_run(rank, stage, here if what == "from several" else None, **ADAMW, steps=1)
    if what == "destroyed" and rank.number < 2:
        dist.destroy_process_group(group)
    why = {"from several": "of several", "no group on one": "must be a ProcessGroup, such as .*, not a int"}.get(what)
    with nothing_changes(model, optimizer):
        line = error_of(lambda: reshard(optimizer, group))
        assert re.search(why or "on each of its ranks|not registered|rank . is not", line), line


@on_ranks(3, stage=SHARDED)
def test_who_is_outside_has_no_part_in_the_state(rank, stage, tmp_path):
    """Nor in a group that the others have added meanwhile."""
    model, optimizer = small(rank, stage)
    reshard(optimizer, dist.new_group([0, 2]))
    if rank.number == 1:
        for call in (lambda: checkpoint.save(tmp_path / "one", model, optimizer), lambda: full(optimizer)):
            assert "in no process group since reshard" in error_of(call)
        assert full_state_dict(optimizer) == {}
    else:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})
    assert "different parameter groups" in error_of(lambda: reshard(optimizer, None))


@on_ranks(2)
def test_whole_parameters_and_dtensors_stay_where_they_are(rank):
    weight = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    alone = [dist.new_group([number]) for number in range(2)][rank.number]
    of_dtensors = optimizer_of(STAGES[3])([torch.nn.Parameter(weight)], process_group=alone)
    for optimizer in (of_dtensors, a_run(rank, None)[1], a_run(rank, STAGES[1])[1]):
        line = error_of(lambda: reshard(optimizer, None), TypeError)
        assert "moves optimizers of stages 3 and 4 without DTensors" in line
