"""Has what the optimizers of all stages do around their cores, in the order in which it happens.

A *stage* is a version of the distributed optimizer, in a folder stage*/. Its *core*, the class ShardedOptimizer, has
the algorithm alone: each rank updates a part of the parameters by an *inner optimizer*, such as torch's AdamW, and
sends the result. The parts are whole parameters in stages 1 and 2, and flat pieces of parameters in stages 3 and 4. The
tensor that the inner optimizer steps for a part is a *main parameter*. The *guard*, this folder and each stage's
`distributed.py`, makes the cores reliable.

Situation: training, from the constructor to a save. Python looks a method up in three classes, in this order: the
DistributedOptimizer of a stage's `distributed.py`, which has the differences between stages; Guarded; and the core. At
most one of the first two classes defines a method, so that `super()` means the core in both. At its end the guard's
`step` calls the core's `step`. The core's `step` calls `sync_grads`, `step_own` and `sync_params`: the guard's methods
of these names, which call the core's. A stage's class defines:

    _refuse(named)              raise an error for parameters that the stage can't train; return [(name, tensor)], the
                                tensors that the stage stores: parameters, and the local part of a DTensor
    _probe(make_optimizer, groups)   raise an error for an optimizer class that the stage can't run
    _takes_dtensors, _takes_channels_last   whether parameters may be of this kind
    _watch_shards(groups)       prepare the guard for parameters that `shard` has just divided between the ranks
    _owned_ranges()             return what `pieces` returns, or yield it: which elements this rank updates
    _before_average(arguments)  raise an error for gradients that can't be averaged; return whether they are new: not
                                averaged yet in this step
    _drop_grads(params, set_to_none)   drop gradients of `params`, for model.zero_grad(). A stage's buffer of gradients
                                may have this method in place of the optimizer
    _take_model_changes()       copy what other code has written into the model's parameters to the main parameters
    has_grads                   whether this rank is between backward() and step()
    _stage, _buffers_in_words() texts for repr()
    _grads_elsewhere            whether gradients of this step were ever outside of param.grad, for example in a buffer
    _param_grad_holds           what torch's clipping functions find in param.grad: "averages", "own" gradients of this
                                rank, or "nothing". scaling.py reads it. A buffer may have it in place of the optimizer

Shown by tests/stages/test_contract.py, tests/stages/test_stages.py, and tests/stages/test_users.py.
"""

import contextlib
import functools
import numbers
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .groups import all_params, error_if_settings_differ, hyperparameters, settings_of, share_attributes
from .hooks import GLOBAL_HOOKS, call_hooks_around_step, closure_returns, without_global_hooks
from .refuse import callable_or_refusal, checked_groups, divisor_of, silence_torch
from .scaling import clip_grads, multiply_grads, total_norm, watch_torch
from .schema import schema_of
from .skipping import found_inf
from .state_dict import load_state_dicts, state_dict_of
from .states import MAIN_PARAM, ByParameter

# To learn which state an optimizer class keeps for a flat piece of a parameter, schema.py steps a tensor of this shape
# on trial. An entry of the state that then has 13 elements has an element for each element of a piece.
TRIAL_SHAPE = (13,)


class Guarded(torch.optim.Optimizer):
    """The part of the guard that all stages have. Each DistributedOptimizer has two bases: this class, and its core."""

    # The next three lines only declare types, for mypy. The core or the stage defines these attributes.
    __init__: Callable[..., None]
    _before_average: Callable[[dict], bool]
    _stage: int
    _takes_dtensors = _takes_channels_last = False
    _steps_whole_params = False  # whether each main parameter is a whole parameter in stage 4, as in variants/muon.py
    # state_dict() calls this function on a main parameter, and saves what it returns. A variant may replace it.
    _main_to_save = staticmethod(torch.Tensor.detach)
    # GradScaler reads this mark. It then calls step(grad_scaler=itself) also if the gradients of this rank have an inf,
    # so that step() can tell the other ranks.
    _step_supports_amp_scaling = True
    _states: Any = None  # a ByParameter, the mapping `state`; None while torch's constructor runs
    _chain: Any = None  # weak reference to the Chained that has this optimizer, which sets it; skipping.py reads it
    _n_steps = 0  # steps taken with the present shards, plus the steps before a state_dict that was loaded

    def _prepare(self, params, optimizer_cls, process_group, average_over, optimizer_kwargs, **settings):
        """Check all arguments, and return the parameter groups. A stage's constructor calls this before the core's.

        settings: the stage's own arguments, by name. The ranks compare them.
        """
        silence_torch()  # torch would warn about two things that this project needs
        watch_torch(self)  # from now on torch's clipping functions and model.zero_grad() know of this optimizer
        classes = type(self).__mro__
        call_hooks_around_step(classes[classes.index(Guarded) + 1 :])  # the core and its bases
        # A function: parameter groups -> inner optimizer. It makes the inner optimizer, and others for trials.
        self.make_optimizer = functools.partial(callable_or_refusal(optimizer_cls), **optimizer_kwargs)
        self.process_group = process_group
        self.average_over = average_over
        return checked_groups(self, params, settings)

    @property
    def _agreement_group(self):
        """Return the group of all ranks that train these parameters. In variants/hybrid.py it isn't `process_group`."""
        return self.process_group

    @torch.no_grad()
    def add_param_group(self, param_group):
        """Add a group with its own hyperparameters. Collective; raises what the constructor raises."""
        if self._states is None:  # torch's constructor calls this method, with groups that are checked already
            return super().add_param_group(param_group)
        old_groups = [dict(group) for group in self.param_groups]  # copies, because the check changes them
        *_, checked_group = checked_groups(self, [*old_groups, param_group], {})  # the new group comes last
        super().add_param_group(checked_group)
        (own_group,) = self.shard(self.param_groups[-1:])  # shard() takes a list of groups, and returns a list
        self.optimizer.add_param_group(own_group)
        # A class such as Adagrad makes a state in its constructor. torch < 2.13 makes none in add_param_group(), so let
        # another object of the class make it.
        self.optimizer.state.update(self.make_optimizer([dict(own_group)]).state)
        self._note_shards()

    @torch.no_grad()
    def shard(self, groups):
        """Divide the parameters of `groups` between the ranks, as the core does. The core's constructor calls this.

        Returns the groups for the inner optimizer: main parameters of this rank, with the names and attributes of
        the parameters.
        """
        params = [param for group in groups for param in group["params"]]
        # A program that splits parameters by weight decay, for example, may add an empty group.
        own_groups = super().shard(groups) if params else without_params(groups)
        # The core has broadcast the first rank's values into the parameters. A new version number tells autograd, which
        # then refuses a backward pass through a graph that has read old values.
        torch.autograd.graph.increment_version(params)
        self._watch_shards(groups)
        # _owned_ranges() returns [(param, start, stop, main), …].
        param_of = {main: param for param, _, _, main in self._owned_ranges()}
        share_attributes(groups, own_groups, param_of)
        return own_groups

    def _watch_shards(self, groups):
        """Do nothing. A stage may override this method: see the module's docstring."""

    def _note_shards(self):
        """Set the attributes that depend on which parameters and which process group the optimizer has."""
        # Both are -1 on a rank that is in no process group, after checkpoint.reshard() has moved its state elsewhere.
        self.rank = dist.get_rank(self.process_group)
        self.world_size = dist.get_world_size(self.process_group)
        self._params = all_params(self)
        names_in_state = weakref.WeakMethod(self._names_in_state)  # weak, so that there is no cycle of references
        self._states = ByParameter(self.optimizer, self._params, self._owned_ranges(), names_in_state)
        self._known_ids = self._param_ids()  # step() compares them with what `param_groups` has then
        # The core divides sums of gradients by the number of ranks. If `average_over` asks for another divisor, the
        # averages are multiplied by this factor.
        self._grad_factor = 1.0
        if self.rank >= 0:
            n_ranks = dist.get_world_size(self._agreement_group)
            self._grad_factor = n_ranks / divisor_of(self.average_over, n_ranks)

    def _param_ids(self):
        """Return for each group the ids of its parameters, because == of tensors would compare elements."""
        return [list(map(id, group["params"])) for group in self.param_groups]

    def _move_to(self, process_group):
        """Take the shards of this rank in `process_group`, with an empty state. A stage's `move_to` calls this.

        The stage has given the old shards up before.
        """
        self.process_group = process_group
        self._n_steps = 0
        is_inside = dist.get_rank(process_group) >= 0  # whether this rank is in the group
        own_groups = self.shard(self.param_groups) if is_inside else without_params(self.param_groups)
        self.optimizer = self.make_optimizer(own_groups)
        self._note_shards()

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Average the gradients, update what this rank owns, send updated parameters to all ranks. Collective.

        Returns what `closure` returns, averaged over the ranks if it is a number or a tensor; without `closure`, None.
        torch.amp.GradScaler.step passes itself as `grad_scaler`: an inf or nan on any rank makes every rank skip the
        step and lower its scale. Hooks are not called then.

        Raises:
            RuntimeError: `param_groups` doesn't have the parameters that were added; or what `finish_grad_sync` raises.
        """
        if self.rank < 0:
            raise RuntimeError("this rank is in no process group since reshard(): it has nothing to step")
        if self._param_ids() != self._known_ids:
            raise RuntimeError("the parameters in param_groups have changed: add them with add_param_group(), or build "
                               "the optimizer anew")
        loss = None if closure is None else mean_loss(self, closure, self._agreement_group)
        if grad_scaler is not None:
            self.finish_grad_sync()
            if found_inf(self, grad_scaler):
                self.zero_grad()  # here, because model.zero_grad() may not reach an inf that isn't in param.grad
                return loss
        if closure is None:
            super().step()
        else:
            with closure_returns(loss, self.optimizer):
                super().step()
        return loss

    # A mark that torch reads: it wraps a `step` without this mark in calls of step hooks. Here it must wrap only the
    # core's step.
    step.hooked = True

    @torch.no_grad()
    def sync_grads(self, **arguments):
        """Average the gradients as the core does, if they aren't averaged yet. `average_over` says by which divisor.

        arguments: the arguments of `clip_grad_norm_` or `scale_grads_`, by name. Stage 4 compares them between ranks.
        """
        are_new = self._before_average(arguments)  # whether they aren't averaged yet in this step
        super().sync_grads()
        if are_new and self._grad_factor != 1:
            multiply_grads(self._averaged_params(), self._grad_factor)

    def step_own(self):
        """Update this rank's part as the core does, after copying what other code has written into model and state."""
        if self._states.accessed_params:  # a program has accessed states, and may have put whole tensors into them
            self._states.cut_whole_tensors()
        self._take_model_changes()
        # torch's hooks for all optimizers run around our step. They must not run around the inner optimizer's, too.
        # `any`: one of torch's two dicts of hooks isn't empty.
        hooks_off = without_global_hooks() if any(GLOBAL_HOOKS) else contextlib.nullcontext()
        with hooks_off, profiler_range("inner step"):
            super().step_own()
        for group, own_group in zip(self.param_groups, self.optimizer.param_groups):
            group.update(hyperparameters(own_group))  # a class may write into its groups, for example a count of steps
        self._n_steps += 1

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without communication. Stages 1 to 3 send nothing before `step` anyway."""
        return contextlib.nullcontext()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Do nothing. (In stage 4, where `no_sync` keeps gradients unsent, False begins such a time and True ends it.)
        """

    @torch.no_grad()
    def finish_grad_sync(self, **arguments: Any) -> None:
        """Average the gradients over the ranks. Idempotent; `step`, `clip_grad_norm_` and `scale_grads_` call it.

        In stages 1 and 2 `param.grad` then holds the average. Sparse gradients become dense. A gradient that is missing
        on some ranks counts as zero there. In stage 3 each rank receives its shard of the averages, and until `step` or
        `zero_grad` `param.grad` is not the gradient: assigning a gradient or running a backward pass is a RuntimeError.
        Freeze a layer on all ranks or on none, and before backward(). Collective.

        Args:
            arguments: the arguments of `clip_grad_norm_` or `scale_grads_`, by name, which stage 4 compares.

        Raises:
            RuntimeError: a parameter received no gradient in stage 4, or a gradient was assigned too late, or a
                parameter's `data` was replaced; or the ranks have different `arguments` or parameter groups. Stage 4
                raises it on every rank. But after the ranks have agreed on this step's gradients, for example in
                `clip_grad_norm_`, an error is raised on this rank alone.
        """
        self.sync_grads(**arguments)

    def _refuse_late_backward(self):
        """Refuse a gradient that comes after the average, if averages were multiplied: the sum would be wrong."""
        if self._grad_factor != 1:
            raise RuntimeError("the gradients were averaged and divided by average_over already: call step() or "
                               "zero_grad() first")

    @torch.no_grad()
    def scale_grads_(self, factor: float | torch.Tensor) -> None:
        """Multiply the averaged gradients of the whole model by `factor`. Call it before `clip_grad_norm_`. Collective.

        For example, `factor` is ranks / tokens if the losses are sums over tokens, and the number of tokens in the
        batches of all ranks is only known after the backward pass.

        Args:
            factor: the same on every rank: a number, or a tensor without dimensions, which may stay on the GPU.
        """
        self.finish_grad_sync(factor=factor)
        multiply_grads(self._averaged_params(), factor)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0,
                        error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scale the averaged gradients of the whole model so that their norm is at most `max_norm`. Collective.

        Returns the norm before clipping, a scalar tensor.

        Raises:
            RuntimeError: `error_if_nonfinite` is True, and the norm is nan or inf. Every rank raises it, before any
                gradient changes.
        """
        self.finish_grad_sync(max_norm=max_norm, norm_type=norm_type)
        return clip_grads(self._averaged_params(), max_norm, self._total_norm(norm_type), error_if_nonfinite)

    _total_norm = total_norm  # a function of scaling.py as a method, which a stage may override

    def _averaged_params(self):
        """Return the tensors whose `grad` is an averaged gradient: this rank's main parameters. Stages may override it.
        """
        return all_params(self.optimizer)

    def pieces(self):
        """Return [(param, start, stop, main), …]: this rank updates elements start:stop of the flattened `param`.

        The inner optimizer has these elements as the tensor `main`. Other code may have written into the model's
        parameters or into states. That is first copied to the tensors of the inner optimizer.
        """
        with torch.no_grad():
            self._take_model_changes()
            self._states.cut_whole_tensors()
        return list(self._owned_ranges())

    @property
    def state(self):
        """Return a mapping parameter -> its state on this rank. In stages 3 and 4 that is the state of a flat piece.

        Assigning a dict to `state` copies the dict.
        """
        return self._states

    @state.setter
    def state(self, state):
        if self._states is not None:  # None: torch's constructor assigns an empty mapping, which is ignored
            self._states.replace(state)

    def state_dict(self):
        """Return {"state": {index: {name: value}}, "param_groups": […]}, as torch's optimizers do. Not collective.

        A tensor of which each rank has a part is a FlatShard: it has the shape of the whole tensor, the elements of
        this rank, and a method `full_tensor()`. So torch's get_state_dict(), torch.distributed.checkpoint and
        set_state_dict() save the state_dict, and load it on any number of ranks.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = state_dict_of(self)
        for hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = hook(self, state_dict) or state_dict  # a hook may return another state_dict, or None
        return state_dict

    def load_state_dict(self, state_dict):
        """Load a `state_dict` that this rank has returned, or that torch.distributed.checkpoint has read. Collective.

        Each rank cuts its part out of a tensor of a parameter's shape, so it also loads the state_dict of a plain torch
        optimizer. As in torch, tensors that fit are not copied.

        Raises:
            ValueError: on every rank, before anything is changed, if on any rank the state_dict has other elements, or
                is of another optimizer, or can't be loaded; or if the state_dicts of the ranks have different
                hyperparameters, or are of different steps.
        """
        with torch.no_grad():
            load_state_dicts([self], [state_dict], self._agreement_group)

    def _stepped_as(self, param):
        """Return the (shape, dtype) that schema.py steps on trial in place of this rank's piece of `param`.

        Main parameters have this dtype: fp32 for a parameter of 16 bits. Stages 1 and 2 override this method.
        """
        shape = param.shape if self._steps_whole_params else TRIAL_SHAPE
        return shape, torch.promote_types(param.dtype, torch.float32)

    def _names_in_state(self, param):
        """Return the names of the entries that the state of `param` has after a step."""
        group = next(group for group in self.param_groups if id(param) in map(id, group["params"]))
        shape, dtype = self._stepped_as(param)
        schema = schema_of(self.make_optimizer, hyperparameters(group), shape, dtype, param.device)
        names = list(schema.entries) if schema else []  # None: the class can't step one parameter alone
        if dtype != param.dtype:
            names.append(MAIN_PARAM)
        return names

    def refuse_different_settings(self):
        """Raise RuntimeError on every rank if the ranks have different values in their parameter groups. Collective."""
        if error := error_if_settings_differ(settings_of(self.param_groups), self.process_group):
            raise error

    def __repr__(self):
        """Return a text: how much of model and state this rank has, and then torch's description of the groups."""
        if self._states is None:  # the constructor has failed
            return super().__repr__()
        states = self.optimizer.state.values()
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        n_own = sum(main.numel() for main in all_params(self.optimizer))
        n_all = sum(getattr(param, "_local_tensor", param).numel() for param in self._params)
        return (f"Stage {self._stage}, rank {self.rank} of {self.world_size}: updates {n_own:,} of {n_all:,} elements; "
                f"state: {sum(tensor.nbytes for tensor in tensors):,} bytes{self._buffers_in_words()}\n"
                f"{super().__repr__()}")

    def _buffers_in_words(self):
        """Return a part of the text of repr(): what a stage says about its buffers."""
        return ""

    def __getstate__(self):
        """Refuse a copy or a pickle: Python calls this method for both."""
        raise TypeError("DistributedOptimizer can't be copied or pickled, it is one part of d: use state_dict()")

    # Lightning and Fabric wrap an optimizer in an object of a new class, which inherits from their wrapper and from our
    # class. So a method of our class would get the wrapper as `self`. It would assign attributes to the wrapper, and
    # `self.optimizer` would be the wrapped optimizer and not the inner optimizer. So the new class gets a
    # ForwardedAttribute in place of each attribute of our class, which reads and writes the attribute of the wrapped
    # optimizer. Shown by tests/stages/test_wrappers.py.

    def __new__(cls, *args, **kwargs):
        # Lightning makes the wrapper first, and then gives it the new class, whose constructor nobody calls. So a class
        # that is called is no wrapper's class but, for example, a user's subclass. Remove the ForwardedAttributes that
        # __init_subclass__ has put there.
        for kind in cls.__mro__:
            for name, value in list(vars(kind).items()):
                if isinstance(value, ForwardedAttribute):
                    delattr(kind, name)
        optimizer = super().__new__(cls)
        optimizer._itself = weakref.ref(optimizer)  # a wrapper copies this attribute, and so finds the optimizer
        return optimizer

    def __init_subclass__(cls, **kwargs):
        """Forward our attributes if our class is not the first base of `cls`: then `cls` may be a wrapper's class."""
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls):  # this step calls our step, which calls the hooks: so torch must not add calls of hooks
            cls.step.hooked = True
        for base in cls.__bases__[1:]:  # without the first base
            if issubclass(base, Guarded):
                for name in dir(base):
                    # The second condition: no class before ours has overridden the attribute.
                    if not name.startswith("__") and getattr(cls, name) is getattr(base, name):
                        setattr(cls, name, ForwardedAttribute(name, getattr(base, name)))


def without_params(groups):
    """Return copies of parameter groups, with the same hyperparameters and without parameters."""
    return [{**hyperparameters(group), "params": []} for group in groups]


def profiler_range(name):
    """Return a context that torch.profiler shows under this name. Without a profiler the context costs nothing."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else contextlib.nullcontext()


def mean_loss(optimizer, closure, process_group):
    """Return the loss that `closure` returns, averaged over the ranks if it is a number or a tensor. Collective."""
    with torch.enable_grad():
        loss = closure()
    if isinstance(loss, bool) or not isinstance(loss, (torch.Tensor, numbers.Real)):
        return loss  # None, or a dict of losses for example
    loss = torch.as_tensor(loss, device=all_params(optimizer)[0].device).detach().clone()
    dist.all_reduce(loss, group=process_group)
    return loss / dist.get_world_size(process_group)


class ForwardedAttribute:
    """Forwards an attribute of a wrapper to the wrapped optimizer.

    The wrapper's attribute `_itself` is a weak reference to the wrapped optimizer.
    """

    def __init__(self, name, attribute_of_class):
        self.name = name
        self.attribute_of_class = attribute_of_class

    def __get__(self, wrapper, kind=None):
        # Without a wrapper: a program reads the attribute of the class itself, for example to patch a method.
        return self.attribute_of_class if wrapper is None else getattr(wrapper._itself(), self.name)

    def __set__(self, wrapper, value):
        setattr(wrapper._itself(), self.name, value)
