"""What makes a core an optimizer that one can rely on: `Guarded` in guarded.py has the order of things.

A stage's `distributed.py` has its DistributedOptimizer: what of this order is the stage's own. Everything else here are
functions and small objects that these classes call, a concern a file.
"""
