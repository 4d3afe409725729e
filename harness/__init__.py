"""Measures and trains what no stage may know: a folder a job, each importing only folders above it in this list.

ranks        starts processes, and ends programs
publishing   tables, pictures, the pages; packages of the stages
training     models, text, the loop, and the rows: all ways to train that are compared
measuring    time, traffic and memory of rows: on this machine, on two hosts, on a GPU
planning     memory and time on machines that nobody has started
"""

import sys

from harness.ranks import command_line

# Folders, and packages: the one list of them.
STAGE_1 = "stage1_naive_broadcast"
STAGE_2 = "stage2_allgather"
STAGE_3 = "stage3_gradbuffer"
STAGE_4 = "stage4_overlap"
STAGES = STAGE_1, STAGE_2, STAGE_3, STAGE_4

if sys.argv[0] == "-m":  # Python's, while it looks for the module of `python -m harness.…`
    command_line.begin()
