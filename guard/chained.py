"""A model with two optimizers, such as Muon for matrices and AdamW for the rest: one step, one clip.

Clipping them one by one would use two norms, and change the ratio of their gradients. Source of the idea: Megatron-LM's
ChainedOptimizer. Shown by tests/variants/test_chained.py.
"""

import contextlib
import weakref

import torch
import torch.distributed as dist

from .guarded import mean_loss
from .scaling import clip_grads, gather
from .skipping import found_inf
from .state_dict import load_state_dicts


def method_of_each(name):
    """Return a method that calls `name` of each optimizer that has it, and joins the lists that these calls return."""
    def method(self, *args, **kwargs):
        methods = [getattr(optimizer, name) for optimizer in self.optimizers if hasattr(optimizer, name)]
        return [item for call in methods for item in call(*args, **kwargs) or ()]
    return method


class Chained:
    """Several optimizers of this project, of any stage or variant, as one. Each needs a scheduler of its own.

    `checkpoint.save` and `load` accept it as they do any optimizer, and so does the full state if all have one process
    group.

    Process groups may differ: experts, for example, have a smaller group (and `average_over`, see docs/experts.md), and
    ranks outside of it have other parameters, or no second optimizer. The norm counts each parameter once. One group
    must contain all others, and every rank must have an optimizer of that group.

    A step happens in all optimizers, on all ranks, or is left out in all: torch.amp.GradScaler steps the chain.

    The constructor is collective. Raises:
        ValueError: no group contains all others, so it can't be known which ranks have the same parameters.
    """

    _step_supports_amp_scaling = True  # GradScaler then calls step() on every rank, whatever it finds on this one

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        groups = [optimizer.process_group or dist.group.WORLD for optimizer in optimizers]
        self.process_group = max(groups, key=dist.get_world_size)
        # Of variants/hybrid.py the group of its mesh, whose ranks have the same parameters.
        agreement_groups = [optimizer._agreement_group or dist.group.WORLD for optimizer in optimizers]
        self._agreement_group = max(agreement_groups, key=dist.get_world_size)  # of all ranks that train the model
        all_ranks = dist.get_process_group_ranks(self._agreement_group)
        ranks_of_each = list(map(dist.get_process_group_ranks, agreement_groups))
        self.n_ranks = [len(ranks) for ranks in ranks_of_each]  # how many have the norm of each optimizer
        if not all(set(ranks) <= set(all_ranks) for ranks in ranks_of_each):
            raise ValueError(f"the optimizers are for ranks {ranks_of_each}: no group has all others as its parts, so "
                             "whose parameters are alike can't be known")
        for optimizer in optimizers:
            optimizer._chain = weakref.ref(self)

    param_groups = property(lambda self: [group for part in self.optimizers for group in part.param_groups])
    state = property(lambda self: {param: state for part in self.optimizers for param, state in part.state.items()})
    zero_grad = method_of_each("zero_grad")
    set_requires_gradient_sync = method_of_each("set_requires_gradient_sync")
    prefetch_params, finish_param_sync = map(method_of_each, ("prefetch_params", "finish_param_sync"))  # of stage 4

    _grads_elsewhere = property(lambda self: any(optimizer._grads_elsewhere for optimizer in self.optimizers))

    def finish_grad_sync(self, **arguments):
        """Average the gradients of each optimizer. Raises what it raises."""
        for optimizer in self.optimizers:
            optimizer.finish_grad_sync(**arguments)

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Average all gradients first, or the second optimizer's messages would queue behind the first's parameters.

        Returns the loss of `closure`, averaged over all ranks.
        """
        loss = None if closure is None else mean_loss(self, closure, self._agreement_group)
        self.finish_grad_sync()
        if grad_scaler is not None and found_inf(self, grad_scaler):
            self.zero_grad()
            return loss
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
        norm = torch.linalg.vector_norm(gather(share, self._agreement_group), float(norm_type))
        params = [param for optimizer in self.optimizers for param in optimizer._averaged_params()]
        return clip_grads(params, max_norm, norm, error_if_nonfinite)

    def __iter__(self):
        """Iterate over the optimizers: torch's get_state_dict() and set_state_dict() take several."""
        return iter(self.optimizers)

    def state_dict(self):
        """Return one state_dict, as torch's optimizers do, in which parameters are numbered through all optimizers."""
        state, groups = {}, []
        n_before = 0
        for part in [optimizer.state_dict() for optimizer in self.optimizers]:
            index_of = {index: n_before + index for group in part["param_groups"] for index in group["params"]}
            state.update({index_of.get(key, key): entries for key, entries in part["state"].items()})
            groups += [{**group, "params": [index_of[index] for index in group["params"]]}
                       for group in part["param_groups"]]
            n_before += len(index_of)
        return {"state": state, "param_groups": groups, "n_steps": self.optimizers[0]._n_steps}

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Load it into all optimizers, or raise a ValueError on every rank before anything changes. Collective."""
        groups = list(state_dict["param_groups"])
        parts = []
        for optimizer in self.optimizers:
            own_groups, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            keys = [key for group in own_groups for key in group["params"]]
            state = {key: state_dict["state"][key] for key in keys if key in state_dict["state"]}
            parts.append({**state_dict, "state": state, "param_groups": own_groups})
        load_state_dicts(self.optimizers, parts, self._agreement_group or self.process_group)
