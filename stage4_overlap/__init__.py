from .guard import DistributedOptimizer as DistributedOptimizer
