"""For whoever uses this as any torch optimizer: closures, schedulers, groups that are added later, copies.

The inner optimizer steps what this rank owns; what users write into our groups it must see, and what it writes into its
own they must. Shown by tests/stages/test_contract.py and tests/stages/test_stages.py.
"""

import contextlib
import functools

import torch
import torch.distributed as dist

from .groups import all_params, copy_hyperparameters, hyperparameters
from .hooks import without_global_hooks
from .refuse import checked_groups, param_ids, refuse_edited
from .settings import difference_between_ranks
from .tried import warn_of_an_untried_torch


class Wrapper:
    """What it needs of its stage: `_refuse(named)` and `_probe(make_optimizer, groups)`, which raise what can't be
    trained; `finish_grad_sync()`; and `_take_parts(state_dict)`, which takes what a stage's own state_dict has besides.
    """

    _known_params = None  # param_ids() of what has been sharded; None while torch's constructor runs

    def _prepare(self, params, optimizer_cls, process_group, optimizer_kwargs, **settings):
        """-> the parameter groups, after all refusals. `settings`: the stage's own arguments, by name."""
        warn_of_an_untried_torch()
        self.make_optimizer = functools.partial(optimizer_cls, **optimizer_kwargs)
        self.process_group = process_group
        settings = {"optimizer_cls": optimizer_cls, **settings, **optimizer_kwargs}
        groups = self._checked(params, settings=settings)
        self._join(process_group)
        return groups

    def _join(self, process_group):
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)  # -1: in none

    def _checked(self, params, existing=(), settings=None):
        groups = checked_groups(params, self.process_group, existing, refuse=self._refuse, settings=settings)
        self._probe(self.make_optimizer, groups)
        return groups

    def __getstate__(self):
        raise TypeError("DistributedOptimizer can't be copied or pickled, it is one part of d: use state_dict()")

    @torch.no_grad()
    def add_param_group(self, param_group):
        """Add a group with its own hyperparameters. Collective; raises what the constructor raises."""
        if self._known_params is None:
            return super().add_param_group(param_group)
        (param_group,) = self._checked([param_group], self.param_groups)
        super().add_param_group(param_group)
        self.shard(self.param_groups[-1:])

    @torch.no_grad()
    def shard(self, groups):
        n_before = len(self.optimizer.param_groups)
        if any(group["params"] for group in groups):
            super().shard(groups)
        else:  # added empty, by a split into what decays and what doesn't say
            for group in groups:
                self.optimizer.add_param_group({**hyperparameters(group), "params": []})
        for group in self.optimizer.param_groups[n_before:]:
            self.optimizer.state.update(self.make_optimizer([dict(group)]).state)  # Adagrad's, which torch < 2.13 lacks
        # autograd saw nothing of the broadcast: a graph that has read the old values is refused
        torch.autograd.graph.increment_version([param for group in groups for param in group["params"]])
        self._known_params = param_ids(self.param_groups)

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Average the gradients, step what this rank owns, bring every rank's parameters to all. Collective.

        Returns the loss of `closure`, averaged over the ranks, or None. torch.amp.GradScaler.step passes itself in, as
        `grad_scaler`: an inf or nan on any rank makes every rank skip the step, and lower its scale.

        Raises:
            RuntimeError: the parameters in `param_groups` are not those that were added; or what `finish_grad_sync`
                raises.
        """
        refuse_edited(self.param_groups, self._known_params)
        loss = self._closure_loss(closure) if closure is not None else None
        self.finish_grad_sync()
        if grad_scaler is not None and self._found_inf(grad_scaler):
            self._skip_step()
        else:  # the phases of the core's step; torch would call its step hooks once more inside of that
            self.step_own()
            self.sync_params()
        return loss

    def _skip_step(self):
        self.zero_grad()  # model.zero_grad() knows nothing of an inf that is elsewhere

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without communication. In stages 1 to 3 nothing travels before `step` anyway."""
        return contextlib.nullcontext()

    def step_own(self):
        with without_global_hooks():
            super().step_own()
        copy_hyperparameters(self.optimizer.param_groups, self.param_groups)  # some count steps there

    def refuse_different_settings(self):
        """RuntimeError on every rank if the parameter groups of the ranks differ. Collective, before a save say."""
        difference = difference_between_ranks(self.param_groups, self.process_group)
        if difference:
            raise RuntimeError(difference)

    def pass_on_hyperparameters(self):
        copy_hyperparameters(self.param_groups, self.optimizer.param_groups)

    def _closure_loss(self, closure):
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            return None
        if hasattr(loss, "full_tensor"):  # a DTensor, maybe of partial sums
            loss = loss.full_tensor()
        loss = torch.as_tensor(loss, device=all_params(self)[0].device).detach().clone()
        dist.all_reduce(loss, group=self.process_group)
        return loss / dist.get_world_size(self.process_group)

    def state_dict(self):
        """This rank's part of the state, without communication: to be loaded on the same rank of as many.

        Raises:
            ValueError: somebody has put into `state` what is of no tensor that this rank steps.
        """
        self.pass_on_hyperparameters()
        stepped = {id(param) for param in all_params(self.optimizer)}
        for param, state in list(self.optimizer.state.items()):
            if not isinstance(param, torch.Tensor):
                continue  # what has a name for a key torch saves as it is
            if not state:
                del self.optimizer.state[param]  # made by torch for somebody who looked; maybe another rank steps it
            elif id(param) not in stepped:
                shape = tuple(param.shape)
                raise ValueError(f"optimizer.state has a tensor of shape {shape}, which isn't stepped here: remove it")
        return {**self.optimizer.state_dict(), "rank": self.rank, "world_size": self.world_size}

    def load_state_dict(self, state_dict):
        """Take over what `state_dict` returned on this rank, without communication.

        Raises:
            ValueError: it was made by another rank, on another number of ranks, or with other shards.
        """
        made_by, here = (state_dict.get("rank"), state_dict.get("world_size")), (self.rank, self.world_size)
        if made_by != here:
            raise ValueError(f"this state_dict is of (rank, world size) {made_by}, this is {here}")
        self._take_parts(state_dict)
        self.optimizer.load_state_dict(state_dict)
        copy_hyperparameters(self.optimizer.param_groups, self.param_groups)
