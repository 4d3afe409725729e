"""Grades a sharded optimizer of your own, in three levels; the first check that fails ends it, with the likely cause.

    make grade STAGE=my_package      a package or a module in the current folder; STAGE=3: a stage of this repository

Level 1, it trains: by hand, like one process, state 1/d, what it sends. Level 2, it is an optimizer: groups,
schedulers, accumulation, clipping, saving. Level 3, the whole contract: tests/stages/test_contract.py; of a core,
which is a ShardedOptimizer and no DistributedOptimizer, tests/stages/test_cores.py. A module called as one of variants/
is, STAGE=mine.wire16, is compared with that one: grade/variants.py. STAGE=mine.ring is exercise 0. A drill, which make
exercise STAGE=drill1 writes, is told right, or a hint; --hint 2, --hint 3 and --answer say more.
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

from grade import collective, contract, drills, left_over, mended, variants
from grade.grader import UNKNOWN, Grader, Wrong, shorten
from grade.levels import LEVELS
from harness import STAGES

SHOW = contract.ROOT / "show"  # the recorder of a step, where there is one
RING = "ring"  # the module of exercise 0
N_PRINTED = 4  # lines that are shown of what the ranks have printed
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


def checks_of(level, grader, only):
    """-> (title, checks) of a number, of exercise 0 or of a variant: those for this class with `only` in their name."""
    title, checks = {**LEVELS, RING: collective.LEVEL}.get(level) or variants.level(level)
    return title, [check for check in checks
                   if only in check.name and (not check.fact or getattr(grader.facts, check.fact))]


def passes(level, grader, only=""):
    """Run the checks of `level` whose name has `only` in it, and print a line for each.

    -> whether all have passed; None where it is a class of level 1 alone.
    """
    title, checks = checks_of(level, grader, only)
    if checks:
        print(f"\n{title}")
    for check in checks:
        grader.run_under_way = None
        grader.printed.clear()
        try:
            notes = check.function(grader) or []
        except Wrong as wrong:
            if check.name == "its methods" and not grader.facts.is_optimizer:
                asked = dict(wrong.lines)["expected"]
                print(f"  not yet   level 2 wants {asked}\n            docs/exercise.md has its skeleton", flush=True)
                return None
            lines = [f"  {what:9} {line}" for what, line in [*wrong.lines, *further(grader, check, wrong)]]
            print("\n".join([f"  FAILED    {check.name}", *lines]), flush=True)
            return False
        print("\n            ".join([f"  ok        {check.name}", *notes]), flush=True)
    if checks and not only:
        print(f"ok {title.lower()}", flush=True)
    return True


def further(grader, check, wrong):
    """-> (what, line): what the ranks have printed, shortened, and how to go on."""
    for line in grader.printed[-N_PRINTED:]:
        yield "printed", shorten(line)
    if len(grader.printed) > N_PRINTED:
        yield "", f"{len(grader.printed) - N_PRINTED} lines before these"
    run, *d = grader.run_under_way or [None]
    if SHOW.is_dir() and run and wrong.step and (options := run.shown_by(*d, wrong.step)):
        yield "see", f'make show STAGE={grader.package} ARGS="{options}"'
    if ("cause", UNKNOWN) in wrong.lines:
        yield "next", ("print each gradient before and after it is averaged, and each parameter before and after the "
                       "inner step")
        yield "", f"""make grade STAGE={grader.package} ARGS='--only "{check.name}"' shows what it prints"""


def grade(grader, args, for_pytest):
    """-> whether everything that was asked for has passed."""
    try:
        facts = grader.facts
    except Wrong as wrong:
        came = " ".join(line for what, line in wrong.lines if what in ("came", ""))
        sys.exit(f"grade: error: {grader.package} can't be imported and looked at: {came}")
    if number := drills.number_of(grader.package):
        return mended.grade(grader, number, args.hint)
    module = grader.package.rpartition(".")[2]
    is_module = module in variants.CASES or module == RING
    levels = [module] if is_module else [level for level in (1, 2) if level <= args.levels]
    if not any(checks_of(level, grader, args.only)[1] for level in levels):
        sys.exit(f"grade: error: --only {args.only}: no check of levels {levels[0]} to {levels[-1]} has that in its "
                 "name")
    print(f"Grading {f'{facts.name} of ' if facts.name else ''}{grader.package}", flush=True)
    for level in levels:
        verdict = passes(level, grader, args.only)
        if not verdict:
            return verdict is None  # it passes level 1, and has not begun level 2
    if args.levels == 3 and not args.only and not is_module and not args.ddp:
        grader.close()
        return contract.holds(grader.package, for_pytest, facts.is_core)
    return True


def main():
    parser = command_line.Parser("grade", __doc__)
    parser.add_argument("stage", help="1 to 4, or the name of a package or module in the current folder")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks with TEXT in their name, of levels 1 and 2")
    parser.add_argument("--levels", type=int, choices=[1, 2, 3], default=3, help="up to this one (default 3)")
    parser.add_argument("--ddp", action="store_true", help="a class Sharded, which only shards, beside torch's DDP")
    parser.add_argument("--hint", type=int, choices=[1, 2, 3], default=1, help="of a drill: the report, the check, the "
                        "state (default 1)")
    parser.add_argument("--answer", action="store_true", help="of a drill: what it was, and where")
    args, for_pytest = parser.parse_known_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU, on every machine
    sys.path.insert(0, os.getcwd())
    package = package_of(args.stage)
    if args.answer:
        print(drills.answer(drills.number_of(package) or fail(f"STAGE={args.stage}: --answer is for a drill")))
        return 0
    grader = Grader(package, beside_ddp=args.ddp)
    with left_over.ended() as left:
        try:
            is_right = grade(grader, args, for_pytest)
        finally:
            grader.close()
    if left:
        print(f"  FAILED    nothing goes on after the ranks have ended\n"
              f"  came      the package has left {len(left)} of its processes running; they have been ended")
    return 0 if is_right and not left else 1


if __name__ == "__main__":
    sys.exit(main())
