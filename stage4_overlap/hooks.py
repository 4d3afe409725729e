"""What stage 4 hangs on the model: hooks that don't keep the optimizer alive, and do nothing in a copy of the model."""

import weakref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

GRADIENT_HOOKS = WeakTensorKeyDictionary()  # parameter -> the optimizer that has its gradient, weakly, and its hook


class Hook:
    """Calls `method`, of an optimizer, with `args` and then those of the hook, as long as that optimizer exists.

    A module's hooks go with it when it is copied or pickled; a copy of this one does nothing.
    """

    def __init__(self, method=None, *args):
        self.method = method and weakref.WeakMethod(method)
        self.args = args

    def __call__(self, *args):
        method = self.method and self.method()
        if method:
            method(*self.args, *args)

    def __reduce__(self):
        return Hook, ()


class ModuleHook(Hook):
    """The same, and torch.compile leaves it alone: what it finds differs from call to call."""

    __call__ = torch.compiler.disable(Hook.__call__)


def hook_gradient(param, optimizer):
    """Have `optimizer._on_grad_ready(param)` called, and no other optimizer's: a bucket can leave only once. -> handle

    A frozen parameter has the hook too: it may be unfrozen later.
    """
    if param in GRADIENT_HOOKS:
        predecessor, handle = GRADIENT_HOOKS[param]
        handle.remove()
        if predecessor():
            predecessor().finish_param_sync()  # this one begins with what that one has stepped
    requires_grad = param.requires_grad
    handle = param.requires_grad_().register_post_accumulate_grad_hook(Hook(optimizer._on_grad_ready))
    param.requires_grad_(requires_grad)
    GRADIENT_HOOKS[param] = weakref.ref(optimizer), handle
    return handle


def params_read_by(module):
    """Those that `module` reads when it is called: its own, and those of what it holds and doesn't call."""
    params = list(module.parameters(recurse=False))
    for child in module.children():
        has_no_forward = type(child).forward is torch.nn.Module.forward  # a ParameterList, say
        if has_no_forward or isinstance(module, torch.nn.MultiheadAttention):  # reads out_proj.weight itself
            params += params_read_by(child)
    return params
