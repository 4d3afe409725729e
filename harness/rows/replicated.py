"""Rung 0: nothing is sharded. Every rank steps every parameter, behind the face that the stages have.

    from harness.rows.replicated import DistributedOptimizer      # and in place of this line:
    from stage4_overlap import DistributedOptimizer

It is what the rows of the bench are compared with: beneath DDP (`average_gradients=False`) the usual way to train, and
without DDP one all-reduce in `step`. Source of the idea: veScale's BasicOptimizer.
"""

import contextlib

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like

from harness.rows.dtensors import OfDTensors, clip_grad_norm_, local, mean_over_ranks


class Replicated(torch.optim.Optimizer):
    """Averages gradients over the ranks, unless DDP has, and steps all parameters. Arguments: those of stage 1.

    Without: parameters that some ranks don't use, several dtypes, loss scaling, errors that say what is wrong.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, average_gradients=True,
                 **optimizer_kwargs):
        self.process_group, self.average_gradients = process_group, average_gradients
        self.grads_synced = False
        self.optimizer = optimizer_cls([{"params": []}], **optimizer_kwargs)
        self.optimizer.param_groups.clear()  # torch wants a group; `add_param_group` adds the real ones
        super().__init__(params, self.optimizer.defaults)
        self.share()

    def share(self):
        """Our groups and state are the inner optimizer's, which steps everything."""
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    @torch.no_grad()
    def add_param_group(self, param_group):
        self.optimizer.add_param_group(param_group)
        for param in self.optimizer.param_groups[-1]["params"]:
            dist.broadcast(local(param), group=self.process_group, group_src=0)

    def params(self):
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]

    @torch.no_grad()
    def sync_grads(self):
        grads = [local(param.grad) for param in self.params()]
        flat = flatten(grads)  # (numel of all,)
        flat /= dist.get_world_size(self.process_group)
        dist.all_reduce(flat, group=self.process_group)
        torch._foreach_copy_(grads, cut_like(flat, grads))

    def step_own(self):
        self.optimizer.step()

    def sync_params(self):
        """Every rank has stepped them all."""

    def finish_grad_sync(self):
        if self.average_gradients and not self.grads_synced:
            self.sync_grads()
            self.grads_synced = True

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = mean_over_ranks(closure(), self.process_group)
        self.finish_grad_sync()
        self.step_own()
        self.sync_params()
        self.grads_synced = False
        return loss

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.grads_synced = False

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        self.finish_grad_sync()
        return clip_grad_norm_(self.params(), max_norm, norm_type)

    def no_sync(self):
        """Gradients travel in `step` only: there is nothing to leave out."""
        return contextlib.nullcontext()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
        self.share()


class DistributedOptimizer(OfDTensors, Replicated):
    """Of a tensor-parallel model `process_group` is the data-parallel dimension of the mesh, mesh["dp"].get_group()."""
