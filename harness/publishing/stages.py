"""Writes a stage as a package for a project of yours, and shows what one core changes in the one before.

    python -m harness.publishing.stages take 4 path/to/my_optimizer [--checkpoint]        # or: make take
    python -m harness.publishing.stages diff 2 3                                          # or: make diff

The package has core and guard, and if asked for checkpoint/ too. train.py stays here, imports become relative, and the
package says which version it is, and under which licence. The difference goes method by method; a method that is
unchanged or gone is named in a line.
"""

import argparse
import ast
import difflib
import io
import re
import sys
import tokenize
from pathlib import Path

from harness import STAGES

ROOT = Path(__file__).resolve().parents[2]
STAYS = {"train.py", "show.py", "__init__.py"}
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
OPENING = '''"""Stage {number} of "The distributed optimizer, in four stages", {version}. Licence: MIT, see LICENSE."""

from .distributed import DistributedOptimizer as DistributedOptimizer
from .optimizer import ShardedOptimizer as ShardedOptimizer

__version__ = "{version}"
'''

CORE = ("optimizer.py", "buffer.py", "transport.py")


def code_lines(path):
    """Return {line number: text} of the lines of a Python file that are code: no blanks, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    numbers = {number for token in tokenize.generate_tokens(io.StringIO(source).readline)
               if token.string.strip() and token.type != tokenize.COMMENT
               for number in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            numbers -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    return {number: lines[number - 1].split("  #")[0] for number in sorted(numbers)}


def core_lines(folder):
    """Count the code lines of the core in the folder of a stage."""
    return sum(len(code_lines(folder / name)) for name in CORE if (folder / name).exists())


def files_of(stage, with_checkpoint):
    """Return {path in the package: text}."""
    folders = ["guard", "checkpoint"] if with_checkpoint else ["guard"]
    paths = {path.name: path for path in (ROOT / stage).glob("*.py") if path.name not in STAYS}
    for folder in folders:
        paths |= {f"{folder}/{path.name}": path for path in (ROOT / folder).glob("*.py")}
    files = {name: re.sub(r"^from guard\b", f"from .{'.' * name.count('/')}guard", path.read_text(), flags=re.MULTILINE)
             for name, path in paths.items()}
    opening = OPENING.format(number=stage[len("stage")], version=VERSION)
    return {**files, "__init__.py": opening, "LICENSE": (ROOT / "LICENSE").read_text()}


def take(number, to, with_checkpoint=False):
    """Write a stage as a package. Raises ValueError: there is no such stage, or `to` is no place for a package."""
    stages = {stage[len("stage")]: stage for stage in STAGES}
    if number not in stages:
        raise ValueError(f"STAGE={number}: there are stages 1 to {len(stages)}")
    write_package(to, files_of(stages[number], with_checkpoint))


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


def functions(tree):
    """-> {name: node} of each function of a module, and of each method as "Class.method"."""
    methods = {f"{node.name}.{child.name}": child for node in tree.body if isinstance(node, ast.ClassDef)
               for child in node.body if isinstance(child, ast.FunctionDef)}
    return {**{node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}, **methods}


def parts_of(path):
    """-> name: lines, of each function, of each method ("Class.method", of the optimizer "method"), and of what stands
    around them in the module and in a class. Empty without the file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    tree = ast.parse("\n".join(lines))
    nodes = [(f"class {node.name}", node) for node in tree.body if isinstance(node, ast.ClassDef)]
    nodes += [(name.removeprefix("ShardedOptimizer."), node) for name, node in functions(tree).items()]
    names = ["imports and constants"] * len(lines)  # of the innermost part that a line belongs to
    for name, node in nodes:
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        names[start - 1 : node.end_lineno] = [name] * (node.end_lineno + 1 - start)
    of_functions = {name for name, node in nodes if isinstance(node, ast.FunctionDef)}
    return {name: [line for part, line in zip(names, lines) if part == name and (line.strip() or name in of_functions)]
            for name in dict.fromkeys(names)}


def difference(old, new):
    """Of two dicts of parts_of -> lines to print."""
    unchanged = [name for name in new if old.get(name) == new[name]]
    gone = [name for name in old if name not in new]
    gone = [name for name in gone if f"class {name.partition('.')[0]}" not in gone]  # a class is said once
    listed = [f"{word}: {', '.join(names)}" for word, names in (("unchanged", unchanged), ("gone", gone)) if names]
    for name in new:
        if name not in old:
            listed += ["", f"new: {name}", *(f"+{line}" for line in new[name])]
        elif name not in unchanged:
            changes = list(difflib.unified_diff(old[name], new[name], n=2, lineterm=""))[2:]
            listed += ["", f"changed: {name}", *(" …" if line.startswith("@@") else line for line in changes)]
    return listed


def show_difference(a, b):
    of_stages = [ROOT / STAGES[int(number) - 1] for number in (a, b)]
    for file in CORE:
        old, new = (parts_of(stage / file) for stage in of_stages)
        if old or new:
            print(f"\n{'=' * 20} {file}: stage {a} -> stage {b}")
        for line in difference(old, new):
            colour = COLOURS.get(line[:1], "") if sys.stdout.isatty() else ""
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
    print(f"{args.to}: from {args.to.name} import DistributedOptimizer")


if __name__ == "__main__":
    main()
