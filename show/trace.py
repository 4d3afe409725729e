"""Records one rank from outside: the line that it is at, and all memory that the optimizer and the model reach.

Python's own tracing reports the lines of the watched files, also in hooks that autograd calls. What has changed between
two lines was written by the first of the two. Memory is found by walking attributes, and the local variables of the
functions that run. A storage is named after the first attribute that leads to it, or else after the first local
variable. Storages are told apart by identity: an address is used again after a storage is freed.

"Core" is the class that is shown, without its guard.
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
# What a line of loop.py contains -> the phase that begins with it.
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
    """Memory that the picture shows. row: the label of its line of cells, such as "gradients". part: its name there."""
    row: str
    part: str
    is_local: bool = False  # named after a local variable
    dtype: torch.dtype = None  # of the first floating-point tensor that was seen in this storage
    is_model: bool = False  # whether parameters of the model lie in it
    views: set = field(default_factory=set)  # (first element, shape) of tensors that lie in it
    elements: dict = field(default_factory=dict)  # index in the storage -> index in the model's parameters, flattened

    def values(self, memory):
        return torch.frombuffer(bytearray(memory), dtype=self.dtype).tolist()


@dataclass
class Event:
    """Holds a line, and what the line did."""
    stack: tuple  # of Places, outermost first
    is_line: bool = True
    phase: str = ""
    step: int = 0
    is_open: bool = True  # until the line is done
    memory: dict = field(default_factory=dict)  # each storage that is alive after the line -> its bytes
    cells: dict = field(default_factory=dict)  # the same storages -> their cells, which show/labels.py makes
    is_change: bool = False  # whether the line has changed `memory`
    n_accesses: int = 0  # how many accesses the trace has noted after the line
    starts: list = field(default_factory=list)  # Operations (show/wires.py) that leave
    ends: list = field(default_factory=list)  # keys of Operations that arrive
    frame: int = 0  # its number in the recording, set by show/frames.py


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
        self.stack = []  # (frame of Python, Place) of each function that runs, outermost first
        self.phase = ""
        self.step = -1

    def __enter__(self):
        sys.settrace(self.on_call)

    def __exit__(self, *error):
        sys.settrace(None)
        self.close()

    def on_call(self, frame, event, argument):
        code = frame.f_code
        # A lambda or a generator, or what computes a layer of loop.py.
        is_part_of_a_line = code.co_name.startswith("<") or code is loop.Weigh.forward.__code__
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
            if is_line and len(stack) == 1 and self.phase == "forward":
                self.step += 1
        methods = [place.function.split(".")[-1] for place in stack]
        phase = next((name for name in methods if name in CORE_METHODS), self.phase)
        self.events.append(Event(stack, is_line, phase, max(0, self.step)))

    def close(self):
        """Note what memory holds after the line that was opened last."""
        if not self.events or not self.events[-1].is_open:
            return
        event = self.events[-1]
        event.is_open = False
        event.memory = self.snapshot()
        event.is_change = event.memory != self.memory
        event.n_accesses = len(self.log)
        self.memory = event.memory
        if not (event.is_line or event.starts or event.ends or event.is_change):
            self.events.pop()

    def record_launch(self, operation):
        """Note that a message leaves at the present line."""
        self.close()
        if self.events[-1].is_change or self.events[-1].ends:
            self.open(is_line=False)
        self.events[-1].is_open = True
        self.events[-1].starts.append(operation)

    def record_arrival(self, key):
        """Note that the message `key` arrives at the present line."""
        self.close()
        if self.events[-1].is_change or not self.events[-1].ends:
            self.open(is_line=False)
        self.events[-1].is_open = True
        self.events[-1].ends.append(key)

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
        first = 0
        for index, param in enumerate(self.model.parameters()):
            for tensor, row in ((param, "parameters"), (param.grad, "gradients")):
                if tensor is not None:
                    self.see(memory, tensor, row, f"p{index}")
                    storage = self.storages[self.uid_of(tensor)]
                    offset = tensor.storage_offset()
                    storage.is_model |= tensor is param
                    storage.elements.update((offset + i, first + i) for i in range(tensor.numel()))
            first += param.numel()
        seen = set()
        in_core = [(frame, place) for frame, place in self.stack if place.file != "loop.py"]
        for frame, _ in in_core:
            self.walk(memory, frame.f_locals.get("self"), "", seen)
        self.walk(memory, self.optimizer, "", seen)
        for index, (param, state) in enumerate(self.updated_params().items()):
            self.see(memory, param, "main parameters", str(index))
            self.see(memory, param.grad, "main gradients", str(index))
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() == param.numel() and name != "step":
                    self.see(memory, value, name, str(index))
        for frame, place in in_core:
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]  # they are shown as the caller's variables
            for name, value in frame.f_locals.items():
                if name not in arguments:
                    self.walk(memory, value, f"{place.function.split('.')[-1]}: {name}", seen, is_local=True)
        return memory

    def see(self, memory, tensor, row, part="", is_local=False):
        """Put the bytes of a tensor's storage into `memory`, and name the storage if it is new."""
        if tensor is None or tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
            return
        uid = self.uid_of(tensor)
        whole = tensor.untyped_storage()
        storage = self.storages.setdefault(uid, Storage(row, part, is_local))
        if storage.is_local and not is_local:  # an attribute has the local variable's value now
            storage.row = row
            storage.part = part
            storage.is_local = False
        if tensor.is_floating_point():  # of a buffer that is seen as bytes, other views have the values
            storage.dtype = storage.dtype or tensor.dtype
            storage.views.add((tensor.storage_offset(), tuple(tensor.shape)))
            memory[uid] = memory.get(uid) or ctypes.string_at(whole.data_ptr(), whole.nbytes())

    def walk(self, memory, root, root_name, seen, is_local=False):
        """See every tensor that attributes, lists and dicts of the core lead to from `root`."""
        todo = deque([(root, root_name, "")])
        while todo:
            value, name, part = todo.popleft()
            if isinstance(value, torch.Tensor):
                self.see(memory, value, name, part, is_local)
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
        return hasattr(value, "__dict__") and file in self.files and self.files[file] != "loop.py"

    def title_of(self, instance):
        """Return "Bucket." and the number of this bucket; for an optimizer two empty texts."""
        if isinstance(instance, torch.optim.Optimizer):
            return "", ""
        name = type(instance).__name__
        of_class = self.instances.setdefault(name, {})
        _, number = of_class.setdefault(id(instance), (instance, len(of_class)))
        return f"{name}.", str(number)

    def updated_params(self):
        """Return {parameter: state} of what this rank updates, with its inner optimizer if it has one."""
        if self.optimizer is None:
            return {}
        inside = [value for value in vars(self.optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        inner = inside[0] if inside else self.optimizer
        return {param: inner.state.get(param, {}) for group in inner.param_groups for param in group["params"]}
