"""Hooks gradients so that optimizers can be replaced or dropped, and runs torch's step hooks once per step.

Parameters don't keep their optimizer alive. If a program builds two optimizers on a parameter, the later one gets the
gradients. torch's hooks for all optimizers run once per step, although an inner optimizer steps, too. No object here
keeps a process group after destroy_process_group(): its threads could abort Python at exit. Shown by
tests/stages/test_models.py, `test_python_ends_without_a_word`, and tests/stages/test_users.py,
`test_hooks_of_all_optimizers_are_called_once_a_step`.
"""

import contextlib
import functools
import inspect
import weakref
from unittest import mock

import torch
import torch._dynamo  # early: torch would import it with the first optimizer, and would hold the process group then
from torch._dynamo.decorators import skip
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

GLOBAL_HOOKS = _global_optimizer_pre_hooks, _global_optimizer_post_hooks  # dicts of hooks for all optimizers
active_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback  # a function: it returns None if nothing compiles


def untraced(function):
    """Return a function that does what `function` does, and that torch.compile leaves out with everything it calls.

    torch.compiler.disable() makes a wrapper that takes longer than a hook, so it is called only while torch compiles.
    """
    @skip
    @functools.wraps(function)  # so that a model which has this function as a hook can be pickled
    def without_compiler(*args, **kwargs):
        uncompiled = function if active_compiler() is None else torch.compiler.disable(function)
        return uncompiled(*args, **kwargs)

    return without_compiler


def hook_gradient(param, method, takes_gradient=False):
    """Call `method`, of an optimizer or its buffer, when the gradient of `param` is complete. Returns a handle.

    The hook holds the optimizer or buffer weakly. A frozen parameter gets a hook too, because a program may unfreeze
    it later.

    takes_gradient: whether `method` takes the gradient out of `param.grad`. Hooks of earlier optimizers that take it
        are removed, because `method` would find no gradient.
    """
    # Not weakref.WeakMethod, which prints an error for each parameter as Python ends.
    weak_owner = weakref.ref(method.__self__, lambda _: handle.remove())
    function = method.__func__

    @skip  # because a compiled function may call backward(); `untraced` would add a call per parameter
    def hook(param):
        owner = weak_owner()
        if owner is not None:
            uncompiled = function if active_compiler() is None else torch.compiler.disable(function)
            uncompiled(owner, param)

    hook.takes_gradient = takes_gradient
    hook.owner = weak_owner
    hooks = param._post_accumulate_grad_hooks or {}  # key -> hook; torch's own dict
    for key, old_hook in list(hooks.items()):  # a copy, because a dropped optimizer may remove its hooks meanwhile
        if getattr(old_hook, "takes_gradient", False) is True:  # `is True`, because a Mock has every attribute
            hooks.pop(key, None)
    vars(param).pop("main_grad", None)  # the gradient of an earlier stage 3
    requires_grad = param.requires_grad
    handle = param.requires_grad_().register_post_accumulate_grad_hook(hook)  # torch refuses it for a frozen parameter
    param.requires_grad_(requires_grad)
    return handle


def owners_of(param):
    """Return the optimizers and buffers that have a gradient hook on `param`; None for one that no longer exists."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return [hook.owner() for hook in hooks.values() if hasattr(hook, "owner")]


def call_hooks_around_step(classes):
    """Let the first of `classes` that defines a `step` call torch's step hooks around this step.

    torch does the same when a program builds that class itself. If it has done so before, there is nothing to do.
    """
    core = next(cls for cls in classes if "step" in vars(cls))
    if not hasattr(core.step, "hooked"):
        core.step = torch.optim.Optimizer.profile_hook_step(core.step)
        core.step.hooked = True


@contextlib.contextmanager
def closure_returns(loss, optimizer):
    """Within this context, pass `optimizer.step` a closure that returns `loss`, if `step` takes a closure.

    A class may compute with the loss, as Polyak's step size does. A second call of the closure would leave the same
    gradients, so a second call is an error.
    """
    if "closure" not in inspect.signature(type(optimizer).step).parameters:
        yield
        return
    step = optimizer.step

    def step_with_loss():
        losses = [loss]  # empty when the closure has been called

        def loss_once():
            if not losses:
                raise RuntimeError(f"{type(optimizer).__name__} calls its closure again in one step, and gradients are "
                                   "averaged only once: no stage can step it with a closure")
            return losses.pop()

        return step(loss_once)

    with mock.patch.object(optimizer, "step", step_with_loss):  # afterwards, a step that a program has wrapped is back
        yield


@contextlib.contextmanager
def without_global_hooks():
    """Within this context, run no hooks for all optimizers: they run around our step, not the inner optimizer's."""
    copies = [(hooks, dict(hooks)) for hooks in GLOBAL_HOOKS]
    for hooks, _ in copies:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, copy_of_hooks in copies:
            hooks.update(copy_of_hooks)
