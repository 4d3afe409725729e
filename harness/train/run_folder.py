"""The checkpoints that the folder of a run keeps, by step."""

import re
import shutil
import sys
from pathlib import Path

MANIFEST = "manifest.json"  # a checkpoint is complete when it has one


def path_of(folder, step):
    return Path(folder) / f"step-{step:08}"


def steps_in(folder):
    """-> the steps of which the run in `folder` has a checkpoint, complete or not, the newest first.

    Other names are not the run's: zzz-best, step-00000010.partial.
    """
    found = [re.fullmatch(r"step-(\d{8,})", path.name) for path in Path(folder).glob("step-*")]
    return sorted({int(match[1]) for match in found if match}, reverse=True)


def complete(folder):
    """-> the steps of complete checkpoints, the newest first."""
    return [step for step in steps_in(folder) if (path_of(folder, step) / MANIFEST).is_file()]


def remove_old(folder, keep):
    """Removes what is older than the `keep` newest complete checkpoints, if `keep` isn't 0. Links stay.

    The manifest goes first: a checkpoint that is half removed isn't complete. What can't be removed is one line.
    """
    kept = complete(folder)[:keep] if keep else []
    for path in [path_of(folder, step) for step in steps_in(folder) if kept and step < kept[-1]]:
        try:
            if not path.is_symlink():
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)
        except OSError as error:
            print(f"{Path(sys.argv[0]).name}: {path} can't be removed: {error.strerror}", file=sys.stderr)


def set_aside(folder, steps):
    """Renames these checkpoints to step-….aside: the run goes on from one before, and will write new ones."""
    for path in [path_of(folder, step) for step in steps]:
        names = [f"{path.name}.aside", *(f"{path.name}.aside-{number}" for number in range(2, 1000))]
        path.rename(next(path.with_name(name) for name in names if not path.with_name(name).exists()))
