"""Counts the memory that tensors take, in bytes, by following storages.

    with Memory(device) as memory:
        model = GPT(config).to(device)
        memory.live      # bytes of all tensors made since the start that are still alive
        memory.peak      # the most that were alive at one moment since the start, or since memory.reset_peak()
        memory.mark("parameters", model.parameters())
        memory.by_kind() # {"parameters": bytes, …, REST: bytes of unmarked storages}; the sum is memory.live

A storage is the block of memory in which torch keeps a tensor and all views of it. A main parameter is the fp32 copy of
a 16-bit parameter: an optimizer updates it, and writes it rounded into the parameter.

Memory counts what tensors hold. It doesn't count what a kernel needs while it runs, nor buffers of the communication
library.
"""

import collections
import gc
import threading
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# The kind of storages that nobody has marked. After a step they belong neither to the model nor to an optimizer.
REST = "buffers"


class Memory(TorchDispatchMode):
    """Follows every storage from the operator that returns it to the moment when nothing refers to it any more.

    Memory is a TorchDispatchMode: in a `with` block torch calls `__torch_dispatch__` in place of every operator, also
    of operators that C++ calls, for autograd or for DDP's buckets. The idea is from torch's own MemTracker.

    - A view adds no bytes, because it has the storage of its base.
    - A storage that torch.from_dlpack makes in the memory of another storage adds no bytes, either.
    - A tensor from before the block counts as soon as an operator returns it or a view of it, or `track` gets it.
    """

    def __init__(self, device="cpu"):
        super().__init__()
        self.device = torch.device(device)
        self.live = self.peak = 0  # bytes that are alive now, and the most at one moment
        # gloo's threads free tensors at any moment, and `_set` then runs in such a thread. The lock is reentrant,
        # because `_track` holds it while it calls `_set`.
        self.lock = threading.RLock()
        # Storage -> [bytes that count for it]. In a list, so that `_set` can write 0 when the storage is gone.
        self.counted = weakref.WeakKeyDictionary()
        self.kinds = weakref.WeakKeyDictionary()  # storage -> its kind, which `mark` writes
        # Storage that from_dlpack has made -> the storage in whose memory it lies. `_from_dlpack` writes it.
        self.owners = weakref.WeakKeyDictionary()

    def __enter__(self):
        if self.device.type == "cuda":
            forget_peaks(self.device)
            # `reserved` subtracts this figure. A CPU has no such figure.
            self.allocated_before = torch.cuda.memory_allocated(self.device)
        # resize_ frees or takes memory, and from_dlpack makes a second storage. Neither is an operator. So in the block
        # functions that count stand in for both.
        self.torchs_resize = torch.UntypedStorage.resize_
        self.torchs_from_dlpack = torch.from_dlpack
        # A lambda becomes a method of the storage, which is its first argument. A bound method would stay our method.
        torch.UntypedStorage.resize_ = lambda storage, size: self._resize(storage, size)
        torch.from_dlpack = self._from_dlpack
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self.torchs_resize
        torch.from_dlpack = self.torchs_from_dlpack
        return super().__exit__(*exception)

    @property
    def reserved(self):
        """Return the peak of bytes that torch's caching allocator reserved, less the tensors from before the block.

        These bytes include workspaces of kernels, and rounding: large tensors are rounded up to 1 MiB.
        """
        return torch.cuda.max_memory_reserved(self.device) - self.allocated_before

    def reset_peak(self):
        """Let `peak` be the most bytes that are alive at one moment from now on."""
        self.peak = self.live

    def settle(self):
        """Wait until `live` stays the same for 60 ms, because gloo frees tensors soon after wait(). Returns `live`."""
        live = self.live
        n_unchanged = 0
        while n_unchanged < 3:
            time.sleep(0.02)
            live_before = live
            live = self.live
            n_unchanged = n_unchanged + 1 if live == live_before else 0
        return live

    def track(self, tensors):
        """Count tensors, also those that existed before the start, such as the parameters of a model."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                self._track(plain.untyped_storage())

    def mark(self, kind, tensors):
        """Give the storages of `tensors` a kind. A storage keeps the first kind that it was given."""
        with self.lock:
            for tensor in tensors:
                for plain in plain_tensors(tensor):
                    self.kinds.setdefault(self._owner(plain.untyped_storage()), kind)

    def by_kind(self):
        """Return {kind: live bytes, …, REST: live bytes}. Every storage counts once, so the sum is `live`."""
        by_kind = collections.Counter({REST: 0})
        for storage, [n_bytes] in list(self.counted.items()):
            by_kind[self.kinds.get(storage, REST)] += n_bytes
        return dict(by_kind)

    def hold(self, n_bytes):
        """Add `n_bytes` to the live bytes; a negative number takes bytes away.

        harness/planning/alone.py so counts activations, which belong to no tensor there.
        """
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call the operator `function`, and count the tensors that it returns."""
        result = function(*args, **(kwargs or {}))
        self.track(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _track(self, storage):
        """Count a storage, with the size that the storage has now, until the storage is gone."""
        with self.lock:
            storage = self._owner(storage)
            if storage not in self.counted:
                self.counted[storage] = [0]
                # When the storage is gone, 0 bytes count for it.
                weakref.finalize(storage, self._set, self.counted[storage], 0)
            self._set(self.counted[storage], storage.nbytes())

    def _owner(self, storage):
        """Return the storage in whose memory `storage` lies, mostly `storage` itself."""
        return self.owners.get(storage, storage)

    def _set(self, counted_bytes, n_bytes):
        """Write `n_bytes` into a list of `counted`, and add the difference to the live bytes."""
        with self.lock:
            added = n_bytes - counted_bytes[0]
            counted_bytes[0] = n_bytes
            self.hold(added)

    def _resize(self, storage, size):
        """Stand in for torch's resize_: resize a storage, and count the new size if the storage is counted."""
        self.torchs_resize(storage, size)
        if storage in self.counted:
            self._track(storage)
        return storage

    def _from_dlpack(self, source, **options):
        """Stand in for torch.from_dlpack: make a tensor, and note in whose memory it lies."""
        shared = self.torchs_from_dlpack(source, **options)
        # With options the tensor may be a copy. And another `source`, of numpy for example, has no storage.
        if isinstance(source, torch.Tensor) and not options:
            self.owners[shared.untyped_storage()] = self._owner(source.untyped_storage())
        return shared


def plain_tensors(tensor):
    """Return the tensors that hold a tensor's memory: the tensor, or the parts of a wrapper such as a DTensor.

    A wrapper's own storage has the size of the whole tensor, and no memory.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names_of_parts, _ = tensor.__tensor_flatten__()  # the parts are attributes with these names
    plain = []
    for name in names_of_parts:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            plain += plain_tensors(part)
    return plain


def mark_grads(memory, params):
    """Mark the gradients of `params`, in `grad` or in `main_grad`.

    The optimizer in stage3_gradbuffer/ keeps gradients in `main_grad` where their dtype isn't the parameter's.
    """
    grads = [getattr(param, name, None) for param in params for name in ("grad", "main_grad")]
    memory.mark("gradients", [grad for grad in grads if grad is not None])


def mark_state(memory, optimizer):
    """Mark the state of `optimizer` and of the optimizers in it, and the gradients of the parameters that they update.

    Main parameters are state, too. Where an optimizer updates the model's own parameters, the caller has marked these
    as "parameters" before, and they keep that kind.
    """
    # guard/chained.py's Chained consists of several optimizers.
    for part in getattr(optimizer, "optimizers", ()):
        mark_state(memory, part)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    values = tree_leaves([list(state.values()) for state in optimizer.state.values()])
    mark_grads(memory, params)
    memory.mark("state", params + [value for value in values if isinstance(value, torch.Tensor)])
    # An optimizer of a folder stage*/ keeps the torch.optim.Optimizer that it wraps in an attribute.
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer):
            mark_state(memory, inner)


def forget_peaks(device):
    """Give unused memory back to the GPU, and reset the peaks of torch's allocator."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
