from .optimizer import DistributedOptimizer as DistributedOptimizer
