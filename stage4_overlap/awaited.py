"""Buckets that survive other code: what writes into the model between steps, reads it, saves it, or fails.

The next step starts from what load_state_dict() has written. A gradient may be sparse, missing, or the partial sum of a
DTensor. Each parameter has its own storage, because safetensors, accelerate and pickle treat views of one storage as
one tensor. Shown by tests/stages/test_models.py, `test_each_parameter_has_a_storage_of_its_own`,
tests/stages/test_hostile.py, and tests/stages/test_dtensor.py.

While its bucket is in flight, a parameter has another class. torch passes every function that is called with such a
tensor to this class first, and the class waits for the bucket: in an evaluation, a save, a second forward pass, a hook.
The module hook waits before a module is called, so torch.compile never sees the other class. If an all-gather fails,
only the first reader gets the error. Shown by tests/stages/test_overlap.py,
`test_whoever_reads_past_the_hooks_sees_finished_parameters`, and tests/stages/test_users.py,
`test_after_a_failure_the_model_can_be_read_and_trained_anew`.
"""

import functools

import torch

from guard.hooks import untraced
from guard.states import follow

from .dtensor import local

ATTRIBUTES = "grad", "requires_grad", "is_leaf", "shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize"
READ_NO_ELEMENT = {  # functions that don't need the values of a parameter, and so don't wait while it is in flight
    *(getattr(torch.Tensor, name).__get__ for name in ATTRIBUTES),
    torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.stride, torch.Tensor.is_contiguous,
}


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
    """-> the class that parameters of class `kind` have while their bucket is in flight; each bucket makes its own."""
    names = "__deepcopy__", "__repr__", "to_local", "redistribute"  # these methods bypass __torch_function__
    members = {name: _waits(name) for name in names if hasattr(kind, name)}
    members.update(__slots__=(), bucket=None, kind=kind)
    return type(f"Awaited{kind.__name__}", (Awaited, kind), members)


@untraced  # torch.compile would guard on a class that changes
def wait_for(kinds):
    """Wait for the buckets of those of these classes that are in flight."""
    for kind in kinds:
        if issubclass(kind, Awaited) and kind.bucket is not None:
            kind.bucket.finish_param_sync()


def hook_module(module):
    """-> [the handle of a new hook], or []: an existing hook, of this or another optimizer, is renewed instead."""
    for key, hook in module._forward_pre_hooks.items():
        if isinstance(hook, ModuleHook):
            module._forward_pre_hooks[key] = ModuleHook(module)  # a layer may have been replaced since
            return []
    return [module.register_forward_pre_hook(ModuleHook(module), prepend=True)]


class ModuleHook:
    """Before a module is called, waits for its own parameters, and for those of containers in it, which nobody calls.

    Some modules read parameters of their children, and so wait for all parameters in them. torch's MultiheadAttention
    reads its projection without calling it. TransformerEncoder in eval mode checks the class of its first layer's
    parameters. Inside torch.func.grad every module waits for all: it wraps parameters, bypassing __torch_function__.
    """

    def __init__(self, module):
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
    """-> iterator over name -> parameter of each container in `module`, such as a ParameterList or ParameterDict."""
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield child._parameters
            yield from containers_in(child)


@functools.cache
def guarded_bucket(core):
    """-> a subclass of `core`, the bucket class of a core or a variant, with AwaitedBucket in front."""
    class GuardedBucket(AwaitedBucket, core):
        pass

    return GuardedBucket


class AwaitedBucket:
    """Attributes:
        main_grads: parameter -> the gradient of its main parameter.
        written: all tensors that others may write into: each parameter, and the local tensor of a DTensor.
        versions: autograd's version counter of each tensor in `written`; a later write changes it.
        kinds: class of parameters -> their class while they are in flight.
        unused: parameters that no rank used; the step doesn't update them.
        together: all buckets of the optimizer.
        is_awaited: whether the parameters have their other class.
        is_incomplete: whether an all-gather has failed, of this bucket or of one before it.
    """

    is_awaited = is_incomplete = False
    unused = frozenset()

    def tensor_of(self, param):
        return local(param)

    def partition(self):
        flat = self.flat_params
        if type(flat) is torch.Tensor and not flat.is_meta:  # a FakeTensor has no memory
            for tensor, view in zip(self.tensors, self.views):
                tensor.data = torch.from_dlpack(view)  # another storage on the same memory, which it keeps alive
        super().partition()
        self.main_grads = {param: main.grad for param, main in self.main_params.items()}
        self.zero = flat.new_zeros(())
        self.kinds = {kind: awaited(kind) for kind in set(map(type, self.params))}
        self.written = list(dict.fromkeys([*self.params, *self.tensors]))
        self.note_new_params()

    def grads(self):
        grads = super().grads()
        for index, grad in enumerate(grads):
            if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
                grads[index] = self.dense(grad, self.params[index], self.tensors[index])
        return grads

    def dense(self, grad, param, tensor):
        """-> `grad` as a dense local tensor. A missing gradient becomes an expanded zero, which takes no memory."""
        if grad is None:
            return self.zero.expand_as(tensor)
        if hasattr(param, "placements"):
            grad = local(grad.redistribute(placements=param.placements))
        return grad.to_dense()

    def note_new_params(self, unchanged=()):
        """Tell autograd, which sees no all-gather, that parameters changed: it refuses graphs that read the old values.

        unchanged: parameters that were not updated.
        """
        old = {*unchanged, *map(local, unchanged)} if unchanged else ()
        torch.autograd.graph.increment_version([one for one in self.written if one not in old] if old else self.written)
        self.versions = [one._version for one in self.written]

    def take_model_changes(self):
        """If somebody has written into the parameters, update main_shard from them."""
        if self.versions != [one._version for one in self.written]:
            follow(self.parameter.main_shard, self.parameter.shard)

    def moved_params(self):
        """-> parameters whose `data` somebody has replaced, so that they are no longer views of `flat_params`."""
        return [param for param, tensor, view in zip(self.params, self.tensors, self.views)
                if tensor.data_ptr() != view.data_ptr()]

    def start_param_sync(self):
        """Change the class of the parameters first: from now on, reading one waits for it."""
        self.note_new_params(self.unused)
        self.is_awaited = True
        for kind in self.kinds.values():
            kind.bucket = self
        for param in self.params:
            param.__class__ = self.kinds[type(param)]
        super().start_param_sync()

    def finish_param_sync(self):
        if self.is_awaited:
            try:
                with torch._C.DisableTorchFunctionSubclass():  # or this would wait for itself
                    super().finish_param_sync()
            except Exception:  # a time-out, say. Later reads must not fail again: a checkpoint may be loaded
                for bucket in list(self.together):
                    bucket.give_up()
                raise
            self.release()

    def release(self):
        for param in self.params:
            if isinstance(param, Awaited):
                param.__class__ = type(param).kind
        for kind in self.kinds.values():
            kind.bucket = None
        self.is_awaited = False

    def give_up(self):
        if self.is_awaited:
            self.last_param_sync, self.param_sync, self.is_incomplete = self.param_sync, None, True
            self.release()
