"""The rules that make the repository readable: what a stage may import, and what stages must have in common."""

import ast
import difflib
import graphlib
import re
import shutil
import subprocess
import sys

import pytest

import harness
from harness.report.reading_time import code_lines
from tests.common import STAGES
from tests.ranks import ROOT, run_alone

PROGRAMS = ("train.py",)  # to be run, not to be imported
CORE_FILES = ("optimizer.py", "buffer.py", "transport.py")
CORES = [[ROOT / stage / name for name in CORE_FILES if (ROOT / stage / name).exists()] for stage in STAGES]
GUARD = sorted((ROOT / "guard").glob("*.py"))
OF_STAGES = [path for stage in STAGES for path in sorted((ROOT / stage).glob("*.py"))
             if path.name not in (*PROGRAMS, *CORE_FILES, "__init__.py")]  # guards that only one stage has
GUARDS = [*GUARD, *OF_STAGES]
CHECKPOINT = sorted((ROOT / "checkpoint").glob("*.py"))
LIBRARY = sorted({*sum(CORES, []), *GUARDS, *(ROOT / stage / "__init__.py" for stage in STAGES)})


def name_of(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """Modules that a file imports; siblings begin with a dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            is_room = re.fullmatch(r"harness(\.\w+)?", module) and (ROOT / module.replace(".", "/")).is_dir()
            yield from (f"{module}.{alias.name}" for alias in node.names) if is_room else [module]


# ------------------------------------------------------------------------------------------------- cores and guards


@pytest.mark.parametrize("core, budget", list(zip(CORES, (60, 70, 150, 270))), ids=STAGES)
def test_a_core_fits_on_its_pages(core, budget):
    assert sum(len(code_lines(path)) for path in core) <= budget


@pytest.mark.parametrize("path", sum(CORES, []), ids=name_of)
def test_no_function_of_a_core_is_longer_than_25_lines(path):
    code = code_lines(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert len(code.keys() & range(node.lineno, node.end_lineno + 1)) <= 25, node.name


@pytest.mark.parametrize("path", sum(CORES, []), ids=name_of)
def test_a_core_knows_nothing_of_what_its_guard_is_for(path):
    words = "GradScaler|closure|DTensor|weakref|_version|__class__|compile|lock|thread"
    assert not re.search(words, path.read_text(), re.IGNORECASE)


@pytest.mark.parametrize("before, budget", list(enumerate((40, 200, 370))), ids=["1 to 2", "2 to 3", "3 to 4"])
def test_the_difference_between_two_cores_is_one_idea(before, budget):
    old, new = ([line for path in core for line in code_lines(path).values()] for core in CORES[before : before + 2])
    assert sum(line[:2] in ("- ", "+ ") for line in difflib.ndiff(old, new)) <= budget


@pytest.mark.parametrize("path", sum(CORES, []), ids=name_of)
def test_a_core_imports_torch_and_its_siblings(path):
    for module in imported(path):
        is_core = module in (".buffer", ".transport")
        assert module.split(".")[0] in {"torch", "collections", "enum", "itertools", "typing"} or is_core, module


def is_sibling(path, module):
    name = module.lstrip(".")
    return module.startswith(".") and (path.parents[module.count(".") - 1] / f"{name}.py").exists()


@pytest.mark.parametrize("path", GUARDS, ids=name_of)
def test_a_guard_imports_torch_the_standard_library_and_its_siblings(path):
    """And in a stage's directory those of guard/, which imports no stage."""
    for module in imported(path):
        top = module.split(".")[0]
        of_guard = top == "guard" and path in OF_STAGES and (ROOT / f"{module.replace('.', '/')}.py").exists()
        allowed = top == "torch" or top in sys.stdlib_module_names or is_sibling(path, module) or of_guard
        assert allowed, f"{path.name} imports {module}"


def test_all_guards_together_can_be_read():
    assert sum(len(code_lines(path)) for path in GUARDS) <= 1610


VARIANTS = sorted((ROOT / "variants").glob("[a-z]*.py"))


@pytest.mark.parametrize("path", VARIANTS, ids=name_of)
def test_a_variant_imports_stages_and_guard(path):
    for module in imported(path):
        assert module.split(".")[0] in {"torch", "functools", "guard", *STAGES} or is_sibling(path, module), module


@pytest.mark.parametrize("path", [*LIBRARY, *CHECKPOINT], ids=name_of)
def test_nothing_that_is_taken_home_imports_a_variant(path):
    assert "variants" not in {module.split(".")[0] for module in imported(path)}


def opening(path):
    return ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [path for path in GUARDS if path.name not in ("__init__.py", "distributed.py")],
                         ids=name_of)
def test_a_guard_file_opens_with_whose_situation_it_is_for_and_the_test_that_shows_it(path):
    assert opening(path).startswith("For whoever ")
    named = re.findall(r"tests/\w+/test_\w+\.py|`(test_\w+)`", opening(path))
    files = re.findall(r"tests/\w+/test_\w+\.py", opening(path))
    assert files and all((ROOT / file).exists() for file in files)
    text = "".join((ROOT / file).read_text() for file in files)
    assert all(f"def {test}(" in text for test in named if test), named


def test_what_stages_share_besides_their_cores_is_equal():
    """A concern that several stages have is a file of guard/; what opens a stage is the same in all."""
    assert len({(ROOT / stage / "__init__.py").read_text() for stage in STAGES}) == 1
    names = [path.name for path in OF_STAGES if path.name != "distributed.py"]
    assert len(names) == len(set(names))


def definitions(path):
    """Source of each function, method and class without methods of a file, by name."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        has_methods = any(isinstance(child, ast.FunctionDef) for child in ast.walk(node))
        if isinstance(node, ast.FunctionDef) or isinstance(node, ast.ClassDef) and not has_methods:
            yield node.name, ast.get_source_segment(source, node)


METHODS = ["__init__", "shard", "sync_grads", "step_own", "sync_params", "step"]


@pytest.mark.parametrize("core", CORES, ids=STAGES)
def test_the_methods_of_a_core_come_in_the_same_order(core):
    classes = [node for node in ast.parse(core[0].read_text()).body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes] == ["ShardedOptimizer"]
    assert [node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)][: len(METHODS)] == METHODS


# What differs from the core before is its idea. Everything else that has the same name must be the same to the letter.
IDEAS = {
    (1, 2): {"sync_params"},
    (2, 3): {"__init__", "shard", "sync_grads", "step_own", "sync_params", "step", "copy_all"},
    (3, 4): {"__init__", "shard", "sync_grads", "step_own", "sync_params", "step", "zero_grad"}
    | {"watch"},
}


@pytest.mark.parametrize("before, after", IDEAS)
def test_code_that_two_cores_share_is_equal_to_the_letter(before, after):
    old, new = ({name: code for path in CORES[stage - 1] for name, code in definitions(path)}
                for stage in (before, after))
    differing = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    assert differing == IDEAS[before, after]


def test_make_diff_shows_the_cores_and_nothing_else():
    shown = subprocess.run(["make", "diff", "A=3", "B=4"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.findall(r"^=+ (\S+): stage 3 -> stage 4$", shown, re.MULTILINE) == list(CORE_FILES)


def test_make_diff_goes_method_by_method_and_names_the_unchanged_ones():
    """All lines of the newer core that are not said to be unchanged, and no line of its other methods."""
    shown = subprocess.run(["make", "diff", "A=1", "B=2"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.findall(r"^(?:changed|new|gone): (.*)$", shown, re.MULTILINE) == ["imports and constants", "sync_params"]
    (unchanged,) = re.findall(r"^unchanged: (.*)$", shown, re.MULTILINE)
    assert {"__init__", "shard", "sync_grads", "step_own", "step", "average"} <= set(unchanged.split(", "))
    assert "+        gathered = padded.new_empty" in shown and "def shard" not in shown


# --------------------------------------------------------------------------------------------------------- imports


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_a_stage_calls_collectives_through_the_module(path):
    assert not any(
        isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed")
        for node in ast.walk(ast.parse(path.read_text()))
    )


@pytest.mark.parametrize("stage", STAGES)
def test_train_imports_its_stage_and_the_workload(stage):
    allowed = {"torch", "harness.train", stage}
    modules = set(imported(ROOT / stage / "train.py"))
    assert {"harness.train", stage} <= modules
    others = {m for m in modules if m.split(".")[0] not in sys.stdlib_module_names and not m.startswith("torch.")}
    assert others <= allowed


def harness_imports(folder):
    """-> {module: those of harness that it imports, also inside functions}."""
    return {f"harness.{'.'.join(path.relative_to(folder).with_suffix('').parts)}":
            {".".join(module.split(".")[:3]) for module in imported(path) if module.startswith("harness.")}
            for path in folder.rglob("*.py")}


def test_no_file_of_harness_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter(harness_imports(ROOT / "harness")).prepare()  # CycleError names the circle


def test_a_circle_is_found_inside_a_function_too(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "one.py").write_text("from harness.rows import two")
    (tmp_path / "rows" / "two.py").write_text("def later():\n    from harness.rows.one import something")
    with pytest.raises(graphlib.CycleError, match="harness.rows.one"):
        graphlib.TopologicalSorter(harness_imports(tmp_path)).prepare()


def upward(imports):
    """-> (file, what it imports) where that lies in a room after its own."""
    places = {room: place for place, room in enumerate(harness.ROOMS)}

    def place_of(module):
        return places[module.split(".")[1]]
    return [(module, other) for module, others in imports.items() if module.count(".") > 1
            for other in others if place_of(other) > place_of(module)]


def test_a_room_of_harness_imports_from_those_before_it():
    assert not upward(harness_imports(ROOT / "harness"))
    assert {path.name for path in (ROOT / "harness").iterdir() if (path / "__init__.py").exists()} == set(harness.ROOMS)
    assert [path.name for path in (ROOT / "harness").glob("*.py")] == ["__init__.py"], "a file stands in no room"


def test_an_import_against_the_arrow_is_found(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "one.py").write_text("def later():\n    from harness.measure.examine import something")
    assert upward(harness_imports(tmp_path)) == [("harness.rows.one", "harness.measure.examine")]


@pytest.mark.parametrize("room", harness.ROOMS)
def test_a_room_says_what_is_in_it_and_who_calls_it(room):
    says = " ".join(opening(ROOT / "harness" / room / "__init__.py").split())
    callers = re.findall(r"Called by (.+?)\.$|(?:E|e)very train.py calls", says)
    assert callers and len(says) <= 320


# Code lines of a file with one job, where that takes more than most; the reason stands beside it.
MOST_LINES = {
    "dry_run.py": 190,  # the fakes of a rank, of messages and of a model, which know each other
}


@pytest.mark.parametrize("path", sorted((ROOT / "harness").rglob("*.py")), ids=name_of)
def test_a_file_of_harness_has_one_job(path):
    """So few lines have room for little else. It opens with what that job is."""
    assert opening(path) and len(code_lines(path)) <= MOST_LINES.get(path.name, 150)


ALONE = """
import torch, torch.distributed as dist
from mine import {name}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(3))
optimizer = {name}([weight], torch.optim.SGD, lr=0.5)
weight.sum().backward()
optimizer.step()
print(weight.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["ShardedOptimizer", "DistributedOptimizer"])
def test_a_stage_that_is_copied_alone_gives_its_core(stage, name, tmp_path):
    """And says in a line what the class around it needs."""
    shutil.copytree(ROOT / stage, tmp_path / "mine", ignore=shutil.ignore_patterns(*PROGRAMS, "__pycache__"))
    (tmp_path / "program.py").write_text(ALONE.format(name=name))
    run = run_alone(tmp_path / "program.py", cwd=tmp_path)
    if name == "ShardedOptimizer":
        assert (run.code, run.stdout.strip()) == (0, "[0.5, 0.5, 0.5]"), run.stderr
    else:
        line = run.stderr.splitlines()[-1]
        assert line == "ImportError: DistributedOptimizer needs guard/ beside mine/, see make take"


def tops_of(path):
    return {module.split(".")[0] for module in imported(path)}


@pytest.mark.parametrize("path", CHECKPOINT, ids=lambda path: path.name)
def test_checkpoint_imports_torch_the_standard_library_its_siblings_and_the_schema(path):
    """guard/schema.py says what a state consists of; what needs the rest of guard/ is a stage's."""
    for module in imported(path):
        sibling = module.startswith(".") and (path.parent / f"{module[1:]}.py").exists() or module == "guard.schema"
        assert module.split(".")[0] in {"torch", *sys.stdlib_module_names} or sibling, f"{path.name} imports {module}"


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_imports_checkpoint(stage):
    files = list((ROOT / stage).rglob("*.py"))
    assert files and not [path for path in files if "checkpoint" in tops_of(path)]


@pytest.mark.parametrize("path", sorted((ROOT / "show").glob("*.py")), ids=name_of)
def test_show_imports_torch_rich_the_launcher_and_its_siblings(path):
    """The browser is an option of who makes screenshots."""
    allowed = {"torch", "rich", "", *sys.stdlib_module_names, *["playwright"] * (path.name == "browser.py")}
    others = {module for module in imported(path) if module.split(".")[0] not in allowed}
    assert {module.split(".")[0] for module in others} <= {"harness"}, others


def test_no_stage_and_no_room_beside_it_imports_show():
    files = [*LIBRARY, *CHECKPOINT, *sorted((ROOT / "harness").rglob("*.py"))]
    assert not [path for path in files if "show" in tops_of(path)]


@pytest.mark.parametrize("stage", STAGES[1:])
def test_train_differs_in_the_import_and_the_prefetch_only(stage):
    first, other = ((ROOT / s / "train.py").read_text().splitlines() for s in (STAGES[0], stage))
    changed = [line for line in difflib.ndiff(first, other) if line[0] in "+-"]
    assert changed.pop(0) == f"- from {STAGES[0]} import DistributedOptimizer"
    assert changed.pop(0) == f"+ from {stage} import DistributedOptimizer"
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


def test_lines_have_at_most_120_columns():
    tracked = subprocess.run(["git", "ls-files", "*.py", "Makefile"], cwd=ROOT, capture_output=True, text=True).stdout
    files = [ROOT / name for name in tracked.split()] or [*ROOT.glob("*/*.py"), *ROOT.glob("*/*/*.py")]
    long = [(name_of(path), number) for path in files if path.exists()
            for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 120]
    assert files and not long


@pytest.mark.parametrize("path", [ROOT / "bench.py", *sorted((ROOT / "harness").rglob("*.py")), *CHECKPOINT, *LIBRARY],
                         ids=name_of)
def test_no_check_is_left_out_by_python_o(path):
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))
