"""Refuses optimizers that would update shards differently from whole tensors.

Some are not element-wise, such as Lamb and Muon. Others update tensors together, such as Prodigy, so a rank's share
would be updated differently. A trial on tensors of its own finds this out before anything is changed. Shown by
tests/stages/test_probe.py.
"""

import collections
import copy
import functools
import math

import torch

from .groups import hyperparameters
from .hooks import without_global_hooks
from .schema import reason_of

# (number of steps, whether all have the same gradient, its magnitude). Steady gradients show what accumulates over
# steps, large ones show clipping, and the last phases show rules that count steps.
PHASES = [(20, True, 1.0), (4, False, 1e-3), (4, False, 1.0), (4, False, 1e3)]
# (dtype, tolerance relative to how far a tensor moves). An optimizer that can't update fp64 is tried in fp32.
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-3)]
SMALL_SHAPES = {0: (), 1: (9,), 2: (8, 8)}  # by number of dimensions; with more of them (4, 4, 3, …)
PASSED: set[tuple] = set()  # trials that passed in this process, so that a program with many optimizers waits once


def check_elementwise(make_optimizer, groups, unit=1):
    """Refuse, for stages 3 and 4, an optimizer that updates shards differently from whole tensors; see `check`.

    unit: shards start at multiples of this number of elements in a tensor, as in variants/blocks.py.
    """
    check(make_optimizer, groups, unit, "{} is not element-wise, shards would differ: stage 2 or variants/muon.py ({})")


def check_one_by_one(make_optimizer, groups):
    """Refuse, for stages 1 and 2, an optimizer that updates tensors differently together than alone; see `check`."""
    check(make_optimizer, groups, None, "{} doesn't step tensors one by one: a rank's would step differently ({})")


def check(make_optimizer, groups, unit, refusal):
    """Try for each kind of group whether two and three ranks that update a share each get the result of one rank.

    Raises:
        ValueError: a step fails, or the results differ. `refusal` has places for the optimizer's name and the reason.
    """
    name = make_optimizer.func.__name__
    for trial in trials_of(make_optimizer, groups):
        known = make_optimizer.func, unit, repr(trial)
        if known in PASSED:
            continue
        whole, (dtype, tolerance) = unsharded(trial, name)
        for n_ranks in (2, 3):
            try:
                parts = trial(n_ranks, dtype, unit)
            except Exception as failure:  # Muon needs matrices
                raise ValueError(refusal.format(name, reason_of(failure))) from failure
            for alone, shared in zip(whole, parts):
                if not torch.allclose(alone, shared, tolerance, tolerance * alone.abs().max().item(), equal_nan=True):
                    raise ValueError(refusal.format(name, "parameters differ"))
        PASSED.add(known)


def unsharded(trial, name):
    """Return the result of one rank that updates everything, in the first precision that works, and that precision."""
    for precision in PRECISIONS:
        try:
            return trial(1, precision[0], None), precision
        except Exception as failure:
            cause, reason = failure, reason_of(failure)
    shapes = ", ".join(map(str, trial.keywords["shapes"]))
    raise ValueError(f"{name} fails in a trial on tensors of {shapes}: {reason}") from cause


def trials_of(make_optimizer, groups):
    """Yield three calls of `run` for each kind of group: one on small tensors, two on large ones.

    Tensors have as many dimensions as the group's. Groups that differ only in lr are one kind: the largest is tried.
    """
    kinds = collections.defaultdict(list)
    for group in groups:
        if group["params"]:
            kinds[repr({**hyperparameters(group), "lr": None, "initial_lr": None})].append(group)
    for alike in kinds.values():
        fastest = max(alike, key=lambda group: group.get("lr") or 0)
        options, device = hyperparameters(fastest), fastest["params"][0].device
        if options.get("lr") == 0:
            options["lr"] = 0.1  # with lr 0 no difference would show
        if not math.isfinite(options.get("lr") or 0):
            raise ValueError(f"lr is {options['lr']}: it must be a finite number")
        n_dims = sorted({param.dim() for group in alike for param in group["params"]})
        small = [SMALL_SHAPES.get(n, (4, 4, *[3] * (n - 2))) for n in n_dims]
        trial = functools.partial(run, make_optimizer=make_optimizer, options=options, device=device)
        yield functools.partial(trial, shapes=(small * 3)[: max(3, len(small))], phases=PHASES)
        # 2**17 elements find rules about the number of elements, such as those of 8-bit optimizers: more than 4096 or
        # 65536, a power of two, a multiple of 256 or 2048. A third of 2**17 is no such multiple. bitsandbytes uses 8
        # bits from 4096 elements on, and halves and thirds of 6144 have fewer.
        for rows, numel in (512, 2**17), (48, 6144):
            # (rows, …) of so many dimensions: all between the first and the last are 2.
            large = [(rows, *[2] * (n - 2), max(1, numel // rows // 2**(n - 2))) for n in n_dims if n > 1] or [(numel,)]
            yield functools.partial(trial, shapes=large, phases=[(2, False, 1.0)])


@torch.no_grad()
def run(n_ranks, dtype, unit, *, make_optimizer, options, shapes, phases, device):
    """Let `n_ranks` ranks update a share each. Returns how far the values moved in each phase, (numel,) each."""
    values = torch.linspace(-1, 1, sum(map(math.prod, shapes)), dtype=dtype, device=device)
    grads = torch.zeros_like(values)
    shares = [shares_of(flat, shapes, n_ranks, unit) for flat in (values, grads)]
    optimizers = [make_optimizer([{**copy.deepcopy(options), "params": share}]) for share in shares[0]]
    pairs = [(param, grad) for share in zip(*shares) for param, grad in zip(*share)]
    generator, moved = torch.Generator().manual_seed(0), []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), without_global_hooks():
        for n_steps, is_steady, magnitude in phases:
            before = values.clone()
            for step in range(n_steps):
                if step == 0 or not is_steady:
                    noise = torch.randn(values.shape, generator=generator, device="cpu") * magnitude
                grads.copy_(noise)  # in each step, because SGD with nesterov writes into gradients
                for param, grad in pairs:
                    param.grad = grad.detach()
                for optimizer in optimizers:
                    optimizer.step()
            moved.append(values - before)
    return moved


def shares_of(flat, shapes, n_ranks, unit):
    """Return for each rank what it updates of `flat`, (numel,), with tensors of `shapes`: whole tensors, or pieces."""
    shares, end = [[] for _ in range(n_ranks)], 0
    for number, shape in enumerate(shapes):
        begin, end = end, end + math.prod(shape)
        if unit is None:
            shares[number % n_ranks].append(flat[begin:end].view(shape).requires_grad_())
            continue
        cuts = [flat.numel() * rank // n_ranks for rank in range(1, n_ranks)]
        cuts = [end if cut >= end else begin + max(0, cut - begin) // unit * unit for cut in cuts]
        for share, start, stop in zip(shares, [begin, *cuts], [*cuts, end]):
            if start < stop:
                share.append(flat[start:stop])
    return shares
