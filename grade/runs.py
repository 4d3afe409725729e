"""Describes the training runs by which a package is graded, and notes what a rank sees of them."""

import contextlib
import copy
import functools
import inspect
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.measuring.memory import Memory, plain_tensors

LR = 0.1
OTHER_SEED = 100  # of a model that is loaded
FIRST_DROPPED = 100  # the number of the first batch whose gradients are dropped
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": LR}),
    # eps is as large as many of the gradients, so that another eps gives other parameters.
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 0.01, "foreach": False})}


@dataclass(frozen=True)
class Run:
    """Describes a training run for ranks and for one process. By default the model has 190 parameters, in odd sizes."""
    optimizer: str = "SGD"
    steps: int = 3
    groups: bool = False  # three: the last bias, the matrices, the other biases, with an lr and a decay of their own
    schedule: str = ""  # "lr": the lr falls to a half in each step; "cycle": torch's one-cycle, which writes betas, too
    micro_batches: int = 1
    no_sync: bool = False
    max_norms: tuple = ()  # of each step
    resume: bool = False  # saves after two steps, and goes on in another model with another optimizer
    prefetch: bool = False  # parameters arrive in the next forward pass, and rank 1 sends its own late
    zeroes: bool = True  # calls zero_grad() after a step
    discards: bool = False  # drops a backward pass before each step by zero_grad(): to zeros, to None, to zeros, …
    unused: bool = False  # a parameter that one rank uses in two of three steps, and one that no rank ever uses
    thaws: bool = False  # the first layer is frozen when the optimizer is built, and trained from the first step on
    strides: bool = False  # matrices are transposed in memory
    reloads: bool = False  # other values are loaded into the model after the constructor
    dtype: torch.dtype = torch.float32
    sizes: tuple = (7, 11, 5, 7)  # of layers
    counts_memory: bool = False  # and copies the parameters only at the end, because copies would be counted
    settles: bool = False  # copies the parameters some time after the last step, when late messages have arrived
    without_rank_0: bool = False  # the other ranks train in a process group of their own

    def model(self, seed):
        torch.manual_seed(seed)
        model = nn.Sequential()
        for n_inputs, n_outputs in zip(self.sizes, self.sizes[1:]):
            model.extend([nn.Linear(n_inputs, n_outputs), nn.Tanh()])
        del model[-1]
        if self.strides:
            for param in model.parameters():
                param.data = param.data.t().contiguous().t()
        if self.unused:
            for name in ("used_by_one_rank", "used_by_none"):
                model.register_parameter(name, nn.Parameter(torch.ones(2, 3)))
        return model.to(self.dtype)

    def loss(self, model, number, rank):
        """Compute the loss of a rank's batch `number`; no two batches are alike."""
        generator = torch.Generator().manual_seed(1000 * number + rank)
        x, y = torch.randn(2, 4, self.sizes[0], generator=generator).to(self.dtype)
        loss = F.mse_loss(model(x), y)
        if self.unused and number % 3 == rank:  # rank 0, rank 1, neither of them, rank 0 again
            loss = loss + 0.01 * model.used_by_one_rank.square().sum()  # a gradient about as large as AdamW's eps
        if self.max_norms:
            loss = loss * 3**number  # so that no two steps have alike norms
        return loss

    def params(self, model):
        if not self.groups:
            return model.parameters()
        matrices = [param for param in model.parameters() if param.dim() == 2]
        biases = [param for param in model.parameters() if param.dim() == 1]
        return [{"params": biases[-1:], "lr": 0.05, "weight_decay": 0.5},
                {"params": matrices, "lr": 0.02, "weight_decay": 0.2},
                {"params": biases[:-1], "lr": 0.03, "weight_decay": 0.0}]

    def settings(self):
        return OPTIMIZERS[self.optimizer]

    def make(self, candidate, model):
        optimizer_cls, kwargs = self.settings()
        n_bytes = sum(param.nbytes for param in model.parameters())
        offered = {"bucket_cap_mb": n_bytes / 6 / 2**20, "find_unused_parameters": self.unused}  # several buckets
        accepted = inspect.signature(candidate.cls).parameters
        extra = {name: value for name, value in offered.items() if value and name in accepted}
        if self.without_rank_0:
            extra["process_group"] = candidate.group
        return candidate.cls(self.params(model), optimizer_cls, **kwargs, **extra)

    def scheduler(self, optimizer):
        if self.schedule == "cycle":
            return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6, pct_start=0.5)
        return lr_scheduler.ExponentialLR(optimizer, 0.5) if self.schedule else None

    def number_of(self, snapshot):
        """Return the number of the step after which a snapshot was made: with prefetch there is only the last one."""
        return self.steps if self.prefetch else snapshot


@dataclass
class Seen:
    """Holds the observations of a Run on a rank."""
    snapshots: list = field(default_factory=list)  # all parameters (numel,) after the constructor, and after each step
    norms: list = field(default_factory=list)  # that clip_grad_norm_ has returned
    inner: SimpleNamespace = None  # after the inner optimizer's first step: model, own and grads, flat; None: no step
    n_in_no_sync: int = 0  # collectives
    entries: list = ()  # collectives of the last step, with its forward and backward pass
    n_in_backward: int = 0  # how many of `entries` began in the forward or backward pass
    n_in_flight: int = 0  # how many of `entries` nobody had waited for when the last gradient was computed
    after_inner: list = ()  # collectives that began after the inner optimizer's step
    first_layer_waited: list = ()  # for each of `after_inner` in the step before, whether the first layer has waited
    never_awaited: list = ()  # collectives whose results nobody has waited for when the step ends
    n_state: int = 0  # elements of AdamW's moments on this rank that aren't 0
    held: float = 0  # bytes of all tensors
    draws: bool = False  # whether a step changed the state of random number generators


class Training:
    """Trains as a Run says, on one rank, and notes observations in `seen`.

    candidate: has the class that is graded, the rank, and the ledger's entries; grade/on_ranks.py makes it.
    ranks: the ranks whose mean loss is trained on. factor: (step, micro-batch) -> factor of the loss.
    """

    def __init__(self, candidate, run, ranks, factor):
        self.candidate = candidate
        self.run = run
        self.ranks = ranks
        self.factor = factor
        self.entries = candidate.entries
        self.seen = Seen()
        self.stepped = set()  # optimizers of torch
        self.step_start = 0  # index in `entries` of this step's first collective
        self.backward_stop = 0  # index of the first collective after this step's backward passes
        self.inner_step_start = None  # index of the first collective after the inner optimizer's step; None: not yet

    def begin(self, seed):
        run = self.run
        model = run.model(seed)
        self.loss = functools.partial(run.loss, model)
        if run.thaws:
            model[0].requires_grad_(False)
        self.optimizer = run.make(self.candidate, model)
        if run.thaws:
            model[0].requires_grad_(True)
        self.model = model
        self.scheduler = run.scheduler(self.optimizer)
        self.parts = [part for part in (model, self.optimizer, self.scheduler) if part is not None]
        if run.reloads:
            model.load_state_dict(run.model(OTHER_SEED).state_dict())
        if run.prefetch:
            self.optimizer.prefetch_params(model)
        if run.prefetch and run.counts_memory:
            model[0].register_forward_hook(self.note_first_layer)
        if run.counts_memory:
            for param in model.parameters():
                if param.requires_grad:  # an optimizer may have frozen some
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
        before = random_states()
        if self.run.max_norms:
            self.seen.norms.append(float(self.optimizer.clip_grad_norm_(self.run.max_norms[step])))
        self.inner_step_start = None
        self.optimizer.step()
        self.seen.draws |= random_states() != before
        self.note_collectives()
        self.end_step(is_last=step == self.run.steps - 1)

    def end_step(self, is_last):
        """Clear the gradients, let a scheduler write, and keep the parameters."""
        if self.run.zeroes and not (self.run.counts_memory and is_last):  # gradients count, too
            self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        if self.run.prefetch and is_last:
            self.optimizer.finish_param_sync()
        if not self.run.counts_memory and (is_last or not self.run.prefetch):  # reading them would wait for them
            self.keep_params()

    def keep_params(self):
        if self.run.settles:
            time.sleep(0.3)
        self.seen.snapshots.append(flat(self.model.parameters()))

    def resume(self):
        """Save, and go on with another model, another optimizer, another scheduler."""
        states = copy.deepcopy([part.state_dict() for part in self.parts])
        self.begin(seed=self.candidate.rank + 10)  # another model
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
        updated = self.backward_stop if self.inner_step_start is None else self.inner_step_start
        self.seen.after_inner = self.entries[updated:]
        self.seen.never_awaited = [entry for entry in self.seen.entries
                                   if not entry.is_awaited and entry.kind not in ("send", "barrier")]  # no result

    def count(self, memory):
        """Count the optimizer's state, and the bytes of all tensors."""
        inner = self.stepped
        if len(inner) > 1:
            inner = inner - {self.optimizer}  # an outer optimizer may show the inner one's state
        moments = [plain for optimizer in inner for state in optimizer.state.values() for value in state.values()
                   if torch.is_tensor(value) and value.dim() for plain in plain_tensors(value)]
        self.seen.n_state = sum(int(value.count_nonzero()) for value in moments)
        del moments  # they would count
        self.seen.held = memory.settle()
        self.keep_params()


def play(candidate, run, ranks=None, factor=lambda step, micro: 1.0):
    """Train on the mean loss of `ranks`, by default of this rank. Returns Seen. `factor`: see Training."""
    if run.without_rank_0:
        group = dist.new_group(range(1, dist.get_world_size()))
        if candidate.rank == 0:
            return Seen()
        candidate = SimpleNamespace(**{**vars(candidate), "rank": candidate.rank - 1, "group": group})
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


def random_states():
    """Return the states of the random generators of torch and of Python."""
    return torch.get_rng_state().tolist(), random.getstate()


def counted(entries):
    """Return how many collectives there are of each kind: "2 all_reduce, 1 broadcast"."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(entry.kind for entry in entries).items())
