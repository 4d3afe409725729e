"""The state as one dict, and on other ranks. Nothing is lost: the next step is the same."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint
from checkpoint import full_state_dict, load_full_state_dict, reshard
from harness import STAGE_2, STAGE_4
from tests.checkpoint import SHARDED, make_optimizer, make_run, train
from tests.checkpoint.compare import equal, full_state, nothing_changes
from tests.common import OPTIMIZERS, STAGES, Net, batch, error_of, loss_of, mesh_of, on_ranks
from tests.pairs import Pair

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
UP_TO_ROUNDING = {"rtol": 1e-4, "atol": 1e-6}  # sums over the ranks have another order than in one process


def two_named_groups(model):
    named = list(model.named_parameters())
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.003}]


@on_ranks(2, 3, stage=STAGES, name=OPTIMIZERS)
def test_the_full_state_dict_is_that_of_the_plain_torch_optimizer(rank, stage, name):
    """A new optimizer loads this dict, and then has the same full state. tests/pages/test_migrate.py trains on."""
    cls, kwargs = OPTIMIZERS[name]
    pair = Pair(rank, stage, cls, two_named_groups, **kwargs)
    pair.train(0, 1, 2)
    for optimizer in pair.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5  # as schedulers do
    on_one = full_state_dict(pair.optimizer)
    on_all = full_state(pair.optimizer)
    assert equal(on_one, on_all) if rank.number == 0 else on_one == {}
    plain = pair.replicated.optimizer.state_dict()
    assert on_all["param_groups"] == plain["param_groups"]
    torch.testing.assert_close(on_all["state"], plain["state"], **UP_TO_ROUNDING)
    new_optimizer = make_optimizer(stage, two_named_groups(Net(seed=1)), cls, **{**kwargs, "lr": 9.0})
    load_full_state_dict(new_optimizer, on_one)
    assert equal(full_state(new_optimizer), on_all)


@on_ranks(3, stage=SHARDED, saved=[F32, BF16, FP16])
def test_what_is_saved_is_loaded_to_the_bit_with_any_dtype(rank, stage, saved, tmp_path):
    """Load files, load a dict, and move. Main parameters of 16-bit parameters travel in fp32, and are never rounded."""
    def make(seed, dtype, **kwargs):
        return make_run(rank, stage, seed=seed, dtype=dtype, cls=torch.optim.SGD, **kwargs)

    path = tmp_path / f"{stage}{saved}"
    model, optimizer = make(0, saved, lr=1e-3, momentum=0.9, steps=3)
    checkpoint.save(path, model, optimizer)
    state_dict = full_state(optimizer)
    state_dict_before = copy.deepcopy(state_dict)
    main_params = []  # of each parameter its value in fp32
    for index, param in enumerate(model.parameters()):
        entries = state_dict["state"].get(index, {})
        main_params.append(entries.get("main_param", param.detach().float()))

    for dtype in (F32, BF16):
        new_model, new_optimizer = make(1, dtype, momentum=0.1)
        checkpoint.load(path, new_model, new_optimizer)
        assert equal([*new_model.parameters()], [value.to(dtype) for value in main_params])
        for index, entries in full_state(new_optimizer)["state"].items():
            assert equal(entries.get("main_param", main_params[index]), main_params[index])
            assert equal(entries["momentum_buffer"], state_dict["state"][index]["momentum_buffer"])

    new_model, new_optimizer = make(1, saved, momentum=0.1)
    new_model.load_state_dict(model.state_dict())
    load_full_state_dict(new_optimizer, state_dict)
    reshard(optimizer, None)
    for run in ((model, optimizer), (new_model, new_optimizer)):
        assert equal(full_state(run[1]), state_dict)
        train(rank, *run, (3, 4))
    assert equal(model.state_dict(), new_model.state_dict())
    assert equal(full_state(optimizer), full_state(new_optimizer))
    assert equal(state_dict, state_dict_before)  # a run may go back to it a second time


@on_ranks(2, stage=SHARDED)
def test_a_state_that_one_rank_has_cleared_is_not_put_together(rank, stage):
    layer = torch.nn.Linear(40, 40)  # each rank has a part of the weight
    optimizer = make_optimizer(stage, layer.parameters())
    layer(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    if rank.number == 1:
        optimizer.optimizer.state.clear()
    line = error_of(lambda: full_state(optimizer))
    assert "elements only: some ranks have stepped it and others not, or cleared it" in line


# ------------------------------------------------------------------------------------------------------- other ranks


@on_ranks(4, stage=SHARDED, name=OPTIMIZERS)
def test_a_live_optimizer_moves_to_other_ranks(rank, stage, name):
    """Move from 4 ranks to 2, 3 and 4. A scheduler stays, because its optimizer stays the same object.

    A move between backward() and step() is refused. A rank outside keeps a gradient, which later steps must not count.
    """
    cls, kwargs = OPTIMIZERS[name]
    plain_model, plain_optimizer = make_run(rank, None, cls=cls, **kwargs)
    model, optimizer = make_run(rank, stage, cls=cls, **kwargs)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 1, gamma=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for number, ranks in enumerate([[0, 1, 2, 3], [1, 3], [0, 1, 2], [0, 1, 2, 3]]):
        reshard(optimizer, dist.new_group(ranks))
        steps = 2 * number, 2 * number + 1
        train(rank, plain_model, plain_optimizer, steps)
        plain_scheduler.step()
        if rank.number in ranks:
            train(rank, model, optimizer, steps)
            torch.testing.assert_close(model.state_dict(), plain_model.state_dict(), **UP_TO_ROUNDING)
        else:
            assert "in no process group since reshard" in error_of(lambda: train(rank, model, optimizer, [0]))
        scheduler.step()
        loss_of(model, *batch(7, 0)).backward()
        assert "between backward() and step()" in error_of(lambda: reshard(optimizer, None))
        if rank.number in ranks:
            optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(plain_optimizer.param_groups[0]["lr"])


MOVES = {  # name -> (the groups that ranks 0, 1 and 2 pass, words of the error)
    "another on a member": (["first two", "outside", "outside"], "on each of its ranks"),
    "no member": (["outside", "outside", "outside"], "on each of its ranks"),
    "destroyed": (["first two", "first two", "outside"], "not registered|rank . is not"),
    "no group on one": (["all", "all", "a number"], "must be a ProcessGroup, such as .*, not a int"),
}


@on_ranks(3, stage=SHARDED, name=MOVES)
def test_a_move_to_different_groups_is_refused_on_every_rank(rank, stage, name):
    """No rank waits for a rank that is elsewhere, and nothing is lost."""
    groups = {"first two": dist.new_group([0, 1]), "outside": dist.GroupMember.NON_GROUP_MEMBER, "all": None,
              "a number": 7}
    group_names, words = MOVES[name]
    group = groups[group_names[rank.number]]
    model, optimizer = make_run(rank, stage, steps=1)
    if name == "destroyed" and rank.number < 2:
        dist.destroy_process_group(group)
    with nothing_changes(model, optimizer):
        line = error_of(lambda: reshard(optimizer, group))
        assert re.search(words, line), line


@on_ranks(2, stage=SHARDED)
def test_a_move_from_several_groups_is_refused(rank, stage):
    """Each of the groups may have trained something else."""
    own_group, _ = dist.new_subgroups(group_size=1)
    _, optimizer = make_run(rank, stage, own_group)
    assert "reshard() of several process groups" in error_of(lambda: reshard(optimizer, None))


@on_ranks(3, stage=SHARDED)
def test_who_is_outside_has_no_part_in_the_state(rank, stage, tmp_path):
    """A rank outside can neither save nor read the state. The others may not add a group of parameters meanwhile."""
    model, optimizer = make_run(rank, stage, steps=1)
    reshard(optimizer, dist.new_group([0, 2]))
    if rank.number == 1:
        line = error_of(lambda: checkpoint.save(tmp_path / "one", model, optimizer))
        assert "in no process group since reshard" in line and full_state_dict(optimizer) == {}
    else:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})
    assert "different parameter groups" in error_of(lambda: reshard(optimizer, None))


@on_ranks(2)
def test_whole_parameters_and_dtensors_stay_where_they_are(rank):
    mesh = mesh_of("cpu", (1, 2), ("dp", "tp"))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    of_dtensors = make_optimizer(STAGE_4, [weight], process_group=mesh["dp"].get_group())
    _, of_whole_params = make_run(rank, STAGE_2)
    for optimizer in (of_dtensors, of_whole_params):
        line = error_of(lambda: reshard(optimizer, None), TypeError)
        assert "moves optimizers of stages 3 and 4 without DTensors" in line
