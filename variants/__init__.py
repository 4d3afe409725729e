"""Options of the big systems, one per file: each is a subclass of the optimizer of a stage.

A stage is a folder with an optimizer whose state is spread over ranks. It has two classes: `ShardedOptimizer`, the
core, is the bare optimizer; `DistributedOptimizer` is the guard, with its checks, in front of the core. Each variant
has two classes with the same names: a subclass of the core, and the guard in front of this subclass.
"""
