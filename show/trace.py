"""Records one rank from outside: the line that it is at, and all memory that the optimizer and the model reach.

Python's own tracing reports the lines of the watched files, also in hooks that autograd calls. What has changed between
two lines was written by the first of the two. Memory is found by walking attributes, and the local variables of the
functions that run. A storage is named after the first that leads to it, and keeps that name. Storages are told apart by
identity: an address is used again after a storage is freed.
"""

import ctypes
import functools
import linecache
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import loop

CORE_METHODS = ("sync_grads", "step_own", "sync_params", "zero_grad")
PHASES = (("model(", "forward"), (".backward(", "backward"), (".step(", "step"), (".zero_grad(", "zero_grad"))
SKIPPED = ("param_groups", "state", "defaults", "process_group")  # attributes of the core that torch fills


class Place(NamedTuple):
    """Names a line of a function that runs, or that waits for a function that it has called."""
    file: str
    line: int
    function: str
    call: int  # the number of this call, counted over all functions


@dataclass
class Storage:
    """Memory that the picture shows. row: its line of cells, such as "gradients". part: its name in that line."""
    row: str
    part: str
    is_local: bool = False  # named after a local variable
    dtype: torch.dtype = None  # of the first floating-point tensor that was seen in this storage
    is_model: bool = False
    views: set = field(default_factory=set)  # (first element, shape) of tensors that lie in it
    elements: dict = field(default_factory=dict)  # cell -> element of the model, as far as gradients and weights tell

    def values(self, memory):
        return torch.frombuffer(bytearray(memory), dtype=self.dtype).tolist()


@dataclass
class Event:
    """Holds a line, and what the line did."""
    stack: tuple
    is_line: bool = True
    phase: str = ""
    step: int = 0
    memory: dict = None  # each storage that is alive after the line -> its bytes, or its cells: see show/labels.py
    is_change: bool = False  # whether the line has changed `memory`
    time: int = 0  # length of the trace's `log` after the line
    starts: list = field(default_factory=list)  # operations of torch.distributed
    ends: list = field(default_factory=list)  # keys of the operations that are complete
    frame: int = 0  # see show/frames.py


class Trace:
    """Records what runs inside `with trace:`. files: path -> name, of the files whose lines are watched."""

    def __init__(self, files, model):
        self.files = files
        self.model = model
        self.optimizer = None  # set by the caller, once it is built
        self.events = []
        self.storages = {}
        self.log = []  # accesses: (storage, first byte, end, "read" or "write")
        self.memory = {}
        self.uids = {}  # address of a storage -> its number
        self.weak_references = []  # to storages: while they are held, no other storage gets the same address
        self.instances = {}  # name of a class -> {id: (instance, its number)}
        self.calls = {}  # frame of Python -> number of the call
        self.n_calls = 0
        self.stack = ()
        self.phase = ""
        self.step = -1

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
            self.stack = self.stack_of(frame)
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
        stack = tuple(place for _, place in self.stack)
        if stack and stack[0].file == "loop.py":
            text = linecache.getline(loop.__file__, stack[0].line)
            self.phase = next((name for code, name in PHASES if code in text), self.phase)
            self.step += is_line and len(stack) == 1 and self.phase == "forward"
        methods = [place.function.split(".")[-1] for place in stack]
        phase = next((name for name in methods if name in CORE_METHODS), self.phase)
        self.events.append(Event(stack, is_line, phase, max(0, self.step)))

    def close(self):
        """Note what memory holds after the line that was opened last."""
        if not self.events or self.events[-1].memory is not None:
            return
        event, before = self.events[-1], self.memory
        self.memory = self.snapshot()
        event.memory = self.memory
        event.is_change = self.memory != before
        event.time = len(self.log)
        if not (event.is_line or event.starts or event.ends or event.is_change):
            self.events.pop()

    def record_launch(self, operation):
        """Note that a message leaves at the present line."""
        self.event_at_this_line(lambda event: not event.ends).starts.append(operation)

    def record_arrival(self, key):
        """Note that the message `key` arrives at the present line."""
        self.event_at_this_line(lambda event: event.ends).ends.append(key)

    def event_at_this_line(self, can_go_on):
        """Reuse the open event if it has changed nothing and can_go_on(event); otherwise open another at its line."""
        self.close()
        if self.events[-1].is_change or not can_go_on(self.events[-1]):
            self.open(is_line=False)
        self.events[-1].memory = None
        return self.events[-1]

    def record_access(self, tensors, how):
        """Note that tensors are read or written."""
        self.log += [(*self.span(tensor), how) for tensor in tensors if tensor.layout == torch.strided]

    def span(self, tensor):
        start = tensor.storage_offset() * tensor.itemsize
        return self.uid_of(tensor), start, start + tensor.nbytes

    def uid_of(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.uids:
            self.uids[storage._cdata] = len(self.uids)
            self.weak_references.append(storage._weak_ref())
        return self.uids[storage._cdata]

    def snapshot(self):
        """Return the bytes of each storage that is alive: of the model, of the core, and of the inner optimizer."""
        memory = {}

        def see(tensor, row, part="", is_local=False):
            if tensor is None or tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
                return
            uid, whole = self.uid_of(tensor), tensor.untyped_storage()
            storage = self.storages.setdefault(uid, Storage(row, part, is_local))
            if storage.is_local and not is_local:  # the local variable has become an attribute
                storage.row, storage.part, storage.is_local = row, part, False
            if tensor.is_floating_point():  # a view of bytes gives the storage its name, and no values
                storage.dtype = storage.dtype or tensor.dtype
                storage.views.add((tensor.storage_offset(), tuple(tensor.shape)))
                memory[uid] = memory.get(uid) or ctypes.string_at(whole.data_ptr(), whole.nbytes())

        first = 0
        for index, param in enumerate(self.model.parameters()):
            for tensor, row in ((param, "parameters"), (param.grad, "gradients")):
                if tensor is not None:
                    see(tensor, row, f"p{index}")
                    storage = self.storages[self.uid_of(tensor)]
                    offset = tensor.storage_offset()
                    storage.is_model |= tensor is param
                    storage.elements.update((offset + i, first + i) for i in range(tensor.numel()))
            first += param.numel()
        seen = set()
        in_core = [(frame, place) for frame, place in self.stack if place.file != "loop.py"]
        for core in (*(frame.f_locals.get("self") for frame, _ in in_core), self.optimizer):
            self.walk(core, "", see, seen)
        for index, (param, state) in enumerate(self.stepped().items()):
            see(param, "main parameters", str(index))
            see(param.grad, "main gradients", str(index))
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() == param.numel() and name != "step":
                    see(value, name, str(index))
        see_local = functools.partial(see, is_local=True)
        for frame, place in in_core:
            for name, value in frame.f_locals.items():
                if name not in frame.f_code.co_varnames[: frame.f_code.co_argcount]:  # arguments are the caller's
                    self.walk(value, f"{place.function.split('.')[-1]}: {name}", see_local, seen)
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
                todo.extend((item, name, f"{index}") for index, item in enumerate(values))
            elif self.is_of_the_core(value):
                seen.add(id(value))
                title, part = self.title_of(value)
                todo.extend((attribute, f"{title}{name}", part) for name, attribute in vars(value).items()
                            if name not in SKIPPED)

    def is_of_the_core(self, value):
        file = getattr(sys.modules[type(value).__module__], "__file__", None)
        return hasattr(value, "__dict__") and self.files.get(file, "loop.py") != "loop.py"

    def title_of(self, instance):
        """Return "Bucket." and the number of this bucket; for an optimizer two empty texts."""
        if isinstance(instance, torch.optim.Optimizer):
            return "", ""
        name = type(instance).__name__
        of_class = self.instances.setdefault(name, {})
        _, number = of_class.setdefault(id(instance), (instance, len(of_class)))
        return f"{name}.", str(number)

    def stepped(self):
        """Return {parameter: state} of what this rank steps, with the inner optimizer if there is one."""
        if self.optimizer is None:
            return {}
        inside = [value for value in vars(self.optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        inner = inside[0] if inside else self.optimizer
        return {param: inner.state.get(param, {}) for group in inner.param_groups for param in group["params"]}
