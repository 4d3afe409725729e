"""Starts a train.py on ranks of this machine, as torchrun does, once its options are right.

    python -m harness.training.launch 2 stage4_overlap/train.py [options of train.py …]         # or: make train

What the ranks have said comes last: torchrun's own report says no more. Exit code: that of a rank; 130 after Ctrl-C.
"""

import ast
import logging
import signal
import sys
from pathlib import Path

from harness.ranks.command_line import Parser
from harness.training import options


def main(n_ranks, script, *arguments):
    description = ast.get_docstring(ast.parse(Path(script).read_text(encoding="utf-8")))
    options.parse(Parser("train.py", description), arguments)  # ends the program if there is a mistake
    from torch.distributed import run  # imported late: torch takes seconds
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()
    try:
        run.main(["--standalone", "--nproc-per-node", n_ranks, script, *arguments])
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"train.py: error: rank {rank} was ended by {name}", file=sys.stderr)
        sys.exit(max(1, failure.exitcode))


if __name__ == "__main__":
    main(*sys.argv[1:])
