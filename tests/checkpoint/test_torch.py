"""torch's own lines: get_state_dict, dcp.save, dcp.load, set_state_dict. From any stage on any ranks to any other."""

import copy
import io
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from checkpoint.ranks import all_gather
from guard.flat_shard import FlatShard, boxes_of
from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from tests.checkpoint import SHARDED, make_optimizer, make_run, train
from tests.checkpoint.compare import equal, full_state
from tests.common import STAGES, Net, error_of, mesh_of, on_ranks, optimizer_of, situation
from tests.stages.test_dtensor import Block, tensor_parallel

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ALL = [0, 1, 2, 3]


# ------------------------------------------------------------------------------------- kinds of models and optimizers
# A table of kinds: name -> (how the kind trains, its ranks of four). What a kind saves, each kind of the table loads.
# The function before a table makes a model, and its optimizer on the ranks of `group`. `how` is from the table.


def make_net(rank, how, dtype, seed, group):
    """Train by the stage or variant `how`, or by a plain torch optimizer if it is None."""
    model = Net(seed=seed, frozen_seed=seed).to(dtype)
    if how == "variants.hybrid":
        mesh = mesh_of("cpu", (2, 2))
        return model, optimizer_of(how)(model.parameters(), mesh=mesh, bucket_cap_mb=0.0003, lr=0.01)
    return model, make_optimizer(how, model.parameters(), process_group=group, lr=0.01)


IN_32_BITS = {
    "plain torch": (None, ALL), "stage 1": (STAGE_1, [0, 1]), "stage 2": (STAGE_2, [1, 2, 3]),
    "stage 3": (STAGE_3, ALL), "stage 4": (STAGE_4, [1, 3]), "hybrid": ("variants.hybrid", ALL),
    "muon": ("variants.muon", [0, 2, 3]), "offload": ("variants.offload", [2]), "blocks": ("variants.blocks", [0, 3]),
    "per_parameter": ("variants.per_parameter", [1, 2]), "moments16": ("variants.moments16", ALL)}
IN_16_BITS = {
    "stage 3": (STAGE_3, [3]), "stage 4": (STAGE_4, [0, 1, 2]), "offload": ("variants.offload", [2, 3]),
    "remainder16": ("variants.remainder16", ALL)}


def make_block(rank, how, dtype, seed, group):
    """Train by stage 4 over the first dimension of a mesh of the shape `how`, or in plain torch if it is None."""
    stage = None
    group = None
    model = Block(width=11)  # no number of ranks divides 11
    if how is not None:
        stage = STAGE_4
        model, group = tensor_parallel(rank, how, width=11)
    for param in model.to(dtype).parameters():
        param.data += 0.01 * seed
    return model, make_optimizer(stage, model.parameters(), process_group=group, lr=0.01)


MESHES = {"2 x 2": ((2, 2), ALL), "4 x 1": ((4, 1), ALL), "1 x 4": ((1, 4), ALL)}
MESHES_AND_NONE = {**MESHES, "no mesh": (None, ALL)}


class Case(NamedTuple):
    make: Callable
    kinds: dict
    dtype: torch.dtype


CASES = [Case(make_net, IN_32_BITS, F32), Case(make_net, IN_16_BITS, BF16), Case(make_net, IN_16_BITS, FP16),
         Case(make_block, MESHES_AND_NONE, F32), Case(make_block, MESHES, BF16)]


# ------------------------------------------------------------------------------------------ saving and loading a kind


def take_steps(model, optimizer, numbers):
    for number in numbers:
        shape = (2, 4, 6) if isinstance(model, Block) else (4, 7)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        dtype = next(model.parameters()).dtype
        model(x.to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value):
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().clone().float()


def content(model, optimizer):
    """Return name -> whole tensor of the model and its optimizer's state, in fp32. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {name: whole(value) for name, value in model_state.items()}
    for name, entries in optimizer_state["state"].items():
        for key in sorted(entries):
            if key != "step":  # on a rank that has nothing of the parameter it has no value
                tensors[f"{name}: {key}"] = whole(entries[key])
    return tensors


def save_by_torch(path, model, optimizer, group=None, options=None):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path, process_group=group)


def load_by_torch(path, model, optimizer, group=None, options=None):
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)


def save_and_load_each(rank, case, folder, options=None):
    """Save each kind. Then each kind loads what it has saved itself, and what the kind before it has saved.

    All bits are there, and training goes on.
    """
    groups = {name: dist.new_group(ranks) for name, (_, ranks) in case.kinds.items()}
    contents = {}  # name of a kind -> what it has saved
    for name, (how, ranks) in case.kinds.items():
        own_content = None
        if rank.number in ranks:
            model, optimizer = case.make(rank, how, case.dtype, 0, groups[name])
            take_steps(model, optimizer, range(2))
            save_by_torch(folder / name, model, optimizer, groups[name], options)
            own_content = content(model, optimizer)
        contents[name] = all_gather(own_content, None)[ranks[0]]
    names = [*case.kinds]
    names_before = names[-1:] + names[:-1]
    for source, target in [*zip(names_before, names), *zip(names, names)]:
        how, ranks = case.kinds[target]
        if rank.number in ranks:
            with situation(f"{source} -> {target}"):
                model, optimizer = case.make(rank, how, case.dtype, 1, groups[target])
                load_by_torch(folder / source, model, optimizer, groups[target], options)
                loaded = content(model, optimizer)
                assert loaded.keys() == contents[source].keys()
                for key, tensor in loaded.items():
                    is_rounded = "moments16" in (source, target) and "exp_avg" in key
                    assert is_rounded or equal(tensor, contents[source][key]), key
                take_steps(model, optimizer, [2])
        dist.barrier()


@on_ranks(4, case=CASES)
def test_torchs_own_lines_save_and_load_in_every_stage_and_variant(rank, case, tmp_path):
    save_and_load_each(rank, case, tmp_path / f"{case.make.__name__} {len(case.kinds)} {case.dtype}")


@on_ranks(4, dtype=[F32, BF16], option=["flatten_optimizer_state_dict", "cpu_offload"])
def test_torchs_flattened_form_and_its_offload(rank, dtype, option, tmp_path):
    """torchtitan's form has names and hyperparameters for each parameter, and no groups."""
    kinds = {"stage 3": (STAGE_3, [0, 1]), "stage 4": (STAGE_4, [1, 2, 3])}
    options = StateDictOptions(**{option: True})
    save_and_load_each(rank, Case(make_net, kinds, dtype), tmp_path / f"{option} {dtype}", options)


@on_ranks(2, stage=STAGES)
def test_training_goes_on_while_torch_saves(rank, stage, tmp_path):
    """An asynchronous save needs a process group of its own."""
    group = dist.new_group(backend="gloo")
    model, optimizer = make_run(rank, stage, steps=2)
    before = content(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    saving = dcp.async_save(state, checkpoint_id=tmp_path / stage, process_group=group)
    train(rank, model, optimizer, (2, 3))
    saving.result()
    new_run = make_run(rank, stage, seed=1)
    load_by_torch(tmp_path / stage, *new_run)
    assert equal(content(*new_run), before)


# ------------------------------------------------------------------------------------------------ nothing is read wrong


def weight_after_two_steps(rank, stage, is_read):
    """Return the weight of a layer. is_read: whether get_state_dict() is called before the first step."""
    model = nn.Linear(5, 2, bias=False)
    nn.init.ones_(model.weight)
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
    optimizer = optimizer_of(stage)(model.parameters(), torch.optim.SGD, **options)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append("step"))
    if is_read:
        _, optimizer_state = get_state_dict(model, optimizer)
        assert list(optimizer_state["state"]["weight"]) == ["momentum_buffer"] and not steps
        assert bool(optimizer.state) and not optimizer.optimizer.state
    for number in range(2):
        model(torch.full((1, 5), 1.0 + number + rank.number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight


@on_ranks(2, 3, stage=STAGES)
def test_a_fresh_optimizer_is_read_without_a_change(rank, stage):
    """torch would call `step` if a state were empty. On three ranks, one rank owns nothing of the single parameter."""
    weight = weight_after_two_steps(rank, stage, is_read=True)
    assert equal(weight, weight_after_two_steps(rank, stage, is_read=False))


@on_ranks(2, stage=STAGES)
def test_what_models_have_beside_trained_matrices(rank, stage, tmp_path):
    """Save and load a frozen layer, tied and empty parameters, an empty group, and a lr that two groups share."""
    def make(seed):
        model = Net(seed=seed)
        model.nothing = nn.Parameter(torch.empty(0, 3))
        lr = torch.tensor(0.5 + seed)
        params = [param for param in model.parameters() if param is not model.nothing]
        groups = [{"params": [model.nothing, *params[:4]], "lr": lr}, {"params": params[4:], "lr": lr}, {"params": []}]
        unused = {"find_unused_parameters": True} if stage == STAGE_4 else {}
        return model, make_optimizer(stage, groups, lr=0.1, **unused)

    model, optimizer = make(seed=0)
    train(rank, model, optimizer, range(2))
    save_by_torch(tmp_path / stage, model, optimizer)
    new_model, new_optimizer = make(seed=1)
    lr = new_optimizer.param_groups[0]["lr"]
    load_by_torch(tmp_path / stage, new_model, new_optimizer)
    assert equal(content(model, optimizer), content(new_model, new_optimizer)) and lr == 0.5
    assert all(group["lr"] is lr for group in new_optimizer.param_groups[:2])
    assert "frozen.weight" not in get_state_dict(model, optimizer)[1]["state"]


@on_ranks(2, stage=STAGES)
def test_a_file_of_one_rank_is_for_that_rank_and_a_whole_state_for_all(rank, stage):
    """accelerate and Lightning call torch.save with a rank's state_dict, and read it with weights_only."""
    dtype = BF16 if stage in SHARDED else F32
    model, optimizer = make_run(rank, stage, dtype=dtype, steps=2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    of_rank = torch.load(file, weights_only=True)
    of_all_ranks = full_state(optimizer)
    of_version_0_3 = {**of_rank, "world_size": 2}
    assert "made by version 0.3 or before" in error_of(lambda: optimizer.load_state_dict(of_version_0_3), ValueError)
    for state_dict in (of_rank, of_all_ranks):
        new_model, new_optimizer = make_run(rank, stage, dtype=dtype, seed=1)
        new_model.load_state_dict(model.state_dict())
        new_optimizer.load_state_dict(state_dict)
        assert equal(full_state(new_optimizer)["state"], of_all_ranks["state"])


@on_ranks(2, stage=SHARDED)
def test_torchs_full_state_is_refused(rank, stage):
    """torch gathers DTensors alone, and would send what rank 0 has for the whole."""
    model, optimizer = make_run(rank, stage, steps=2)
    _, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    line = error_of(lambda: set_optimizer_state_dict(model, optimizer, optimizer_state, options=options), ValueError)
    assert "checkpoint.full_state_dict(optimizer)" in line


class KeepsLists(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param]["past"] = [torch.ones_like(param)]


@on_ranks(2, stage=SHARDED)
def test_what_cannot_be_cut_is_refused(rank, stage):
    _, optimizer = make_run(rank, stage, cls=KeepsLists, lr=0.1, steps=1)
    line = error_of(optimizer.state_dict, ValueError)
    assert "has past, neither a scalar nor a tensor of the parameter's shape: stages 1 and 2 can save it" in line


# ----------------------------------------------------------------------------------------------------------- the tensor


def test_a_range_of_a_tensor_is_a_few_boxes():
    """A range consists of at most 2n - 1 boxes in n dimensions, in the order of the elements."""
    for shape in ((), (7,), (3, 4), (3, 1, 2, 2)):
        values = torch.arange(torch.Size(shape).numel()).view(shape)
        for start, stop in itertools.combinations(range(values.numel() + 1), 2):
            boxes = boxes_of(shape, start, stop)
            elements = []
            for offsets, sizes in boxes:
                part = values[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))]
                elements += part.flatten().tolist()
            assert elements == list(range(start, stop)) and len(boxes) <= max(1, 2 * len(shape) - 1)
    assert boxes_of((3, 4), 2, 2) == []


def test_a_flat_shard_is_copied_and_converted_and_nothing_else():
    shard = FlatShard((3, 4), 2, 7, torch.arange(5.0))
    for other in (shard.clone(), copy.deepcopy(shard), shard.to(torch.float64), shard.detach()):
        assert other.place == shard.place and other.local.tolist() == [0, 1, 2, 3, 4]
    target = FlatShard((3, 4), 2, 7, torch.zeros(5))
    target.copy_(shard)
    assert target.local.tolist() == [0, 1, 2, 3, 4]
    elsewhere = FlatShard((3, 4), 1, 6, torch.zeros(5))
    assert "full_tensor() has the whole" in error_of(lambda: elsewhere.copy_(shard))
    assert "was read from a file" in error_of(shard.full_tensor)
