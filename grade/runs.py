"""Describes the training runs by which a learner's package is graded, trains on a rank, and notes what happens there.

A Run describes what is trained, and how. `play` does a Run on a rank, which is one of several processes, and returns a
Seen: the parameters after each step, the collectives, the bytes. The checks in grade/levels.py look at the Seen of all
ranks.

The graded class is the learner's sharded optimizer, the outer optimizer. Each rank owns a part of the parameters. For
this part the outer optimizer builds an inner optimizer, which is one of torch's. The ledger is a list of the
collectives that a rank has begun. An entry has the kind, the bytes, and is_awaited: whether somebody has waited for the
collective's result.
"""

import contextlib
import copy
import inspect
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.measuring.memory import Memory, plain_tensors

LR = 0.1
OTHER_SEED = 100  # the seed of a second model, whose values are loaded into the trained model
FIRST_DROPPED = 100  # the number of the first batch whose gradients are dropped; batches that count have lower numbers
OPTIMIZERS = {  # name -> (class, arguments)
    "SGD": (torch.optim.SGD, {"lr": LR}),
    # eps is as large as many of the gradients, so that another eps gives other parameters.
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 0.01, "foreach": False})}


@dataclass
class Candidate:
    """Holds the graded class, and what belongs to it on one rank."""
    cls: type
    rank: int
    entries: list  # the ledger's entries: the ledger appends one for each collective that this rank begins
    group: dist.ProcessGroup = None  # the argument process_group of the class; None: the class gets no such argument
    package: str = ""  # the name of the package that has the class
    name: str = ""  # the name of the class; "" if the package has none that can be graded
    worker: NamedTuple = None  # the Rank by which harness/ranks knows this process


@dataclass(frozen=True)
class Run:
    """Describes a training run. By default the model has 190 parameters, in odd sizes."""
    optimizer: str = "SGD"  # the inner optimizer, which the graded class builds for what a rank owns
    steps: int = 3
    # The comment of a bool says what happens if it is True.
    groups: bool = False  # the optimizer gets three groups, each with an lr and a weight decay of its own
    schedule: str = ""  # "lr": the lr falls to a half in each step; "cycle": torch's one-cycle, which writes betas, too
    micro_batches: int = 1  # how many backward passes a step has
    no_sync: bool = False  # all backward passes of a step but the last are inside no_sync()
    max_norms: tuple = ()  # for each step the largest norm that gradients may have; clip_grad_norm_ gets it
    resume: bool = False  # the run saves after two steps, and goes on in another model with another optimizer
    prefetch: bool = False  # parameters arrive in the next forward pass, and rank 1 sends its own late
    zeroes: bool = True  # the run calls zero_grad() after each step
    discards: bool = False  # before each step a backward pass is dropped by zero_grad(): to zeros, to None, to zeros, …
    unused: bool = False  # the model has a parameter that one rank uses in two of three steps, and one that none uses
    thaws: bool = False  # the first layer is frozen while the optimizer is built, and then it is trained
    strides: bool = False  # matrices are transposed in memory
    reloads: bool = False  # other values are loaded into the model after the optimizer has been built
    dtype: torch.dtype = torch.float32
    sizes: tuple = (7, 11, 5, 7)  # the layers' numbers of inputs, and the last layer's number of outputs
    counts_memory: bool = False  # bytes are counted. Only the last snapshot is made, because copies would count
    settles: bool = False  # parameters are copied some time after a step, when late messages have arrived
    without_rank_0: bool = False  # the other ranks train in a process group of their own

    def model(self, seed):
        """Return a new model, whose values `seed` decides."""
        torch.manual_seed(seed)
        model = nn.Sequential()
        for n_inputs, n_outputs in zip(self.sizes, self.sizes[1:]):
            model.extend([nn.Linear(n_inputs, n_outputs), nn.Tanh()])
        del model[-1]  # the last Tanh
        if self.strides:
            for param in model.parameters():
                param.data = param.data.t().contiguous().t()
        if self.unused:
            for name in ("used_by_one_rank", "used_by_none"):
                model.register_parameter(name, nn.Parameter(torch.ones(2, 3)))
        return model.to(self.dtype)

    def loss(self, model, number, rank):
        """Return the loss of a rank's batch `number`. No two batches are alike."""
        generator = torch.Generator().manual_seed(1000 * number + rank)
        x, y = torch.randn(2, 4, self.sizes[0], generator=generator).to(self.dtype)
        loss = F.mse_loss(model(x), y)
        # used_by_one_rank: in step 0 rank 0 uses it, in step 1 rank 1, in step 2 no rank of two.
        if self.unused and number % 3 == rank:
            loss = loss + 0.01 * model.used_by_one_rank.square().sum()  # a gradient about as large as AdamW's eps
        if self.max_norms:
            loss = loss * 3**number  # so that each step has another norm
        return loss

    def params(self, model):
        """Return the first argument of the optimizer: all parameters of a model, or groups."""
        if not self.groups:
            return model.parameters()
        matrices = [param for param in model.parameters() if param.dim() == 2]
        *biases, last_bias = [param for param in model.parameters() if param.dim() == 1]
        return [{"params": [last_bias], "lr": 0.05, "weight_decay": 0.5},
                {"params": matrices, "lr": 0.02, "weight_decay": 0.2},
                {"params": biases, "lr": 0.03, "weight_decay": 0.0}]

    def inner_optimizer(self):
        """Return the class of the inner optimizer, and its arguments."""
        return OPTIMIZERS[self.optimizer]

    def make_optimizer(self, candidate, model):
        """Return an instance of the graded class. Options are passed only if its constructor has them."""
        inner_cls, kwargs = self.inner_optimizer()
        n_bytes = sum(param.nbytes for param in model.parameters())
        options = {"find_unused_parameters": self.unused, "bucket_cap_mb": n_bytes / 6 / 2**20}  # 6 buckets or more
        accepted = inspect.signature(candidate.cls).parameters  # {name: parameter} of the constructor
        passed = {name: value for name, value in options.items() if value and name in accepted}
        kwargs = {**kwargs, **passed}
        if candidate.group:
            kwargs["process_group"] = candidate.group
        return candidate.cls(self.params(model), inner_cls, **kwargs)

    def scheduler(self, optimizer):
        """Return a new scheduler of an optimizer, or None if the run has no schedule."""
        if self.schedule == "cycle":
            return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6, pct_start=0.5)
        return lr_scheduler.ExponentialLR(optimizer, 0.5) if self.schedule else None


class InnerStep(NamedTuple):
    """Holds copies of tensors, made when an inner optimizer has just stepped, each as one flat tensor (numel,)."""
    model: torch.Tensor  # all parameters of the model
    own: torch.Tensor  # the inner optimizer's parameters
    grads: torch.Tensor  # the gradients of these parameters; without elements if they have none


@dataclass
class Seen:
    """Holds what was noted on one rank in a Run. Training fills it. A collective is an entry of the ledger."""
    # All parameters (numel,), after the constructor and after each step. A run with prefetch has only the first and the
    # last, and a run that counts_memory only the last.
    snapshots: list = field(default_factory=list)
    norms: list = field(default_factory=list)  # what clip_grad_norm_ has returned in each step
    inner: InnerStep = None  # the inner optimizer's first step; None: no inner optimizer has stepped
    n_in_no_sync: int = 0  # collectives that began inside no_sync()
    # The fields from here to never_awaited are about the last step, because each step overwrites them.
    entries: list = ()  # collectives that began in the step, its forward and backward passes included
    n_in_backward: int = 0  # how many of `entries` began in the forward or backward pass
    n_in_flight: int = 0  # how many of `entries` nobody had waited for when the last gradient was computed
    after_inner: list = ()  # collectives that began after the inner optimizer's step
    # For each collective that the step before had in `after_inner`: whether somebody had waited for it when the model's
    # first layer had computed.
    first_layer_waited: list = ()
    never_awaited: list = ()  # collectives whose results nobody has waited for when step() returns
    n_state: int = 0  # elements of AdamW's moments on this rank that aren't 0
    held: float = 0  # bytes of all tensors of this rank after the last step; 0 unless the run counts_memory
    draws: bool = False  # whether a step changed the state of random number generators


class Training:
    """Trains with a Candidate's class as a Run says, and notes in `seen` what happens on its rank.

    ranks: whose batches this process trains on. A rank has only its own; the losses of several ranks are averaged.
    weight: a function of (step, micro-batch), which returns the factor of the loss: 1, except in grade/mistakes.py.
    """

    def __init__(self, candidate, run, ranks, weight):
        self.candidate = candidate
        self.run = run
        self.ranks = ranks
        self.weight = weight
        self.entries = candidate.entries  # the ledger's list, which grows with each collective
        self.seen = Seen()
        self.stepped = set()  # the torch.optim.Optimizers that have stepped: note_step adds them
        # Indices in `entries`. train() and note_step() set them anew in each step.
        self.step_start = 0  # of the step's first collective
        self.backward_stop = 0  # of the first collective after the step's backward passes
        self.inner_step_stop = None  # of the first collective after the inner optimizer's step; None: it hasn't stepped
        self.build(candidate.rank)

    def build(self, seed):
        """Set the attributes model, optimizer, scheduler and saved. seed: the model's."""
        run = self.run
        self.model = model = run.model(seed)
        if run.thaws:
            model[0].requires_grad_(False)
        self.optimizer = run.make_optimizer(self.candidate, model)
        if run.thaws:
            model[0].requires_grad_(True)
        self.scheduler = run.scheduler(self.optimizer)
        # resume() saves these by their state_dict().
        self.saved = [part for part in (model, self.optimizer, self.scheduler) if part is not None]
        if run.reloads:
            model.load_state_dict(run.model(OTHER_SEED).state_dict())
        if run.prefetch:
            self.optimizer.prefetch_params(model)
        if run.counts_memory:
            model[0].register_forward_hook(self.note_first_layer)
            for param in model.parameters():
                if param.requires_grad:  # an optimizer may have frozen some
                    param.register_hook(self.note_gradient)

    def backward(self, number, weight=1.0):
        """Run the backward pass of the batches `number`: the mean loss of self.ranks, times `weight`."""
        losses = (self.run.loss(self.model, number, rank) for rank in self.ranks)
        (sum(losses) * (weight / len(self.ranks))).backward()

    def accumulate(self, step):
        """Run the backward passes of a step. If run.no_sync, all but the last are inside no_sync()."""
        last = self.run.micro_batches - 1
        for micro in range(self.run.micro_batches):
            n_before = len(self.entries)  # the ledger appends an entry for each collective
            is_in_no_sync = self.run.no_sync and micro < last
            with self.optimizer.no_sync() if is_in_no_sync else contextlib.nullcontext():
                self.backward(step * self.run.micro_batches + micro, self.weight(step, micro))
            if is_in_no_sync:
                self.seen.n_in_no_sync += len(self.entries) - n_before

    def train(self, step):
        """Do a step: backward passes, clipping, the update. Then do what a training loop does between steps."""
        run = self.run
        is_last = step == run.steps - 1
        if run.discards:
            self.backward(FIRST_DROPPED + step)
            self.optimizer.zero_grad(set_to_none=step % 2 == 1)
        self.step_start = len(self.entries)
        self.accumulate(step)
        self.backward_stop = len(self.entries)
        before = random_states()
        if run.max_norms:
            self.seen.norms.append(float(self.optimizer.clip_grad_norm_(run.max_norms[step])))
        self.inner_step_stop = None
        self.optimizer.step()
        self.seen.draws |= random_states() != before
        self.note_collectives()
        keeps_grads = run.counts_memory and is_last  # so that the gradients' bytes are counted, too
        if run.zeroes and not keeps_grads:
            self.optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        if run.prefetch and is_last:
            self.optimizer.finish_param_sync()  # waits for all parameters
        # With prefetch_params() some parameters arrive only in the next forward pass, so they can't be read yet.
        have_arrived = is_last or not run.prefetch
        if have_arrived and not run.counts_memory:
            self.keep_params()

    def keep_params(self):
        """Append a snapshot: a copy of all parameters."""
        if self.run.settles:
            time.sleep(0.3)
        self.seen.snapshots.append(flat_copy(self.model.parameters()))

    def resume(self):
        """Save the states, build another model, optimizer and scheduler, and load the states there."""
        states = copy.deepcopy([part.state_dict() for part in self.saved])
        self.build(self.candidate.rank + 10)  # the new model begins with other values than any rank's first model
        for part, state in zip(self.saved, states):
            part.load_state_dict(state)

    def note_step(self, optimizer, *_):
        """Note that an optimizer has stepped. Torch calls this after each step of a torch.optim.Optimizer.

        The inner optimizer steps within step() of the graded class, so this is called for the inner optimizer first.
        """
        self.stepped.add(optimizer)
        if optimizer is self.optimizer:  # the outer optimizer: the rest is about the inner one
            return
        if self.inner_step_stop is None:
            self.inner_step_stop = len(self.entries)
        if not self.run.counts_memory and self.seen.inner is None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [param.grad for param in params if param.grad is not None]
            self.seen.inner = InnerStep(flat_copy(self.model.parameters()), flat_copy(params), flat_copy(grads))
        if self.run.prefetch and self.candidate.rank == 1:
            time.sleep(0.2)  # so rank 1 sends its parameters late

    def note_first_layer(self, *_):
        """Note which collectives were awaited when the first layer had computed. Torch calls this at that moment.

        Only collectives that carry parameters count: they began after the inner optimizer's step, in the step before.
        """
        self.seen.first_layer_waited = [entry.is_awaited for entry in self.seen.after_inner]

    def note_gradient(self, _):
        """Note how many collectives are in flight. Torch calls this after each gradient, and the last call counts."""
        self.seen.n_in_flight = sum(not entry.is_awaited for entry in self.entries[self.step_start :])

    def note_collectives(self):
        """Note the collectives of this step, when step() has returned."""
        seen = self.seen
        seen.entries = self.entries[self.step_start :]
        seen.n_in_backward = self.backward_stop - self.step_start
        # Without a step of an inner optimizer: whatever began after the backward passes.
        updated = self.backward_stop if self.inner_step_stop is None else self.inner_step_stop
        seen.after_inner = self.entries[updated:]
        # A send and a barrier have no result that anybody needs to wait for.
        seen.never_awaited = [entry for entry in seen.entries
                              if not entry.is_awaited and entry.kind not in ("send", "barrier")]

    def count_state(self):
        """Count the elements of AdamW's moments that aren't 0.

        This is a function of its own, because its variables hold tensors. They are gone when memory is counted.
        """
        # The outer optimizer may share the state of the inner one. So it counts only if no inner one has stepped.
        inner = self.stepped - {self.optimizer} or self.stepped
        moments = []
        for optimizer in inner:
            for state in optimizer.state.values():
                # AdamW's number of steps is no moment: it is a tensor without dimensions.
                moments += [value for value in state.values() if torch.is_tensor(value) and value.dim()]
        self.seen.n_state = int(flat_copy(moments).count_nonzero())


def play(candidate, run, ranks=None, weight=lambda step, micro: 1.0):
    """Do a Run with a Candidate, and return the Seen. ranks, weight: see Training. Default: the candidate's rank, 1."""
    if run.without_rank_0:
        group = dist.new_group(range(1, dist.get_world_size()))
        if candidate.rank == 0:
            return Seen()  # rank 0 doesn't train
        candidate = replace(candidate, rank=candidate.rank - 1, group=group)
    memory = Memory("cpu") if run.counts_memory else contextlib.nullcontext()
    with memory:
        training = Training(candidate, run, ranks or [candidate.rank], weight)
        with register_optimizer_step_post_hook(training.note_step):
            if not run.counts_memory:
                training.keep_params()
            for step in range(run.steps):
                if run.resume and step == 2:
                    training.resume()
                training.train(step)
        if run.counts_memory:
            training.count_state()
            training.seen.held = memory.settle()  # bytes, when tensors that nobody needs are gone
            training.keep_params()
    return training.seen


def flat_copy(tensors):
    """Return the elements of tensors as one fp32 tensor (numel,)."""
    # plain_tensors unpacks tensors that have others inside, such as a DTensor.
    plain = [part.float().reshape(-1) for tensor in tensors for part in plain_tensors(tensor.detach())]
    return torch.cat([torch.zeros(0), *plain])  # cat needs at least one tensor


def random_states():
    """Return the states of the random generators of torch and of Python."""
    return torch.get_rng_state().tolist(), random.getstate()


def counted(entries):
    """Return how many collectives there are of each kind: "2 all_reduce, 1 broadcast"."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(entry.kind for entry in entries).items())
