"""`make grade`: what a wrong optimizer is told, in five lines at most, with the likely cause; a right one passes."""

import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from grade import by_hand, contract, exercises, grader, levels, runs, variants
from grade.__main__ import grade as run
from grade.__main__ import package_of, passes, what_next
from grade.grader import Grader
from tests.common import STAGES
from tests.grade import graded
from tests.grade.graded import BY_HAND, NO_EXCEPTION, RIGHT, SOURCES, WRONG, changed
from tests.ranks import ROOT, run_module

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
    of_wrong = [line for line in lines if not re.match("printed |see  |next |make grade|[0-9]+ lines before", line)]
    assert len(of_wrong) <= 5, failed
    assert max(map(len, lines)) <= 118, failed
    return lines


@pytest.mark.parametrize("what", WRONG)
def test_what_a_wrong_optimizer_is_told(grade, what):
    """And by which command the recorder shows it, where it can: no missing method, no order of gradients, no groups."""
    name, *printed = complaint(grade(what))
    assert any(line.startswith("see       make show ") for line in printed) == WRONG[what].is_shown()
    unknown = any(line == f"cause     {grader.UNKNOWN}" for line in printed)
    assert unknown == printed[-1].endswith("' shows what it prints"), printed
    assert name.startswith(WRONG[what].check), (name, printed)
    for expected in WRONG[what].said():  # some lines may be left out
        assert any(re.sub(r"rank \d", "rank r", line, count=1).startswith(expected) if "rank r" in expected else
                   line.startswith(expected) for line in printed), (expected, printed)


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


@pytest.mark.parametrize("what, options", [
    ("LeavesZeroGradToTorch", "--ranks 2 --steps 2 --optimizer sgd"),
    ("NotCopied", "--ranks 2 --params 4,4,4,4 --optimizer sgd --dtype bfloat16")])
def test_the_recorder_shows_the_step_that_is_wrong(grade, tmp_path, what, options):
    """Other parameters than the stage's at the end. tests/show/ has only stages; this is a package of one's own."""
    wrong, right = f"{what.lower()}.optimizer", WRONG[what].base.split("/")[0]
    assert complaint(grade(what))[-1] == f'see       make show STAGE={wrong} ARGS="{options}"'
    last_parameters = []
    for stage in (wrong, right):
        run = run_module("show", stage, *options.split(), PYTHONPATH=tmp_path)
        assert run.code == 0, run.stderr
        lines = run.stdout.rpartition("\n  parameters\n")[2].splitlines()
        last_parameters.append(lines[:2])  # of both ranks
    shown, expected = last_parameters
    assert len(expected) == 2 and all("rank" in line for line in [*shown, *expected]) and shown != expected


def test_state_that_is_on_no_rank_is_counted_in_elements():
    """"1 times in all" beside "exists once" is no reason."""
    ranks = [runs.Seen(state=(n, 0)) for n in (33279, 33280)]
    with pytest.raises(grader.Wrong) as wrong:
        levels.state(Namespace(run=lambda *_: ranks), d=2)
    assert ("came", "1 of its 66560 elements on no rank: 50% on rank 0, 50% on rank 1") in wrong.value.lines


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
    *_, failed, listed, expected, came, cause, more = capfd.readouterr().out.splitlines()
    assert (failed, listed) == ("  FAILED    1 of 3", "            test_closure_and_its_loss 1 of 1")
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


@pytest.mark.parametrize("what, line", [
    ("exits_at_import", r"exits_at_import can't be imported .*: rank \d: SystemExit: 0"),
    ("loops_at_import", ".* can't be imported .*: rank 0, 1 hangs in code of others, before any collective"),
    ("computes_at_import", ".* can't be imported .*: rank 0, 1 hangs in code of others, before any collective"),
    ("raises_when_asked", r".* can't be imported and looked at: rank \d: RuntimeError: don't ask"),
    ("judges_itself", ".* rank [01]: AssertionError: judges_itself replaces grade.runs.play, by which it is grad"),
    (graded.Right, "--only zzz: no check of levels 1 to 2 has that in its name")])
def test_what_never_comes_to_a_check_is_one_line(workers, capsys, monkeypatch, package, what, line):
    monkeypatch.setattr(grader, "LIMITS_S", (8, 3))
    with pytest.raises(SystemExit) as ended:
        run(Grader(package(what), workers), Namespace(only="zzz" if what is graded.Right else "", levels=2), [])
    assert re.fullmatch(f"grade: error: {line}.*", ended.value.code) and not capsys.readouterr().out


def test_a_process_that_a_package_leaves_is_ended_and_told_of(monkeypatch, package, tmp_path):
    monkeypatch.setenv("LEFT_BY", str(tmp_path))  # it inherits this, which no other run of this test has
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "grade", package(graded.Forks), "--levels", "1", "--only", "one parameter"]
    came = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert came.returncode == 1 and came.stdout.splitlines()[-2:] == [
        "  FAILED    nothing goes on after the ranks have ended",
        "  came      the package has left 1 of its processes running; they have been ended"], came.stdout
    assert not grader.marked(f"LEFT_BY={tmp_path}")


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
    assert name == (graded.RANGES if stage[5] == "3" else BY_HAND) and expected == f"expected  {NO_EXCEPTION}"
    assert re.fullmatch(r"came      rank \d: RuntimeError: fill in \w+: .*[^…]", came), came
    assert cause == "cause     this exercise is not finished yet: docs/exercise.md has hints"
    said = DOCS.split(f"### Stage {stage[5]}: ")[1].split("\n\n")[1]
    counts = {Path(path).name: len(asked) for path, asked in exercises.bodies()[stage].items() if asked}
    assert all(f"{count} {'bodies ' if number == 0 else ''}of `{file}`" in said
               for number, (file, count) in enumerate(counts.items())) or said.startswith("Fill in `sync_params`.")
    assert [*STAGES, "make exercise STAGE=drill1"][int(stage[5])] in what_next(Grader(f"mine_{stage[5]}", workers))


def test_an_exercise_that_is_not_there_is_refused(tmp_path):
    """tests/house/test_taken.py has the places where none can be written."""
    with pytest.raises(ValueError, match="STAGE=7: there are the exercises 0 to 4, variants, and drill1 to drill8"):
        exercises.write("7", tmp_path / "mine")


# What makes each variant wrong, and the checks of which one notices.
TRAINS, SENDS, HOLDS, TELLS = "it trains as ours does", "what it sends", "what it holds", "who has the nan"
WRONG_VARIANTS = {
    "per_parameter": ('[[param] for param in group["params"]]', '[group["params"]]', [SENDS]),
    "muon": ("main_param.view(param.shape)", "main_param", [TRAINS]),
    "hybrid": ("shard /= dist.get_world_size(self.across)", "pass", [TRAINS]),
    "wire16": ("return torch.bfloat16", "return torch.float32", [TRAINS, SENDS]),
    "remainder16": ("self.remainder.copy_(bits)", "self.remainder.zero_()", [TRAINS]),
    "moments16": ("self.cast_moments(bucket, torch.bfloat16)", "pass", [TRAINS, HOLDS]),
    "offload": ("copy=True)\n\n\nclass", "copy=False)\n\n\nclass", [HOLDS]),
    "finite": ("(1 - flags)", "(0 * flags)", [TELLS]),
    "blocks": ("place(BLOCK)", "place(alignment)", [TRAINS]),
    "chained": ("torch.stack(shares)", "torch.stack(shares[:1])", [TRAINS]),
    "wire16 half left out": ("self.reduce_dtype = torch.float32", "pass", ["in which dtype parts are added"]),
}


@pytest.mark.parametrize("name", variants.CASES)
def test_the_target_of_a_variant_is_what_ours_reaches(grade, name):
    printed = grade(f"{variants.CASES[name].home}.{name}", levels=[name])
    row = re.search(rf"^\| {name} \| (\d+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \|", DOCS, re.MULTILINE)
    assert re.search(rf"sent +{row[2]} bytes a parameter, in {row[3]} messages\n", printed), printed
    assert re.search(rf"held +{row[4]} bytes a parameter\n", printed) and f"lines      {row[1]}\n" in printed, printed
    assert printed.endswith(f"ok it is {name}\n")


@pytest.mark.parametrize("what", WRONG_VARIANTS)
def test_a_wrong_variant_is_told_so(package, grade, what):
    right, wrong, checks = WRONG_VARIANTS[what]
    name = what.split()[0]
    source = ROOT / variants.CASES[name].home / f"{name}.py"
    printed = grade(package(f"wrong_{what.replace(' ', '_')}", source, {right: wrong}), levels=[name])
    assert complaint(printed)[0] in checks


@pytest.mark.parametrize("name", ["wire16", "chained"])
def test_a_variant_that_is_not_written_yet_is_told_what_to_fill_in(grade, tmp_path, name):
    exercises.write("variants", tmp_path / f"mine_{name}")
    assert "RuntimeError: fill in " in complaint(grade(f"mine_{name}.{name}", levels=[name]))[2]


def test_every_variant_is_an_exercise():
    assert {Path(path).stem for path, asked in exercises.bodies()["variants"].items() if asked} == variants.CASES.keys()
    assert {what.split()[0] for what in WRONG_VARIANTS} == variants.CASES.keys()
    assert {path.stem for path in (ROOT / "variants").glob("[a-z]*.py")} == (variants.CASES.keys() - {"chained"}) | {
        "by_bucket", "muon_rows", "same_bits"}


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
    1: by_hand.SUMMED, 2: by_hand.NOT_RECEIVED, 5: "the lr of a scheduler doesn't arrive",
    7: by_hand.NOTHING["zeros"], 9: by_hand.NOT_FINISHED, 10: "who packs and who cuts disagree"}


@pytest.mark.parametrize("number", range(1, 11))
def test_predict_then_run(package, grade, number):
    file, before, after, only, answer = PREDICTIONS[number - 1]
    printed = grade(package(f"prediction_{number}", ROOT / file, {before: after}), only)
    assert all(line in printed for line in answer), printed
    assert f"cause     {CAUSES.get(number)}" in printed or number not in CAUSES, printed
    assert len(PREDICTIONS) == 10
