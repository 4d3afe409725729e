"""A trial step shows what an optimizer keeps, and a state that is loaded must fit that."""

import functools

import torch
from torch import nn

from guard.schema import check_state, schema_of
from tests.checkpoint import make_run
from tests.checkpoint.compare import equal, full_state
from tests.common import STAGES, error_of, on_ranks, situation

# Classes of torch.optim, and their arguments. They keep moments, factors, scalars, a state from the start, or nothing.
CLASSES = {"AdamW": {"fused": True}, "Adafactor": {}, "ASGD": {}, "Adagrad": {}, "SGD": {}}


def test_what_an_optimizer_keeps_fits_its_schema_at_each_step():
    for name, kwargs in CLASSES.items():
        with situation(name):
            param = nn.Parameter(torch.ones(5, 7))
            optimizer = getattr(torch.optim, name)([param], **kwargs)
            make_optimizer = functools.partial(type(optimizer))
            schema = schema_of(make_optimizer, optimizer.defaults, param.shape, param.dtype, param.device)
            for _ in range(5):
                param.grad = torch.randn(5, 7)
                optimizer.step()
                check_state(schema, optimizer.state[param], param.shape, "the parameter")
            assert schema.from_start == (name == "Adagrad")


def test_a_trial_of_a_huge_parameter_takes_no_memory():
    make_optimizer = functools.partial(torch.optim.AdamW, fused=True)
    huge = (2**20, 2**20)  # 4 TB in fp32
    schema = schema_of(make_optimizer, {"lr": 0.1}, huge, torch.float32, torch.device("cpu"))
    assert schema.entries["exp_avg"].shape == huge


# (entry, what stands in its place; None: nothing). With such a moment a fused kernel would read foreign memory.
MISFITS = [("exp_avg", torch.zeros(4, 7)), ("exp_avg", torch.zeros(35).long()), ("exp_avg", "text"), ("exp_avg", None),
           ("step", torch.zeros(2)), ("slow", torch.zeros(4, 7))]


@on_ranks(2, stage=STAGES[1:])
def test_a_state_dict_of_something_else_is_refused_on_every_rank_before_anything_changes(rank, stage):
    _, optimizer = make_run(rank, stage, fused=True, steps=1)
    before = full_state(optimizer)
    for name, value in MISFITS:
        state = {}
        for index, entries in before["state"].items():
            state[index] = {**entries, name: value}
            if value is None:
                del state[index][name]
        with situation((name, value)):
            line = error_of(lambda: optimizer.load_state_dict({**before, "state": state}), ValueError)
            assert "the state of" in line and "is of another optimizer: " in line
            assert equal(full_state(optimizer), before)
