"""Grades a sharded optimizer of your own, in three levels; the first check that fails ends it, with the likely cause.

    make grade STAGE=my_package      a package or a module in the current folder; STAGE=3: a stage of this repository

Level 1, it trains: by hand, like one process, state 1/d, what it sends. Level 2, it is an optimizer: groups,
schedulers, accumulation, clipping, saving. Level 3, the whole contract: tests/stages/test_contract.py; of a core,
which is a ShardedOptimizer and no DistributedOptimizer, tests/stages/test_cores.py. A module called as one of variants/
is, STAGE=mine.wire16, is compared with that one: grade/variants.py.
docs/exercise.md has the interface that each level asks for, and exercises.
Options that are not ours go to level 3's pytest.
Exit code: 0; 1 when a check fails, or none could be made; 2 when there is nothing to grade.
"""

import functools
import os
import sys
from pathlib import Path

from harness import command_line

if __name__ == "__main__":
    command_line.begin()

from grade import contract, left_over, variants
from grade.grader import Grader, Wrong
from grade.levels import LEVELS
from harness import STAGES

SHOW = contract.ROOT / "show"  # the recorder of a step, where there is one
fail = functools.partial(command_line.fail, "grade")


def package_of(stage):
    """-> the name of a package: that of a stage's number, or `stage` itself. Nothing of it is run."""
    if stage.isdecimal():
        return next((name for name in STAGES if name.startswith(f"stage{stage}_")), None) or fail(
            f"STAGE={stage}: there are stages 1 to 4")
    parts = stage.removesuffix("/").removesuffix(".py").replace("/", ".").split(".")
    paths = [Path(folder, *parts) for folder in sys.path if all(map(str.isidentifier, parts))]
    if not any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths):
        fail(f"STAGE={stage}: no package or module of that name in {Path.cwd().name}/")
    return ".".join(parts)


def checks_of(level, one, only):
    """-> (title, [(name, check)]) of a number, or of a variant's name: those for this class with `only` in the name."""
    title, checks = LEVELS[level] if level in LEVELS else variants.level(level)
    return title, [(name, check) for name, check, *facts in checks
                   if only in name and all(getattr(one.facts, fact) for fact in facts)]


def passes(level, one, only=""):
    """Runs the checks of `level` whose name has `only` in it, prints a line for each -> whether all have passed; None
    where it is one of level 1 alone."""
    title, checks = checks_of(level, one, only)
    if checks:
        print(f"\n{title}")
    for name, check in checks:
        one.run_under_way = None
        try:
            notes = check(one) or []
        except Wrong as wrong:
            if name == "its methods" and not one.facts.is_optimizer:
                wants = dict(wrong.lines)["expected"]
                print(f"  not yet   level 2 wants {wants}\n            docs/exercise.md has its skeleton", flush=True)
                return None
            run, *d = one.run_under_way or [None]
            options = run and wrong.step and run.shown_by(*d, wrong.step)
            see = ("see", f'make show STAGE={one.package} ARGS="{options}"')
            print("\n".join([f"  FAILED    {name}", *(f"  {what:9} {line}" for what, line in
                                                      [*wrong.lines, *[see] * bool(options and SHOW.is_dir())])]),
                  flush=True)
            return False
        print("\n            ".join([f"  ok        {name}", *notes]), flush=True)
    if checks and not only:
        print(f"ok {title.lower()}", flush=True)
    return True


def grade(one, args, for_pytest):
    """-> whether everything that was asked for has passed."""
    try:
        facts = one.facts
    except Wrong as wrong:
        came = " ".join(line for what, line in wrong.lines if what in ("came", ""))
        sys.exit(f"grade: error: {one.package} can't be imported and looked at: {came}")
    variant = one.package.rpartition(".")[2]
    levels = [variant] if variant in variants.CASES else [level for level in (1, 2) if level <= args.levels]
    if not any(checks_of(level, one, args.only)[1] for level in levels):
        sys.exit(f"grade: error: --only {args.only}: no check of levels {levels[0]} to {levels[-1]} has that in its "
                 "name")
    print(f"Grading {f'{facts.name} of ' if facts.name else ''}{one.package}", flush=True)
    for level in levels:
        verdict = passes(level, one, args.only)
        if not verdict:
            return verdict is None  # it passes level 1, and has not begun level 2
    if args.levels == 3 and not args.only and variant not in variants.CASES:
        one.close()
        return contract.holds(one.package, for_pytest, facts.is_core)
    return True


def main():
    parser = command_line.Parser("grade", __doc__)
    parser.add_argument("stage", help="1 to 4, or the name of a package or module in the current folder")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks with TEXT in their name, of levels 1 and 2")
    parser.add_argument("--levels", type=int, choices=[1, 2, 3], default=3, help="up to this one (default 3)")
    args, for_pytest = parser.parse_known_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU, on every machine
    sys.path.insert(0, os.getcwd())
    one = Grader(package_of(args.stage))
    with left_over.ended() as left:
        try:
            is_right = grade(one, args, for_pytest)
        finally:
            one.close()
    if left:
        print(f"  FAILED    nothing goes on after the ranks have ended\n"
              f"  came      the package has left {len(left)} of its processes running; they have been ended")
    return 0 if is_right and not left else 1


if __name__ == "__main__":
    sys.exit(main())
