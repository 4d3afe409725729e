"""What an optimizer keeps is found out by a trial, and what is loaded must fit."""

import functools

import pytest
import torch
from torch import nn

from guard.schema import check_state, schema_of
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
    huge = nn.Parameter(torch.empty(2**20, 2**20, device="meta"))
    make = functools.partial(torch.optim.AdamW, fused=True)
    found = schema_of(make, {"lr": 0.1}, huge.shape, huge.dtype, torch.device("cpu"))  # 16 TB, of which none is taken
    assert found.entries["exp_avg"].shape == huge.shape


# A fused kernel would read foreign memory: (entry, what stands in its place; None: nothing).
MISFITS = [("exp_avg", torch.zeros(4, 7)), ("exp_avg", torch.zeros(1)), ("exp_avg", torch.zeros(35).long()),
           ("exp_avg", "text"), ("exp_avg", None), ("step", torch.zeros(2)), ("slow", torch.zeros(4, 7))]


@on_ranks(2, stage=STAGES[1:])
def test_a_state_dict_of_something_else_is_refused_on_every_rank_before_anything_changes(rank, stage):
    _, optimizer = a_run(rank, stage, fused=True, steps=1)
    before = full(optimizer)
    for name, value in MISFITS:
        wrong = {**before, "state": {index: {**entries, name: value} for index, entries in before["state"].items()}}
        if value is None:
            for entries in wrong["state"].values():
                del entries[name]
        with situation((name, value)):
            line = error_of(lambda: optimizer.load_state_dict(wrong), ValueError)
            assert "the state of" in line and "is of another optimizer: " in line
            assert equal(full(optimizer), before)
    with pytest.raises(ValueError, match=r"has groups of \[1\] parameters, this optimizer has"):
        optimizer.load_state_dict({**before, "param_groups": [{"params": [0]}]})
    assert "load_state_dict() takes what" in error_of(lambda: optimizer.load_state_dict(before["state"]), ValueError)
