"""`make grade`: what a wrong optimizer is told, in five lines at most, with the likely cause; a right one passes."""

import importlib
import inspect
import itertools
import re
import shutil
import textwrap
from argparse import Namespace
from pathlib import Path

import pytest

from grade import by_hand, contract, exercises, grader, levels, report, runs
from grade.__main__ import files_of, package_of
from grade.grader import Grader
from grade.report import passes, what_next
from tests.common import STAGES
from tests.grade import graded
from tests.grade.graded import BY_HAND, NO_EXCEPTION, RIGHT, SOURCES, WRONG, changed
from tests.pages import Page
from tests.pages.test_chapters import OWN, is_in
from tests.ranks import ROOT

pytestmark = pytest.mark.waits  # packages of others hang, die and leave processes: each is given a limit

DOCS = (ROOT / "docs" / "exercise.md").read_text(encoding="utf-8")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """-> a function: makes a package that ranks can import, and returns what is graded of it. Of `what` in graded.py, a
    class, a mistake or a source; of a text; or as the copy of a file's folder, in which some lines are others."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def package(what, source="", lines=()):
        name, base = getattr(what, "__name__", what).lower(), WRONG[what].base if what in WRONG else ""
        if isinstance(base, str) and base:
            source, lines = ROOT / base, WRONG[what].lines
        if isinstance(source, Path):
            shutil.copytree(source.parent, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
            path = tmp_path / name / source.name
            path.write_text(changed(path.read_text(encoding="utf-8"), lines, source), encoding="utf-8")
            return f"{name}.{'optimizer' if 'stage' in source.parent.name else source.stem}"
        if base or isinstance(what, type):
            its = f"mistaken('{what}')" if base else what.__name__
            source = f"from tests.grade import graded\n\nDistributedOptimizer = graded.{its}\n"
        (tmp_path / f"{name}.py").write_text(source or SOURCES[what], encoding="utf-8")
        return name

    return package


@pytest.fixture
def grade(workers, capsys, package):
    """-> a function: what `package` takes, or a package -> what is printed of level 1, and of 2 where that passes."""
    def grade(what, only="", levels=(1, 2)):
        one = Grader(package(what) if isinstance(what, type) or what in {**WRONG, **SOURCES} else what, workers)
        all(passes(level, one, only) for level in levels)
        return capsys.readouterr().out
    return grade


def complaint(printed):
    """-> the lines of the check that failed, of which there is one."""
    before, failed = printed.split("  FAILED    ")
    lines = [line.strip() for line in failed.splitlines()]
    of_wrong = [line for line in lines if not re.match("printed |[0-9]+ lines before", line)]
    assert len(of_wrong) <= 5, failed
    assert max(map(len, lines)) <= 118, failed
    return lines


@pytest.mark.parametrize("what", WRONG)
def test_what_a_wrong_optimizer_is_told(grade, what):
    name, *printed = complaint(grade(what))
    assert name.startswith(WRONG[what].check), (name, printed)
    for expected in WRONG[what].said():  # some lines may be left out
        assert any(re.sub(r"rank \d", "rank r", line, count=1).startswith(expected) if "rank r" in expected else
                   line.startswith(expected) for line in printed), (expected, printed)


def test_no_two_combinations_of_gradients_are_alike():
    """On 2 and 3 ranks each sum of some ranks' gradients, divided by what the grader knows, has a value of its own.
    Divided by up to 9 some coincide: they stay ambiguous, and the grader takes no such divisor for likely."""
    for d in (2, 3):
        assert all(after / before > 1.01 for before, after in itertools.pairwise(sorted(
            combination.value() for combination in by_hand.combinations(d))))
    sums = {(ranks, divisor): by_hand.Combination(ranks, divisor).value()
            for ranks in ((0,), (1,), (0, 1)) for divisor in range(1, 10)}
    assert {one for one in itertools.combinations(sums, 2) if sums[one[0]] == sums[one[1]]} == {
        (((0,), 1), ((1,), 7)), (((0,), 1), ((0, 1), 8)), (((1,), 7), ((0, 1), 8))}


@pytest.mark.parametrize("lines, says", [
    ({}, "stays"), ({"if n_users and param": "if param"}, "has a gradient of zeros")])
def test_what_no_rank_uses_may_stay_or_have_zeros(package, grade, lines, says):
    source = changed(inspect.getsource(graded.Whole), lines).replace("class Whole", "class DistributedOptimizer")
    name = package(f"either_{len(lines)}", f"from tests.grade.graded import *\n\n\n{source}")
    printed = grade(name, graded.UNUSED, levels=[2])
    assert f"ok        {graded.UNUSED}\n            unused     what no rank uses {says}" in printed, printed


DESIGNS = re.findall(r"^\*\*([\w ]+)\.\*\* [^`]*```python\n(.*?)```", DOCS, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("design, code", DESIGNS)
def test_three_other_designs_are_right(package, grade, design, code):
    """Of each the page shows the part that differs most; the rest is here."""
    source = f"{graded.DESIGN}{graded.DESIGNS[design]}\n{textwrap.indent(code, ' ' * 4)}"
    printed = grade(package(design.replace(" ", "_"), source))
    assert "FAILED" not in printed and "ok level 2" in printed, printed


def test_files_of_a_package_are_watched(package, tmp_path):
    name = package(graded.Right)
    assert files_of(name, tmp_path) == [tmp_path / "right.py"]
    assert {file.name for file in files_of(f"{STAGES[0]}.optimizer", ROOT)} >= {"optimizer.py", "distributed.py"}


def test_ranks_that_were_started_before_a_save_grade_what_was_saved(package):
    """As --watch does: start ranks while the package raises an error, save a right one, and grade it."""
    name = package("saved", "raise RuntimeError\n")
    ranks = Grader(name)
    ranks.start()
    package("saved", "from tests.grade.graded import Right as DistributedOptimizer\n")
    try:
        assert passes(1, ranks, only=BY_HAND)
    finally:
        ranks.close()


def test_what_ranks_print_is_shown_shortened_and_only_where_a_check_fails(grade):
    """A verdict stays in sight beside hundreds of lines: both ranks print 50 for each of four parameters."""
    before, failed = grade("Prints", BY_HAND).split("FAILED")
    assert "one more" not in before and failed.count("one more") == 4 and "396 lines before these" in failed, failed


def test_who_computes_for_long_does_not_hang(package, workers, monkeypatch):
    """The limit is of standing still: a machine that is busy with others makes all ranks slow."""
    monkeypatch.setattr(grader, "LIMITS_S", (8, 60))
    assert passes(1, Grader(package(graded.Slow), workers), only=BY_HAND)


COUNTED = {graded.Right: "held       12.00 bytes a parameter after a step", graded.RoundRobin: """
            state      98% on rank 0, 2% on rank 1
            unequal    allowed, but wasteful: the largest parameter first, to the rank that has least
"""}


@pytest.mark.parametrize("cls", RIGHT)
def test_a_right_one_passes_level_1_and_is_told_what_level_2_wants(grade, cls):
    printed = grade(cls)
    assert "FAILED" not in printed
    assert "\nok level 1: it trains\n" in printed and COUNTED.get(cls, "") in printed
    assert printed.endswith("""
Level 2: It is an optimizer
  not yet   level 2 wants a torch.optim.Optimizer with clip_grad_norm_, no_sync, state_dict, load_state_dict
            docs/exercise.md has its skeleton
""")


def test_state_that_is_on_no_rank_is_counted_in_elements():
    """"1 times in all" beside "exists once" is no reason."""
    ranks = [runs.Seen(n_state=n) for n in (33279, 33280)]
    with pytest.raises(grader.Wrong) as wrong:
        levels.state(Namespace(run=lambda *_, **__: ranks))
    assert ("came", "1 of its 66560 elements on no rank: 50% on rank 0, 50% on rank 1") in wrong.value.lines


@pytest.mark.parametrize("number, stage", list(enumerate(STAGES, start=1)))
def test_a_core_passes_what_it_has_and_sends_what_the_page_says(grade, number, stage):
    """docs/exercise.md has its figures, as the target of the exercise."""
    printed = grade(f"{stage}.optimizer")
    assert "FAILED" not in printed and "no_sync" not in printed
    assert ("none of them in the backward pass" in printed) == (number < 4)
    target = DOCS.split(f"<!-- target: {number} -->\n")[1].partition("\n\n")[0]
    assert [line.strip() for line in target.splitlines()] == [
        line.strip() for line in printed.splitlines()
        if line.startswith(tuple(f"            {word} " for word in ("a step", "sent", "held")))]


@pytest.mark.parametrize("what", [*STAGES, graded.Whole])
def test_a_stage_passes_levels_1_and_2(grade, what):
    assert "FAILED" not in grade(what)


def test_level_3_names_the_test_and_what_it_met(grade):
    printed = grade(STAGES[1], "zero grad forgets", levels=[3])
    assert "ok        zero grad forgets gradients reduced or not\n" in printed, printed
    name, expected, came, _, cause = complaint(grade(graded.Whole, "closure", levels=[3]))
    assert name == "closure and its loss"
    assert expected.startswith("expected  Step with a closure: the loss is the mean over the ranks")
    assert expected.endswith("… (2 ranks)")
    assert re.match(r"came      rank [01]: TypeError: ", came) and "positional" in came
    assert cause == ('cause     make test ARGS="tests/stages/test_contract.py --stage whole '
                     '-k test_closure_and_its_loss" shows more')


def test_what_level_3_leaves_out_is_there():
    tests = vars(importlib.import_module(contract.CONTRACT))
    assert contract.LEFT_OUT <= tests.keys() and len(contract.level()[1]) > 10


@pytest.mark.parametrize("what, line", [
    ("exits_at_import", r"exits_at_import can't be imported .*: rank \d: SystemExit: 0"),
    ("loops_at_import", ".* can't be imported .*: rank 0, 1 hangs in code of others, before any collective"),
    ("computes_at_import", ".* can't be imported .*: rank 0, 1 hangs in code of others, before any collective"),
    ("raises_when_asked", r".* can't be imported and looked at: rank \d: RuntimeError: don't ask"),
    (graded.Right, "--only zzz: no check of levels 1 to 2 has that in its name")])
def test_what_never_comes_to_a_check_is_one_line(workers, capsys, monkeypatch, package, what, line):
    monkeypatch.setattr(grader, "LIMITS_S", (8, 3))
    args = Namespace(only="zzz" if what is graded.Right else "", levels=2)
    assert report.grade(Grader(package(what), workers), args) is False
    printed = capsys.readouterr()
    assert re.fullmatch(f"grade: error: {line}.*\n", printed.err) and not printed.out


def test_a_stage_may_be_a_number_a_name_or_a_path(capsys):
    """What is not there is nothing to grade."""
    assert package_of("3") == STAGES[2]
    assert package_of("tests.grade.graded") == package_of("tests/grade/graded.py") == "tests.grade.graded"
    for stage, line in {"nothing": f"no package or module of that name in {Path.cwd().name}/",
                        "7": f"there are stages 1 to {len(STAGES)}"}.items():
        with pytest.raises(SystemExit) as ended:
            package_of(stage)
        assert ended.value.code == 2 and capsys.readouterr().err == f"grade: error: STAGE={stage}: {line}\n"


# ------------------------------------------------------------------------------- docs/exercise.md, make exercise


@pytest.mark.parametrize("stage", STAGES)
def test_an_exercise_says_what_to_fill_in(grade, workers, tmp_path, stage):
    """Each of its functions in a line; docs/exercise.md has how many there are in each file. Then the next chapter."""
    exercises.write(stage[5], tmp_path / f"mine_{stage[5]}")
    name, expected, came, *_, cause = complaint(grade(f"mine_{stage[5]}"))
    assert name == BY_HAND and expected == f"expected  {NO_EXCEPTION}"
    assert re.fullmatch(r"came      rank \d: RuntimeError: fill in \w+: .*[^…]", came), came
    assert cause == "cause     this exercise is not finished yet: docs/exercise.md has hints"
    said = DOCS.split(f"### Stage {stage[5]}: ")[1].split("\n\n")[1]
    counts = {Path(path).name: len(asked) for path, asked in exercises.bodies()[stage].items() if asked}
    assert all(f"{count} {'bodies ' if number == 0 else ''}of `{file}`" in said
               for number, (file, count) in enumerate(counts.items())) or said.startswith("Fill in `sync_params`.")
    assert [*STAGES, "make exercise STAGE=drill1"][int(stage[5])] in what_next(Grader(f"mine_{stage[5]}", workers))


@pytest.mark.parametrize("stage", STAGES)
def test_no_chapter_shows_what_its_exercise_asks_for(stage):
    left = [exercises.emptied(path, asked) for path, asked in exercises.bodies()[stage].items()]
    for code in Page(f"{stage}/README.md").code():
        assert code.startswith(OWN) or any(is_in(code, text) for text in left), f"an exercise asks for this:\n{code}"


def test_what_was_left_out_is_next(workers, capsys):
    ranks = Grader(f"{STAGES[0]}.optimizer", workers)
    assert report.grade(ranks, Namespace(only="", levels=1))
    assert capsys.readouterr().out.endswith(f"  next      make grade STAGE={ranks.package}, for level 2 was left out\n")


def test_an_exercise_that_is_not_there_is_refused(tmp_path):
    """tests/house/test_taken.py has the places where none can be written."""
    with pytest.raises(ValueError, match="STAGE=7: there are the exercises 0 to 4, and drill1 to drill8"):
        exercises.write("7", tmp_path / "mine")


@pytest.mark.parametrize("level, names", [(1, ["the interface"]), (2, ["its methods", "the interface"])])
def test_the_skeleton_of_a_level_has_its_interface(package, grade, level, names):
    code = DOCS.split(f"<!-- skeleton: level {level} -->\n```python\n")[1].partition("```")[0]
    name = package(f"skeleton_{level}", f"import torch\n\n\n{code}")
    for check in names:
        assert f"ok        {check}\n" in grade(name, check)
    if level == 1:
        assert "came      nothing has moved, on any rank" in grade(name)


def prediction(section):
    """-> (file, before, after, the text of --only, the answer's lines)"""
    file, diff = re.search(r"```diff\n--- (\w+/\w+\.py)\n(.*?)```", section, re.DOTALL).groups()
    before, after = ("".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] == sign) for sign in "-+")
    only = re.search(r"ARGS='--only ([^']+)'|$", section)[1] or ""
    return file, before, after, only, re.search(r"```text\n(.*?)```", section, re.DOTALL)[1].splitlines()


PREDICTIONS = list(map(prediction, re.split(r"^### \d+\. ", DOCS, flags=re.MULTILINE)[1:]))
CAUSES = {  # number -> what the page leaves to the grader
    1: by_hand.SUMMED, 2: by_hand.NOT_RECEIVED, 3: "the lr of a scheduler doesn't arrive",
    4: by_hand.NOTHING["zeros"], 5: by_hand.NOT_FINISHED, 6: "packing and cutting disagree"}


@pytest.mark.parametrize("number", CAUSES)
def test_predict_then_run(package, grade, number):
    file, before, after, only, answer = PREDICTIONS[number - 1]
    printed = grade(package(f"prediction_{number}", ROOT / file, {before: after}), only)
    assert all(line in printed for line in answer), printed
    assert f"cause     {CAUSES[number]}" in printed, printed
    assert len(PREDICTIONS) == len(CAUSES)
