"""Nothing is lost: one dict, files, other ranks and stages, plain torch. Each time the next step must be the same."""

import copy
import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import checkpoint
from checkpoint import full_state_dict, load_full_state_dict, reshard
from tests.checkpoint import ADAMW, SHARDED, a_run, alone, small, train
from tests.checkpoint.compare import close, equal, full, nothing_changes, weights
from tests.common import OPTIMIZERS, STAGES, batch, error_of, loss_of, on_ranks, optimizer_of, trainable
from tests.pairs import Pair, Replicated, assert_same

F, B, H = torch.float32, torch.bfloat16, torch.float16

# ------------------------------------------------------------------------------------------------------------- one dict


def two_named_groups(model):
    named = list(model.named_parameters())
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.003}]


OTHERS = "Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"
CASES = [*((stage, case) for case in OPTIMIZERS.values() for stage in STAGES),
         *((stage, (getattr(torch.optim, cls), {"lr": 0.01})) for stage, cls in zip(itertools.cycle(SHARDED), OTHERS))]


@on_ranks(2, 3, case=CASES)
def test_the_full_state_dict_is_that_of_the_plain_torch_optimizer(rank, case):
    stage, (cls, kwargs) = case
    own = {"bucket_cap_mb": 0.0003} if stage == STAGES[3] else {}
    pair = Pair(rank, stage, cls, two_named_groups, own=own, **kwargs)
    pair.train(0, 1, 2)
    for group in itertools.chain(*(optimizer.param_groups for optimizer in pair.optimizers)):
        group["lr"] *= 0.5  # as schedulers do
    on_one, on_all, plain = full_state_dict(pair.optimizer), full(pair.optimizer), pair.optimizers[1].state_dict()
    assert equal(on_one, on_all) if rank.rank == 0 else on_one == {}
    assert on_all["param_groups"] == plain["param_groups"] and close(on_all["state"], plain["state"])
    assert all(value.device.type == "cpu" for state in on_all["state"].values() for value in state.values())


def to_plain_and_back(rank, stage):
    """Two steps in the stage, one in plain torch, two in a new instance of the stage: as five in plain torch."""
    pair, plain = Pair(rank, stage, **ADAMW), Replicated(rank, **ADAMW)
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


DTYPES = [(F, torch.optim.AdamW, ADAMW), (B, torch.optim.AdamW, ADAMW), (H, torch.optim.SGD, {"lr": 1e-3})]


@on_ranks(3, stage=SHARDED, case=DTYPES)
def test_what_is_saved_is_loaded_to_the_bit_with_any_dtype_and_bucket_size(rank, stage, case, tmp_path):
    """By a dict, by files, by a move. Main parameters of 16-bit ones travel in fp32: nothing else rounds them."""
    (dtype, cls, kwargs), path = case, tmp_path / f"{stage}{case[0]}"
    alike = rank.backend == "nccl"  # which sums three gradients in an order that the bucket's size decides
    model, optimizer = a_run(rank, stage, dtype=dtype, cls=cls, **kwargs)
    train(rank, model, optimizer, range(3), alike)
    checkpoint.save(path, model, optimizer, {"rank": rank.rank})
    found, before = full(optimizer), full(optimizer)
    exact = [found["state"].get(index, {}).get("main_param", param.detach().float().cpu())  # the most precise there is
             for index, param in enumerate(model.parameters())]
    reshard(optimizer, None)
    runs = [(model, optimizer)]
    sizes = {"bucket_cap_mb": 0.0006} if stage == STAGES[3] else {}
    for loaded in dict.fromkeys([F, dtype, B if dtype == F else dtype]):
        by_files, by_dict = (a_run(rank, stage, seed=1, dtype=loaded, cls=cls, lr=9.0, **sizes) for _ in range(2))
        assert checkpoint.load(path, *by_files) == {"rank": rank.rank}
        by_dict[0].load_state_dict(by_files[0].state_dict())
        load_full_state_dict(by_dict[1], found)
        runs += [by_files, by_dict] if loaded == dtype else []
        for its, optimizer in (by_files, by_dict if dtype != F else by_files):
            assert equal([*its.parameters()], [value.to(loaded) for value in exact])
            for index, state in full(optimizer)["state"].items():
                assert equal(state.get("main_param", exact[index]), exact[index])
    for its in runs:
        assert equal(full(its[1]), found)
        train(rank, *its, (3, 4), alike)
        assert equal((weights(its[0]), full(its[1])), (weights(runs[0][0]), full(runs[0][1])))
    assert equal(found, before)  # what was loaded from it is stepped elsewhere


@on_ranks(2, stage=SHARDED)
def test_a_move_keeps_what_16_bits_cannot(rank, stage, tmp_path):
    """Loaded in fp32, and moved before the first step."""
    checkpoint.save(tmp_path / stage, *a_run(rank, stage))
    runs = [a_run(rank, stage, seed=1, dtype=B) for _ in range(2)]
    for number, (model, optimizer) in enumerate(runs):
        checkpoint.load(tmp_path / stage, model, optimizer)
        if number:
            reshard(optimizer, None)
        train(rank, model, optimizer, [0])
    assert equal(*(full(optimizer) for _, optimizer in runs))


def test_what_was_loaded_is_not_changed_in_the_dict_that_it_came_from():
    """So a run can go back twice. Without ranks: what those send each other is a copy anyhow."""
    _, optimizer = alone()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    state_dict = full_state_dict(optimizer)
    before = copy.deepcopy(state_dict)
    load_full_state_dict(optimizer, state_dict)
    for value in tree_leaves([*optimizer.state.values()]):
        value.fill_(9)
    optimizer.param_groups[0]["lr"].fill_(9)
    assert equal(state_dict, before)


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    def complete(*names):
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / ".metadata").touch()

    assert checkpoint.latest(tmp_path / "nowhere") is None and checkpoint.latest(tmp_path) is None
    (tmp_path / "step-3").mkdir()  # without manifest
    (tmp_path / "step-5" / ".metadata").mkdir(parents=True)
    complete("step-2", "step-1", "step-4.0-0123456789ab-0.partial", "zzz-best", "step-9.aside")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    for name in ("step-9", "step-10", "step-00000011", "epoch-12"):
        complete(name)
        assert checkpoint.latest(tmp_path) == tmp_path / name

@on_ranks(4, stage=SHARDED, name=OPTIMIZERS)
def test_a_live_optimizer_moves_to_other_ranks(rank, stage, name):
    """4 -> 2 -> 3 -> 4 ranks. With a scheduler, whose optimizer stays the same object."""
    cls, kwargs = OPTIMIZERS[name]
    runs = [a_run(rank, its, cls=cls, **kwargs) for its in (None, stage)]
    (plain, plain_optimizer), (model, optimizer) = runs
    if stage == STAGES[3]:
        optimizer.prefetch_params(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(its, 1, gamma=0.9) for its in (plain_optimizer, optimizer)]
    for turn, ranks in enumerate([range(4), [1, 3], [0, 1, 2], range(4)]):
        if turn:
            reshard(optimizer, None if len(ranks) == 4 else dist.new_group([*ranks]))
        for its, scheduler in zip(runs, schedulers):
            if its[0] is plain or rank.rank in ranks:
                train(rank, *its, (2 * turn, 2 * turn + 1))
                scheduler.step()
        if rank.rank in ranks:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(plain_optimizer.param_groups[0]["lr"])
            assert close(weights(model), weights(plain))
        else:
            assert getattr(optimizer, "bucket_buffer_bytes", 0) == 0
            with pytest.raises(RuntimeError, match="in no process group since reshard"):
                train(rank, model, optimizer, [0])
            model.zero_grad()
            scheduler.step()
        dist.barrier()


def backward(rank, model, step=0):
    loss_of(model, *batch(step, 0, device=rank.device)).backward()


@on_ranks(3, stage=SHARDED)
def test_gradients_are_not_lost_by_moving(rank, stage):
    """Not those of backward(), on whichever rank; and what was assigned is counted in the next step.

    A rank that was outside, and looked at gradients there, steps with those of the next pass only.
    """
    (model, optimizer), (plain, plain_optimizer) = a_run(rank, stage, **ADAMW), a_run(rank, None, **ADAMW)
    between = pytest.raises(RuntimeError, match="between backward")
    for accumulates in (False, True):
        with optimizer.no_sync() if accumulates else pytest.MonkeyPatch.context():
            backward(rank, model)
        with between:
            reshard(optimizer, None)
        optimizer.zero_grad()
    reshard(optimizer, None)
    for param in [*trainable(model), *trainable(plain)]:
        param.grad = torch.ones_like(param)
    reshard(optimizer, None)
    for its in (optimizer, plain_optimizer):
        its.step()
        its.zero_grad()
    assert_same(model, plain, exact=False)
    reshard(optimizer, dist.new_group([0, 1]))
    backward(rank, model, 7)
    if optimizer.rank < 0:  # on the last rank, which is outside, gradients are nobody's
        optimizer.zero_grad()
        backward(rank, model, 8)
    with between:
        reshard(optimizer, None)
    if optimizer.rank >= 0:
        optimizer.zero_grad()
    reshard(optimizer, None)
    train(rank, model, optimizer, range(2))
    train(rank, plain, plain_optimizer, range(2))
    assert_same(model, plain, exact=False)


@on_ranks(2, case=[(STAGES[2], False), (STAGES[2], True), (STAGES[3], False)])
def test_who_moves_lets_go_of_gradients(rank, case):
    """Views of the old buffer would keep all of it: there are those of the new one, and outside none."""
    stage, has_main_grads = case
    model, optimizer = a_run(rank, stage, **{"dtype": B, "grad_dtype": F} if has_main_grads else {})
    reshard(optimizer, dist.new_group([0]))
    for param in model.parameters():
        assert bool(param._post_accumulate_grad_hooks) == (rank.rank == 0)
        assert hasattr(param, "main_grad") == (rank.rank == 0 and has_main_grads)
        if rank.rank or not param.requires_grad or has_main_grads or stage != STAGES[2]:
            assert param.grad is None
        if hasattr(param, "main_grad") or param.grad is not None:
            grad = param.main_grad if has_main_grads else param.grad
            assert any(grad.is_set_to(view) for buffer in optimizer.buffers for view in buffer.grads)


# Of each of three ranks: which group it moves to, see the test.
ELSEWHERE = {"not on a member": "011", "another on a member": "0a0", "destroyed": "000", "no group on one": "aa7",
             "none": "111", "to several": "002", "from several": "aaa"}


@on_ranks(3, stage=SHARDED, what=ELSEWHERE)
def test_a_move_to_different_groups_or_from_several_is_refused_on_every_rank(rank, stage, what):
    """Nobody waits for a rank that is elsewhere, and nothing is lost."""
    groups = {"0": dist.new_group([0, 1]), "1": dist.GroupMember.NON_GROUP_MEMBER, "2": dist.new_group([2]), "a": None,
              "7": 7}
    here, group = groups["002"[rank.rank]], groups[ELSEWHERE[what][rank.rank]]
    model, optimizer = a_run(rank, stage, here if what == "from several" else None, **ADAMW, steps=1)
    if what == "destroyed" and rank.rank < 2:
        dist.destroy_process_group(group)
    why = {"from several": "of several", "no group on one": "must be a ProcessGroup, such as .*, not a int"}.get(what)
    with nothing_changes(model, optimizer), pytest.raises((RuntimeError, TypeError, ValueError),
                                                          match=why or "on each of its ranks|not registered"):
        reshard(optimizer, group)


@on_ranks(2, stage=STAGES)
def test_the_first_rank_of_a_group_has_its_state_whatever_order_the_group_has(rank, stage):
    can_be_unsorted = "sort_ranks" in inspect.signature(dist.new_group).parameters  # torch > 2.11
    group = dist.new_group([1, 0], **({"sort_ranks": False} if can_be_unsorted else {}))
    runs = [a_run(rank, stage, group, steps=2), a_run(rank, stage, group, seed=1)]
    state_dict, on_all = full_state_dict(runs[0][1]), full(runs[0][1])
    assert equal(state_dict, on_all if dist.get_rank(group) == 0 else {})
    load_full_state_dict(runs[1][1], state_dict or None)
    if stage in SHARDED:
        reshard(runs[0][1], None)
    assert equal(full(runs[0][1]), full(runs[1][1])) and full(runs[1][1])["state"]


@on_ranks(3, stage=SHARDED)
def test_who_is_outside_has_no_part_in_the_state(rank, stage, tmp_path):
    """Nor in a group that the others have added meanwhile."""
    model, optimizer = small(rank, stage)
    reshard(optimizer, dist.new_group([0, 2]))
    if rank.rank == 1:
        for call in (lambda: checkpoint.save(tmp_path / "one", model, optimizer), lambda: full(optimizer),
                     lambda: load_full_state_dict(optimizer, {})):
            with pytest.raises(RuntimeError, match="in no process group since reshard"):
                call()
        assert full_state_dict(optimizer) == {}
    else:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5, device=rank.device))]})
    with pytest.raises(RuntimeError, match="different parameter groups"):
        reshard(optimizer, None)


@on_ranks(2, stage=[None, *STAGES[:2]])
def test_whole_parameters_stay_where_they_are(rank, stage):
    with pytest.raises(TypeError, match="reshard.. moves optimizers of stages 3 and 4"):
        reshard(a_run(rank, stage)[1], None)


@on_ranks(2, stage=SHARDED)
def test_a_state_that_one_rank_has_cleared_is_not_put_together(rank, stage):
    _, optimizer = small(rank, stage, torch.nn.Linear(40, 40))
    if rank.rank == 1:
        optimizer.optimizer.state.clear()
    line = error_of(lambda: full(optimizer))
    assert "elements only: some ranks have stepped it and others not, or cleared it" in line
