"""Writes an exercise or a drill as a package for a learner, who fills in bodies, or looks for the fault.

    make exercise STAGE=3 TO=mine            (STAGE=0, STAGE=drill1)

A stage is one of the four optimizers of this repository. Its core is the files with its idea. Its guard is the code
around the core that refuses what the core can't do. An exercise is a core in which the bodies of some functions are
missing: exercises.md lists these functions, each with a hint. Exercise 0 is grade/ring.py. A drill is a copy of a stage
with a fault: drills.md has the fault as a diff, and texts about it.
"""

import ast
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

from harness.publishing.stages import CORE, ROOT, files_of, write_package

REPORT = "REPORT.md"  # a file in the package of a drill, whose first line has the number of the drill


def sections_of(name, heading):
    """Return the sections of the page `name`. A section is the text after a heading that begins with `heading`."""
    page = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return page.split(f"\n{heading}")[1:]


@functools.cache
def bodies():
    """Return {exercise: {path of a file: {function to be filled in: hint}}}, as exercises.md lists them.

    There "## " begins an exercise, "- " a file, and "  - " a function with its hint.
    """
    by_exercise = {}
    for section in sections_of("exercises.md", "## "):
        exercise, *files = section.split("\n- ")
        by_file = {}
        for file in files:
            path, *functions_and_hints = file.split("\n  - ")
            # Each of functions_and_hints is "function: hint".
            by_file[path.strip()] = dict(text.strip().split(": ", 1) for text in functions_and_hints)
        by_exercise[exercise.strip()] = by_file
    return by_exercise


def functions(tree):
    """Return {name: node} for each function of a module, and for each method, whose name is "Class.method".

    tree, node: what ast.parse makes of the source.
    """
    nodes = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            nodes[node.name] = node
        if isinstance(node, ast.ClassDef):
            nodes |= {f"{node.name}.{child.name}": child for child in node.body if isinstance(child, ast.FunctionDef)}
    return nodes


def emptied(path, hints):
    """Return the source in `path` without the bodies of the functions in `hints`; signatures and docstrings stay.

    An error with the hint takes the place of a body. hints: {name of a function or method, or Class.method: hint}.
    """
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines()
    # From the last function to the first, so that the lines above keep their numbers.
    for name, node in reversed(functions(tree).items()):
        short_name = name.split(".")[-1]
        hint = hints.get(short_name) or hints.get(name)
        if hint:
            # Index in `lines` of the body's first line, after the docstring if there is one. Line numbers begin at 1.
            first = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            fill_in = f'raise RuntimeError("fill in {short_name}: {hint}")'
            lines[first : node.end_lineno] = [" " * (node.col_offset + 4) + fill_in]
    if hints:
        n_bodies = f"{len(hints)} {'body' if len(hints) == 1 else 'bodies'}"
        exercise = f"Exercise: fill in {n_bodies}, see docs/exercise.md. The solution is {path}."
        closing_quotes = tree.body[0].end_lineno - 1  # index of the last line of the module's docstring
        lines[closing_quotes:closing_quotes] = ["", exercise]
    return "\n".join(lines) + "\n"


class Drill(NamedTuple):
    """A drill of drills.md: texts for the learner, and the edit that makes the fault."""
    title: str
    report: str  # what a user writes who has met the fault
    check: str  # name of the grader's check that sees the fault
    state: str  # the last hint: which state of the optimizer to look at
    answer: str  # what the fault is
    stage: str  # the stage that is copied
    is_guarded: bool  # whether the copy has the stage's guard, too, or only the core
    file: str  # the file of the copy in which the fault is made
    before: str  # the text of that file in the stage
    after: str  # the text that replaces it, which has the fault


@functools.cache
def drills():
    """Return {number: Drill}, as drills.md has them."""
    by_number = {}
    for section in sections_of("drills.md", "## Drill "):
        number, text = section.split(": ", 1)
        by_number[int(number)] = drill_of(text)
    return by_number


def drill_of(text):
    """Return the Drill of a section of drills.md.

    The diff at its end begins with `--- path stage` if the package gets the stage's guard, too. It begins with
    `--- path` if the package is the core alone; then the path names the stage.
    """
    text, diff = text.split("```diff\n--- ")
    texts = [" ".join(part.split()) for part in re.split(r"\n- (?:Report|Check|State|Answer): ", text)]
    first_line, *lines = diff.splitlines(keepends=True)
    path, *stage = first_line.split()  # `stage` is a list of one name, or of none
    is_guarded = bool(stage)
    # texts: title, report, check, state and answer. A diff's line begins with " " if `before` and `after` both have it,
    # with "-" if only `before` has it, and with "+" if only `after` has it.
    return Drill(*texts, stage[0] if is_guarded else Path(path).parent.name, is_guarded,
                 file=path if path.startswith("guard/") else Path(path).name,
                 before="".join(line[1:] for line in lines if line[0] in " -"),
                 after="".join(line[1:] for line in lines if line[0] in " +"))


def files_of_drill(number):
    """Return {path in the package: text of the file} of a drill.

    Raise ValueError if there is no such drill, or if its stage has changed, so that the text to be edited isn't there.
    """
    if number not in drills():
        raise ValueError(f"STAGE=drill{number}: there are drills 1 to {len(drills())}")
    drill = drills()[number]
    files = files_of(drill.stage, with_checkpoint=False)
    if not drill.is_guarded:
        # CORE: names of files of which a core may consist.
        core = {name: text for name, text in files.items() if name in CORE}
        files = {"__init__.py": "", **core}
    if files[drill.file].count(drill.before) != 1:
        raise ValueError(f"drill {number}: {drill.file} of {drill.stage} has changed, write its edit in drills.md anew")
    files[drill.file] = files[drill.file].replace(drill.before, drill.after)
    return {**files, REPORT: f"# Drill {number}: {drill.title}\n\n{drill.report}\n"}


def number_of_drill(package):
    """Return the number of the drill that `package` is, or None if it is none. The package isn't imported."""
    for folder in sys.path:
        report = Path(folder, *package.split("."), REPORT)
        if report.is_file():
            heading = re.match(r"# Drill (\d+)", report.read_text(encoding="utf-8"))
            if heading:
                return int(heading[1])
    return None


def answer(number):
    """Return the answer of a drill, and the edit that has made its fault."""
    drill = drills()[number]
    return f"{drill.answer}\n\n{drill.stage}, {drill.file}: in place of\n\n{drill.before}\nit has\n\n{drill.after}"


def write(name, to):
    """Write the drill or exercise `name` ("drill1", "3" or "stage3_gradbuffer") into the new folder `to`.

    Raise ValueError if there is no such exercise, or if `to` can't be a new package. Raise OSError if a file can't be
    written.
    """
    if drill := re.fullmatch(r"drill(\d+)", name):
        return write_package(to, files_of_drill(int(drill[1])))
    for exercise, by_file in bodies().items():
        if name in (exercise, exercise[len("stage")]):  # "stage3_gradbuffer", or "3", the character after "stage"
            files = {Path(path).name: emptied(path, hints) for path, hints in by_file.items()}
            return write_package(to, {"__init__.py": "", **files})
    raise ValueError(f"STAGE={name}: there are the exercises 0 to 4, and drill1 to drill8")


def main(name, to):
    """Write the drill or exercise `name` into `to`, and print what is next. Exit with 2 if it can't be written."""
    try:
        write(name, to)
    except (ValueError, OSError) as reason:
        print(f"exercise: {reason}", file=sys.stderr)
        sys.exit(2)
    if name.startswith("drill"):
        print(f"{(to / REPORT).read_text().strip()}\n\nFind it in {to}/, mend it, then make grade STAGE={to}")
    else:
        ring = ".ring" if name == "0" else ""
        print(f"{to}: fill in its bodies, then make grade STAGE={to}{ring}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
