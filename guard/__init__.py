"""The guard: code that makes the optimizer of each stage reliable.

A *stage* is a version of the distributed optimizer, in a folder stage*/. Its *core*, the class ShardedOptimizer in its
`optimizer.py`, has the algorithm alone. Its `distributed.py` defines the DistributedOptimizer that programs use: a
subclass of the core and of `Guarded`, with what only this stage needs.

The methods of `Guarded`, in guarded.py, say what happens around the methods of the core, and in which order. They call
the functions and small objects of the other files here. Each of these files is for one concern.
"""
