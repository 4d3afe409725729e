"""One rank, recorded from outside: its line, and what all memory holds that the optimizer and the model reach.

Python's own tracing tells the lines of the watched files, also in hooks that autograd calls. What changed between two
lines was written by the first of them. Memory is found by walking attributes, and local variables of the functions that
run; it is named after them, keeps its name for life, and is told from other memory by identity, not by address.
"""

import ctypes
import linecache
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import loop

CORE_METHODS = ("sync_grads", "step_own", "sync_params", "zero_grad")
PHASES = (("model(", "forward"), (".backward(", "backward"), (".step(", "step"), (".zero_grad(", "zero_grad"))
NOT_OURS = ("param_groups", "state", "defaults", "process_group")  # attributes of the core that others fill


class Place(NamedTuple):
    """A line of a function that runs, or that waits for the one that it has called."""

    file: str
    line: int
    function: str
    call: int  # which call of it, counted


@dataclass
class Storage:
    row: str
    part: str
    dtype: torch.dtype = None  # of the first tensor of numbers that was seen in it
    is_model: bool = False
    views: set = field(default_factory=set)  # (first element, shape) of tensors that lie in it
    elements: dict = field(default_factory=dict)  # cell -> element of the model, as far as gradients and weights tell

    def values(self, memory):
        return torch.frombuffer(bytearray(memory), dtype=self.dtype).tolist()


@dataclass
class Event:
    """A line, and what it did. `memory`: storage -> bytes, of all that is alive when it has been done; later, cells."""

    stack: tuple
    is_line: bool = True
    phase: str = ""
    step: int = 0
    memory: dict = None
    is_change: bool = False
    time: int = 0  # length of the log of accesses when it has been done
    starts: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    frame: int = 0  # see show/frames.py


class Trace:
    """Records what runs while it is entered. files: path -> name, of the files whose lines are watched."""

    def __init__(self, files, model):
        self.files, self.model, self.optimizer = files, model, None  # which is set when it has been made
        self.events, self.storages, self.log, self.memory = [], {}, [], {}
        self.uids, self.kept = {}, []  # address of a storage -> number; weak references, which keep addresses unique
        self.instances = {}  # name of a class -> {id: instance of the core, and which one of them}
        self.calls, self.n_calls, self.here = {}, 0, ()
        self.phase, self.step = "", -1

    def __enter__(self):
        sys.settrace(self.on_call)

    def __exit__(self, *error):
        sys.settrace(None)
        self.close()

    def on_call(self, frame, event, argument):
        code = frame.f_code
        is_part_of_a_line = code.co_name.startswith("<") or code is loop.Weigh.forward.__code__  # <lambda>, <genexpr>
        if code.co_filename not in self.files or is_part_of_a_line:
            return None
        self.n_calls += 1
        self.calls[frame] = self.n_calls
        return self.on_line

    def on_line(self, frame, event, argument):
        if event in ("line", "return"):
            self.close()
            if event == "return":
                del self.calls[frame]
                frame = frame.f_back
            self.here = self.stack_of(frame)
            self.open(is_line=event == "line")
        return self.on_line

    def stack_of(self, frame):
        stack = []
        while frame is not None:
            if frame in self.calls:
                code = frame.f_code
                name = getattr(code, "co_qualname", code.co_name)
                stack.insert(0, (frame, Place(self.files[code.co_filename], frame.f_lineno, name, self.calls[frame])))
            frame = frame.f_back
        return stack

    def open(self, is_line):
        stack = tuple(place for _, place in self.here)
        if stack and stack[0].file == "loop.py":
            text = linecache.getline(loop.__file__, stack[0].line)
            self.phase = next((name for code, name in PHASES if code in text), self.phase)
            self.step += is_line and len(stack) == 1 and self.phase == "forward"
        methods = [place.function.split(".")[-1] for place in stack]
        phase = next((name for name in methods if name in CORE_METHODS), self.phase)
        self.events.append(Event(stack, is_line, phase, max(0, self.step)))

    def close(self):
        """The line that was opened last has been done: see what memory holds now."""
        if not self.events or self.events[-1].memory is not None:
            return
        event, before = self.events[-1], self.memory
        event.memory = self.memory = self.snapshot()
        event.is_change, event.time = self.memory != before, len(self.log)
        if not (event.is_line or event.starts or event.ends or event.is_change):
            self.events.pop()

    def starts(self, operation):
        """Called by Wires. The rank is at the same line as before, and messages are under way."""
        self.cut(lambda event: not event.ends).starts.append(operation)

    def ends(self, key):
        self.cut(lambda event: event.ends).ends.append(key)

    def cut(self, can_go_on):
        """Begin a new event at the line of the last one, unless that has changed nothing yet and suits."""
        self.close()
        if self.events[-1].is_change or not can_go_on(self.events[-1]):
            self.open(is_line=False)
        self.events[-1].memory = None
        return self.events[-1]

    def touches(self, tensors, how):
        """Note a read or a write: (storage, first byte, end, how)."""
        self.log += [(*self.span(tensor), how) for tensor in tensors if tensor.layout == torch.strided]

    def span(self, tensor):
        start = tensor.storage_offset() * tensor.itemsize
        return self.uid_of(tensor), start, start + tensor.nbytes

    def uid_of(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.uids:
            self.uids[storage._cdata] = len(self.uids)
            self.kept.append(storage._weak_ref())  # as long as this is held no other storage gets the address
        return self.uids[storage._cdata]

    def snapshot(self):
        memory = {}

        def see(tensor, row, part=""):
            if tensor is None or tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
                return
            uid, whole = self.uid_of(tensor), tensor.untyped_storage()
            storage = self.storages.setdefault(uid, Storage(row, part))
            if ": " in storage.row and ": " not in row:  # a local variable has become an attribute
                storage.row, storage.part = row, part
            if tensor.is_floating_point():  # bytes only give their name to what is read as numbers elsewhere
                storage.dtype = storage.dtype or tensor.dtype
                storage.views.add((tensor.storage_offset(), tuple(tensor.shape)))
                memory[uid] = memory.get(uid) or ctypes.string_at(whole.data_ptr(), whole.nbytes())

        first = 0
        for index, param in enumerate(self.model.parameters()):
            for tensor, row in ((param, "parameters"), (param.grad, "gradients")):
                if tensor is not None:
                    see(tensor, row, f"p{index}")
                    storage, offset = self.storages[self.uid_of(tensor)], tensor.storage_offset()
                    storage.is_model |= tensor is param
                    storage.elements.update((offset + i, first + i) for i in range(tensor.numel()))
            first += param.numel()
        seen, here = set(), [(frame, place) for frame, place in self.here if place.file != "loop.py"]
        for core in (*(frame.f_locals.get("self") for frame, _ in here), self.optimizer):
            self.walk(core, "", see, seen)
        for index, (param, state) in enumerate(self.stepped().items()):
            see(param, "main parameters", str(index))
            see(param.grad, "main gradients", str(index))
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() == param.numel() and name != "step":
                    see(value, name, str(index))
        for frame, place in here:
            for name, value in frame.f_locals.items():
                if name not in frame.f_code.co_varnames[: frame.f_code.co_argcount]:  # that is memory of the caller
                    self.walk(value, f"{place.function.split('.')[-1]}: {name}", see, seen)
        return memory

    def walk(self, value, name, see, seen):
        """Call `see` for every tensor that attributes, lists and dicts of the core lead to."""
        todo = deque([(value, name, "")])
        while todo:
            value, name, part = todo.popleft()
            if isinstance(value, torch.Tensor):
                see(value, name, part)
            elif id(value) in seen:
                continue
            elif isinstance(value, (list, tuple, deque, dict)):
                seen.add(id(value))
                values = value.values() if isinstance(value, dict) else value
                todo.extend((one, name, f"{index}") for index, one in enumerate(values))
            elif self.is_of_the_core(value):
                seen.add(id(value))
                title, part = self.title_of(value)
                todo.extend((one, f"{title}{name}", part) for name, one in vars(value).items() if name not in NOT_OURS)

    def is_of_the_core(self, value):
        file = getattr(sys.modules[type(value).__module__], "__file__", None)
        return hasattr(value, "__dict__") and self.files.get(file, "loop.py") != "loop.py"

    def title_of(self, instance):
        """-> "Bucket." and which one of them; of an optimizer nothing: its attributes speak for themselves."""
        if isinstance(instance, torch.optim.Optimizer):
            return "", ""
        name = type(instance).__name__
        of_class = self.instances.setdefault(name, {})
        _, number = of_class.setdefault(id(instance), (instance, len(of_class)))
        return f"{name}.", str(number)

    def stepped(self):
        """-> {parameter: its state} of all that this rank steps, with the optimizer within the optimizer, if any."""
        if self.optimizer is None:
            return {}
        inside = [value for value in vars(self.optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        inner = inside[0] if inside else self.optimizer
        return {param: inner.state.get(param, {}) for group in inner.param_groups for param in group["params"]}
