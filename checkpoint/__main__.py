"""python -m checkpoint convert FOLDER model.pt: a checkpoint as one file, which torch.load(weights_only=True) reads.

It holds {"model": …, "optimizer": {"state": …, "param_groups": …}, "extra": […]}: the model's state_dict(), the
optimizer's by the names of the parameters, as torch.distributed.checkpoint.state_dict has it, and the extra of each
rank. Nothing in FOLDER is unpickled.
"""

import argparse
import sys
from pathlib import Path

from .convert import convert


def main():
    parser = argparse.ArgumentParser(prog="python -m checkpoint", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("convert", help="a checkpoint as one file for torch.load(weights_only=True)")
    command.add_argument("folder", type=Path, help="a checkpoint, as runs/a/step-00000100")
    command.add_argument("file", type=Path, help="what to write, as model.pt; it must not exist")
    args = parser.parse_args()
    try:
        found = convert(args.folder, args.file)
    except (OSError, ValueError) as error:
        sys.exit(f"python -m checkpoint: error: {args.folder} can't be converted to {args.file}: {error}")
    print(f"{args.file}: {len(found['model'])} tensors of the model, the state of {len(found['optimizer']['state'])} "
          f"parameters, extra of {len(found['extra'])} ranks")


if __name__ == "__main__":
    main()
