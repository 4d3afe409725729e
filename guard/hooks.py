"""Gradient hooks when optimizers are replaced or dropped, and torch's hooks for all optimizers.

Parameters don't keep their optimizer alive, and of two optimizers the later one gets the gradients. torch's hooks for
all optimizers run once per step. No process group may outlive destroy_process_group(), which ends its threads: at exit
they could abort Python. Shown by tests/stages/test_models.py, `test_python_ends_without_a_word`, and
tests/stages/test_users.py, `test_hooks_of_all_optimizers_are_called_once_a_step`.
"""

import contextlib
import functools
import inspect
import weakref

import torch
import torch._dynamo  # early, because torch would import it with its first optimizer, and then hold the process group
from torch._dynamo.decorators import skip
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback  # () -> None if nothing is being compiled


def untraced(function):
    """Return `function`, excluded from torch.compile with everything it calls.

    The wrapper of torch.compiler.disable() takes longer than a hook, so it is used only while something is compiled.
    """
    @skip
    @functools.wraps(function)  # so that it can be pickled, with a model that has it as a hook
    def without_compiler(*args, **kwargs):
        return (function if compiler() is None else torch.compiler.disable(function))(*args, **kwargs)

    return without_compiler


def hook_gradient(param, method, takes=False):
    """Call `method`, of an optimizer or its buffer, when the gradient of `param` is complete. Return the handle.

    The hook holds that object weakly. A frozen parameter gets the hook too, since it may be unfrozen later.

    takes: `method` takes the gradient out of `param.grad`. Then hooks of earlier optimizers that do so, of any stage,
        are removed, or this one would find no gradient.
    """
    # Not weakref.WeakMethod, which prints an error for each parameter as Python ends.
    weak_owner, function = weakref.ref(method.__self__, lambda _: handle.remove()), method.__func__

    @skip  # as `untraced`, with one call less per parameter. A compiled function may call backward()
    def hook(param):
        owner = weak_owner()
        if owner is not None:
            (function if compiler() is None else torch.compiler.disable(function))(owner, param)

    hook.takes_gradient, hook.owner = takes, weak_owner
    hooks = param._post_accumulate_grad_hooks or {}
    for key, other in list(hooks.items()):  # a copy: a dropped optimizer removes its own hooks, at any moment
        if getattr(other, "takes_gradient", False) is True:  # `is True`, because a Mock has every attribute
            hooks.pop(key, None)
    vars(param).pop("main_grad", None)  # the gradient of an earlier stage 3
    requires_grad = param.requires_grad
    handle = param.requires_grad_().register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


@contextlib.contextmanager
def given_loss(optimizer, closure, loss):
    """Give `optimizer.step` a closure that returns `loss`, if our step was given a closure.

    Some classes compute with the loss, as Polyak's step size does. A class that calls its closure again would find the
    same gradients, which is an error.
    """
    if closure is None or "closure" not in inspect.signature(type(optimizer).step).parameters:
        yield
        return
    step, before = optimizer.step, vars(optimizer).copy()

    def step_with_loss():
        losses = [loss]

        def of_before():
            if not losses:
                raise RuntimeError(f"{type(optimizer).__name__} calls its closure again in one step, and gradients are "
                                   "averaged only once: no stage can step it with a closure")
            return losses.pop()

        return step(of_before)

    optimizer.step = step_with_loss
    try:
        yield
    finally:
        del optimizer.step
        vars(optimizer).update({"step": before["step"]} if "step" in before else {})


@contextlib.contextmanager
def without_global_hooks():
    """Let hooks of register_optimizer_step_post_hook() run for our own step only, not for the inner optimizer's."""
    saved = [(hooks, dict(hooks)) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    for hooks, _ in saved:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in saved:
            hooks.update(before)
