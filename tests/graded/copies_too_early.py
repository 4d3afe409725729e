"""Main parameters are copied before rank 0's have arrived."""

import torch

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def __init__(self, params, *args, **kwargs):
        params = list(params)
        self.main = {param: torch.nn.Parameter(param.detach().clone()) for param in params}
        super().__init__(params, *args, **kwargs)

    def owned(self):
        return [self.main[param] for param in super().owned()]

    @torch.no_grad()
    def step(self):
        for param, main in self.main.items():
            self.average(param.grad)
            main.grad = param.grad
        self.optimizer.step()
        for param, main in self.main.items():
            param.copy_(main)
            self.send(param, self.owner[param])
