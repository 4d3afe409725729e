"""Nothing is lost: one dict, files, other ranks and stages, plain torch. Each time the next step must be the same."""

import contextlib
import copy
import gc
import json
import os
import resource
import shutil
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint
from checkpoint import full_state_dict, load_full_state_dict, reshard, writing
from checkpoint.convert import convert
from checkpoint.folder import LOCK
from checkpoint.rank_files import whole
from harness.memory import Memory
from tests.common import OPTIMIZERS, STAGES, Net, Replicated, assert_same, batch, loss_of, optimizer_of, trainable

SHARDED = STAGES[2:]
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
F, B = torch.float32, torch.bfloat16


def train(rank, model, optimizer, steps, dtype=torch.float32):
    for step in steps:
        x, y = (part.to(rank.device, dtype) for part in batch(step, rank.rank))
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(one, other):
    """Two state_dicts, to the bit; on other devices too."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return one == other


def close(one, other):
    """The same names, shapes and dtypes; values up to the order of a sum."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
        return same and torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    return one == other


# ---------------------------------------------------------------------------------------------------------------------
# One dict


def two_named_groups(model):
    named = list(model.named_parameters())
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.003}]


def gather_and_compare(rank, stage, optimizer_cls, kwargs):
    model = Net(seed=0).to(rank.device)
    optimizer = optimizer_of(stage)(two_named_groups(model), optimizer_cls, **kwargs)
    train(rank, model, optimizer, range(3))
    reference = Replicated(rank, optimizer_cls, groups=two_named_groups, **kwargs)
    for step in range(3):
        reference.step(step)
    for group in [*optimizer.param_groups, *reference.optimizer.param_groups]:
        group["lr"] *= 0.5  # as schedulers do
    on_one, on_all = full_state_dict(optimizer), full_state_dict(optimizer, to_all=True)
    assert equal(on_one, on_all) if rank.rank == 0 else on_one == {}
    plain = reference.optimizer.state_dict()
    assert on_all["param_groups"] == plain["param_groups"]
    assert close(on_all["state"], {i: {k: v.cpu() for k, v in s.items()} for i, s in plain["state"].items()})


class CountsInOneElement(torch.optim.Optimizer):
    """As torch's own don't: its step has the shape (1,), like a piece of one element."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state.update(step=param.new_zeros(1), sum=torch.zeros_like(param))
                    state["step"] += 1
                    state["sum"] += param.grad
                    param -= group["lr"] * state["sum"] / state["step"]


def counts_in_one_element(rank, stage, shape, path):
    """17 elements: on two ranks and more the last piece has one. And a parameter of one."""
    params = torch.nn.ParameterList(torch.ones(shape, device=rank.device) for _ in range(2))
    optimizer = optimizer_of(stage)(params[:1], CountsInOneElement)
    plain = CountsInOneElement(params[1:])
    for _ in range(3):
        for param, its in zip(params, (optimizer, plain)):
            param.sum().backward()
            its.step()
            its.zero_grad()
    expected = {0: {name: value.cpu() for name, value in plain.state[params[1]].items()}}
    for _ in range(2):
        assert equal(full_state_dict(optimizer, to_all=True)["state"], expected)
        reshard(optimizer, None)
    load_full_state_dict(optimizer, plain.state_dict() if rank.rank == 0 else None)
    assert equal(full_state_dict(optimizer, to_all=True)["state"], expected)
    checkpoint.save(path, params[:1], optimizer)
    optimizer.state.clear()
    checkpoint.load(path, params[:1], optimizer)
    assert equal(full_state_dict(optimizer, to_all=True)["state"], expected)


@pytest.mark.parametrize("shape", [(17,), (1, 1)], ids=str)
@pytest.mark.parametrize("stage", SHARDED)
def test_a_state_of_one_element_is_no_piece(run, stage, shape, tmp_path):
    run(counts_in_one_element, stage, shape, tmp_path / "one")


def state_on_one_rank(rank, stage):
    """What no rank has would be whatever lies in memory."""
    weight = torch.nn.Parameter(torch.ones(64, device=rank.device))
    optimizer = optimizer_of(stage)([weight])
    weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank.rank:
        optimizer.state.clear()
    before = weight.detach().clone()
    for call in (lambda: full_state_dict(optimizer), lambda: reshard(optimizer, None)):
        with pytest.raises(RuntimeError, match="the state of parameter 0 has exp_avg.* for some of its elements only"):
            call()
    assert len(optimizer.state) == (rank.rank == 0) and torch.equal(weight, before)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_state_of_some_elements_is_refused(run, stage):
    run(state_on_one_rank, stage)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_full_state_dict_is_that_of_the_plain_torch_optimizer(run, stage, name):
    run(gather_and_compare, stage, *OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"])
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_so_it_is_with_every_elementwise_optimizer_of_torch(run, stage, name):
    run(gather_and_compare, stage, getattr(torch.optim, name), {"lr": 0.01})


def to_plain_and_back(rank, stage):
    """Two steps in the stage, one in plain torch, two in a new instance of the stage: as five in plain torch."""
    reference = Replicated(rank, **ADAMW)
    for step in range(5):
        reference.step(step)
    model = Net(seed=rank.rank).to(rank.device)
    model.frozen.load_state_dict(reference.model.frozen.state_dict())
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    train(rank, model, optimizer, range(2))
    plain = Replicated(rank, **ADAMW)
    plain.optimizer.load_state_dict(full_state_dict(optimizer, to_all=True))
    plain.model.load_state_dict(model.state_dict())
    plain.step(2)
    state_dict = plain.optimizer.state_dict() if rank.rank == 0 else {}
    del optimizer
    model = copy.deepcopy(plain.model)
    optimizer = optimizer_of(stage)(trainable(model), lr=1.0)
    load_full_state_dict(optimizer, state_dict)
    assert optimizer.param_groups[0]["lr"] == ADAMW["lr"]
    train(rank, model, optimizer, (3, 4))
    assert_same(model, reference.model, exact=rank.world_size <= 2)


def test_a_run_goes_on_in_plain_torch_and_back(run, stage):
    run(to_plain_and_back, stage)


def plain_torch(rank):
    """Each rank of a plain optimizer has everything: that of rank 0 is what all get."""
    model = Net(seed=0).to(rank.device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step_alike(rank, model, optimizer, range(2))
    on_one, on_all = full_state_dict(optimizer), full_state_dict(optimizer, to_all=True)
    assert equal(on_one, on_all) if rank.rank == 0 else on_one == {}
    assert equal(on_all["state"], {i: {k: v.cpu() for k, v in s.items()}
                                   for i, s in optimizer.state_dict()["state"].items()})
    other = torch.optim.AdamW(model.parameters(), lr=9.0)
    load_full_state_dict(other, on_one)
    assert equal(full_state_dict(other, to_all=True), on_all)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plain_torch_optimizer_has_a_full_state_too(run, world_size):
    run(plain_torch)


def computed_otherwise(rank, stage, path):
    """How a process computes is nothing that a checkpoint decides: it may have been saved where another way is fast."""
    params = [torch.nn.ParameterList([torch.ones(64, device=rank.device)]) for _ in range(2)]
    ways = {"fused": False, "foreach": True}, {"fused": True, "foreach": False}
    one, other = (optimizer_of(stage)(its, **ADAMW, **way) for its, way in zip(params, ways))
    params[0][0].sum().backward()
    one.step()
    checkpoint.save(path, params[0], one)
    for load in (lambda: load_full_state_dict(other, full_state_dict(one)),
                 lambda: checkpoint.load(path, params[1], other)):
        load()
        for group in (*other.param_groups, *other.optimizer.param_groups):
            assert (group["fused"], group["foreach"], group["lr"]) == (True, False, ADAMW["lr"])
    params[1][0].sum().backward()
    other.step()


@pytest.mark.parametrize("world_size", [2])
def test_how_a_process_computes_is_not_loaded(run, stage, tmp_path):
    run(computed_otherwise, stage, tmp_path / "one")


def reshard_the_first_stages(rank, stage):
    with pytest.raises(TypeError, match="reshard.. moves optimizers of stages 3 and 4"):
        reshard(a_run(rank, stage, None)[1], None)


@pytest.mark.parametrize("stage", [None, *STAGES[:2]])
@pytest.mark.parametrize("world_size", [2])
def test_whole_parameters_stay_where_they_are(run, stage):
    run(reshard_the_first_stages, stage)


def sixteen_bits(rank, stage, dtype):
    """Main parameters travel in full: to another instance, and to one whose parameters are fp32."""
    model = Net(seed=0).to(rank.device, dtype)
    optimizer = optimizer_of(stage)(model.parameters(), **ADAMW)
    train(rank, model, optimizer, range(3), dtype=dtype)
    state_dict = full_state_dict(optimizer, to_all=True)
    names = [name for name, _ in model.named_parameters()]
    weight = state_dict["state"][names.index("embed.weight")]
    assert weight["exp_avg"].dtype == weight["main_param"].dtype == torch.float32
    assert torch.equal(weight["main_param"].to(dtype), model.embed.weight.cpu())
    other = Net(seed=1).to(rank.device, dtype)
    second = optimizer_of(stage)(other.parameters(), **ADAMW)
    other.load_state_dict(model.state_dict())
    load_full_state_dict(second, state_dict)
    assert equal(full_state_dict(second, to_all=True), state_dict)
    train(rank, model, optimizer, (3, 4), dtype=dtype)
    train(rank, other, second, (3, 4), dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    assert equal(full_state_dict(second, to_all=True), full_state_dict(optimizer, to_all=True))
    wide = Net(seed=1).to(rank.device)
    third = optimizer_of(stage)(wide.parameters(), **ADAMW)
    load_full_state_dict(third, state_dict)
    for index, state in state_dict["state"].items():
        assert torch.equal(wide.get_parameter(names[index]).cpu(), state["main_param"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [1, 3])
def test_main_parameters_of_16_bit_ones_travel_in_fp32(run, stage, dtype):
    run(sixteen_bits, stage, dtype)


def peak_of_gathering(rank, stage):
    """-> the most bytes beyond its own that full_state_dict makes on this rank, and that loading it again does."""
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(16)]).to(rank.device)
    kwargs = {"bucket_cap_mb": 0.5} if stage == STAGES[3] else {}
    optimizer = optimizer_of(stage)(model.parameters(), **kwargs)
    model(torch.ones(2, 256, device=rank.device)).sum().backward()
    optimizer.step()
    with Memory(rank.device) as memory:
        state_dict = full_state_dict(optimizer)
        gathered = memory.peak
        load_full_state_dict(optimizer, state_dict)
        return gathered, memory.peak


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2, 4])
def test_no_rank_holds_more_than_the_state_of_one_parameter_beyond_its_own(run, stage, world_size):
    """16 matrices of 256 KiB, two moments each: 512 KiB a parameter, 8 MiB in all."""
    parameter, everything = 2 * 256 * 256 * 4, 16 * 2 * 256 * 256 * 4
    (on_rank_0, _), *others = run(peak_of_gathering, stage)
    steps = 16 * world_size * 4  # how often each piece was stepped: what a GPU counts there comes to the CPU
    assert everything <= on_rank_0 <= everything + parameter + steps
    for gathered, loaded in others:
        assert gathered < parameter / 8  # which rank holds what, and no state
        assert loaded <= everything / world_size + 2 * parameter  # gloo's threads let go of one a moment later


WRONG = {
    "no dict": (lambda state_dict: None, "needs a dict|must pass a dict"),
    "another model": (lambda found: {**found, "param_groups": [{"params": [0]}]}, r"groups of \[1\] parameters"),
    "another shape": (lambda found: changed(found, exp_avg=torch.zeros(3)),
                      r"exp_avg in the state of parameter 3 is of another optimizer: float32 of shape \(3,\), not "),
    "another optimizer": (lambda found: {**found, "state": {3: {"momentum_buffer": torch.zeros(5, 7)}}},
                          "parameter 3 is of another optimizer: momentum_buffer, this one keeps step, exp_avg"),
    "names": (lambda found: {**found, "state": {"embed.weight": found["state"][3]}},
              "a state of 'embed.weight': parameters must be indices"),
    "groups without parameters": (lambda found: {**found, "param_groups": [{"lr": 1.0}]}, "can't be read: KeyError"),
    "a number for a tensor": (lambda found: changed(found, exp_avg=0.0), "exp_avg in the state of parameter 3 is of"),
    "what can't be sent": (lambda found: {**found, "param_groups": [{**found["param_groups"][0], "mine": lambda: 0}]},
                           "can't be read: (Attribute|Pickling)Error"),  # which, depends on Python
}


def changed(state_dict, **entries):
    return {**state_dict, "state": {**state_dict["state"], 3: {**state_dict["state"][3], **entries}}}


def refuse_dict(rank, stage, what):
    model = Net(seed=0).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters(), **ADAMW)
    train(rank, model, optimizer, range(2))
    before = full_state_dict(optimizer, to_all=True)
    wrong, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        load_full_state_dict(optimizer, wrong(before) if rank.rank == 0 else {})
    assert equal(full_state_dict(optimizer, to_all=True), before)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_state_dict_of_something_else_is_refused_on_every_rank(run, stage):
    for what in WRONG:
        print(what)  # pytest shows what was the last
        run(refuse_dict, stage, what)


def refuse_other_names(rank, stage, path):
    """Of an optimizer that is called SGD too, but keeps what Adam does."""
    def made(cls, **kwargs):
        model = Net(seed=0).to(rank.device)
        wrap = optimizer_of(stage) if stage else lambda params, cls, **kwargs: cls(params, **kwargs)
        return model, wrap(model.parameters(), cls, lr=0.01, **kwargs)

    model, sgd = made(torch.optim.SGD, momentum=0.9)
    train(rank, model, sgd, range(1))
    checkpoint.save(path, model, sgd)
    other, adam = made(type("SGD", (torch.optim.Adam,), {}))
    message = "the state of .* is of another optimizer: momentum_buffer, this one keeps step, exp_avg, exp_avg_sq"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(path, other, adam)
    with pytest.raises(ValueError, match=message):
        load_full_state_dict(adam, full_state_dict(sgd))


@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("world_size", [2])
def test_a_state_of_other_names_is_refused(run, stage, world_size, tmp_path):
    run(refuse_other_names, stage, tmp_path / "one")


def refuse_dtensors(rank, stage):
    """What fully_shard leaves on each rank is a part of the moments, of the same global shape."""
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(8, 4, device=rank.device), mesh, [Shard(0)]))
    theirs = torch.optim.AdamW([sharded])
    sharded.grad = torch.ones_like(sharded)
    theirs.step()
    weight = torch.nn.Parameter(torch.ones(8, 4, device=rank.device))
    optimizer = optimizer_of(stage)([weight])
    weight.sum().backward()
    optimizer.step()
    before = full_state_dict(optimizer, to_all=True)
    with pytest.raises(ValueError, match="is a DTensor in this state_dict, the parameter is a Parameter"):
        load_full_state_dict(optimizer, theirs.state_dict())
    assert equal(full_state_dict(optimizer, to_all=True), before)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_state_dict_of_dtensors_is_refused_on_every_rank(run, stage, world_size):
    run(refuse_dtensors, stage)


def main_params_by_name(rank, stage):
    """Groups that were added later lie elsewhere in the shards: 16-bit main parameters must find their own."""
    def made(n_at_once):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(2)))
        model = model.to(rank.device, torch.bfloat16)
        sizes = {"bucket_cap_mb": 0.001} if stage == STAGES[3] else {}
        params = [{"params": [layer.weight]} for layer in model]
        optimizer = optimizer_of(stage)(params[:n_at_once], lr=0.01, **sizes)
        for group in params[n_at_once:]:
            optimizer.add_param_group(group)
        return model, optimizer

    (model, optimizer), (other, again) = made(1), made(2)
    model(torch.ones(2, 32, device=rank.device, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    other.load_state_dict(model.state_dict())
    try:
        again.load_state_dict(optimizer.state_dict())
    except ValueError:
        return False
    assert equal(full_state_dict(again, to_all=True), full_state_dict(optimizer, to_all=True))
    return True


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_main_parameters_are_loaded_into_their_own(run, stage, world_size):
    """Loaded where each rank has the same ranges, which in stage 3 is not so on two ranks."""
    loaded = run(main_params_by_name, stage)
    assert set(loaded) == {world_size == 1 or stage == STAGES[3]}


def load_twice(rank, stage):
    """A run that goes back twice: what was loaded is not stepped in the dict that it came from."""
    model = Net(seed=0).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters(), **ADAMW)
    train(rank, model, optimizer, range(2))
    good, params = full_state_dict(optimizer, to_all=True), copy.deepcopy(model.state_dict())
    before, ends = copy.deepcopy(good), []
    for _ in range(2):
        model.load_state_dict(params)
        load_full_state_dict(optimizer, good)
        train(rank, model, optimizer, (2, 3))
        ends.append(full_state_dict(optimizer, to_all=True))
    assert equal(good, before) and equal(*ends)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_state_can_be_loaded_twice(run, stage, world_size):
    run(load_twice, stage)


def sgd_in_16_bits(rank, stage, folder):
    """Steps that are smaller than what 16 bits can show: only main parameters know of them."""
    def a_model(seed):
        model = Net(seed=seed).to(rank.device, torch.bfloat16)
        return model, optimizer_of(stage)(model.parameters(), torch.optim.SGD, lr=1e-3)
    model, optimizer = a_model(seed=0)
    train(rank, model, optimizer, range(3), dtype=torch.bfloat16)
    state_dict = full_state_dict(optimizer, to_all=True)
    names = [name for name, _ in model.named_parameters()]
    main_param = state_dict["state"][names.index("embed.weight")]["main_param"]
    assert not torch.equal(main_param, model.embed.weight.cpu().float())
    others = [a_model(seed=1), a_model(seed=2)]
    others[0][0].load_state_dict(model.state_dict())
    load_full_state_dict(others[0][1], state_dict)
    checkpoint.save(folder / "one", model, optimizer)
    checkpoint.load(folder / "one", *others[1])
    reshard(optimizer, None)
    for one, its_optimizer in ((model, optimizer), *others):
        assert equal(full_state_dict(its_optimizer, to_all=True), state_dict)
        train(rank, one, its_optimizer, (3, 4), dtype=torch.bfloat16)
        assert equal(full_state_dict(its_optimizer, to_all=True), full_state_dict(optimizer, to_all=True))


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [1, 3])
def test_main_parameters_are_not_lost_where_the_optimizer_has_no_state(run, stage, world_size, tmp_path):
    run(sgd_in_16_bits, stage, tmp_path)


def other_buckets(rank):
    """Each rank has two parameters of the four, of one shape, but not the same two."""
    optimizers = []
    for cap_mb in (0.0075, 0.1):
        params = [torch.nn.Parameter(torch.ones(1024, device=rank.device)) for _ in range(4)]
        optimizers.append(optimizer_of(STAGES[3])(params, bucket_cap_mb=cap_mb))
        sum(param.sum() for param in params).backward()
        optimizers[-1].step()
    ours, theirs = optimizers
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    with pytest.raises(ValueError, match=r"of other shards.*full_state_dict\(\)"):
        ours.load_state_dict(theirs.state_dict())


def of_another_kind(rank, stage, other, dtypes):
    """Nothing is changed where main parameters of their own are in one of the two only, or of another stage."""
    def made(stage, dtype):
        weight = torch.nn.Parameter(torch.ones(64, dtype=dtype, device=rank.device))
        optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=0.1, momentum=0.9)
        weight.sum().backward()
        optimizer.step()
        return optimizer
    state_dict, optimizer = made(other, dtypes[0]).state_dict(), made(stage, dtypes[1])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="use full_state_dict"):
        optimizer.load_state_dict(state_dict)
    assert equal(optimizer.state_dict(), before)


@pytest.mark.parametrize("other, dtypes", [(STAGES[0], (F, F)), (None, (F, B)), (None, (B, F))], ids=str)
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_dict_of_another_kind_is_refused(run, stage, world_size, other, dtypes):
    run(of_another_kind, stage, other or stage, dtypes)


@pytest.mark.parametrize("world_size", [2])
def test_a_state_dict_of_other_buckets_is_refused(run, world_size):
    run(other_buckets)


# ---------------------------------------------------------------------------------------------------------------------
# Other ranks. The pool has four; groups of some of them stand for other numbers of ranks.


def in_group(rank, ranks, function):
    """function(process_group) on the ranks of a new group; None on the others, which wait for them."""
    group = dist.new_group(ranks)
    result = function(group) if rank.rank in ranks else None
    dist.barrier()
    return result


def a_run(rank, stage, group, seed=0, dtype=torch.float32, optimizer_cls=torch.optim.AdamW, **kwargs):
    """A model and its optimizer, on the ranks of `group`; without group: a plain torch optimizer."""
    model = Net(seed=seed, frozen_seed=seed).to(rank.device, dtype)
    if stage is None:
        return model, optimizer_cls(model.parameters(), **kwargs)
    kwargs.update({"bucket_cap_mb": 0.0003} if stage == STAGES[3] else {})
    return model, optimizer_of(stage)(model.parameters(), optimizer_cls, process_group=group, **kwargs)


def step_alike(rank, model, optimizer, steps):
    """Every rank has the same batch: what comes out doesn't depend on how many there are."""
    for step in steps:
        loss_of(model, *batch(step, 0, device=rank.device)).backward()
        optimizer.step()
        optimizer.zero_grad()


ROUTES = [  # (stage, ranks): a step in each, with a checkpoint in between
    [(STAGES[2], [0, 1, 2]), (STAGES[3], [1, 3]), (STAGES[2], [0, 1, 2, 3]), (None, [2])],
    [(STAGES[3], [0, 1, 2]), (STAGES[2], [0, 1]), (STAGES[3], [0, 1, 2, 3]), (None, [0])],
    [(STAGES[0], [0, 1, 2]), (STAGES[1], [0, 1]), (STAGES[3], [2, 3]), (STAGES[0], [0]), (STAGES[2], [1])],
    [(None, [0]), (STAGES[3], [0, 1, 2, 3]), (STAGES[1], [0, 3]), (None, [1])],
]


def follow(rank, route, folder, name):
    optimizer_cls, kwargs = OPTIMIZERS[name]
    if name != "SGD" and rank.device.type == "cpu":
        kwargs = {**kwargs, "fused": True}
    plain, plain_optimizer = a_run(rank, None, None, optimizer_cls=optimizer_cls, **kwargs)
    step_alike(rank, plain, plain_optimizer, range(2 * len(route)))

    def leg(number, stage, group):
        model, optimizer = a_run(rank, stage, group, seed=number, optimizer_cls=optimizer_cls, **kwargs)
        optimizer.process_group = group  # a plain torch optimizer has none
        if number:
            extra = checkpoint.load(checkpoint.latest(folder), model, optimizer)
            assert extra == {"step": 2 * number}
        step_alike(rank, model, optimizer, range(2 * number, 2 * number + 2))
        checkpoint.save(folder / f"step-{number}", model, optimizer, {"step": 2 * number + 2})
        return [param.detach() for param in model.parameters()]

    for number, (stage, ranks) in enumerate(route):
        params = in_group(rank, ranks, lambda group: leg(number, stage, group))
    for param, expected in zip(params or [], plain.parameters()):
        assert torch.allclose(param, expected, rtol=1e-5, atol=1e-7)


def legs(route):
    return "-".join(f"{stage[5] if stage else 'torch'}on{len(ranks)}" for stage, ranks in route)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("route", ROUTES, ids=legs)
@pytest.mark.parametrize("world_size", [4])
def test_a_checkpoint_goes_on_in_any_stage_on_any_number_of_ranks(run, route, name, tmp_path):
    run(follow, route, tmp_path, name)


def move(rank, stage, name):
    """4 -> 2 -> 3 ranks, live. With a scheduler, whose optimizer stays the same object."""
    optimizer_cls, kwargs = OPTIMIZERS[name]
    plain, plain_optimizer = a_run(rank, None, None, optimizer_cls=optimizer_cls, **kwargs)
    model, optimizer = a_run(rank, stage, None, optimizer_cls=optimizer_cls, **kwargs)
    if stage == STAGES[3]:
        optimizer.prefetch_params(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.9) for one in (plain_optimizer, optimizer)]
    for turn, ranks in enumerate([[0, 1, 2, 3], [1, 3], [0, 1, 2], None]):
        if turn:
            group = None if ranks is None else dist.new_group(ranks)
            reshard(optimizer, group)
        for one, scheduler, trained in zip((plain, model), schedulers, (plain_optimizer, optimizer)):
            if one is plain or ranks is None or rank.rank in ranks:
                step_alike(rank, one, trained, (2 * turn, 2 * turn + 1))
                scheduler.step()
        if ranks is None or rank.rank in ranks:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(plain_optimizer.param_groups[0]["lr"])
            for param, expected in zip(model.state_dict().values(), plain.state_dict().values()):
                assert torch.allclose(param, expected, rtol=1e-5, atol=1e-7)
        else:
            assert getattr(optimizer, "bucket_buffer_bytes", 0) == 0
            with pytest.raises(RuntimeError, match="in no process group since reshard"):
                loss_of(model, *batch(0, 0, device=rank.device)).backward()
                optimizer.step()
            model.zero_grad()
            scheduler.step()
        dist.barrier()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [4])
def test_a_live_optimizer_moves_to_other_ranks(run, stage, name):
    run(move, stage, name)


def move_with_gradients(rank, stage):
    model, optimizer = a_run(rank, stage, None)
    loss_of(model, *batch(0, 0, device=rank.device)).backward()
    with pytest.raises(RuntimeError, match="between backward"):
        reshard(optimizer, None)
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, *batch(0, 0, device=rank.device)).backward()
    with pytest.raises(RuntimeError, match="between backward"):
        reshard(optimizer, None)
    optimizer.zero_grad()
    reshard(optimizer, None)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_gradients_are_not_lost_by_moving(run, stage):
    run(move_with_gradients, stage)


def move_with_assigned_gradients(rank, stage):
    """They are not of backward(), and counted in the next step."""
    model, optimizer = a_run(rank, stage, None, **ADAMW)
    plain, plain_optimizer = a_run(rank, None, None, **ADAMW)
    for param in [*trainable(model), *trainable(plain)]:
        param.grad = torch.ones_like(param)
    reshard(optimizer, None)
    optimizer.step()
    plain_optimizer.step()
    assert_same(model, plain, exact=False)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_assigned_gradients_are_not_lost_by_moving(run, stage):
    run(move_with_assigned_gradients, stage)


def move_with_gradients_on_some(rank, stage):
    """The last rank is outside, and has none."""
    model, optimizer = a_run(rank, stage, None)
    reshard(optimizer, dist.new_group(range(rank.world_size - 1)))
    if optimizer.rank >= 0:
        loss_of(model, *batch(0, 0, device=rank.device)).backward()
    with pytest.raises(RuntimeError, match="between backward"):
        reshard(optimizer, None)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [3])
def test_a_move_that_is_refused_is_refused_on_every_rank(run, stage, world_size):
    run(move_with_gradients_on_some, stage)


def move_with_gradients_from_outside(rank, stage):
    """A rank that was outside, and looked at gradients there, steps with those of the next pass only."""
    model, optimizer = a_run(rank, stage, None, **ADAMW)
    plain, plain_optimizer = a_run(rank, None, None, **ADAMW)
    reshard(optimizer, dist.new_group([0]))
    if rank.rank:
        loss_of(model, *batch(7, 0, device=rank.device)).backward()
        optimizer.zero_grad()
        loss_of(model, *batch(8, 0, device=rank.device)).backward()
    reshard(optimizer, None)
    step_alike(rank, model, optimizer, range(2))
    step_alike(rank, plain, plain_optimizer, range(2))
    assert_same(model, plain, exact=False)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_gradients_from_outside_are_not_stepped(run, stage):
    run(move_with_gradients_from_outside, stage)


def move_and_look_at_gradients(rank, stage, grad_dtype):
    """Views of the old buffer would keep all of it: there are those of the new one, and outside none."""
    kwargs = {"dtype": torch.bfloat16, "grad_dtype": torch.float32} if grad_dtype else {}
    model, optimizer = a_run(rank, stage, None, **kwargs)
    reshard(optimizer, dist.new_group([0]))
    for param in model.parameters():
        assert bool(param._post_accumulate_grad_hooks) == (rank.rank == 0)
        assert hasattr(param, "main_grad") == (rank.rank == 0 and grad_dtype)
        if rank.rank or not param.requires_grad or grad_dtype or stage != STAGES[2]:
            assert param.grad is None
        if hasattr(param, "main_grad") or param.grad is not None:
            grad = param.main_grad if grad_dtype else param.grad
            assert any(grad.is_set_to(view) for buffer in optimizer.buffers for view in buffer.grads)


@pytest.mark.parametrize("stage, grad_dtype", [(STAGES[2], False), (STAGES[2], True), (STAGES[3], False)])
@pytest.mark.parametrize("world_size", [2])
def test_who_moves_lets_go_of_gradients(run, stage, grad_dtype):
    run(move_and_look_at_gradients, stage, grad_dtype)


def move_what_was_never_stepped(rank, stage, path):
    """Loaded in fp32, and moved before the first step."""
    checkpoint.save(path, *a_run(rank, stage, None))
    model, optimizer = a_run(rank, stage, None, seed=1, dtype=torch.bfloat16)
    checkpoint.load(path, model, optimizer)
    reshard(optimizer, None)
    step_alike_16_bits(rank, model, optimizer)
    other, undisturbed = a_run(rank, stage, None, seed=1, dtype=torch.bfloat16)
    checkpoint.load(path, other, undisturbed)
    step_alike_16_bits(rank, other, undisturbed)
    assert equal(full_state_dict(optimizer, to_all=True), full_state_dict(undisturbed, to_all=True))


def step_alike_16_bits(rank, model, optimizer):
    x, y = (part.bfloat16() for part in batch(0, 0, device=rank.device))
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_move_keeps_what_16_bits_cannot(run, stage, world_size, tmp_path):
    run(move_what_was_never_stepped, stage, tmp_path / "one")


# ---------------------------------------------------------------------------------------------------------------------
# Files


@contextlib.contextmanager
def held_back(is_held_back):
    """Writing begins when the event that is yielded is set, or at once."""
    let_go, write = threading.Event(), writing.write_rank_file
    if not is_held_back:
        let_go.set()

    def write_later(*args):
        let_go.wait(30)
        return write(*args)

    writing.write_rank_file = write_later
    try:
        yield let_go
    finally:
        writing.write_rank_file = write


def save_and_load(rank, stage, folder, dtypes, asynchronous):
    """Saved with one dtype and bucket size, loaded with another -> whether the dtype was the same."""
    saved, loaded = dtypes
    model, optimizer = a_run(rank, stage, None, dtype=saved, **ADAMW)
    train(rank, model, optimizer, range(2), dtype=saved)
    with held_back(asynchronous) as let_go:
        done = checkpoint.save(folder / "one", model, optimizer, {"rank": rank.rank}, asynchronous=asynchronous)
        before = full_state_dict(optimizer, to_all=True), [param.detach().clone() for param in model.parameters()]
        if asynchronous:
            train(rank, model, optimizer, (2, 3), dtype=saved)  # what is written is what was there before
        let_go.set()
        assert done.result(30) is None
    dist.barrier()
    other = Net(seed=9, frozen_seed=9).to(rank.device, loaded)
    kwargs = {"bucket_cap_mb": 0.0006} if stage == STAGES[3] else {}
    second = optimizer_of(stage)(other.parameters(), lr=1.0, **kwargs)
    assert checkpoint.load(folder / "one", other, second) == {"rank": rank.rank}
    state, params = full_state_dict(second, to_all=True), list(other.parameters())
    assert state["param_groups"][0]["lr"] == ADAMW["lr"]
    for index, entries in before[0]["state"].items():
        assert all(torch.equal(state["state"][index][key], entries[key]) for key in entries if key != "main_param")
        exact = entries.get("main_param", before[1][index])  # the most precise value there is
        assert torch.equal(params[index], exact.to(rank.device, loaded))
        assert torch.equal(state["state"][index].get("main_param", params[index]).cpu(), exact.to(torch.float32).cpu())
    frozen = [index for index in range(len(params)) if index not in before[0]["state"]]
    assert len(frozen) == 2 and all(torch.equal(params[i], before[1][i].to(loaded)) for i in frozen)




@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [3])
def test_what_is_saved_is_loaded_to_the_bit(run, stage, asynchronous, tmp_path):
    for number, dtypes in enumerate([(F, F), (B, B), (F, B), (B, F)]):
        folder_of_it = tmp_path / str(number)
        folder_of_it.mkdir()
        print(dtypes)  # pytest shows what was the last
        run(save_and_load, stage, folder_of_it, dtypes, asynchronous)


def save_after_other_groups(rank, stage, path):
    """Rank 0 is in more groups than the others, and then also when ranks 0 to 2 save. -> what they are told"""
    dist.new_group([0, 3])

    def save(group):
        name = "some" if group else "all"
        model, optimizer = a_run(rank, stage, group, **ADAMW)
        step_alike(rank, model, optimizer, range(1))
        checkpoint.save(path / name, model, optimizer, asynchronous=True).result(30)

    save(None)
    try:
        return in_group(rank, [0, 1, 2], save)
    except RuntimeError as error:
        dist.barrier()
        return str(error)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [4])
def test_an_asynchronous_save_where_ranks_are_in_other_groups_too(run, stage, tmp_path):
    """torch names a group of some ranks after how many groups a rank is in: different names would be a hang."""
    told = run(save_after_other_groups, stage, tmp_path)
    assert (tmp_path / "all").exists() and told[3] is None
    assert all("process groups: save without asynchronous" in line for line in told[:3])
    assert not (tmp_path / "some").exists()


def save_from_two_optimizers(rank, stage, path):
    """-> in how many process groups this rank is after each."""
    n_groups = []
    for name in ("one", "other"):
        model, optimizer = a_run(rank, stage, None)
        future = checkpoint.save(path / name, model, optimizer, asynchronous=True)
        future.result(30)
        kept = weakref.ref(future)
        del future
        deadline = time.monotonic() + 120
        while kept() is not None and time.monotonic() < deadline:  # the thread has yet to turn to something else
            gc.collect()
        assert kept() is None  # nor what it may have of the tensors, if it has failed
        n_groups.append(len(dist.distributed_c10d._world.pg_names))
    return n_groups


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_asynchronous_saves_of_two_optimizers_take_one_more_group(run, stage, world_size, tmp_path):
    for one, other in run(save_from_two_optimizers, stage, tmp_path):
        assert one == other


@pytest.mark.parametrize("stage", SHARDED)
def test_asynchronous_saves_go_on_in_a_new_process_group(stage, tmp_path):
    model, optimizer = torch.nn.Linear(3, 3), None
    for name in ("one", "other"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            optimizer = optimizer or optimizer_of(stage)(model.parameters())
            checkpoint.save(tmp_path / name, model, optimizer, asynchronous=True).result(30)
        finally:
            dist.destroy_process_group()
        assert (tmp_path / name / "manifest.json").exists()


def save_once(rank, stage, path, seed=0, optimizer_cls=torch.optim.AdamW):
    model, optimizer = a_run(rank, stage, None, seed=seed, optimizer_cls=optimizer_cls)
    train(rank, model, optimizer, range(2))
    checkpoint.save(path, model, optimizer, {"anything": [1, 2.0, "three"]})
    return [param.detach().cpu().clone() for param in model.parameters()], full_state_dict(optimizer)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [3])
def test_torchs_own_tools_read_what_it_is_converted_to_and_plain_torch_goes_on(run, stage, tmp_path):
    """Offline, in this process, which has no process group: names, shapes and values, and no padding."""
    params, state_dict = run(save_once, stage, tmp_path / "one")[0]
    written = sum(file.stat().st_size for file in (tmp_path / "one").glob("rank-*.bin"))
    convert(tmp_path / "one", tmp_path / "one.dcp", "dcp")
    dcp_to_torch_save(tmp_path / "one.dcp", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    model = Net(seed=5)
    model.load_state_dict(found["model"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), params))
    optimizer = torch.optim.AdamW(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    (group,) = found["optimizer"]["param_groups"]
    assert group.pop("params") == names
    state = {names.index(name): entries for name, entries in found["optimizer"]["state"].items()}
    assert equal(state, state_dict["state"])
    state_dict_by_name = {"state": found["optimizer"]["state"], "param_groups": [{**group, "params": names}]}
    set_optimizer_state_dict(model, optimizer, state_dict_by_name)
    assert equal(optimizer.state_dict()["state"], state_dict["state"])
    metadata = dcp.FileSystemReader(tmp_path / "one.dcp").read_metadata().state_dict_metadata
    sizes = {key: value.size for key, value in metadata.items() if hasattr(value, "size")}
    assert sizes["optimizer.state.head.weight.exp_avg"] == (7, 5) and written < 10_000


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_each_rank_writes_its_part_only(run, stage, tmp_path):
    run(save_large, stage, tmp_path / "one")
    sizes = [file.stat().st_size for file in sorted((tmp_path / "one").glob("rank-*.bin"))]
    everything = 3 * 4 * 1024 * 1024  # a parameter and two moments, of fp32
    assert len(sizes) == 2 and everything <= sum(sizes) < everything + 500
    assert all(abs(size - everything / 2) < 500 for size in sizes)  # a shard ends where a vector of the CPU does


def save_large(rank, stage, path):
    model = torch.nn.Linear(1024, 1024, bias=False).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters())
    model(torch.ones(1, 1024, device=rank.device)).sum().backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer)


class Exploit:
    def __reduce__(self):
        return print, ("code from a file has run",)


def truncate(path):
    file = max(path.glob("rank-*.bin"))
    file.write_bytes(file.read_bytes()[:-10])
    return rf"{file.name} is damaged: \d+ bytes with checksum \w+ were written, now it is \d+ bytes"


def flip_a_bit(path):
    file = min(path.glob("rank-*.bin"))
    flip_a_bit_of(file)
    return f"{file.name} is damaged"


def flip_a_bit_of(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove_a_file(path):
    file = max(path.glob("rank-*.bin"))
    file.unlink()
    return f"{file.name} is damaged.*now it is missing"


def remove_the_manifest(path):
    (path / "manifest.json").unlink()
    return "it is not complete: manifest.json is missing"


def cut_the_manifest(path):
    (path / "manifest.json").write_text((path / "manifest.json").read_text()[:100])
    return "manifest.json is damaged"


def remove_everything(path):
    shutil.rmtree(path)
    return "there is no such folder"


def flip_a_bit_of_the_manifest(path):
    content = bytearray((path / "manifest.json").read_bytes())
    content[content.index(b"weight_decay") + 18] ^= 1  # a digit
    json.loads(content)
    (path / "manifest.json").write_bytes(content)
    return "manifest.json is damaged: its checksum is that of another"


DAMAGE = [truncate, flip_a_bit, remove_a_file, remove_the_manifest, cut_the_manifest, remove_everything,
          flip_a_bit_of_the_manifest]


def refuse(rank, stage, path, message, make=None):
    """The message on every rank, and everything as it was."""
    model, optimizer = make(rank) if make else a_run(rank, stage, None, seed=7)
    before = full_state_dict(optimizer, to_all=True), copy.deepcopy(model.state_dict())
    with pytest.raises(checkpoint.CheckpointError, match=message) as refusal:
        checkpoint.load(path, model, optimizer)
    assert type(refusal.value) is (checkpoint.ForeignCheckpoint if make else checkpoint.DamagedCheckpoint)
    assert len(str(refusal.value).splitlines()) == 1 and str(path) in str(refusal.value)
    assert equal(full_state_dict(optimizer, to_all=True), before[0])
    assert equal(dict(model.state_dict()), dict(before[1]))


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_changed(run, stage, tmp_path, capfd):
    for number, damage in enumerate(DAMAGE):
        folder_of_it = tmp_path / str(number)
        folder_of_it.mkdir()
        print(damage)  # pytest shows what was the last
        run(save_once, stage, folder_of_it / "one")
        message = damage(folder_of_it / "one")
        run(refuse, stage, folder_of_it / "one", message)
        assert "code from a file has run" not in capfd.readouterr().out


def other_model(rank):
    model = torch.nn.Linear(7, 7).to(rank.device)
    return model, optimizer_of(SHARDED[1])(model.parameters())


def other_shape(rank):
    model = Net(seed=0).to(rank.device)
    model.up = torch.nn.Linear(5, 12).to(rank.device)
    return model, optimizer_of(SHARDED[0])(model.parameters())


def other_optimizer(rank):
    model = Net(seed=0).to(rank.device)
    return model, optimizer_of(SHARDED[0])(model.parameters(), torch.optim.SGD, lr=0.1)


def other_of_that_name(rank):
    model = Net(seed=0).to(rank.device)
    return model, optimizer_of(SHARDED[1])(model.parameters(), type("AdamW", (torch.optim.Adagrad,), {}))


def other_groups(rank):
    model = Net(seed=0).to(rank.device)
    params = list(model.parameters())
    return model, optimizer_of(SHARDED[1])([{"params": params[:4]}, {"params": params[4:]}])


FOREIGN = [
    (other_model, "it is of another model: weight: the checkpoint doesn't have it"),
    (other_shape, r"of another model: up.weight: the checkpoint has it with shape \(11, 5\), the model .*\(12, 5\)"),
    (other_optimizer, "it is of AdamW, this optimizer is SGD"),
    (other_of_that_name, "the state of scale is of another optimizer: .*exp_avg_sq.*, this one keeps step, sum"),
    (other_groups, "its parameter groups are 10 from .* to .*, this optimizer's 4 from .* and 6 from"),
]


@pytest.mark.parametrize("make, message", FOREIGN, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("world_size", [2])
def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_changed(run, make, message, tmp_path):
    run(save_once, STAGES[3], tmp_path / "one")
    run(refuse, STAGES[3], tmp_path / "one", message, make)


class Convolutions(torch.nn.Module):
    """Parameters that lie in memory otherwise than row by row."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 2, padding=1) for _ in range(3)))
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layers(x)


def channels_last(rank, stage, path):
    def train_on(model, optimizer, steps):
        for step in steps:
            x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(rank.device)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    runs = [Convolutions(seed).to(rank.device) for seed in range(2)]
    (model, optimizer), (other, second) = [(one, optimizer_of(stage)(one.parameters(), **ADAMW)) for one in runs]
    train_on(model, optimizer, range(2))
    checkpoint.save(path, model, optimizer)
    checkpoint.load(path, other, second)
    for one, its_optimizer in ((model, optimizer), (other, second)):
        train_on(one, its_optimizer, (2, 3))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("stage", STAGES[:2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_in_channels_last_are_saved_and_loaded(run, stage, world_size, tmp_path):
    run(channels_last, stage, tmp_path / "one")


class Scaled(torch.nn.Linear):
    def get_extra_state(self):
        return {"scale": 2.0}

    def set_extra_state(self, state):
        pass


class Cloned(torch.nn.Linear):
    """What frameworks do so that a `state_dict()` doesn't change while it is written."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "bias"] = destination[prefix + "bias"].clone()


def would_not_be_loaded(rank, stage, path, kind, message):
    model = torch.nn.Sequential(kind(3, 3)).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters(), **ADAMW)
    with pytest.raises(ValueError, match=message):
        checkpoint.save(path, model, optimizer)
    twin = torch.nn.Sequential(torch.nn.Linear(3, 3)).to(rank.device)
    checkpoint.save(path, twin, optimizer_of(stage)(twin.parameters(), **ADAMW))
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path, model, optimizer)


UNLOADABLE = [(Scaled, "0._extra_state, .*pass it as `extra`"), (Cloned, "a copy of 0.bias, .*could not be loaded")]


@pytest.mark.parametrize("kind, message", UNLOADABLE)
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_what_would_not_be_loaded_again_is_not_saved(run, stage, world_size, tmp_path, kind, message):
    run(would_not_be_loaded, stage, tmp_path / "one", kind, message)
    assert {path.name for path in tmp_path.iterdir()} == {"one", LOCK}


def wrap_and_unwrap(rank, stage, folder):
    """A layer is compiled, the model is compiled, and DDP is around it: none of them adds to the names."""
    def wrapped(model):
        model.up.compile()  # in place, which adds nothing
        model.head = torch.compile(model.head)
        return torch.compile(torch.nn.parallel.DistributedDataParallel(model))
    model, optimizer = a_run(rank, stage, None)
    train(rank, model, optimizer, range(2))
    checkpoint.save(folder / "bare", model, optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    saves = [wrapped(model)]
    saves.append(saves[0]._orig_mod.module)
    for index, save in enumerate(saves):
        checkpoint.save(folder / str(index), save, optimizer)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        checkpoint.load(folder / "bare", save, optimizer)
        assert all(map(torch.equal, model.parameters(), before))
    other, second = a_run(rank, stage, None, seed=3)
    checkpoint.load(folder / "0", other, second)
    assert all(map(torch.equal, other.parameters(), before))


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_names_are_those_of_the_bare_model(run, stage, world_size, tmp_path):
    run(wrap_and_unwrap, stage, tmp_path)
    names = [json.loads((tmp_path / name / "manifest.json").read_text())["tensors"] for name in ("bare", "0", "1")]
    assert names[0].keys() == names[1].keys() == names[2].keys()


def save_where_it_cannot(rank, stage, path, limit, message):
    """`limit`: bytes that a file of this rank may have: then writing fails as it does on a full disk."""
    model, optimizer = a_run(rank, stage, None)
    train(rank, model, optimizer, range(2))
    before = full_state_dict(optimizer, to_all=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit and rank.rank == rank.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(checkpoint.CheckpointError, match=message) as refusal:
            checkpoint.save(path, model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(str(refusal.value).splitlines()) == 1
    assert equal(full_state_dict(optimizer, to_all=True), before)
    train(rank, model, optimizer, (2,))


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_full_disk_leaves_nothing_behind(run, stage, world_size, tmp_path):
    message = f"can't be written: rank {world_size - 1}: File too large$"
    run(save_where_it_cannot, stage, tmp_path / "one", 1_000, message)
    assert [left.name for left in tmp_path.iterdir()] == [LOCK]
    run(save_once, stage, tmp_path / "one")
    assert (tmp_path / "one" / "manifest.json").exists()


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_place_that_cannot_be_written_is_one_line(run, stage, tmp_path):
    run(save_where_it_cannot, stage, Path("/proc/checkpoint"), 0, "/proc/checkpoint can't be written: ")
    (tmp_path / "file").touch()
    run(save_where_it_cannot, stage, tmp_path / "file" / "one", 0, "can't be written: .*file is no folder")
    (tmp_path / "one").mkdir()
    run(save_where_it_cannot, stage, tmp_path / "one", 0, "can't be written: it exists already")


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    latest = checkpoint.latest
    assert latest(tmp_path / "nowhere") is None and latest(tmp_path) is None
    for name in ("step-2", "step-1", "step-4.0-0123456789ab-0.partial", "zzz-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "step-3").mkdir()  # without manifest
    assert latest(tmp_path) == tmp_path / "step-2"
    for name in ("step-9", "step-10", "step-00000011", "epoch-12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
        assert latest(tmp_path) == tmp_path / name


# --------------------------------------------------------------------------- what readers of checkpoint/ have found


def small(rank, stage, *layers, **kwargs):
    """A model, and its optimizer after a step."""
    model = torch.nn.Sequential(*(layers or [torch.nn.Linear(7, 7)])).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters(), torch.optim.AdamW, **kwargs)
    model(torch.ones(2, 7, device=rank.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def wrapped(rank, stage, path):
    """checkpoint_wrapper takes its prefix out of the names in state_dict(), and not out of those of parameters."""
    model, optimizer = small(rank, stage, checkpoint_wrapper(torch.nn.Linear(7, 7)), torch.nn.Linear(7, 3))
    checkpoint.save(path, model, optimizer)
    other, other_optimizer = small(rank, stage, checkpoint_wrapper(torch.nn.Linear(7, 7)), torch.nn.Linear(7, 3))
    checkpoint.load(path, other, other_optimizer)
    assert equal(dict(other.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_parameters_whose_module_renames_them(run, stage, tmp_path):
    run(wrapped, stage, tmp_path / "one")


def written_later(rank, stage, path):
    """What is given to an asynchronous save may change before it is written."""
    model, optimizer = small(rank, stage, lr=torch.tensor(0.5))
    extra = {"step": 1, "average": torch.zeros(5)}
    with held_back(True) as let_go:
        done = checkpoint.save(path, model, optimizer, extra, asynchronous=True)
        extra["step"], _ = 2, extra["average"].fill_(7)
        optimizer.param_groups[0]["lr"].fill_(9)
        let_go.set()
        done.result(30)
    found = checkpoint.load(path, model, optimizer)
    assert found["step"] == 1 and found["average"].eq(0).all() and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_an_asynchronous_save_keeps_what_was_there(run, stage, tmp_path):
    run(written_later, stage, tmp_path / "one")


def whole_on_every_rank(rank, stage, path):
    """Statistics of each rank's own, and a layer that is not in the optimizer: of such, those of rank 0 are saved."""
    layers = [torch.nn.Linear(7, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 7), torch.nn.BatchNorm1d(7)]
    model, optimizer = small(rank, stage, *layers)
    model.append(torch.nn.Linear(100, 3).to(rank.device))
    own = [*model.buffers(), *model[-1].parameters()]
    with torch.no_grad():
        for tensor in own:
            tensor.fill_(rank.rank + 1)
    checkpoint.save(path, model, optimizer)
    checkpoint.load(path, model, optimizer)
    assert all(tensor.eq(1).all() for tensor in own)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_all_ranks_have_is_saved_by_rank_0(run, stage, tmp_path):
    run(whole_on_every_rank, stage, tmp_path / "one")


def unreadable(rank, stage, path):
    model, optimizer = small(rank, stage)
    message = "rank 1: .* can't read `extra` or a parameter group again: it holds numpy"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.save(path, model, optimizer, np.zeros(2) if rank.rank == 1 else {"step": 1})
    assert not path.exists()


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_an_extra_that_no_load_will_read_is_refused_when_it_is_saved(run, stage, tmp_path):
    run(unreadable, stage, tmp_path / "one")


def saved_twice(rank, stage, path):
    """While the first one is being written there is no folder of that name yet."""
    model, optimizer = small(rank, stage, torch.nn.Linear(7, 999))
    done = checkpoint.save(path, model, optimizer, 1, asynchronous=True)
    with pytest.raises(checkpoint.CheckpointError, match="exists already"):
        checkpoint.save(path, model, optimizer, 2)
    done.result(30)
    assert checkpoint.load(path, model, optimizer) == 1


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_second_save_waits_for_the_first(run, stage, tmp_path):
    run(saved_twice, stage, tmp_path / "one")


def a_lr_of_ones_own(rank, stage):
    model, optimizer = small(rank, stage, lr=torch.tensor(0.5))
    plain = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    load_full_state_dict(optimizer, plain.state_dict())
    optimizer.param_groups[0]["lr"].fill_(9)
    return plain.param_groups[0]["lr"].item()


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_a_loaded_learning_rate_is_not_the_callers(run, stage):
    assert run(a_lr_of_ones_own, stage) == pytest.approx([0.1, 0.1])


def group_added_by_some(rank, stage, path):
    model, optimizer = small(rank, stage)
    members = dist.new_group([0, 2])
    reshard(optimizer, members)
    if rank.rank == 1:
        with pytest.raises(checkpoint.CheckpointError, match="in no process group since reshard"):
            checkpoint.save(path, model, optimizer)
        for call in (lambda: full_state_dict(optimizer, to_all=True), lambda: load_full_state_dict(optimizer, {})):
            with pytest.raises(RuntimeError, match="in no process group since reshard"):
                call()
    else:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5, device=rank.device))]})
    with pytest.raises(RuntimeError, match="different parameter groups"):
        reshard(optimizer, None)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [3])
def test_a_group_that_was_added_while_a_rank_was_outside(run, stage, tmp_path):
    run(group_added_by_some, stage, tmp_path / "one")


CHANGED = {  # optimizer -> made with, changed before it is saved, made with when it is loaded
    "amsgrad in the saved one": (torch.optim.AdamW, {"amsgrad": True}, {}, {}),
    "amsgrad in the new one": (torch.optim.AdamW, {}, {}, {"amsgrad": True}),
    "momentum set to 0": (torch.optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}, {"momentum": 0.9}),
    "momentum in the saved one": (torch.optim.SGD, {"momentum": 0.9}, {}, {}),
    "centered in the saved one": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}, {}, {}),
}


def other_hyperparameters(rank, stage, path, optimizer_cls, made, changed, remade):
    """torch takes over what was saved, and goes on as if the new optimizer had been made so."""
    def step(model, optimizer):
        for scale in (1.0, 2.0, 0.5):
            model(torch.full((2, 7), scale, device=rank.device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made_with(model, **kwargs):
        return optimizer_of(stage)(model.parameters(), optimizer_cls, lr=0.01, **kwargs)

    torch.manual_seed(0)
    model = torch.nn.Linear(7, 7).to(rank.device)
    optimizer = made_with(model, **made)
    step(model, optimizer)
    optimizer.param_groups[0].update(changed)
    step(model, optimizer)
    full = full_state_dict(optimizer, to_all=True)
    checkpoint.save(path, model, optimizer)

    plain_model, model_of_dict, model_of_files = (copy.deepcopy(model) for _ in range(3))
    plain = optimizer_cls(plain_model.parameters(), lr=0.01, **remade)
    plain.load_state_dict(copy.deepcopy(full))
    of_dict, of_files = made_with(model_of_dict, **remade), made_with(model_of_files, **remade)
    load_full_state_dict(of_dict, full if rank.rank == 0 else {})
    checkpoint.load(path, model_of_files, of_files)
    for one, its_optimizer in ((plain_model, plain), (model_of_dict, of_dict), (model_of_files, of_files)):
        step(one, its_optimizer)
    assert equal(dict(model_of_dict.state_dict()), dict(plain_model.state_dict()))
    assert equal(dict(model_of_files.state_dict()), dict(plain_model.state_dict()))


@pytest.mark.parametrize("case", CHANGED)
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_saved_hyperparameters_decide_what_is_loaded(run, stage, case, tmp_path):
    run(other_hyperparameters, stage, tmp_path / "one", *CHANGED[case])


def numbers_of_numpy(rank, stage, path):
    """As a schedule leaves them that is written with NumPy's functions."""
    model, optimizer = small(rank, stage)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step))
    scheduler.step()
    lr = optimizer.param_groups[0]["lr"]
    assert type(lr) is np.float64
    checkpoint.save(path, model, optimizer)
    optimizer.param_groups[0]["lr"] = 1.0
    checkpoint.load(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == lr
    optimizer.param_groups[0]["mine"] = path  # what no load would read
    with pytest.raises(checkpoint.CheckpointError, match="or a parameter group again: it holds pathlib"):
        checkpoint.save(path.with_name("two"), model, optimizer)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_numbers_of_numpy_in_parameter_groups(run, stage, world_size, tmp_path):
    run(numbers_of_numpy, stage, tmp_path / "one")


ENTRIES = [{"a": 1, "b": {"c": 2.0}}, (0.9, 0.99), [1, 2], [torch.ones(2), 2], [{"k": 1}]]


def entries_of_groups(rank, stage, path):
    model, optimizer = small(rank, stage)
    optimizer.param_groups[0].update({f"mine {i}": entry for i, entry in enumerate(ENTRIES)})
    checkpoint.save(path, model, optimizer)
    other, again = small(rank, stage)
    checkpoint.load(path, other, again)
    assert all(equal(again.param_groups[0][f"mine {i}"], entry) for i, entry in enumerate(ENTRIES))
    assert len(again.param_groups[0]) == len(optimizer.param_groups[0])


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_entries_of_ones_own_in_parameter_groups(run, stage, world_size, tmp_path):
    run(entries_of_groups, stage, tmp_path / "one")


def from_16_bits_to_16_others(rank, stage, path, dtype, other):
    """Main parameters are in the file: what the other 16 bits would round is not asked."""
    model, optimizer = a_run(rank, stage, None, dtype=dtype)
    x, y = (part.to(dtype) for part in batch(0, rank.rank, device=rank.device))
    loss_of(model, x, y).backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer)
    model, again = a_run(rank, stage, None, seed=1, dtype=other)
    checkpoint.load(path, model, again)
    assert equal(full_state_dict(again, to_all=True), full_state_dict(optimizer, to_all=True))


@pytest.mark.parametrize("dtype, other", [(B, torch.float16), (torch.float16, B)], ids=str)
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_from_16_bits_to_16_others_nothing_is_lost(run, stage, world_size, dtype, other, tmp_path):
    run(from_16_bits_to_16_others, stage, tmp_path / "one", dtype, other)


class WithNothing(torch.nn.Module):
    """An empty parameter, as a layer of no width has."""

    def __init__(self):
        super().__init__()
        self.weight, self.nothing = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.empty(0, 3))

    def forward(self):
        return (self.weight**2).sum() + self.nothing.sum()


def empty_parameters(rank, stages, folder):
    """A step in each of `stages`, with a checkpoint in between. None is plain torch."""
    for number, stage in enumerate(stages):
        model = WithNothing().to(rank.device)
        optimizer = (optimizer_of(stage) if stage else torch.optim.AdamW)(model.parameters())
        if number:
            checkpoint.load(folder / str(number - 1), model, optimizer)
        model().backward()
        optimizer.step()
        checkpoint.save(folder / str(number), model, optimizer)
    return model.weight.detach().clone()


@pytest.mark.parametrize("first", [None, *STAGES])
@pytest.mark.parametrize("world_size", [2])
def test_an_empty_parameter_is_no_obstacle(run, world_size, first, tmp_path):
    """Two steps, the second in stage 1 or 3."""
    for second in (STAGES[0], STAGES[2]):
        for weight in run(empty_parameters, [first, second], tmp_path / second):
            expected = WithNothing().to(weight.device)
            optimizer = torch.optim.AdamW(expected.parameters(), fused=True)
            for _ in range(2):
                optimizer.zero_grad()
                expected().backward()
                optimizer.step()
            assert torch.allclose(weight, expected.weight, rtol=1e-6)


def from_folders_of_its_own(rank, stage, folder):
    """Each rank stands somewhere else, and `path` is relative: what one writes the others don't see."""
    model, optimizer = a_run(rank, stage, None)
    here, own = Path.cwd(), folder / str(rank.rank)
    own.mkdir()
    os.chdir(own)
    try:
        with pytest.raises(checkpoint.CheckpointError, match="isn't here: all need the same folder"):
            checkpoint.save("one", model, optimizer)
        assert not Path("one").exists()
    finally:
        os.chdir(here)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2])
def test_a_checkpoint_in_several_folders_is_none(run, stage, tmp_path):
    run(from_folders_of_its_own, stage, tmp_path)


def to_where_it_was(rank, stage, folder):
    model, optimizer = a_run(rank, stage, None)
    here = Path.cwd()
    os.chdir(folder)
    try:
        future = checkpoint.save("one", model, optimizer, asynchronous=True)
        os.chdir(folder / "other")
        future.result()
    finally:
        os.chdir(here)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_an_asynchronous_checkpoint_stays_where_it_was_begun(run, stage, tmp_path):
    (tmp_path / "other").mkdir()
    run(to_where_it_was, stage, tmp_path)
    assert (tmp_path / "one" / "manifest.json").exists() and not list((tmp_path / "other").iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stage", SHARDED)
def test_a_checkpoint_whose_group_is_gone_is_none(stage, tmp_path):
    """As the thread of an asynchronous save finds it: here there is no group, and there were two ranks."""
    (tmp_path / "one.partial").mkdir()
    path, partial = tmp_path / "one", tmp_path / "one.partial"
    with pytest.raises(checkpoint.CheckpointError, match="the process group was destroyed meanwhile"):
        writing.write(path, partial, {"a": whole(torch.ones(2))}, {"ranks": 2}, None)
    assert not path.exists()


def beside_messages(rank, stage):
    """A message of the user's, of the size of a piece and with torch's own tag, is under way meanwhile."""
    model, optimizer = a_run(rank, stage, None)
    step_alike(rank, model, optimizer, range(1))
    expected = full_state_dict(optimizer, to_all=True)
    theirs = torch.zeros(1000, device=rank.device)
    receiving = dist.irecv(theirs, 1) if rank.rank == 0 else None
    found = full_state_dict(optimizer)
    if rank.rank == 1:
        dist.send(torch.full((1000,), 7.0, device=rank.device), 0)
    if rank.rank == 0:
        receiving.wait()
        assert theirs.eq(7).all() and equal(found, expected)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_the_full_state_dict_keeps_out_of_other_messages(run, stage):
    run(beside_messages, stage)


def move_to_different_groups(rank, stage, what):
    """Nobody waits for a rank that is elsewhere, and nothing is lost."""
    model, optimizer = a_run(rank, stage, None, **ADAMW)
    step_alike(rank, model, optimizer, range(1))
    before = full_state_dict(optimizer, to_all=True)
    some, last, outside = dist.new_group([0, 1]), dist.new_group([2]), dist.GroupMember.NON_GROUP_MEMBER
    if what == "destroyed" and rank.rank < 2:
        dist.destroy_process_group(some)
    groups = {"not on a member": [some, outside, outside], "another on a member": [some, None, some],
              "destroyed": [some, some, some], "no group on one": [None, None, 7], "none": [outside] * 3,
              "several": [some, some, last]}
    with pytest.raises((RuntimeError, TypeError, ValueError), match="on each of its ranks|not registered|must be a "):
        reshard(optimizer, groups[what][rank.rank])
    assert equal(full_state_dict(optimizer, to_all=True), before)


@pytest.mark.parametrize("what", ["not on a member", "another on a member", "destroyed", "no group on one", "none",
                                  "several"])
@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [3])
def test_a_move_to_different_groups_is_refused_on_every_rank(run, stage, what):
    run(move_to_different_groups, stage, what)


def move_experts(rank, stage):
    """Each pair of ranks has trained another model."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, optimizer = a_run(rank, stage, pairs[rank.rank // 2], seed=rank.rank // 2)
    step_alike(rank, model, optimizer, range(1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="of several process groups"):
        reshard(optimizer, None)
    with pytest.raises(TypeError, match="process_group must be a ProcessGroup"):
        reshard(optimizer, [0, 1])
    assert equal(model.state_dict(), before)
    step_alike(rank, model, optimizer, range(1))


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [4])
def test_several_groups_are_not_moved_into_one(run, stage):
    run(move_experts, stage)


def load_different_ones(rank, stage, path):
    model, optimizer = a_run(rank, stage, None)
    for step in range(2):
        step_alike(rank, model, optimizer, [step])
        checkpoint.save(path / str(step), model, optimizer, {"step": step})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(checkpoint.CheckpointError, match="the ranks read different checkpoints"):
        checkpoint.load(path / str(rank.rank), model, optimizer)
    assert equal(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_ranks_that_load_different_checkpoints_are_refused(run, stage, tmp_path):
    run(load_different_ones, stage, tmp_path)


def interrupt_a_save(rank, stage, path):
    """Ctrl-C comes to rank 0; the others say so; nothing is left; the next save works."""
    model, optimizer = a_run(rank, stage, None)
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 0:
            patch.setattr(writing, "write_rank_file", interrupt)
        with pytest.raises(KeyboardInterrupt if rank.rank == 0 else checkpoint.CheckpointError) as caught:
            checkpoint.save(path / "one", model, optimizer)
    assert rank.rank == 0 or "rank 0: KeyboardInterrupt" in str(caught.value)
    dist.barrier()
    assert [left.name for left in path.iterdir()] == [LOCK]
    checkpoint.save(path / "one", model, optimizer)
    assert (path / "one" / "manifest.json").exists()


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_an_interrupt_in_a_save_stays_one(run, stage, tmp_path):
    run(interrupt_a_save, stage, tmp_path)


def look_at_the_time_out(rank, stage, path):
    model, optimizer = a_run(rank, stage, None)
    checkpoint.save(path / "one", model, optimizer, asynchronous=True).result()
    _, group = writing.writer_of(optimizer, None)  # the one that has written it
    ours, writers = (one._get_backend(torch.device("cpu")).options._timeout for one in (dist.group.WORLD, group))
    assert ours == writers != dist.distributed_c10d.default_pg_timeout


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("world_size", [2])
def test_who_writes_behind_waits_no_longer_than_the_group(run, stage, tmp_path):
    run(look_at_the_time_out, stage, tmp_path)
