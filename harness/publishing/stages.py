"""Writes a stage as a package for a project of yours, and shows what one core changes in the one before.

    python -m harness.publishing.stages take 4 path/to/my_optimizer [--checkpoint]        # or: make take
    python -m harness.publishing.stages diff 2 3                                          # or: make diff

The package has core and guard, and if asked for checkpoint/ too. train.py stays here, imports become relative, and
files of `taken/` make the package stand on its own. The difference goes method by method; a method that is unchanged
or gone is named in a line.
"""

import argparse
import ast
import difflib
import io
import os
import re
import sys
import tokenize
from pathlib import Path

from harness import STAGES

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = Path(__file__).parent / "taken"  # of a package called my_optimizer
STAYS = {"train.py", "__init__.py"}  # files of a stage that aren't taken
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
    """Return {path in the package: text} of its code and licence."""
    folders = ["guard", "checkpoint"] if with_checkpoint else ["guard"]
    files = {path.name: with_relative_imports(path, "from .guard")
             for path in (ROOT / stage).glob("*.py") if path.name not in STAYS}
    for folder in folders:
        files |= {f"{folder}/{path.name}": with_relative_imports(path, "from ..guard")
                  for path in (ROOT / folder).glob("*.py")}
    files["__init__.py"] = OPENING.format(number=stage[len("stage")], version=VERSION)
    files["LICENSE"] = (ROOT / "LICENSE").read_text()
    return files


def with_relative_imports(path, from_guard):
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


# --------------------------------------------------------------------------------------- What a core changes in another


COLOURS = {"+": "\033[32m", "-": "\033[31m"}
BETWEEN = "between functions"  # the part with imports, constants, and the first lines of classes


def functions(tree):
    """Return {name: node} of each function of a module, and of each method as "Class.method"."""
    nodes = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            nodes[node.name] = node
        if isinstance(node, ast.ClassDef):
            nodes |= {f"{node.name}.{child.name}": child for child in node.body if isinstance(child, ast.FunctionDef)}
    return nodes


def parts_of(path):
    """Return {name: lines} of the parts of a file, or {} if there is no such file.

    Parts are functions, methods ("Class.method", or of the optimizer "method"), and what stands between them.
    """
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    rest = dict(enumerate(text.splitlines(), start=1))  # number -> line
    parts = {}
    for name, node in functions(ast.parse(text)).items():
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines = [rest.pop(number) for number in range(start, node.end_lineno + 1)]
        parts[name.removeprefix("ShardedOptimizer.")] = lines
    return {BETWEEN: [line for line in rest.values() if line.strip()], **parts}


def difference(old, new):
    """Return lines to print, of what `parts_of` has returned for two files."""
    unchanged = [name for name in new if old.get(name) == new[name]]
    gone = [name for name in old if name not in new]
    lines = []
    if unchanged:
        lines.append(f"unchanged: {', '.join(unchanged)}")
    if gone:
        lines.append(f"gone: {', '.join(gone)}")
    for name in new:
        if name not in old:
            lines += ["", f"new: {name}", *(f"+{line}" for line in new[name])]
        elif name not in unchanged:
            _, _, *changes = difflib.unified_diff(old[name], new[name], n=2, lineterm="")  # first two names of files
            lines += ["", f"changed: {name}", *(" …" if line.startswith("@@") else line for line in changes)]
    return lines


def show_difference(before, after):
    """Print the difference between the cores of two stages, whose numbers are given."""
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for file in CORE:
        old = parts_of(ROOT / STAGES[int(before) - 1] / file)
        new = parts_of(ROOT / STAGES[int(after) - 1] / file)
        if old or new:
            print(f"\n{'=' * 20} {file}: stage {before} -> stage {after}")
        for line in difference(old, new):
            colour = COLOURS.get(line[:1]) if is_coloured else None
            print(f"{colour}{line}\033[0m" if colour else line)


def main():
    parser = argparse.ArgumentParser(prog="stages", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_take = commands.add_parser("take")
    of_take.add_argument("stage")
    of_take.add_argument("to", type=Path)
    of_take.add_argument("--checkpoint", action="store_true", help="with checkpoint/: full state, files, other ranks")
    of_diff = commands.add_parser("diff")
    of_diff.add_argument("before")
    of_diff.add_argument("after")
    args = parser.parse_args()
    if args.command == "diff":
        return show_difference(args.before, args.after)
    try:
        take(args.stage, args.to, args.checkpoint)
    except (ValueError, OSError) as reason:
        parser.exit(2, f"take: {reason}\n")
    print(f"{args.to}: from {args.to.name} import DistributedOptimizer; {args.to}/README.md says how")


if __name__ == "__main__":
    main()
