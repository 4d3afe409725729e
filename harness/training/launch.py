"""Starts a train.py on several ranks of this machine, as torchrun does, after its options have been checked.

    python -m harness.training.launch 2 stage4_overlap/train.py [options of train.py …]         # or: make train

A rank is one of the processes that train together. torchrun's long report of failed ranks is left out, so that what the
ranks print is the last that a user sees.

Exit code: 0; the exit code of the first rank that failed; 1 if a signal ended that rank; or 128 + n if this program got
the signal of number n, which is 130 after Ctrl-C.
"""

import ast
import logging
import signal
import sys
from pathlib import Path

from harness.ranks.command_line import Parser
from harness.training import options


def main(n_ranks, script, *arguments):
    """Run `script`, the path of a train.py, with `arguments` on `n_ranks` ranks. All arguments are texts."""
    # --help prints the docstring of the script.
    description = ast.get_docstring(ast.parse(Path(script).read_text(encoding="utf-8")))
    options.parse(Parser("train.py", description), arguments)  # ends the program if an option is wrong
    # Imported only now, because torch takes seconds to load.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()  # torchrun logs when a rank fails
    try:
        run.main(["--standalone", "--nproc-per-node", n_ranks, script, *arguments])
    except SignalException as stopped:  # this process, which is torchrun here, has got a signal
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:  # minus the number of the signal that ended the rank, which could print nothing
            name = signal.Signals(-failure.exitcode).name
            print(f"train.py: error: rank {rank} was ended by {name}", file=sys.stderr)
        sys.exit(max(1, failure.exitcode))  # 1 for a rank that a signal has ended


if __name__ == "__main__":
    main(*sys.argv[1:])
