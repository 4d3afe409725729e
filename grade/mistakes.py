"""Trains one process with each known mistake, so that the grader can name the mistake of a learner's package.

A package trains on d processes, the ranks, each of which has a batch of its own. If its parameters are wrong, the
grader trains one process, which has the batches of all ranks and makes a mistake. If this gives the same parameters,
the package makes the same mistake. The cause of a mistake is the text that tells it to a learner.

Words of grade/runs.py: a Run describes a training run, and play() does it. A Candidate has the class to train with, and
a list of the collectives that have begun, `entries`. A Seen has what was noted in a run: all parameters after each
step, and norms. The graded class builds an inner optimizer for what a rank owns. One process has only one optimizer.
"""

import contextlib
import functools
import math
from dataclasses import replace

import torch
from torch import nn

from grade.by_hand import SUMMED, TWICE_AVERAGED
from grade.runs import Candidate, Run, play

NO_GROUPS = "every parameter is stepped with the constructor's lr and weight_decay: the inner optimizer needs groups"


class OneProcess:
    """Gives an optimizer of torch the interface of a sharded optimizer. in_one_process makes a class of both.

    The methods up to `replaced_state` do what is right, and a mistake replaces some of them. The methods below call
    them. The attribute d, which in_one_process sets, is how many ranks the process stands for.
    """

    def hyperparameters(self, current, start, last):
        """Return {name: value}, with which a group is stepped. Other hyperparameters stay as they are in the group.

        current: the group as it is in param_groups. start: as it was in the constructor. last: as it was in the step
        before. current["stepped_lr"] equals the lr, and stays when a scheduler then writes another lr.
        """
        return current

    def before_step(self):
        """Do nothing. A mistake may change gradients or state here, when all gradients of a step have been computed."""

    def grad_after_zero_grad(self, param, set_to_none):
        """Return what `param.grad` is after zero_grad()."""
        return None

    def norm(self):
        """Return the norm of the gradients, by which clip_grad_norm_ clips."""
        return norm_of(self.params())

    def clip_factor(self, ratio):
        """Return the factor by which clip_grad_norm_ scales gradients. ratio: max_norm / norm."""
        return min(ratio, 1)

    def returned_norm(self, norm, factor):
        """Return what clip_grad_norm_ returns. factor: by which it has scaled the gradients."""
        return norm

    def replaced_state(self, saved):
        """Return items that replace those of `saved`, a state_dict(), when it is loaded."""
        return {}

    # In one process these methods do nothing. no_sync() must also work in a `with`. A class that is called as a method
    # doesn't get `self`.
    no_sync = prefetch_params = finish_param_sync = contextlib.nullcontext

    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, **kwargs)  # `optimizer_cls` is a base of this class, and needs only its arguments
        self.start = [dict(group) for group in self.param_groups]  # copies, because schedulers write into groups
        self.last = self.start  # copies of the groups as they were in the step before

    def params(self):
        """Return all parameters, in the order of the groups."""
        return [param for group in self.param_groups for param in group["params"]]

    def step(self):
        """Step each group with what `hyperparameters` returns, and then put the group's own back."""
        current_groups = [{**group, "stepped_lr": group["lr"]} for group in self.param_groups]
        for group, current, start, last in zip(self.param_groups, current_groups, self.start, self.last):
            group.update(self.hyperparameters(current, start, last))
        self.before_step()
        super().step()
        for group, current in zip(self.param_groups, current_groups):
            group.update(current)  # so a scheduler reads the right values
        self.last = current_groups

    def zero_grad(self, set_to_none=True):
        for param in self.params():
            param.grad = self.grad_after_zero_grad(param, set_to_none)

    def clip_grad_norm_(self, max_norm):
        norm = self.norm()
        factor = self.clip_factor(max_norm / norm)
        torch._foreach_mul_([param.grad for param in self.params()], factor)
        return self.returned_norm(norm, factor)

    def load_state_dict(self, saved):
        super().load_state_dict({**saved, **self.replaced_state(saved)})


def norm_of(params):
    """Return the norm of the gradients of `params`."""
    return nn.utils.clip_grad_norm_(params, math.inf).item()  # infinity is the largest norm: nothing is clipped


def in_one_process(run, ranks, settings=(), weight=lambda *_: 1.0, **methods):
    """Return the Seen of one process that has the batches of all `ranks`. The other arguments make a mistake.

    settings: {field of `run`: value that it has in the mistake}. methods: functions that replace methods of OneProcess.
    weight: a function of (d, number of micro-batches in a step, step, micro-batch's number). It returns the factor of
    the micro-batch's loss, and so of its gradients.
    """
    run = replace(run, **dict(settings))
    d = len(ranks)
    # A class derived from OneProcess and from the run's optimizer class. inner_optimizer returns (class, arguments).
    cls = type("Mistaken", (OneProcess, run.inner_optimizer()[0]), {"d": d, **methods})
    # One process begins no collectives: its `entries` stay empty.
    return play(Candidate(cls, rank=0, entries=[]), run, ranks, functools.partial(weight, d, run.micro_batches))


def each_alone(run, d):
    """Return the Seen of d processes. Each trains by itself, on the batches of one rank."""
    return [in_one_process(run, [rank]) for rank in range(d)]


# Functions that MISTAKES below puts in place of methods of OneProcess. In a Run with `unused`, one rank uses the first
# parameter in two of three steps. In the third step no rank uses it, and it has no gradient.


def norm_of_the_step_before(self):
    """Return the norm of the step before. In the first step there is none, so return the right one."""
    norm = norm_of(self.params())
    norm_before = getattr(self, "norm_before", norm)
    self.norm_before = norm
    return norm_before


def moments_in_16_bits(self):
    """Round AdamW's two moments to 16 bits, in place."""
    for state in self.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())


def mean_over_users(self):
    """Average the first parameter's gradient over the ranks that use it, and not over all d.

    Only one rank uses it, so its gradient is d times the mean over all ranks.
    """
    grad = self.params()[0].grad
    if grad is not None:
        grad.mul_(self.d)


def add_stale(self):
    """Add a mistake to the first parameter's gradient: ranks that don't use it send the average of the step before."""
    param = self.params()[0]
    n_users = 0 if param.grad is None else 1
    if hasattr(self, "stale"):  # the average of the step before, kept by the last line
        of_others = self.stale * (self.d - n_users) / self.d
        param.grad = param.grad + of_others if n_users else of_others
    self.stale = param.grad


def fill_with_zeros(self):
    """Give parameters without a gradient a gradient of zeros. That is right, too, and grade/levels.py tries it."""
    for param in self.params():
        if param.grad is None:
            param.grad = torch.zeros_like(param)


def own_value(self, param, set_to_none):
    """Return the parameter's value as its gradient, as if the gradient's memory had been used for the parameter."""
    return param.detach().clone()


def step_is_0(self, saved):
    """Return AdamW's state with 0 as each parameter's number of steps."""
    return {"state": {key: {**state, "step": torch.zeros(())} for key, state in saved["state"].items()}}


def lr_of_the_last_step(self, saved):
    """Return the groups, each with the lr with which it was stepped last. A scheduler has written another since."""
    return {"param_groups": [{**group, "lr": group["stepped_lr"]} for group in saved["param_groups"]]}


# {field of Run: {cause: arguments of in_one_process}}. Mistakes under a field are tried for each Run in which the field
# isn't the default, and mistakes under "" for every Run. The arguments of a `weight` are d, n (how many micro-batches a
# step has), step and micro (number of the micro-batch). Any other lambda replaces the method that is its key.
MISTAKES = {
    "schedule": {
        "the lr of a scheduler doesn't arrive: before each step copy it from param_groups to the inner optimizer's":
            {"hyperparameters": lambda self, current, start, last: start},
        "the scheduler's lr arrives, its betas don't: hand on all that param_groups holds, and not lr alone":
            {"hyperparameters": lambda self, current, start, last: {**start, "lr": current["lr"]}},
        "what a scheduler writes arrives one step late: hand it to the inner optimizer before that steps":
            {"hyperparameters": lambda self, current, start, last: last}},
    "optimizer": {
        "weight decay is applied twice: AdamW does it in its step":
            {"hyperparameters": lambda self, current, start, last: {"weight_decay": 2 * current["weight_decay"]}},
        "eps is twice the constructor's in the inner optimizer: hand it on as it is":
            {"hyperparameters": lambda self, current, start, last: {"eps": 2 * current["eps"]}},
        "eps of the constructor doesn't reach the inner optimizer":
            {"hyperparameters": lambda self, current, start, last: {"eps": 1e-8}},
        "the optimizer's state is new in each step: make the inner optimizer once, in the constructor":
            {"before_step": lambda self: self.state.clear()},
        "AdamW's moments are kept in 16 bits": {"before_step": moments_in_16_bits},
        "the inner optimizer is not optimizer_cls": {"settings": {"optimizer": "SGD"}}},
    "groups": {
        NO_GROUPS: {"settings": {"groups": False}},
        "the first group's lr is taken for all: copy each group's own":
            {"hyperparameters": lambda self, current, start, last: {"lr": self.param_groups[0]["lr"]}},
        "the weight decay of a group is lost: hand on everything that a group holds, and not lr alone":
            {"hyperparameters": lambda self, current, start, last: {"weight_decay": self.defaults["weight_decay"]}}},
    "micro_batches": {
        "only the last micro-batch counts: the gradients of those before were dropped":
            {"weight": lambda d, n, step, micro: float(micro == n - 1)},
        "only the first micro-batch counts": {"weight": lambda d, n, step, micro: float(micro == 0)},
        "micro-batches that were averaged are sent again with the next one":
            {"weight": lambda d, n, step, micro: n - micro},
        "micro-batches are averaged: their gradients add up, as in torch":
            {"weight": lambda d, n, step, micro: 1 / n}},
    "max_norms": {
        "the norm is right, and the gradients were not scaled by max_norm / norm":
            {"clip_factor": lambda self, ratio: 1},
        "gradients are scaled also where their norm is below max_norm: the factor is at most 1":
            {"clip_factor": lambda self, ratio: ratio},
        "√d times the norm: every rank adds the squares of the whole model, so they count d times":
            {"returned_norm": lambda self, norm, factor: norm * self.d**0.5},
        "the norm after clipping: return the one before": {"returned_norm": lambda self, norm, factor: norm * factor},
        "the root is missing: this is the square of the norm": {"returned_norm": lambda self, norm, factor: norm**2},
        "the norm of the step before: take the norm of this step's gradients, and clip by it":
            {"norm": norm_of_the_step_before},
        "the norm of the first group alone: add up the squares over all groups":
            {"norm": lambda self: norm_of(self.param_groups[0]["params"])}},
    "resume": {
        "the state is lost: load_state_dict() leaves the inner optimizer as new":
            {"replaced_state": lambda self, saved: {"state": {}}},
        "moments are loaded, and AdamW's `step` is 0 again: its bias correction starts anew":
            {"replaced_state": step_is_0},
        "the lr of a scheduler is lost: state_dict() must have it, and load_state_dict() put it into param_groups":
            {"replaced_state": lambda self, saved: {"param_groups": self.state_dict()["param_groups"]}},
        "the lr that is loaded is that of the last step: a scheduler has changed the outer groups since":
            {"replaced_state": lr_of_the_last_step},
        "state and lr are lost: load_state_dict() leaves both as new":
            {"replaced_state": lambda self, saved: self.state_dict()}},
    "unused": {
        "a parameter that some ranks use is averaged over these alone: divide by all d, as DDP does":
            {"before_step": mean_over_users},
        "a gradient of an earlier step is used again where a rank has none in this step": {"before_step": add_stale}},
    "discards": {  # before each step a backward pass is dropped by zero_grad()
        "zero_grad(set_to_none=False) leaves gradients as they are: it must zero them":
            {"grad_after_zero_grad": lambda self, param, set_to_none: None if set_to_none else param.grad}},
    "": {
        SUMMED: {"weight": lambda d, n, step, micro: d},
        TWICE_AVERAGED: {"weight": lambda d, n, step, micro: 1 / d},
        "gradients of the step before are added again: zero_grad() must forget them":
            {"grad_after_zero_grad": lambda self, param, set_to_none: param.grad},
        "parameters were taken for gradients: new gradients miss the buffer, which zero_grad() should have zeroed":
            # Gradients arrive only in step 0. Later .grad is just the parameter.
            {"grad_after_zero_grad": own_value, "weight": lambda d, n, step, micro: float(step == 0)},
        "gradients were added to parameters: the buffer must be zeroed when these have been copied out":
            {"grad_after_zero_grad": own_value}}}


def mistaken_runs(run, d):
    """Train one process with each mistake that `run` can show on d ranks, and yield (cause, its Seen) for each."""
    for name, mistakes in MISTAKES.items():
        if not name or getattr(run, name) != getattr(Run, name):
            for cause, arguments in mistakes.items():
                yield cause, in_one_process(run, range(d), **arguments)
