"""Known mistakes, made on purpose in one process that has all batches: whoever gets the same has made the same."""

import functools
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from grade.by_hand import ALMOST, DEFAULTS, NOT_AVERAGED, SUMMED, TWICE_AVERAGED
from grade.runs import Run, play

NO_GROUPS = "every parameter is stepped with the constructor's lr and weight_decay: the inner optimizer needs groups"
LR_NOT_SAVED = "the lr of a scheduler is lost: save the groups' hyperparameters, too, in state_dict()"
LR_NOT_LOADED = "the lr of a scheduler is lost: state_dict() has it, load_state_dict() doesn't put it into param_groups"


class OneProcess:
    """Gives a torch optimizer the interface of a sharded one on `d` ranks. A mistake replaces one of its methods."""

    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, **kwargs)
        self.start = [dict(group) for group in self.param_groups]

    def hyperparameters(self, current):
        """Return the groups' hyperparameters with which a step is done; `current`: those that they have."""
        return current

    def cleared(self, param, set_to_none):
        """Return what the gradient of `param` is after zero_grad()."""

    def scaled(self, ratio, norm):
        """Return what gradients are scaled by, where max_norm / norm is `ratio`, and what clip_grad_norm_ returns."""
        return min(ratio, 1), norm

    def clipped(self):
        """Return the parameters whose gradients have the norm."""
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
            param.grad = self.cleared(param, set_to_none)

    def params(self):
        return [param for group in self.param_groups for param in group["params"]]

    def clip_grad_norm_(self, max_norm):
        norm = nn.utils.clip_grad_norm_(self.clipped(), math.inf).item()
        factor, norm = self.scaled(max_norm / norm, norm)
        torch._foreach_mul_([param.grad for param in self.params()], factor)
        return norm


def in_one_process(run, ranks, factor=lambda *_: 1.0, **methods):
    """Return Seen of one process with the batches of all `ranks`. The mistake: `methods` of OneProcess, `factor`."""
    optimizer_cls = type("Mistaken", (OneProcess, run.settings()[0]), {"d": len(ranks), **methods})
    candidate = SimpleNamespace(rank=0, cls=optimizer_cls, entries=[], beside_ddp=False)
    seen = play(candidate, replace(run, prefetch=False, no_sync=False), ranks,
                functools.partial(factor, len(ranks), run.micro_batches))
    if run.prefetch:
        del seen.snapshots[1:-1]
    return seen


def twice(name):
    return {"hyperparameters": lambda self, current: [{**group, name: 2 * group[name]} for group in current]}


def last_groups(self, current):
    used = getattr(self, "current_groups", self.start)
    self.current_groups = current
    return used


def loads(change):
    """Return how a load_state_dict() is made that replaces some keys. change: (optimizer, saved) -> these."""
    return {"load_state_dict": lambda self, saved: torch.optim.Optimizer.load_state_dict(
        self, {**saved, **change(self, saved)})}


def fill_with_zeros(self):
    for param in self.params():
        if param.grad is None:
            param.grad = torch.zeros_like(param)


def own_value(self, param, set_to_none):
    return param.detach().clone()


MISTAKES = {  # setting of a Run that shows them; "": every Run -> cause -> methods of OneProcess, factor, or settings
    "schedule": {
        "the lr of a scheduler doesn't arrive: before each step copy it from param_groups to the inner optimizer's":
            {"hyperparameters": lambda self, current: self.start},
        "the scheduler's lr arrives, its betas don't: hand on all that param_groups holds, and not lr alone":
            {"hyperparameters": lambda self, current: [{**old, "lr": new["lr"]}
                                                       for old, new in zip(self.start, current)]},
        "what a scheduler writes arrives one step late: hand it to the inner optimizer before that steps":
            {"hyperparameters": last_groups}},
    "optimizer": {
        "weight decay is applied twice: AdamW does it in its step": twice("weight_decay"),
        "eps is twice the constructor's in the inner optimizer: hand it on as it is": twice("eps"),
        "eps of the constructor doesn't reach the inner optimizer":
            {"hyperparameters": lambda self, current: [{**group, "eps": 1e-8} for group in current]},
        "the optimizer's state is new in each step: make the inner optimizer once, in the constructor":
            {"cleared": lambda self, param, set_to_none: self.state.clear()},
        "the inner optimizer is not optimizer_cls": {"run": {"optimizer": "SGD"}}},
    "groups": {NO_GROUPS: {"run": {"groups": False}}},
    "micro_batches": {
        "only the last micro-batch counts: the gradients of those before were dropped":
            {"factor": lambda d, n, step, micro: float(micro == n - 1)},
        "only the first micro-batch counts": {"factor": lambda d, n, step, micro: float(micro == 0)},
        "micro-batches that were averaged are sent again with the next one":
            {"factor": lambda d, n, step, micro: n - micro},
        "micro-batches are averaged: their gradients add up, as in torch": {"factor": lambda d, n, *_: 1 / n}},
    "max_norms": {
        "the norm is right, and the gradients were not scaled by max_norm / norm":
            {"scaled": lambda self, ratio, norm: (1, norm)},
        "gradients are scaled also where their norm is below max_norm: the factor is at most 1":
            {"scaled": lambda self, ratio, norm: (ratio, norm)},
        "√d times the norm: every rank adds the squares of the whole model, so they count d times":
            {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm * self.d**0.5)},
        "the norm after clipping: return the one before":
            {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm * min(ratio, 1))},
        "the root is missing: this is the square of the norm":
            {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm**2)},
        "the norm of the first group alone: add up the squares over all groups":
            {"clipped": lambda self: self.param_groups[0]["params"]}},
    "resume": {
        "the state is lost: load_state_dict() leaves the inner optimizer as new": loads(lambda *_: {"state": {}}),
        "moments are loaded, and AdamW's `step` is 0 again: its bias correction starts anew": loads(
            lambda _, saved: {"state": {key: {**state, "step": torch.zeros(())}
                                        for key, state in saved["state"].items()}}),
        LR_NOT_SAVED: loads(lambda self, saved: {"param_groups": self.state_dict()["param_groups"]}),
        "the lr that is loaded is that of the last step: a scheduler has changed the outer groups since":
            loads(lambda self, saved: {"param_groups": [{**group, "lr": group["last_lr"]}
                                                        for group in saved["param_groups"]]}),
        "state and lr are lost: load_state_dict() leaves both as new": {"load_state_dict": lambda self, saved: None}},
    "unused": {
        "a parameter that some ranks use is averaged over these alone: divide by all d, as DDP does":
            {"change_grads": lambda self: self.params()[0].grad.mul_(self.d)},  # rank 0 alone uses it
        "what no rank uses is stepped with zeros, and decays: its gradient must stay None":
            {"change_grads": fill_with_zeros}},
    "discards": {
        "zero_grad(set_to_none=False) leaves gradients as they are: it must zero them":
            {"cleared": lambda self, param, set_to_none: None if set_to_none else param.grad}},
    "": {
        SUMMED: {"factor": lambda d, *_: float(d)},
        TWICE_AVERAGED: {"factor": lambda d, *_: 1 / d},
        "gradients of the step before are added again: zero_grad() must forget them":
            {"cleared": lambda self, param, set_to_none: param.grad},
        "parameters were taken for gradients: new gradients miss the buffer, which zero_grad() should have zeroed":
            {"cleared": own_value, "factor": lambda d, n, step, micro: float(step == 0)},
        "gradients were added to parameters: the buffer must be zeroed when these have been copied out":
            {"cleared": own_value},
        DEFAULTS: {"run": {"defaults": True}}}}


def mistaken_runs(run, d):
    """Yield (cause, Seen of one process that makes the mistake), of each that `run` can show on d ranks."""
    for setting, mistakes in MISTAKES.items():
        if not setting or getattr(run, setting) != getattr(Run, setting):
            for cause, how in mistakes.items():
                yield cause, in_one_process(**{**how, "run": replace(run, **how.get("run", {})), "ranks": range(d)})


def likely_cause(ranks, due, step, run):
    """Return the known mistake by which one process gets rank 0's snapshots, or "". `step`: the first that is wrong."""
    d, came = len(ranks), ranks[0].snapshots
    for cause, seen in mistaken_runs(run, d):
        if all(map(close, came, seen.snapshots)):
            return LR_NOT_LOADED if cause == LR_NOT_SAVED and ranks[0].lr_was_saved else cause
    own = torch.stack([seen.snapshots[1] for seen in each_alone(run, d)])
    if step == 1 and torch.isclose(own, came[1], rtol=1e-4, atol=2e-6).any(dim=0).all():  # that of its owner
        return NOT_AVERAGED
    is_near = (came[step] - due[step]).abs().max() < 0.01 * (due[step] - due[step - 1]).abs().max()
    return ALMOST if is_near and not run.prefetch else ""


def wrong_hyperparameters(came, run, d):
    """Return (which parameters were stepped with whose hyperparameters, the cause), or () if unknown: do the first step
    with every group's lr and every group's weight decay, and compare parameter by parameter."""
    names, numels = names_and_numels(run)
    start = [{key: group[key] for key in ("lr", "weight_decay")} for group in run.params(run.model(0))]
    values_of = {"its own": {}, "the constructor's": run.settings()[1],
                 **{f"group {index}'s": values for index, values in enumerate(start)}, "no": {"weight_decay": 0}}
    sources = {}  # name of a parameter -> (whose lr, whose weight decay)
    for lr, decay in itertools.product(values_of, repeat=2):
        groups = [{"lr": {**own, **values_of[lr]}["lr"],
                   "weight_decay": {**own, **values_of[decay]}["weight_decay"]} for own in start]
        stepped = in_one_process(replace(run, steps=1), range(d), hyperparameters=lambda self, current: groups)
        for name, due, value in zip(names, stepped.snapshots[1].split(numels), came.split(numels)):
            if close(due, value):
                sources.setdefault(name, (lr, decay))
    if len(sources) < len(names):
        return ()
    wrong = {name: source for name, source in sources.items() if source != ("its own", "its own")}
    lr, decay = first = next(wrong[name] for name in names if name in wrong)
    alike = [name for name in names if wrong.get(name) == first]
    listed = ", ".join(alike[:2]) + (" …" if len(alike) > 2 else "")
    return f"{listed} moved with {lr} lr and {decay} weight decay", cause_of_sources(set(wrong.values()))


def cause_of_sources(sources):
    """Return why parameters were stepped with the hyperparameters of these sources."""
    lrs = {lr for lr, _ in sources}
    if sources == {("the constructor's", "the constructor's")}:
        return NO_GROUPS
    if lrs == {"its own"}:
        return "the weight decay of a group is lost: hand on everything that a group holds, and not lr alone"
    if lrs <= {"its own", "group 0's"}:
        return "the first group's lr is taken for all: copy each group's own"
    return "groups are paired wrongly: a rank that owns nothing of a group still needs that group, empty"


def each_alone(run, d):
    return [in_one_process(run, [rank]) for rank in range(d)]


def close(a, b):
    """Compare up to rounding: over three ranks and more the order of a sum is the layout's."""
    return torch.allclose(a, b, rtol=1e-4, atol=2e-6)


def names_and_numels(run):
    return zip(*((name, param.numel()) for name, param in run.model(0).named_parameters()))


def difference(came, due, run):
    """Return "2.weight, 2.bias differ by up to 0.12", of two (numel,)."""
    names, numels = names_and_numels(run)
    is_equal = torch.equal if close(came, due) else close  # two ranks may differ by the last bits, and mustn't
    differing = [name for name, a, b in zip(names, came.split(numels), due.split(numels)) if not is_equal(a, b)]
    rest = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    verb = "differs" if len(differing) == 1 else "differ"
    return f"{', '.join(differing[:3])}{rest} {verb} by up to {(came - due).abs().max():.2g}"
