"""How core and guard fit together: the order of the classes, the names that users see, a package that is taken."""

import re
import subprocess
import sys

import pytest
import torch

import guard
from harness.report.seams import table
from harness.run.take import VERSION, take
from tests.common import STAGES, one_rank_of, optimizer_of
from tests.ranks import ROOT, run_alone, run_module
from tests.stages.test_cores import core_of


def test_the_table_of_seams_is_that_of_the_code():
    assert re.findall(r"^    (\S+ .+)$", guard.__doc__, re.MULTILINE) == table(optimizer_of(STAGES[3]))


OF_USERS = {"finish_grad_sync", "clip_grad_norm_", "no_sync", "train", "eval"}
OF_CHECKPOINT = {"pieces", "make_optimizer", "pass_on_hyperparameters", "refuse_different_settings", "has_grads"}
MORE = {
    "stage1_naive_broadcast": {"average_gradients"},
    "stage2_allgather": {"average_gradients"},
    "stage3_gradbuffer": {"move_to", "rank", "world_size"},
    "stage4_overlap": {"move_to", "rank", "world_size", "find_unused_parameters", "bucket_buffer_bytes"},
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_guard_adds_the_names_that_are_documented_and_no_others(stage):
    """Beside torch's own and the core's; what is in OF_CHECKPOINT stands in checkpoint/__init__.py."""
    with one_rank_of(2):
        guarded, core = (set(dir(of(stage)([torch.nn.Parameter(torch.zeros(8))]))) for of in (optimizer_of, core_of))
    added = {name for name in guarded - core if not name.startswith("_")}
    assert added == OF_USERS | OF_CHECKPOINT | MORE[stage]
    of_torch = {name for name in dir(torch.optim.AdamW([torch.zeros(1)])) if not name.startswith("_")}
    assert of_torch <= guarded
    face = (ROOT / "checkpoint" / "__init__.py").read_text()
    assert all(f"optimizer.{name}" in face for name in OF_CHECKPOINT)


@pytest.mark.slow
def test_the_contract_holds_of_packages_that_were_taken(tmp_path):
    """Nothing of this repository is beside a package, and the tests are given the folder that all four are in."""
    names = {stage: f"mine_{stage.removeprefix('stage')[0]}" for stage in STAGES}
    for stage, name in names.items():
        take(stage.removeprefix("stage")[0], tmp_path / name)
        (tmp_path / "program.py").write_text(
            f"import {name}\nprint({name}.DistributedOptimizer.__module__, {name}.__version__)\n")
        alone = run_alone(tmp_path / "program.py", cwd=tmp_path)
        assert alone.stdout.split() == [f"{name}.distributed", VERSION], alone.stderr
    run = run_module("pytest", "-q", "-rp", "-p", "no:cacheprovider", "--ranks", "2",
                     *(f"--stage={name}" for name in names.values()), "tests/stages/test_contract.py",
                     limit_s=300, PYTHONPATH=tmp_path)
    assert run.code == 0, run.stdout[-3000:]
    assert {run.stdout.count(f"[{name}-2]") for name in names.values()} == {run.stdout.count("[mine_1-2]")} != {0}


SAVES = """
import torch, torch.distributed as dist
from mine import DistributedOptimizer, checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def a_model(value):
    model = torch.nn.ParameterList([torch.full((3,), value)])
    return model, DistributedOptimizer(model, torch.optim.SGD, lr=0.5, momentum=0.5)
model, optimizer = a_model(1.0)
model[0].sum().backward()
optimizer.step()
optimizer.zero_grad()
checkpoint.save("runs/step-1", model, optimizer, {"step": 1})
model, optimizer = a_model(7.0)
print(checkpoint.load(checkpoint.latest("runs"), model, optimizer))
model[0].sum().backward()
optimizer.step()
print(model[0].tolist(), checkpoint.__file__)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_taken_with_checkpoint_saves_and_loads(stage, tmp_path):
    take(stage.removeprefix("stage")[0], tmp_path / "mine", with_checkpoint=True)
    (tmp_path / "program.py").write_text(SAVES)
    run = run_alone(tmp_path / "program.py", cwd=tmp_path)
    assert run.code == 0, run.stderr
    assert run.stdout.splitlines() == ["{'step': 1}", f"[-0.25, -0.25, -0.25] {tmp_path}/mine/checkpoint/__init__.py"]


@pytest.mark.parametrize("asked, line", [
    (["STAGE=7", "TO=mine"], "take: STAGE=7: there are stages 1, 2, 3, 4"),
    (["STAGE=4", "TO=no-name"], "take: TO=no-name: its last part must be a name that Python can import"),
    (["STAGE=4", "TO=guard"], "take: TO=guard is there already: remove it first, or take another name"),
])
def test_what_cant_be_taken_is_refused_in_a_line(asked, line):
    run = subprocess.run(["make", "take", *asked, f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and line in run.stderr.splitlines()
