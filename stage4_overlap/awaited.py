"""What a bucket has to know besides, where others write into the model between steps, read it, save it, or fail.

What load_state_dict() has written is what is stepped next. A gradient may be sparse, missing, or a DTensor's partial
sum. Each parameter has a storage of its own: safetensors, accelerate and pickle take views of one storage for one
tensor. Shown by tests/stages/test_models.py, `test_each_parameter_has_a_storage_of_its_own`,
tests/stages/test_hostile.py, and tests/stages/test_dtensor.py.

While its bucket is under way a parameter has a class of its own. torch hands every function that is called with such a
tensor to that class first, and that waits for the bucket: for an evaluation, a save, a second forward, a hook. The
module hook waits before a module is called, so that torch.compile finds parameters as they always are. Where an
all-gather fails, one reader is told. Shown by tests/stages/test_overlap.py,
`test_whoever_reads_past_the_hooks_sees_finished_parameters`, and tests/stages/test_users.py,
`test_after_a_failure_the_model_can_be_read_and_trained_anew`.
"""

import functools

import torch

from guard.hooks import untraced
from guard.states import follow

from .dtensor import local

ATTRIBUTES = "grad", "requires_grad", "is_leaf", "shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize"
READ_NO_ELEMENT = {  # what may be asked of a parameter that is under way, without waiting for it
    *(getattr(torch.Tensor, name).__get__ for name in ATTRIBUTES),
    torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.stride, torch.Tensor.is_contiguous,
}


class Awaited:
    """Mixed into the class of a parameter that is under way: to read it is to wait until its bucket has arrived.

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


def hook_module(module):
    """-> the handle of a new hook, or none: one that another optimizer made, or this one before, serves."""
    for key, hook in module._forward_pre_hooks.items():
        if isinstance(hook, ModuleHook):
            module._forward_pre_hooks[key] = ModuleHook(module)  # a layer may have been replaced since
            return []
    return [module.register_forward_pre_hook(ModuleHook(module), prepend=True)]


class ModuleHook:
    """Waits for a module's own parameters before it is called, and for those of containers in it: nobody calls these.

    A module that reads what isn't its own waits for all that is in it: torch's MultiheadAttention, whose projection it
    doesn't call; TransformerEncoder in eval, which asks parameters of its first layer for their class; and any module
    inside torch.func.grad, where there are other tensors, made past torch's functions.
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
    """-> the parameters, by name, of each ParameterList, ParameterDict and the like in `module`."""
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield child._parameters
            yield from containers_in(child)


@functools.cache
def guarded_bucket(core):
    """-> `core`, the class of a core's buckets or a variant's, with all that is below."""
    class GuardedBucket(AwaitedBucket, core):
        pass

    return GuardedBucket


class AwaitedBucket:
    """Attributes:
        main_grads: parameter -> the gradient of its main parameter.
        written, versions: what has a counter of writes, each parameter and what this rank has of it, where that is
            another tensor; and autograd's counts, to see later writes.
        kinds: class of parameters -> their class while they are under way.
        unused: parameters that the step leaves alone.
        together: all buckets of the optimizer.
        is_awaited: whether the parameters have their other class.
        is_incomplete: an all-gather has failed, of this bucket or of one before.
    """

    is_awaited = is_incomplete = False
    unused = frozenset()

    def tensor_of(self, param):
        return local(param)

    def partition(self):
        flat = self.flat_params
        if type(flat) is torch.Tensor and not flat.is_meta:  # a FakeTensor has no memory
            for tensor, view in zip(self.tensors, self.views):
                tensor.data = torch.from_dlpack(view)  # of the same memory, which it keeps alive
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
        """A missing gradient is zero, without any memory."""
        if grad is None:
            return self.zero.expand_as(tensor)
        if hasattr(param, "placements"):
            grad = local(grad.redistribute(placements=param.placements))
        return grad.to_dense()

    def note_new_params(self, unchanged=()):
        """Tell autograd, which saw nothing, that these are new: a graph that has read the old ones is refused."""
        old = {*unchanged, *map(local, unchanged)} if unchanged else ()
        torch.autograd.graph.increment_version([one for one in self.written if one not in old] if old else self.written)
        self.versions = [one._version for one in self.written]

    def take_model_changes(self):
        """Where somebody has written into the parameters, main_shard follows."""
        if self.versions != [one._version for one in self.written]:
            follow(self.parameter.main_shard, self.parameter.shard)

    def moved_params(self):
        """Those whose `data` somebody has replaced: they are no views of `flat_params` any more."""
        return [param for param, tensor, view in zip(self.params, self.tensors, self.views)
                if tensor.data_ptr() != view.data_ptr()]

    def start_param_sync(self):
        """Before they leave: to read one is to wait for it from now on."""
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
                with torch._C.DisableTorchFunctionSubclass():  # or it would wait for itself
                    super().finish_param_sync()
            except Exception:  # a time-out: later reads, to load a checkpoint say, are no error again
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
