"""Buckets that survive other code: what writes into the model between steps, reads it, saves it, or fails.

The next step starts from what load_state_dict() has written. A gradient may be sparse, missing, or the partial sum of a
DTensor. Each parameter has its own storage, because safetensors, accelerate and pickle treat views of one storage as
one tensor. Shown by tests/stages/test_models.py, `test_each_parameter_has_a_storage_of_its_own`,
tests/stages/test_hostile.py, and tests/stages/test_dtensor.py.

While its bucket is in flight, a parameter has another class. torch passes every function that is called with such a
tensor to this class first, and the class waits for the bucket: in an evaluation, a save, a second forward pass, a hook.
The module hook waits before a module is called, so torch.compile never sees the other class. If an all-gather fails,
every reader gets the error. Shown by tests/stages/test_overlap.py,
`test_whoever_reads_past_the_hooks_sees_finished_parameters`.
"""

import weakref

import torch

from guard.hooks import untraced
from guard.states import update_main_param

from .dtensor import local

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


class AwaitedBucket:
    """Stands in front of the bucket class of a core or a variant, and makes it safe.

    Attributes:
        main_grads: parameter -> the gradient of its main parameter.
        written: all tensors that others may write into: each parameter, and the local tensor of a DTensor.
        versions: autograd's version counter of each tensor in `written`; a later write changes it.
        kinds: class of parameters -> their class while they are in flight.
    """

    tensor_of = staticmethod(local)

    def partition(self):
        flat = self.flat_params
        if type(flat) is torch.Tensor and not flat.is_meta:  # a FakeTensor has no memory
            for tensor, view in zip(self.tensors, self.views):
                tensor.data = torch.from_dlpack(view)  # another storage on the same memory, which it keeps alive
        super().partition()
        self.main_grads = {param: main.grad for param, main in self.main_params.items()}
        self.zero = flat.new_zeros(())
        self.addresses = [view.data_ptr() for view in self.views]
        BUCKETS[self] = None
        self.kinds = {kind: awaited(kind) for kind in set(map(type, self.params))}
        self.written = list(dict.fromkeys([*self.params, *self.tensors]))
        self.note_new_params()

    def grads(self):
        """Return dense local tensors. A missing gradient becomes an expanded zero, which takes no memory."""
        grads = super().grads()
        for index, grad in enumerate(grads):
            if grad is None:
                grads[index] = self.zero.expand_as(self.tensors[index])
            elif type(grad) is not torch.Tensor or grad.layout is not torch.strided:
                if hasattr(self.params[index], "placements"):
                    grad = local(grad.redistribute(placements=self.params[index].placements))
                grads[index] = grad.to_dense()
        return grads

    def note_new_params(self):
        """Tell autograd, which sees no all-gather, that parameters changed: it refuses graphs that have read them."""
        torch.autograd.graph.increment_version(self.written)
        self.versions = [tensor._version for tensor in self.written]

    def take_model_changes(self):
        """Update main_shard if somebody has written into the parameters."""
        if self.versions != [tensor._version for tensor in self.written]:
            update_main_param(self.parameter.main_shard, self.parameter.shard)

    def moved_params(self):
        """Return parameters whose `data` was replaced, so that they are no longer views of `flat_params`."""
        return [param for param, tensor, address in zip(self.params, self.tensors, self.addresses)
                if tensor.data_ptr() != address]

    def start_param_sync(self):
        """Change the class of the parameters first: from now on, reading one waits for it."""
        self.note_new_params()
        for kind in self.kinds.values():
            kind.bucket = self
        for param in self.params:
            param.__class__ = self.kinds[type(param)]
        super().start_param_sync()

    def finish_param_sync(self):
        if self.param_sync is not None:
            with torch._C.DisableTorchFunctionSubclass():  # or this would wait for itself
                super().finish_param_sync()
            for param in self.params:
                param.__class__ = type(param).kind
            for kind in self.kinds.values():
                kind.bucket = None
