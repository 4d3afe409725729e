"""The rules that make the repository readable: what a stage may import, and what stages must have in common."""

import ast
import difflib
import shutil
import subprocess
import sys

import pytest

from tests.common import STAGES
from tests.ranks import ROOT, run_alone

PROGRAMS = ("train.py", "show.py")  # to be run, not to be imported
CHECKPOINT = sorted((ROOT / "checkpoint").glob("*.py"))
LIBRARY = sorted(path for stage in STAGES for path in (ROOT / stage).glob("*.py") if path.name not in PROGRAMS)


def imported(path):
    """Modules that a file imports; siblings begin with a dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "harness" else [module]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_stage_imports_torch_the_standard_library_and_its_siblings(path):
    for module in imported(path):
        top = module.split(".")[0]
        sibling = module.startswith(".") and not module.startswith("..") and (path.parent / f"{module[1:]}.py").exists()
        assert top == "torch" or top in sys.stdlib_module_names or sibling, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_stage_calls_collectives_through_the_module(path):
    assert not any(
        isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed")
        for node in ast.walk(ast.parse(path.read_text()))
    )


@pytest.mark.parametrize("stage", STAGES)
def test_train_imports_its_stage_and_the_workload(stage):
    allowed = {"torch", "harness.workload", f"{stage}.optimizer"}
    modules = set(imported(ROOT / stage / "train.py"))
    assert {"harness.workload", f"{stage}.optimizer"} <= modules
    others = {m for m in modules if m.split(".")[0] not in sys.stdlib_module_names and not m.startswith("torch.")}
    assert others <= allowed


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_can_be_taken_home(stage, tmp_path):
    """Copied elsewhere, under another name, it works alone."""
    shutil.copytree(ROOT / stage, tmp_path / "mine", ignore=shutil.ignore_patterns(*PROGRAMS, "__pycache__"))
    (tmp_path / "program.py").write_text("""
import torch, torch.distributed as dist
from mine import DistributedOptimizer
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(3))
optimizer = DistributedOptimizer([weight], torch.optim.SGD, lr=0.5)
weight.sum().backward()
optimizer.step()
print(weight.tolist())
dist.destroy_process_group()
""")
    run = run_alone(tmp_path / "program.py", cwd=tmp_path)
    assert run.code == 0, run.stderr
    assert run.stdout.strip() == "[0.5, 0.5, 0.5]"


def tops_of(path):
    return {module.split(".")[0] for module in imported(path)}


@pytest.mark.parametrize("path", CHECKPOINT, ids=lambda path: path.name)
def test_checkpoint_imports_torch_the_standard_library_and_its_siblings(path):
    for module in imported(path):
        sibling = module.startswith(".") and (path.parent / f"{module[1:]}.py").exists()
        assert module.split(".")[0] in {"torch", *sys.stdlib_module_names} or sibling, f"{path.name} imports {module}"


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_imports_checkpoint(stage):
    files = [path for path in (ROOT / stage).rglob("*.py")]
    assert files and not [path for path in files if "checkpoint" in tops_of(path)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_taken_home_with_checkpoint_beside_it_saves_and_loads(stage, tmp_path):
    for package, name in ((stage, "mine"), ("checkpoint", "checkpoint")):
        shutil.copytree(ROOT / package, tmp_path / name, ignore=shutil.ignore_patterns(*PROGRAMS, "__pycache__"))
    (tmp_path / "program.py").write_text("""
import torch, torch.distributed as dist
import checkpoint
from mine import DistributedOptimizer
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
""")
    run = run_alone(tmp_path / "program.py", cwd=tmp_path)
    assert run.code == 0, run.stderr
    assert run.stdout.splitlines() == ["{'step': 1}", f"[-0.25, -0.25, -0.25] {tmp_path}/checkpoint/__init__.py"]


def test_show_imports_torch_rich_the_standard_library_and_its_siblings():
    tops = {module.split(".")[0] for module in imported(ROOT / STAGES[2] / "show.py")}
    assert tops - sys.stdlib_module_names - {"torch", "rich", "", STAGES[2]} == set()


def definitions(path):
    """Source of each function, method and class without methods of a file, by name."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        has_methods = any(isinstance(child, ast.FunctionDef) for child in ast.walk(node))
        if isinstance(node, ast.FunctionDef) or isinstance(node, ast.ClassDef) and not has_methods:
            yield node.name, ast.get_source_segment(source, node)


# What differs from the stage before is its idea. Everything else that has the same name must be the same to the letter.
IDEAS = {
    (1, 2): {"step"},
    (2, 3): {"__init__", "add_param_group", "step", "finish_grad_sync", "zero_grad", "clip_grad_norm_"},
    (3, 4): {"__init__", "add_param_group", "step", "finish_grad_sync", "zero_grad", "no_sync"}
    | {"has_grads", "move_to", "sharded_params"}
    | {"_shard", "_total_norm"},
}


@pytest.mark.parametrize("before, after", IDEAS)
def test_code_that_two_stages_share_is_equal_to_the_letter(before, after):
    old = dict(definitions(ROOT / STAGES[before - 1] / "optimizer.py"))
    new = dict(definitions(ROOT / STAGES[after - 1] / "optimizer.py"))
    differing = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    assert differing == IDEAS[before, after]


@pytest.mark.parametrize("name", ["checks.py", "inner.py", "__init__.py"])
def test_files_that_all_stages_share_are_equal(name):
    assert len({(ROOT / stage / name).read_text() for stage in STAGES}) == 1


def test_files_that_stages_3_and_4_share_are_equal():
    assert (ROOT / STAGES[2] / "pieces.py").read_text() == (ROOT / STAGES[3] / "pieces.py").read_text()


def test_shared_functions_of_the_buffers_are_equal():
    three, four = (dict(definitions(ROOT / stage / "buffer.py")) for stage in STAGES[2:])
    for name in ("Range", "padded_numel", "param_starts", "ranges_in_shard", "views_of", "cut_ranges"):
        assert three[name] == four[name]


@pytest.mark.parametrize("stage", STAGES[1:])
def test_train_differs_in_the_import_and_the_prefetch_only(stage):
    first, other = ((ROOT / s / "train.py").read_text().splitlines() for s in (STAGES[0], stage))
    changed = [line for line in difflib.ndiff(first, other) if line[0] in "+-"]
    assert changed.pop(0) == f"- from {STAGES[0]}.optimizer import DistributedOptimizer"
    assert changed.pop(0) == f"+ from {stage}.optimizer import DistributedOptimizer"
    prefetch = ["+     optimizer.prefetch_params(model)  "] if stage == STAGES[3] else []
    assert [line.split("#")[0] for line in changed] == prefetch


def test_clean_removes_nothing_else(tmp_path):
    """`runs 2/__pycache__` is one path, and not `runs` and another one."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("runs", "runs 2/__pycache__", ".venv/lib"):
        (tmp_path / folder).mkdir(parents=True)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile", "runs", "runs 2"]
    assert not (tmp_path / "runs 2" / "__pycache__").exists()


@pytest.mark.parametrize("path", [ROOT / "bench.py", *sorted((ROOT / "harness").glob("*.py")), *CHECKPOINT, *LIBRARY],
                         ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_check_is_left_out_by_python_o(path):
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))
