"""A second optimizer over the same parameters, one that is dropped while the model stays, hooks of all optimizers.

Parameters don't keep alive what they were trained with, and the later optimizer has the gradients. A hook of all
optimizers is called once a step. A process group that nobody holds ends its threads in destroy_process_group(), which
could abort Python's end. Shown by tests/stages/test_models.py, `test_python_ends_without_a_word`, and
tests/stages/test_users.py, `test_hooks_of_all_optimizers_are_called_once_a_step`.
"""

import contextlib
import weakref

import torch
import torch._dynamo  # now: torch imports it as it builds its first optimizer, and holds the process group from then on
from torch._dynamo.decorators import skip
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

compiler = torch._C._dynamo.eval_frame.get_eval_frame_callback  # () -> None where nothing is compiled


def untraced(function):
    """`function`, which torch.compile leaves alone, and all that it calls.

    torch.compiler.disable()'s wrapper takes longer than a hook does: it is entered only where something is compiled.
    """
    return skip(lambda *args: (function if compiler() is None else torch.compiler.disable(function))(*args))


def hook_gradient(param, method, takes=False):
    """Have `method`, of an optimizer or of its buffer, called when the gradient of `param` is complete. -> handle

    It holds that object weakly. A frozen parameter has the hook too: it may be unfrozen later. `takes`: `method` takes
    the gradient out of `param.grad`. The hook of an earlier optimizer that does so, of any stage, is removed, or this
    one would find none.
    """
    # Not by weakref.WeakMethod, which prints an error for each parameter as Python ends.
    weak_owner, function = weakref.ref(method.__self__, lambda _: handle.remove()), method.__func__

    @skip  # `untraced`, in one call: it is made for each parameter. A compiled function may call backward()
    def hook(param):
        owner = weak_owner()
        if owner is not None:
            (function if compiler() is None else torch.compiler.disable(function))(owner, param)

    hook.takes_gradient, hook.owner = takes, weak_owner
    hooks = param._post_accumulate_grad_hooks or {}
    for key, other in list(hooks.items()):  # an earlier optimizer that nobody has takes its own off, at any moment
        if getattr(other, "takes_gradient", False) is True:  # a Mock, as a hook, has all that is asked for
            hooks.pop(key, None)
    vars(param).pop("main_grad", None)  # where an earlier stage 3 has put the gradient
    requires_grad = param.requires_grad
    handle = param.requires_grad_().register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


@contextlib.contextmanager
def without_global_hooks():
    """The inner optimizer steps for ours: torch calls register_optimizer_step_post_hook()'s hooks for ours alone."""
    all_hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    kept = [dict(hooks) for hooks in all_hooks]
    for hooks in all_hooks:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(all_hooks, kept):
            hooks.update(before)
