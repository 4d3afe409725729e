"""`make grade`: what a wrong optimizer is told, in five lines at most, with the likely cause; a right one passes."""

import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from grade import contract, grader, left_over, skeleton, variants
from grade.__main__ import grade as run
from grade.__main__ import package_of, passes
from grade.grader import Grader
from tests.common import STAGES
from tests.ranks import ROOT

pytestmark = pytest.mark.waits  # packages of others hang, die and leave processes: each is given a limit

HERE = "tests/graded"


@pytest.fixture(scope="module")
def workers():
    started = {}
    yield started
    for one in started.values():
        one.close()


@pytest.fixture
def grade(workers, capsys, tmp_path, monkeypatch):
    """-> a function: package -> what is printed of level 1, and of level 2 where that has passed."""
    monkeypatch.setattr(grader, "SHOW", tmp_path / "show")

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
BY_HAND, BY_3 = "16 elements by hand, 2 ranks", "16 elements by hand, 3 ranks"
STATE, BYTES = "the state is spread over 2 ranks", "collectives and bytes"
GROUPS, CLIP = "three groups, with their own lr and weight decay", "clip_grad_norm_ equals torch's on the whole model"
MEAN = "expected  every element moves by lr × mean gradient, 0.1 · (1 + 2) / 2 = 0.15, on every rank"
MEAN_3 = "expected  every element moves by lr × mean gradient, 0.1 · (1 + 2 + 3) / 3 = 0.2, on every rank"
MEAN_16 = "expected  every element moves by lr × mean gradient, 1 · (1 + 2) / 2 = 1.5, on every rank"
ONE_PROCESS = "expected  2 ranks train like one process that has the batches of all"
SPREAD = "expected  AdamW's state exists once, about 1/2 on each rank"
NORM = "expected  clip_grad_norm_ returns the norm of the averaged gradients of the whole model"
ENDS = "expected  every rank ends this check, within 10 seconds"
LIVES = "expected  every rank lives until the end of th"
NO_EXCEPTION = "expected  no exception"

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
             "cause     the inner optimizer's parameters have no gradients: they are copies"],
    "not_the_owner": [BY_HAND, MEAN, "came      nothing has moved in the end; in between rank 0 elements 0-3, 8-11, "
                      "rank 1 elements 4-7, 12-15 had", "cause     what was stepped was overwritten by a rank that"],
    "nobodys": [BY_HAND, MEAN, "came      elements 12-15 have moved on no rank",
                "cause     nobody owns these parameters"],
    "forgets_lr": [BY_HAND, MEAN, "came      0.0015 wherever it has moved: 0.01 times the mean gradient",
                   "cause     lr and weight_decay of the constructor do not reach the inner optimizer"],
    "five_times": [BY_HAND, MEAN, "came      0.75 wherever it has moved: 5 times as far",
                   "cause     the figures don't give one away"],
    "adds": [BY_HAND, MEAN, "came      -0.15 wherever it has moved: -1 times",
             "cause     step against the gradient"],
    "scales_lr": [BY_HAND, MEAN, "came      0.3 wherever it has moved: 2 times as far",
                  "cause     the inner optimizer has the right gradients, and another lr than the constructor's"],
    "drops_the_rest": [BY_3, MEAN_3, "came      elements 15 have moved on no rank", "cause     nobody owns these"],
    "gradient_for_parameter": [BY_HAND, MEAN, "came      in elements 0-15: the mean gradient",
                               "cause     a gradient was taken for a parameter"],
    "half": [BY_3, MEAN_3, "came      0.3 wherever it has moved: 1.5 times the mean gradient",
             "cause     the sum of the gradients is divided by 2: the number of ranks is 3 here"],
    "padding": [BY_3, MEAN_3,
                "came      in element 11: 0, as padding is; in elements 12-15: what elements 11-14 should hold",
                "cause     padding was taken for parameters"],
    "another_order": [BY_3, MEAN_3, "came      in elements 11-13: what elements 13-15 should hold; in elements 14-15: "
                      "what elements 11-12 should hold", "cause     who packs and who cuts disagree"],
    "hangs": [BY_HAND, ENDS, f"came      rank 0 hangs in barrier ({HERE}/hangs.py:11)",
              f"rank 1 hangs in broadcast of 16 bytes from rank 0 ({HERE}/right.py:35)",
              "cause     the ranks part at collective 9: barrier on rank 0, broadcast of 16 bytes from rank 0 on rank"],
    "waits_alone": [BY_HAND, ENDS,
                    f"came      rank 0 hangs in {HERE}/waits_alone.py:12, after broadcast of 16 bytes from rank 1",
                    f"rank 1 has ended; its last was broadcast of 16 bytes from rank 1 ({HERE}/right.py",
                    "cause     all ranks have called the same collectives"],
    "other_sizes": [BY_HAND, ENDS, f"came      rank 0 hangs in all_reduce of 16 bytes ({HERE}/other_sizes.py:10)",
                    f"rank 1 hangs in all_reduce of 12 bytes ({HERE}/other_sizes.py:10)",
                    "cause     the ranks part at collective 9: all_reduce of 16 bytes on rank 0, all_reduce of 12"],
    "other_roots": [BY_HAND, ENDS, "came      rank 0 hangs in broadcast of 16 bytes from rank 1 (",
                    "rank 1 hangs in broadcast of 16 bytes from rank 0 (",
                    "cause     the ranks part at collective 9: broadcast of 16 bytes from rank 1 on rank 0, from rank"],
    "one_less": [BY_HAND, ENDS, "came      rank 0 hangs in broadcast of 16 bytes from rank 0 (",
                 "rank 1 hangs in broadcast of 16 bytes from rank 1 (",
                 "cause     the ranks part at collective 9: broadcast of 16 bytes from rank 0 on rank 0, from rank 1"],
    "raises": [BY_HAND, NO_EXCEPTION, "came      rank 1: ValueError: the shard of rank 1 has the wrong size",
               f"in {HERE}/raises.py:9"],
    "with_grad": [BY_HAND, NO_EXCEPTION, "came      rank r: RuntimeError: a leaf Variable that requires grad is being",
                  f"in {HERE}/with_grad.py:9", "cause     step() and the constructor must run under torch.no_grad()"],
    "exits": [BY_HAND, NO_EXCEPTION, "came      rank r: SystemExit: 0", f"in {HERE}/exits.py:10",
              "cause     the program that trains decides when a rank ends"],
    "leaves": [BY_HAND, LIVES, "came      rank 1 ended with exit code 0",
               f"after broadcast of 16 bytes from rank 0 ({HERE}/right.py", "cause     os._exit() or a crash ended it"],
    "no_step": ["the interface", "expected  methods step() and zero_grad()",
                "came      DistributedOptimizer has no step()",
                "cause     docs/exercise.md lists the methods that each level asks for"],
    "other_arguments": ["the interface",
                        "expected  DistributedOptimizer(params, optimizer_cls, *, process_group=None, **",
                        "came      DistributedOptimizer(optimizer): too many positional arguments", "cause     docs/"],
    "five": ["the interface", "expected  DistributedOptimizer is a class", "came      its type is int", "cause     do"],
    "no_broadcast": ["all ranks start from rank 0's parameters", "expected  the constructor gives every rank the",
                     "came      elements 0-15 of rank 1 are 1",
                     "cause     parameters are broadcast from rank 0"],
    "copies_too_early": ["all ranks start from rank 0's parameters", "expected  the constructor gives every rank the",
                         "came      so it is; but a step with gradients of 0 makes elements 4-7, 12-15 of rank 0 1",
                         "cause     what the inner optimizer steps was copied before the broadcast"],
    "in_16_bits": [SGD, ONE_PROCESS, "came      after step 1, ", "cause     almost right, to two or three digits"],
    "keeps_grads": [SGD, ONE_PROCESS, "came      after step 2, 0.weight, 0.bias, 2.weight and 3 more",
                    "cause     gradients of the step before are added again: zero_grad() must forget them"],
    "new_state": [ADAMW, ONE_PROCESS, "came      after step 2, ",
                  "cause     the optimizer's state is new in each step"],
    "as_they_come": ["gradients in another order on rank 1",
                     "expected  every element moves by lr × mean gradient, 0.15, 0.3, 0.6, 1.2 of the parameters",
                     "came      of elements 0-3 rank 0's gradient was averaged with rank 1's of elements 12-15",
                     "cause     gradients come in another order on rank 1: what leaves must leave in one order"],
    "nothing_owned": ["one parameter, 3 ranks", NO_EXCEPTION,
                      "came      rank r: ValueError: optimizer got an empty parameter list", "in tests/graded/nothing_",
                      "cause     a rank owns nothing here"],
    "no_wait": ["prefetch_params: rank 1 is late", "expected  ", "came      after step 3, ",
                "cause     a module reads parameters that have not arrived: each must wait for its own"],
    "unsharded": [STATE, SPREAD, "came      2 times in all: 100% on rank 0, 100% on rank 1",
                  "cause     every rank steps every parameter"],
    "owns_twice": [STATE, SPREAD, "came      1.02 times in all: 51% on rank 0, 51% on rank 1",
                   "cause     some parameters are stepped on several ranks"],
    "pads_much": [STATE, SPREAD, "came      1.5 times, with padding", "cause     pad a shard by less"],
    "all_reduces_params": [BYTES, "expected  at most 3 · 4Ψ · (d-1)/d bytes sent by a rank",
                           "came      4.00 · 4Ψ · (d-1)/d bytes, in 32 all_reduce",
                           "cause     an all-reduce takes twice the bytes of a broadcast"],
    "objects": [BYTES, "expected  at most 3 · 4Ψ · (d-1)/d bytes sent by a rank",
                "came      4.14 · 4Ψ · (d-1)/d bytes, in 4 all_gather",
                "cause     a rank gives the all-gather more than it owns"],
    # Level 2
    "one_group": [GROUPS, ONE_PROCESS, "came      after step 1, 0.weight, 0.bias … moved with the "
                  "constructor's lr and the constructor's weight", "cause     every parameter is stepped with the"],
    "first_lr": [GROUPS, ONE_PROCESS, "came      after step 1, 0.weight, 0.bias … moved with group 0's lr and",
                 "cause     the first group's lr is taken for all"],
    "lost_decay": [GROUPS, ONE_PROCESS, "came      after step 1, 0.weight, 0.bias … moved with its own lr "
                   "and the constructor's weight decay", "cause     the weight decay of a group is lost"],
    "pairs_wrongly": [GROUPS, ONE_PROCESS, "came      after step 1, 0.weight moved with group 0's lr and its own",
                      "cause     groups are paired wrongly: a rank that owns nothing of a group still needs that"],
    "late_lr": ["a scheduler of torch", ONE_PROCESS, "came      after step 2, ",
                "cause     the lr of a scheduler doesn't arrive"],
    "only_lr": ["a scheduler that writes betas, too", ONE_PROCESS, "came      after step 2, ",
                "cause     the scheduler's lr arrives, its betas don't"],
    "sends_again": ["three micro-batches equal one large batch", ONE_PROCESS, "came      after step 1, ",
                    "cause     micro-batches that were averaged are sent again"],
    "drops_micro_batches": ["the same, inside no_sync()", ONE_PROCESS, "came      after step 1, ",
                            "cause     only the last micro-batch counts"],
    "never_syncs_again": ["the same, inside no_sync()", ONE_PROCESS, "came      after step 1, ",
                          "cause     each rank steps with its own gradients"],
    "syncs_in_no_sync": ["the same, inside no_sync()", "expected  no communication inside no_sync()",
                         "came      6 collectives in 3 steps", "cause     gradients must stay on their rank"],
    "not_zeroed": ["a loop without zero_grad()", "expected  every element moves by lr × mean gradient, 0.3 or 0.45 aft",
                   "came      step 2 moved every element by lr × (gradient + parameter)",
                   "cause     the second step added its gradients to parameters"],
    "unfilled": ["parameters of 16 bits", MEAN_16, "came      nothing has moved, on any rank",
                 "cause     the inner optimizer's gradients are all 0: main gradients must be filled"],
    "not_copied": ["parameters of 16 bits", MEAN_16, "came      nothing has moved, on any rank",
                   "cause     the inner optimizer stepped copies (main parameters), which were not copied to the mode"],
    "clips_its_shard": [CLIP, NORM, "came      0.38", "cause     each rank takes the norm of its own shard"],
    "clips_its_own": [CLIP, NORM, "came      0.57", "cause     the norm is of this rank's own gradients: average them"],
    "norm_after": [CLIP, NORM, "came      0.05000 on rank 0, 0.05000", "cause     the norm after clipping"],
    "norm_sqrt_d": [CLIP, NORM, "came      0.83654 on rank 0, 0.83654", "cause     √d times the norm"],
    "clips_nothing": [CLIP, ONE_PROCESS, "came      after step 1, ",
                      "cause     the norm is right, and the gradients were not scaled"],
    "loses_its_state": ["state_dict() and load_state_dict() go on where they left off", ONE_PROCESS,
                        "came      after step 3, ", "cause     the state is lost"],
}
# Of level 1's interface -> the rung that it stands on.
RIGHT = {"right": 1, "flat": 3, "chunks": 3, "padded": 2, "round_robin": 1}
ONE_LINE = {  # those that never come to a check -> what is said
    "exits_at_import": r"tests\.graded\.exits_at_import can't be imported .*: rank \d: SystemExit: 0 in .*import\.py:5",
    "loops_at_import": r".* can't be imported .*: rank 0, 1 hangs in \S*loops_at_import\.py:5, before any collective",
    "raises_when_asked": r".* can't be imported and looked at: rank \d: RuntimeError: don't ask in .*asked\.py:6",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_wrong_optimizer_is_told(grade, name, monkeypatch):
    hangs = ENDS in WRONG[name]
    monkeypatch.setattr(grader, "LIMIT_S", 10 if hangs else 300)  # the others may be slow on a busy machine
    printed = complaint(grade(f"tests.graded.{name}"))
    assert len(printed) == len(WRONG[name]), printed
    for line, expected in zip(printed, WRONG[name]):
        if "rank r" in expected:  # of several, whichever is the first
            line = re.sub(r"rank \d", "rank r", line, count=1)
        assert line.startswith(expected), printed


def test_every_optimizer_here_is_graded():
    files = {path.stem for path in (ROOT / HERE).glob("*.py")}
    assert files - set(WRONG) - set(RIGHT) - set(ONE_LINE) == {"__init__", "whole", "forks"}


@pytest.mark.parametrize("name, rung", RIGHT.items())
def test_a_right_one_passes_level_1_and_is_told_what_level_2_wants(grade, name, rung):
    printed = grade(f"tests.graded.{name}")
    assert "FAILED" not in printed
    assert f"ladder     the collectives and bytes of stage {rung}\n" in printed
    assert "\nok level 1: it trains\n" in printed
    assert printed.endswith("""
Level 2: It is an optimizer
  not yet   level 2 wants a torch.optim.Optimizer with clip_grad_norm_, no_sync, state_dict, load_state_dict
            docs/exercise.md has its skeleton
""")


def test_an_uneven_share_is_right_and_has_a_remark(grade):
    assert """
            state      98% on rank 0, 2% on rank 1
            unequal    sharing out by elements saves more: the largest parameter first, to who has least
""" in grade("tests.graded.round_robin")


def test_what_level_1_counts(grade):
    assert "held       12.00 bytes a parameter after a step" in grade("tests.graded.right")


@pytest.mark.parametrize("is_there", [True, False])
def test_wrong_values_end_with_the_recorder_where_there_is_one(grade, is_there, tmp_path, monkeypatch):
    """And only wrong values: a recorded step shows nothing of a missing method."""
    monkeypatch.setattr(grader, "SHOW", tmp_path if is_there else tmp_path / "show")
    last = complaint(grade("tests.graded.summed"))[-1]
    assert (last == "see       make show STAGE=tests.graded.summed") == is_there
    for name in ("no_step", "raises", "five"):
        assert "make show" not in grade(f"tests.graded.{name}")


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


def test_level_3_counts_by_test_and_explains_one(capfd):
    arguments = ["--ranks", "2", "-k", "closure_and or sixteen or named"]
    assert not contract.holds("tests.graded.whole", arguments, is_core=False)
    *_, failed, expected, came, cause, more = capfd.readouterr().out.splitlines()
    assert failed == "  FAILED    1 of 3: test_closure_and_its_loss 1 of 1"
    assert expected == "  expected  closure and its loss"
    # Both ranks fail; where the machine is busy, rank 1 may be told of before rank 0 gets there.
    assert re.match("  came      Failed: rank [01]: TypeError: ", came) and "positional" in came
    assert cause == "  cause     level 3's methods take more: step(closure), clip_grad_norm_(max_norm, norm_type)"
    assert more == ('  more      make test ARGS="tests/stages/test_contract.py --stage tests.graded.whole '
                    '-k test_closure_and_its_loss"')


def test_level_3_of_a_core_are_the_tests_of_the_cores(capfd):
    """Those about no stage in particular: the ones about one stage are not run, and not counted."""
    arguments = ["--ranks", "2", "-k", "leaves_of_gradients or spread or order_two_at_a_time"]
    assert contract.holds("stage2_allgather.optimizer", arguments, is_core=True)
    assert "  ok        2 passed\n" in capfd.readouterr().out


@pytest.mark.parametrize("program", ["true", "false"])
def test_level_3_that_runs_no_test_is_no_success(monkeypatch, capfd, program):
    monkeypatch.setattr(sys, "executable", shutil.which(program))
    assert not contract.holds("tests.graded.whole", [], is_core=False)
    assert "pytest could not run them" in capfd.readouterr().out


def graded(*arguments):
    """-> (exit code, lines) of `make grade`."""
    run = subprocess.run([sys.executable, "-m", "grade", *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, timeout=300)
    return run.returncode, run.stdout.splitlines()


def test_a_package_that_is_not_there_is_nothing_to_grade(capsys):
    with pytest.raises(SystemExit) as ended:
        package_of("nothing")
    assert ended.value.code == 2
    line = f"grade: error: STAGE=nothing: no package or module of that name in {Path.cwd().name}/\n"
    assert capsys.readouterr().err == line


def refused(package, workers, capsys, **options):
    """-> the line of what never comes to a check."""
    with pytest.raises(SystemExit) as ended:
        run(Grader(package, workers), Namespace(**{"only": "", "levels": 2, **options}), [])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert not printed.out
    return line


@pytest.mark.parametrize("name, line", ONE_LINE.items())
def test_what_never_comes_to_a_check_is_one_line(workers, capsys, monkeypatch, name, line):
    monkeypatch.setattr(grader, "IMPORT_S", 20 if name == "loops_at_import" else 300)
    assert re.fullmatch(f"grade: error: {line}", refused(f"tests.graded.{name}", workers, capsys))


def test_a_text_that_no_check_has_is_no_success(workers, capsys):
    line = refused("tests.graded.right", workers, capsys, only="zzz")
    assert line == "grade: error: --only zzz: no check of levels 1 to 2 has that in its name"


def test_a_process_that_a_package_leaves_is_ended_and_told_of(monkeypatch):
    monkeypatch.setenv("LEFT_BY", "forks")  # it inherits this
    came, lines = graded("tests.graded.forks", "--levels", "1", "--only", "one parameter")
    assert came == 1 and lines[-2:] == [
        "  FAILED    nothing goes on after the ranks have ended",
        "  came      the package has left 1 of its processes running; they have been ended"], lines
    assert not left_over.marked("LEFT_BY=forks")


def test_a_stage_may_be_a_number_a_name_or_a_path():
    assert package_of("3") == STAGES[2]
    assert package_of(f"{HERE.replace('/', '.')}.right") == package_of(f"{HERE}/right.py") == "tests.graded.right"
    with pytest.raises(SystemExit):
        package_of("7")


# ------------------------------------------------------------------------------- docs/exercise.md, make exercise


DOCS = (ROOT / "docs" / "exercise.md").read_text(encoding="utf-8")


@pytest.fixture
def exercise(tmp_path, monkeypatch):
    """-> a function: what `make exercise` writes, as a package that ranks can import; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def exercise(what):
        skeleton.write(what, tmp_path / f"mine_{what}")
        return f"mine_{what}"
    return exercise


@pytest.mark.parametrize("stage", skeleton.EMPTY)
def test_an_empty_exercise_is_told_what_to_fill_in(grade, exercise, stage):
    """Each of its functions says so itself, in a line."""
    number = stage.removeprefix("stage")[0]
    name, expected, came, *_, cause = complaint(grade(exercise(number)))
    assert name == ("ranges_in_shard by hand" if number == "3" else BY_HAND) and expected == NO_EXCEPTION
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


@pytest.mark.parametrize("name", variants.CASES)
def test_a_wrong_variant_is_told_so(package, workers, capsys, name):
    right, wrong, checks = WRONG_VARIANTS[name]
    folder = Path(package(f"wrong_{name}", ROOT / "variants"))
    code = (ROOT / f"{variant_of_ours(name).replace('.', '/')}.py").read_text(encoding="utf-8")
    assert code.count(right) == 1
    Path(sys.path[0], folder, f"{name}.py").write_text(code.replace(right, wrong), encoding="utf-8")
    assert passes(name, Grader(f"wrong_{name}.{name}", workers)) is False
    name_of_check, *_ = complaint(capsys.readouterr().out)
    assert name_of_check in checks


@pytest.mark.parametrize("name", ["wire16", "chained"])
def test_a_variant_that_is_not_written_yet_is_told_what_to_fill_in(workers, capsys, exercise, name):
    assert passes(name, Grader(f"{exercise('variants')}.{name}", workers)) is False
    assert "RuntimeError: fill in " in capsys.readouterr().out


def test_every_variant_is_an_exercise():
    assert {path.removesuffix(".py") for path, asked in skeleton.VARIANTS.items() if asked} == variants.CASES.keys()
    assert {path.stem for path in (ROOT / "variants").glob("[a-z]*.py")} == (variants.CASES.keys() - {"chained"}) | {
        "by_bucket"}


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


def test_ranges_in_shard_is_checked_by_hand_before_anything_is_built_on_it(package, workers, grade):
    name = package("wrong_ranges", ROOT / STAGES[2])
    path = Path(sys.path[0], name, "buffer.py")
    code = path.read_text(encoding="utf-8")
    assert code.count("start - shard_start)") == 1
    path.write_text(code.replace("start - shard_start)", "start)"), encoding="utf-8")
    assert complaint(grade(f"{name}.optimizer")) == [
        "ranges_in_shard by hand",
        "expected  of 3, 5, 2 elements at 0, 4, 12, in shard 8 to 16: (index, start, stop, offset) = (1, 4, 5, 0), "
        "(2, 0, 2, 4)", "came      (1, 4, 5, 8), (2, 0, 2, 12)",
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
    name = package(f"prediction_{number}", ROOT / folder)
    path = Path(sys.path[0], name, file)
    code = path.read_text(encoding="utf-8")
    assert code.count(before) == 1, f"{folder}/{file} has not, or more than once:\n{before}"
    path.write_text(code.replace(before, after), encoding="utf-8")
    one = Grader(f"{name}.optimizer", workers)
    _ = passes(1, one, only) and passes(2, one, only)
    printed = capsys.readouterr().out
    assert all(line in printed for line in answer), printed
