"""python -m checkpoint convert FOLDER [TARGET] --to torch|dcp: a checkpoint for torch's own tools.

torch: one file, which torch.load(weights_only=True) reads. dcp: a folder, which torch.distributed.checkpoint reads.
Both hold {"model": …, "optimizer": {"state": …, "param_groups": …}, "extra": […]}: the state_dict() of the model; that
of the optimizer, by names of parameters as in torch.distributed.checkpoint.state_dict; and the `extra` of each rank.
Nothing in FOLDER is unpickled.
"""

import argparse
import sys
from pathlib import Path

from .convert import FORMATS, convert
from .errors import CheckpointError
from .ranks import first_line

ENDINGS = {"torch": ".pt", "dcp": ".dcp"}


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
    target = args.target or args.folder.with_name(args.folder.name + ENDINGS[args.to])
    try:
        found = convert(args.folder, target, args.to)
    except (OSError, CheckpointError) as error:
        sys.exit(f"python -m checkpoint: error: {args.folder} can't be converted to {target}: {first_line(error)}")
    print(f"{target}: {len(found['model'])} tensors of the model, the state of {len(found['optimizer']['state'])} "
          f"parameters, extra of {len(found['extra'])} ranks")


if __name__ == "__main__":
    main()
