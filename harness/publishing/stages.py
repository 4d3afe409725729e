"""Writes a stage as a package for a project of yours.

    python -m harness.publishing.stages 4 path/to/my_optimizer [--checkpoint]        # or: make take

The package has the stage's core and guard, and checkpoint/ if `--checkpoint` asks for it. train.py isn't copied.
Imports become relative, and the files of `taken/`, a README and a test among them, let the package stand alone.
"""

import argparse
import ast
import io
import re
import tokenize
from pathlib import Path

from harness import STAGES

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).parent / "taken"  # files for a package that is called my_optimizer until it is written
NOT_COPIED = {"train.py", "__init__.py"}  # files of a stage; the package gets an __init__.py of its own, OPENING
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
OPENING = '''"""Stage {number} of "The distributed optimizer, in four stages", {version}. Licence: MIT, see LICENSE."""

from .distributed import DistributedOptimizer as DistributedOptimizer
from .optimizer import ShardedOptimizer as ShardedOptimizer

__all__ = ["DistributedOptimizer", "ShardedOptimizer"]
__version__ = "{version}"
'''

CORE = ("optimizer.py", "buffer.py", "transport.py")


def code_lines(path):
    """Return {line number: text} of the lines of a Python file that are code: no blanks, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    numbers = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstring = node.body[0]
            numbers.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    lines = source.splitlines()
    # A comment behind code is cut off.
    return {number: lines[number - 1].split("  #")[0] for number in sorted(numbers)}


def core_lines(folder):
    """Count the code lines of the core in the folder of a stage."""
    return sum(len(code_lines(folder / name)) for name in CORE if (folder / name).exists())


def files_of(stage, with_checkpoint):
    """Return {path in the package: text} of a stage's code and the licence."""
    folders = ["guard", "checkpoint"] if with_checkpoint else ["guard"]
    files = {path.name: with_relative_imports(path, "from .guard")
             for path in (ROOT / stage).glob("*.py") if path.name not in NOT_COPIED}
    for folder in folders:
        files |= {f"{folder}/{path.name}": with_relative_imports(path, "from ..guard")
                  for path in (ROOT / folder).glob("*.py")}
    files["__init__.py"] = OPENING.format(number=stage[len("stage")], version=VERSION)
    files["LICENSE"] = (ROOT / "LICENSE").read_text()
    return files


def with_relative_imports(path, from_guard):
    """Return the text of a file with `from_guard`, such as "from .guard", where it has "from guard"."""
    return re.sub(r"^from guard\b", from_guard, path.read_text(), flags=re.MULTILINE)


def package_files(number, name, code):
    """Return {path in the package: text} of the files beside the code: see `taken/`. code: {path: text}."""
    folders = {str(Path(name, path).parent) for path in code}
    packages = ", ".join(f'"{folder.replace("/", ".")}"' for folder in sorted(folders))  # as in a list of TOML
    words = {"my_optimizer": name, "NUMBER": number, "VERSION": VERSION, '"PACKAGES"': packages}
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
    """Write a stage as a package. Raises ValueError: there is no such stage, or `to` is no place for a package."""
    stage_of = {stage[len("stage")]: stage for stage in STAGES}  # number, which is a digit -> folder
    if number not in stage_of:
        raise ValueError(f"STAGE={number}: there are stages 1 to {len(stage_of)}")
    code = files_of(stage_of[number], with_checkpoint)
    write_package(to, {**code, **package_files(number, to.name, code)})


def write_package(to, files):
    """Write `files`, {path in the package: text}. Raises ValueError where `to` is no place for a package."""
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
