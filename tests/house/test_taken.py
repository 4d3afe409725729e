"""What users take home: the names that they see, a stage copied alone, a package that `make take` wrote."""

import re
import shutil
import subprocess
import sys

import pytest
import torch

from harness.publishing.stages import VERSION, take
from tests.common import STAGES, one_rank_of, optimizer_of
from tests.ranks import ROOT, run_alone, run_module, run_ranks
from tests.stages.test_cores import core_of

OF_USERS = {"finish_grad_sync", "clip_grad_norm_", "scale_grads_", "no_sync", "set_requires_gradient_sync",
            "average_over"}
OF_CHECKPOINT = {"pieces", "make_optimizer", "refuse_different_settings", "has_grads"}
OF_BUFFERS = {"move_to", "rank", "world_size"}
OF_STAGE = [{"average_gradients"}, {"average_gradients"}, OF_BUFFERS,
            {*OF_BUFFERS, "find_unused_parameters", "bucket_buffer_bytes"}]


@pytest.mark.parametrize("stage, of_stage", list(zip(STAGES, OF_STAGE)))
def test_a_guard_adds_the_names_that_are_documented_and_no_others(stage, of_stage):
    """Compare the names of both classes. checkpoint/__init__.py documents those in OF_CHECKPOINT."""
    with one_rank_of(2):
        guarded, core = (set(dir(of(stage)([torch.nn.Parameter(torch.zeros(8))]))) for of in (optimizer_of, core_of))
    added = {name for name in guarded - core if not name.startswith("_")}
    assert added == OF_USERS | OF_CHECKPOINT | of_stage
    of_torch = {name for name in dir(torch.optim.AdamW([torch.zeros(1)])) if not name.startswith("_")}
    assert of_torch <= guarded
    interface = (ROOT / "checkpoint" / "__init__.py").read_text()
    assert all(f"optimizer.{name}" in interface for name in OF_CHECKPOINT)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_copied_alone_gives_its_core(stage, tmp_path):
    """The import of DistributedOptimizer says in a line what it needs."""
    shutil.copytree(ROOT / stage, tmp_path / "mine", ignore=shutil.ignore_patterns("train.py", "__pycache__"))
    (tmp_path / "program.py").write_text(
        "from mine import ShardedOptimizer\nprint(ShardedOptimizer.step)\nfrom mine import DistributedOptimizer\n")
    run = run_alone(tmp_path / "program.py", cwd=tmp_path)
    assert run.stdout.startswith("<function ShardedOptimizer.step at")
    line = "ImportError: DistributedOptimizer needs guard/ beside mine/, see make take"
    assert run.stderr.splitlines()[-1] == line


SAVES = """
import torch, torch.distributed as dist
from mine import DistributedOptimizer, __version__, checkpoint
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for step, value in enumerate((1.0, 7.0), start=1):
    model = torch.nn.ParameterList([torch.full((3,), value)])
    optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=0.5, momentum=0.5)
    if newest := checkpoint.latest("runs"):
        print(checkpoint.load(newest, model, optimizer))
    model[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(f"runs/step-{step}", model, optimizer, {"step": step})
print(model[0].tolist(), checkpoint.__file__)
print(DistributedOptimizer.__module__, __version__)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_was_taken_trains_saves_and_loads(stage, tmp_path):
    """Run a program in a folder that has only the package. Other tests check what these files compute."""
    take(stage.removeprefix("stage")[0], tmp_path / "mine", with_checkpoint=True)
    (tmp_path / "program.py").write_text(SAVES)
    run = run_alone(tmp_path / "program.py", cwd=tmp_path)
    assert run.code == 0, run.stderr
    assert run.stdout.splitlines() == [
        "{'step': 1}", f"[-0.25, -0.25, -0.25] {tmp_path}/mine/checkpoint/__init__.py", f"mine.distributed {VERSION}"]


@pytest.mark.waits
@pytest.mark.parametrize("stage", STAGES)
def test_the_page_of_a_package_has_a_program_that_runs_as_it_stands(stage, tmp_path):
    """It must prefetch where the stage can, and nowhere else."""
    take(stage.removeprefix("stage")[0], tmp_path / "mine")
    (program,) = re.findall(r"^```python\n(.*?)^```$", (tmp_path / "mine" / "README.md").read_text(), re.M | re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    assert [ended.stderr for ended in run_ranks(2, tmp_path / "program.py", cwd=tmp_path) if ended.code] == []
    assert (tmp_path / "saved" / ".metadata").exists() and ("prefetch_params" in program) == (stage == STAGES[3])


def pip_install(what, to):
    """Return (exit code, stderr) of pip, which installs no other package."""
    run = subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", to, what], text=True,
                         cwd=to.parent, capture_output=True)
    return run.returncode, run.stderr


@pytest.mark.waits
def test_pip_installs_a_package_that_was_taken_which_tests_itself_on_two_ranks(tmp_path):
    take("4", tmp_path / "mine", with_checkpoint=True)
    code, error = pip_install("./mine", tmp_path / "site")
    assert code == 0, error
    shutil.rmtree(tmp_path / "mine")
    assert (tmp_path / "site" / "mine" / "py.typed").exists() and (tmp_path / "site" / "mine" / "checkpoint").is_dir()
    run = subprocess.run([sys.executable, "-m", "mine.smoke_test"], cwd=tmp_path / "site", text=True,
                         capture_output=True)
    assert (run.returncode, run.stdout) == (0, "2 ranks have trained as one process does\n"), run.stderr


@pytest.mark.waits
def test_pip_installs_extras_of_the_repository_and_refuses_the_repository_itself(tmp_path):
    """Of a copy: pip leaves a folder beside what it builds."""
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, repository)
    code, error = pip_install("./repository", tmp_path / "site")
    assert code == 1 and "`make take STAGE=4 TO=path` writes one, for pip install ./path\n" in error
    assert pip_install("./repository[check]", tmp_path / "site")[0] == 0


@pytest.mark.waits
def test_the_contract_and_no_other_test_is_run_on_a_package_that_was_taken(tmp_path):
    """Run `pytest --stage mine -k by_hand`, although other files have such tests, too."""
    take("4", tmp_path / "mine")
    run = run_module("pytest", "-q", "-rp", "-p", "no:cacheprovider", "--ranks", "2", "--stage=mine", "-k", "by_hand",
                     PYTHONPATH=tmp_path)
    passed = re.findall(r"^PASSED (\S+)::\S+\[mine-2\]$", run.stdout, re.MULTILINE)
    assert run.code == 0 and set(passed) == {"tests/stages/test_contract.py"}, run.stdout[-3000:]
    assert f"{len(passed)} passed" in run.stdout


@pytest.mark.parametrize("stage, to, line", [
    ("7", "mine", f"STAGE=7: there are stages 1 to {len(STAGES)}"),
    ("4", "no-name", "TO=no-name: its last part must be a name that Python can import"),
    ("4", "guard", "TO=guard is there already: remove it first, or take another name")])
def test_what_cant_be_taken_is_refused_in_a_line(stage, to, line):
    run = run_module("harness.publishing.stages", stage, to)
    assert (run.code, run.stderr) == (2, f"take: {line}\n")
