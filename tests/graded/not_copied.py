"""16-bit parameters: what was stepped in fp32 is not copied to the model."""

from stage4_overlap.buffer import Bucket
from stage4_overlap.optimizer import ShardedOptimizer as Stage4


class NotCopied(Bucket):
    def start_param_sync(self):
        self.param_sync = self.transport.all_gather(self.shards)


class ShardedOptimizer(Stage4):
    bucket_class = NotCopied
