"""For whoever builds a second optimizer over the same parameters, or drops one and keeps the model.

Parameters don't keep alive what they were trained with, and the later optimizer has the gradients. A process group that
nobody holds ends its threads in destroy_process_group(), which could abort Python's end. The same file stands in every
stage. Shown by tests/test_models.py, `test_python_ends_without_a_word`.
"""

import weakref

import torch
import torch._dynamo  # now: torch imports it as it builds its first optimizer, and holds the process group from then on


def hook_gradient(param, method, takes=False):
    """Have `method`, of an optimizer or of its buffer, called when the gradient of `param` is complete. -> handle

    It holds that object weakly. A frozen parameter has the hook too: it may be unfrozen later. `takes`: `method` takes
    the gradient out of `param.grad`. The hook of an earlier optimizer that does so, of any stage, is removed, or this
    one would find none.
    """
    # Not by weakref.WeakMethod, which prints an error for each parameter as Python ends.
    weak_owner, function = weakref.ref(method.__self__, lambda _: handle.remove()), method.__func__

    @torch.compiler.disable  # where a compiled function calls backward()
    def hook(param):
        owner = weak_owner()
        if owner is not None:
            function(owner, param)

    hook.takes_gradient = takes
    hooks = param._post_accumulate_grad_hooks or {}
    for key in list(hooks):
        if takes_gradient(hooks.get(key)):  # an earlier optimizer that nobody has takes its own off, at any moment
            hooks.pop(key, None)
    vars(param).pop("main_grad", None)  # where an earlier stage 3 has put the gradient
    requires_grad = param.requires_grad
    handle = param.requires_grad_().register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


def takes_gradient(hook):
    return getattr(hook, "takes_gradient", False) is True  # a Mock, as a hook, has whatever is asked for
