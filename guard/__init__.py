"""Makes a core reliable: the methods of `Guarded` in guarded.py run the guard's parts in order.

A stage's `distributed.py` defines its DistributedOptimizer, with the parts that only this stage needs. The other
files here hold functions and small objects that these classes call, one concern per file.
"""
