"""The training runs by which a package is graded, and what a rank sees of them."""

import contextlib
import copy
import inspect
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.memory import Memory, plain_tensors

LR = 0.1
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": LR}),
    # Its eps is as large as many gradients, so that another eps gives other parameters.
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 0.01, "foreach": False}),
}


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
    zero: bool = True  # zero_grad() after a step
    discards: bool = False  # before each step zero_grad() drops a backward pass: to zeros, to None, to zeros, …
    unused: bool = False  # a parameter that rank 0 alone uses, and one that no rank uses
    reloads: bool = False  # other values are loaded into the model after the constructor
    dtype: torch.dtype = torch.float32
    defaults: bool = False  # the optimizer's own hyperparameters
    sizes: tuple = (7, 11, 5, 7)  # of layers
    counts: bool = False  # memory is counted, and parameters are kept at the end alone: copies would be counted, too
    frees: bool = True  # gradients, before memory is counted

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
            loss = loss + 0.01 * model.used_by_rank_0.square().sum()  # about AdamW's eps
        return loss

    def params(self, model):
        if not self.groups:
            return model.parameters()
        *others, last = [param for param in model.parameters() if param.dim() == 1]
        matrices = [param for param in model.parameters() if param.dim() == 2]
        return [{"params": [last], "lr": 0.05, "weight_decay": 0.5},
                {"params": matrices, "lr": 0.02, "weight_decay": 0.2},
                {"params": others, "lr": 0.03, "weight_decay": 0.0}]

    def settings(self):
        optimizer_cls, kwargs = OPTIMIZERS[self.optimizer]
        return optimizer_cls, {"foreach": False} if self.defaults else kwargs

    def make(self, candidate, model):
        optimizer_cls, kwargs = self.settings()
        accepted = inspect.signature(candidate.cls).parameters
        if "bucket_cap_mb" in accepted:  # so small that there are several buckets
            n_bytes = sum(param.nbytes for param in model.parameters())
            kwargs = {**kwargs, "bucket_cap_mb": n_bytes / 6 / 2**20}
        if self.unused and "find_unused_parameters" in accepted:
            kwargs = {**kwargs, "find_unused_parameters": True}
        return candidate.cls(self.params(model), optimizer_cls, **kwargs)

    def scheduler(self, optimizer):
        if self.schedule == "cycle":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6, pct_start=0.5)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if self.schedule else None

    def shown_by(self, world_size, step):
        """-> options by which `make show` trains so, up to this step; "" where it can't."""
        is_plain = self == Run(self.optimizer, self.steps)
        return f"--ranks {world_size} --steps {step} --optimizer {self.optimizer.lower()}" if is_plain else ""

    def left_out(self, optimizer):
        """-> bytes that don't count as held."""
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
    n_in_flight: int = 0  # how many of them nobody had waited for when the last gradient came
    after_inner: list = ()  # those of them that began after the inner optimizer had stepped
    awaited: list = ()  # of these of the step before: whether the first layer has waited
    unawaited: list = ()  # those for whose result nobody has waited when the step ends
    state: tuple = ()  # elements of AdamW's moments: that this rank holds and aren't 0, that are, as padding is
    held: float = 0  # bytes of all tensors
    has_zeros_for_none: bool = False  # whether what no rank uses has a gradient all the same: zeros of a buffer
    lr_was_saved: bool = False  # whether state_dict() has a number that is the scheduler's lr


class Losses(nn.Module):
    """Computes a run's loss in its forward pass, as DistributedDataParallel needs it."""

    def __init__(self, model, run):
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, number, rank):
        return self.run.loss(self.model, number, rank)


class Training:
    """Trains as a Run says, on one rank, and notes in `seen` what it sees."""

    def __init__(self, candidate, run, ranks, factor):
        self.candidate = candidate
        self.run = run
        self.ranks = ranks
        self.factor = factor
        self.entries = candidate.entries
        self.seen = Seen()
        self.stepped = set()  # optimizers of torch
        self.n_before_inner = None  # collectives that had begun when the inner optimizer stepped, in this step
        self.step_start = 0  # index into `entries`

    def begin(self, seed):
        self.model = self.run.model(seed)
        self.loss = Losses(self.model, self.run)
        if self.candidate.beside_ddp:
            self.loss = DistributedDataParallel(self.loss, gradient_as_bucket_view=True)
        self.optimizer = self.run.make(self.candidate, self.model)
        if self.run.reloads:
            self.model.load_state_dict(self.run.model(100).state_dict())
        if self.run.prefetch:
            self.optimizer.prefetch_params(self.model)
        if self.run.prefetch and self.run.counts:
            self.model[0].register_forward_hook(self.note_first_layer)
        if self.run.counts:
            for param in self.model.parameters():
                if param.requires_grad:  # an optimizer may freeze some
                    param.register_hook(self.note_gradient)
        self.scheduler = self.run.scheduler(self.optimizer)

    def note_step(self, optimizer, *_):
        """Note a step of a torch optimizer: the inner one, or then the one around it."""
        self.stepped.add(optimizer)
        if optimizer is self.optimizer:
            return
        if self.n_before_inner is None:
            self.n_before_inner = len(self.entries)
        if not self.run.counts and self.seen.inner is None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            grads = [param.grad for param in params if param.grad is not None]
            self.seen.inner = SimpleNamespace(model=flat(self.model.parameters()), own=flat(params),
                                              grads=flat(grads) if grads else None)
        if self.run.prefetch and self.candidate.rank == 1:
            time.sleep(0.2)

    def note_first_layer(self, *_):
        self.seen.awaited = [entry.is_awaited for entry in self.seen.after_inner]

    def note_gradient(self, _):
        self.seen.n_in_flight = sum(not entry.is_awaited for entry in self.entries[self.step_start :])

    def backward(self, number, factor=1.0):
        losses = (self.loss(number, rank) for rank in self.ranks)
        (sum(losses) * (factor / len(self.ranks))).backward()

    def accumulate(self, step):
        """Run the backward passes of a step, all but the last inside no_sync() where the run has it."""
        for micro in range(self.run.micro_batches):
            number = step * self.run.micro_batches + micro
            factor = self.factor(step, micro)
            if self.run.no_sync and micro < self.run.micro_batches - 1:
                n_before = len(self.entries)
                with (self.loss if self.candidate.beside_ddp else self.optimizer).no_sync():
                    self.backward(number, factor)
                self.seen.n_in_no_sync += len(self.entries) - n_before
            else:
                self.backward(number, factor)

    def train(self, step):
        """Do one step, and clear the gradients as the run says."""
        run, seen, optimizer, is_last = self.run, self.seen, self.optimizer, step == self.run.steps - 1
        if run.discards:
            self.backward(100 + step)
            optimizer.zero_grad(set_to_none=step % 2 == 1)
        self.step_start = len(self.entries)
        self.accumulate(step)
        n_after_backward = len(self.entries)
        if run.unused:
            seen.has_zeros_for_none = self.model.used_by_none.grad is not None
        if run.max_norms:
            seen.norms.append(float(optimizer.clip_grad_norm_(run.max_norms[step])))
        self.n_before_inner = None
        optimizer.step()
        n_before_inner = n_after_backward if self.n_before_inner is None else self.n_before_inner
        seen.entries = self.entries[self.step_start :]
        seen.n_in_backward = n_after_backward - self.step_start
        seen.after_inner = self.entries[n_before_inner:]
        seen.unawaited = [entry for entry in seen.entries
                          if not entry.is_awaited and entry.kind not in ("send", "barrier")]
        if run.zero and (run.frees or not is_last):
            optimizer.zero_grad()
        if self.scheduler:
            self.scheduler.step()
        if run.prefetch and is_last:
            optimizer.finish_param_sync()
        if not run.counts and (is_last or not run.prefetch):  # to look would be to wait
            seen.snapshots.append(flat(self.model.parameters()))

    def resume(self):
        """Save, and go on with another model, another optimizer, another scheduler."""
        saved = copy.deepcopy([part.state_dict() for part in (self.model, self.optimizer, self.scheduler)])
        self.seen.lr_was_saved = has_number(saved[1], self.optimizer.param_groups[0]["lr"])
        self.begin(self.candidate.rank + 10)
        for part, its_state in zip((self.model, self.optimizer, self.scheduler), saved):
            part.load_state_dict(its_state)

    def count(self, memory):
        """Count the optimizer's state, and the bytes of all tensors."""
        inner = self.stepped - {self.optimizer} or self.stepped  # an outer optimizer may show the inner one's state
        moments = [plain for optimizer in inner for state in optimizer.state.values() for value in state.values()
                   if torch.is_tensor(value) and value.dim() for plain in plain_tensors(value)]
        n_real = sum(int(value.count_nonzero()) for value in moments)
        self.seen.state = n_real, sum(value.numel() for value in moments) - n_real
        del moments
        self.seen.held = memory.settle() - self.run.left_out(self.optimizer)
        self.seen.snapshots.append(flat(self.model.parameters()))


def play(candidate, run, ranks=None, factor=lambda step, micro: 1.0):
    """Train as `run` says -> Seen of this rank.

    ranks: whose batches it has, on average; its own by default. factor: of the gradients of a micro-batch.
    """
    training = Training(candidate, run, ranks or [candidate.rank], factor)
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(Memory("cpu")) if run.counts else None
        stack.callback(register_optimizer_step_post_hook(training.note_step).remove)
        training.begin(candidate.rank)
        if not run.counts:
            training.seen.snapshots.append(flat(training.model.parameters()))
        for step in range(run.steps):
            if run.resume and step == 2:
                training.resume()
            training.train(step)
        if run.counts:
            training.count(memory)
    return training.seen


def flat(params):
    local = [plain for param in params for plain in plain_tensors(param.detach())]
    return torch.cat([torch.zeros(0), *(tensor.float().reshape(-1) for tensor in local)])


def has_number(saved, number):
    """-> whether `number` is somewhere in the lists, dicts and numbers of a state_dict."""
    if isinstance(saved, dict):
        saved = list(saved.values())
    if isinstance(saved, (list, tuple)):
        return any(has_number(part, number) for part in saved)
    if torch.is_tensor(saved) and saved.dim():
        return False
    return isinstance(saved, (int, float, torch.Tensor)) and float(saved) == float(number)
