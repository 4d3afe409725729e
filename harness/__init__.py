"""What measuring and training need and no stage may know, in rooms.

A room imports from those before it, and from itself.
Each room's own first lines say what is in it, and who calls it. Stages' train.py import harness.train, and no other.
"""

ROOMS = ("run", "rows", "train", "report", "measure", "plan", "faults")  # the arrow: tests/house holds it

from harness.run import command_line as command_line  # before torch, which takes seconds, so that
from harness.run import signals as signals  # from here on Ctrl-C is one word
