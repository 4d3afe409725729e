"""Stage 3, grad buffer: gradients and parameters take turns in one flat buffer, of which every rank owns 1/d.

This 1/d is the rank's shard. The inner optimizer is a usual torch optimizer, which updates only the main parameters of
this rank: the ranges of parameters that lie in its shard, or fp32 copies of them if they have 16 bits.
Unlike stage 2 (stage2_allgather/): shards ignore parameter boundaries, a rank receives only the gradients that it
needs, and the buffer is allocated once instead of in every step.
Source of the idea: the distributed optimizer of Megatron-LM.
"""

import torch
import torch.distributed as dist

from .buffer import GradBuffer


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that averages gradients over d ranks, and whose state is spread over them, 1/d on each.

    Args:
        params: dense, contiguous tensors on one device, or parameter groups. Rank 0's values are broadcast.
        optimizer_cls: an element-wise torch optimizer class, which updates each element independently of all others.
        process_group: the d ranks that share the work; None means all ranks.
        grad_dtype: torch.float32 sums the gradients of 16-bit parameters in fp32, in `param.main_grad`; None keeps
            them in the dtype of their parameter, in `param.grad`. Both are views of the buffer.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    distributed.py adds, from guard/, what is missing here: frozen parameters, gradients and parameters that other code
    writes (model.zero_grad(), load_state_dict()), clipping, loss scaling, groups added later, saving, and errors that
    say what is wrong.
    """

    buffer_class = GradBuffer  # distributed.py has a subclass in its place

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, grad_dtype=None,
                 **optimizer_kwargs):
        self.process_group = process_group
        self.grad_dtype = grad_dtype
        self.buffers = []  # one for each dtype of parameters
        # This optimizer has no parameters: it is made only to learn which defaults `optimizer_cls` adds.
        defaults = optimizer_cls([{"params": []}], **optimizer_kwargs).defaults  # lr and so on
        super().__init__(params, defaults)
        self.optimizer = optimizer_cls(self.shard(self.param_groups), **optimizer_kwargs)  # updates what this rank owns

    @torch.no_grad()
    def shard(self, groups):
        """Broadcast rank 0's parameters, and make a buffer for the parameters of each dtype.

        Returns the parameter groups of the inner optimizer: each of `groups`, with this rank's main parameters only.
        """
        params = [param for group in groups for param in group["params"]]
        main_param = {}  # parameter -> its main parameter, if this rank owns elements of it
        for dtype in dict.fromkeys(param.dtype for param in params):
            alike = [param for param in params if param.dtype == dtype]
            for param in alike:
                dist.broadcast(param, group=self.process_group, group_src=0)
            buffer = self.buffer_class(alike, self.grad_dtype or dtype, self.process_group)
            main_param.update((alike[r.index], main) for r, main in zip(buffer.ranges, buffer.main_params))
            self.buffers.append(buffer)
        own_groups = []
        for group in groups:
            owned = [main_param[param] for param in group["params"] if param in main_param]
            own_groups.append({**hyperparameters(group), "params": owned})
        return own_groups

    def sync_grads(self):
        """Average the gradients over the ranks. This rank receives only its shard of the averages."""
        for buffer in self.buffers:
            buffer.reduce_scatter_grads()

    def step_own(self):
        """Update the main parameters, with the lr and so on that schedulers have written into our groups."""
        for group, own in zip(self.param_groups, self.optimizer.param_groups):  # own: of the inner optimizer
            own.update(hyperparameters(group))
        self.optimizer.step()

    def sync_params(self):
        """Gather the updated shards of all ranks in the buffer, and copy all parameters into the model."""
        for buffer in self.buffers:
            buffer.take_main_params()
            buffer.all_gather_params()
            buffer.copy_params_to_model()

    @torch.no_grad()
    def step(self):
        """Average the gradients, update all parameters, and zero the gradients. Collective: every rank must call it."""
        self.sync_grads()
        self.step_own()
        self.sync_params()
        self.zero_grad()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Zero the gradients. They stay views of the buffer, whatever `set_to_none` says."""
        for buffer in self.buffers:
            buffer.zero()


def hyperparameters(group):
    """Return the entries of a parameter group other than its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
