"""Memory that tensors take, in bytes: counted by following storages.

    with Memory(device) as memory:
        model = GPT(config).to(device)
        memory.live      # bytes of all tensors made since, and still alive
        memory.peak      # the most that were alive at one moment since the start, or since memory.reset_peak()
        memory.made      # bytes of all tensors made since, alive or not
        memory.mark("parameters", model.parameters())
        memory.by_kind() # {"parameters": bytes, …, REST: bytes that nothing was said of}; the sum is memory.live

What is counted is what tensors hold, on a CPU as on a GPU. What a kernel needs only while it runs is not, and neither
are buffers that the communication library keeps for itself.
"""

import collections
import gc
import threading
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

REST = "buffers"  # what nobody has marked: after a step that is what neither the model nor an optimizer calls its own
KINDS = "parameters", "gradients", "state", REST


class Memory(TorchDispatchMode):
    """Follows every storage from the operator that returns it to the moment when nothing refers to it any more.

    A view returns the storage of its base: it is known already, and counts nothing. Nor does a storage that
    torch.from_dlpack makes in the memory of another, which it keeps alive. The operators that C++ calls (autograd's,
    the buckets of DistributedDataParallel) come by here too. A tensor made before counts from the moment when an
    operator returns it or a view of it, or from `track`. The idea is that of torch's own MemTracker.
    """

    def __init__(self, device="cpu"):
        super().__init__()
        self.device = torch.device(device)
        self.live = self.peak = self.made = 0
        self.lock = threading.RLock()  # gloo's threads let go of tensors at any moment, and that is counted there
        self.counted = weakref.WeakKeyDictionary()  # storage -> [the bytes that it counts with]
        self.kinds = weakref.WeakKeyDictionary()  # storage -> what `mark` has called it
        self.owners = weakref.WeakKeyDictionary()  # storage -> the one in whose memory it lies, if that is another

    def __enter__(self):
        if self.device.type == "cuda":
            forget_peaks(self.device)
            self.allocated_before = torch.cuda.memory_allocated(self.device)
        # One frees and brings back memory, the other gives it a second storage; neither is an operator.
        self.resize, self.share = torch.UntypedStorage.resize_, torch.from_dlpack
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)
        torch.from_dlpack = self._shared
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_, torch.from_dlpack = self.resize, self.share
        return super().__exit__(*exception)

    @property
    def reserved(self):
        """On CUDA, the most bytes since the start that torch's caching allocator had of the GPU, less those of tensors
        from before. With them come what kernels work in and what is rounded up, to 1 MiB where a tensor is large."""
        return torch.cuda.max_memory_reserved(self.device) - self.allocated_before

    def reset_peak(self):
        self.peak = self.live

    def settled(self):
        """`live`, when four looks in 60 ms find the same: gloo's threads let go of a tensor a moment after wait()."""
        looks = []
        while len(looks) < 4 or len(set(looks[-4:])) > 1:
            looks.append(self.live)
            threading.Event().wait(0.02)
        return looks[-1]

    def track(self, tensors):
        """Counts tensors, also those that were there before: the parameters of a model, say."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                self._track(plain.untyped_storage())

    def mark(self, kind, tensors):
        """Says what the storages of `tensors` are, for good: a storage keeps the first kind that it was given."""
        with self.lock:
            for plain in (plain for tensor in tensors for plain in plain_tensors(tensor)):
                self.kinds.setdefault(self._owner(plain.untyped_storage()), kind)

    def by_kind(self):
        """-> {kind: bytes of it that are alive, …, REST: bytes}: every storage counts once, the sum is `live`."""
        found = collections.Counter({REST: 0})
        for storage, (n_bytes,) in list(self.counted.items()):
            found[self.kinds.get(storage, REST)] += n_bytes
        return dict(found)

    def hold(self, n_bytes):
        """Counts bytes of which no tensor is known; fewer than 0: they are freed."""
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.track(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _track(self, storage):
        with self.lock:
            storage = self._owner(storage)
            count = self.counted.get(storage)
            if count is None:
                count = self.counted[storage] = [0]
                weakref.finalize(storage, self._set, count, 0)
            self._set(count, storage.nbytes())

    def _owner(self, storage):
        return self.owners.get(storage, storage)

    def _set(self, count, n_bytes):
        with self.lock:
            more, count[0] = n_bytes - count[0], n_bytes
            self.made += max(0, more)
            self.hold(more)

    def _resized(self, storage, size):
        self.resize(storage, size)
        if storage in self.counted:
            self._track(storage)
        return storage

    def _shared(self, source, **how):
        shared = self.share(source, **how)
        if isinstance(source, torch.Tensor) and not how:  # else it may be a copy, or memory that nobody counts
            self.owners[shared.untyped_storage()] = self._owner(source.untyped_storage())
        return shared


def plain_tensors(tensor):
    """A DTensor is a wrapper: its own storage has the size of the whole and no memory; what is inside counts."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [plain for one in inner if isinstance(one, torch.Tensor) for plain in plain_tensors(one)]


def mark_grads(memory, params):
    """`main_grad` is where stage 3 keeps what `grad` can't be, since its dtype is another one."""
    grads = [getattr(param, name, None) for param in params for name in ("grad", "main_grad")]
    memory.mark("gradients", [grad for grad in grads if grad is not None])


def mark_state(memory, optimizer):
    """Of `optimizer` and those inside: what is kept for a step, and the gradients of what they step.

    What they step beside the model's parameters, which are marked before, is state too: main parameters.
    """
    for one in getattr(optimizer, "optimizers", ()):  # a pair
        mark_state(memory, one)
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    values = tree_leaves([list(state.values()) for state in optimizer.state.values()])
    mark_grads(memory, stepped)
    memory.mark("state", stepped + [value for value in values if isinstance(value, torch.Tensor)])
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer):
            mark_state(memory, inner)


def forget_peaks(device):
    """Gives what no tensor uses back to the GPU, and lets torch's allocator begin its peaks anew."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
