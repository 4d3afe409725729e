"""The name of the class stands for a number."""

DistributedOptimizer = 5
