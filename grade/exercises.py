"""Writes an exercise: a core with bodies taken out as exercises.md says, or a drill: a stage with a fault of drills.md.

    make exercise STAGE=3 TO=mine            (STAGE=0, STAGE=variants, STAGE=drill1)
"""

import ast
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

from harness.publishing.stages import CORE, ROOT, files_of, functions, write_package

REPORT = "REPORT.md"  # in the package of a drill: by its first line the grader knows which one it is


@functools.cache
def bodies():
    """Return exercise -> file -> function to be filled in -> what is asked for, as exercises.md has them."""
    of_exercises = {}
    for line in Path(__file__).with_name("exercises.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            of_files = of_exercises[line.removeprefix("## ")] = {}
        elif line.startswith("- "):
            of_functions = of_files[line.removeprefix("- ")] = {}
        elif line.startswith("  - "):
            name, _, of_functions[name] = line.removeprefix("  - ").partition(": ")
    return of_exercises


def emptied(path, asked):
    """Return the source in `path` without the bodies of the functions in `asked`; signatures and docstrings stay."""
    source = (ROOT / path).read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    for name, node in sorted(functions(tree).items(), key=lambda pair: -pair[1].lineno):  # lines keep their numbers
        short = name.split(".")[-1]
        if hint := asked.get(short) or asked.get(name):
            first = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
            fill_in = f'raise RuntimeError("fill in {short}: {hint}")'
            lines[first : node.end_lineno] = [" " * (node.col_offset + 4) + fill_in]
    end = tree.body[0].end_lineno - 1  # of the module's docstring: a line with nothing but quotes
    n_bodies = f"{len(asked)} {'body' if len(asked) == 1 else 'bodies'}"
    exercise = f"Exercise: fill in {n_bodies}, see docs/exercise.md. The solution is {path}."
    if asked:
        lines[end:end] = ["", exercise]
    text = "\n".join(lines) + "\n"
    return re.sub(r"^from \.(?=\w)", "from guard.", text, flags=re.MULTILINE) if path.startswith("guard/") else text


class Drill(NamedTuple):
    """A drill of drills.md: its texts, and its edit of a file in the package of a stage."""
    title: str
    report: str
    check: str  # name of the check that sees it
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
    text, path, stage, diff = re.fullmatch(r"(.*)```diff\n--- (\S+) ?(\S*)\n(.*)```", section, re.DOTALL).groups()
    title, *texts = (" ".join(part.split()) for part in re.split(r"\n- (?:Report|Check|State|Answer): ", text))
    before, after = ("".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in signs)
                     for signs in (" -", " +"))
    file = path if path.startswith("guard/") else Path(path).name
    return Drill(title, *texts, stage or Path(path).parent.name, bool(stage), file, before, after)


def files_of_drill(number):
    """Return {path in the package: text} of a stage with the fault. Raises ValueError if its edit has no place."""
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
    """Return the number of the drill that a package is, None of another one. Nothing of it is run."""
    for folder in sys.path:
        report = Path(folder, *package.split("."), REPORT)
        if report.is_file() and (number := re.match(r"# Drill (\d+)", report.read_text(encoding="utf-8"))):
            return int(number[1])
    return None


def answer(number):
    drill = drills()[number]
    return f"{drill.answer}\n\n{drill.stage}, {drill.file}: in place of\n\n{drill.before}\nit has\n\n{drill.after}"


def write(what, to):
    """Write an exercise: of a stage, by its package or number, "variants", "drill1". Raises ValueError or OSError."""
    if re.fullmatch(r"drill\d+", what):
        return write_package(to, files_of_drill(int(what.removeprefix("drill"))))
    exercise = next((exercise for exercise in bodies() if what in (exercise, exercise[5:6])), None)
    if exercise is None:
        raise ValueError(f"STAGE={what}: there are the exercises 0 to 4, variants, and drill1 to drill8")
    files = {Path(path).name: emptied(path, asked) for path, asked in bodies()[exercise].items()}
    write_package(to, {"__init__.py": "", **files})


def main(what, to):
    try:
        write(what, to)
    except (ValueError, OSError) as reason:
        print(f"exercise: {reason}", file=sys.stderr)
        sys.exit(2)
    if what.startswith("drill"):
        print(f"{(to / REPORT).read_text().strip()}\n\nFind it in {to}/, mend it, then make grade STAGE={to}")
    else:
        print(f"{to}: fill in its bodies, then make grade STAGE={to}{'.ring' if what == '0' else ''}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
