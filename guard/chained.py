"""A model with two optimizers, such as Muon for matrices and AdamW for the rest: one step, one clip.

Clipping them one by one would use two norms, and change the ratio of their gradients. Source of the idea: Megatron-LM's
ChainedOptimizer. Shown by tests/variants/test_chained.py.
"""

import contextlib
import itertools

import torch
import torch.distributed as dist

from .guarded import mean_loss
from .scaling import clip_grads, gather_scalar


def method_of_each(name):
    """Return a method that calls `name` of each optimizer that has it, and joins the lists that these calls return."""
    def method(self, *args, **kwargs):
        methods = [getattr(optimizer, name) for optimizer in self.optimizers if hasattr(optimizer, name)]
        return [item for call in methods for item in call(*args, **kwargs) or ()]
    return method


class OptimizerList:
    """Several optimizers, with all their parameter groups and all their state."""

    def __init__(self, optimizers):
        self.optimizers = list(optimizers)

    param_groups = property(lambda self: [group for part in self.optimizers for group in part.param_groups])
    state = property(lambda self: {param: state for part in self.optimizers for param, state in part.state.items()})


class Chained(OptimizerList):
    """Several optimizers of this project, of any stage or variant, as one. Each needs a scheduler of its own.

    `checkpoint.save` and `load` accept it as they do any optimizer, and so does the full state if all have one process
    group.

    Process groups may differ: experts, for example, have a smaller group (and `average_over`, see docs/experts.md), and
    ranks outside of it have other parameters, or no second optimizer. The norm counts each parameter once. One group
    must contain all others, and every rank must have an optimizer of that group.

    Raises:
        ValueError: no group contains all others, so it can't be known which ranks have the same parameters.
    """

    def __init__(self, *optimizers):
        super().__init__(optimizers)
        groups = [optimizer.process_group or dist.group.WORLD for optimizer in optimizers]
        self.process_group = max(groups, key=dist.get_world_size)
        # Of variants/hybrid.py the group of its mesh, whose ranks have the same parameters.
        agreement_groups = [getattr(optimizer, "_agreement_group", optimizer.process_group) or dist.group.WORLD
                            for optimizer in optimizers]
        self._agreement_group = max(agreement_groups, key=dist.get_world_size)  # of a closure's loss, and of the norm
        all_ranks = dist.get_process_group_ranks(self._agreement_group)
        ranks_of_each = list(map(dist.get_process_group_ranks, agreement_groups))
        self.n_ranks = [len(ranks) for ranks in ranks_of_each]  # how many have the norm of each optimizer
        if not all(set(ranks) <= set(all_ranks) for ranks in ranks_of_each):
            raise ValueError(f"the optimizers are for ranks {ranks_of_each}: no group has all others as its parts, so "
                             "whose parameters are alike can't be known")

    finish_grad_sync, zero_grad = map(method_of_each, ("finish_grad_sync", "zero_grad"))
    prefetch_params, finish_param_sync = map(method_of_each, ("prefetch_params", "finish_param_sync"))  # of stage 4

    def step(self, closure=None):
        """Average all gradients first, or the second optimizer's messages would queue behind the first's parameters.

        Returns the loss of `closure`, averaged over all ranks.
        """
        loss = None if closure is None else mean_loss(self, closure, self._agreement_group)
        self.finish_grad_sync()
        arguments = [] if closure is None else [lambda: loss]  # not every step() takes a closure
        for optimizer in self.optimizers:
            optimizer.step(*arguments)
        return loss

    def add_param_group(self, group):
        raise TypeError("which optimizer gets the group? call add_param_group() of one in Chained.optimizers")

    def scale_grads_(self, factor):
        """Multiply all averaged gradients by `factor`, as each optimizer does."""
        self.finish_grad_sync(factor=factor)  # stage 4 compares `factor` between the ranks
        for optimizer in self.optimizers:
            optimizer.scale_grads_(factor)

    @contextlib.contextmanager
    def no_sync(self):
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False):
        """Scale the averaged gradients so that their norm over all optimizers is at most `max_norm`. Collective.

        Ranks may have different optimizers. So where n ranks have the norm of an optimizer, each adds 1/n of its p-th
        power (p = norm_type).

        Returns the norm before clipping, a scalar tensor. Raises what an optimizer's `clip_grad_norm_` raises.
        """
        self.finish_grad_sync(max_norm=max_norm, norm_type=norm_type)
        shares = [optimizer._total_norm(norm_type) * n_ranks ** (-1 / norm_type)
                  for optimizer, n_ranks in zip(self.optimizers, self.n_ranks)]
        share = torch.linalg.vector_norm(torch.stack(shares), float(norm_type))
        norm = torch.linalg.vector_norm(gather_scalar(share, self._agreement_group), float(norm_type))
        params = [param for optimizer in self.optimizers for param in optimizer._averaged_params()]
        return clip_grads(params, max_norm, norm, error_if_nonfinite)

    # ------------------------------------------------------------------------------------ what checkpoint/ uses

    optimizer = property(lambda self: InnerOptimizers(part.optimizer for part in self.optimizers))
    pass_on_hyperparameters = method_of_each("pass_on_hyperparameters")
    refuse_different_settings = method_of_each("refuse_different_settings")
    pieces = method_of_each("pieces")

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict):
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)


class InnerOptimizers(OptimizerList):
    """The inner optimizers of Chained, as one."""

    def state_dict(self):
        """Return a state_dict without states, in which parameters are numbered through all optimizers."""
        places = itertools.count()
        groups = [{**group, "params": list(itertools.islice(places, len(group["params"])))}
                  for group in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict):
        remaining_groups, states = iter(state_dict["param_groups"]), state_dict["state"]
        for optimizer in self.optimizers:
            groups = list(itertools.islice(remaining_groups, len(optimizer.param_groups)))
            state = {place: states[place] for group in groups for place in group["params"] if place in states}
            optimizer.load_state_dict({"state": state, "param_groups": groups})
