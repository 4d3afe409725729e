"""Steps and clips two optimizers of one model like one, such as Muon for matrices and AdamW for the rest.

Clipping the two one after the other would use two norms, and change the ratio of their gradients. Source of the idea:
Megatron-LM's ChainedOptimizer. Shown by tests/variants/test_chained.py.
"""

import contextlib
import weakref

import torch
import torch.distributed as dist

from .groups import all_params
from .guarded import mean_loss
from .scaling import clip_grads, tensors_of_ranks
from .skipping import found_inf
from .state_dict import load_state_dicts


def method_of_each(name):
    """Return a method that calls the method `name` of each optimizer that has it.

    It returns one list: the items of the lists that these methods return. A method that returns None adds no item.
    """
    def method(self, *args, **kwargs):
        results = []
        for optimizer in self.optimizers:
            if hasattr(optimizer, name):
                results.extend(getattr(optimizer, name)(*args, **kwargs) or [])
        return results
    return method


class Chained:
    """Lets several optimizers of this project, of any stage or variant, act as one. Each needs a scheduler of its own.

    `checkpoint.save` and `load` accept a Chained like any optimizer. `checkpoint.full_state_dict` accepts it if all
    optimizers have one process group.

    Process groups may differ: experts, for example, have a smaller group (and `average_over`, see docs/experts.md), and
    ranks outside of this group have other experts, or no second optimizer. The norm counts each parameter once. One
    group must contain all others, and every rank must have an optimizer of that group.

    torch.amp.GradScaler steps the Chained: all optimizers step on all ranks, or none steps on any rank.

    The constructor is collective. Raises:
        ValueError: no optimizer's ranks include the ranks of all other optimizers.
    """

    _step_supports_amp_scaling = True  # GradScaler then calls step() on every rank, whatever it finds on this one

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        groups = [optimizer.process_group or dist.group.WORLD for optimizer in optimizers]
        self.process_group = max(groups, key=dist.get_world_size)
        # Of each optimizer, the ranks that train its parameters: in variants/hybrid.py more than its process group has.
        agreement_groups = [optimizer._agreement_group or dist.group.WORLD for optimizer in optimizers]
        self._agreement_group = max(agreement_groups, key=dist.get_world_size)  # all ranks that train the model
        all_ranks = dist.get_process_group_ranks(self._agreement_group)
        ranks_of_each = [dist.get_process_group_ranks(group) for group in agreement_groups]
        self.n_ranks = [len(ranks) for ranks in ranks_of_each]  # for each optimizer, how many ranks have it
        if not all(set(ranks) <= set(all_ranks) for ranks in ranks_of_each):  # subsets
            raise ValueError(f"the optimizers are for ranks {ranks_of_each}: no group has all others as its parts, so "
                             "whose parameters are alike can't be known")
        for optimizer in optimizers:
            optimizer._chain = weakref.ref(self)  # skipping.py refuses a GradScaler that steps one optimizer alone

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        """Return a dict: parameter -> its state."""
        return {param: state for optimizer in self.optimizers for param, state in optimizer.state.items()}

    @property
    def _grads_elsewhere(self):
        return any(optimizer._grads_elsewhere for optimizer in self.optimizers)

    zero_grad = method_of_each("zero_grad")
    set_requires_gradient_sync = method_of_each("set_requires_gradient_sync")
    prefetch_params = method_of_each("prefetch_params")  # only stage 4 has this method and the next
    finish_param_sync = method_of_each("finish_param_sync")

    def finish_grad_sync(self, **arguments):
        """Average the gradients of each optimizer. Raises what an optimizer's `finish_grad_sync` raises."""
        for optimizer in self.optimizers:
            optimizer.finish_grad_sync(**arguments)

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Average the gradients of all optimizers, then step each optimizer. Returns the mean loss of `closure`.

        If each optimizer averaged in its own step, the second one's gradients would be sent after the first one's
        parameters.
        """
        loss = None if closure is None else mean_loss(self, closure, self._agreement_group)
        self.finish_grad_sync()
        if grad_scaler is not None and found_inf(self, grad_scaler):
            self.zero_grad()
            return loss
        mean_closure = [] if closure is None else [lambda: loss]  # a step() may take no argument
        for optimizer in self.optimizers:
            optimizer.step(*mean_closure)
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

        Ranks may have different optimizers. Where n ranks know the norm of an optimizer, each of them adds 1/n of its
        p-th power (p = norm_type), so that the sum over all ranks counts each optimizer once.

        Returns the norm before clipping, a scalar tensor. Raises what an optimizer's `clip_grad_norm_` raises.
        """
        self.finish_grad_sync(max_norm=max_norm, norm_type=norm_type)
        # (norm^p / n)^(1 / p) is norm * n^(-1 / p). For p = inf, where a maximum takes the place of a sum, it is norm.
        shares = [optimizer._total_norm(norm_type) * n_ranks ** (-1 / norm_type)
                  for optimizer, n_ranks in zip(self.optimizers, self.n_ranks)]
        share = torch.linalg.vector_norm(torch.stack(shares), float(norm_type))
        norm = torch.linalg.vector_norm(tensors_of_ranks(share, self._agreement_group), float(norm_type))
        params = [param for optimizer in self.optimizers for param in optimizer._averaged_params()]
        return clip_grads(params, max_norm, norm, error_if_nonfinite)

    def __iter__(self):
        """Iterate over the optimizers, as torch's get_state_dict() and set_state_dict() do with several optimizers."""
        return iter(self.optimizers)

    def state_dict(self):
        """Return one state_dict, as torch's optimizers do. Parameters are counted through all optimizers."""
        state = {}
        groups = []
        n_before = 0  # parameters of the optimizers before
        for optimizer in self.optimizers:
            own_state_dict = optimizer.state_dict()
            indices = range(len(all_params(optimizer)))
            for key, entries in own_state_dict["state"].items():
                new_key = n_before + key if key in indices else key  # a class may keep a state under a text, say
                state[new_key] = entries
            for group in own_state_dict["param_groups"]:
                groups.append({**group, "params": [n_before + index for index in group["params"]]})
            n_before += len(indices)
        return {"state": state, "param_groups": groups, "n_steps": self.optimizers[0]._n_steps}  # all step together

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Load a state_dict of all optimizers. Collective.

        Every optimizer gets what the state_dict has under a key that is no parameter's index: whose it was isn't saved.

        Raises ValueError on every rank, before anything changes, if one of the optimizers can't load its part.
        """
        groups = list(state_dict["param_groups"])  # of this optimizer and those after it
        indices = {index for group in groups for index in group["params"]}
        own_state_dicts = []
        for optimizer in self.optimizers:
            own_groups = groups[: len(optimizer.param_groups)]
            groups = groups[len(own_groups) :]
            own = {index for group in own_groups for index in group["params"]}
            state = {key: entries for key, entries in state_dict["state"].items() if key in own or key not in indices}
            own_state_dicts.append({**state_dict, "state": state, "param_groups": own_groups})
        load_state_dicts(self.optimizers, own_state_dicts, self._agreement_group)
