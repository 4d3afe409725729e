"""Options of the big systems, a file each: a subclass of a core, which the guard takes in one line.

Each has the two names of a stage: `ShardedOptimizer`, the core's subclass, and `DistributedOptimizer`, with the guard
in front. `python -m variants` prints what each sends and holds.
"""
