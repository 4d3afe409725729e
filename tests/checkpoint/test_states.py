"""States as users' optimizers have them: kept, or refused by name, before anything is changed."""

import collections
import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint
from checkpoint import full_state_dict, load_full_state_dict, optimizers, reshard
from guard.schema import Schema, Spec, check_state, schema_of, with_specs
from tests.checkpoint import SHARDED, a_run, train, wrapped
from tests.checkpoint.compare import close, equal, full, nothing_changes, said_by_all, weights
from tests.common import STAGES, batch, error_of, loss_of, on_ranks, situation


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

    def direction(self, state, param, grad):
        return grad


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
    """The last gradients, in a deque, and what goes with them: numbers, a text, a flag, nothing, empty containers."""

    def direction(self, state, param, grad):
        if not state:
            state.update(past=collections.deque(maxlen=2), steps=[], way="up", done=False, none=None, more={},
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


class CountsInOneElement(Keeps):
    """As torch's own don't: its step has the shape (1,), like a piece of one element."""

    def direction(self, state, param, grad):
        if not state:
            state.update(step=param.new_zeros(1), sum=torch.zeros_like(param))
        state["step"] += 1
        state["sum"] += grad
        return (state["sum"] / state["step"]).view_as(param)


KEPT = [DictOfTensors, Stack, History, Later, CountsInOneElement]


@on_ranks(3, cls=KEPT)
def test_a_state_that_can_be_cut_goes_on_in_every_stage_and_in_plain_torch(rank, cls, tmp_path):
    """By a dict, by files, by a move. What a user adds to it comes along."""
    plain = a_run(rank, None, cls=cls)
    previous = None
    for turn, stage in enumerate([STAGES[3], STAGES[0], None, STAGES[2], STAGES[1]]):
        path, steps = tmp_path / f"{cls.__name__}{turn}", (2 * turn, 2 * turn + 1)
        model, optimizer = a_run(rank, stage, seed=turn, cls=cls)
        if turn:
            checkpoint.load(path.with_name(f"{cls.__name__}{turn - 1}"), model, optimizer)
            by_dict = wrapped(stage, copy.deepcopy(model).parameters(), cls)
            load_full_state_dict(by_dict, previous)
            assert equal(full(optimizer)["state"], previous["state"]) and equal(full(by_dict), full(optimizer))
        for its in (model, optimizer), plain:
            train(rank, *its, steps)
            for state in its[1].state.values():
                state["frozen since"] = turn
        if stage in SHARDED:
            reshard(optimizer, None)
        checkpoint.save(path, model, optimizer)
        previous = full(optimizer)
        assert close(weights(model), weights(plain[0]))
        assert close(previous["state"], plain[1].state_dict()["state"])


@on_ranks(1, 2)
def test_torchs_lbfgs_goes_on(rank, tmp_path):
    """Its state has lists, which were lost. It is of all parameters, in vectors as long as all of them."""
    runs = [a_run(rank, None, seed=seed, cls=torch.optim.LBFGS, max_iter=3, history_size=4) for seed in range(2)]

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, *batch(0, 0, device=rank.device))
            loss.backward()
            return loss
        optimizer.step(closure)

    for _ in range(3):
        step(*runs[0])
    checkpoint.save(tmp_path / "one", *runs[0])
    checkpoint.load(tmp_path / "one", *runs[1])
    found = runs[1][1].state_dict()
    assert equal(runs[0][1].state_dict()["state"], found["state"]) and len(found["state"][0]["old_dirs"]) > 1
    for its in runs:
        step(*its)
    assert equal(*(weights(model) for model, _ in runs))


# -------------------------------------------------------------------------------------------------------------- refused


def with_state(entries):
    """An optimizer whose state has the entries(param) after a step."""
    class Own(Keeps):
        def direction(self, state, param, grad):
            state.update(entries(param))
            return grad
    return Own


class ATextForAKey(Keeps):
    def step(self, closure=None):
        super().step()
        self.state["global"] = {"steps": 1}


class AddsToItsDict(Keeps):
    def state_dict(self):
        return {**super().state_dict(), "own": 3}


CUT = {  # where ranks have pieces: what suits those, and is neither of the parameter's shape nor one for all
    "numbers of each rank": (with_state(lambda param: {"wide": torch.full((99,), 1.0 + dist.get_rank())}),
                             "wide in the state of .* is another on rank . than on rank ."),
    "a stack of 2, 3 or 4": (with_state(lambda param: {"last": torch.zeros(2 + dist.get_rank(), *param.shape)}),
                             "last in the state of .* is another on rank . than on rank ."),
    "on one rank": (with_state(lambda param: {} if dist.get_rank() else {"sum": torch.zeros_like(param)}),
                    "the state of .* has sum for some of its elements only"),
}
REFUSED = {
    "an object": (with_state(lambda _: {"thing": Keeps}),
                  "the state of [a-z]+.* has thing, which can't be kept: it holds builtins.type"),
    "a named tuple": (with_state(lambda _: {"pair": {"inner": collections.namedtuple("Pair", "a b")(1, 2)}}),
                      "the state of [a-z]+.* has pair.inner, which can't be kept: it holds .*Pair"),
    "a text for a key": (ATextForAKey, "optimizer.state has an entry for 'global', which is no parameter"),
    "a dict of its own": (AddsToItsDict, r"AddsToItsDict.state_dict\(\) has own, which is of no parameter"),
}


@on_ranks(3, stage=[None, *STAGES])
def test_a_state_that_cannot_be_kept_is_refused_at_the_call_on_every_rank(rank, stage, tmp_path):
    for what, (cls, words) in (REFUSED | CUT if stage in SHARDED else REFUSED).items():
        model, optimizer = a_run(rank, stage, cls=cls, steps=1)
        calls = [lambda: full_state_dict(optimizer), lambda: checkpoint.save(tmp_path / "one", model, optimizer),
                 lambda: checkpoint.save(tmp_path / "one", model, optimizer, asynchronous=True)]
        if stage in SHARDED:
            calls.append(lambda: reshard(optimizer, None))
        before = copy.deepcopy(weights(model))
        for call in calls:
            with situation(what):
                assert re.search(words, error_of(call))
        assert not list(tmp_path.iterdir()) and equal(weights(model), before)
        train(rank, model, optimizer, range(1))  # nobody waits for anybody


# --------------------------------------------------------------------------------------------------------------- schema

CLASSES = {"Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {"fused": True},
           "Adamax": {}, "ASGD": {}, "Muon": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"centered": True},
           "Rprop": {}, "SGD": {"momentum": 0.9}}


def of_a_class(optimizer, param):
    (group,) = optimizer.param_groups
    options = {key: value for key, value in group.items() if key != "params"}
    return schema_of(type(optimizer), options, {}, param.shape, param.dtype, param.device)


def test_what_an_optimizer_keeps_fits_its_schema_at_each_step():
    for cls in [*CLASSES, *KEPT]:
        with situation(cls):
            param = nn.Parameter(torch.ones(5, 7))
            optimizer = cls([param]) if isinstance(cls, type) else getattr(torch.optim, cls)([param], **CLASSES[cls])
            schema = of_a_class(optimizer, param)
            assert schema is not None
            for _ in range(5):
                param.grad = torch.randn(5, 7)
                optimizer.step()
                check_state(schema, with_specs(dict(optimizer.state[param])), param.shape, "it")
            assert schema.from_start == (cls == "Adagrad")
    param = nn.Parameter(torch.ones(5))
    assert of_a_class(torch.optim.LBFGS([param]), param) is None  # it can't be stepped alone


def test_no_memory_is_taken_for_the_trial_where_a_class_reads_no_values():
    """16 TB would be."""
    options = {"lr": 0.1, "fused": True}
    schema = schema_of(torch.optim.AdamW, options, {}, torch.Size([2**20, 2**20]), torch.float32, torch.device("cpu"))
    assert schema.entries["exp_avg"].shape == (2**20, 2**20)


def test_an_optimizer_is_tried_once_until_its_groups_change(tmp_path, monkeypatch):
    """A learning rate changes at each step, and is no such change unless it can't be stepped with."""
    trials, of = [], optimizers.schema_of
    monkeypatch.setattr(optimizers, "schema_of", lambda *args: trials.append(args) or of(*args))
    model = nn.Linear(3, 3, bias=False)
    optimizer = type("Own", (torch.optim.SGD,), {})(model.parameters(), lr=0.1, momentum=0.9)
    for turn, changes in enumerate([{}, {"lr": 0.05}, {"momentum": 0.0}, {"lr": 0.01}]):
        optimizer.param_groups[0].update(changes)
        model.weight.grad = torch.ones(3, 3)
        optimizer.step()
        checkpoint.save(tmp_path / str(turn), model, optimizer)
        checkpoint.load(tmp_path / str(turn), model, optimizer)
        assert len(trials) == [1, 1, 2, 2][turn]
    with pytest.raises(ValueError, match="can't step with the hyperparameters that were saved"):
        optimizers.schemas_of(optimizer, [{**optimizer.param_groups[0], "weight_decay": None}])


NUMBER, LIKE_IT = Spec((), torch.float32), Spec((5, 7), torch.float32)
SCHEMA = Schema({"step": NUMBER, "sum": LIKE_IT, "n": 3, "text": "a", "last": Spec((2, 5, 7), torch.float32),
                 "pair": (NUMBER, 1), "past": [LIKE_IT]}, False, (5, 7))
FITS = {"step": Spec((), torch.float32), "sum": Spec((5, 7), torch.bfloat16), "n": 9, "text": "b",
        "last": Spec((3, 5, 7), torch.float32), "pair": (NUMBER, 2), "past": [LIKE_IT] * 4}
MISFITS = [("sum", Spec((1,), torch.float32)), ("sum", Spec((7, 5), torch.float32)),
           ("sum", Spec((1, 5, 7), torch.float32)), ("last", LIKE_IT), ("last", Spec((0, 5, 7), torch.float32)),
           ("sum", Spec((5, 7), torch.int64)), ("sum", Spec((5, 7), torch.float8_e5m2)), ("step", 2.0), ("n", "3"),
           ("n", Spec((), torch.int64)), ("sum", None), ("pair", [NUMBER, 2]), ("pair", (NUMBER, 2, 1)),
           ("past", LIKE_IT), ("past", [1]), ("slow", Spec((5, 6), torch.float32)),
           ("slow", {"a": [Spec((3,), torch.int8)]})]


def test_what_fits_a_schema_is_taken_and_what_does_not_is_refused_by_name():
    check_state(SCHEMA, FITS, (5, 7), "it")
    check_state(SCHEMA, {}, (5, 7), "it")  # it was never stepped
    more = {"slow": LIKE_IT, "since": 3, "deep": {"a": [Spec((), torch.int8)]}}
    check_state(SCHEMA, {**FITS, **more}, (5, 7), "it")  # of later steps
    for name, value in MISFITS:
        with situation((name, value)):
            with pytest.raises(ValueError, match=f"{name}.* in the state of it is of another optimizer: "):
                check_state(SCHEMA, {**FITS, name: value}, (5, 7), "it")
    for missing in FITS:  # entries belong together
        with situation(missing), pytest.raises(ValueError, match="is of another optimizer: .*keeps step, sum, n"):
            check_state(SCHEMA, {key: value for key, value in FITS.items() if key != missing}, (5, 7), "it")


# ------------------------------------------------------------------------------------------- a dict of something else
# what is wrong -> function(full state, index of a matrix): changes it, or returns another; what is said.


def entry(key, change):
    def of(found, index):
        state = found["state"][index]
        state[key] = change(state[key])
        if state[key] is None:
            del state[key]
    return of


def group_says(**options):
    return lambda found, _: found["param_groups"][0].update(options)


def exchanged(found, index):
    """Two parameters of other shapes have changed places: an honest mistake."""
    other = min(found["state"])
    found["state"][index], found["state"][other] = found["state"][other], found["state"][index]


def of_dtensors(found, index):
    """What fully_shard leaves on each rank is a part of the moments, of the same global shape."""
    state = found["state"][index]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {**found, "state": {**found["state"], index: {
        key: value if key == "step" else distribute_tensor(value, mesh, [Shard(0)]) for key, value in state.items()}}}


MISFIT = "the state of parameter [0-9]+ is of another optimizer"
OF_A_STATE = {
    "a row less": entry("exp_avg_sq", lambda value: value[:-1].clone()),
    "two counts": entry("step", lambda value: value.repeat(2)),
    "none": entry("exp_avg", lambda value: None),
}
NO_DICT = "must pass a dict"
WRONG = {
    **{what: (change, MISFIT) for what, change in OF_A_STATE.items()},
    "no dict": (lambda found, _: 3, NO_DICT), "no groups": (lambda found, _: {"state": {}}, NO_DICT),
    "another model": (lambda found, _: {**found, "param_groups": [{"params": [0]}]}, r"groups of \[1\] parameters"),
    "another optimizer": (lambda found, i: {**found, "state": {i: {"momentum_buffer": torch.zeros(5, 7)}}},
                          "of another optimizer: momentum_buffer, this one keeps step, exp_avg"),
    "names": (lambda found, i: {**found, "state": {"embed.weight": found["state"][i]}},
              "a state of 'embed.weight': parameters must be indices"),
    "groups without parameters": (lambda found, _: {**found, "param_groups": [{"lr": 1.0}]}, "be read: KeyError"),
    "an object": (lambda found, i: found["state"][i].update(thing=Keeps), "has thing, which can't be kept: it holds"),
    "what can't be sent": (group_says(mine=lambda: 0), "can't be read: (Attribute|Pickling)Error"),  # as Python has it
    "exchanged": (exchanged, f"exp_avg in {MISFIT}: float32 of|main_param in the state of"),
    "dtensors": (of_dtensors, "is a DTensor in this state_dict, the parameter is a Parameter"),
    "amsgrad": (group_says(amsgrad=True), "is of another optimizer: .*this one keeps .*max_exp_avg_sq"),
    "a text for a number": (group_says(lr="fast"), "can't step with the hyperparameters that were saved"),
}
NO_MAIN_PARAM = "main_param in the state of parameter [0-9]+ is .*, and none of shape"
MAIN_PARAMS = {what: (entry("main_param", change), NO_MAIN_PARAM) for what, change in {
    "a row less": lambda value: value[:-1], "8 bits": lambda value: value.to(torch.float8_e5m2),
    "no tensor": lambda value: 1.0}.items()}


@on_ranks(2, stage=[None, *STAGES[1:]])
def test_a_state_dict_of_something_else_is_refused_on_every_rank(rank, stage):
    dtype, wrong = torch.float32, WRONG
    if stage in SHARDED:  # what is wrong with main parameters there too
        dtype, wrong = torch.bfloat16, {**WRONG, **MAIN_PARAMS}
    model, optimizer = a_run(rank, stage, fused=True, dtype=dtype, steps=2)
    found = full(optimizer)
    index = next(i for i, state in found["state"].items() if state["exp_avg"].shape == (7, 5))
    for what, (change, words) in wrong.items():
        with situation(what), nothing_changes(model, optimizer):
            its = copy.deepcopy(found)
            its = change(its, index) or its
            with pytest.raises(ValueError, match=words) as refusal:
                load_full_state_dict(optimizer, its if rank.rank == 0 else {})
            said_by_all(str(refusal.value))


@on_ranks(2, stage=[None, *STAGES])
def test_a_state_that_lacks_what_its_groups_ask_for_is_not_saved(rank, stage, tmp_path):
    model, optimizer = a_run(rank, stage, cls=torch.optim.Adam, steps=1)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(checkpoint.CheckpointError, match="of another optimizer: .*keeps .*max_exp_avg_sq"):
        checkpoint.save(tmp_path / "one", model, optimizer)


# ------------------------------------------------------------------------------------------- a stage's own state_dict


@on_ranks(2, stage=STAGES[1:])
def test_a_stages_own_state_dict_is_checked_before_anything_changes(rank, stage):
    _, optimizer = a_run(rank, stage, fused=True, dtype=torch.bfloat16 if stage in SHARDED else torch.float32, steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    name = max(before["state"], key=lambda name: before["state"][name]["exp_avg"].numel())
    index = [name for group in before["param_groups"] for name in group["params"]].index(name)
    for what, change in OF_A_STATE.items():
        wrong = copy.deepcopy(before)
        change(wrong, name)
        for param in wrong.get("main_params", {}).values():
            param.fill_(7)
        line = error_of(lambda: optimizer.load_state_dict(wrong), ValueError)
        assert f"the state of parameter {index} of this rank is of another optimizer" in line, what
    assert equal(optimizer.state_dict(), before)


@on_ranks(1, stage=SHARDED)
def test_main_parameters_are_loaded_into_their_own(rank, stage):
    """Groups that were added later lie elsewhere."""
    def made(n_at_once):
        params = [nn.Parameter(torch.full((32, 32), 1.0 + n, dtype=torch.bfloat16)).to(rank.device) for n in range(2)]
        optimizer = wrapped(stage, [{"params": [param]} for param in params[:n_at_once]], lr=0.01)
        for param in params[n_at_once:]:
            optimizer.add_param_group({"params": [param]})
        return params, optimizer

    (params, optimizer), (others, again) = made(1), made(2)
    sum(param.square().sum() for param in params).backward()
    optimizer.step()
    full(optimizer)  # waits for the parameters
    for param, other in zip(params, others):
        other.data.copy_(param)
    again.load_state_dict(optimizer.state_dict())
    assert equal(full(again), full(optimizer))


@on_ranks(2, stage=STAGES)
def test_a_moment_lies_in_memory_as_its_parameter_does(rank, stage):
    """One element that says it is many: a fused kernel would read what lies behind it."""
    _, optimizer = a_run(rank, stage, fused=True, steps=1)
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        state["exp_avg"] = torch.ones((), device=rank.device).expand(state["exp_avg"].shape)
    optimizer.load_state_dict(state_dict)
    for state in optimizer.optimizer.state.values():
        assert state["exp_avg"].untyped_storage().nbytes() >= state["exp_avg"].numel() * 4
        assert state["exp_avg"].eq(1).all()
