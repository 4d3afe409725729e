"""Memory that tensors take, in bytes: counted by following storages, and each address once.

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

import bisect
import collections
import gc
import threading
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

REST = "buffers"  # what nobody has marked: after a step that is what neither the model nor an optimizer calls its own
KINDS = "parameters", "gradients", "state", REST


def Memory(device):
    """A counter for `device` (torch.device or str), to be entered with `with`."""
    return CudaMemory(device) if torch.device(device).type == "cuda" else StorageMemory()


class StorageMemory(TorchDispatchMode):
    """Follows every storage from the operator that returns it to the moment when nothing refers to it any more.

    A view returns the storage of its base: it is known already, and counts nothing. Nor does a storage that lies in the
    memory of another, as torch.from_dlpack makes them, which keep that other one alive. The operators that C++ calls
    (autograd's, the buckets of DistributedDataParallel) come by here too. A tensor made before counts from the moment
    when an operator returns it or a view of it, or from `track`. The idea is that of torch's own MemTracker.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.made = 0
        self.lock = threading.RLock()  # gloo's threads let go of tensors at any moment, and that is counted there
        self.sizes = weakref.WeakKeyDictionary()  # storage -> [bytes that count, (start, stop) of its memory]
        self.spans = Spans()
        self.kinds = weakref.WeakKeyDictionary()  # storage -> what `mark` has called it

    def __enter__(self):
        self.resize = torch.UntypedStorage.resize_  # frees and brings back memory, and is no operator
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*exception)

    def reset_peak(self):
        self.peak = self.live

    def settled(self):
        """`live`, when it has not changed for 20 ms: gloo's threads let go of a tensor a moment after wait()."""
        before = None
        while before != self.live:
            before = self.live
            threading.Event().wait(0.02)
        return before

    def track(self, tensors):
        """Counts tensors that were there before: the parameters of a model, say."""
        for tensor in tensors:
            self._track(tensor.untyped_storage())

    def mark(self, kind, tensors):
        """Says what the storages of `tensors` are, for good: a storage keeps the first kind that it was given."""
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                with self.lock:
                    owner = self.spans.owner(plain.untyped_storage())
                self.kinds.setdefault(owner, kind)

    def by_kind(self):
        """-> {kind: bytes of it that are alive, …, REST: bytes}: every storage counts once, the sum is `live`."""
        found = collections.Counter({REST: 0})
        for storage, size in list(self.sizes.items()):
            found[self.kinds.get(storage, REST)] += size[0]
        return dict(found)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self._track_tensor, result)
        return result

    def _track_tensor(self, tensor):
        self.track(plain_tensors(tensor))

    def _track(self, storage):
        with self.lock:
            self._track_alone(storage)

    def _track_alone(self, storage):
        size = self.sizes.get(storage)
        if size is None:
            size = self.sizes[storage] = [0, None]
            weakref.finalize(storage, self._add, size, None, 0)
        span = span_of(storage)
        if size[1] != span:
            counts = self.spans.owner(storage) is storage
            for inside in self.spans.take(span, size, storage) if counts else ():  # they counted, until this was seen
                if inside in self.kinds:
                    self.kinds.setdefault(storage, self.kinds[inside])
                self._add(self.sizes[inside], self.sizes[inside][1], 0)
            self._add(size, span, storage.nbytes() if counts else 0)

    def _add(self, size, span, n_bytes):
        """A storage, known by its list `size`, now lies at `span` and counts with `n_bytes`; it may have been freed."""
        with self.lock:
            if not n_bytes:
                self.spans.drop(size)
            self.live += n_bytes - size[0]
            self.made += max(0, n_bytes - size[0])
            size[:] = n_bytes, span
            self.peak = max(self.peak, self.live)

    def hold(self, n_bytes):
        """Counts bytes of which no tensor is known; fewer than 0: they are freed."""
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def _resized(self, storage, size):
        self.resize(storage, size)
        if storage in self.sizes:
            self._track(storage)
        return storage


def span_of(storage):
    """-> (start, stop): where its memory lies; of a fake one, which has none, as many bytes from 0 on."""
    start = 0 if storage.device.type == "meta" else storage.data_ptr()
    return start, start + storage.nbytes()


class Spans:
    """Which storage counts for an address: the one that holds the others that lie there.

    Attributes:
        starts: where each of them starts, sorted.
        at: start -> stop, the list by which its counter knows it, and a weak reference to it.
    """

    def __init__(self):
        self.starts, self.at = [], {}

    def owner(self, storage):
        """-> the storage in whose memory `storage` lies; as a rule itself."""
        start, stop = span_of(storage)
        before = bisect.bisect_right(self.starts, start)
        if start and before:
            its_stop, _, owner = self.at[self.starts[before - 1]]
            if stop <= its_stop:
                return owner() or storage
        return storage

    def take(self, span, size, storage):
        """Of a new owner. -> those before that lie in its memory, which own nothing from now on."""
        self.drop(size)  # from where it was
        start, stop = span
        if not start or start == stop:
            return []
        first, last = bisect.bisect_left(self.starts, start), bisect.bisect_left(self.starts, stop)
        inside = [self.at.pop(other)[2]() for other in self.starts[first:last]]
        self.starts[first:last] = [start]
        self.at[start] = stop, size, weakref.ref(storage)
        return [other for other in inside if other is not None]

    def drop(self, size):
        start = size[1][0] if size[1] else 0
        if start in self.at and self.at[start][1] is size:
            del self.at[start], self.starts[bisect.bisect_left(self.starts, start)]


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
    values = torch.utils._pytree.tree_leaves([list(state.values()) for state in optimizer.state.values()])
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


class CudaMemory(StorageMemory):
    """The same, of tensors anywhere, and what torch's caching allocator had of the GPU for those there: `reserved`.

    That is the most bytes since the start, less those of tensors from before. With it come what kernels work in and
    what is rounded up, to 1 MiB where a tensor is large: no formula is met to the byte.
    """

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __enter__(self):
        forget_peaks(self.device)
        self.allocated_before = torch.cuda.memory_allocated(self.device)
        return super().__enter__()

    @property
    def reserved(self):
        return torch.cuda.max_memory_reserved(self.device) - self.allocated_before
