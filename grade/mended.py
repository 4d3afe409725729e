"""Says whether a drill is mended, and until then gives a hint: the report, the check, the state; never the line."""

import re

import torch

from grade import drills
from grade.grader import Wrong, first_wrong
from grade.levels import LAYERS, LEVELS, Check
from grade.runs import Run, flat, play

SHOWN_BY = {2: "the check that sees it", 3: "the state to look at"}  # number of a hint -> what


def follows_loaded(grader):
    """Check that a step of bfloat16 parameters starts from weights that were loaded after the constructor."""
    run = Run(dtype=torch.bfloat16, reloads=True, steps=1)
    loaded = flat(run.model(100).parameters())
    for rank, seen in enumerate(grader.run(2, play, run)):
        far = (seen.snapshots[-1] - loaded).abs().max().item()
        first_wrong([(far > 0.1, "after a step of lr 0.1 no weight is further than 0.1 from what was loaded",
                      f"{far:.2g} on rank {rank}")])


def overlaps(grader):
    """Check that at the last gradient some message is in flight for which nobody has waited yet."""
    in_flight = grader.run(2, play, LAYERS)[0].n_in_flight
    first_wrong([(not in_flight, "some messages are in flight when the last gradient is computed", "none is")])
    return [f"in flight  {in_flight} messages when the last gradient is computed"]


FURTHER = {7: Check("weights that are loaded after the constructor are trained", follows_loaded),
           8: Check("gradients are in flight while the backward pass computes", overlaps)}


def checks_of(number, grader):
    """-> all checks that a mended drill passes: first the one that sees its fault."""
    checks = [check for _, level in LEVELS.values() for check in level
              if (not check.fact or getattr(grader.facts, check.fact))]
    if number in FURTHER:
        checks.append(FURTHER[number])
    return sorted(checks, key=lambda check: check.name != drills.drills()[number].check)


def grade(grader, number, hint):
    """Print whether the drill is mended, or a hint; never the line -> whether it is."""
    drill = drills.drills()[number]
    print(f"Grading drill {number}: {drill.title}", flush=True)
    for check in checks_of(number, grader):
        try:
            check.function(grader)
        except Wrong as wrong:
            lines = [f"  {what:9} {line}" for what, line in hints(drill, check, wrong, hint)]
            print("\n".join(["  not yet", *lines]), flush=True)
            return False
    print(f"ok drill {number}: mended\n\n{drill.answer}")
    return True


def hints(drill, check, wrong, hint):
    """-> (what, line) of a drill that isn't mended: no cause, unless another check fails than the drill's own."""
    if check.name != drill.check:
        return [("report", "what it tells of is gone, and another check fails"), ("check", check.name), *wrong.lines]
    lines = [("report", drill.report)]
    if hint >= 2:
        seen = [(what, re.sub(r" \(\S+:\d+\)", "", line)) for what, line in wrong.lines if what != "cause"]
        lines += [("check", check.name), *(pair for pair in seen if not pair[1].startswith("in "))]
    if hint >= 3:
        return [*lines, ("state", drill.state)]
    return [*lines, ("hint", f"ARGS='--hint {hint + 1}' shows {SHOWN_BY[hint + 1]}; ARGS=--answer shows the answer")]
