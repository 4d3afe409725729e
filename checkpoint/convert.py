"""python -m checkpoint convert FOLDER [TARGET] --to torch|dcp: a checkpoint for torch's own tools.

torch: one file, which torch.load(weights_only=True) reads. dcp: a folder, which torch.distributed.checkpoint reads.
Both hold {"model": …, "optimizer": {"state": …, "param_groups": …}, "extra": […]}: the state_dict() of the model; that
of the optimizer, by names of parameters as in torch.distributed.checkpoint.state_dict; and the `extra` of each rank.
"""

import argparse
import collections
import errno
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from .errors import CheckpointError
from .manifest import manifest_of
from .rank_files import Reader
from .ranks import first_line

FORMATS = {"torch": ".pt", "dcp": ".dcp"}  # format -> how the name of what is written ends


def convert(folder, path, to="torch") -> dict:
    """Write what `converted` returns to the new `path`, all of it or nothing. -> what it returns. `to`: of FORMATS.
    Raises OSError, also if `path` exists, KeyError, or CheckpointError: `folder` is damaged, or no checkpoint."""
    if to not in FORMATS:
        raise KeyError(to)
    path, found = Path(path), converted(folder)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "it exists already")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        if to == "torch":
            with open(partial, "xb") as file:
                torch.save(found, file)
        else:
            partial.mkdir()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # there is one process
                dcp.save(found, checkpoint_id=partial, no_dist=True)
        partial.rename(path)
    except BaseException as error:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise said_by_the_disk(error) from None
    return found


def said_by_the_disk(error):
    """-> the OSError behind `error`, which torch.save and dcp.save wrap in other errors; or `error`."""
    if isinstance(error, dcp.api.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    found = error
    while found and not isinstance(found, OSError):
        found = found.__context__
    return found or error


def converted(folder) -> dict:
    """-> a checkpoint as one dict, on the CPU. Raises OSError or CheckpointError: it is damaged, or no checkpoint."""
    manifest, _ = manifest_of(folder)
    reader = Reader(folder, manifest)
    groups = [{**reader.unpack(group["options"]), "params": group["params"]} for group in manifest.groups]
    states = {name: without_deques(reader.unpack(state)) for name, state in manifest.states.items()}
    found = {"model": {name: reader.whole(f"model.{name}") for name in manifest.model},
             "optimizer": {"state": states, "param_groups": groups},
             "extra": [without_deques(reader.unpack(extra)) for extra in manifest.extra]}
    reader.run()
    return found


def without_deques(value):
    """-> `value` with lists in place of deques, which torch.load(weights_only=True) refuses."""
    if isinstance(value, dict):
        return type(value)((key, without_deques(item)) for key, item in value.items())
    if isinstance(value, (list, collections.deque)):
        return [without_deques(item) for item in value]
    return tuple(map(without_deques, value)) if type(value) is tuple else value


def main():
    parser = argparse.ArgumentParser(prog="python -m checkpoint", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("convert", help="a checkpoint for torch's own tools")
    command.add_argument("folder", type=Path, help="a checkpoint, as runs/a/step-00000100")
    command.add_argument("target", type=Path, nargs="?", help="what to write; it must not exist (default: FOLDER.pt, "
                         "or FOLDER.dcp)")
    command.add_argument("--to", choices=FORMATS, default="torch", help="a file for torch.load, or a folder for "
                         "torch.distributed.checkpoint (default: torch)")
    args = parser.parse_args()
    target = args.target or args.folder.with_name(args.folder.name + FORMATS[args.to])
    try:
        found = convert(args.folder, target, args.to)
    except (OSError, CheckpointError) as error:
        sys.exit(f"python -m checkpoint: error: {args.folder} can't be converted to {target}: {first_line(error)}")
    print(f"{target}: {len(found['model'])} tensors of the model, the state of {len(found['optimizer']['state'])} "
          f"parameters, extra of {len(found['extra'])} ranks")
