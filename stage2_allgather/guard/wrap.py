"""For whoever uses this as any torch optimizer: closures, schedulers, groups that are added later, copies.

The inner optimizer steps what this rank owns; what users write into our groups it must see, and what it writes into its
own they must. The same file stands in every stage. Shown by tests/stages/test_contract.py and
tests/stages/test_stages.py.
"""

import inspect

import torch
import torch.distributed as dist

from ..optimizer import hyperparameters
from .hooks import without_global_hooks
from .refuse import all_params, param_ids, refuse_edited


class Wrapper:
    """What it needs of its stage: `checked(params, existing)`, `make_optimizer(groups)`, `finish_grad_sync()`,
    `found_inf(grad_scaler)`, and `skip_step()`, which forgets what the step would have used up.
    """

    known_params = None  # param_ids() of what has been sharded; None while torch's constructor runs

    def __getstate__(self):
        raise TypeError("DistributedOptimizer can't be copied or pickled, it is one part of d: use state_dict()")

    @torch.no_grad()
    def add_param_group(self, param_group):
        """Add a group with its own hyperparameters. Collective; raises what the constructor raises."""
        if self.known_params is None:
            return super().add_param_group(param_group)
        (param_group,) = self.checked([param_group], self.param_groups)
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
        self.known_params = param_ids(self.param_groups)

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Average the gradients, step what this rank owns, bring every rank's parameters to all. Collective.

        Returns the loss of `closure`, averaged over the ranks, or None. torch.amp.GradScaler.step passes itself in, as
        `grad_scaler`: an inf or nan on any rank makes every rank skip the step, and lower its scale.

        Raises:
            RuntimeError: the parameters in `param_groups` are not those that were added; or what `finish_grad_sync`
                raises.
        """
        refuse_edited(self.param_groups, self.known_params)
        loss = self._closure_loss(closure)
        self.finish_grad_sync()
        if self.found_inf(grad_scaler):
            self.skip_step()
        else:  # without the wrapper in which torch calls step hooks: this method has it already
            inspect.unwrap(super().step.__func__)(self)
        return loss

    def step_own(self):
        with without_global_hooks():
            super().step_own()
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            group.update(hyperparameters(own))  # some count steps there

    def pass_on_hyperparameters(self):
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own.update(hyperparameters(group))

    def _closure_loss(self, closure):
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            return None
        loss = torch.as_tensor(loss, device=all_params(self)[0].device).detach().clone()
        dist.all_reduce(loss, group=self.process_group)
        return loss / dist.get_world_size(self.process_group)

    def _inner_state_dict(self):
        """That of the inner optimizer, with the hyperparameters that our groups have.

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
        return self.optimizer.state_dict()

    def _load_inner_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            group.update(hyperparameters(own))
