"""Prints the verdict on a package, check by check or as a drill, and the learner's next command.

A drill is a stage with a fault that the learner has to find: see grade/exercises.py.
"""

import re
import sys

from grade import collective, contract, exercises
from grade.grader import Wrong, shorten
from grade.levels import CHECKS_OF_DRILLS, LEVELS, Check
from harness import STAGES

RING = "ring"  # the module of exercise 0, and in place of a level its name
REPORTED = "The report"  # the title under which a drill's own check is run
N_PRINTED = 4  # lines of the ranks' output that are shown


def say(*lines):
    """Print lines, each given as (first word, rest)."""
    print("\n".join(f"  {word:9} {rest}".rstrip() for word, rest in lines), flush=True)


def checks_of(level, grader, only=""):
    """Return (title, checks) of a level or of exercise 0: the checks for this class that have `only` in their name."""
    if level == 3:
        title, checks = contract.level()
    elif level == RING:
        title, checks = collective.LEVEL
    else:
        title, checks = LEVELS[level]
    return title, [check for check in checks
                   if only in check.name and (not check.fact or getattr(grader.facts, check.fact))]


def passes(level, grader, only=""):
    """Run and print the checks of `level` up to the first that fails; return whether all have passed.

    Return None if the class has the methods of level 1 alone, which is no failure.
    """
    title, checks = checks_of(level, grader, only)
    if checks:
        print(f"\n{title}", flush=True)
    for check in checks:
        outcome = grader.outcome(check)
        if not isinstance(outcome, Wrong):
            say(("ok", check.name), *[("", line) for line in outcome])
        elif check.name == "its methods" and not grader.facts.is_optimizer:
            say(("not yet", f"level 2 wants {outcome.expected}"),
                ("", "docs/exercise.md has its skeleton"))
            return None
        else:
            say(("FAILED", check.name), *outcome.lines, *lines_printed(grader))
            return False
    if checks and not only:
        print(f"ok {title.lower()}", flush=True)
    return True


def lines_printed(grader):
    """Yield (first word, line) for the latest lines that the ranks have printed."""
    for line in grader.printed[-N_PRINTED:]:
        yield "printed", shorten(line)
    if len(grader.printed) > N_PRINTED:
        yield "", f"{len(grader.printed) - N_PRINTED} lines before these"


def mends(number, grader, hint):
    """Print whether a drill is mended, or a hint (1 to 3: how much it says); return whether the drill is mended.

    The check that sees the fault runs first, under another name, because its own name would be a hint.
    """
    drill = exercises.drills()[number]
    print(f"Drill {number}: {drill.title}", flush=True)
    levels = [checks_of(level, grader) for level in LEVELS]
    functions = {check.name: check.function for _, checks in [("", CHECKS_OF_DRILLS), *levels] for check in checks}
    for title, checks in [(REPORTED, [Check("the fault", functions[drill.check])]), *levels]:
        print(f"  {title} …", flush=True)
        for check in checks:
            outcome = grader.outcome(check)
            if isinstance(outcome, Wrong):
                say(("not yet", ""))
                if title == REPORTED:
                    say(*hints(drill, outcome, hint))
                else:
                    say(("report", "the fault is gone, and another check fails"), ("check", check.name),
                        *outcome.lines)
                return False
    print(f"ok drill {number}: mended\n\n{drill.answer}")
    return True


def hints(drill, wrong, hint):
    """Return [(first word, line), …] about a drill that isn't mended. The likely cause stays hidden."""
    lines = [("report", drill.report)]
    if hint >= 2:
        lines.append(("check", drill.check))
        for word, line in wrong.lines:
            if word != "cause" and not line.startswith("in "):  # a line "in mine.py:31" would show the place
                lines.append((word, re.sub(r" \(\S+:\d+\)", "", line)))  # and so would "(mine.py:31)"
    if hint >= 3:
        return [*lines, ("state", drill.state)]
    shown = "the state to look at" if hint == 2 else "the check that sees it"
    return [*lines, ("hint", f"ARGS='--hint {hint + 1}' shows {shown}; ARGS=--answer shows the answer")]


def what_next(grader, left_out=None):
    """Return the next thing to do after a right verdict: grade the level that was `left_out`, or go on."""
    package = grader.package
    number = exercises.number_of_drill(package)
    stage = grader.facts.exercise_of  # "" if the package isn't an exercise
    if number in exercises.drills() and number + 1 in exercises.drills():
        return f"rm -rf {package} && make exercise STAGE=drill{number + 1} TO={package}"
    if number:
        return "that was the last drill; docs/incidents.md has the reports of these faults, and further ones"
    if left_out:
        return f"make grade STAGE={package}, for level {left_out} was left out"
    if package.endswith(f".{RING}"):
        return f"the chapter {STAGES[0]}/README.md, then its exercise"
    if stage == STAGES[0]:
        return f"three other designs, docs/exercise.md#three-right-ways-to-do-it, then {STAGES[1]}/README.md"
    if stage in STAGES[:-1]:
        return f"the chapter {STAGES[STAGES.index(stage) + 1]}/README.md, then its exercise"
    return "find a fault in a stage: make exercise STAGE=drill1 TO=drill"


def grade(grader, args):
    """Print the verdict; return whether all levels that were asked for have passed.

    Return None if level 1 has, and the class hasn't the methods of level 2 yet.
    """
    try:
        facts = grader.facts
    except Wrong as wrong:
        came = wrong.came.replace("\n", " ")
        print(f"grade: error: {grader.package} can't be imported and looked at: {came}", file=sys.stderr)
        return False
    number = exercises.number_of_drill(grader.package)
    last_level = 3 if facts.is_whole else 2
    is_ring = grader.package.endswith(f".{RING}")
    levels = [RING] if is_ring else range(1, min(args.levels, last_level) + 1)
    if number:
        is_right = mends(number, grader, args.hint)
    elif args.only and not any(checks_of(level, grader, args.only)[1] for level in levels):
        print(f"grade: error: --only {args.only}: no check of levels {levels[0]} to {levels[-1]} has that in its name",
              file=sys.stderr)
        return False
    else:
        if facts.name:
            print(f"The class is {facts.name}", flush=True)
        is_right = True
        for level in levels:
            is_right = passes(level, grader, args.only)
            if not is_right:
                break
    if is_right and not args.only:
        is_cut_short = not is_ring and args.levels < last_level
        say(("", ""), ("next", what_next(grader, args.levels + 1 if is_cut_short else None)))
    return is_right
