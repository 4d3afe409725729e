"""The training runs by which a package is graded, and what a rank sees of them."""

import contextlib
import copy
import functools
import inspect
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from harness.measuring.memory import Memory, plain_tensors

LR = 0.1
OTHER_SEED, FIRST_DROPPED = 100, 100  # of a model that is loaded; the number of a batch that is dropped
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": LR}),  # AdamW's eps is as large as many gradients: another eps would be seen
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 0.01, "foreach": False})}


@dataclass(frozen=True)
class Run:
    """Describes a training run, the same for the ranks and for one process: of odd sizes, 190 elements by default."""
    optimizer: str = "SGD"
    steps: int = 3
    groups: bool = False  # three: the last bias, the matrices, the other biases, with an lr and a decay of their own
    schedule: str = ""  # "lr": it falls to a half in each step; "cycle": torch's one-cycle, which writes betas, too
    micro_batches: int = 1
    no_sync: bool = False
    max_norms: tuple = ()  # of each step
    resume: bool = False  # after two steps: save, and go on in another model with another optimizer
    prefetch: bool = False  # parameters arrive in the next forward pass, and rank 1 sends its own late
    zeroes: bool = True  # zero_grad() after a step
    discards: bool = False  # before each step zero_grad() drops a backward pass: to zeros, to None, to zeros, …
    unused: bool = False  # a parameter that rank 0 alone uses, and one that no rank uses
    reloads: bool = False  # other values are loaded into the model after the constructor
    dtype: torch.dtype = torch.float32
    defaults: bool = False  # the optimizer's own hyperparameters
    sizes: tuple = (7, 11, 5, 7)  # of layers
    counts_memory: bool = False  # and keeps parameters at the end alone, because copies would count
    zeroes_last_grads: bool = True  # before memory is counted

    def model(self, seed):
        torch.manual_seed(seed)
        layers = [(nn.Linear(*pair), nn.Tanh()) for pair in zip(self.sizes, self.sizes[1:])]
        model = nn.Sequential(*sum(layers, ())[:-1])
        if self.unused:
            for name in ("used_by_rank_0", "used_by_none"):
                model.register_parameter(name, nn.Parameter(torch.ones(2, 3)))
        return model.to(self.dtype)

    def loss(self, model, number, rank):
        """Compute the loss of a rank's batch `number`; no two batches are alike."""
        generator = torch.Generator().manual_seed(1000 * number + rank)
        x, y = torch.randn(2, 4, self.sizes[0], generator=generator).to(self.dtype)
        loss = F.mse_loss(model(x), y)
        if self.unused and rank == 0:
            loss = loss + 0.01 * model.used_by_rank_0.square().sum()  # a gradient about as large as AdamW's eps
        return loss

    def params(self, model):
        if not self.groups:
            return model.parameters()
        matrices, biases = ([param for param in model.parameters() if param.dim() == dim] for dim in (2, 1))
        return [{"params": biases[-1:], "lr": 0.05, "weight_decay": 0.5},
                {"params": matrices, "lr": 0.02, "weight_decay": 0.2},
                {"params": biases[:-1], "lr": 0.03, "weight_decay": 0.0}]

    def settings(self):
        optimizer_cls, kwargs = OPTIMIZERS[self.optimizer]
        return optimizer_cls, {"foreach": False} if self.defaults else kwargs

    def make(self, candidate, model):
        optimizer_cls, kwargs = self.settings()
        n_bytes = sum(param.nbytes for param in model.parameters())
        offered = {"bucket_cap_mb": n_bytes / 6 / 2**20, "find_unused_parameters": self.unused}  # several buckets
        accepted = inspect.signature(candidate.cls).parameters
        extra = {name: value for name, value in offered.items() if value and name in accepted}
        return candidate.cls(self.params(model), optimizer_cls, **kwargs, **extra)

    def scheduler(self, optimizer):
        if self.schedule == "cycle":
            return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6, pct_start=0.5)
        return lr_scheduler.ExponentialLR(optimizer, 0.5) if self.schedule else None

    def number_of(self, snapshot):
        """Return the number of the step after which a snapshot was made: with prefetch there is only the last one."""
        return self.steps if self.prefetch else snapshot

    def shown_by(self, world_size, step):
        """Return options by which `make show` trains so, up to this step; "" where it can't."""
        is_plain = self == Run(self.optimizer, self.steps)
        return f"--ranks {world_size} --steps {step} --optimizer {self.optimizer.lower()}" if is_plain else ""

    def left_out(self, optimizer):
        """Return bytes that don't count as held. Variants have some."""
        return 0


@dataclass
class Seen:
    """Holds what a Run shows on a rank."""
    snapshots: list = field(default_factory=list)  # (numel,) after the constructor, and after each step
    norms: list = field(default_factory=list)  # what clip_grad_norm_ has returned
    inner: SimpleNamespace = None  # at the inner optimizer's first step: model, own, grads
    n_in_no_sync: int = 0  # collectives
    entries: list = ()  # of the last step, with its forward and backward pass
    n_in_backward: int = 0  # how many of them
    n_in_flight: int = 0  # how many of them nobody had waited for when the last gradient was computed
    after_inner: list = ()  # collectives that began after the inner optimizer had stepped
    first_layer_waited: list = ()  # for each of these of the step before, whether the first layer has waited
    never_awaited: list = ()  # collectives for whose result nobody has waited when the step ends
    state: tuple = ()  # elements of AdamW's moments on this rank: how many aren't 0, and how many are
    held: float = 0  # bytes of all tensors
    has_zeros_for_none: bool = False  # whether a parameter that no rank uses has a gradient of zeros
    lr_was_saved: bool = False  # whether state_dict() has a number that is the scheduler's lr


class Training:
    """Trains as a Run says, on one rank, and notes in `seen` what it sees."""

    def __init__(self, candidate, run, ranks, factor):
        self.candidate, self.run, self.ranks, self.factor = candidate, run, ranks, factor
        self.entries, self.seen = candidate.entries, Seen()
        self.stepped = set()  # optimizers of torch
        self.step_start = self.backward_stop = 0  # indices into `entries`: of this step, and of its update
        self.inner_step_start = None  # the index of the inner optimizer's step; None: not yet

    def begin(self, seed):
        run, model = self.run, self.run.model(seed)
        self.loss = functools.partial(run.loss, model)
        if self.candidate.beside_ddp:
            losses = nn.ModuleList([model])
            losses.forward = self.loss  # what DistributedDataParallel calls
            self.loss = DistributedDataParallel(losses, gradient_as_bucket_view=True)
        self.optimizer = run.make(self.candidate, model)
        self.model, self.scheduler = model, run.scheduler(self.optimizer)
        self.parts = self.model, self.optimizer, self.scheduler
        if run.reloads:
            model.load_state_dict(run.model(OTHER_SEED).state_dict())
        if run.prefetch:
            self.optimizer.prefetch_params(model)
        if run.prefetch and run.counts_memory:
            model[0].register_forward_hook(self.note_first_layer)
        for param in model.parameters() if run.counts_memory else ():
            if param.requires_grad:  # an optimizer may freeze some
                param.register_hook(self.note_gradient)

    def backward(self, number, factor=1.0):
        losses = (self.loss(number, rank) for rank in self.ranks)
        (sum(losses) * (factor / len(self.ranks))).backward()

    def accumulate(self, step):
        """Run the backward passes of a step, all but the last inside no_sync() where the run has it."""
        for micro in range(self.run.micro_batches):
            n_before = len(self.entries)
            is_held_back = self.run.no_sync and micro < self.run.micro_batches - 1
            with self.optimizer.no_sync() if is_held_back else contextlib.nullcontext():
                self.backward(step * self.run.micro_batches + micro, self.factor(step, micro))
            if is_held_back:
                self.seen.n_in_no_sync += len(self.entries) - n_before

    def train(self, step):
        """Do a step: backward passes, clipping, the update."""
        if self.run.discards:
            self.backward(FIRST_DROPPED + step)
            self.optimizer.zero_grad(set_to_none=step % 2 == 1)
        self.step_start = len(self.entries)
        self.accumulate(step)
        self.backward_stop = len(self.entries)
        if self.run.unused:
            self.seen.has_zeros_for_none = self.model.used_by_none.grad is not None
        if self.run.max_norms:
            self.seen.norms.append(float(self.optimizer.clip_grad_norm_(self.run.max_norms[step])))
        self.inner_step_start = None
        self.optimizer.step()
        self.note_collectives()
        self.end_step(is_last=step == self.run.steps - 1)

    def end_step(self, is_last):
        """Clear the gradients, let a scheduler write, and keep the parameters."""
        if self.run.zeroes and (self.run.zeroes_last_grads or not is_last):
            self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        if self.run.prefetch and is_last:
            self.optimizer.finish_param_sync()
        if not self.run.counts_memory and (is_last or not self.run.prefetch):  # reading them would wait for them
            self.keep_params()

    def keep_params(self):
        self.seen.snapshots.append(flat(self.model.parameters()))

    def resume(self):
        """Save, and go on with another model, another optimizer, another scheduler."""
        states = _, optimizer_state, _ = copy.deepcopy([part.state_dict() for part in self.parts])
        self.seen.lr_was_saved = has_number(optimizer_state, self.optimizer.param_groups[0]["lr"])
        self.begin(self.candidate.rank + 10)
        for part, state in zip(self.parts, states):
            part.load_state_dict(state)

    def note_step(self, optimizer, *_):
        """Note a step of a torch optimizer: first of the inner one, then of the one around it."""
        self.stepped.add(optimizer)
        if optimizer is self.optimizer:
            return
        if self.inner_step_start is None:
            self.inner_step_start = len(self.entries)
        if not self.run.counts_memory and self.seen.inner is None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [param.grad for param in params if param.grad is not None]
            self.seen.inner = SimpleNamespace(model=flat(self.model.parameters()), own=flat(params),
                                              grads=flat(grads) if grads else None)
        if self.run.prefetch and self.candidate.rank == 1:
            time.sleep(0.2)

    def note_first_layer(self, *_):
        self.seen.first_layer_waited = [entry.is_awaited for entry in self.seen.after_inner]

    def note_gradient(self, _):
        self.seen.n_in_flight = sum(not entry.is_awaited for entry in self.entries[self.step_start :])

    def note_collectives(self):
        self.seen.entries = self.entries[self.step_start :]
        self.seen.n_in_backward = self.backward_stop - self.step_start
        self.seen.after_inner = self.entries[self.inner_step_start or self.backward_stop :]
        self.seen.never_awaited = [entry for entry in self.seen.entries
                                   if not entry.is_awaited and entry.kind not in ("send", "barrier")]  # no result

    def count(self, memory):
        """Count the optimizer's state, and the bytes of all tensors."""
        inner = self.stepped - {self.optimizer} or self.stepped  # an outer optimizer may show the inner one's state
        moments = [plain for optimizer in inner for state in optimizer.state.values() for value in state.values()
                   if torch.is_tensor(value) and value.dim() for plain in plain_tensors(value)]
        n_real = sum(int(value.count_nonzero()) for value in moments)
        self.seen.state = n_real, sum(value.numel() for value in moments) - n_real
        del moments
        self.seen.held = memory.settle() - self.run.left_out(self.optimizer)
        self.keep_params()


def play(candidate, run, ranks=None, factor=lambda step, micro: 1.0):
    """Train on the mean loss of `ranks`, by default that of this rank. `factor` scales gradients. Returns Seen."""
    training = Training(candidate, run, ranks or [candidate.rank], factor)
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(Memory("cpu")) if run.counts_memory else None
        stack.callback(register_optimizer_step_post_hook(training.note_step).remove)
        training.begin(candidate.rank)
        if not run.counts_memory:
            training.keep_params()
        for step in range(run.steps):
            if run.resume and step == 2:
                training.resume()
            training.train(step)
        if run.counts_memory:
            training.count(memory)
    return training.seen


def flat(params):
    local = [plain for param in params for plain in plain_tensors(param.detach())]
    return torch.cat([torch.zeros(0), *(tensor.float().reshape(-1) for tensor in local)])


def counted(entries):
    """Return how many collectives there are of each kind: "2 all_reduce, 1 broadcast"."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(entry.kind for entry in entries).items())


def has_number(saved, number):
    """Return whether `number` is somewhere in a state_dict."""
    return any(float(leaf) == float(number) for leaf in tree_leaves(saved)
               if isinstance(leaf, (int, float)) or type(leaf) is torch.Tensor and not leaf.dim())
