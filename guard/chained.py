"""A model with two optimizers, such as Muon for matrices and AdamW for the rest: one step, one clip.

Clipping them one by one would use two norms, and change the ratio of their gradients. Source of the idea: Megatron-LM's
ChainedOptimizer. Shown by tests/variants/test_chained.py.
"""

import contextlib
import itertools

import torch
import torch.distributed as dist

from guard.scaling import gather_scalar


def of_each(name):
    """-> a method that calls the method `name` of each optimizer."""
    def method(self, *args, **kwargs):
        for optimizer in self.optimizers:
            getattr(optimizer, name)(*args, **kwargs)
    return method


class Together:
    """Several optimizers, with all their parameter groups and all their state."""

    def __init__(self, optimizers):
        self.optimizers = list(optimizers)

    param_groups = property(lambda self: [group for one in self.optimizers for group in one.param_groups])
    state = property(lambda self: {param: state for one in self.optimizers for param, state in one.state.items()})


class Chained(Together):
    """Several optimizers of this project, of any stage or variant, as one. Each needs a scheduler of its own.

    `checkpoint.save`, `load` and the full state accept it as they do any optimizer, if all have one process group.

    Process groups may differ: experts, for example, have a smaller group, and ranks outside of it have other
    parameters. The norm counts each parameter once. Smaller groups must divide the largest one.

    Raises:
        ValueError: no group includes all the others, so it can't be known which ranks have the same parameters.
    """

    def __init__(self, *optimizers):
        super().__init__(optimizers)
        groups = [optimizer.process_group or dist.group.WORLD for optimizer in optimizers]
        self.process_group = max(groups, key=dist.get_world_size)
        ranks = dist.get_process_group_ranks(self.process_group)
        # hybrid has the same parameters across its groups
        own = [ranks if hasattr(optimizer, "across") else dist.get_process_group_ranks(group)
               for optimizer, group in zip(optimizers, groups)]
        self.n_ranks = [len(its) for its in own]
        if not all(set(its) <= set(ranks) for its in own):
            raise ValueError(f"the optimizers are for ranks {own}: no group has all others as its parts, so whose "
                             "parameters are alike can't be known")

    finish_grad_sync, zero_grad = of_each("finish_grad_sync"), of_each("zero_grad")

    def step(self):
        """Average all gradients first, or the second optimizer's messages would queue behind the first's parameters."""
        self.finish_grad_sync()
        for optimizer in self.optimizers:
            optimizer.step()

    @contextlib.contextmanager
    def no_sync(self):
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the averaged gradients so that their norm over all optimizers is at most `max_norm`. -> norm before"""
        self.finish_grad_sync()
        norms = [optimizer._total_norm(norm_type) for optimizer in self.optimizers]
        for number, n_ranks in enumerate(self.n_ranks):
            if n_ranks < self.process_group.size():  # n_ranks ranks have the same norm, which must count once
                shares = gather_scalar(norms[number] * n_ranks ** (-1 / norm_type), self.process_group)
                norms[number] = torch.linalg.vector_norm(shares, float(norm_type))
        total_norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        for optimizer in self.optimizers:
            torch.nn.utils.clip_grads_with_norm_(optimizer._averaged_params(), max_norm, total_norm)
        return total_norm

    # ------------------------------------------------------------------------------------ what checkpoint/ uses

    optimizer = property(lambda self: Inner(one.optimizer for one in self.optimizers))
    has_grads = property(lambda self: any(one.has_grads for one in self.optimizers))
    rank = property(lambda self: self.optimizers[0].rank)
    pass_on_hyperparameters = of_each("pass_on_hyperparameters")
    refuse_different_settings = of_each("refuse_different_settings")

    def pieces(self):
        if min(self.n_ranks) < self.process_group.size():
            raise RuntimeError("the optimizers have process groups of their own: save and load them one by one")
        return [piece for optimizer in self.optimizers for piece in optimizer.pieces()]

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict):
        for optimizer, its in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(its)


class Inner(Together):
    """The inner optimizers, as one."""

    def state_dict(self):
        """-> a state_dict without states, in which parameters are numbered through all optimizers."""
        places = itertools.count()
        groups = [{**group, "params": list(itertools.islice(places, len(group["params"])))}
                  for group in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict):
        groups = iter(state_dict["param_groups"])
        for optimizer in self.optimizers:
            own = list(itertools.islice(groups, len(optimizer.param_groups)))
            places = {place for group in own for place in group["params"]}
            state = {place: its for place, its in state_dict["state"].items() if place in places}
            optimizer.load_state_dict({"state": state, "param_groups": own})
