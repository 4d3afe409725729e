"""Makes known mistakes in one process that has all batches: a package that trains the same has the same mistake."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from grade.by_hand import ALMOST, NOT_AVERAGED, SUMMED, TWICE_AVERAGED
from grade.grader import UNKNOWN
from grade.runs import Run, play

NO_GROUPS = "every parameter is stepped with the constructor's lr and weight_decay: the inner optimizer needs groups"
USED_BY_NONE = slice(6, 12)  # elements of a Run with `unused`; the first six are the parameter that one rank uses


class OneProcess:
    """Gives a torch optimizer the interface of a sharded one on `d` ranks. A mistake replaces one of its methods."""

    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, **kwargs)
        self.start = [dict(group) for group in self.param_groups]

    def hyperparameters(self, current):
        """Return the groups' hyperparameters for this step. `current`: the hyperparameters in param_groups."""
        return current

    def cleared(self, param, set_to_none):
        """Return the gradient of `param` after zero_grad()."""

    def scaled(self, ratio, norm):
        """Return the factor of the gradients, and the norm that clip_grad_norm_ returns. `ratio`: max_norm / norm."""
        return min(ratio, 1), norm

    def clipped(self):
        """Return the parameters whose gradients count for the norm."""
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
    """Return the Seen of one process that has the batches of all `ranks`, and makes a mistake.

    The mistake is `methods` that replace those of OneProcess, or `factor`: (d, micro-batches, step, micro-batch) -> the
    factor of a loss.
    """
    optimizer_cls = type("Mistaken", (OneProcess, run.settings()[0]), {"d": len(ranks), **methods})
    candidate = SimpleNamespace(rank=0, cls=optimizer_cls, entries=[])
    seen = play(candidate, replace(run, prefetch=False, no_sync=False), ranks,
                functools.partial(factor, len(ranks), run.micro_batches))
    if run.prefetch:
        del seen.snapshots[1:-1]
    return seen


def twice(name):
    return {"hyperparameters": lambda self, current: [{**group, name: 2 * group[name]} for group in current]}


def last_groups(self, current):
    last = getattr(self, "last_groups", self.start)
    self.last_groups = current
    return last


def by_the_last_norm(self, ratio, norm):
    last_norm = getattr(self, "last_norm", norm)
    self.last_norm = norm
    return min(ratio * norm / last_norm, 1), last_norm


def moments_in_16_bits(self, current):
    for state in self.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())
    return current


def multiply(grad, factor):
    if grad is not None:
        grad.mul_(factor)


def add_stale(self):
    """Add the mistake of ranks that don't use a parameter: they send the average of the step before again."""
    param = self.params()[0]  # one rank uses it
    n_without = self.d - (param.grad is not None)
    stale = getattr(self, "stale", None)
    if stale is not None:
        param.grad = (0 if param.grad is None else param.grad) + stale * n_without / self.d
    self.stale = param.grad


def loads(change):
    """Return a load_state_dict(), as methods of OneProcess, that replaces keys of `saved` by those of `change`."""
    return {"load_state_dict": lambda self, saved: torch.optim.Optimizer.load_state_dict(
        self, {**saved, **change(self, saved)})}


def fill_with_zeros(self):
    for param in self.params():
        if param.grad is None:
            param.grad = torch.zeros_like(param)


def own_value(self, param, set_to_none):
    return param.detach().clone()


# {setting of a Run that shows the mistakes ("": every Run): {cause: arguments of in_one_process()}}. An argument "run"
# has the settings of another Run.
MISTAKES = {
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
        "AdamW's moments are kept in 16 bits": {"hyperparameters": moments_in_16_bits},
        "the inner optimizer is not optimizer_cls": {"run": {"optimizer": "SGD"}}},
    "groups": {
        NO_GROUPS: {"run": {"groups": False}},
        "the first group's lr is taken for all: copy each group's own":
            {"hyperparameters": lambda self, current: [{**group, "lr": current[0]["lr"]} for group in current]},
        "the weight decay of a group is lost: hand on everything that a group holds, and not lr alone":
            {"hyperparameters": lambda self, current: [{**group, "weight_decay": self.defaults["weight_decay"]}
                                                       for group in current]}},
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
        "the norm of the step before: take the norm of this step's gradients, and clip by it":
            {"scaled": by_the_last_norm},
        "the norm of the first group alone: add up the squares over all groups":
            {"clipped": lambda self: self.param_groups[0]["params"]}},
    "resume": {
        "the state is lost: load_state_dict() leaves the inner optimizer as new": loads(lambda *_: {"state": {}}),
        "moments are loaded, and AdamW's `step` is 0 again: its bias correction starts anew": loads(
            lambda _, saved: {"state": {key: {**state, "step": torch.zeros(())}
                                        for key, state in saved["state"].items()}}),
        "the lr of a scheduler is lost: state_dict() must have it, and load_state_dict() put it into param_groups":
            loads(lambda self, saved: {"param_groups": self.state_dict()["param_groups"]}),
        "the lr that is loaded is that of the last step: a scheduler has changed the outer groups since":
            loads(lambda self, saved: {"param_groups": [{**group, "lr": group["last_lr"]}
                                                        for group in saved["param_groups"]]}),
        "state and lr are lost: load_state_dict() leaves both as new": {"load_state_dict": lambda self, saved: None}},
    "unused": {
        "a parameter that some ranks use is averaged over these alone: divide by all d, as DDP does":
            {"change_grads": lambda self: multiply(self.params()[0].grad, self.d)},
        "a gradient of an earlier step is used again where a rank has none in this step":
            {"change_grads": add_stale}},
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
            {"cleared": own_value}}}


def mistaken_runs(run, d):
    """Yield (cause, Seen of one process that makes the mistake) for each mistake that `run` can show on d ranks."""
    for setting, mistakes in MISTAKES.items():
        if not setting or getattr(run, setting) != getattr(Run, setting):
            for cause, how in mistakes.items():
                mistaken_run = replace(run, **how.get("run", {}))
                yield cause, in_one_process(**{**how, "run": mistaken_run, "ranks": range(d)})


def likely_cause(ranks, due, step, run, otherwise):
    """Return the known mistake by which one process gets rank 0's snapshots, or `otherwise`, or a guess.

    step: the first wrong step. due: the right snapshots.
    """
    d = len(ranks)
    came = ranks[0].snapshots
    for cause, seen in mistaken_runs(run, d):
        if all(map(close, came, seen.snapshots)):
            return cause
    alone = torch.stack([seen.snapshots[1] for seen in each_alone(run, d)])
    # Each element has a value that one rank, its owner, reaches alone.
    if step == 1 and torch.isclose(alone, came[1], rtol=1e-4, atol=2e-6).any(dim=0).all():
        return NOT_AVERAGED
    is_near = (came[step] - due[step]).abs().max() < 0.01 * (due[step] - due[step - 1]).abs().max()
    return otherwise or (ALMOST if is_near else UNKNOWN)


def each_alone(run, d):
    return [in_one_process(run, [rank]) for rank in range(d)]


def close(a, b):
    """Compare up to rounding, because over three or more ranks the order of a sum depends on the layout."""
    return torch.allclose(a, b, rtol=1e-4, atol=2e-6)


def difference(came, due, run):
    """Return "2.weight, 2.bias differ by up to 0.12", for two tensors (numel,)."""
    numels = {name: param.numel() for name, param in run.model(0).named_parameters()}
    parts = zip(numels, came.split([*numels.values()]), due.split([*numels.values()]))
    is_equal = torch.equal if close(came, due) else close  # if all are close, only the last bits tell which differ
    differing = [name for name, a, b in parts if not is_equal(a, b)]
    rest = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    verb = "differs" if len(differing) == 1 else "differ"
    return f"{', '.join(differing[:3])}{rest} {verb} by up to {(came - due).abs().max():.2g}"
