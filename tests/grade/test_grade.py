"""`make grade`: what a wrong optimizer is told, in five lines at most, with the likely cause; a right one passes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grade import grader, skeleton
from grade.__main__ import contract_holds, package_of, passes
from grade.grader import Grader
from tests.common import STAGES
from tests.ranks import ROOT

HERE = "tests/graded"


@pytest.fixture(scope="module")
def workers():
    started = {}
    yield started
    for one in started.values():
        one.close()


@pytest.fixture
def grade(workers, capsys):
    """-> a function: package -> what is printed of level 1, and of level 2 where that has passed."""
    def grade(package):
        one = Grader(package, workers)
        _ = passes(1, one) and passes(2, one)
        return capsys.readouterr().out
    return grade


def complaint(printed):
    """-> the lines of the check that failed, of which there is one."""
    before, failed = printed.split("  FAILED    ")
    lines = failed.splitlines()
    assert len(lines) <= 5 and all(len(line) <= 120 for line in lines), failed
    return [line.strip() for line in lines]


SGD, ADAMW = "SGD: ranks equal each other and one process, 2 ranks", "AdamW"
BY_HAND, STATE = "16 elements by hand, 2 ranks", "the state is spread over 2 ranks"
CLIP = "clip_grad_norm_ equals torch's on the whole model"
MEAN = "expected  every element moves by lr × mean gradient, 0.1 · (1 + 2) / 2 = 0.15, on every rank"
ONE_PROCESS = "expected  2 ranks train like one process that has the batches of all"
SPREAD = "expected  AdamW's state exists once, about 1/2 on each rank"

WRONG = {  # package -> the check that fails, and what its lines begin with
    "summed": [BY_HAND, MEAN, "came      0.3 wherever it has moved: 2 times as far",
               "cause     the gradients are summed and not averaged: divide by the number of ranks"],
    "averaged_twice": [BY_HAND, MEAN, "came      0.075 wherever it has moved: 1/2 as far",
                       "cause     the gradients are divided by the number of ranks twice"],
    "averages_a_copy": [BY_HAND, MEAN, "came      moved by rank 0: 0.1, 0.2; rank 1: 0.1, 0.2",
                        "cause     each rank steps with its own gradients"],
    "receives_a_copy": [BY_HAND, MEAN,
                        "came      not moved: elements 4-7, 12-15 on rank 0, elements 0-3, 8-11 on rank 1",
                        "cause     what was received did not reach the parameters: torch.cat copies"],
    "noop": [BY_HAND, MEAN, "came      nothing has moved, on any rank",
             "cause     step() changes nothing in the model"],
    "nobodys": [BY_HAND, MEAN, "came      elements 12-15 have moved on no rank",
                "cause     nobody owns these parameters"],
    "forgets_lr": [BY_HAND, MEAN, "came      0.0015 wherever it has moved: torch's default lr times the mean gradient",
                   "cause     lr and weight_decay of the constructor do not reach the inner optimizer"],
    "five_times": [BY_HAND, MEAN, "came      moved by rank 0: 0.75; rank 1: 0.75",
                   "cause     the figures don't give one away"],
    "hangs": [BY_HAND, "expected  every rank ends this check, within 3 seconds",
              f"came      rank 0 hangs in barrier ({HERE}/hangs.py:11)",
              f"rank 1 hangs in broadcast of 16 bytes ({HERE}/right.py:35)",
              "cause     the ranks part at collective 9: barrier on rank 0, broadcast of 16 bytes on rank 1"],
    "waits_alone": [BY_HAND, "expected  every rank ends this check, within 3 seconds",
                    f"came      rank 0 hangs in {HERE}/waits_alone.py:12, after broadcast of 16 bytes ({HERE}/right.py",
                    f"rank 1 has ended; its last was broadcast of 16 bytes ({HERE}/right.py",
                    "cause     all ranks have called the same collectives"],
    "other_sizes": [BY_HAND, "expected  every rank ends this check, within 3 seconds",
                    f"came      rank 0 hangs in all_reduce of 16 bytes ({HERE}/other_sizes.py:10)",
                    f"rank 1 hangs in all_reduce of 12 bytes ({HERE}/other_sizes.py:10)",
                    "cause     the ranks part at collective 9: all_reduce of 16 bytes on rank 0, all_reduce of 12"],
    "raises": [BY_HAND, "expected  no exception",
               "came      rank 1: ValueError: the shard of rank 1 has the wrong size", f"in {HERE}/raises.py:9"],
    "with_grad": [BY_HAND, "expected  no exception",
                  "came      rank r: RuntimeError: a leaf Variable that requires grad is being used in an in-place",
                  f"in {HERE}/with_grad.py:9", "cause     step() and the constructor must run under torch.no_grad()"],
    "no_step": ["the interface", "expected  methods step() and zero_grad()",
                "came      DistributedOptimizer has no step()",
                "cause     docs/exercise.md lists the methods that each level asks for"],
    "other_arguments": ["the interface",
                        "expected  DistributedOptimizer(params, optimizer_cls, *, process_group=None, **",
                        "came      DistributedOptimizer(optimizer): too many positional arguments", "cause     docs/"],
    "no_broadcast": ["all ranks start from rank 0's parameters", "expected  the constructor gives every rank the",
                     "came      elements 0-15 of rank 1 are 1", "cause     parameters are broadcast from rank 0"],
    "keeps_grads": [SGD, ONE_PROCESS, "came      after step 2, 0.weight, 0.bias, 2.weight and 3 more",
                    "cause     gradients of the step before are added again: zero_grad() must forget them"],
    "new_state": [ADAMW, ONE_PROCESS, "came      after step 2, ",
                  "cause     the optimizer's state is new in each step"],
    "no_wait": ["prefetch_params: rank 1 is late", "expected  ", "came      after step 3, ",
                "cause     a module reads parameters that have not arrived: each must wait for its own"],
    "unsharded": [STATE, SPREAD, "came      2 times in all: 100% on rank 0, 100% on rank 1",
                  "cause     every rank steps every parameter"],
    "round_robin": [STATE, SPREAD, "came      once, and not in equal parts: 94% on rank 0, 6% on rank 1",
                    "cause     share out by elements: the largest parameter first"],
    "all_reduces_params": ["collectives and bytes", "expected  at most 3 · 4Ψ · (d-1)/d bytes sent by a rank",
                           "came      4.00 · 4Ψ · (d-1)/d bytes, in 32 all_reduce",
                           "cause     an all-reduce takes twice the bytes of a broadcast"],
    # Level 2
    "right": ["its methods",
              "expected  a torch.optim.Optimizer with clip_grad_norm_, no_sync, state_dict, load_state_dict",
              "came      DistributedOptimizer is none and has no clip_grad_norm_, no_sync, state_dict, load_state_dict",
              "cause     docs/exercise.md has the skeleton of level 2"],
    "one_group": ["two groups, with their own lr and weight decay", ONE_PROCESS,
                  "came      after step 1, 0.bias, 2.bias, 4.bias differ",
                  "cause     every parameter is stepped with the constructor's lr and weight_decay"],
    "late_lr": ["a scheduler of torch", ONE_PROCESS, "came      after step 2, ",
                "cause     the lr of a scheduler doesn't arrive"],
    "drops_micro_batches": ["the same, inside no_sync()", ONE_PROCESS, "came      after step 1, ",
                            "cause     only the last micro-batch counts"],
    "syncs_in_no_sync": ["the same, inside no_sync()", "expected  no communication inside no_sync()",
                         "came      6 collectives in 3 steps", "cause     gradients must stay on their rank"],
    "clips_its_shard": [CLIP, "expected  clip_grad_norm_ returns the norm", "came      0.38",
                        "cause     each rank takes the norm of its own shard"],
    "clips_its_own": [CLIP, "expected  clip_grad_norm_ returns the norm",
                      "came      0.57", "cause     the norm is of this rank's own gradients: average them first"],
    "clips_nothing": [CLIP, ONE_PROCESS, "came      after step 1, ",
                      "cause     the norm is right, and the gradients were not scaled"],
    "loses_its_state": ["state_dict() and load_state_dict() go on where they left off", ONE_PROCESS,
                        "came      after step 3, ", "cause     the state is lost"],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_wrong_optimizer_is_told(grade, name, monkeypatch):
    hangs = any("within 3 seconds" in line for line in WRONG[name])
    monkeypatch.setattr(grader, "LIMIT_S", 3 if hangs else 60)  # the others may be slow on a busy machine
    printed = complaint(grade(f"tests.graded.{name}"))
    assert len(printed) == len(WRONG[name]), printed
    for line, expected in zip(printed, WRONG[name]):
        line = re.sub(r"rank \d: RuntimeError", "rank r: RuntimeError", line)  # of two, whichever is the first
        assert line.startswith(expected), printed


def test_every_wrong_optimizer_is_graded():
    files = {path.stem for path in (ROOT / HERE).glob("*.py")}
    assert files - set(WRONG) == {"__init__", "whole"}


def test_a_right_one_of_25_lines_passes_level_1(grade):
    """Level 2 tells what it lacks: see "right" above."""
    printed = grade("tests.graded.right")
    assert printed.index("ladder     the collectives and bytes of stage 1") < printed.index("Level 2")
    assert "held       12.00 bytes a parameter after a step" in printed


def test_what_level_2_asks_for(grade):
    assert "FAILED" not in grade("tests.graded.whole")


@pytest.mark.parametrize("number, stage", list(enumerate(STAGES, start=1)))
def test_a_core_passes_what_it_has_and_stands_on_its_rung(grade, number, stage):
    printed = grade(f"{stage}.optimizer")
    assert "FAILED" not in printed and "no_sync" not in printed
    assert f"ladder     the collectives and bytes of stage {number}" in printed
    assert ("none of them in the backward pass" in printed) == (number < 4)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_passes_levels_1_and_2(grade, stage):
    assert "FAILED" not in grade(stage)


def test_level_3_is_short(capfd):
    assert not contract_holds("tests.graded.whole", ["--ranks", "2", "-k", "closure_and or sixteen"])
    *_, failed, test, more = capfd.readouterr().out.splitlines()
    assert failed == "  FAILED    1 failed, 1 passed"
    assert test.startswith("            test_closure_and_its_loss[tests.graded.whole-2] - ")
    assert "positional" in test
    assert more == '  more      make test ARGS="--stage tests.graded.whole"'


@pytest.mark.parametrize("stage, code, last_line", [
    ("tests.graded.no_step", 1, "  cause     docs/exercise.md lists the methods that each level asks for"),
    ("nothing", 2, f"grade: error: STAGE=nothing: no package or module of that name in {ROOT.name}/")])
def test_exit_code(stage, code, last_line):
    command = [sys.executable, "-m", "grade", stage]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert run.returncode == code and run.stdout.splitlines()[-1] == last_line, run.stdout


def test_a_stage_may_be_a_number_a_name_or_a_path():
    assert package_of("3") == STAGES[2]
    assert package_of(f"{HERE.replace('/', '.')}.right") == package_of(f"{HERE}/right.py") == "tests.graded.right"
    with pytest.raises(SystemExit):
        package_of("7")


# ---------------------------------------------------------------------------------------- docs/exercise.md, exercises/


DOCS = (ROOT / "docs" / "exercise.md").read_text(encoding="utf-8")


def test_exercises_are_the_cores_with_bodies_taken_out():
    """If this fails after a change of a core: python -m grade.skeleton. Who fills them in does so in a copy."""
    written = skeleton.files()
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "exercises").rglob("*.py")} == written.keys()
    for path, text in written.items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: not what python -m grade.skeleton writes"


@pytest.mark.parametrize("stage", skeleton.EMPTY)
def test_an_empty_exercise_is_told_what_to_fill_in(grade, stage):
    """Each of its functions says so itself, in a line."""
    name, expected, came, place, cause = complaint(grade(skeleton.exercise_of(stage)))
    assert name == BY_HAND and expected == "expected  no exception"
    assert re.fullmatch(r"came      rank \d: RuntimeError: fill in \w+: .*[^…]", came), came
    assert place.startswith(f"in exercises/{stage.split('_')[0]}/")
    assert cause == "cause     this exercise is not finished yet: docs/exercise.md has hints"


@pytest.mark.parametrize("stage", skeleton.EMPTY)
def test_how_many_bodies_an_exercise_has(stage):
    """docs/exercise.md says it, and the files."""
    counts = {file: len(asked) for file, asked in skeleton.EMPTY[stage].items() if asked}
    _, section = DOCS.split(f"### Stage {stage[5]}: ")
    said = section.partition("\n\n")[2].partition("\n\n")[0]
    expected = [f"{count} {'bodies ' if number == 0 else ''}of `{file}`"
                for number, (file, count) in enumerate(counts.items())]
    assert all(words in said for words in expected) or said.startswith("Fill in `sync_params`.")


@pytest.mark.parametrize("number, stage", list(enumerate(STAGES, start=1)))
def test_the_target_of_an_exercise_is_what_its_core_reaches(grade, number, stage):
    target = DOCS.split(f"<!-- target: {number} -->\n")[1].partition("\n\n")[0]
    assert [line.strip() for line in target.splitlines()] == [
        line.strip() for line in grade(f"{stage}.optimizer").splitlines()
        if line.startswith(tuple(f"            {word} " for word in ("a step", "sent", "held")))]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """-> a function: makes a package that ranks can import, of files or as a copy of a folder, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def package(name, source):
        folder = tmp_path / name
        if isinstance(source, str):
            folder.mkdir()
            (folder / "__init__.py").write_text(source, encoding="utf-8")
        else:
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
        return name

    return package


@pytest.mark.parametrize("level, checks, came", [
    (1, ["the interface"], "came      nothing has moved, on any rank"),
    (2, ["its methods", "the interface"], None)])
def test_the_skeleton_of_a_level_has_its_interface(package, workers, level, checks, came, capsys):
    code = DOCS.split(f"<!-- skeleton: level {level} -->\n```python\n")[1].partition("```")[0]
    one = Grader(package(f"skeleton_{level}", f"import torch\n\n\n{code}"), workers)
    for check in checks:
        assert passes(level if check == checks[0] else 1, one, only=check)
    if came:
        assert not passes(1, one)
        assert came in capsys.readouterr().out


def predictions():
    """(number, folder, file, lines before, lines after, the text of --only, the answer's lines) of each of the ten."""
    for number, section in enumerate(re.split(r"^### \d+\. ", DOCS, flags=re.MULTILINE)[1:], start=1):
        diff = re.search(r"```diff\n--- (\w+)/(\w+\.py)\n(.*?)```", section, re.DOTALL)
        lines = diff[3].splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        only = re.search(r"ARGS='--only ([^']+)'", section)
        answer = re.search(r"```text\n(.*?)```", section, re.DOTALL)[1].splitlines()
        yield number, diff[1], diff[2], before, after, only[1] if only else "", answer


PREDICTIONS = list(predictions())


def test_there_are_ten():
    assert len(PREDICTIONS) == 10


@pytest.mark.parametrize("number, folder, file, before, after, only, answer", PREDICTIONS)
def test_predict_then_run(package, workers, capsys, number, folder, file, before, after, only, answer):
    name = package(f"prediction_{number}", ROOT / folder)
    path = Path(sys.path[0], name, file)
    code = path.read_text(encoding="utf-8")
    assert code.count(before) == 1, f"{folder}/{file} has not, or more than once:\n{before}"
    path.write_text(code.replace(before, after), encoding="utf-8")
    one = Grader(f"{name}.optimizer", workers)
    _ = passes(1, one, only) and passes(2, one, only)
    printed = capsys.readouterr().out
    assert all(line in printed for line in answer), printed
