"""Options of the big systems, one per file: each is a subclass of the optimizer of a stage.

A stage is a folder with an optimizer that shards its state over ranks. It has two classes: `ShardedOptimizer`, the
core, which is short, and `DistributedOptimizer`, in which a guard adds checks to the core. Each variant has two classes
with the same names: a subclass of the core, and a class with the guard in front of this subclass. README.md has a table
of what each variant sends and holds.
"""
