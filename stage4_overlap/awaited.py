"""Parameters in flight: code that reads one without calling the module that has it waits until it has arrived.

Situation: an evaluation, a save, an EMA, a second forward pass, or a hook after a step. While its bucket is in flight,
a parameter has another class. torch passes every function that is called with such a tensor to this class first, and
the class waits for the bucket. The module hook waits before a module is called, so torch.compile never sees the other
class. If an all-gather fails, every reader gets the error. Shown by tests/stages/test_overlap.py,
`test_whoever_reads_past_the_hooks_sees_finished_parameters`.
"""

import weakref

import torch

from guard.hooks import untraced

ATTRIBUTES = ("grad", "requires_grad", "is_leaf", "shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize",
              "_post_accumulate_grad_hooks")
READ_NO_ELEMENT = {  # functions that don't need the values of a parameter, and so don't wait while it is in flight
    *(getattr(torch.Tensor, name).__get__ for name in ATTRIBUTES),
    torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.stride, torch.Tensor.is_contiguous,
}
BUCKETS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of all optimizers, in order -> None


class Awaited:
    """Mixed into the class of a parameter in flight: reading the parameter waits until its bucket has arrived.

    The tensor object stays and changes its class, as torch.nn.UninitializedParameter does when it gets its data.

    Attributes:
        bucket: the bucket in flight. It resets the parameter's class to `kind` when it has arrived. None afterwards: a
            class is in a reference cycle, and would keep the bucket and the model until Python collects garbage.
        kind: the parameter's class before and after.
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
        return getattr(self, name)(*args, **kwargs)  # now the method of its usual class
    return method


def awaited(kind):
    """Return a class that parameters of class `kind` have while their bucket is in flight. A bucket makes its own."""
    names = "__deepcopy__", "__repr__", "to_local", "redistribute"  # these methods bypass __torch_function__
    members = {name: _waits(name) for name in names if hasattr(kind, name)}
    return type(f"Awaited{kind.__name__}", (Awaited, kind), dict(members, __slots__=(), bucket=None, kind=kind))


@untraced  # torch.compile would guard on a class that changes
def wait_for(kinds):
    """Wait for the buckets of those of these classes that are in flight."""
    for kind in kinds:
        if issubclass(kind, Awaited) and kind.bucket is not None:
            kind.bucket.finish_param_sync()


@untraced
def wait_for_own(module, _):
    """Wait, before a module is called, for its own parameters and those of containers in it, which nobody calls.

    Some modules read parameters of their children, and so wait for all parameters in them. torch's MultiheadAttention
    reads its projection without calling it. TransformerEncoder in eval mode checks the class of its first layer's
    parameters. Inside torch.func.grad a module has other tensors as parameters, so it waits for all buckets there are.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        for bucket in list(BUCKETS):
            bucket.finish_param_sync()
    reads_others = (isinstance(module, torch.nn.MultiheadAttention)
                    or isinstance(module, torch.nn.TransformerEncoder) and not module.layers[0].training)
    for param in module.parameters() if reads_others else own_params(module):
        if isinstance(param, Awaited):
            type(param).bucket.finish_param_sync()


def own_params(module):
    """Return a module's own parameters, or None for each, and those of containers in it, such as a ParameterList."""
    params = list(module._parameters.values())
    for child in module._modules.values():  # its children, without their names
        if child is not None and type(child).forward is torch.nn.Module.forward:
            params += own_params(child)
    return params
