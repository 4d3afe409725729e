"""`make grade`: what a wrong optimizer is told, in five lines at most, with the likely cause; a right one passes."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from grade import contract, grader, left_over, levels, on_ranks, skeleton, variants
from grade.__main__ import grade as run
from grade.__main__ import package_of, passes
from grade.by_hand import ByHand
from grade.grader import Grader
from tests.common import STAGES
from tests.grade import graded
from tests.grade.graded import BY_HAND, NO_EXCEPTION, RIGHT, SOURCES, WRONG
from tests.ranks import ROOT, run_module

pytestmark = pytest.mark.waits  # packages of others hang, die and leave processes: each is given a limit

DOCS = (ROOT / "docs" / "exercise.md").read_text(encoding="utf-8")
ONE_LINE = {  # those that never come to a check -> what is said
    "exits_at_import": r"exits_at_import can't be imported .*: rank \d: SystemExit: 0",
    "loops_at_import": r".* can't be imported .*: rank 0, 1 hangs in code of others, before any collective",
    "computes_at_import": r".* can't be imported .*: rank 0, 1 hangs in code of others, before any collective",
    "raises_when_asked": r".* can't be imported and looked at: rank \d: RuntimeError: don't ask",
    graded.Right: "--only zzz: no check of levels 1 to 2 has that in its name",  # by --only zzz
    "judges_itself": ".* rank [01]: AssertionError: judges_itself replaces grade.on_ranks.play, by which it is graded",
}


@pytest.fixture(scope="module")
def workers():
    started = {}
    yield started
    for one in started.values():
        one.close()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """-> a function: makes a package that ranks can import, and returns its name: of a class of graded.py or a name in
    SOURCES, of a text, or as a copy of a folder, in which one file has another text in one place."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def package(what, source=None, file="", before="", after=""):
        if isinstance(source, Path):
            shutil.copytree(source, tmp_path / what, ignore=shutil.ignore_patterns("__pycache__"))
            code = (tmp_path / what / file).read_text(encoding="utf-8")
            assert code.count(before) == 1, f"{source.name}/{file} has not, or more than once:\n{before}"
            (tmp_path / what / file).write_text(code.replace(before, after), encoding="utf-8")
            return what
        if isinstance(what, type):
            is_core = what.__mro__[1].__name__ == "ShardedOptimizer" and what is not graded.Whole
            what, source = what.__name__.lower(), (f"from tests.grade.graded import {what.__name__} as "
                                                   f"{'Sharded' if is_core else 'Distributed'}Optimizer\n")
        (tmp_path / f"{what}.py").write_text(source or SOURCES[what], encoding="utf-8")
        return what

    return package


@pytest.fixture
def grade(workers, capsys, tmp_path, monkeypatch, package):
    """-> a function: package, or class -> what is printed of level 1, and of level 2 where that has passed."""
    monkeypatch.setattr(grader, "SHOW", tmp_path / "show")

    def grade(what):
        one = Grader(package(what) if isinstance(what, type) or what in SOURCES else what, workers)
        _ = passes(1, one) and passes(2, one)
        return capsys.readouterr().out
    return grade


def complaint(printed):
    """-> the lines of the check that failed, of which there is one."""
    before, failed = printed.split("  FAILED    ")
    lines = failed.splitlines()
    assert len(lines) <= 5 and all(len(line) <= 120 for line in lines), failed
    return [line.strip() for line in lines]


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_what_a_wrong_optimizer_is_told(grade, cls):
    check, lines = WRONG[cls]
    name, *printed = complaint(grade(cls))
    assert name.startswith(check), (name, printed)
    for expected in lines:  # some lines may be left out
        assert any(re.sub(r"rank \d", "rank r", line, count=1).startswith(expected) if "rank r" in expected else
                   line.startswith(expected) for line in printed), (expected, printed)


def test_what_is_graded_is_said_where_it_stands():
    """No class of graded.py is left out."""
    assert {cls for cls in vars(graded).values() if isinstance(cls, type) and cls.__module__ == graded.__name__} == {
        *WRONG, *RIGHT, graded.Whole, graded.Forks, graded.Slow, graded.UnfilledBuffer, graded.NotCopiedBucket}


def test_five_is_no_class(grade):
    assert complaint(grade("five"))[:3] == [
        "the interface", "expected  DistributedOptimizer is a class", "came      its type is int"]


def test_who_computes_for_long_does_not_hang(package, workers, monkeypatch):
    """The limit is of standing still: a machine that is busy with others makes all ranks slow."""
    monkeypatch.setattr(grader, "LIMITS_S", (3, 60))
    assert passes(1, Grader(package(graded.Slow), workers), only=BY_HAND)


def test_a_package_that_replaces_the_grader_as_it_steps_is_told_so(grade):
    printed = complaint(grade("judges_itself_later"))
    assert printed[0] == BY_HAND and "judges_itself_later replaces grade.on_ranks.in_one_process," in printed[2]


@pytest.mark.parametrize("d", [2, 3, 4])
def test_no_sum_of_gradients_by_hand_is_that_of_others(d):
    """What an element has moved by says whose gradients were added."""
    grads = [ByHand().grad(rank)[0].item() for rank in range(d)]
    sums = [sum(some) for n in range(d + 1) for some in itertools.combinations(grads, n)]
    assert len(set(sums)) == 2**d


COUNTED = {graded.Right: "held       12.00 bytes a parameter after a step", graded.RoundRobin: """
            state      98% on rank 0, 2% on rank 1
            unequal    sharing out by elements saves more: the largest parameter first, to who has least
"""}


@pytest.mark.parametrize("cls, rung", RIGHT.items(), ids=lambda one: getattr(one, "__name__", one))
def test_a_right_one_passes_level_1_and_is_told_what_level_2_wants(grade, cls, rung):
    printed = grade(cls)
    assert "FAILED" not in printed
    assert f"ladder     the collectives and bytes of stage {rung}\n" in printed
    assert "\nok level 1: it trains\n" in printed and COUNTED.get(cls, "") in printed
    assert printed.endswith("""
Level 2: It is an optimizer
  not yet   level 2 wants a torch.optim.Optimizer with clip_grad_norm_, no_sync, state_dict, load_state_dict
            docs/exercise.md has its skeleton
""")


@pytest.mark.parametrize("is_there", [True, False])
def test_wrong_values_end_with_the_recorder_where_there_is_one(grade, is_there, tmp_path, monkeypatch):
    """And only what it shows: no missing method, no order of gradients, no loop without zero_grad, no groups."""
    monkeypatch.setattr(grader, "SHOW", tmp_path if is_there else tmp_path / "show")
    shown = 'see       make show STAGE=summed ARGS="--ranks 2 --params 4,4,4,4 --optimizer sgd --dtype float32"'
    assert (complaint(grade(graded.Summed))[-1] == shown) == is_there
    for what in (graded.NoStep, graded.Raises, "five", graded.AsTheyCome, graded.NotZeroed, graded.FirstLr):
        assert "make show" not in grade(what)


def parameters_shown(stage, options, folder):
    """-> {where: value} at the end."""
    run_module("show", stage, *options.split(), "--json", folder / "made", PYTHONPATH=folder)
    made = json.loads((folder / "made").read_text(encoding="utf-8"))
    names = {number: (one["rank"], one["part"]) for number, one in enumerate(made["storages"])
             if one["row"] == "parameters"}
    return {(*names[number], start + offset): value for frame in made["frames"]
            for number, start, values, _ in frame["cells"] if number in names for offset, value in enumerate(values)}


@pytest.mark.parametrize("file, before, after, options", [
    ("optimizer.py", "def zero_grad(", "def unused(", "--ranks 2 --steps 2 --optimizer sgd"),
    ("buffer.py", "self.main_grad_shard.copy_(self.grad_shard)", "pass",
     "--ranks 2 --params 4,4,4,4 --optimizer sgd --dtype bfloat16")])
def test_the_recorder_shows_the_step_that_is_wrong(package, grade, tmp_path, monkeypatch, file, before, after, options):
    monkeypatch.setattr(grader, "SHOW", ROOT / "show")
    name = package(f"shown_{len(options)}", ROOT / STAGES[2], file, before, after)
    assert complaint(grade(f"{name}.optimizer"))[-1] == f'see       make show STAGE={name}.optimizer ARGS="{options}"'
    assert parameters_shown(f"{name}.optimizer", options, tmp_path) != parameters_shown(STAGES[2], options, tmp_path)


@pytest.mark.parametrize("held, came, cause", [
    ((33281, 33280), "1 of its 66560 elements more than once: 50% on rank 0, 50% on rank 1", "some parameters are"),
    ((33279, 33280), "1 of its 66560 elements on no rank: 50% on rank 0, 50% on rank 1", "some parameters are")])
def test_what_is_not_once_is_not_said_to_be(held, came, cause):
    """By elements: "1 times in all" beside "exists once" is no reason."""
    ranks = [on_ranks.Seen(state=(n, 0)) for n in held]
    with pytest.raises(grader.Wrong) as wrong:
        levels.state(Namespace(run=lambda *_: ranks), 2)
    lines = dict(wrong.value.lines)
    assert lines["expected"] == "AdamW's state exists once, about 1/2 on each rank"
    assert lines["came"] == came and lines["cause"].startswith(cause)


@pytest.mark.parametrize("number, stage", list(enumerate(STAGES, start=1)))
def test_a_core_passes_what_it_has_and_stands_on_its_rung(grade, number, stage):
    """docs/exercise.md has its figures, as the target of the exercise."""
    printed = grade(f"{stage}.optimizer")
    assert "FAILED" not in printed and "no_sync" not in printed
    assert f"ladder     the collectives and bytes of stage {number}" in printed
    assert ("none of them in the backward pass" in printed) == (number < 4)
    target = DOCS.split(f"<!-- target: {number} -->\n")[1].partition("\n\n")[0]
    assert [line.strip() for line in target.splitlines()] == [
        line.strip() for line in printed.splitlines()
        if line.startswith(tuple(f"            {word} " for word in ("a step", "sent", "held")))]


@pytest.mark.parametrize("what", [*STAGES, graded.Whole])
def test_a_stage_passes_levels_1_and_2(grade, what):
    assert "FAILED" not in grade(what)


def test_level_3_counts_by_test_and_explains_one(capfd, package, monkeypatch, tmp_path):
    arguments = ["--ranks", "2", "-k", "closure_and or sixteen or named"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not contract.holds(package(graded.Whole), arguments, is_core=False)
    *_, failed, expected, came, cause, more = capfd.readouterr().out.splitlines()
    assert failed == "  FAILED    1 of 3: test_closure_and_its_loss 1 of 1"
    assert expected == "  expected  closure and its loss"
    # Both ranks fail; where the machine is busy, rank 1 may be told of before rank 0 gets there.
    assert re.match("  came      Failed: rank [01]: TypeError: ", came) and "positional" in came
    assert cause == "  cause     level 3's methods take more: step(closure), clip_grad_norm_(max_norm, norm_type)"
    assert more == ('  more      make test ARGS="tests/stages/test_contract.py --stage whole '
                    '-k test_closure_and_its_loss"')


def test_level_3_of_a_core_are_the_tests_of_the_cores(capfd):
    """Those about no stage in particular: the ones about one stage are not run, and not counted."""
    arguments = ["--ranks", "2", "-k", "leaves_of_gradients or spread or order_two_at_a_time"]
    assert contract.holds("stage2_allgather.optimizer", arguments, is_core=True)
    assert "  ok        2 passed\n" in capfd.readouterr().out


@pytest.mark.parametrize("program", ["true", "false"])
def test_level_3_that_runs_no_test_is_no_success(monkeypatch, capfd, program):
    monkeypatch.setattr(sys, "executable", shutil.which(program))
    assert not contract.holds("whole", [], is_core=False)
    assert "pytest could not run them" in capfd.readouterr().out


def test_a_package_that_is_not_there_is_nothing_to_grade(capsys):
    with pytest.raises(SystemExit) as ended:
        package_of("nothing")
    assert ended.value.code == 2
    line = f"grade: error: STAGE=nothing: no package or module of that name in {Path.cwd().name}/\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("what, line", ONE_LINE.items())
def test_what_never_comes_to_a_check_is_one_line(workers, capsys, monkeypatch, package, what, line):
    monkeypatch.setattr(grader, "LIMITS_S", (8, 3))
    with pytest.raises(SystemExit) as ended:
        run(Grader(package(what), workers), Namespace(only="zzz" if what is graded.Right else "", levels=2), [])
    printed = capsys.readouterr()
    assert ended.value.code == 1 and not printed.out and len(printed.err.splitlines()) == 1
    assert re.match(f"grade: error: {line}", printed.err)


def test_a_process_that_a_package_leaves_is_ended_and_told_of(monkeypatch, package, tmp_path):
    monkeypatch.setenv("LEFT_BY", str(tmp_path))  # it inherits this, which no other run of this test has
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "grade", package(graded.Forks), "--levels", "1", "--only", "one parameter"]
    came = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300)
    assert came.returncode == 1 and came.stdout.splitlines()[-2:] == [
        "  FAILED    nothing goes on after the ranks have ended",
        "  came      the package has left 1 of its processes running; they have been ended"], came.stdout
    assert not left_over.marked(f"LEFT_BY={tmp_path}")


def test_a_stage_may_be_a_number_a_name_or_a_path():
    assert package_of("3") == STAGES[2]
    assert package_of("tests.grade.graded") == package_of("tests/grade/graded.py") == "tests.grade.graded"
    with pytest.raises(SystemExit):
        package_of("7")


# ------------------------------------------------------------------------------- docs/exercise.md, make exercise


@pytest.fixture
def exercise(tmp_path, monkeypatch):
    """-> a function: what `make exercise` writes, as a package that ranks can import; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def exercise(what):
        skeleton.write(what, tmp_path / f"mine_{what}")
        return f"mine_{what}"
    return exercise


@pytest.mark.parametrize("stage", STAGES)
def test_an_empty_exercise_is_told_what_to_fill_in(grade, exercise, stage):
    """Each of its functions says so itself, in a line."""
    number = stage.removeprefix("stage")[0]
    name, expected, came, *_, cause = complaint(grade(exercise(number)))
    assert name == ("ranges_in_shard by hand" if number == "3" else BY_HAND) and expected == f"expected  {NO_EXCEPTION}"
    assert re.fullmatch(r"came      rank \d: RuntimeError: fill in \w+: .*[^…]", came), came
    assert cause == "cause     this exercise is not finished yet: docs/exercise.md has hints"


@pytest.mark.parametrize("what, to, line", [
    ("7", "mine", "STAGE=7: there are the exercises 1, 2, 3, 4, and variants"),
    ("1", "no-name", "its last part must be a name that Python can import"),
    ("1", ".", "its last part must be a name"), ("1", "there", "is there already")])
def test_an_exercise_is_written_to_a_new_folder(what, to, line, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=line):
        skeleton.write(what, tmp_path / to if to != "." else Path("."))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("stage", STAGES)
def test_how_many_bodies_an_exercise_has(stage):
    """docs/exercise.md says it, and the files."""
    counts = {Path(path).name: len(asked) for path, asked in skeleton.asked_of(stage).items() if asked}
    _, section = DOCS.split(f"### Stage {stage[5]}: ")
    said = section.partition("\n\n")[2].partition("\n\n")[0]
    expected = [f"{count} {'bodies ' if number == 0 else ''}of `{file}`"
                for number, (file, count) in enumerate(counts.items())]
    assert all(words in said for words in expected) or said.startswith("Fill in `sync_params`.")


# What makes each variant wrong, and the checks of which one notices.
TRAINS, SENDS, HOLDS, TELLS = "it trains as ours does", "what it sends", "what it holds", "who has the nan"
WRONG_VARIANTS = {
    "per_parameter": ('[[param] for param in group["params"]]', '[group["params"]]', [SENDS]),
    "muon": ("main_param.view(param.shape)", "main_param", [TRAINS]),
    "hybrid": ("dist.all_reduce(shard, group=self.across)", "pass", [TRAINS]),
    "wire16": ("return torch.bfloat16", "return torch.float32", [TRAINS, SENDS]),
    "remainder16": ("self.remainder.copy_(bits)", "self.remainder.zero_()", [TRAINS]),
    "moments16": ("self.cast_moments(bucket, torch.bfloat16)", "pass", [TRAINS, HOLDS]),
    "offload": ("copy=True)\n\n\nclass", "copy=False)\n\n\nclass", [HOLDS]),
    "finite": ("(everyone == 0)", "(everyone == 2)", [TELLS]),
    "blocks": ("place(BLOCK)", "place(alignment)", [TRAINS]),
    "chained": ("torch.stack(norms)", "torch.stack(norms[:1])", [TRAINS]),
    "wire16 half left out": ("self.reduce_dtype = torch.float32", "pass", ["in which dtype parts are added"]),
}


def variant_of_ours(name):
    return f"guard.{name}" if name == "chained" else f"variants.{name}"


@pytest.mark.parametrize("name", variants.CASES)
def test_the_target_of_a_variant_is_what_ours_reaches(workers, capsys, name):
    assert passes(name, Grader(variant_of_ours(name), workers))
    printed = capsys.readouterr().out
    row = re.search(rf"^\| {name} \| (\d+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \|", DOCS, re.MULTILINE)
    assert re.search(rf"sent +{row[2]} bytes a parameter, in {row[3]} messages\n", printed), printed
    assert re.search(rf"held +{row[4]} bytes a parameter\n", printed) and f"lines      {row[1]}\n" in printed, printed


@pytest.mark.parametrize("what", WRONG_VARIANTS)
def test_a_wrong_variant_is_told_so(package, workers, capsys, what):
    right, wrong, checks = WRONG_VARIANTS[what]
    name = what.split()[0]
    source = ROOT / f"{variant_of_ours(name).replace('.', '/')}.py"
    folder = package(f"wrong_{what.replace(' ', '_')}", source.parent, f"{name}.py", right, wrong)
    assert passes(name, Grader(f"{folder}.{name}", workers)) is False
    name_of_check, *_ = complaint(capsys.readouterr().out)
    assert name_of_check in checks


@pytest.mark.parametrize("name", ["wire16", "chained"])
def test_a_variant_that_is_not_written_yet_is_told_what_to_fill_in(workers, capsys, exercise, name):
    assert passes(name, Grader(f"{exercise('variants')}.{name}", workers)) is False
    assert "RuntimeError: fill in " in capsys.readouterr().out


def test_every_variant_is_an_exercise():
    assert {Path(path).stem for path, asked in skeleton.asked_of("variants").items() if asked} == variants.CASES.keys()
    assert {what.split()[0] for what in WRONG_VARIANTS} == variants.CASES.keys()
    assert {path.stem for path in (ROOT / "variants").glob("[a-z]*.py")} == (variants.CASES.keys() - {"chained"}) | {
        "by_bucket"}


@pytest.mark.parametrize("before, after, shard, came", [
    ("start - shard_start)", "start)", "3, 5, 2 elements at 0, 4, 12, in shard 8 to 16: (index, start, stop, offset) = "
     "(1, 4, 5, 0), (2, 0, 2, 4)", "(1, 4, 5, 8), (2, 0, 2, 12)"),
    ("start < stop", "start <= stop", "8, 8, 8 elements at 0, 8, 16, in shard 8 to 16: (index, start, stop, offset) = "
     "(1, 0, 8, 0)", "(0, 8, 8, 0), (1, 0, 8, 0), (2, 0, 0, 8)")])
def test_ranges_in_shard_is_checked_by_hand_before_anything_is_built_on_it(package, grade, before, after, shard, came):
    name = package(f"ranges_{len(came)}", ROOT / STAGES[2], "buffer.py", before, after)
    assert complaint(grade(f"{name}.optimizer")) == [
        "ranges_in_shard by hand", f"expected  of {shard}", f"came      {came}",
        "cause     start and stop count from the parameter's first element, offset from the shard's"]


@pytest.mark.parametrize("level, checks, came", [
    (1, ["the interface"], "came      nothing has moved, on any rank"),
    (2, ["its methods", "the interface"], None)])
def test_the_skeleton_of_a_level_has_its_interface(package, workers, level, checks, came, capsys):
    code = DOCS.split(f"<!-- skeleton: level {level} -->\n```python\n")[1].partition("```")[0]
    one = Grader(package(f"skeleton_{level}", f"import torch\n\n\n{code}"), workers)
    for check in checks:
        assert passes(level if check == checks[0] else 1, one, only=check)
    if came:
        assert passes(1, one) is False
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
    name = package(f"prediction_{number}", ROOT / folder, file, before, after)
    one = Grader(f"{name}.optimizer", workers)
    _ = passes(1, one, only) and passes(2, one, only)
    printed = capsys.readouterr().out
    assert all(line in printed for line in answer), printed
