"""No torch.no_grad() around the step."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def step(self):
        for param in self.owned():
            param -= 0.1 * param.grad
