"""What one stage's core changes in another's, method by method; what is unchanged or gone is named in a line.

    make diff A=3 B=4
"""

import ast
import difflib
import os
import sys

from harness import STAGES
from harness.take import CORE, ROOT

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


def main(a, b):
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    of_stages = [ROOT / STAGES[int(number) - 1] for number in (a, b)]
    for file in CORE:
        old, new = (parts_of(stage / file) for stage in of_stages)
        if old or new:
            print(f"\n{'=' * 20} {file}: stage {a} -> stage {b}")
        for line in difference(old, new):
            colour = COLOURS.get(line[:1], "") if is_coloured else ""
            print(f"{colour}{line}\033[0m" if colour else line)


if __name__ == "__main__":
    main(*sys.argv[1:])
