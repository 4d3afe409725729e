"""Writes a stage, one of the four optimizers of this repository, as a package for a project of yours.

    python -m harness.publishing.stages 4 path/to/my_optimizer [--checkpoint]        # or: make take

The folder of a stage has its core, the optimizer itself, in up to three files. Its distributed.py adds the checks of
the folder guard/ to the core. The package gets:

- the stage's folder, except train.py, and guard/, with relative imports;
- with `--checkpoint` also the folder checkpoint/, which saves and loads;
- files from the templates in `taken/`, for example a README and a test.
"""

import argparse
import ast
import io
import re
import tokenize
from pathlib import Path

from harness import STAGES

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).parent / "taken"  # in these files the package is called my_optimizer
NOT_COPIED = {"train.py", "__init__.py"}  # files of a stage; OPENING is the __init__.py of the package
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
OPENING = '''"""Stage {number} of "The distributed optimizer, in four stages", {version}. Licence: MIT, see LICENSE."""

from .distributed import DistributedOptimizer as DistributedOptimizer
from .optimizer import ShardedOptimizer as ShardedOptimizer

__all__ = ["DistributedOptimizer", "ShardedOptimizer"]
__version__ = "{version}"
'''

CORE = ("optimizer.py", "buffer.py", "transport.py")  # files of a core; not every stage has all three


def code_lines(path):
    """Return {line number: text} of the lines of a Python file that are code.

    Empty lines, comments, and docstrings are no code.
    """
    source = path.read_text(encoding="utf-8")
    numbers = set()  # of lines that have code
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # A token has text, unless it ends a line or changes the indentation. Its start and end are (line, column).
        if token.string.strip() and token.type != tokenize.COMMENT:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstring = node.body[0]
            numbers.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    lines = source.splitlines()
    # A comment behind code begins after two spaces, and is cut off.
    return {number: lines[number - 1].split("  #")[0] for number in sorted(numbers)}


def core_lines(folder):
    """Return the number of code lines that the core in the folder of a stage has."""
    return sum(len(code_lines(folder / name)) for name in CORE if (folder / name).exists())


def files_of(stage, with_checkpoint):
    """Return {path in the package: text} for the licence and for the code of `stage`, which is the name of a folder."""
    folders = ["guard", "checkpoint"] if with_checkpoint else ["guard"]
    files = {path.name: with_relative_imports(path, "from .guard")
             for path in (ROOT / stage).glob("*.py") if path.name not in NOT_COPIED}
    for folder in folders:
        files |= {f"{folder}/{path.name}": with_relative_imports(path, "from ..guard")
                  for path in (ROOT / folder).glob("*.py")}
    # stage[len("stage")] is the digit in the name of the folder, for example in "stage4_overlap".
    files["__init__.py"] = OPENING.format(number=stage[len("stage")], version=VERSION)
    files["LICENSE"] = (ROOT / "LICENSE").read_text()
    return files


def with_relative_imports(path, from_guard):
    """Return the text of a file in which each import "from guard" has become `from_guard`, such as "from .guard"."""
    return re.sub(r"^from guard\b", from_guard, path.read_text(), flags=re.MULTILINE)


def package_files(number, name, code):
    """Return {path in the package: text} for the files that are made of the templates in `taken/`, and for py.typed.

    number: the stage's. name: the package's. code: {path in the package: text} of the other files, see `files_of`.
    """
    folders = {str(Path(name, path).parent) for path in code}
    # A list in pyproject.toml names all packages that pip has to install: "my_optimizer", "my_optimizer.guard".
    packages = ", ".join(f'"{folder.replace("/", ".")}"' for folder in sorted(folders))
    # Words of the templates -> what is written in their place.
    words = {"my_optimizer": name, "NUMBER": number, "VERSION": VERSION, '"PACKAGES"': packages}
    # Only stage 4 has this method. For any other stage the lines of the templates that name it are left out.
    has_prefetch = any("def prefetch_params" in text for text in code.values())
    files = {"py.typed": ""}
    for path in TEMPLATES.iterdir():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        text = "".join(line for line in lines if has_prefetch or "prefetch_params" not in line)
        for word, meaning in words.items():
            text = text.replace(word, meaning)
        files[path.name] = text
    return files


def take(number, to, with_checkpoint=False):
    """Write stage `number`, a digit as text, as a package into the new folder `to`.

    Raises ValueError if there is no such stage, or if `to` can't be the folder of a package.
    """
    stage_of = {stage[len("stage")]: stage for stage in STAGES}  # number, which is a digit -> folder
    if number not in stage_of:
        raise ValueError(f"STAGE={number}: there are stages 1 to {len(stage_of)}")
    code = files_of(stage_of[number], with_checkpoint)
    write_package(to, {**code, **package_files(number, to.name, code)})


def write_package(to, files):
    """Write `files`, {path in the package: text}, into the new folder `to`.

    Raises ValueError if Python can't import a package of that name, or if there is such a folder already.
    """
    if not to.name.isidentifier():
        raise ValueError(f"TO={to}: its last part must be a name that Python can import")
    if to.exists():
        raise ValueError(f"TO={to} is there already: remove it first, or take another name")
    for name, text in files.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(prog="take", description=__doc__.splitlines()[0])
    parser.add_argument("stage")
    parser.add_argument("to", type=Path)
    parser.add_argument("--checkpoint", action="store_true", help="with checkpoint/: full state, files, other ranks")
    args = parser.parse_args()
    try:
        take(args.stage, args.to, args.checkpoint)
    except (ValueError, OSError) as reason:
        parser.exit(2, f"take: {reason}\n")
    print(f"{args.to}: from {args.to.name} import DistributedOptimizer; {args.to}/README.md says how")


if __name__ == "__main__":
    main()
