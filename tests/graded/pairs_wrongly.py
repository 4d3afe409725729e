"""Leaves a group out where a rank owns nothing of it: the groups after it get another's lr."""

from stage1_naive_broadcast.optimizer import ShardedOptimizer as Stage1


class ShardedOptimizer(Stage1):
    def shard(self, groups):
        super().shard(groups)
        self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group["params"]]

    def step_own(self):
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own["lr"] = group["lr"]
        self.optimizer.step()
