"""Which class adds to which method of a stage's DistributedOptimizer, in the order in which they run: from the code.

    python -m harness.report.seams 4

Called by `make seams`, and by whoever wants to know what runs before a line of the core. guard/__init__.py keeps it.
"""

import importlib
import sys

import torch

from harness.report.project_files import ROOT


def table(cls):
    """-> lines: a method of the core, or one that several classes have, and who adds to it; the leftmost runs first."""
    rows = seams(cls)
    width = max(map(len, rows))
    return [f"{name:{width}}  {' > '.join(one.__name__ for one in having)}" for name, having in rows.items()]


def seams(cls):
    """-> method -> the classes that have it, in the order in which they run."""
    classes = [one for one in cls.__mro__ if one not in torch.optim.Optimizer.__mro__]
    names = dict.fromkeys(name for one in reversed(classes) for name in vars(one) if not name.startswith("__"))
    found = {name: [one for one in classes if has_method(one, name)] for name in names}
    return {name: having for name, having in found.items() if len(having) > 1}


def has_method(cls, name):
    """Its own: of a class that is built torch wraps the `step` that it finds, of whomever, and puts it there."""
    value = vars(cls).get(name)
    is_method = callable(value) or isinstance(value, (property, staticmethod))
    return is_method and getattr(value, "__qualname__", f"{cls.__name__}.{name}") == f"{cls.__name__}.{name}"


def main():
    stages = {path.name.removeprefix("stage")[0]: path.name for path in ROOT.glob("stage*_*")}
    if len(sys.argv) != 2 or sys.argv[1] not in stages:
        print(f"seams: STAGE={' '.join(sys.argv[1:])}: there are stages {', '.join(sorted(stages))}", file=sys.stderr)
        sys.exit(2)
    print(*table(importlib.import_module(stages[sys.argv[1]]).DistributedOptimizer), sep="\n")


if __name__ == "__main__":
    main()
