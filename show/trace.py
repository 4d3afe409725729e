"""Records one rank from outside: the line that the rank is at, and all memory that its optimizer and model reach.

Python's own tracing reports the lines of the watched files, also in hooks that autograd calls. What has changed between
two lines was written by the first of the two. Memory is found by walking attributes, and the local variables of the
functions that run. A storage (torch's untyped storage, which several tensors may share) is named after the first
attribute that leads to the storage, or else after the first local variable. Storages are told apart by identity: an
address is used again after a storage is freed.

The core is the optimizer class that is shown: a stage's `optimizer.py`, without the checks of guard/. All values that
are shown have 32 bits: a cell is 4 bytes.
"""

import ctypes
import linecache
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import loop
from .frames import CELL_BYTES

CORE_METHODS = ("sync_grads", "step_own", "sync_params", "zero_grad")
# What a line of loop.py contains -> the phase that begins with it.
PHASES = (("model(", "forward"), (".backward(", "backward"), (".step(", "step"), (".zero_grad(", "zero_grad"))
SKIPPED = ("param_groups", "state", "defaults", "process_group")  # attributes of the core that torch fills
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


class Place(NamedTuple):
    """Names the current line of one function on the call stack."""
    file: str
    line: int
    function: str
    first_line: int  # of the function
    call: int  # the number of this call, counted over all functions


class Span(NamedTuple):
    """Cells of a storage, from `first` to before `end`."""
    uid: int  # the number of the storage
    first: int
    end: int


@dataclass
class Storage:
    """Memory that is shown as cells."""
    row: str  # the label of a row of cells, such as "gradients"
    part: str  # tells the storages of a row apart: "p0", or a number
    is_local: bool  # named after a local variable
    is_model: bool = False  # whether parameters of the model lie in it
    elements: dict = field(default_factory=dict)  # cell -> index in the model's parameters, flattened


class NamedValue(NamedTuple):
    """A value in memory, and the row, part and is_local (see Storage) of a storage that is named after the value."""
    value: object
    row: str = ""
    part: str = ""
    is_local: bool = False


@dataclass
class Event:
    """Holds a line of code, and what the line did; or a part of a line: a message leaves, or arrives; a return."""
    stack: tuple  # of Places, outermost first
    is_line: bool = True  # False: the rank is still in the line of the event before
    phase: str = ""
    step: int = 0
    is_open: bool = True  # until the line is done
    memory: dict = field(default_factory=dict)  # each storage that is alive after the line -> its bytes
    cells: dict = field(default_factory=dict)  # the same storages -> their cells; empty until show/labels.py makes them
    is_change: bool = False  # whether the line has changed `memory`
    n_accesses: int = 0  # how many accesses the trace had noted when the line was done
    starts: list = field(default_factory=list)  # messages that leave: Calls of show/wires.py
    ends: list = field(default_factory=list)  # keys of Calls that arrive


class Trace:
    """Records what runs inside `with trace:`."""

    def __init__(self, files, model):
        self.files = files  # path -> name, of the files whose lines are watched
        self.model = model
        self.optimizer = None  # set by the caller, once it is built
        self.events = []
        self.storages = {}  # number of a storage -> Storage
        self.log = []  # accesses: (Span, "read" or "write")
        self.memory = {}  # after the line before: number of a storage -> its bytes
        self.uids = {}  # address of a storage -> its number
        self.weak_references = []  # to storages: while they are held, no other storage gets the same address
        self.instances = {}  # name of a class -> {id of an instance: (the instance, its number)}
        self.calls = {}  # Python's frame of a running function -> number of the call
        self.n_calls = 0
        self.stack = []  # (Python's frame, Place) of each function that runs, outermost first
        self.phase = ""
        self.step = -1  # 0 from the first forward pass on

    def __enter__(self):
        sys.settrace(self.on_call)

    def __exit__(self, *error):
        sys.settrace(None)
        self.close()

    def on_call(self, frame, event, argument):
        """Return the function that Python calls at each line of this function: none if the lines aren't watched."""
        code = frame.f_code
        # A lambda, a generator, or the forward pass of a layer of loop.py runs as a part of its caller's line.
        is_part_of_a_line = code.co_name.startswith("<") or code is loop.Weigh.forward.__code__
        if code.co_filename not in self.files or is_part_of_a_line:
            return None
        self.n_calls += 1
        self.calls[frame] = self.n_calls
        return self.on_line

    def on_line(self, frame, event, argument):
        """End the event of the line before, and begin that of this line, or of what follows a return."""
        if event in ("line", "return"):
            self.close()
            if event == "return":
                del self.calls[frame]
                frame = frame.f_back
            self.stack = self.stack_of(frame)
            self.open(is_line=event == "line")
        return self.on_line

    def stack_of(self, frame):
        """Return (frame, Place) of each watched function that has called `frame`, and of `frame`, outermost first."""
        stack = []
        while frame is not None:
            if frame in self.calls:
                code = frame.f_code
                file = self.files[code.co_filename]
                place = Place(file, frame.f_lineno, code.co_name, code.co_firstlineno, self.calls[frame])
                stack.insert(0, (frame, place))
            frame = frame.f_back
        return stack

    def open(self, is_line):
        """Begin an event at the present line."""
        stack = tuple(place for _, place in self.stack)
        if stack and stack[0].file == "loop.py":
            text = linecache.getline(loop.__file__, stack[0].line)
            for code, phase_of_loop in PHASES:
                if code in text:
                    self.phase = phase_of_loop
            if is_line and len(stack) == 1 and self.phase == "forward":
                self.step += 1
        core_methods = [place.function for place in stack if place.function in CORE_METHODS]
        phase = core_methods[0] if core_methods else self.phase
        self.events.append(Event(stack, is_line, phase, max(0, self.step)))

    def close(self):
        """End the last event, if it is open: note what memory holds now. Drop a part of a line that did nothing."""
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
        self.log += [(self.span(tensor), how) for tensor in tensors]

    def span(self, tensor):
        """Return the Span of a tensor."""
        first = tensor.storage_offset() * tensor.itemsize // CELL_BYTES
        return Span(self.uid_of(tensor), first, first + tensor.nbytes // CELL_BYTES)

    def uid_of(self, tensor):
        """Return the number of a tensor's storage. A new storage gets the next number."""
        storage = tensor.untyped_storage()
        # torch makes a new object for a storage at each call; _cdata, the address in C++, stays the same.
        if storage._cdata not in self.uids:
            self.uids[storage._cdata] = len(self.uids)
            self.weak_references.append(storage._weak_ref())
        return self.uids[storage._cdata]

    def snapshot(self):
        """Return {number: bytes} of the storages of the model, the core and the inner optimizer.

        Storages without a name get one in `self.storages`.
        """
        memory = {}
        for named in self.named_tensors():
            tensor = named.value
            whole = tensor.untyped_storage()
            uid = self.uid_of(tensor)
            is_new = uid not in self.storages
            # A storage that was named after a local variable gets the name of an attribute that leads to it now.
            if is_new or (self.storages[uid].is_local and not named.is_local):
                self.storages[uid] = Storage(named.row, named.part, named.is_local)
            # Views of a buffer as bytes (uint8) are left out: another view shows its values.
            if tensor.is_floating_point() and uid not in memory and whole.nbytes():
                memory[uid] = ctypes.string_at(whole.data_ptr(), whole.nbytes())
        self.note_elements()
        return memory

    def note_elements(self):
        """Note in `self.storages` in which cells the model's parameters and their gradients lie."""
        n_before = 0
        for param in self.model.parameters():
            self.storages[self.uid_of(param)].is_model = True
            for tensor in (param, param.grad):
                if tensor is not None:
                    uid, first, end = self.span(tensor)
                    self.storages[uid].elements |= {cell: n_before + cell - first for cell in range(first, end)}
            n_before += param.numel()

    def named_tensors(self):
        """Return a NamedValue for each tensor that attributes, lists and dicts lead to from the roots."""
        tensors = []
        seen = set()
        for root in self.roots():
            to_visit = deque([root])
            while to_visit:
                named = to_visit.popleft()
                if isinstance(named.value, torch.Tensor):
                    tensors.append(named)
                elif id(named.value) not in seen:
                    seen.add(id(named.value))
                    to_visit.extend(self.inside(named))
        return tensors

    def roots(self):
        """Return the values at which the walk begins, in the order in which they name storages."""
        roots = []
        for index, param in enumerate(self.model.parameters()):
            roots.append(NamedValue(param, "parameters", f"p{index}"))
            roots.append(NamedValue(param.grad, "gradients", f"p{index}"))
        in_core = [(frame, place) for frame, place in self.stack if place.file != "loop.py"]
        roots += [NamedValue(frame.f_locals.get("self")) for frame, _ in in_core]
        roots.append(NamedValue(self.optimizer))
        for index, state in enumerate(self.states().values()):
            roots += [NamedValue(state.get(name), name, str(index)) for name in MOMENTS]
        for frame, place in in_core:
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            for name, value in frame.f_locals.items():
                if name not in arguments:  # an argument is shown as a variable or an attribute of the caller
                    roots.append(NamedValue(value, f"{place.function}: {name}", is_local=True))
        return roots

    def inside(self, named):
        """Return a NamedValue for each value in a list or a dict, or for each attribute of an object of the core."""
        value = named.value
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple, deque)):
            return [named._replace(value=item, part=str(index)) for index, item in enumerate(value)]
        if not self.is_of_the_core(value):
            return []
        title, part = self.title_of(value)
        return [named._replace(value=attribute, row=f"{title}{name}", part=part)
                for name, attribute in vars(value).items() if name not in SKIPPED]

    def is_of_the_core(self, value):
        """Return whether the class of a value is defined in a file of the core."""
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

    def states(self):
        """Return {parameter: state} of what this rank updates, by the inner optimizer."""
        if self.optimizer is None:
            return {}
        inner = self.optimizer.optimizer
        return {param: inner.state.get(param, {}) for group in inner.param_groups for param in group["params"]}
