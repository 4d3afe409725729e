"""What measuring and training need and no stage may know: one module a job. Stages' train.py import harness.train."""

import sys

from harness import command_line

# Folders, and packages: the one list of them.
STAGES = ONE, TWO, THREE, FOUR = "stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", "stage4_overlap"

if sys.argv[0] == "-m":  # Python's, while it looks for the module of `python -m harness.…`
    command_line.begin()
