"""One rank, recorded from outside: its line, and what all memory holds that the optimizer and the model reach.

Python's own tracing tells the lines of the watched files, also in hooks that autograd calls. What changed between two
lines was written by the first of them. Memory is found by walking attributes, and local variables of the functions that
run; it is named after them, keeps its name for life, and is told from other memory by identity, not by address.
"""

import sys
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

CORE_METHODS = ("sync_grads", "step_own", "sync_params", "zero_grad")
NOT_OURS = ("param_groups", "state", "defaults", "process_group")  # attributes of the core that others fill
NOTHING = ("zero", "padding", "unset")  # what these hold isn't garbage
HIDDEN = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>")  # functions to Python, part of a line here


class Place(NamedTuple):
    """A line of a function that runs, or that waits for the one that it has called."""

    file: str
    line: int
    function: str
    call: int  # which call of it, counted


@dataclass
class Storage:
    """Memory of one dtype. Two dtypes of the same bytes are two of these; `counted` is set in the first."""

    row: str
    part: str
    itemsize: int
    numel: int
    uid: int
    torch_uid: int
    counted: bool
    is_model: bool = False
    views: set = field(default_factory=set)  # (first element, shape) of tensors that lie in it
    elements: dict = field(default_factory=dict)  # cell -> element of the model, as far as gradients and weights tell


@dataclass
class Event:
    """A line, and what it did. `memory`: storage -> values, of all that is alive when it has been done."""

    stack: tuple
    is_line: bool
    phase: str
    memory: dict = None
    labels: dict = None  # storage -> labels of its cells
    time: int = 0  # length of the log of accesses when it has been done
    starts: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    tick: int = 0


class Trace:
    """Records what runs while it is entered.

    files: path -> name, of the files whose lines are watched, but for functions whose code is in `unwatched`. Local
    variables are looked at in files of `package` only.
    """

    def __init__(self, files, package, unwatched, model):
        self.files, self.package, self.unwatched, self.model = files, package, unwatched, model
        self.events, self.storages, self.log = [], {}, []
        self.optimizer = None
        self.uids, self.kept = {}, []  # address of a storage -> number; weak references, which keep addresses unique
        self.byte_names = {}
        self.instances, self.class_counts = {}, Counter()
        self.calls, self.n_calls, self.here = {}, 0, ()
        self.is_on = False

    # ------------------------------------------------------------------------------------------------- lines

    def __enter__(self):
        self.is_on = True
        sys.settrace(self.on_call)

    def __exit__(self, *error):
        sys.settrace(None)
        self.close()
        self.is_on = False

    def on_call(self, frame, event, argument):
        code = frame.f_code
        if code.co_filename not in self.files or code.co_name in HIDDEN or code in self.unwatched:
            return None
        self.n_calls += 1
        self.calls[frame] = self.n_calls
        return self.on_line

    def on_line(self, frame, event, argument):
        if event == "line":
            self.close()
            self.here = self.stack_of(frame)
            self.open(is_line=True)
        elif event == "return":
            self.close()
            del self.calls[frame]
            self.here = self.stack_of(frame.f_back)
            self.open(is_line=False)
        return self.on_line

    def stack_of(self, frame):
        stack = []
        while frame is not None:
            if frame in self.calls:
                code = frame.f_code
                name = getattr(code, "co_qualname", code.co_name)
                stack.append((frame, Place(self.files[code.co_filename], frame.f_lineno, name, self.calls[frame])))
            frame = frame.f_back
        return tuple(reversed(stack))

    def open(self, is_line):
        places = tuple(place for _, place in self.here)
        names = [place.function.split(".")[-1] for place in places]
        self.events.append(Event(places, is_line, next((name for name in names if name in CORE_METHODS), "")))

    def close(self):
        """The line that was opened last has been done: see what memory holds now."""
        if not self.events or self.events[-1].memory is not None:
            return
        event, before = self.events[-1], self.events[-2].memory if len(self.events) > 1 else {}
        with _disable_current_modes():
            event.memory = self.snapshot(before)
        event.time = len(self.log)
        if not (event.is_line or event.starts or event.ends or event.memory != before):
            self.events.pop()

    # ---------------------------------------------------------------------------------------------- messages

    def starts(self, operation):
        """Called by Wires. The rank is at the same line as before, and messages are under way."""
        if self.is_on:
            self.cut(lambda event: not event.ends)
            self.events[-1].starts.append(operation)

    def ends(self, key):
        if self.is_on:
            self.cut(lambda event: event.ends)
            self.events[-1].ends.append(key)

    def cut(self, can_go_on):
        """Begin a new event at the line of the last one, unless that has changed nothing yet and suits."""
        self.close()
        last = self.events[-1]
        before = self.events[-2].memory if len(self.events) > 1 else None
        if last.memory == before and can_go_on(last):
            last.memory = None
        else:
            self.open(is_line=False)

    def touches(self, tensors, how):
        """Note a read or a write: (storage, first byte, end, how)."""
        if self.is_on:
            self.log += [(*self.span(tensor), how) for tensor in tensors if tensor.layout == torch.strided]

    def span(self, tensor):
        start = tensor.storage_offset() * tensor.itemsize
        return self.uid_of(tensor), start, start + tensor.nbytes

    # ------------------------------------------------------------------------------------------------ memory

    def uid_of(self, tensor):
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.uids:
            self.uids[address] = len(self.uids)
            self.kept.append(storage._weak_ref())  # as long as this is held no other storage gets the address
        return self.uids[address]

    def snapshot(self, before):
        found = {}  # (uid, dtype) -> a tensor, in the order in which they are met

        def see(tensor, row, part=""):
            if tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
                return
            if not tensor.is_floating_point():  # bytes that are read as numbers elsewhere, under this name
                self.byte_names.setdefault(self.uid_of(tensor), (row, part))
                return
            row, part = self.byte_names.get(self.uid_of(tensor), (row, part))
            key = self.uid_of(tensor), tensor.dtype
            found.setdefault(key, tensor)
            if key not in self.storages:
                counted = not any(uid == key[0] for uid, _ in self.storages)
                numel = tensor.untyped_storage().nbytes() // tensor.itemsize
                self.storages[key] = Storage(row, part, tensor.itemsize, numel, len(self.storages), key[0], counted)
            storage = self.storages[key]
            if ": " in storage.row and ": " not in row:  # a local variable has become an attribute
                storage.row, storage.part = row, part
            storage.views.add((tensor.storage_offset(), tuple(tensor.shape)))

        first = 0
        for index, param in enumerate(self.model.parameters()):
            grads = [(grad, "gradients") for grad in (param.grad, getattr(param, "main_grad", None))]
            for tensor, row in ((param, "parameters"), *grads):
                if tensor is not None:
                    see(tensor, row, f"p{index}")
                    storage, offset = self.storages[self.uid_of(tensor), tensor.dtype], tensor.storage_offset()
                    storage.is_model |= tensor is param
                    storage.elements.update((offset + i, first + i) for i in range(tensor.numel()))
            first += param.numel()
        seen = set()
        here = [(frame.f_code, frame.f_locals, place) for frame, place in self.here]
        own = [one for one in here if self.is_of_package(one[0].co_filename)]
        for _, names, _ in own:
            self.walk(names.get("self"), "", see, seen)
        if self.optimizer is not None:
            self.walk(self.optimizer, "", see, seen)
            self.walk_inner(see)
        for code, names, place in own:
            for name, value in names.items():
                if name not in code.co_varnames[: code.co_argcount]:  # an argument is memory of the caller
                    self.walk(value, f"{place.function.split('.')[-1]}: {name}", see, seen)
        memory = {}
        for key, tensor in found.items():
            storage = self.storages[key]
            values = tuple(torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).tolist())
            memory[storage.uid] = before.get(storage.uid) if same(before.get(storage.uid), values) else values
        return memory

    def is_of_package(self, path):
        return path.startswith(self.package)

    def walk(self, value, name, see, seen):
        """Call `see` for every tensor that attributes, lists and dicts of the core lead to."""
        todo = deque([(value, name, "")])
        while todo:
            value, name, part = todo.popleft()
            if isinstance(value, torch.Tensor):
                see(value, name, part)
                continue
            if id(value) in seen:
                continue
            if isinstance(value, (list, tuple, deque, dict)):
                seen.add(id(value))
                values = value.values() if isinstance(value, dict) else value
                todo.extend((one, name, f"{index}") for index, one in enumerate(values))
            elif hasattr(value, "__dict__") and self.is_of_package(
                getattr(sys.modules[type(value).__module__], "__file__", None) or ""
            ):
                seen.add(id(value))
                title, part = self.title_of(value)
                todo.extend((one, f"{title}{name}", part) for name, one in vars(value).items() if name not in NOT_OURS)

    def title_of(self, instance):
        """-> "Bucket." and which one of them; of an optimizer nothing: its attributes speak for themselves."""
        if instance is self.optimizer or isinstance(instance, torch.optim.Optimizer):
            return "", ""
        if id(instance) not in self.instances:
            name = type(instance).__name__
            self.instances[id(instance)] = instance, f"{name}.", str(self.class_counts[name])
            self.class_counts[name] += 1
        return self.instances[id(instance)][1:]

    def walk_inner(self, see):
        """What an optimizer within the optimizer steps, and its state."""
        inner = self.inner()
        params = [param for group in inner.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            see(param, "main parameters", str(index))
            if param.grad is not None:
                see(param.grad, "main gradients", str(index))
            for name, value in inner.state.get(param, {}).items():
                if isinstance(value, torch.Tensor) and value.numel() == param.numel() and name != "step":
                    see(value, name, str(index))

    def inner(self):
        inside = [value for value in vars(self.optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        return inside[0] if inside else self.optimizer

    def owned(self):
        """-> (storage, first element, end) of all that this rank's inner optimizer steps."""
        spans = []
        for group in self.inner().param_groups:
            for param in group["params"]:
                storage = self.storages[self.uid_of(param), param.dtype]
                spans.append((storage.uid, param.storage_offset(), param.storage_offset() + param.numel()))
        return spans

    # ------------------------------------------------------------------------------------ what is read again

    def mark_garbage(self):
        """Cells that nobody reads before they are written or released are garbage, as their labels say then.

        The end of the recording counts as such. Whoever likes may read the model's own parameters: they never are.
        """
        nexts = defaultdict(dict)  # uid of torch's storage -> {byte: how it is accessed next}
        log = list(self.log)
        for event in reversed(self.events):
            while len(log) > event.time:
                uid, start, end, how = log.pop()
                nexts[uid].update(dict.fromkeys(range(start, end, 2), how))
            for (torch_uid, _), storage in self.storages.items():
                if storage.uid in event.memory and not storage.is_model:
                    ahead, step = nexts[torch_uid], storage.itemsize
                    event.labels[storage.uid] = tuple(
                        label._replace(kind="garbage", origin=None)
                        if ahead.get(i * step) != "read" and label.kind not in NOTHING else label
                        for i, label in enumerate(event.labels[storage.uid])
                    )


def same(old, new):
    """Equal, where NaN equals NaN."""
    return old is not None and len(old) == len(new) and all(a == b or (a != a and b != b) for a, b in zip(old, new))
