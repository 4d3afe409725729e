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

GLOBAL_HOOKS = _global_optimizer_pre_hooks, _global_optimizer_post_hooks  # dicts
active_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback  # () -> None if nothing is being compiled


def untraced(function):
    """Return `function`, excluded from torch.compile with everything it calls.

    The wrapper of torch.compiler.disable() takes longer than a hook, so it is used only while something is compiled.
    """
    @skip
    @functools.wraps(function)  # so that it can be pickled, with a model that has it as a hook
    def without_compiler(*args, **kwargs):
        return (function if active_compiler() is None else torch.compiler.disable(function))(*args, **kwargs)

    return without_compiler


def hook_gradient(param, method, takes_gradient=False):
    """Call `method`, of an optimizer or its buffer, when the gradient of `param` is complete. Returns a handle.

    The hook holds the optimizer or buffer weakly. A frozen parameter gets it too, since it may be unfrozen later.

    takes_gradient: whether `method` takes the gradient out of `param.grad`. Hooks of earlier optimizers that do so are
        removed, whatever `method` does, because it would find no gradient.
    """
    # Not weakref.WeakMethod, which prints an error for each parameter as Python ends.
    weak_owner, function = weakref.ref(method.__self__, lambda _: handle.remove()), method.__func__

    @skip  # a compiled function may call backward(). `untraced` would take one more call per parameter
    def hook(param):
        owner = weak_owner()
        if owner is not None:
            (function if active_compiler() is None else torch.compiler.disable(function))(owner, param)

    hook.takes_gradient, hook.owner = takes_gradient, weak_owner
    hooks = param._post_accumulate_grad_hooks or {}
    for key, old_hook in list(hooks.items()):  # a copy: a dropped optimizer removes its own hooks, at any moment
        if getattr(old_hook, "takes_gradient", False) is True:  # `is True`, because a Mock has every attribute
            hooks.pop(key, None)
    vars(param).pop("main_grad", None)  # the gradient of an earlier stage 3
    requires_grad = param.requires_grad
    handle = param.requires_grad_().register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


def owners_of(param):
    """Return the optimizers, or buffers, that are told when the gradient of `param` is complete; a dead one is None."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return [hook.owner() for hook in hooks.values() if hasattr(hook, "owner")]


def call_hooks_around_step(classes):
    """Let the first of `classes` that has a `step` call the step hooks around it, as torch does when it is built alone.

    It may have been built alone before: then its `step` calls them already.
    """
    core = next(cls for cls in classes if "step" in vars(cls))
    if not hasattr(core.step, "hooked"):
        core.step = torch.optim.Optimizer.profile_hook_step(core.step)
        core.step.hooked = True


@contextlib.contextmanager
def closure_returns(loss, optimizer):
    """Within this context, `optimizer.step` gets a closure that returns `loss`, if it takes one.

    A class may compute with the loss, as Polyak's step size does. One that calls its closure again would find the same
    gradients, so that is an error.
    """
    if "closure" not in inspect.signature(type(optimizer).step).parameters:
        yield
        return
    step = optimizer.step
    step_of_instance = vars(optimizer).get("step")  # somebody may have wrapped the method

    def step_with_loss():
        losses = [loss]

        def loss_once():
            if not losses:
                raise RuntimeError(f"{type(optimizer).__name__} calls its closure again in one step, and gradients are "
                                   "averaged only once: no stage can step it with a closure")
            return losses.pop()

        return step(loss_once)

    optimizer.step = step_with_loss
    try:
        yield
    finally:
        del optimizer.step
        if step_of_instance is not None:
            optimizer.step = step_of_instance


@contextlib.contextmanager
def without_global_hooks():
    """Let hooks of register_optimizer_step_post_hook() run for our own step only, not for the inner optimizer's."""
    copies = [(hooks, dict(hooks)) for hooks in GLOBAL_HOOKS]
    for hooks, _ in copies:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, copy_of_hooks in copies:
            hooks.update(copy_of_hooks)
