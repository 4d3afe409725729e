"""Lets two or more optimizers of one model act as one, such as Muon for matrices and AdamW for all other parameters.

If a program clipped the gradients of each optimizer separately, it would use two norms, and would change the ratio
between the gradients of the two optimizers. Source of the idea: Megatron-LM's ChainedOptimizer. Shown by
tests/variants/test_chained.py.

"Optimizer" here is a DistributedOptimizer of this project: it averages gradients over the ranks of its process group,
and each rank updates a part of the parameters. A *stage* is a version of it, in a folder stage*/; a *variant* is a
changed stage, in variants/. Each optimizer has an *agreement group*: all ranks that train its parameters.
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
    """Return a method for Chained. It calls the method `name` of each optimizer that has such a method.

    It returns one list, with the items of all lists that these methods return. A method may also return None.
    """
    def method(self, *args, **kwargs):
        results = []
        for optimizer in self.optimizers:
            if hasattr(optimizer, name):
                results.extend(getattr(optimizer, name)(*args, **kwargs) or [])
        return results
    return method


class Chained:
    """Lets several optimizers of this project, of any stage or variant, act as one optimizer.

    Each of the optimizers needs a learning rate scheduler of its own.

    `checkpoint.save` and `load` accept a Chained like any optimizer. `checkpoint.full_state_dict` accepts it if all
    optimizers have the same process group.

    The process groups of the optimizers may differ. For example, the optimizer of an expert has a smaller group (and
    the argument `average_over`, see docs/experts.md), and ranks outside of this group have other experts, or have no
    second optimizer. The norm counts each parameter once. The largest group must contain all ranks of the other groups,
    and every rank must have an optimizer with the largest group.

    torch.amp.GradScaler steps the Chained: all optimizers step on all ranks, or no optimizer steps on any rank.

    The constructor is collective. Raises:
        ValueError: no optimizer's ranks include the ranks of all other optimizers.
    """

    # GradScaler reads this mark. It then calls step(grad_scaler=itself) also if the gradients of this rank have an inf,
    # so that step() can tell the other ranks.
    _step_supports_amp_scaling = True

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        groups = [optimizer.process_group or dist.group.WORLD for optimizer in optimizers]
        self.process_group = max(groups, key=dist.get_world_size)
        # The agreement group of an optimizer is its process group; in variants/hybrid.py it has more ranks.
        agreement_groups = [optimizer._agreement_group or dist.group.WORLD for optimizer in optimizers]
        self._agreement_group = max(agreement_groups, key=dist.get_world_size)  # all ranks that train the model
        all_ranks = dist.get_process_group_ranks(self._agreement_group)
        ranks_of_each = [dist.get_process_group_ranks(group) for group in agreement_groups]
        self.n_ranks = [len(ranks) for ranks in ranks_of_each]  # for each optimizer the number of ranks that have it
        if not all(set(ranks) <= set(all_ranks) for ranks in ranks_of_each):  # <= of sets: is a subset of
            raise ValueError(f"the optimizers are for ranks {ranks_of_each}: no group has all others as its parts, so "
                             "whose parameters are alike can't be known")
        for optimizer in optimizers:
            # skipping.py reads `_chain`, to refuse a GradScaler that steps this optimizer alone.
            optimizer._chain = weakref.ref(self)

    @property
    def param_groups(self):
        """Return the parameter groups of all optimizers, for schedulers and for torch's functions."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        """Return a new dict with the states of all optimizers: parameter -> its state."""
        return {param: state for optimizer in self.optimizers for param, state in optimizer.state.items()}

    @property
    def _grads_elsewhere(self):
        """Return whether a gradient of this step was ever outside of `param.grad`. skipping.py reads it."""
        return any(optimizer._grads_elsewhere for optimizer in self.optimizers)

    zero_grad = method_of_each("zero_grad")
    set_requires_gradient_sync = method_of_each("set_requires_gradient_sync")
    # Only optimizers of stage 4, whose step() can return before updated parameters arrive, have the next two methods.
    prefetch_params = method_of_each("prefetch_params")
    finish_param_sync = method_of_each("finish_param_sync")

    def finish_grad_sync(self, **arguments):
        """Average the gradients of each optimizer over its ranks. Idempotent: averages aren't averaged again.

        arguments: the arguments of `clip_grad_norm_` or `scale_grads_`, by name. Stage 4 compares them between ranks.
        Raises what an optimizer's `finish_grad_sync` raises.
        """
        for optimizer in self.optimizers:
            optimizer.finish_grad_sync(**arguments)

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Average the gradients of all optimizers, then step each optimizer.

        Otherwise the gradients of the second optimizer would be sent after the parameters of the first optimizer.

        grad_scaler: torch.amp.GradScaler passes itself. If it finds an inf on any rank, all ranks skip the step.
        Returns the loss that `closure` returns, averaged over the ranks; without `closure`, None.
        """
        loss = None if closure is None else mean_loss(self, closure, self._agreement_group)
        self.finish_grad_sync()
        if grad_scaler is not None and found_inf(self, grad_scaler):
            self.zero_grad()
            return loss
        # Each step gets a closure that returns the mean loss, or no argument, since a step() may take none.
        closures = [] if closure is None else [lambda: loss]
        for optimizer in self.optimizers:
            optimizer.step(*closures)
        return loss

    def add_param_group(self, group):
        """Raise TypeError, because it isn't known which optimizer the group is for."""
        raise TypeError("which optimizer gets the group? call add_param_group() of one in Chained.optimizers")

    def scale_grads_(self, factor):
        """Average all gradients if they aren't averaged yet, and multiply them by `factor`."""
        self.finish_grad_sync(factor=factor)  # stage 4 compares `factor` between the ranks
        for optimizer in self.optimizers:
            optimizer.scale_grads_(factor)

    @contextlib.contextmanager
    def no_sync(self):
        """Within this context, accumulate gradients without communication, in all optimizers."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False):
        """Scale the averaged gradients so that their norm over all optimizers is at most `max_norm`. Collective.

        Ranks may have different optimizers. If n ranks have an optimizer, each of them adds 1/n of the p-th power of
        the norm of its gradients (p = norm_type). So the sum over all ranks counts these gradients once.

        Returns the norm before clipping, a scalar tensor. Raises what an optimizer's `clip_grad_norm_` raises.
        """
        self.finish_grad_sync(max_norm=max_norm, norm_type=norm_type)
        # Each summand norm^p / n is the p-th power of a share, norm * n^(-1 / p); vector_norm() of the shares takes the
        # powers, the sum and the root. For p = inf, which is a maximum and no sum, the share is the norm itself.
        shares = [optimizer._total_norm(norm_type) * n_ranks ** (-1 / norm_type)
                  for optimizer, n_ranks in zip(self.optimizers, self.n_ranks)]
        share = torch.linalg.vector_norm(torch.stack(shares), float(norm_type))
        norm = torch.linalg.vector_norm(tensors_of_ranks(share, self._agreement_group), float(norm_type))
        # The tensors of this rank whose `grad` is an average.
        params = [param for optimizer in self.optimizers for param in optimizer._averaged_params()]
        return clip_grads(params, max_norm, norm, error_if_nonfinite)

    def __iter__(self):
        """Iterate over the optimizers, as torch's get_state_dict() and set_state_dict() do with several optimizers."""
        return iter(self.optimizers)

    def state_dict(self):
        """Return a single state_dict of all optimizers, in the form of torch's optimizers. Not collective.

        Parameters are counted through all optimizers, in the order of the optimizers.
        """
        state = {}
        groups = []
        n_before = 0  # number of parameters that the earlier optimizers of the list have
        for optimizer in self.optimizers:
            own_state_dict = optimizer.state_dict()
            indices = range(len(all_params(optimizer)))
            for key, entries in own_state_dict["state"].items():
                # A key that is no index of a parameter stays: a class may keep a state under a text, for example.
                new_key = n_before + key if key in indices else key
                state[new_key] = entries
            for group in own_state_dict["param_groups"]:
                groups.append({**group, "params": [n_before + index for index in group["params"]]})
            n_before += len(indices)
        return {"state": state, "param_groups": groups, "n_steps": self.optimizers[0]._n_steps}  # equal for all

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Load a state_dict that `state_dict` of a Chained has returned. Collective.

        A state under a key that is no parameter's index is loaded into every optimizer, because the state_dict doesn't
        say which optimizer it was from.

        Raises ValueError on every rank, before anything changes, if one of the optimizers can't load its part.
        """
        groups = list(state_dict["param_groups"])  # the groups that no optimizer of the loop below has taken yet
        indices = {index for group in groups for index in group["params"]}
        own_state_dicts = []
        for optimizer in self.optimizers:
            own_groups = groups[: len(optimizer.param_groups)]
            groups = groups[len(own_groups) :]
            own = {index for group in own_groups for index in group["params"]}  # indices of its parameters
            state = {key: entries for key, entries in state_dict["state"].items() if key in own or key not in indices}
            own_state_dicts.append({**state_dict, "state": state, "param_groups": own_groups})
        load_state_dicts(self.optimizers, own_state_dicts, self._agreement_group)
