"""python -m harness.faults: see command.py."""

import queue
import sys

from harness.faults.command import main
from harness.faults.training_run import START_LIMIT_S

if __name__ == "__main__":
    try:
        main()
    except (AssertionError, queue.Empty) as failure:
        sys.exit(f"faults: error: {failure or f'an attempt said nothing for {START_LIMIT_S} seconds'}")
