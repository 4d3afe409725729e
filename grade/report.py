"""Prints the verdict on a learner's package, and which command comes next.

A package is graded by checks, in three levels. The verdict lists the checks one by one, and stops at the first that
fails. A stage is one of the four optimizers of this repository (STAGES). But what the learner types as STAGE= in a make
command may be any package. A drill is a copy of a stage with a fault, which the learner has to find and mend
(grade/exercises.py). "report" means the words in which a user reports that fault. For a drill the verdict is that it is
mended, or a hint. In exercise 0 the learner writes a ring: collectives that are made of sends.

A check that fails gives a Wrong, whose `lines` are (first word, rest) of each line to print: what was expected, what
came instead, the likely cause. A Grader runs checks on several processes, the ranks. `grader.facts` describes the
graded class, a whole optimizer or a core. A core has only what training needs, and isn't graded at level 3.
"""

import re
import sys

from grade import collective, contract, exercises
from grade.grader import Wrong, shorten
from grade.levels import CHECKS_OF_DRILLS, LEVELS, Check
from harness import STAGES

RING = "ring"  # the name of exercise 0's module; also passed as `level`, which is else 1, 2 or 3
REPORTED = "The report"  # the heading for the check that detects a drill's fault
N_PRINTED = 4  # how many lines are shown of what the ranks have printed


def say(*lines):
    """Print lines. Each argument is a line: (first word, rest)."""
    print("\n".join(f"  {word:9} {rest}".rstrip() for word, rest in lines), flush=True)


def checks_of(level, grader, only=""):
    """Return (title, Checks) of a level, or of exercise 0 if `level` is RING. Two kinds of checks are left out:

    - checks whose name lacks the text `only`
    - checks that aren't for the graded class: Check.fact names the attribute of grader.facts that must be true; with ""
      the check is for every class
    """
    # Three modules have checks: grade/levels.py for levels 1 and 2, grade/collective.py for exercise 0, and
    # grade/contract.py for level 3, which it makes from tests when it is called.
    if level == 3:
        title, checks = contract.level()
    elif level == RING:
        title, checks = collective.LEVEL
    else:
        title, checks = LEVELS[level]
    return title, [check for check in checks
                   if only in check.name and (not check.fact or getattr(grader.facts, check.fact))]


def passes(level, grader, only=""):
    """Run and print the checks of `level` up to the first that fails. Return whether all have passed.

    Return None at level 2 if the class isn't a torch.optim.Optimizer: then it was written for level 1, which is no
    failure.
    """
    title, checks = checks_of(level, grader, only)
    if checks:
        print(f"\n{title}", flush=True)
    for check in checks:
        outcome = grader.outcome(check)  # a Wrong, or lines to print if the check has passed
        if not isinstance(outcome, Wrong):
            say(("ok", check.name), *[("", line) for line in outcome])
        # The first check of level 2, "its methods", wants a torch.optim.Optimizer.
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
    """Yield lines to print, as (first word, rest): what the ranks have printed last, and how many lines were before."""
    for line in grader.printed[-N_PRINTED:]:
        yield "printed", shorten(line)
    if len(grader.printed) > N_PRINTED:
        yield "", f"{len(grader.printed) - N_PRINTED} lines before these"


def grade_drill(number, grader, hint):
    """Run all checks on drill `number`. Print and return whether it is mended. If not, print a hint (1 to 3).

    The check that detects the drill's fault runs first. It gets the name "the fault", because its own would be a hint.
    """
    drill = exercises.drills()[number]
    print(f"Drill {number}: {drill.title}", flush=True)
    levels = [checks_of(level, grader) for level in LEVELS]  # (title, Checks) of levels 1 and 2
    all_checks = [*CHECKS_OF_DRILLS]  # these belong to no level: each detects a fault that no level is about
    for _, checks in levels:
        all_checks += checks
    # The function of the check that detects the fault; a Check's function has its settings bound (functools.partial).
    detect_fault = next(check.function for check in all_checks if check.name == drill.check)
    for title, checks in [(REPORTED, [Check("the fault", detect_fault)]), *levels]:
        print(f"  {title} …", flush=True)
        for check in checks:
            outcome = grader.outcome(check)
            if isinstance(outcome, Wrong):  # the check has failed
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
    """Return lines to print, as (first word, rest), about a drill that isn't mended.

    wrong: the failure of the check that detects the fault. hint: 1 shows a user's report of the fault, 2 also the
    check, 3 also which state of the optimizer to look at. The likely cause stays hidden.
    """
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
    """Return what a learner does next, when all checks have passed: a sentence or a command.

    left_out: the first level that --levels has left out, or None.
    """
    package = grader.package
    number = exercises.number_of_drill(package)  # None if the package isn't a drill
    solution = grader.facts.exercise_of  # the stage that solves the exercise; "" if the package isn't an exercise
    if number and number + 1 in exercises.drills():
        return f"rm -rf {package} && make exercise STAGE=drill{number + 1} TO={package}"
    if number:
        return "that was the last drill; docs/incidents.md has the reports of these faults, and further ones"
    if left_out:  # "for" means "because"
        return f"make grade STAGE={package}, for level {left_out} was left out"
    if package.endswith(f".{RING}"):
        return f"the chapter {STAGES[0]}/README.md, then its exercise"
    if solution == STAGES[0]:
        return f"three other designs, docs/exercise.md#three-right-ways-to-do-it, then {STAGES[1]}/README.md"
    if solution in STAGES[:-1]:
        return f"the chapter {STAGES[STAGES.index(solution) + 1]}/README.md, then its exercise"
    return "find a fault in a stage: make exercise STAGE=drill1 TO=drill"


def grade(grader, args):
    """Print the verdict, and what is next. Return whether all levels that were asked for have passed.

    Return None if level 1 has passed, and the class isn't written for level 2. args: the options of grade/__main__.py:
    `levels` is the last level to grade, `only` is a part of names of checks ("" for all), `hint` is for drills.
    """
    try:
        facts = grader.facts
    except Wrong as wrong:  # the import of the package raises an error, ends its process or hangs
        came = wrong.came.replace("\n", " ")
        print(f"grade: error: {grader.package} can't be imported and looked at: {came}", file=sys.stderr)
        return False
    number = exercises.number_of_drill(grader.package)
    last_level = 3 if facts.is_whole else 2  # a core isn't graded at level 3
    is_ring = grader.package.endswith(f".{RING}")
    levels = [RING] if is_ring else range(1, min(args.levels, last_level) + 1)
    if number:  # a drill, which ignores `only`
        is_right = grade_drill(number, grader, args.hint)
    # No check has `only` in its name. checks_of returns (title, Checks).
    elif args.only and not any(checks_of(level, grader, args.only)[1] for level in levels):
        print(f"grade: error: --only {args.only}: no check of levels {levels[0]} to {levels[-1]} has that in its name",
              file=sys.stderr)
        return False
    else:
        if facts.name:
            print(f"The class is {facts.name}", flush=True)
        is_right = True
        for level in levels:
            is_right = passes(level, grader, args.only)  # True, False, or None: see passes
            if not is_right:
                break
    if is_right and not args.only:
        is_cut_short = not is_ring and args.levels < last_level
        say(("", ""), ("next", what_next(grader, args.levels + 1 if is_cut_short else None)))
    return is_right
