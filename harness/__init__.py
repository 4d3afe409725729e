"""What measuring and training need and no stage may know: one module a job. Stages' train.py import harness.train."""

from harness import command_line as command_line  # before torch, which takes seconds, so that
from harness import processes as processes  # from here on Ctrl-C is one word

STAGES = "stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", "stage4_overlap"  # folders, and packages
