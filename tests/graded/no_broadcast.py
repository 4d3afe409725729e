"""Every rank keeps the parameters that it was started with."""

import torch

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def __init__(self, params, *args, **kwargs):
        params = list(params)
        own = [param.detach().clone() for param in params]
        super().__init__(params, *args, **kwargs)
        with torch.no_grad():
            for param, value in zip(params, own):
                param.copy_(value)
