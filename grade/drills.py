"""Drills: a stage with one fault in it, and a report of what it does. drills.md has them, and the incidents they are.

    make exercise STAGE=drill3 TO=mine; make grade STAGE=mine
"""

import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

from harness.take import ROOT, files_of

REPORT = "REPORT.md"  # in the package of a drill: by its first line the grader knows which one it is


class Drill(NamedTuple):
    """A drill of drills.md, with its texts."""

    title: str
    stage: str
    is_guarded: bool
    report: str
    check: str  # name of the check that sees it
    state: str
    answer: str
    file: str  # in the package
    before: str
    after: str


@functools.cache
def drills():
    """-> {number: Drill}, as drills.md has them."""
    sections = re.split(r"^## Drill ", Path(__file__).with_name("drills.md").read_text(encoding="utf-8"),
                        flags=re.MULTILINE)[1:]
    return {int(section.partition(":")[0]): parsed(section) for section in sections}


def parsed(section):
    title = section.splitlines()[0].partition(": ")[2]
    report, check, state, answer = (" ".join(re.search(rf"^{name}: (.*?)\n\n", section, re.DOTALL | re.MULTILINE)[1]
                                             .split()) for name in ("Report", "Check", "State", "Answer"))
    path, stage, diff = re.search(r"```diff\n--- (\S+) ?(\S*)\n(.*?)```", section, re.DOTALL).groups()
    before, after = ("".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in signs)
                     for signs in (" -", " +"))
    file = path if path.startswith("guard/") else Path(path).name
    return Drill(title, stage or Path(path).parent.name, bool(stage), report, check, state, answer, file, before, after)


def files(number):
    """-> path in the package -> text, of the stage with the fault in it.

    Raises ValueError: there is no such drill, or the stage's text has changed, so that the edit finds no place.
    """
    if number not in drills():
        raise ValueError(f"STAGE=drill{number}: there are drills 1 to {len(drills())}")
    drill = drills()[number]
    package = files_of(drill.stage, with_checkpoint=False)
    if not drill.is_guarded:
        core = [path.name for path in (ROOT / drill.stage).glob("*.py")
                if path.name in ("optimizer.py", "buffer.py", "transport.py")]
        package = {"__init__.py": "", **{name: package[name] for name in core}}
    if package[drill.file].count(drill.before) != 1:
        raise ValueError(f"drill {number}: {drill.file} of {drill.stage} has changed, write its edit in drills.md anew")
    package[drill.file] = package[drill.file].replace(drill.before, drill.after)
    return {**package, REPORT: f"# Drill {number}: {drill.title}\n\n{drill.report}\n"}


def number_of(package):
    """-> the number of the drill that a package is, None of another one. Nothing of it is run."""
    for folder in sys.path:
        report = Path(folder, *package.split("."), REPORT)
        if report.is_file() and (found := re.match(r"# Drill (\d+)", report.read_text(encoding="utf-8"))):
            return int(found[1])
    return None


def answer(number):
    drill = drills()[number]
    return f"{drill.answer}\n\n{drill.stage}, {drill.file}: in place of\n\n{drill.before}\nit has\n\n{drill.after}"
