"""Starts ranks, trains, measures, and writes pages. The stages, which are four optimizers, work without this code.

Each folder has one job. It imports only from folders above it in this list, and from outside of harness/.

ranks        starts the processes of a training run, the ranks, and ends programs
publishing   writes tables, pictures and pages, and makes packages of the stages
training     has the models, the text, the training loop, and the rows: all ways to train that are compared
measuring    measures time, traffic and memory of rows: on this machine, on two emulated hosts, on a GPU
planning     calculates memory and time of training on many GPUs, without starting it
"""

import sys

from harness.ranks import command_line

# The stages. Each is a folder of the repository and a package for Python. Nothing else lists all of them.
STAGE_1 = "stage1_naive_broadcast"
STAGE_2 = "stage2_allgather"
STAGE_3 = "stage3_gradbuffer"
STAGE_4 = "stage4_overlap"
STAGES = STAGE_1, STAGE_2, STAGE_3, STAGE_4

# Python has set argv[0] to "-m" while it looks for the module that `python -m harness.…` is about to run. From here on
# Ctrl-C ends the program with one word, also while the module loads torch, which takes seconds.
if sys.argv[0] == "-m":
    command_line.begin()
