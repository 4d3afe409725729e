"""A model with two optimizers, Muon for matrices and AdamW for the rest: one step, one clip.

Clipped one by one, each would get a norm of its own, and their ratio would change. Called ChainedOptimizer in
Megatron-LM, which has the idea. Shown by tests/variants/test_chained.py.
"""

import contextlib

import torch


class Chained:
    """Several optimizers of this project, of any stage or variant, as one. A scheduler belongs to each of them.

    `full_state_dict`, `save` and `reshard` take them one by one.
    """

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self):
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the averaged gradients of all to a norm of at most `max_norm`, over them together. -> norm before"""
        for optimizer in self.optimizers:
            optimizer.finish_grad_sync()
        norms = [optimizer._total_norm(norm_type) for optimizer in self.optimizers]
        total_norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        for optimizer in self.optimizers:
            torch.nn.utils.clip_grads_with_norm_(optimizer._averaged_params(), max_norm, total_norm)
        return total_norm

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict):
        for optimizer, its in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(its)
