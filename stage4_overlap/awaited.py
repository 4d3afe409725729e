"""Lets code that reads a parameter in flight wait until the parameter has arrived, even if no module is called.

A bucket is a list of parameters that an all-gather sends together after a step. Until the all-gather has ended, they
are in flight. An evaluation, a save, an EMA, a second forward pass or a hook may read them before.

While a parameter is in flight, it has another class. torch passes every function that is called with such a tensor to
this class first, and the class waits for the bucket. `wait_for_own`, a hook on each module, waits before the module is
called, so torch.compile never sees the other class. If an all-gather fails, every reader gets the error. Shown by
tests/stages/test_overlap.py, `test_whoever_reads_past_the_hooks_sees_finished_parameters`.
"""

import weakref

import torch

from guard.hooks import untraced

ATTRIBUTES = ("grad", "requires_grad", "is_leaf", "shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize",
              "_post_accumulate_grad_hooks")
READ_NO_ELEMENT = {  # torch's functions that read no element of a parameter, so they needn't wait for it
    # To read an attribute, torch calls __torch_function__ with the attribute's getter.
    *(getattr(torch.Tensor, name).__get__ for name in ATTRIBUTES),
    torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.stride, torch.Tensor.is_contiguous,
}
BUCKETS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # all buckets, as keys. GuardedBucket adds itself


class Awaited:
    """A base of the class of a parameter in flight: reading the parameter waits until its bucket has arrived.

    GuardedBucket in distributed.py sets `__class__` of its parameters, and `bucket` of that class. The tensor object
    stays the same. torch, too, changes a class so, when a torch.nn.UninitializedParameter gets its data.

    Attributes:
        bucket: the bucket in flight. Its finish_param_sync() waits, and gives the parameter its class `kind` again.
            None if nothing is in flight. Python frees a class only when it collects garbage, and until then a class
            with a bucket would keep the model in memory.
        kind: the class of the parameter before and after it is in flight.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Wait, and then do what `function` does. torch calls this method if an argument of `function` is in flight.

        types: the classes of the arguments.
        """
        kwargs = kwargs or {}
        if function in READ_NO_ELEMENT:
            with torch._C.DisableTorchFunctionSubclass():  # else `function` would come here again
                return function(*args, **kwargs)
        wait_for(types)
        return function(*args, **kwargs)


def _waits(name):
    """Return a method that waits for the parameter and then calls its method `name`."""
    def method(self, *args, **kwargs):
        wait_for([type(self)])
        return getattr(self, name)(*args, **kwargs)  # the method of its usual class, which `self` has again
    return method


def awaited(kind):
    """Return a class for parameters of class `kind` whose bucket is in flight. Each bucket has classes of its own."""
    names = "__deepcopy__", "__repr__", "to_local", "redistribute"  # these methods bypass __torch_function__
    methods = {name: _waits(name) for name in names if hasattr(kind, name)}
    # Empty __slots__ keep the memory layout of `kind`. Python refuses to change an object's class to one with another
    # layout.
    return type(f"Awaited{kind.__name__}", (Awaited, kind), {**methods, "__slots__": (), "bucket": None, "kind": kind})


@untraced  # torch.compile leaves this function out, because compiled code would depend on a class that changes
def wait_for(classes):
    """Wait for the bucket of each class in `classes` that is a class of parameters in flight."""
    for cls in classes:
        if issubclass(cls, Awaited) and cls.bucket is not None:
            cls.bucket.finish_param_sync()


@untraced
def wait_for_own(module, _inputs):
    """Wait for a module's own parameters, and for parameters of containers in it. torch calls this before the module.

    Two modules of torch read parameters of their children, so this function waits for all parameters in them:
    MultiheadAttention reads its projection without calling it, and TransformerEncoder in eval mode checks the class of
    its first layer's parameters. Inside torch.func.grad a module has other tensors as parameters, so this function
    waits for all buckets of all optimizers.
    """
    if torch._C._functorch.maybe_current_level() is not None:  # the program is inside torch.func.grad
        for bucket in list(BUCKETS):
            bucket.finish_param_sync()
    reads_others = isinstance(module, torch.nn.MultiheadAttention)
    if isinstance(module, torch.nn.TransformerEncoder):
        reads_others = not module.layers[0].training
    params = module.parameters() if reads_others else own_params(module)
    for param in params:
        if isinstance(param, Awaited):
            type(param).bucket.finish_param_sync()


def own_params(module):
    """Return the parameters of a module, and of containers in it that nobody calls, such as a ParameterList.

    For a parameter that was registered as None, as by bias=False, the list has None.
    """
    params = list(module._parameters.values())
    for child in module._modules.values():
        # A container has torch's own `forward`, which only raises an error.
        if child is not None and type(child).forward is torch.nn.Module.forward:
            params += own_params(child)
    return params
