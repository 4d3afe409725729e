"""Refuses optimizers that would update shards differently from whole tensors.

Some are not element-wise, such as Lamb and Muon. Others update tensors together, such as Prodigy, so a rank's share
would be updated differently. A trial on tensors of its own finds this out before anything is changed. Shown by
tests/stages/test_probe.py.
"""

import collections
import copy
import functools
import itertools
import math
from typing import Any, NamedTuple

import torch

from .groups import hyperparameters
from .hooks import without_global_hooks
from .schema import raise_if_of_the_machine

# (number of steps, whether all have the same gradient, its magnitude). Steady gradients show what accumulates over
# steps, large ones show clipping, and the last phases show rules that count steps.
PHASES = [(20, True, 1.0), (4, False, 1e-3), (4, False, 1.0), (4, False, 1e3)]
# For tensors of 2**17 elements, to find rules about the number of elements, such as those of 8-bit optimizers: more
# than 4096 or 65536, a power of two, a multiple of 256 or 2048. A third of 2**17 is no such multiple.
OF_LARGE_TENSORS = [(2, False, 1.0)]
# (dtype, tolerance relative to how far a tensor moves). An optimizer that can't update fp64 is tried in fp32.
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-3)]
PASSED: set[tuple] = set()  # trials that passed in this process, so that a program with many optimizers waits once


def check_elementwise(make_optimizer, groups, unit=1):
    """For stages 3 and 4: refuse an optimizer that updates shards differently from whole tensors; see `check`.

    unit: shards start at multiples of this number of elements in a tensor, as in variants/blocks.py.
    """
    check(make_optimizer, groups, unit, "{} is not element-wise: in shards it would step otherwise; see stage 2 ({})")


def check_one_by_one(make_optimizer, groups):
    """For stages 1 and 2: refuse an optimizer that updates tensors differently together than alone; see `check`."""
    check(make_optimizer, groups, None, "{} doesn't step tensors one by one: a rank's would step differently ({})")


def check(make_optimizer, groups, unit, refusal):
    """For each kind of group, try whether two and three ranks that update a share each get the result of one rank.

    Args:
        make_optimizer: function of parameter groups.
        unit: of shards, see `shards_of`; None: ranks update whole tensors.
        refusal: message with places for the optimizer's name and the reason.

    Raises:
        ValueError: a step fails; or the results differ; or the optimizer skips tensors with requires_grad=False, which
            shards are.
        Exception: what torch raises for wrong arguments.
    """
    share_out = whole_shares_of if unit is None else functools.partial(shards_of, unit=unit)
    name = make_optimizer.func.__name__
    for trial in trials_of(make_optimizer, groups):
        known = make_optimizer.func, unit, repr(trial)
        if known in PASSED:
            continue
        whole, (dtype, tolerance) = trial.whole()
        for n_ranks in (2, 3):
            try:
                parts = trial.run(share_out, n_ranks, dtype)
            except Exception as failure:  # Muon wants matrices
                raise_if_of_the_machine(failure)
                raise ValueError(refusal.format(name, described(failure))) from failure
            if not any(map(torch.any, parts)) and any(map(torch.any, whole)):
                raise ValueError(f"{name} doesn't step tensors with requires_grad=False, as shards are; use stage 2")
            for mine, theirs in zip(whole, parts):
                if not torch.allclose(mine, theirs, tolerance, tolerance * mine.abs().max().item(), equal_nan=True):
                    what = "parameters differ"
                    raise ValueError(refusal.format(name, what))
        PASSED.add(known)


def shards_of(flat, shapes, n_ranks, unit):
    """-> for each rank the pieces of tensors that lie in its shard. `flat`: (numel,), the tensors of `shapes`."""
    starts = [flat.numel() * rank // n_ranks for rank in range(1, n_ranks)]
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    begins = [max((end for end in ends if end <= start), default=0) for start in starts]  # where the cut tensors begin
    starts = [begin + (start - begin) // unit * unit for start, begin in zip(starts, begins)]
    shares, start = [[] for _ in range(n_ranks)], 0
    for end in sorted({*starts, *ends}):
        shares[sum(start >= other for other in starts)].append(flat[start:end])
        start = end
    return shares


def whole_shares_of(flat, shapes, n_ranks):
    """-> for each rank the whole tensors that it updates. `flat`: (numel,), the tensors of `shapes`."""
    tensors = flat.split([math.prod(shape) for shape in shapes])
    tensors = [tensor.view(shape).requires_grad_() for tensor, shape in zip(tensors, shapes)]
    return [tensors[rank::n_ranks] for rank in range(n_ranks)]


def trials_of(make_optimizer, groups):
    """-> iterator over three Trials for each kind of group: one on small tensors, two on large ones.

    Tensors have as many dimensions as the group's. Groups that differ only in lr are one kind: the largest is tried.
    """
    def lr_of(group):
        return group.get("lr", make_optimizer.keywords.get("lr"))

    kinds = collections.defaultdict(list)
    for group in groups:
        if group["params"]:
            kinds[repr({**hyperparameters(group), "lr": None, "initial_lr": None})].append(group)
    for alike in kinds.values():
        fastest = max(alike, key=lambda group: lr_of(group) or 0)
        options, device = hyperparameters(fastest), fastest["params"][0].device
        if lr_of(fastest) is not None and not lr_of(fastest):
            options["lr"] = 0.1  # with lr 0 no difference would show
        n_dims = sorted({param.dim() for group in alike for param in group["params"]})
        small = [[(), (9,), (8, 8), (4, 4, 3)][n] if n < 4 else (4, 4, *[3] * (n - 2)) for n in n_dims]
        yield Trial(make_optimizer, options, (small * 3)[: max(3, len(small))], PHASES, device)
        # 6144 elements: bitsandbytes uses 8 bits from 4096 elements on, and halves and thirds of 6144 have fewer.
        for rows, numel in (512, 2**17), (48, 6144):
            large = [(rows, *[2] * (n - 2), max(1, numel // rows >> n - 2)) for n in n_dims if n > 1] or [(numel,)]
            yield Trial(make_optimizer, options, large, OF_LARGE_TENSORS, device)


class Trial(NamedTuple):
    make_optimizer: Any
    options: dict  # of its one group
    shapes: list
    phases: list
    device: torch.device

    def whole(self):
        """-> the result of one rank that updates everything, as without sharding; the first precision that works."""
        self.optimizer_of([torch.zeros(shape, device=self.device) for shape in self.shapes])  # wrong arguments raise
        for precision in PRECISIONS:
            try:
                return self.run(whole_shares_of, 1, precision[0]), precision
            except Exception as failure:
                raise_if_of_the_machine(failure)
                reason = failure
        name, shapes = self.make_optimizer.func.__name__, ", ".join(map(str, self.shapes))
        raise ValueError(f"{name} fails in a trial on tensors of {shapes}: {described(reason)}") from reason

    @torch.no_grad()
    def run(self, share_out, n_ranks, dtype):
        """Let `n_ranks` ranks update a share each. -> how far the values moved in each phase, (numel,) each."""
        values = torch.linspace(-1, 1, sum(map(math.prod, self.shapes)), dtype=dtype, device=self.device)
        grads = torch.zeros_like(values)
        shares = [share_out(flat, self.shapes, n_ranks) for flat in (values, grads)]
        optimizers = [self.optimizer_of(params) for params in shares[0]]
        generator, moved = torch.Generator().manual_seed(0), []
        with torch.random.fork_rng([self.device] * (self.device.type == "cuda")), without_global_hooks():
            for n_steps, is_steady, magnitude in self.phases:
                before = values.clone()
                for step in range(n_steps):
                    if step == 0 or not is_steady:
                        noise = torch.randn(values.shape, generator=generator, device="cpu") * magnitude
                    grads.copy_(noise)  # in each step, because SGD with nesterov writes into gradients
                    for optimizer, params, own_grads in zip(optimizers, *shares):
                        for param, grad in zip(params, own_grads):
                            param.grad = grad.detach()
                        optimizer.step()
                moved.append(values - before)
        return moved

    def optimizer_of(self, params):
        return self.make_optimizer([{**copy.deepcopy(self.options), "params": params}])


def described(failure):
    return f"{type(failure).__name__}: {failure}"
