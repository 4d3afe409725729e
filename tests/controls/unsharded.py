"""Trains like the reference, and is sharded in name only: every rank holds the whole state."""

import torch

from stage1_naive_broadcast import DistributedOptimizer as Stage1


class DistributedOptimizer(Stage1):
    @torch.no_grad()
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        mine = self.optimizer.param_groups[-1]
        owned = {id(param) for param in mine["params"]}
        self._add_to_inner(
            self.param_groups[-1], [param for param in self.param_groups[-1]["params"] if id(param) not in owned]
        )
        mine["params"] += self.optimizer.param_groups.pop()["params"]
