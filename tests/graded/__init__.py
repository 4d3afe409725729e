"""Optimizers for `make grade`: a right one in 25 lines, and what learners get wrong in it, a mistake a file."""
