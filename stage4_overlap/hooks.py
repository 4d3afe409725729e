"""What stage 4 hangs on the model: whoever reads a parameter waits for it; and where a backward pass ends."""

import torch

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


@torch.compiler.disable  # it would guard a class that changes
def wait_for(kinds):
    """Wait for what is under way of these classes."""
    for kind in kinds:
        bucket = kind.bucket if issubclass(kind, Awaited) else None
        if bucket is not None:  # another thread may have waited meanwhile
            bucket.finish_param_sync()


def own_params(module):
    """Those of a module, and of the containers in it: nobody calls a ParameterList."""
    yield from module._parameters.values()
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield from own_params(child)


class ModuleHook:
    """Waits for a module's own parameters before it is called, so that torch.compile finds them as they always are.

    torch's MultiheadAttention reads those of a module in it, which it doesn't call, and TransformerEncoder asks those
    of its first layer, if that is in eval, for their class. Inside torch.func.grad there are other tensors, made past
    torch's functions. In these cases it waits for all that the module had.
    """

    def __init__(self, module):
        self.params = list(module.parameters())

    @torch.compiler.disable
    def __call__(self, module, _):
        reads_all = isinstance(module, torch.nn.MultiheadAttention) or (
            isinstance(module, torch.nn.TransformerEncoder) and not module.layers[0].training)
        in_transform = torch._C._functorch.maybe_current_level() is not None
        wait_for(map(type, self.params if reads_all or in_transform else own_params(module)))


class BackwardPass:
    """Calls `at_end` when the backward pass that is under way ends: the outer one, if a checkpoint is re-entrant.

    torch holds it until then, and drops it without a call when the pass fails: who holds it weakly sees that.
    """

    def __init__(self, at_end):
        self.at_end, self.handle = at_end, None
        self._queue()

    def _queue(self, *_):
        if self.handle is not None:
            self.handle.remove()  # or the graph, which the user may keep, would hold this after a failure
        torch.autograd.Variable._execution_engine.queue_callback(self)

    @torch.compiler.disable  # where a compiled function calls backward()
    def __call__(self):
        node = torch._C._current_autograd_node()  # inside which this pass was
        if node is None:
            self.at_end()
        else:
            self.handle = node.register_hook(self._queue)
