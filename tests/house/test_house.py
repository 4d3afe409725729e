"""One page of budgets: how long the parts may be, and what stages must have in common. Imports: `make lint`."""

import ast
import difflib
import inspect
import re
import sys

import pytest

from grade.exercises import functions
from guard.guarded import Guarded
from harness import STAGE_1, STAGE_4
from harness.publishing.stages import CORE, code_lines
from tests.common import STAGES, optimizer_of
from tests.ranks import ROOT

CORES = [[ROOT / stage / name for name in CORE if (ROOT / stage / name).exists()] for stage in STAGES]
GUARDS = [path for folder in ("guard", *STAGES) for path in sorted((ROOT / folder).glob("*.py"))
          if folder == "guard" or path.name not in ("train.py", "__init__.py", *CORE)]
FILES_OF_CORES = [path for core in CORES for path in core]
TAKEN = [*FILES_OF_CORES, *GUARDS, *sorted((ROOT / "checkpoint").glob("*.py"))]


def all_code(paths):
    return [line for path in paths for line in code_lines(path).values()]


# ----------------------------------------------------------------------------------------------------------- lengths


def test_cores_and_guards_can_be_read():
    assert all(len(all_code(core)) <= budget for core, budget in zip(CORES, (60, 70, 150, 270), strict=True))
    for path in FILES_OF_CORES:
        numbers = code_lines(path).keys()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                of_function = numbers & set(range(node.lineno, node.end_lineno + 1))
                assert len(of_function) <= 25, f"{path}: {node.name}"
    assert len(all_code(GUARDS)) <= 2180  # each line states one fact


def test_the_difference_between_two_cores_is_one_idea():
    for before, after, budget in zip(CORES[:-1], CORES[1:], (40, 200, 370), strict=True):
        changed = difflib.ndiff(all_code(before), all_code(after))
        assert sum(line[:2] in ("- ", "+ ") for line in changed) <= budget, after


# What differs from the core before is its idea. Everything else that has the same name must be the same to the letter.
METHODS = ["__init__", "shard", "sync_grads", "step_own", "sync_params", "step"]
IDEAS = [{"sync_params"}, {*METHODS, "copy_all"}, {*METHODS, "zero_grad"}]


def test_cores_have_the_same_methods_in_the_same_order_and_share_the_rest_to_the_letter():
    for path, *_ in CORES:
        (core,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        names = [node.name for node in core.body if isinstance(node, ast.FunctionDef)]
        assert (core.name, names[: len(METHODS)]) == ("ShardedOptimizer", METHODS)
    texts = [{name: text for path in core for name, text in texts_of_functions(path).items()} for core in CORES]
    for old, new, idea in zip(texts[:-1], texts[1:], IDEAS, strict=True):
        changed = {name for name in old.keys() & new.keys() if old[name] != new[name]}
        assert changed == idea


def texts_of_functions(path):
    """Return {"method" of the ShardedOptimizer, "Class.method", or "function": its lines in the file}."""
    lines = path.read_text().splitlines()
    return {name.removeprefix("ShardedOptimizer."):
            lines[min(part.lineno for part in [node, *node.decorator_list]) - 1 : node.end_lineno]
            for name, node in functions(ast.parse(path.read_text())).items()}


def test_train_differs_in_the_import_and_the_prefetch_only():
    first, *others = ((ROOT / stage / "train.py").read_text().splitlines() for stage in STAGES)
    for stage, other in zip(STAGES[1:], others):
        changed = [line.split("#")[0].rstrip() for line in difflib.ndiff(first, other) if line[0] in "+-"]
        prefetch = ["+     optimizer.prefetch_params(model)"] if stage == STAGE_4 else []
        assert changed == [f"- from {STAGE_1} import DistributedOptimizer",
                           f"+ from {stage} import DistributedOptimizer", *prefetch]


# ----------------------------------------------------------------------------------------- what a core and a guard know


def test_a_core_knows_nothing_of_what_its_guard_is_for():
    words = "GradScaler|closure|DTensor|weakref|_version|__class__|compile|thread"
    assert not [path for path in FILES_OF_CORES if re.search(words, path.read_text(), re.IGNORECASE)]


def test_what_is_taken_home_needs_torch_alone_calls_collectives_through_the_module_and_changes_nothing_at_import():
    """The ledger counts what goes through `torch.distributed`, the module. Only a constructor, or a program, may change
    warning filters, hooks and streams. import-linter has the rest.
    """
    ours = {"torch", "guard", *STAGES, *sys.stdlib_module_names}
    for path in TAKEN:
        source, tree = path.read_text(), ast.parse(path.read_text())
        modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
        assert {module.split(".")[0] for module in modules} <= ours, path
        assert path.parent.name == "checkpoint" or "from torch.distributed" not in source, path
        at_import = [ast.unparse(node) for node in tree.body
                     if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom))]
        assert not re.search(r"filterwarnings|excepthook|reconfigure|setattr|signal\(", "\n".join(at_import)), path


def test_what_stages_share_besides_their_cores_is_equal():
    """A concern that several stages have is a file of guard/; what opens a stage is the same in all."""
    assert len({(ROOT / stage / "__init__.py").read_text() for stage in STAGES}) == 1
    names = [path.name for path in GUARDS if path.parent.name != "guard" and path.name != "distributed.py"]
    assert len(names) == len(set(names))


def test_a_guard_names_the_test_that_shows_it():
    for path in GUARDS:
        if path.name not in ("__init__.py", "distributed.py"):
            opening = ast.get_docstring(ast.parse(path.read_text()))
            files = re.findall(r"tests/\w+/test_\w+\.py", opening)
            assert files, path
            tests = "".join((ROOT / file).read_text() for file in files)
            assert all(f"def {name}(" in tests for name in re.findall(r"`(test_\w+)`", opening)), path


def test_what_is_private_in_torch_has_a_test_that_names_it():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page.partition("## Private torch")[2].partition("\n## ")[0])
    assert len(named) >= 8 and all(f"def {name}(" in tests for name in named)


@pytest.mark.parametrize("stage", STAGES)
def test_super_is_the_core_in_every_class_of_a_guard(stage):
    """So each method has one place that says in which order things happen."""
    guards = [cls for cls in optimizer_of(stage).__mro__ if issubclass(cls, Guarded)]
    assert guards[-1] is Guarded
    called = set()
    for n, cls in enumerate(guards):
        names = re.findall(r"super\(\)\.(\w+)", inspect.getsource(cls))
        called.update(names)
        assert not [name for name in names for other in guards[n + 1 :] if name in vars(other)], cls
    assert {"shard", "sync_grads", "step_own", "step"} <= called


def test_there_is_one_version():
    """Compare pyproject.toml, each stage, which goes elsewhere alone, and the top of the changelog."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {sys.modules[stage].__version__ for stage in STAGES if optimizer_of(stage)} == {version}
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


# ------------------------------------------------------------------------------------------ what contributors rely on


def test_ci_runs_targets_of_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for file, called in ((".ci/run", {"lint", "test", "test-all"}),
                         (".github/workflows/ci.yml", {"check", "test", "test-all", "faults"})):
        found = re.findall(r"^\s*(?:- run: )?make ([a-z][a-z-]+)", (ROOT / file).read_text(), re.MULTILINE)
        assert set(found) == called <= set(targets)
