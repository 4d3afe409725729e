"""What measuring and training need and no stage may know: one module a job. Stages' train.py import harness.train."""

import sys

from harness import command_line

STAGES = "stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", "stage4_overlap"  # folders, and packages

if sys.argv[0] == "-m":  # Python's, while it looks for the module of `python -m harness.…`
    command_line.begin()
