"""torch's own lines: get_state_dict, dcp.save, dcp.load, set_state_dict. From any stage on any ranks to any other."""

import copy
import io
import itertools
import re
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import checkpoint
from guard.chained import Chained
from guard.flat_shard import FlatShard, boxes_of
from harness.training.models import GPT, GPTConfig
from tests.checkpoint import SHARDED, a_run, train, wrapped
from tests.checkpoint.compare import equal, full, weights
from tests.common import STAGES, Net, error_of, on_ranks, optimizer_of, situation
from tests.ranks import ROOT, run_alone
from tests.stages.test_dtensor import Block, tensor_parallel
from variants.muon_rows import MUON, split

F, B, H = torch.float32, torch.bfloat16, torch.float16
STAGE_1, STAGE_2, STAGE_3, STAGE_4 = STAGES
ALL = [0, 1, 2, 3]

# kind -> (stage or variant, its ranks of four). What one kind has saved, each other kind of the same list loads.
IN_32_BITS = {
    "plain torch": (None, ALL), "stage 1": (STAGE_1, [0, 1]), "stage 2": (STAGE_2, [1, 2, 3]),
    "stage 3": (STAGE_3, ALL), "stage 4": (STAGE_4, [1, 3]), "stage 4, alone": (STAGE_4, [2]),
    "hybrid": ("variants.hybrid", ALL), "muon": ("variants.muon", [0, 2, 3]),
    "offload": ("variants.offload", [0, 1, 2]), "moments16": ("variants.moments16", ALL),
}
IN_16_BITS = {"stage 3": (STAGE_3, [0, 1]), "stage 4": (STAGE_4, [0, 1, 2]), "stage 3, alone": (STAGE_3, [3]),
              "offload": ("variants.offload", [2, 3]), "remainder16": ("variants.remainder16", ALL)}
FSDP2 = {"FSDP2": ("FSDP2", [0, 1, 2]), "FSDP2's net": (None, ALL), "stage 1 of it": (STAGE_1, [0, 1]),
         "stage 3 of it": (STAGE_3, ALL), "stage 4 of it": (STAGE_4, [1, 3])}
CHAINED = {"muon, stage 3": (STAGE_3, [0, 1, 2]), "muon, stage 4": (STAGE_4, [0, 1]), "muon, alone": (STAGE_4, [3])}
MESHES = {"2 x 2": (STAGE_4, ALL), "4 x 1": (STAGE_4, ALL), "1 x 4": (STAGE_4, ALL)}
IN_PLAIN_TORCH_TOO = {**MESHES, "no mesh": (None, ALL)}


def built(rank, name, stage, dtype, seed, group):
    """Return a model, and its optimizer on the ranks of `group`."""
    torch.manual_seed(seed)
    if name in IN_PLAIN_TORCH_TOO:  # 11 isn't divided by any number of ranks
        shape = tuple(map(int, re.findall(r"\d", name)))
        model, group = tensor_parallel(rank, shape, width=11) if stage else (Block(width=11), None)
        for param in model.to(dtype).parameters():  # of each seed others
            param.data += 0.01 * seed
        return model, wrapped(stage, model.parameters(), process_group=group, lr=0.01)
    if name in CHAINED:
        model = GPT(GPTConfig(n_layers=1, n_heads=2, width=16, block_size=8, lr=1e-3))
        matrices, rest = split(model)
        of_matrices = optimizer_of("variants.muon")(matrices, torch.optim.Muon, process_group=group, **MUON)
        return model, Chained(of_matrices, optimizer_of(stage)(rest, torch.optim.AdamW, process_group=group))
    if name in FSDP2:
        model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
    else:
        model = Net(seed=seed, frozen_seed=seed).to(dtype)
    if stage == "FSDP2":
        fully_shard(model, mesh=dist.DeviceMesh.from_group(group, "cpu"))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    if stage == "variants.hybrid":
        mesh = init_device_mesh("cpu", (2, 2))
        return model, optimizer_of(stage)(model.parameters(), torch.optim.AdamW, mesh=mesh, bucket_cap_mb=0.0003)
    return model, wrapped(stage, model.parameters(), process_group=group, lr=0.01)


def loss_of_batch(model, number):
    if isinstance(model, GPT):
        text = (torch.arange(9) + number) % 23
        return model(text[None, :-1], text[None, 1:])
    shape = (2, 4, 6) if isinstance(model, Block) else (4, 7)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def steps_of(model, optimizer, numbers, scaler=None):
    for number in numbers:
        loss = loss_of_batch(model, number)
        if scaler:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone().float()


def content(model, optimizer):
    """Return name -> whole tensor of the model and its optimizer's state, in fp32. Collective."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    found = {name: whole(value) for name, value in of_model.items()}
    for name, entries in of_optimizer["state"].items():
        for key in sorted(entries):
            if key != "step":  # on a rank that has nothing of the parameter it has no value
                found[f"{name}: {key}"] = whole(entries[key])
    return found


def saved(path, model, optimizer, group, options=None):
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path, process_group=group)


def loaded(path, model, optimizer, group, options=None):
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)
    return model, optimizer


def from_each_to(targets, rank, kinds, dtype, path, options=None):
    """Save each kind, and load it into `targets(kinds)`: what is there is what was saved, to the bit; and it trains."""
    groups = {name: dist.new_group(ranks) for name, (_, ranks) in kinds.items()}
    before = {}
    for name, (stage, ranks) in kinds.items():
        if rank.number in ranks:
            run = built(rank, name, stage, dtype, 0, groups[name])
            steps_of(*run, range(2))
            saved(path / name, *run, groups[name], options)
            before[name] = content(*run)
        everyone = [None] * 4
        dist.all_gather_object(everyone, before.get(name))
        before[name] = everyone[ranks[0]]
    for source, target in targets(list(kinds)):
        stage, ranks = kinds[target]
        if rank.number in ranks:
            with situation(f"{source} -> {target}"):
                fresh = built(rank, target, stage, dtype, 1, groups[target])
                run = loaded(path / source, *fresh, groups[target], options)
                found = content(*run)
                same = [name for name in found if "moments16" not in (source, target) or "exp" not in name]
                assert found.keys() == before[source].keys() and same
                for name in same:
                    assert equal(found[name], before[source][name]), name
                steps_of(*run, (2,))
        dist.barrier()


def next_one(names):
    """Each loads what the one before it has saved, and its own."""
    return [*zip(names, names[1:] + names[:1]), *zip(names, names)]


def each_one(names):
    return list(itertools.product(names, names))


CASES = [(IN_32_BITS, F), (FSDP2, F), (IN_16_BITS, B), (IN_16_BITS, H), (CHAINED, F), (IN_PLAIN_TORCH_TOO, F),
         (MESHES, B)]


@on_ranks(4, case=CASES)
def test_torchs_own_lines_save_and_load_in_every_stage_and_variant(rank, case, tmp_path):
    kinds, dtype = case
    from_each_to(next_one, rank, kinds, dtype, tmp_path / f"{dtype}{len(kinds)}{[*kinds][0]}")


@pytest.mark.waits
@on_ranks(4, case=CASES)
def test_from_any_to_any(rank, case, tmp_path):
    kinds, dtype = case
    from_each_to(each_one, rank, kinds, dtype, tmp_path / f"{dtype}{len(kinds)}{[*kinds][0]}")


@on_ranks(4, dtype=[F, B])
def test_torchs_flattened_form_and_its_offload(rank, dtype, tmp_path):
    """torchtitan's form has names and hyperparameters for each parameter, and no groups."""
    kinds = {name: (IN_32_BITS if dtype == F else IN_16_BITS)[name] for name in ("stage 3", "stage 4")}
    for number, options in enumerate([{"flatten_optimizer_state_dict": True}, {"cpu_offload": True}]):
        path = tmp_path / f"{dtype}{number}"
        from_each_to(each_one, rank, kinds, dtype, path, StateDictOptions(**options))


@on_ranks(4, stage=[STAGE_3, STAGE_4])
def test_fp16_under_gradscaler_goes_on_after_a_save(rank, stage, tmp_path):
    """On the same ranks to the bit, on fewer up to the rounding of averages. The first steps are inf, and left out."""
    def fresh(seed, group):
        model = Net(seed=seed, frozen_seed=seed).to(H)
        optimizer = wrapped(stage, model.parameters(), process_group=group, lr=0.01)
        return model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**20)

    model, optimizer, scaler = fresh(0, None)
    steps_of(model, optimizer, range(6), scaler)
    assert scaler.get_scale() < 2**20 and 0 < full(optimizer)["state"][0]["step"] < 6
    checkpoint.save(tmp_path / stage, model, optimizer, scaler.state_dict())
    steps_of(model, optimizer, range(6, 10), scaler)
    expected = full(optimizer)
    for n_ranks in (4, 3, 2, 1):
        group = dist.new_group([*range(n_ranks)])
        if rank.number < n_ranks:
            its_model, its_optimizer, its_scaler = fresh(1, group)
            its_scaler.load_state_dict(checkpoint.load(tmp_path / stage, its_model, its_optimizer))
            steps_of(its_model, its_optimizer, range(6, 10), its_scaler)
            assert its_scaler.get_scale() == scaler.get_scale()
            for index, entries in full(its_optimizer)["state"].items():
                atol = 0 if n_ranks == 4 else 3e-4  # lr is 0.01
                assert entries["step"] == expected["state"][index]["step"]
                assert torch.allclose(entries["main_param"], expected["state"][index]["main_param"], rtol=0, atol=atol)
        dist.barrier()


@on_ranks(2, stage=STAGES)
def test_training_goes_on_while_torch_saves(rank, stage, tmp_path):
    """In a process group of its own, as an asynchronous save needs."""
    group = dist.new_group(backend="gloo")
    model, optimizer = a_run(rank, stage, steps=2)
    before = content(model, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    saving = dcp.async_save(state, checkpoint_id=tmp_path / stage, process_group=group)
    train(rank, model, optimizer, (2, 3))
    saving.result()
    assert equal(content(*loaded(tmp_path / stage, *a_run(rank, stage, seed=1), None)), before)


# ------------------------------------------------------------------------------------------------ nothing is read wrong


@on_ranks(2, 3, stage=STAGES)
def test_a_fresh_optimizer_is_read_without_a_change(rank, stage):
    """torch would call `step` where a state is empty. On three ranks one owns nothing of the single parameter."""
    runs = []
    for reads in (False, True):
        model = nn.Linear(5, 2, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = optimizer_of(stage)(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5,
                                        weight_decay=0.1)
        calls = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        if reads:
            of_optimizer = get_state_dict(model, optimizer)[1]
            assert list(of_optimizer["state"]["weight"]) == ["momentum_buffer"] and not calls
            assert bool(optimizer.state) and not optimizer.optimizer.state
        for number in range(2):
            model(torch.full((1, 5), 1.0 + number + rank.number)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(model.weight)
    assert equal(*runs)


@on_ranks(2, stage=STAGES)
def test_what_models_have_beside_trained_matrices(rank, stage, tmp_path):
    """A frozen layer, tied and empty parameters, an empty group, a lr that two groups share, a compiled layer."""
    def build(seed):
        model = Net(seed=seed)
        model.nothing = nn.Parameter(torch.empty(0, 3))
        model.up = torch.compile(model.up, backend="eager")
        lr = torch.tensor(0.5 + seed)
        named = [param for name, param in model.named_parameters() if name != "nothing"]
        groups = [{"params": [model.nothing, *named[:4]], "lr": lr}, {"params": named[4:], "lr": lr}, {"params": []}]
        unused = {"find_unused_parameters": True} if stage == STAGES[3] else {}
        return model, wrapped(stage, groups, lr=0.1, **unused), lr

    (model, optimizer, _), (other, again, lr) = build(0), build(1)
    train(rank, model, optimizer, range(2))
    saved(tmp_path / stage, model, optimizer, None)
    loaded(tmp_path / stage, other, again, None)
    assert equal(content(model, optimizer), content(other, again)) and lr == 0.5
    assert all(group["lr"] is lr for group in again.param_groups[:2])
    assert "frozen.weight" not in get_state_dict(model, optimizer)[1]["state"]


@on_ranks(2, stage=STAGES)
def test_a_file_of_one_rank_is_for_that_rank_and_a_whole_state_for_all(rank, stage):
    """What accelerate and Lightning do: torch.save of a rank's state_dict, read with weights_only."""
    dtype = B if stage in SHARDED else F
    model, optimizer = a_run(rank, stage, dtype=dtype, steps=2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    own = torch.load(file, weights_only=True)
    before = full(optimizer)
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, own)
    line = error_of(lambda: optimizer.load_state_dict(of_ranks[0]), ValueError)
    assert "save with torch.distributed.checkpoint, which cuts states for other ranks" in line
    old = {**own, "world_size": 2, "rank": rank.number}
    assert "made by version 0.3 or before" in error_of(lambda: optimizer.load_state_dict(old), ValueError)
    assert equal(full(optimizer), before)
    again = a_run(rank, stage, dtype=dtype, seed=1)
    for state_dict in (own, before):
        again[0].load_state_dict(model.state_dict())
        again[1].load_state_dict(state_dict)
        assert equal(full(again[1])["state"], before["state"])


@on_ranks(2, stage=STAGES)
def test_torchs_full_state_is_refused_and_a_plain_ones_is_cut(rank, stage):
    """torch gathers DTensors alone, and would send what rank 0 has for the whole."""
    model, optimizer = a_run(rank, stage, steps=2)
    of_all = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    others = a_run(rank, stage, seed=1)
    if stage in SHARDED:
        line = error_of(lambda: set_optimizer_state_dict(*others, of_optimizer, options=of_all), ValueError)
        assert "checkpoint.full_state_dict(optimizer)" in line
    plain = full(optimizer)
    names = [name for name, param in model.named_parameters()]
    by_name = {"state": {names[index]: entries for index, entries in plain["state"].items()},
               "param_groups": [{**plain["param_groups"][0], "params": names}]}
    set_model_state_dict(others[0], {} if rank.number else of_model, options=of_all)
    set_optimizer_state_dict(*others, {} if rank.number else by_name, options=of_all)
    assert equal([weights(others[0]), full(others[1])["state"]], [weights(model), plain["state"]])


class KeepsLists(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param]["past"] = [torch.ones_like(param)]


@on_ranks(2, stage=SHARDED)
def test_what_cannot_be_cut_is_refused(rank, stage):
    _, optimizer = a_run(rank, stage, cls=KeepsLists, lr=0.1, steps=1)
    line = error_of(optimizer.state_dict, ValueError)
    assert "has past, neither a scalar nor a tensor of the parameter's shape: stages 1 and 2 can save it" in line
    shard = next(iter(a_run(rank, stage, steps=1)[1].state_dict()["state"].values()))["exp_avg"]
    assert "full_tensor() has the whole" in error_of(lambda: shard + 1)


def test_a_program_needs_no_import_but_its_stage(tmp_path):
    script = """
        import sys, torch, torch.distributed as dist
        sys.path.insert(0, ROOT)
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from stage4_overlap import DistributedOptimizer
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.Linear(3, 3)
        state = get_state_dict(model, DistributedOptimizer(model.parameters()))[1]
        assert state["state"]["weight"]["exp_avg"].full_tensor().shape == (3, 3) and "checkpoint" not in sys.modules
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(script).replace("ROOT", repr(str(ROOT))))
    ended = run_alone(tmp_path / "program.py")
    assert ended.code == 0, ended.stderr


# ----------------------------------------------------------------------------------------------------------- the tensor


def test_a_range_of_a_tensor_is_a_few_boxes():
    """At most 2n - 1 of them, in the order of the elements."""
    for shape in ((), (7,), (3, 4), (2, 3, 4), (3, 1, 2, 2)):
        values = torch.arange(torch.Size(shape).numel()).view(shape)
        for start, stop in itertools.combinations(range(values.numel() + 1), 2):
            boxes = boxes_of(shape, start, stop)
            parts = [values[tuple(slice(a, a + n) for a, n in zip(*box))].reshape(-1) for box in boxes]
            assert torch.cat(parts).tolist() == list(range(start, stop)) and len(boxes) <= max(1, 2 * len(shape) - 1)
    assert boxes_of((3, 4), 2, 2) == []


def test_a_flat_shard_is_copied_and_converted_and_nothing_else():
    shard = FlatShard((3, 4), 2, 7, torch.arange(5.0))
    for other in (shard.clone(), copy.deepcopy(shard), shard.to(torch.float64), shard.detach(), shard.cpu()):
        assert other.place == shard.place and other.local.tolist() == [0, 1, 2, 3, 4]
    target = FlatShard((3, 4), 2, 7, torch.zeros(5))
    target.copy_(shard)
    assert target.local.tolist() == [0, 1, 2, 3, 4]
    for wrong in (FlatShard((3, 4), 1, 6, torch.zeros(5)), FlatShard((4, 3), 2, 7, torch.zeros(5))):
        assert "full_tensor() has the whole" in error_of(lambda: wrong.copy_(shard))
    assert "was read from a file" in error_of(shard.full_tensor)
