"""Which class adds to which method of a stage's DistributedOptimizer, in the order in which they run: from the code.

    python -m harness.seams 4

Called by `make seams`, and by whoever wants to know what runs before a line of the core. guard/__init__.py keeps it.
"""

import importlib
import sys

import torch

from harness.docs_check import ROOT


def table(cls):
    """-> lines: a method of the core, or one that several classes have, and who adds to it; the leftmost runs first."""
    rows = seams(cls)
    width = max(map(len, rows))
    return [f"{name:{width}}  {' > '.join(one.__name__ for one in having)}" for name, having in rows.items()]


def seams(cls):
    """-> method -> the classes that have it, in the order in which they run."""
    classes = [one for one in cls.__mro__ if one not in torch.optim.Optimizer.__mro__]
    names = dict.fromkeys(name for one in reversed(classes) for name, value in vars(one).items() if is_method(value))
    found = {name: [one for one in classes if has_its_own(one, name)] for name in names if not name.startswith("__")}
    return {name: having for name, having in found.items() if len(having) > 1}


def is_method(value):
    return callable(value) or isinstance(value, (property, staticmethod))


def has_its_own(cls, name):
    """Of a class that is built torch wraps the `step` that it finds, maybe of another class, and puts it there."""
    value = vars(cls).get(name)
    is_wrapped = getattr(value, "hooked", False) and value.__qualname__ != f"{cls.__name__}.{name}"
    return name in vars(cls) and not is_wrapped


def main():
    stages = {path.name.removeprefix("stage")[0]: path.name for path in ROOT.glob("stage*_*")}
    if len(sys.argv) != 2 or sys.argv[1] not in stages:
        print(f"seams: STAGE={' '.join(sys.argv[1:])}: there are stages {', '.join(sorted(stages))}", file=sys.stderr)
        sys.exit(2)
    print(*table(importlib.import_module(stages[sys.argv[1]]).DistributedOptimizer), sep="\n")


if __name__ == "__main__":
    main()
