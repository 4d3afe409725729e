"""What one stage's core changes in another's, method by method; what is unchanged or gone is named in a line.

    make diff A=3 B=4
"""

import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE_FILES = ("optimizer.py", "buffer.py", "transport.py")
COLOURS = {"+": "\033[32m", "-": "\033[31m"}


def parts_of(path):
    """-> name: lines, of each function, of each method ("Class.method", of the optimizer "method"), and of what stands
    around them in the module and in a class. Empty without the file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    tree, parts = ast.parse("\n".join(lines)), {}

    def walk(node, prefix, name, first, last):
        rest, parts[name] = set(range(first, last + 1)), []  # it comes first
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                start = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                inner = set(range(start, child.end_lineno + 1))
                rest -= inner
                if isinstance(child, ast.ClassDef):
                    walk(child, f"{child.name}.", f"class {child.name}", start, child.end_lineno)
                else:
                    short = prefix.removeprefix("ShardedOptimizer.") + child.name
                    parts[short] = [lines[number - 1] for number in sorted(inner)]
        parts[name] = [lines[number - 1] for number in sorted(rest) if lines[number - 1].strip()]

    if lines:
        walk(tree, "", "imports and constants", 1, len(lines))
    return parts


def difference(old, new):
    """Of two dicts of parts_of -> lines to print."""
    unchanged = [name for name in new if old.get(name) == new[name]]
    gone = [name for name in old if name not in new]
    gone = [name for name in gone if f"class {name.partition('.')[0]}" not in gone]  # a class is said once
    said = [f"{word}: {', '.join(names)}" for word, names in (("unchanged", unchanged), ("gone", gone)) if names]
    for name in new:
        if name not in old:
            said += ["", f"new: {name}", *(f"+{line}" for line in new[name])]
        elif name not in unchanged:
            changes = list(difflib.unified_diff(old[name], new[name], n=2, lineterm=""))[2:]
            said += ["", f"changed: {name}", *(" …" if line.startswith("@@") else line for line in changes)]
    return said


def main(a, b):
    of_stages = [next(ROOT.glob(f"stage{number}_*")) for number in (a, b)]
    for file in CORE_FILES:
        old, new = (parts_of(stage / file) for stage in of_stages)
        if old or new:
            print(f"\n{'=' * 20} {file}: stage {a} -> stage {b}")
        for line in difference(old, new):
            colour = COLOURS.get(line[:1], "") if sys.stdout.isatty() else ""
            print(f"{colour}{line}\033[0m" if colour else line)


if __name__ == "__main__":
    main(*sys.argv[1:])
