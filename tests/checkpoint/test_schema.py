"""What an optimizer keeps is found out by a trial, and what is loaded must fit."""

import functools

import pytest
import torch
from torch import nn

from guard.schema import Schema, Spec, check_state, schema_of
from tests.checkpoint import a_run
from tests.checkpoint.compare import equal, full
from tests.common import STAGES, error_of, on_ranks, situation

CLASSES = {"Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {"fused": True},
           "Adamax": {}, "ASGD": {}, "Muon": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"centered": True},
           "Rprop": {}, "SGD": {"momentum": 0.9}}


def of_a_class(optimizer, param):
    (group,) = optimizer.param_groups
    options = {key: value for key, value in group.items() if key != "params"}
    return schema_of(functools.partial(type(optimizer)), options, param.shape, param.dtype, param.device)


def test_what_an_optimizer_keeps_fits_its_schema_at_each_step():
    for name, kwargs in CLASSES.items():
        with situation(name):
            param = nn.Parameter(torch.ones(5, 7))
            optimizer = getattr(torch.optim, name)([param], **kwargs)
            found = of_a_class(optimizer, param)
            for _ in range(5):
                param.grad = torch.randn(5, 7)
                optimizer.step()
                check_state(found, optimizer.state[param], param.shape, "it")
            assert found.from_start == (name == "Adagrad")
    param = nn.Parameter(torch.ones(5))
    assert of_a_class(torch.optim.LBFGS([param]), param) is None  # it can't be stepped alone


def test_no_memory_is_taken_for_the_trial_where_a_class_reads_no_values():
    """16 TB would be."""
    make = functools.partial(torch.optim.AdamW, fused=True)
    found = schema_of(make, {"lr": 0.1}, (2**20, 2**20), torch.float32, torch.device("cpu"))
    assert found.entries["exp_avg"].shape == (2**20, 2**20)


LIKE_IT = torch.zeros(5, 7)
SCHEMA = Schema({"step": Spec((), torch.float32), "sum": Spec((13,), torch.float32), "n": 3, "text": "a"}, False, (13,))
FITS = {"step": torch.zeros(()), "sum": LIKE_IT.bfloat16(), "n": 9, "text": "b", "slow": LIKE_IT, "since": 3}
MISFITS = [("sum", torch.zeros(1)), ("sum", torch.zeros(7, 5)), ("sum", LIKE_IT.long()), ("step", 2.0), ("n", "3"),
           ("sum", LIKE_IT.to(torch.float8_e5m2)), ("n", torch.zeros(())), ("sum", None), ("slow", torch.zeros(5, 6))]


def test_what_fits_a_schema_is_taken_and_what_does_not_is_refused_by_name():
    check_state(SCHEMA, FITS, (5, 7), "it")
    check_state(SCHEMA, {}, (5, 7), "it")  # it was never stepped
    for name, value in MISFITS:
        with situation((name, value)):
            with pytest.raises(ValueError, match=f"{name}.* in the state of it is of another optimizer: "):
                check_state(SCHEMA, {**FITS, name: value}, (5, 7), "it")
    for missing in SCHEMA.entries:  # entries belong together
        with situation(missing), pytest.raises(ValueError, match="is of another optimizer: .*keeps step, sum, n"):
            check_state(SCHEMA, {key: value for key, value in FITS.items() if key != missing}, (5, 7), "it")


@on_ranks(2, stage=STAGES[1:])
def test_a_state_dict_of_something_else_is_refused_on_every_rank_before_anything_changes(rank, stage):
    _, optimizer = a_run(rank, stage, fused=True, steps=1)
    before = full(optimizer)
    for what, change in {"a row less": {"exp_avg": torch.zeros(4, 7)}, "two counts": {"step": torch.zeros(2)}}.items():
        wrong = {**before, "state": {index: {**entries, **change} for index, entries in before["state"].items()}}
        with situation(what):
            line = error_of(lambda: optimizer.load_state_dict(wrong), ValueError)
            assert "in the state of parameter" in line and equal(full(optimizer), before)
    with pytest.raises(ValueError, match=r"has groups of \[1\] parameters, this optimizer has"):
        optimizer.load_state_dict({**before, "param_groups": [{"params": [0]}]})
    assert "load_state_dict() takes what" in error_of(lambda: optimizer.load_state_dict(before["state"]), ValueError)
