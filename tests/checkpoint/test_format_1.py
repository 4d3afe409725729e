"""Checkpoints of the format before this one are loaded. Stage 3 saved these on 2 ranks, when it was in use."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint import full_state_dict
from checkpoint.convert import converted
from checkpoint.rank_files import checksum
from tests.checkpoint.test_checkpoint import SHARDED, Exploit, flip_a_bit_of
from tests.checkpoint.test_states import Stack
from tests.common import STAGES, optimizer_of

FORMAT_1 = Path(__file__).parent / "format_1"


def pattern(shape, scale):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) * scale


def load_format_1(rank, stage, path, optimizer_cls):
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(rank.device, torch.bfloat16)
    optimizer = optimizer_of(stage)(model.parameters(), optimizer_cls)
    extra = checkpoint.load(path, model, optimizer)
    assert extra["average"].equal(torch.arange(20.0)) and extra["rank"] == (rank.rank if rank.world_size == 2 else 0)
    found = full_state_dict(optimizer, to_all=True)
    assert found["param_groups"][0]["lr"] == 0.25
    for index, param in enumerate(model.parameters()):
        state, shape = found["state"][index], param.shape
        expected = {"last": pattern((2, *shape), 0.5)} if optimizer_cls is Stack else {
            "step": torch.tensor(7.0), "exp_avg": pattern(shape, 0.5), "exp_avg_sq": pattern(shape, 0.25)}
        if stage in SHARDED:
            expected["main_param"] = pattern(shape, 1.001)
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[key], value) for key, value in expected.items())
        assert torch.equal(param.cpu(), pattern(shape, 1.001).bfloat16())


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("world_size", [3])
def test_the_format_before_this_one_is_loaded(run, stage):
    for name in ["adamw", "stack"]:
        print(name)  # pytest shows what was the last
        run(load_format_1, stage, FORMAT_1 / name, Stack if name == "stack" else torch.optim.AdamW)


@pytest.mark.parametrize("world_size", [2])
def test_code_in_the_metadata_of_the_format_before_does_not_run(run, world_size, tmp_path, capfd):
    """It is loaded as if nothing were: what torch's tools needed is never read. With its checksum made right."""
    path = shutil.copytree(FORMAT_1 / "adamw", tmp_path / "one")
    (path / ".metadata").write_bytes(pickle.dumps(Exploit()))
    manifest = json.loads((path / "manifest.json").read_text())
    with open(path / ".metadata", "rb") as file:
        manifest["files"][".metadata"] = checksum(file)
    (path / "manifest.json").write_text(json.dumps(manifest))
    run(load_format_1, SHARDED[1], path, torch.optim.AdamW)
    assert "code from a file has run" not in capfd.readouterr().out


def test_damage_of_the_format_before_is_found(tmp_path):
    path = shutil.copytree(FORMAT_1 / "adamw", tmp_path / "one")
    flip_a_bit_of(path / "__1_0.distcp")
    with pytest.raises(checkpoint.DamagedCheckpoint, match="__1_0.distcp is damaged"):
        converted(path)
    manifest = json.loads((FORMAT_1 / "adamw" / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(checkpoint.DamagedCheckpoint, match="it has no checksum of itself"):
        converted(path)
