"""Makes a core reliable: `Guarded` in guarded.py says what happens in which order.

A stage's `distributed.py` defines its DistributedOptimizer, with what differs in this stage. The other files here hold
functions and small objects that these classes call, one concern per file.
"""
