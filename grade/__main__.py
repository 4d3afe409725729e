"""Grades a sharded optimizer of your own, in three levels; the first check that fails ends it, with the likely cause.

    make grade STAGE=my_package      a package or a module in the current folder; STAGE=3: a stage of this repository

Level 1, it trains: by hand, like one process, state 1/d, what it sends. Level 2, it is an optimizer: groups,
schedulers, accumulation, clipping, saving. Level 3, the whole contract: tests/stages/test_contract.py; of a core, a
ShardedOptimizer without a DistributedOptimizer, tests/stages/test_cores.py. STAGE=mine.ring is exercise 0.
STAGE=mine.wire16 is compared with our variant of that name. What make exercise STAGE=drill1 writes is told right, or a
hint. docs/exercise.md has the interface that each level asks for, and exercises. Other options go to level 3's pytest.
Exit code: 0; 1 when a check fails, or none could be made; 2 when there is nothing to grade.
"""

import functools
import os
import re
import sys
from pathlib import Path

from harness.ranks import command_line

if __name__ == "__main__":
    command_line.begin()

from grade import collective, contract, exercises, variants
from grade.grader import UNKNOWN, Grader, Wrong, processes_ended, say, shorten
from grade.levels import LEVELS, OF_DRILLS, Check
from harness import STAGES

RING = "ring"  # the module of exercise 0
REPORTED = "The report"  # the title under which a drill's own check is run
N_PRINTED = 4  # lines that are shown of what the ranks have printed
fail = functools.partial(command_line.fail, "grade")


def package_of(stage):
    """Return the name of a package: that of a stage's number, or `stage` itself. Nothing of it is run."""
    if stage.isdecimal():
        return next((name for name in STAGES if name.startswith(f"stage{stage}_")), None) or fail(
            f"STAGE={stage}: there are stages 1 to {len(STAGES)}")
    parts = stage.removesuffix("/").removesuffix(".py").replace("/", ".").split(".")
    paths = [Path(folder, *parts) for folder in sys.path if all(map(str.isidentifier, parts))]
    if not any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths):
        fail(f"STAGE={stage}: no package or module of that name in {Path.cwd().name}/")
    return ".".join(parts)


def checks_of(level, grader, only=""):
    """Return (title, checks) of a level, of exercise 0 or of a variant: those for this class, `only` in the name."""
    title, checks = {**LEVELS, RING: collective.LEVEL}.get(level) or variants.level(level)
    return title, [check for check in checks
                   if only in check.name and (not check.fact or getattr(grader.facts, check.fact))]


def passes(level, grader, only=""):
    """Run and print the checks of `level` -> whether all have passed; None where it is a class of level 1 alone."""
    title, checks = checks_of(level, grader, only)
    if checks:
        print(f"\n{title}", flush=True)
    for check, outcome in grader.outcomes(title, checks):
        if not isinstance(outcome, Wrong):
            say(("ok", check.name), *(("", line) for line in outcome))
        elif check.name == "its methods" and not grader.facts.is_optimizer:
            say(("not yet", f"level 2 wants {dict(outcome.lines)['expected']}"),
                ("", "docs/exercise.md has its skeleton"))
            return None
        else:
            say(("FAILED", check.name), *outcome.lines, *further(grader, check, outcome))
            return False
    if checks and not only:
        print(f"ok {title.lower()}", flush=True)
    return True


def further(grader, check, wrong):
    """Return (what, line): what the ranks have printed, shortened, and how to go on."""
    for line in grader.printed[-N_PRINTED:]:
        yield "printed", shorten(line)
    if len(grader.printed) > N_PRINTED:
        yield "", f"{len(grader.printed) - N_PRINTED} lines before these"
    run, *d = grader.run_under_way or [None]
    if (contract.ROOT / "show").is_dir() and run and wrong.step and (options := run.shown_by(*d, wrong.step)):
        yield "see", f'make show STAGE={grader.package} ARGS="{options}"'
    if ("cause", UNKNOWN) in wrong.lines:
        yield "next", ("print each gradient before and after it is averaged, and each parameter before and after the "
                       "inner step")
        yield "", f"""make grade STAGE={grader.package} ARGS='--only "{check.name}"' shows what it prints"""


def mends(number, grader, hint):
    """Print whether a drill is mended, or a hint -> whether it is. The check that sees the fault is first, unnamed."""
    drill, levels = exercises.drills()[number], [checks_of(level, grader) for level in LEVELS]
    print(f"Grading drill {number}: {drill.title}", flush=True)
    sees = next(check for check in [*OF_DRILLS, *levels[0][1], *levels[1][1]] if check.name == drill.check)
    for title, checks in [(REPORTED, [Check("what is reported", sees.function)]), *levels]:
        if not sys.stderr.isatty():
            print(f"  {title} …", file=sys.stderr, flush=True)
        for check, outcome in grader.outcomes(title, checks):
            if isinstance(outcome, Wrong):
                say(("not yet", ""), *(hints(drill, outcome, hint) if title == REPORTED else [
                    ("report", "what it tells of is gone, and another check fails"), ("check", check.name),
                    *outcome.lines]))
                return False
    print(f"ok drill {number}: mended\n\n{drill.answer}")
    return True


def hints(drill, wrong, hint):
    """Return (what, line) of a drill that isn't mended, and no cause."""
    lines = [("report", drill.report)]
    if hint >= 2:
        came = [(what, re.sub(r" \(\S+:\d+\)", "", line)) for what, line in wrong.lines if what != "cause"]
        lines += [("check", drill.check), *(pair for pair in came if not pair[1].startswith("in "))]
    if hint >= 3:
        return [*lines, ("state", drill.state)]
    shown = "the state to look at" if hint == 2 else "the check that sees it"
    return [*lines, ("hint", f"ARGS='--hint {hint + 1}' shows {shown}; ARGS=--answer shows the answer")]


def what_next(grader):
    """Return what a learner does after a right verdict: the next drill, or the chapter after an exercise."""
    package, number, stage = grader.package, exercises.number_of_drill(grader.package), grader.facts.exercise_of
    if number in exercises.drills() and number + 1 in exercises.drills():
        return f"rm -rf {package} && make exercise STAGE=drill{number + 1} TO={package}"
    if number:
        return "that was the last drill; docs/incidents.md has the reports of these faults, and further ones"
    if stage in STAGES[:-1]:
        return f"the chapter {STAGES[STAGES.index(stage) + 1]}/README.md, then its exercise"
    return "find a fault in a stage: make exercise STAGE=drill1 TO=drill"


def grade(grader, args, for_pytest):
    """Return whether everything that was asked for has passed; None where level 2 has not begun."""
    try:
        facts = grader.facts
    except Wrong as wrong:
        came = " ".join(line for what, line in wrong.lines if what in ("came", ""))
        sys.exit(f"grade: error: {grader.package} can't be imported and looked at: {came}")
    if number := exercises.number_of_drill(grader.package):
        return mends(number, grader, args.hint)
    module = grader.package.rpartition(".")[2]
    is_module = module in variants.CASES or module == RING
    levels = [module] if is_module else [level for level in LEVELS if level <= args.levels]
    if not any(checks_of(level, grader, args.only)[1] for level in levels):
        sys.exit(f"grade: error: --only {args.only}: no check of levels {levels[0]} to {levels[-1]} has that in its "
                 "name")
    print(f"Grading {f'{facts.name} of ' if facts.name else ''}{grader.package}", flush=True)
    for level in levels:
        if not (verdict := passes(level, grader, args.only)):
            return verdict
    if args.levels == 3 and not args.only and not is_module and not args.ddp:
        grader.close()
        return contract.holds(grader.package, for_pytest, facts.is_core)
    return True


def main():
    parser = command_line.Parser("grade", __doc__)
    parser.add_argument("stage", help=f"1 to {len(STAGES)}, or the name of a package or module in the current folder")
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
        number = exercises.number_of_drill(package) or fail(f"STAGE={args.stage}: --answer is for a drill")
        print(exercises.answer(number))
        return 0
    grader = Grader(package, beside_ddp=args.ddp)
    with processes_ended() as left:
        try:
            is_right = grade(grader, args, for_pytest)
        finally:
            grader.close()
    if left:
        say(("FAILED", "nothing goes on after the ranks have ended"), (
            "came", f"the package has left {len(left)} of its processes running; they have been ended"))
    elif is_right and not args.only:
        say(("", ""), ("next", what_next(grader)))
    return 1 if left or is_right is False else 0


if __name__ == "__main__":
    sys.exit(main())
