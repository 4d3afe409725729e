"""Known mistakes, made on purpose in one process that has all batches: a wrong result that equals one of theirs has
its cause.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

from grade.by_hand import ALMOST, DEFAULTS, OWN, SUMMED, TWICE_AVERAGED
from grade.runs import play

NO_GROUPS = "every parameter is stepped with the constructor's lr and weight_decay: the inner optimizer needs groups"


class OneProcess:
    """Gives a torch optimizer the interface of a sharded one. A known mistake replaces one of its methods."""

    no_sync = None  # a run in one process has nothing to hold back

    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, **kwargs)
        self.start = [dict(group) for group in self.param_groups]

    def hyperparameters(self, current):
        """-> the groups' hyperparameters with which a step is done; `current`: those that they have."""
        return current

    def kept(self, param, set_to_none):
        """-> what the gradient of `param` is after zero_grad()."""

    def scaled(self, ratio, norm):
        """-> what gradients are scaled by, where max_norm / norm is `ratio`, and what clip_grad_norm_ returns."""
        return min(ratio, 1), norm

    def clipped(self):
        """-> the parameters whose gradients have the norm."""
        return self.params()

    def change_grads(self):
        """Change the summed gradients before a step."""

    def update(self, groups):
        for group, values in zip(self.param_groups, groups):
            group.update(values)

    def step(self):
        current = [{**group, "last_lr": group["lr"]} for group in self.param_groups]
        self.update(self.hyperparameters(current))
        self.change_grads()
        super().step()
        self.update(current)

    def zero_grad(self, set_to_none=True):
        for param in self.params():
            param.grad = self.kept(param, set_to_none)

    def params(self):
        return [param for group in self.param_groups for param in group["params"]]

    def clip_grad_norm_(self, max_norm):
        norm = nn.utils.clip_grad_norm_(self.clipped(), math.inf).item()
        factor, norm = self.scaled(max_norm / norm, norm)
        torch._foreach_mul_([param.grad for param in self.params()], factor)
        return norm


def in_one_process(run, ranks, factor=lambda step, micro: 1.0, **methods):
    """-> Seen of one process with the batches of all `ranks`, and with these methods of a mistake."""
    optimizer_cls = type("Mistaken", (OneProcess, run.settings()[0]), methods)
    candidate = SimpleNamespace(rank=0, cls=optimizer_cls, entries=[], beside_ddp=False)
    seen = play(candidate, replace(run, prefetch=False, no_sync=False), ranks, factor)
    if run.prefetch:
        del seen.snapshots[1:-1]
    return seen


def twice(name):
    return {"hyperparameters": lambda self, current: [{**group, name: 2 * group[name]} for group in current]}


def last_groups(self, current):
    used = getattr(self, "current_groups", self.start)
    self.current_groups = current
    return used


def only_lr(self, current):
    return [{**old, "lr": new["lr"]} for old, new in zip(self.start, current)]


def small_eps(self, current):
    return [{**group, "eps": 1e-8} for group in current]


def loads(change):
    """-> how a load_state_dict() is made that replaces some keys. change: (optimizer, saved) -> these."""
    return {"load_state_dict": lambda self, saved: torch.optim.Optimizer.load_state_dict(
        self, {**saved, **change(self, saved)})}


def with_steps_from_0(self, saved):
    return {"state": {key: {**state, "step": torch.zeros(())} for key, state in saved["state"].items()}}


def with_last_lr(self, saved):
    return {"param_groups": [{**group, "lr": group["last_lr"]} for group in saved["param_groups"]]}


def fill_with_zeros(self):
    for param in self.params():
        if param.grad is None:
            param.grad = torch.zeros_like(param)


def average_over_users(d):
    def change_grads(self):
        used_by_rank_0, *_ = self.params()
        used_by_rank_0.grad *= d
    return {"change_grads": change_grads}


def values(self, param, set_to_none):
    return param.detach().clone()


def clear_state(self, param, set_to_none):
    self.state.clear()


def known_mistakes(run, d, lr_was_saved=False):
    """Yield (cause, arguments of in_one_process that make it) of each mistake that `run` can show on d ranks."""
    n = run.micro_batches
    if run.schedule:
        yield ("the lr of a scheduler doesn't arrive: before each step copy it from param_groups to the inner "
               "optimizer's", {"hyperparameters": lambda self, current: self.start})
        yield ("the scheduler's lr arrives, its betas don't: hand on all that param_groups holds, and not lr alone",
               {"hyperparameters": only_lr})
        yield ("what a scheduler writes arrives one step late: hand it to the inner optimizer before that steps",
               {"hyperparameters": last_groups})
    if run.optimizer == "AdamW":
        yield "weight decay is applied twice: AdamW does it in its step", twice("weight_decay")
        yield "eps is twice the constructor's in the inner optimizer: hand it on as it is", twice("eps")
        yield "eps of the constructor doesn't reach the inner optimizer", {"hyperparameters": small_eps}
    if run.groups:
        yield NO_GROUPS, {"run": replace(run, groups=False)}
    if n > 1:
        yield ("only the last micro-batch counts: the gradients of those before were dropped",
               {"factor": lambda step, micro: float(micro == n - 1)})
        yield "only the first micro-batch counts", {"factor": lambda step, micro: float(micro == 0)}
        yield ("micro-batches that were averaged are sent again with the next one",
               {"factor": lambda step, micro: n - micro})
        yield "micro-batches are averaged: their gradients add up, as in torch", {"factor": lambda *_: 1 / n}
    if run.max_norms:
        yield ("the norm is right, and the gradients were not scaled by max_norm / norm",
               {"scaled": lambda self, ratio, norm: (1, norm)})
        yield ("gradients are scaled also where their norm is below max_norm: the factor is at most 1",
               {"scaled": lambda self, ratio, norm: (ratio, norm)})
        yield ("√d times the norm: every rank adds the squares of the whole model, so they count d times",
               {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm * d**0.5)})
        yield ("the norm after clipping: return the one before",
               {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm * min(ratio, 1))})
        yield ("the root is missing: this is the square of the norm",
               {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm**2)})
        yield ("the norm of the first group alone: add up the squares over all groups",
               {"clipped": lambda self: self.param_groups[0]["params"]})
    if run.resume:
        yield ("the state is lost: load_state_dict() leaves the inner optimizer as new",
               loads(lambda self, saved: {"state": {}}))
        yield ("moments are loaded, and AdamW's `step` is 0 again: its bias correction starts anew",
               loads(with_steps_from_0))
        yield ("the lr of a scheduler is lost: state_dict() has it, load_state_dict() doesn't put it into param_groups"
               if lr_was_saved else
               "the lr of a scheduler is lost: save the groups' hyperparameters, too, in state_dict()",
               loads(lambda self, saved: {"param_groups": self.state_dict()["param_groups"]}))
        yield ("the lr that is loaded is that of the last step: a scheduler has changed the outer groups since",
               loads(with_last_lr))
        yield ("state and lr are lost: load_state_dict() leaves both as new",
               {"load_state_dict": lambda self, saved: None})
    if run.unused:
        yield ("a parameter that some ranks use is averaged over these alone: divide by all d, as DDP does",
               average_over_users(d))
        yield ("what no rank uses is stepped with zeros, and decays: its gradient must stay None",
               {"change_grads": fill_with_zeros})
    if run.discards:
        yield ("zero_grad(set_to_none=False) leaves gradients as they are: it must zero them",
               {"kept": lambda self, param, set_to_none: None if set_to_none else param.grad})
    yield SUMMED, {"factor": lambda *_: float(d)}
    yield TWICE_AVERAGED, {"factor": lambda *_: 1 / d}
    yield ("gradients of the step before are added again: zero_grad() must forget them",
           {"kept": lambda self, param, set_to_none: param.grad})
    yield ("parameters were taken for gradients: new gradients miss the buffer, which zero_grad() should have zeroed",
           {"kept": values, "factor": lambda step, micro: float(step == 0)})
    yield ("gradients were added to parameters: the buffer must be zeroed when these have been copied out",
           {"kept": values})
    yield DEFAULTS, {"run": replace(run, defaults=True)}
    if run.optimizer != "SGD":
        yield ("the optimizer's state is new in each step: make the inner optimizer once, in the constructor",
               {"kept": clear_state})
        yield "the inner optimizer is not optimizer_cls", {"run": replace(run, optimizer="SGD")}


def likely_cause(ranks, due, step, run):
    """-> the cause, where one process that makes a known mistake gets what the first rank got; "" otherwise.

    ranks: Seen of each. due: snapshots after each step, of which that of `step` is the first to differ.
    """
    d, came = len(ranks), ranks[0].snapshots
    for cause, how in known_mistakes(run, d, ranks[0].lr_was_saved):
        if all(map(close, came, in_one_process(**{"run": run, "ranks": range(d), **how}).snapshots)):
            return cause
    own = torch.stack([seen.snapshots[1] for seen in each_by_itself(run, d)])
    if step == 1 and torch.isclose(own, came[1], rtol=1e-4, atol=2e-6).any(dim=0).all():  # that of its owner
        return OWN
    is_near = (came[step] - due[step]).abs().max() < 0.01 * (due[step] - due[step - 1]).abs().max()
    return ALMOST if is_near and not run.prefetch else ""


class Source(NamedTuple):
    """Whose lr and whose weight decay a parameter was stepped with: a group's number, or a word."""

    lr: object
    decay: object


WORDS = {"own": "its own", "constructor": "the constructor's", 0: "group 0's", 1: "group 1's", 2: "group 2's",
         "no": "no"}


def wrong_hyperparameters(came, run, d):
    """-> (which parameters were stepped with whose hyperparameters, the cause) after the first step; None if unknown.

    The step is done with every group's lr and every group's weight decay, and compared parameter by parameter.
    """
    names, numels = names_and_numels(run)
    start = [{key: group[key] for key in ("lr", "weight_decay")} for group in run.params(run.model(0))]
    values_of = {"constructor": run.settings()[1], "no": {"weight_decay": 0}, **dict(enumerate(start))}
    sources = {}  # name of a parameter -> Source
    for source in itertools.starmap(Source, itertools.product([*WORDS][:-1], WORDS)):
        groups = [{"lr": values_of.get(source.lr, own)["lr"],
                   "weight_decay": values_of.get(source.decay, own)["weight_decay"]} for own in start]
        stepped = in_one_process(replace(run, steps=1), range(d), hyperparameters=lambda self, current: groups)
        for name, due, value in zip(names, stepped.snapshots[1].split(numels), came.split(numels)):
            if close(due, value):
                sources.setdefault(name, source)
    wrong = {name: sources.get(name) for name in names if sources.get(name) != ("own", "own")}
    if None in wrong.values():
        return None
    first = next(iter(wrong.values()))
    alike = [name for name in wrong if wrong[name] == first]
    listed = ", ".join(alike[:2]) + (" …" if len(alike) > 2 else "")
    return (f"{listed} moved with {WORDS[first.lr]} lr and {WORDS[first.decay]} weight decay",
            cause_of_sources(set(wrong.values())))


def cause_of_sources(sources):
    """-> why parameters were stepped with the hyperparameters of these sources."""
    lrs = {source.lr for source in sources}
    if sources == {("constructor", "constructor")}:
        return NO_GROUPS
    if lrs == {"own"}:
        return "the weight decay of a group is lost: hand on everything that a group holds, and not lr alone"
    if lrs <= {"own", 0}:
        return "the first group's lr is taken for all: copy each group's own"
    return "groups are paired wrongly: a rank that owns nothing of a group still needs that group, empty"


def each_by_itself(run, d):
    return [in_one_process(run, [rank]) for rank in range(d)]


def close(a, b):
    """Compare up to rounding: over three ranks and more the order of a sum is the layout's."""
    return torch.allclose(a, b, rtol=1e-4, atol=2e-6)


def names_and_numels(run):
    return zip(*((name, param.numel()) for name, param in run.model(0).named_parameters()))


def difference(came, due, run):
    """-> "2.weight, 2.bias differ by up to 0.12", of two (numel,)."""
    names, numels = names_and_numels(run)
    is_equal = torch.equal if close(came, due) else close  # two ranks may differ by the last bits, and mustn't
    differing = [name for name, a, b in zip(names, came.split(numels), due.split(numels)) if not is_equal(a, b)]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    verb = "differs" if len(differing) == 1 else "differ"
    return f"{', '.join(differing[:3])}{more} {verb} by up to {(came - due).abs().max():.2g}"
