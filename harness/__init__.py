"""Measures and trains what no stage may know: one module a job, listed in the order in which data goes.

meeting, workers                start ranks, on a device and backend that work, and end them together
gpt, models, corpus, training   what is trained: models, text, the loop; train: what every train.py calls
reference, exchange             what every row must agree with, and how messages are sent; owner_reduce: a peer
rows, row_names                 the catalogue: each configuration with what it should send and hold
ledger, memory                  count messages and bytes from outside
results, tables, pictures       what measurements are saved as, and how it is shown
examine, every_row, timeline    measure rows on ranks; alone: in one process that plays rank 0 of d
host_time, gpu_step, losses, two_hosts (with links), plan (with replay, plan_check)    measure
figures, pages                  run all of them, and write the pages; take: writes a stage as a package
"""

import sys

from harness import command_line

# Folders, and packages: the one list of them.
STAGES = ONE, TWO, THREE, FOUR = "stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", "stage4_overlap"

if sys.argv[0] == "-m":  # Python's, while it looks for the module of `python -m harness.…`
    command_line.begin()
