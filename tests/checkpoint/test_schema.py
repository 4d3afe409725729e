"""What is loaded is what the optimizer keeps: shapes, dtypes, which entries belong together. Nothing changes before."""

import copy
import json

import pytest
import torch

import checkpoint
from checkpoint import full_state_dict, load_full_state_dict
from checkpoint.manifest import sealed
from guard.schema import Schema, Spec, check_state, described, schema_of
from tests.checkpoint.test_checkpoint import SHARDED, a_run, equal, step_alike
from tests.checkpoint.test_states import KEPT
from tests.common import STAGES, optimizer_of
from tests.ranks import ROOT, run_with

CLASSES = {"Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {"fused": True},
           "Adamax": {}, "ASGD": {}, "Muon": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"centered": True},
           "Rprop": {}, "SGD": {"momentum": 0.9}}


def of_a_class(optimizer, param):
    (group,) = optimizer.param_groups
    options = {key: value for key, value in group.items() if key != "params"}
    return schema_of(type(optimizer), options, {}, param.shape, param.dtype, param.device)


def test_what_an_optimizer_keeps_fits_its_schema_at_each_step():
    for cls in [*CLASSES, *KEPT]:
        print(cls)  # pytest shows what was the last
        param = torch.nn.Parameter(torch.ones(5, 7))
        optimizer = cls([param]) if isinstance(cls, type) else getattr(torch.optim, cls)([param], **CLASSES[cls])
        schema = of_a_class(optimizer, param)
        assert schema is not None
        for _ in range(5):
            param.grad = torch.randn(5, 7)
            optimizer.step()
            check_state(schema, described(dict(optimizer.state[param])), param.shape, "it")
        assert schema.from_start == (cls == "Adagrad")


def test_one_that_cannot_be_stepped_alone_has_none():
    param = torch.nn.Parameter(torch.ones(5))
    assert of_a_class(torch.optim.LBFGS([param]), param) is None


def test_no_memory_is_taken_for_the_trial_where_a_class_reads_no_values():
    """16 TB would be."""
    options = {"lr": 0.1, "fused": True}
    schema = schema_of(torch.optim.AdamW, options, {}, torch.Size([2**20, 2**20]), torch.float32, torch.device("cpu"))
    assert schema.entries["exp_avg"].shape == (2**20, 2**20)


SCHEMA = Schema({"step": Spec((), torch.float32), "sum": Spec((5, 7), torch.float32), "n": 3, "text": "a",
                 "last": Spec((2, 5, 7), torch.float32), "pair": (Spec((), torch.float32), 1),
                 "past": [Spec((5, 7), torch.float32)]}, False, (5, 7))
FITS = {"step": Spec((), torch.float32, 2.0), "sum": Spec((5, 7), torch.bfloat16), "n": 9, "text": "b",
        "last": Spec((3, 5, 7), torch.float32), "pair": (Spec((), torch.float32), 2),
        "past": [Spec((5, 7), torch.float32)] * 4}
MISFITS = {
    "a shape": {"sum": Spec((1,), torch.float32)}, "the other way round": {"sum": Spec((7, 5), torch.float32)},
    "a stack": {"sum": Spec((1, 5, 7), torch.float32)}, "no stack": {"last": Spec((5, 7), torch.float32)},
    "an empty stack": {"last": Spec((0, 5, 7), torch.float32)}, "another kind": {"sum": Spec((5, 7), torch.int64)},
    "8 bits": {"sum": Spec((5, 7), torch.float8_e5m2)}, "a number for a tensor": {"step": 2.0},
    "a tensor for a number": {"n": Spec((), torch.int64, 3)}, "a text for a number": {"n": "3"}, "none": {"sum": None},
    "a list for a tuple": {"pair": [Spec((), torch.float32), 2]}, "a longer tuple": {"pair": (*FITS["pair"], 1)},
    "a tensor for a list": {"past": Spec((5, 7), torch.float32)}, "a wrong one in a list": {"past": [1]},
    "no number": {"step": Spec((), torch.float32, float("nan"))}, "below 0": {"step": Spec((), torch.float32, -1.0)},
    "more, of another shape": {"slow": Spec((5, 6), torch.float32)},
    "and deep": {"slow": {"a": [Spec((3,), torch.int8)]}},
}


def test_what_fits_is_taken():
    check_state(SCHEMA, FITS, (5, 7), "it")
    check_state(SCHEMA, {}, (5, 7), "it")  # it was never stepped
    more = {"slow": Spec((5, 7), torch.float32), "since": 3, "deep": {"a": [Spec((), torch.int8, 1)]}}
    check_state(SCHEMA, {**FITS, **more}, (5, 7), "it")  # of later steps


def test_what_does_not_fit_is_refused_by_name():
    for what in MISFITS:
        print(what)  # pytest shows what was the last
        (path,) = MISFITS[what]
        with pytest.raises(ValueError, match=f"{path}.* in the state of it is of another optimizer: "):
            check_state(SCHEMA, {**FITS, **MISFITS[what]}, (5, 7), "it")


def test_entries_belong_together():
    for missing in FITS:
        print(missing)  # pytest shows what was the last
        refusal = "the state of it is of another optimizer: .*, this one keeps step, sum, n"
        with pytest.raises(ValueError, match=refusal):
            check_state(SCHEMA, {key: value for key, value in FITS.items() if key != missing}, (5, 7), "it")


# --------------------------------------------------------------------------------------------------- in a full state

WRONG = {
    "one element": ("exp_avg", lambda value: value.reshape(-1)[:1].clone()),
    "a row less": ("exp_avg_sq", lambda value: value[:-1].clone()),
    "another kind": ("exp_avg", lambda value: value.int()),
    "a stack": ("exp_avg", lambda value: value[None].clone()),
    "an empty stack": ("exp_avg", lambda value: value.new_empty(0, *value.shape)),
    "two counts": ("step", lambda value: value.repeat(2)),
    "a count that is no number": ("step", lambda value: value * float("nan")),
    "a number for a moment": ("exp_avg", lambda value: 0.0),
    "none": ("exp_avg", lambda value: None),
}


def changed(state, key, value):
    return {**state, key: value} if value is not None else {name: state[name] for name in state if name != key}


def load_a_wrong_one(rank, stage, what):
    model, optimizer = a_run(rank, stage, None, fused=True)
    step_alike(rank, model, optimizer, range(2))
    before, params = full_state_dict(optimizer, to_all=True), copy.deepcopy(dict(model.state_dict()))
    key, change = WRONG[what]
    index = next(i for i, state in before["state"].items() if state["exp_avg"].shape == (7, 5))
    state = before["state"][index]
    wrong = {**before, "state": {**before["state"], index: changed(state, key, change(state[key]))}}
    with pytest.raises(ValueError, match=rf"the state of parameter {index} is of another optimizer") as refusal:
        load_full_state_dict(optimizer, wrong if rank.rank == 0 else {})
    assert equal(full_state_dict(optimizer, to_all=True), before) and equal(dict(model.state_dict()), params)
    return str(refusal.value)


@pytest.mark.parametrize("stage", [None, *STAGES[1:]])
@pytest.mark.parametrize("world_size", [2])
def test_a_full_state_is_checked_before_anything_changes(run, stage):
    for what in WRONG:
        print(what)  # pytest shows what was the last
        assert len(set(run(load_a_wrong_one, stage, what))) == 1


def exchange(rank, stage):
    """Two parameters of other shapes have changed places: an honest mistake."""
    model, optimizer = a_run(rank, stage, None)
    step_alike(rank, model, optimizer, range(1))
    full = full_state_dict(optimizer, to_all=True)
    one, other = list(full["state"])[:2]
    full["state"][one], full["state"][other] = full["state"][other], full["state"][one]
    with pytest.raises(ValueError, match="exp_avg in the state of parameter . is of another optimizer: float32 of"):
        load_full_state_dict(optimizer, full)


@pytest.mark.parametrize("stage", [None, *STAGES[1:]])
@pytest.mark.parametrize("world_size", [2])
def test_states_that_changed_places_are_refused(run, stage):
    run(exchange, stage)


def amsgrad(rank, stage, path):
    """max_exp_avg_sq must be there when the saved groups say amsgrad."""
    model, optimizer = a_run(rank, stage, None)
    step_alike(rank, model, optimizer, range(1))
    full = full_state_dict(optimizer, to_all=True)
    full["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="is of another optimizer: .*this one keeps .*max_exp_avg_sq"):
        load_full_state_dict(optimizer, full)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(checkpoint.CheckpointError, match="is of another optimizer: .*this one keeps .*max_exp_avg_sq"):
        checkpoint.save(path, model, optimizer)


@pytest.mark.parametrize("stage", [None, *STAGES[1:]])
@pytest.mark.parametrize("world_size", [2])
def test_entries_that_the_saved_hyperparameters_ask_for_must_be_there(run, stage, tmp_path):
    run(amsgrad, stage, tmp_path / "one")


HYPERPARAMETERS = {  # value, and what is said: by us, or by the optimizer
    "lr": (float("nan"), "lr of group 0 is 'nan', here it is 0.001"), "betas": ((5, -1.0), "Invalid beta parameter"),
    "weight_decay": (10**400, "weight_decay of group 0 is '1000"), "eps": (-1.0, "Invalid epsilon value: -1.0"),
    "amsgrad": (3, "amsgrad of group 0 is '3', here it is False"),
}


def wrong_hyperparameters(rank, stage, key):
    model, optimizer = a_run(rank, stage, None)
    step_alike(rank, model, optimizer, range(1))
    before = full_state_dict(optimizer, to_all=True)
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0][key], message = HYPERPARAMETERS[key]
    with pytest.raises(ValueError, match=message):
        load_full_state_dict(optimizer, wrong)
    assert equal(full_state_dict(optimizer, to_all=True), before)


@pytest.mark.parametrize("stage", [None, STAGES[1], STAGES[3]])
@pytest.mark.parametrize("world_size", [2])
def test_hyperparameters_pass_the_optimizers_own_checks(run, stage):
    for key in HYPERPARAMETERS:
        print(key)  # pytest shows what was the last
        run(wrong_hyperparameters, stage, key)


# --------------------------------------------------------------------------------------- a stage's own state_dict


def own_state_dict(rank, stage, what):
    model, optimizer = a_run(rank, stage, None, fused=True, dtype=torch.bfloat16 if stage in SHARDED else torch.float32)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    key, change = WRONG[what]
    wrong = copy.deepcopy(before)
    name = max(wrong["state"], key=lambda name: wrong["state"][name]["exp_avg"].numel())
    index = [name for group in wrong["param_groups"] for name in group["params"]].index(name)
    wrong["state"][name] = changed(wrong["state"][name], key, change(wrong["state"][name][key]))
    if "main_params" in wrong:
        for param in wrong["main_params"].values():
            param.fill_(7)
    with pytest.raises(ValueError, match=rf"the state of parameter {index} of this rank is of another optimizer"):
        optimizer.load_state_dict(wrong)
    assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("world_size", [2])
def test_a_stages_own_state_dict_is_checked_before_anything_changes(run, stage):
    for what in WRONG:
        print(what)  # pytest shows what was the last
        run(own_state_dict, stage, what)


def wrong_main_params(rank, stage):
    model, optimizer = a_run(rank, stage, None, dtype=torch.bfloat16)
    before = copy.deepcopy(optimizer.state_dict())
    index = next(iter(before["main_params"]))
    for wrong in (before["main_params"][index][:-1], before["main_params"][index].int()):
        with pytest.raises(ValueError, match=f"main_params of this state_dict doesn't fit parameter {index}: "):
            optimizer.load_state_dict({**before, "main_params": {**before["main_params"], index: wrong}})
    assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_main_params_of_another_shape_are_refused(run, stage):
    run(wrong_main_params, stage)


def expanded(rank, stage):
    """One element that says it is many: a fused kernel would read what lies behind it."""
    params = torch.nn.ParameterList(torch.ones(4097, device=rank.device) for _ in range(2))
    optimizer = optimizer_of(stage)(params, torch.optim.AdamW, fused=True)
    params[0].sum().backward()
    params[1].sum().backward()
    optimizer.step()
    state_dict = optimizer.state_dict()
    for state in state_dict["state"].values():
        state["exp_avg"] = torch.ones(1, device=rank.device).expand(state["exp_avg"].shape)
    optimizer.load_state_dict(state_dict)
    for state in optimizer.optimizer.state.values():
        assert state["exp_avg"].untyped_storage().nbytes() >= state["exp_avg"].numel() * 4
        assert state["exp_avg"].eq(1).all()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2])
def test_a_moment_lies_in_memory_as_its_parameter_does(run, stage):
    run(expanded, stage)


def test_a_moment_that_is_too_small_ends_no_process(tmp_path):
    """The one that did: exp_avg of one element, then a fused step. In a process of its own."""
    (tmp_path / "program.py").write_text("""if True:
        import torch, checkpoint
        model = torch.nn.Linear(231, 231)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(1, 231)).sum().backward()
        optimizer.step()
        full = checkpoint.full_state_dict(optimizer)
        full["state"][0]["exp_avg"] = torch.zeros(1)
        try:
            checkpoint.load_full_state_dict(optimizer, full)
        except ValueError as error:
            print(error)
        for _ in range(20):
            optimizer.step()
    """)
    (ended,) = run_with([{"PYTHONPATH": ROOT}], tmp_path / "program.py")
    assert ended.code == 0, ended.stderr
    assert "exp_avg in the state of parameter 0 is of another optimizer: float32 of shape (1,)" in ended.stdout


# ------------------------------------------------------------------------------------------------------- main_param

MAIN_PARAMS = {
    "of whole numbers": lambda value: value.view(torch.int32), "of 8 bits": lambda value: value.to(torch.float8_e5m2),
    "bool": lambda value: value.bool(), "a row less": lambda value: value[:-1],
    "one element": lambda value: value[:1, :1],
    "a stack": lambda value: value[None], "none": lambda value: None,
}


def wrong_main_param(rank, stage, what):
    """Nothing is changed: no parameter either, which it would become."""
    model, optimizer = a_run(rank, stage, None, dtype=torch.bfloat16)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before, params = full_state_dict(optimizer, to_all=True), copy.deepcopy(dict(model.state_dict()))
    index = next(i for i, state in before["state"].items() if state["exp_avg"].shape == (7, 5))
    state = {**before["state"][index]}
    state["main_param"] = MAIN_PARAMS[what](state["main_param"])
    with pytest.raises(ValueError, match=f"main_param in the state of parameter {index} is .*, and none of shape"):
        load_full_state_dict(optimizer, {**before, "state": {**before["state"], index: state}})
    assert equal(full_state_dict(optimizer, to_all=True), before) and equal(dict(model.state_dict()), params)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_main_param_is_checked_before_it_becomes_the_weights(run, stage):
    for what in MAIN_PARAMS:
        print(what)  # pytest shows what was the last
        run(wrong_main_param, stage, what)


def wrong_main_param_in_files(rank, stage, path):
    """An int32 has as many bytes: its checksums are right, and its shape is."""
    model, optimizer = a_run(rank, stage, None, dtype=torch.bfloat16)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    checkpoint.save(path, model, optimizer)
    if rank.rank == 0:
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["crc32"]
        manifest["tensors"]["optimizer.state.embed.weight.main_param"]["dtype"] = "int32"
        (path / "manifest.json").write_bytes(sealed(manifest))
    torch.distributed.barrier()
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(checkpoint.ForeignCheckpoint, match="main_param in the state of embed.weight is int32 of shape"):
        checkpoint.load(path, model, optimizer)
    assert equal(dict(model.state_dict()), before)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_main_param_in_files_too(run, stage, tmp_path):
    run(wrong_main_param_in_files, stage, tmp_path / "one")
