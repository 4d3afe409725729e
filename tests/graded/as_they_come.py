"""Buckets leave as they come, in another order on every rank."""

from stage4_overlap.optimizer import ShardedOptimizer as Stage4


class ShardedOptimizer(Stage4):
    def on_grad_ready(self, param):
        bucket = self.bucket_of[param]
        bucket.ready.add(param)
        if bucket.is_full():
            self.send_grads(bucket)
