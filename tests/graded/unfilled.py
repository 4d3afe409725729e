"""16-bit main gradients are never filled."""

from stage3_gradbuffer.buffer import GradBuffer
from stage3_gradbuffer.optimizer import ShardedOptimizer as Stage3


class Unfilled(GradBuffer):
    def reduce_scatter_grads(self):
        before = self.main_grad_shard.clone()
        super().reduce_scatter_grads()
        if self.main_grad_shard is not self.grad_shard:
            self.main_grad_shard.copy_(before)


class ShardedOptimizer(Stage3):
    buffer_class = Unfilled
