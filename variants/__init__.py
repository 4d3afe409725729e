"""Options of the big systems, one per file: each is a subclass of a core.

Each file has a stage's two names: `ShardedOptimizer`, the core's subclass, and `DistributedOptimizer`, with the guard
in front of it. README.md has a table of what each variant sends and holds.
"""
