"""For whoever uses this as any torch optimizer: closures, schedulers, groups that are added later, copies, wrappers.

The inner optimizer steps what this rank owns; what users write into our groups it must see, and what it writes into its
own they must. Shown by tests/stages/test_contract.py, tests/stages/test_stages.py, and tests/stages/test_wrappers.py.
"""

import contextlib
import functools
import numbers

import torch
import torch.distributed as dist

from .groups import all_params, copy_hyperparameters, hyperparameters
from .hooks import without_global_hooks
from .refuse import agree, checked_groups, param_ids, refuse_edited
from .schema import checked_state_dict
from .settings import difference_between_ranks
from .torch_clip import watch_torchs_clipping
from .tried import warn_of_an_untried_torch
from .wrapped import SeenThroughWrappers


class Wrapper(SeenThroughWrappers):
    """What it needs of its stage: `_refuse(named)` and `_probe(make_optimizer, groups)`, which raise what can't be
    trained; `finish_grad_sync()`; and `_parts_in(state_dict)`, pairs (here, saved) of what a stage's own has besides.
    """

    _known_params = None  # param_ids() of what has been sharded; None while torch's constructor runs
    _elsewhere: frozenset = frozenset()  # parameters of which other ranks step all

    def _prepare(self, params, optimizer_cls, process_group, optimizer_kwargs, **settings):
        """-> the parameter groups, after all refusals. `settings`: the stage's own arguments, by name."""
        warn_of_an_untried_torch()
        watch_torchs_clipping()
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
        self._elsewhere = set(all_params(self)).difference(param for param, *_ in self.pieces())
        self._known_params = param_ids(self.param_groups)

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Average the gradients, step what this rank owns, bring every rank's parameters to all. Collective.

        Returns the loss of `closure`, averaged over the ranks; what is no number or tensor, as it is; or None.
        torch.amp.GradScaler.step passes itself in, as `grad_scaler`: an inf or nan on any rank makes every rank skip
        the step, and lower its scale.

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
        if isinstance(loss, bool) or not isinstance(loss, (torch.Tensor, numbers.Real)):
            return loss  # None, or a dict of losses say, as it is
        if hasattr(loss, "full_tensor"):  # a DTensor, maybe of partial sums
            loss = loss.full_tensor()
        loss = torch.as_tensor(loss, device=all_params(self)[0].device).detach().clone()
        dist.all_reduce(loss, group=self.process_group)
        return loss / dist.get_world_size(self.process_group)

    def state_dict(self):
        """This rank's part of the state, without communication: to be loaded on the same rank of as many.

        Parameters have names that say which part of which one this is. `checkpoint.full_state_dict` has the whole.

        Raises:
            ValueError: somebody has put into `state` what is of no tensor that this rank steps.
        """
        self.pass_on_hyperparameters()
        stepped = {id(param) for param in all_params(self.optimizer)}
        for param, state in list(self.optimizer.state.items()):
            is_tensor = isinstance(param, torch.Tensor)  # what has a name for a key torch saves as it is
            if is_tensor and not state:
                del self.optimizer.state[param]  # made by torch for somebody who looked; maybe another rank steps it
            elif is_tensor and id(param) not in stepped:
                shape = tuple(param.shape)
                raise ValueError(f"optimizer.state has a tensor of shape {shape}, which isn't stepped here: remove it")
        part, names = self.optimizer.state_dict(), self._names_of_parts()
        part["state"] = {names.get(key, key): state for key, state in part["state"].items()}
        for group in part["param_groups"]:
            group["params"] = [names[index] for index in group["params"]]
        return {**part, "rank": self.rank, "world_size": self.world_size}

    def _names_of_parts(self):
        """-> of each tensor that is stepped here, by its place: the words by which torch's own tools refuse it."""
        index_of = {id(param): index for index, param in enumerate(all_params(self))}
        part_of = {id(main): f"elements {start} to {stop} of parameter {index_of[id(param)]}, on rank {self.rank} of "
                             f"{self.world_size}: checkpoint.full_state_dict(optimizer) has the whole"
                   for param, start, stop, main in self.pieces()}
        return {place: part_of[id(main)] for place, main in enumerate(all_params(self.optimizer))}

    def load_state_dict(self, state_dict):
        """Take over what `state_dict` returned on this rank. Collective.

        Raises:
            ValueError: on any rank it was made by another rank, on another number of ranks, or with other shards, or
                its state is none of this optimizer; nothing is changed.
        """
        made_by, error = (state_dict.get("rank"), state_dict.get("world_size")), None
        try:
            if made_by == (None, None):
                raise ValueError("this state_dict is of no rank of a DistributedOptimizer: a plain optimizer's, or "
                                 "full_state_dict()'s, is for checkpoint.load_full_state_dict(optimizer, state_dict)")
            if made_by != (self.rank, self.world_size):
                raise ValueError(f"this state_dict is of (rank, world size) {made_by}, this is "
                                 f"{self.rank, self.world_size}: a file of one rank has one part of {made_by[1]}, save "
                                 "checkpoint.full_state_dict(optimizer) for the whole")
            parts = self._parts_in(state_dict)
            state_dict = checked_state_dict(self.make_optimizer, self.optimizer, state_dict)
        except ValueError as refusal:
            error = refusal
        agree(error, [], self.process_group, all_params(self)[0].device)
        for here, saved in parts:
            here.copy_(saved)
        self.optimizer.load_state_dict(state_dict)
        copy_hyperparameters(self.optimizer.param_groups, self.param_groups)
