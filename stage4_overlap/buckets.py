"""What a bucket has to know besides, where others write into the model between steps, read it, save it, or fail.

What load_state_dict() has written is what is stepped next. A gradient may be sparse, missing, or a DTensor's partial
sum. Each parameter has a storage of its own: safetensors, accelerate and pickle take views of one storage for one
tensor. Who reads a parameter that is under way waits for it. Shown by tests/stages/test_models.py,
`test_each_parameter_has_a_storage_of_its_own`, tests/stages/test_hostile.py, and tests/stages/test_dtensor.py.
"""

import functools

import torch

from guard.states import follow

from .awaited import Awaited, awaited
from .dtensor import local


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
        together: all buckets of the optimizer.
        is_awaited: whether the parameters have their other class.
        is_incomplete: an all-gather has failed, of this bucket or of one before.
    """

    is_awaited = is_incomplete = False

    def tensor_of(self, param):
        return local(param)

    def move_in(self, flat_params):
        """Parameters in shared memory, one is enough, take all of their dtype there, and stay views of one storage."""
        if any(tensor.device.type == "cpu" and tensor.is_shared() for tensor in self.tensors):
            flat_params.share_memory_()  # and so every view of it: `partition` is called when all have moved in
        super().move_in(flat_params)

    def partition(self):
        flat = self.flat_params
        has_memory = type(flat) is torch.Tensor and not flat.is_meta  # a FakeTensor has none
        if has_memory and not (flat.device.type == "cpu" and flat.is_shared()):
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

    def await_params(self, unchanged):
        """Before they leave: whoever reads one now waits for it. `unchanged`: those that the step has left alone."""
        self.note_new_params(unchanged)
        self.is_awaited = True
        for kind in self.kinds.values():
            kind.bucket = self
        for param in self.params:
            param.__class__ = self.kinds[type(param)]

    def finish_param_sync(self):
        if self.is_awaited:
            try:
                with torch._C.DisableTorchFunctionSubclass():  # or whoever looks at a parameter would wait for itself
                    super().finish_param_sync()
            except Exception:  # a time-out: who reads later, to load a checkpoint say, needn't be told again
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

    def refuse_incomplete(self):
        if self.is_incomplete:
            raise RuntimeError("an all-gather has failed, and parameters of this rank are incomplete: load a checkpoint"
                               " into the model, and build the optimizer anew")
