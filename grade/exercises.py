"""Writes an exercise or a drill as a package.

An exercise is a core without the bodies that exercises.md lists. A drill is a stage with a fault of drills.md.

    make exercise STAGE=3 TO=mine            (STAGE=0, STAGE=drill1)
"""

import ast
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

from harness.publishing.stages import CORE, ROOT, files_of, write_package

REPORT = "REPORT.md"  # a file in the package of a drill, whose first line has the number of the drill


@functools.cache
def bodies():
    """Return {exercise: {file: {function to be filled in: hint}}}, as exercises.md lists them."""
    of_exercises = {}
    for line in Path(__file__).with_name("exercises.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            of_files = {}
            of_exercises[line.removeprefix("## ")] = of_files
        elif line.startswith("- "):
            of_functions = {}
            of_files[line.removeprefix("- ")] = of_functions
        elif line.startswith("  - "):
            name, _, hint = line.removeprefix("  - ").partition(": ")
            of_functions[name] = hint
    return of_exercises


def functions(tree):
    """Return {name: node} of each function of a module, and of each method as "Class.method"."""
    nodes = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            nodes[node.name] = node
        if isinstance(node, ast.ClassDef):
            nodes |= {f"{node.name}.{child.name}": child for child in node.body if isinstance(child, ast.FunctionDef)}
    return nodes


def emptied(path, hints):
    """Return the source in `path` without the bodies of the functions in `hints`; signatures and docstrings stay.

    hints: {name of a function, or Class.method: hint}.
    """
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines()
    # From the last function to the first, so that the lines above keep their numbers.
    for name, node in sorted(functions(tree).items(), key=lambda pair: pair[1].lineno, reverse=True):
        short = name.split(".")[-1]
        hint = hints.get(short) or hints.get(name)
        if hint:
            first = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            fill_in = f'raise RuntimeError("fill in {short}: {hint}")'
            lines[first : node.end_lineno] = [" " * (node.col_offset + 4) + fill_in]
    if hints:
        bodies_text = f"{len(hints)} {'body' if len(hints) == 1 else 'bodies'}"
        exercise = f"Exercise: fill in {bodies_text}, see docs/exercise.md. The solution is {path}."
        closing_quotes = tree.body[0].end_lineno - 1  # index of the last line of the module's docstring
        lines[closing_quotes:closing_quotes] = ["", exercise]
    return "\n".join(lines) + "\n"


class Drill(NamedTuple):
    """A drill of drills.md: its texts, and its edit of a file in the package of a stage."""
    title: str
    report: str
    check: str  # name of the check that sees the fault
    state: str
    answer: str
    stage: str
    is_guarded: bool
    file: str
    before: str
    after: str


@functools.cache
def drills():
    """Return {number: Drill}, as drills.md has them."""
    text = Path(__file__).with_name("drills.md").read_text(encoding="utf-8")
    return {int(number): parsed(section) for number, section in re.findall(
        r"^## Drill (\d+): (.*?```)\n(?=\n##|\Z)", text, re.MULTILINE | re.DOTALL)}


def parsed(section):
    """Return the Drill of a section of drills.md.

    Its diff begins with `--- path stage` if the package has the stage's guard, or with `--- path` for a bare core.
    """
    text, path, stage, diff = re.fullmatch(r"(.*)```diff\n--- (\S+) ?(\S*)\n(.*)```", section, re.DOTALL).groups()
    title, *texts = (" ".join(part.split()) for part in re.split(r"\n- (?:Report|Check|State|Answer): ", text))
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    file = path if path.startswith("guard/") else Path(path).name
    is_guarded = bool(stage)
    return Drill(title, *texts, stage or Path(path).parent.name, is_guarded, file, before, after)


def files_of_drill(number):
    """Return {path in the package: text} of a drill. Raise ValueError if the stage hasn't the code that it edits."""
    if number not in drills():
        raise ValueError(f"STAGE=drill{number}: there are drills 1 to {len(drills())}")
    drill = drills()[number]
    package = files_of(drill.stage, with_checkpoint=False)
    if not drill.is_guarded:
        package = {"__init__.py": "", **{name: package[name] for name in CORE if name in package}}
    if package[drill.file].count(drill.before) != 1:
        raise ValueError(f"drill {number}: {drill.file} of {drill.stage} has changed, write its edit in drills.md anew")
    package[drill.file] = package[drill.file].replace(drill.before, drill.after)
    return {**package, REPORT: f"# Drill {number}: {drill.title}\n\n{drill.report}\n"}


def number_of_drill(package):
    """Return the number of a package that is a drill, or None. The package isn't imported."""
    for folder in sys.path:
        report = Path(folder, *package.split("."), REPORT)
        if report.is_file() and (number := re.match(r"# Drill (\d+)", report.read_text(encoding="utf-8"))):
            return int(number[1])
    return None


def answer(number):
    drill = drills()[number]
    return f"{drill.answer}\n\n{drill.stage}, {drill.file}: in place of\n\n{drill.before}\nit has\n\n{drill.after}"


def write(name, to):
    """Write the drill or exercise `name`: "drill1", "3" or "stage3_gradbuffer". Raise ValueError or OSError."""
    if re.fullmatch(r"drill\d+", name):
        return write_package(to, files_of_drill(int(name.removeprefix("drill"))))
    exercise = next((exercise for exercise in bodies() if name in (exercise, exercise[len("stage")])), None)
    if exercise is None:
        raise ValueError(f"STAGE={name}: there are the exercises 0 to 4, and drill1 to drill8")
    files = {Path(path).name: emptied(path, hints) for path, hints in bodies()[exercise].items()}
    write_package(to, {"__init__.py": "", **files})


def main(name, to):
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
