"""Records one rank from outside: which lines the rank executes, and what its memory holds after each line.

The rank runs a training loop of show/loop.py with a core. The core is the optimizer class that is shown, such as the
class in `optimizer.py` of a stage (folders stage*/), and the files beside it that the class uses. The core wraps an
inner optimizer, AdamW, which updates the parameters that this rank owns. show/wires.py replaces torch's collectives and
calls a Trace when a message leaves or arrives, and when a tensor is read or written.

Python's own tracing (sys.settrace) reports the lines of these files, also in hooks that autograd calls. What has
changed between two lines was written by the first of the two.

Memory consists of storages: torch's untyped storages, which several tensors may share. A walk finds them. It starts at
the model, the optimizer and the local variables of running functions, and follows attributes, lists and dicts. A
storage is named after the first attribute that leads to it, or else after the first local variable. Storages are told
apart by their addresses. A freed address could be given to another storage, so the Trace holds a weak reference to each
storage, which keeps the address.

All values that are shown have 32 bits: a cell is 4 bytes.
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
# (what a line of loop.py contains, the phase of a training step that begins with this line)
PHASES = (("model(", "forward"), (".backward(", "backward"), (".step(", "step"), (".zero_grad(", "zero_grad"))
SKIPPED = ("param_groups", "state", "defaults", "process_group")  # attributes that the walk through the core leaves out
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names for the two moments of a parameter


class Place(NamedTuple):
    """Says at which line a running function is."""
    file: str  # the name without the folder
    line: int
    function: str
    first_line: int  # where the function begins
    call: int  # the number of this call of the function: calls of all functions are counted together


class Span(NamedTuple):
    """Some cells of a storage: from `first` to before `end`."""
    uid: int  # the number of the storage, see Trace.uid_of
    first: int
    end: int


@dataclass
class Storage:
    """Memory that is shown as cells."""
    row: str  # the name that is written at the cells, such as "gradients"
    part: str  # tells storages of the same row apart: "p0" of parameter 0, the number of an object, or ""
    is_local: bool  # whether the storage is named after a local variable
    is_model: bool = False  # whether parameters of the model lie in the storage; set by Trace.note_elements
    # Cell -> the element of a parameter or its gradient in the cell. Elements of all parameters are counted from 0.
    # Filled by Trace.note_elements.
    elements: dict = field(default_factory=dict)


class NamedValue(NamedTuple):
    """A value that was met on the walk, and the name that it gives to a storage: see Storage."""
    value: object
    row: str = ""
    part: str = ""
    is_local: bool = False


@dataclass
class Event:
    """Holds one executed line and what the line did, or a part of a line.

    A new part begins when a function that the line called has returned, and it may begin when a message leaves or
    arrives. An event is open while its line or part runs. Then Trace.close sets memory, is_change and n_accesses.
    """
    stack: tuple  # the Places of all running functions, outermost first
    is_line: bool = True  # False: a part of the line that an earlier event has begun
    phase: str = ""  # a phase of PHASES, or a method of CORE_METHODS
    step: int = 0  # of training
    is_open: bool = True
    memory: dict = field(default_factory=dict)  # number of each storage that is alive after the event -> its bytes
    cells: dict = field(default_factory=dict)  # the same storages -> their cells; empty until show/labels.py makes them
    is_change: bool = False  # whether the event has changed `memory`
    n_accesses: int = 0  # the length of Trace.log after the event
    starts: list = field(default_factory=list)  # messages that leave: Calls of show/wires.py
    ends: list = field(default_factory=list)  # keys of Calls whose messages arrive


class Trace:
    """Records what runs inside `with trace:`, as a list of events."""

    def __init__(self, files, model):
        self.files = files  # path -> name of each file whose lines are watched: show/loop.py and the core's files
        self.model = model
        self.optimizer = None  # set by show/record.py, after the core has been built
        self.events = []
        self.storages = {}  # number of a storage -> Storage
        self.log = []  # (Span, "read" or "write") of each access to memory, in order
        self.memory = {}  # number of a storage -> its bytes, after the last event that was closed
        self.uids = {}  # address of a storage -> its number
        self.weak_references = []  # one to each storage: while it is held, no other storage gets the same address
        self.instances = {}  # name of a class -> {id of an instance: (the instance, its number)}, see `title_of`
        self.calls = {}  # Python's frame of a running function -> number of the call
        self.n_calls = 0
        self.stack = []  # (Python's frame, Place) of each running function that is watched, outermost first
        self.phase = ""  # the phase of PHASES that loop.py is in
        self.step = -1  # the step of training, 0 from the first forward pass on

    def __enter__(self):
        sys.settrace(self.on_call)

    def __exit__(self, *error):
        sys.settrace(None)
        self.close()

    def on_call(self, frame, what, argument):
        """Return what Python shall call at each line of a function that begins; None if it shall not be watched.

        frame: Python's frame of the function. Python requires the other two arguments.
        """
        code = frame.f_code
        # These run as a part of their caller's line: lambdas and generators, whose names begin with "<", and
        # Weigh.forward, the forward pass of a layer in loop.py.
        is_part_of_a_line = code.co_name.startswith("<") or code is loop.Weigh.forward.__code__
        if code.co_filename not in self.files or is_part_of_a_line:
            return None
        self.n_calls += 1
        self.calls[frame] = self.n_calls
        return self.on_line

    def on_line(self, frame, what, argument):
        """End the last event and begin the next: a line, or after a return the rest of the caller's line.

        what: "line" before a line runs, "return" when a function returns. Return what Python shall call at the next
        line: this method.
        """
        if what in ("line", "return"):
            self.close()
            if what == "return":
                del self.calls[frame]
                frame = frame.f_back
            self.stack = self.stack_of(frame)
            self.open(is_line=what == "line")
        return self.on_line

    def stack_of(self, frame):
        """Return [(frame, Place), …] of the running functions that are watched, outermost first.

        frame: Python's frame of the innermost function.
        """
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
        """Begin an event at the present line, and return the Event. is_line: whether the line starts now."""
        stack = tuple(place for _, place in self.stack)
        if stack and stack[0].file == "loop.py":
            text = linecache.getline(loop.__file__, stack[0].line)
            for code, phase_of_loop in PHASES:
                if code in text:
                    self.phase = phase_of_loop
            # Only one line of the loop itself is in the phase "forward": the line that begins a step.
            if is_line and len(stack) == 1 and self.phase == "forward":
                self.step += 1
        core_methods = [place.function for place in stack if place.function in CORE_METHODS]
        phase = core_methods[0] if core_methods else self.phase
        event = Event(stack, is_line, phase, max(0, self.step))
        self.events.append(event)
        return event

    def close(self):
        """End the last event, if it is open: note what memory holds now. Drop the event of a part that did nothing."""
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

    def record_launch(self, call):
        """Note that a message leaves at the present line. call: this rank's Call of show/wires.py."""
        self.close()
        # Messages that leave one after another share an event. But what was written, or has arrived, before the message
        # leaves is an event of its own.
        event = self.events[-1]
        if event.is_change or event.ends:
            event = self.open(is_line=False)
        event.is_open = True  # close() has closed it, but it goes on
        event.starts.append(call)

    def record_arrival(self, key):
        """Note that a message arrives at the present line. key: of its Call."""
        self.close()
        # Messages that arrive one after another share an event, as long as memory hasn't changed in between.
        event = self.events[-1]
        if event.is_change or not event.ends:
            event = self.open(is_line=False)
        event.is_open = True  # close() has closed it, but it goes on
        event.ends.append(key)

    def record_access(self, tensors, how):
        """Note that tensors are read or written. how: "read" or "write"."""
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
        """Return {number of a storage: its bytes} for all storages that the walk finds now.

        In `self.storages`, name the storages that are new.
        """
        memory = {}
        for named in self.named_tensors():
            tensor = named.value
            whole = tensor.untyped_storage()
            uid = self.uid_of(tensor)
            is_new = uid not in self.storages
            # A storage that was named after a local variable is renamed as soon as an attribute leads to it.
            if is_new or (self.storages[uid].is_local and not named.is_local):
                self.storages[uid] = Storage(named.row, named.part, named.is_local)
            # Views of a buffer as bytes (uint8) are left out: another view shows its values.
            if tensor.is_floating_point() and uid not in memory and whole.nbytes():
                memory[uid] = ctypes.string_at(whole.data_ptr(), whole.nbytes())
        self.note_elements()
        return memory

    def note_elements(self):
        """Note in `self.storages` in which cells the model's parameters and their gradients lie."""
        n_before = 0  # elements of the parameters before this parameter
        for param in self.model.parameters():
            self.storages[self.uid_of(param)].is_model = True
            for tensor in (param, param.grad):
                if tensor is not None:
                    uid, first, end = self.span(tensor)
                    self.storages[uid].elements |= {cell: n_before + cell - first for cell in range(first, end)}
            n_before += param.numel()

    def named_tensors(self):
        """Walk, and return a NamedValue for each tensor to which attributes, lists and dicts lead from the roots."""
        tensors = []
        seen = set()  # ids of objects that were visited
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
        """Return the NamedValues at which the walk begins. The first that leads to a storage gives it its name."""
        roots = []
        for index, param in enumerate(self.model.parameters()):
            roots.append(NamedValue(param, "parameters", f"p{index}"))
            roots.append(NamedValue(param.grad, "gradients", f"p{index}"))
        in_core = [(frame, place) for frame, place in self.stack if place.file != "loop.py"]
        roots += [NamedValue(frame.f_locals.get("self")) for frame, _ in in_core]  # objects whose methods run
        roots.append(NamedValue(self.optimizer))
        for index, state in enumerate(self.states().values()):
            roots += [NamedValue(state.get(name), name, str(index)) for name in MOMENTS]
        for frame, place in in_core:
            arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            for name, value in frame.f_locals.items():
                if name not in arguments:  # what is passed as an argument has a name where it comes from
                    roots.append(NamedValue(value, f"{place.function}: {name}", is_local=True))
        return roots

    def inside(self, named):
        """Return a NamedValue for each item of a list or dict, or for each attribute of an object of the core."""
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
        """Return what the rows of an object's attributes begin with, and their part: "Bucket." and "2" for Bucket 2.

        Return two empty texts for an optimizer, because there is only one.
        """
        if isinstance(instance, torch.optim.Optimizer):
            return "", ""
        name = type(instance).__name__
        of_class = self.instances.setdefault(name, {})
        # The instance is held too: otherwise another object could get its id.
        _, number = of_class.setdefault(id(instance), (instance, len(of_class)))  # (the instance, its number)
        return f"{name}.", str(number)

    def states(self):
        """Return {parameter: its state in the inner optimizer} for all parameters that this rank updates.

        There are none until show/record.py has set the optimizer.
        """
        if self.optimizer is None:
            return {}
        inner = self.optimizer.optimizer
        return {param: inner.state.get(param, {}) for group in inner.param_groups for param in group["params"]}
