"""Who reads a parameter past its module right after step(): an evaluation, a save, a second forward, a hook.

While its bucket is under way a parameter has a class of its own. torch hands every function that is called with such a
tensor to that class first, and that waits for the bucket. The module hook waits before a module is called, so that
torch.compile finds parameters as they always are. Where an all-gather fails, one reader is told. Shown by
tests/stages/test_overlap.py, `test_whoever_reads_past_the_hooks_sees_finished_parameters`, and
tests/stages/test_users.py, `test_after_a_failure_the_model_can_be_read_and_trained_anew`.
"""

import torch

from guard.hooks import untraced

ATTRIBUTES = "grad", "requires_grad", "is_leaf", "shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize"
READ_NO_ELEMENT = {  # what may be asked of a parameter that is under way, without waiting for it
    *(getattr(torch.Tensor, name).__get__ for name in ATTRIBUTES),
    torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.stride, torch.Tensor.is_contiguous,
}


class Awaited:
    """Mixed into the class of a parameter that is under way: whoever reads it waits until its bucket has arrived.

    The tensor stays the same and changes its class, as torch.nn.UninitializedParameter does when it gets its data.

    Attributes:
        bucket: the one that is under way; gives the parameter its `kind` back when it has arrived. None then: a class
            refers to itself, and would keep the bucket, and so the model, until Python collects garbage.
        kind: the class before and after.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in READ_NO_ELEMENT:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        wait_for(types)
        return function(*args, **kwargs)


def _waits(name):
    def method(self, *args, **kwargs):
        wait_for([type(self)])
        return getattr(self, name)(*args, **kwargs)  # that of its kind
    return method


def awaited(kind):
    """-> the class of a parameter of class `kind` while its bucket is under way; each bucket needs one of its own."""
    names = "__deepcopy__", "__repr__", "to_local", "redistribute"  # of parameters and DTensors; no torch functions
    members = {name: _waits(name) for name in names if hasattr(kind, name)}
    members.update(__slots__=(), bucket=None, kind=kind)
    return type(f"Awaited{kind.__name__}", (Awaited, kind), members)


@untraced  # a guard would be of a class that changes
def wait_for(kinds):
    """Wait for what is under way of these classes."""
    for kind in kinds:
        if issubclass(kind, Awaited) and kind.bucket is not None:
            kind.bucket.finish_param_sync()


def read_too_early(name):
    return RuntimeError(f"a gradient has come for parameter {name}, which is still under way: it was read before the "
                        "last step, or past torch's functions, by a TorchScript model say: call "
                        "optimizer.finish_param_sync() after step()")


def hook_module(module):
    """-> the handle of a new hook, or none: one that another optimizer made, or this one before, serves."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ModuleHook)]
    for hook in hooks:
        hook.look_at(module)  # a layer may have been replaced since
    return [] if hooks else [module.register_forward_pre_hook(ModuleHook(module), prepend=True)]


class ModuleHook:
    """Waits for a module's own parameters before it is called, and for those of containers in it: nobody calls these.

    A module that reads what isn't its own waits for all that is in it: torch's MultiheadAttention, whose projection it
    doesn't call; TransformerEncoder in eval, which asks parameters of its first layer for their class; and any module
    inside torch.func.grad, where there are other tensors, made past torch's functions.
    """

    def __init__(self, module):
        self.look_at(module)

    def look_at(self, module):
        self.params = list(module.parameters())
        self.own = [module._parameters, *containers_in(module)]
        self.is_attention = isinstance(module, torch.nn.MultiheadAttention)
        self.is_encoder = isinstance(module, torch.nn.TransformerEncoder)

    @untraced
    def __call__(self, module, _):
        reads_others = self.is_attention or self.is_encoder and not module.layers[0].training
        if reads_others or torch._C._functorch.maybe_current_level() is not None:
            wait_for(map(type, self.params))
        for params in self.own:
            for param in params.values():
                if isinstance(param, Awaited):
                    wait_for([type(param)])


def containers_in(module):
    """-> the parameters, by name, of each ParameterList, ParameterDict and the like in `module`."""
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield child._parameters
            yield from containers_in(child)
