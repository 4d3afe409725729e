"""Hooks of two kinds: an optimizer's hooks on gradients, and the hooks that torch calls before and after each step.

A distributed optimizer of this project, or the buffer that keeps its gradients, has a hook on each parameter. autograd
calls the hook when the gradient of the parameter is complete. The hook refers to the optimizer weakly, so a program can
drop the optimizer although the parameters live on. If a program builds two optimizers on a parameter, the later
optimizer gets the gradients.

A distributed optimizer has an *inner optimizer*, such as torch's AdamW, which updates this rank's part of the
parameters. Both have a step. But torch's hooks for all optimizers must run once per step of the program.

No object here keeps a process group after destroy_process_group(), because the threads of the group could abort Python
at exit. Shown by tests/stages/test_models.py, `test_python_ends_without_a_word`, and tests/stages/test_users.py,
`test_hooks_of_all_optimizers_are_called_once_a_step`.
"""

import contextlib
import functools
import inspect
import weakref
from unittest import mock

import torch
import torch._dynamo  # now: torch would import it with the first optimizer, and would then keep the process group alive
from torch._dynamo.decorators import skip  # marks a function that torch.compile must leave as it is
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

GLOBAL_HOOKS = _global_optimizer_pre_hooks, _global_optimizer_post_hooks  # torch's dicts of hooks for all optimizers
active_compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback  # a function: it returns None if nothing compiles


def untraced(function):
    """Return a function that calls `function`. torch.compile compiles neither of them, nor the functions they call.

    torch.compiler.disable(function) would do this, too, but a call of its result takes longer than a hook does. So it
    is only used while torch compiles.
    """
    @skip
    @functools.wraps(function)  # so that a model which has this function as a hook can be pickled
    def without_compiler(*args, **kwargs):
        uncompiled = function if active_compiler() is None else torch.compiler.disable(function)
        return uncompiled(*args, **kwargs)

    return without_compiler


def hook_gradient(param, method, takes_gradient=False):
    """Let autograd call `method` with `param` when the gradient of `param` is complete. Returns a handle of the hook.

    `method` is a method of an optimizer or of its buffer, which is then the *owner* of the hook. A frozen parameter
    gets a hook too, because a program may unfreeze it later.

    takes_gradient: whether `method` takes the gradient out of `param.grad`. If an earlier optimizer has such a hook on
        `param`, that hook is removed, because it would leave no gradient for `method`.
    """
    # When the owner is gone, the lambda removes its hook; `handle` is assigned at the end of this function. (A
    # weakref.WeakMethod would print an error for each parameter as Python ends.)
    weak_owner = weakref.ref(method.__self__, lambda _: handle.remove())
    function = method.__func__

    # A program may compile a function that calls backward(). So `hook` does what `untraced` does, without a further
    # call for each parameter.
    @skip
    def hook(param):
        owner = weak_owner()
        if owner is not None:
            uncompiled = function if active_compiler() is None else torch.compiler.disable(function)
            uncompiled(owner, param)

    hook.takes_gradient = takes_gradient  # the loop below reads it when a later optimizer hooks this parameter
    hook.owner = weak_owner  # owners_of() reads it
    hooks = param._post_accumulate_grad_hooks or {}  # key -> hook; torch's own dict
    for key, old_hook in list(hooks.items()):  # a copy, because a dropped optimizer may remove its hooks meanwhile
        # `is True`, because a hook may be a unittest.mock.Mock, which has every attribute.
        if getattr(old_hook, "takes_gradient", False) is True:
            hooks.pop(key, None)
    vars(param).pop("main_grad", None)  # an earlier optimizer of stage 3 may have kept its gradient there
    requires_grad = param.requires_grad
    # torch refuses a hook on a frozen parameter, so unfreeze it for a moment.
    handle = param.requires_grad_().register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


def owners_of(param):
    """Return the owners of the gradient hooks on `param`. In place of an owner that no longer exists it has None."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return [hook.owner() for hook in hooks.values() if hasattr(hook, "owner")]


def call_hooks_around_step(classes):
    """Let the core's `step` call torch's step hooks before and after itself.

    The *core* is the base class of a DistributedOptimizer that has the algorithm alone. `classes`: the core and its
    base classes, of which the first that defines a `step` is changed.

    torch itself would change the DistributedOptimizer's `step` so, when a program makes the first object of the class.
    Its mark `hooked` says that a step is changed already.
    """
    core = next(cls for cls in classes if "step" in vars(cls))
    if not hasattr(core.step, "hooked"):
        core.step = torch.optim.Optimizer.profile_hook_step(core.step)
        core.step.hooked = True


@contextlib.contextmanager
def closure_returns(loss, optimizer):
    """Within this context, pass `optimizer.step` a closure that returns `loss`, if `step` takes a closure.

    An optimizer class may compute with the loss, as Polyak's step size does. A second call of the closure is an error:
    it would have to bring new gradients, and gradients are averaged once per step.
    """
    if "closure" not in inspect.signature(type(optimizer).step).parameters:
        yield
        return
    step = optimizer.step

    def step_with_loss():
        losses = [loss]  # the first call of the closure takes the loss out, so the second call finds an empty list

        def loss_once():
            if not losses:
                raise RuntimeError(f"{type(optimizer).__name__} calls its closure again in one step, and gradients are "
                                   "averaged only once: no stage can step it with a closure")
            return losses.pop()

        return step(loss_once)

    # A program may have wrapped `optimizer.step`. The wrapped step is called, and afterwards is the step again.
    with mock.patch.object(optimizer, "step", step_with_loss):
        yield


@contextlib.contextmanager
def without_global_hooks():
    """Empty torch's dicts of hooks for all optimizers within this context, because they are for the program's steps.

    An inner optimizer or a trial (schema.py, probe.py) steps in this context.
    """
    copies = [(hooks, dict(hooks)) for hooks in GLOBAL_HOOKS]
    for hooks in GLOBAL_HOOKS:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, copy_of_hooks in copies:
            hooks.update(copy_of_hooks)
