"""States as users' optimizers have them: dicts, lists, deques, stacks, what comes later. Kept, or refused by name."""

import collections
import copy
import resource

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoint
from checkpoint import convert as converts
from checkpoint import full_state_dict, load_full_state_dict, reshard
from checkpoint.convert import FORMATS
from tests.checkpoint.test_checkpoint import SHARDED
from tests.common import STAGES, optimizer_of
from tests.ranks import run_module


class Keeps(torch.optim.Optimizer):
    """An optimizer, element by element; subclasses say what its state is."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.direction(self.state[param], param, param.grad), alpha=-group["lr"])


class DictOfTensors(Keeps):
    """AggMo's."""

    def direction(self, state, param, grad):
        if not state:
            state["buf"] = {beta: torch.zeros_like(param) for beta in (0.5, 0.9)}
        for beta, buf in state["buf"].items():
            buf.mul_(beta).add_(grad)
        return sum(state["buf"].values()) / 2


class Stack(Keeps):
    """The last two gradients, in one tensor of (2, *shape)."""

    def direction(self, state, param, grad):
        if not state:
            state["last"] = torch.zeros(2, *param.shape, device=param.device)
        state["last"] = torch.stack([grad, state["last"][0]])
        return state["last"].sum(0)


class History(Keeps):
    """The last gradients, in a deque, and what goes with them: numbers, a text, a flag, nothing."""

    def direction(self, state, param, grad):
        if not state:
            state.update(past=collections.deque(maxlen=2), steps=[], way="up", done=False, none=None,
                         pair=(torch.zeros_like(param), 0), counts=torch.zeros(3, dtype=torch.int64))
        state["past"].append(grad.clone())
        state["steps"].append(len(state["steps"]))
        state["counts"][1] += 1
        state["pair"] = state["pair"][0] + grad, state["pair"][1] + 1
        return sum(state["past"]) + state["pair"][0] / state["pair"][1]


class Later(Keeps):
    """Look-ahead weights from the third step on."""

    def direction(self, state, param, grad):
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 3:
            state["slow"] = param.clone()
        if state["n"] > 3:
            state["slow"].lerp_(param, 0.5)
            param.copy_(state["slow"])
        return grad


class Empty(Keeps):
    """A container that is not filled yet."""

    def direction(self, state, param, grad):
        if not state:
            state.update(past=[], more={}, sum=torch.zeros_like(param))
        return state["sum"].add_(grad)


KEPT = [DictOfTensors, Stack, History, Later, Empty]


def made(rank, stage, cls, seed=0):
    """Odd sizes, one parameter of one element, and none of it in one place."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 17), nn.Linear(17, 1)).to(rank.device)
    if stage is None:
        return model, cls(model.parameters())
    sizes = {"bucket_cap_mb": 0.001} if stage == STAGES[3] else {}
    return model, optimizer_of(stage)(model.parameters(), cls, **sizes)


def train(rank, model, optimizer, steps):
    """Every rank has the same batch."""
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(rank.device)
        (model(x) - 1).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def is_close(one, other):
    """To rounding: 3 ranks' mean of the same three numbers may be another one."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.allclose(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-6)
    return one == other


def equal(one, other):
    """To the bit, on whichever device."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        same = type(one) is type(other) and getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return same and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and one == other


def carried(rank, stage, cls, path):
    """By a dict, by files, by a move; and then training goes on as it would have in plain torch."""
    plain_model, plain = made(rank, None, cls)
    train(rank, plain_model, plain, range(4))
    model, optimizer = made(rank, stage, cls)
    train(rank, model, optimizer, range(4))
    full = full_state_dict(optimizer, to_all=True)
    assert is_close(full["state"], plain.state_dict()["state"])
    runs = [(model, optimizer)]
    by_dict = made(rank, stage, cls, seed=1)
    by_dict[0].load_state_dict(model.state_dict())
    load_full_state_dict(by_dict[1], full)
    runs.append(by_dict)
    checkpoint.save(path, model, optimizer)
    runs.append(made(rank, stage, cls, seed=2))
    checkpoint.load(path, *runs[-1])
    if stage in SHARDED:
        runs.append(made(rank, stage, cls))
        train(rank, *runs[-1], range(4))
        reshard(runs[-1][1], None)
    for _, its_optimizer in runs:
        assert equal(full_state_dict(its_optimizer, to_all=True)["state"], full["state"])
    train(rank, plain_model, plain, (4, 5))
    for one, its_optimizer in runs:
        train(rank, one, its_optimizer, (4, 5))
        assert is_close(dict(one.state_dict()), dict(plain_model.state_dict()))
        assert is_close(full_state_dict(its_optimizer, to_all=True)["state"], plain.state_dict()["state"])


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("world_size", [3])
def test_a_state_that_can_be_cut_is_carried(run, stage, tmp_path):
    for number, cls in enumerate(KEPT):
        folder_of_it = tmp_path / str(number)
        folder_of_it.mkdir()
        print(cls)  # pytest shows what was the last
        run(carried, stage, cls, folder_of_it / "one")


def into_other_stages(rank, stages, cls, path):
    plain_model, plain = made(rank, None, cls)
    train(rank, plain_model, plain, range(2 * len(stages)))
    for number, stage in enumerate(stages):
        model, optimizer = made(rank, stage, cls, seed=number)
        if number:
            checkpoint.load(path / str(number - 1), model, optimizer)
        train(rank, model, optimizer, (2 * number, 2 * number + 1))
        checkpoint.save(path / str(number), model, optimizer)
    assert is_close(dict(model.state_dict()), dict(plain_model.state_dict()))


@pytest.mark.parametrize("cls", KEPT)
@pytest.mark.parametrize("world_size", [2])
def test_it_goes_on_in_every_stage_and_in_plain_torch(run, cls, tmp_path):
    run(into_other_stages, [STAGES[3], STAGES[0], None, STAGES[2], STAGES[1]], cls, tmp_path)


def lbfgs(rank, path):
    """Its state has lists, which were lost."""
    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(4, 8)) - 1).pow(2).mean() + sum(p.pow(2).sum() for p in model.parameters()) * 0.01
            loss.backward()
            return loss
        optimizer.step(closure)

    def a_run(seed):
        torch.manual_seed(seed)
        model = nn.Linear(8, 3)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4)

    one, other = a_run(0), a_run(1)
    for _ in range(3):
        step(*one)
    checkpoint.save(path, *one)
    checkpoint.load(path, *other)
    assert equal(other[1].state_dict()["state"], one[1].state_dict()["state"])
    for run in (one, other):
        step(*run)
    assert all(map(torch.equal, one[0].parameters(), other[0].parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_lbfgs_goes_on(run, tmp_path):
    run(lbfgs, tmp_path / "one")


# -------------------------------------------------------------------------------------------------------------- refused


class Thing:
    pass


class AnObject(Keeps):
    def direction(self, state, param, grad):
        state["thing"] = Thing()
        return grad


class ANamedTuple(Keeps):
    def direction(self, state, param, grad):
        state["pair"] = {"inner": collections.namedtuple("Pair", "a b")(1, 2)}
        return grad


class ATextForAKey(Keeps):
    def step(self, closure=None):
        super().step()
        self.state["global"] = {"steps": 1}

    def direction(self, state, param, grad):
        return grad


class AddsToItsDict(Keeps):
    def direction(self, state, param, grad):
        return grad

    def state_dict(self):
        return {**super().state_dict(), "own": 3}


class OfEachPiece(Keeps):
    """As many numbers as its piece has elements, and one more: neither the parameter's shape nor one for all."""

    def direction(self, state, param, grad):
        state["wide"] = torch.ones(param.numel() + 20)
        return grad


REFUSED = {
    AnObject: "the state of (parameter 0|0.weight) has thing, which can't be kept: "
              "it holds tests.checkpoint.test_states.Thing",
    ANamedTuple: "the state of (parameter 0|0.weight) has pair.inner, which can't be kept: it holds .*Pair",
    ATextForAKey: "optimizer.state has an entry for 'global', which is no parameter",
    AddsToItsDict: r"AddsToItsDict.state_dict\(\) has own, which is of no parameter",
    OfEachPiece: "wide in the state of .* has shape .* on rank 0 and .* on rank 1",
}


def refused(rank, stage, cls, path):
    model, optimizer = made(rank, stage, cls)
    train(rank, model, optimizer, range(1))
    calls = {"full_state_dict": lambda: full_state_dict(optimizer),
             "save": lambda: checkpoint.save(path, model, optimizer),
             "asynchronous save": lambda: checkpoint.save(path, model, optimizer, asynchronous=True)}
    if stage in SHARDED:
        calls["reshard"] = lambda: reshard(optimizer, None)
    before = copy.deepcopy(dict(model.state_dict()))
    for call in calls.values():
        with pytest.raises(RuntimeError, match=REFUSED[cls]) as refusal:
            call()
        assert len(str(refusal.value).splitlines()) == 1
    assert not list(path.parent.iterdir()) and equal(dict(model.state_dict()), before)
    train(rank, model, optimizer, range(1))  # nobody waits for anybody


@pytest.mark.parametrize("stage, cls", [(stage, cls) for stage in (None, *STAGES) for cls in REFUSED
                                        if cls is not OfEachPiece or stage in SHARDED])  # others have it whole
@pytest.mark.parametrize("world_size", [2])
def test_a_state_that_cannot_be_kept_is_refused_at_the_call_on_every_rank(run, stage, cls, tmp_path):
    run(refused, stage, cls, tmp_path / "one")


def flagged(rank, stage, path):
    """What a user adds to a state comes along."""
    model, optimizer = made(rank, stage, Stack)
    train(rank, model, optimizer, range(1))
    for state in optimizer.state.values():
        state["frozen since"] = 3
    checkpoint.save(path, model, optimizer)
    other, again = made(rank, stage, Stack)
    checkpoint.load(path, other, again)
    assert again.state and all(state["frozen since"] == 3 for state in again.state.values())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2])
def test_what_a_user_adds_to_a_state_is_loaded(run, stage, tmp_path):
    run(flagged, stage, tmp_path / "one")


# -------------------------------------------------------------------------------------------------------------- convert


def saved(rank, stage, path):
    model, optimizer = made(rank, stage, torch.optim.AdamW)
    train(rank, model, optimizer, range(2))
    checkpoint.save(path, model, optimizer, {"step": 2, "rank": rank.rank})
    return {name: value.cpu() for name, value in model.state_dict().items()}, full_state_dict(optimizer, to_all=True)


def convert(*arguments):
    return run_module("checkpoint", "convert", *arguments)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2])
def test_a_checkpoint_is_converted_to_one_file(run, stage, tmp_path):
    model, full = run(saved, stage, tmp_path / "one")[0]
    ran = convert(tmp_path / "one", tmp_path / "model.pt")
    assert ran.code == 0, ran.stderr
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    names = list(model)
    assert equal(found["model"], model) and found["extra"] == [{"step": 2, "rank": rank} for rank in range(2)]
    assert equal(found["optimizer"]["state"], {names[index]: state for index, state in full["state"].items()})
    (group,), (expected,) = found["optimizer"]["param_groups"], full["param_groups"]
    assert group == {**expected, "params": names}


def saved_alone(path):
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer, {"step": 2})
    return model


def test_a_checkpoint_is_converted_for_torchs_tools(tmp_path):
    model = saved_alone(tmp_path / "one")
    for to, name in (("torch", "one.pt"), ("dcp", "one.dcp")):
        ran = convert(tmp_path / "one", "--to", to)
        assert ran.code == 0 and f"{tmp_path}/{name}: 2 tensors of the model" in ran.stdout
    dcp_to_torch_save(tmp_path / "one.dcp", tmp_path / "again.pt")
    one, again = (torch.load(tmp_path / name, weights_only=True) for name in ("one.pt", "again.pt"))
    assert equal(one, again) and equal(one["model"], dict(model.state_dict()))


def test_what_cannot_be_converted_is_one_line(tmp_path):
    ran = convert(tmp_path / "one", tmp_path / "model.pt")
    assert ran.code == 1 and len(ran.stderr.splitlines()) == 1 and "there is no such folder" in ran.stderr
    assert not (tmp_path / "model.pt").exists()
    saved_alone(tmp_path / "one")
    (tmp_path / "model.pt").write_text("mine")
    ran = convert(tmp_path / "one", tmp_path / "model.pt")
    assert ran.code == 1 and len(ran.stderr.splitlines()) == 1 and "it exists already" in ran.stderr
    assert (tmp_path / "model.pt").read_text() == "mine"


@pytest.mark.parametrize("to", FORMATS)
def test_a_conversion_to_a_full_disk_leaves_nothing_behind(to, tmp_path, monkeypatch):
    """The limit stands for the disk: 10 kB of 120 are written."""
    saved_alone(tmp_path / "one")
    (tmp_path / "to").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            converts.convert(tmp_path / "one", tmp_path / "to" / "it", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "to").iterdir())


def an_empty_group(rank, stage, path):
    """As a split into what decays and what doesn't may make one."""
    def a_run(value):
        model = torch.nn.ParameterList([torch.full((9,), value, device=rank.device)])
        groups = [{"params": list(model)}, {"params": [], "weight_decay": 0.0}]
        return model, optimizer_of(stage)(groups, torch.optim.AdamW, lr=0.1)

    def step(model, optimizer):
        model[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = a_run(1.0)
    step(model, optimizer)
    checkpoint.save(path, model, optimizer)
    full = checkpoint.full_state_dict(optimizer, to_all=True)
    again, again_optimizer = a_run(7.0)
    checkpoint.load(path, again, again_optimizer)
    checkpoint.load_full_state_dict(again_optimizer, full)
    step(model, optimizer)
    step(again, again_optimizer)
    assert torch.equal(model[0], again[0])


@pytest.mark.parametrize("world_size", [2])
def test_a_checkpoint_with_an_empty_group(run, stage, tmp_path):
    run(an_empty_group, stage, tmp_path / "one")
