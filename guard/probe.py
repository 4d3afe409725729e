"""Refuses optimizers that would update shards differently from whole tensors.

Some optimizers are not element-wise, such as Lamb and Muon. Others compute with all tensors together, such as Prodigy,
so that the part of the tensors that one rank has would get another update. A class of a user's own may keep a gradient
that a stage overwrites before the next step, or may have groups of its own. A trial finds such classes before anything
is changed: on tensors of its own it builds and steps the class as a stage does, and once more on whole, plain tensors.
Shown by tests/stages/test_probe.py and tests/stages/test_own_classes.py.

A *share* is what one rank updates: in stages 1 and 2 whole tensors, in stages 3 and 4 flat pieces of tensors.
"""

import collections
import copy
import itertools
import math
from typing import NamedTuple

import torch

from .groups import InnerTensors, hyperparameters
from .hooks import without_global_hooks
from .schema import reason_of

# (number of steps, whether all steps have the same gradient, its magnitude). Steady gradients show differences that
# accumulate over steps, large gradients show clipping, and the last phases show rules that count steps.
PHASES = [(20, True, 1.0), (4, False, 1e-3), (4, False, 1.0), (4, False, 1e3)]
# (dtype, tolerance relative to how far a tensor moves). An optimizer that can't update fp64 is tried in fp32.
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-3)]
SMALL_SHAPES = {0: (), 1: (9,), 2: (8, 8)}  # number of dimensions -> shape; for more dimensions see small_shape()
# A trial that has passed in this process -> whether it left gradients. A program with many optimizers then waits once.
PASSED: dict[tuple, bool] = {}


class Trial(NamedTuple):
    options: dict  # hyperparameters
    device: torch.device
    shapes: list  # of the tensors
    phases: list  # such as PHASES


class Outcome(NamedTuple):
    moved: list  # for each phase the change of all values, (numel,)
    leaves_grads: bool  # whether any gradient is there after the last step: a class may end its step with zero_grad()


def check_elementwise(make_optimizer, groups, unit=1, make_plain=None):
    """Refuse, for stages 3 and 4, an optimizer that updates shards differently from whole tensors; see `check`.

    unit: shards start at multiples of this number of elements in a tensor, as in variants/blocks.py.
    """
    refusal = "{} is not element-wise, shards would differ: stage 2 or variants/muon.py ({})"
    return check(make_optimizer, groups, unit, are_views=True, refusal=refusal, make_plain=make_plain)


def check_one_by_one(make_optimizer, groups, are_views=False, make_plain=None):
    """Refuse, for stages 1 and 2, an optimizer that updates tensors differently together than alone; see `check`."""
    refusal = "{} doesn't step tensors one by one: a rank's would step differently ({})"
    return check(make_optimizer, groups, None, are_views, refusal, make_plain)


def check(make_optimizer, groups, unit, are_views, refusal, make_plain=None):
    """Try for each kind of group whether two and three ranks that update a share each get the result of one rank.

    Args:
        make_optimizer: functools.partial of the optimizer class, which takes groups.
        unit: pieces of tensors start at multiples of this number of elements. None: a share has whole tensors.
        are_views: whether the class steps views of flat memory. All steps then find their gradients in the same memory.
        refusal: text of the error, with {} for the optimizer's name and {} for the reason.
        make_plain: makes the optimizer of the one rank, which has whole, plain tensors. None: `make_optimizer` does.

    Returns whether the class leaves gradients after its step.

    Raises:
        ValueError: a step fails, or the results differ.
    """
    name = make_optimizer.func.__name__
    make_plain = make_plain or make_optimizer
    check_groups(make_plain, groups)
    leaves_grads = False
    for trial in trials_of(groups):
        key = make_optimizer.func, unit, are_views, repr((make_optimizer, trial))  # texts show all hyperparameters
        if key not in PASSED:
            whole, dtype, tolerance = unsharded(trial, make_plain)
            for n_ranks in (2, 3):
                try:
                    shared = run(trial, make_optimizer, n_ranks, dtype, unit, are_views)
                except Exception as failure:  # Muon needs matrices
                    raise ValueError(refusal.format(name, reason_of(failure))) from failure
                if not are_alike(whole, shared, tolerance):
                    whole_views = run(trial, make_plain, 1, dtype, None, True) if are_views else whole
                    if not are_alike(whole, whole_views, tolerance):
                        raise ValueError(f"{name} steps views otherwise than parameters: keep p.grad.clone(), not "
                                         "p.grad, and don't test p.requires_grad")
                    raise ValueError(refusal.format(name, "parameters differ"))
            PASSED[key] = whole.leaves_grads
        leaves_grads = leaves_grads or PASSED[key]
    return leaves_grads


def are_alike(outcome, other, tolerance):
    """Return whether all values have moved alike in two trials, in each phase."""
    # allclose() takes a relative tolerance and an absolute one, which here is a part of the largest move.
    return all(torch.allclose(moved, moved_there, tolerance, tolerance * moved.abs().max().item(), equal_nan=True)
               for moved, moved_there in zip(outcome.moved, other.moved))


def check_groups(make_optimizer, groups):
    """Refuse a class whose constructor replaces parameters or groups: schedulers, clipping and saving need these."""
    own_groups = []
    for group in groups:
        params = [torch.zeros(small_shape(param.dim()), dtype=param.dtype, device=param.device)
                  for param in group["params"][:2]]  # two are enough
        own_groups.append({**copy.deepcopy(hyperparameters(group)), "params": params})
    given_ids = [list(map(id, group["params"])) for group in own_groups]
    made_ids = [list(map(id, group["params"])) for group in make_optimizer(own_groups).param_groups]
    if made_ids != given_ids:
        raise ValueError(f"{make_optimizer.func.__name__} replaces param_groups, or parameters in them, in its "
                         "constructor")


def small_shape(n_dims):
    """Return a shape of few elements. With three or more dimensions it is (4, 4, 3, …)."""
    return SMALL_SHAPES.get(n_dims, (4, 4, *[3] * (n_dims - 2)))


def large_shape(n_dims, n_rows, numel):
    """Return (n_rows, 2, 2, …, number of columns): a shape of `numel` elements."""
    twos = [2] * (n_dims - 2)
    return n_rows, *twos, max(1, numel // n_rows // 2 ** len(twos))


def unsharded(trial, make_optimizer):
    """Return (Outcome of one rank that updates everything, dtype, tolerance), in the first of PRECISIONS that works."""
    for dtype, tolerance in PRECISIONS:
        try:
            return run(trial, make_optimizer, 1, dtype, None, False), dtype, tolerance
        except Exception as failure:
            cause = failure
            reason = reason_of(failure)
    shapes = ", ".join(map(str, trial.shapes))
    raise ValueError(f"{make_optimizer.func.__name__} fails in a trial on tensors of {shapes}: {reason}") from cause


def trials_of(groups):
    """Yield three Trials for each kind of group: one of small tensors, two of large ones.

    Tensors have as many dimensions as the group's tensors. Groups that differ only in lr are one kind, which is tried
    with the largest lr.
    """
    kinds = collections.defaultdict(list)  # text of the hyperparameters without lr -> groups that have these
    for group in groups:
        if group["params"]:
            kinds[repr({**hyperparameters(group), "lr": None, "initial_lr": None})].append(group)
    for alike in kinds.values():
        fastest = max(alike, key=lambda group: group.get("lr") or 0)
        options = hyperparameters(fastest)
        device = fastest["params"][0].device
        if options.get("lr") == 0:
            options["lr"] = 0.1  # with lr 0 no difference would show
        if not math.isfinite(options.get("lr") or 0):
            raise ValueError(f"lr is {options['lr']}: it must be a finite number")
        n_dims = sorted({param.dim() for group in alike for param in group["params"]})
        small_shapes = [small_shape(n) for n in n_dims]
        n_tensors = max(3, len(small_shapes))  # so that each of three ranks has a tensor
        yield Trial(options, device, (small_shapes * 3)[:n_tensors], PHASES)
        # 8-bit optimizers have rules about the number of elements: more than 4096 or 65536, a power of two, a multiple
        # of 256 or 2048. 2**17 elements meet each of these rules, and a third of 2**17 is no such multiple.
        # bitsandbytes uses 8 bits from 4096 elements on: 6144 are enough, and halves and thirds of 6144 aren't.
        for n_rows, numel in (512, 2**17), (48, 6144):
            shapes = [large_shape(n, n_rows, numel) for n in n_dims if n > 1]
            yield Trial(options, device, shapes or [(numel,)], phases=[(2, False, 1.0)])


@torch.no_grad()
def run(trial, make_optimizer, n_ranks, dtype, unit, are_views):
    """Let `n_ranks` ranks update a share each, all in this process. Returns an Outcome."""
    options, device, shapes, phases = trial
    values = torch.linspace(-1, 1, sum(map(math.prod, shapes)), dtype=dtype, device=device)  # of all tensors
    grads = torch.zeros_like(values)
    shares = shares_of(values, shapes, n_ranks, unit)  # for each rank the parameters that it updates
    places = list(itertools.chain(*shares))  # for each parameter its place in `values`; with `are_views` it lies there
    if not are_views:
        shares = [[place.clone().requires_grad_() for place in share] for share in shares]
    params = list(itertools.chain(*shares))
    grad_views = list(itertools.chain(*shares_of(grads, shapes, n_ranks, unit)))  # for each parameter its gradient
    optimizers = [make_optimizer([{**copy.deepcopy(options), "params": list(share)}]) for share in shares]
    for param, view in zip(params, grad_views):
        param.grad = view
    inner_tensors = InnerTensors(params)  # gives them their memory again, as stages 3 and 4 do
    generator = torch.Generator().manual_seed(0)
    moved = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), without_global_hooks():
        for n_steps, is_steady, magnitude in phases:
            before = values.clone()
            for step in range(n_steps):
                if step == 0 or not is_steady:
                    noise = torch.randn(values.shape, generator=generator, device="cpu") * magnitude
                grads.copy_(noise)  # anew in each step, because SGD with nesterov writes into gradients
                if not are_views:
                    for param, view in zip(params, grad_views):
                        param.grad = view.clone()
                for optimizer in optimizers:
                    optimizer.step()
                if are_views:
                    inner_tensors.take_back()
            for place, param in zip(places, params):
                place.copy_(param)  # does nothing if `param` is this view
            moved.append(values - before)
    leaves_grads = any(param.grad is not None and bool(param.grad.any()) for param in params)
    return Outcome(moved, leaves_grads)


def shares_of(flat, shapes, n_ranks, unit):
    """Return for each rank the views of `flat`, (numel,), that it updates: whole tensors of `shapes`, or flat pieces.

    unit: pieces start at multiples of this number of elements in a tensor. None: whole tensors, dealt in turn.
    """
    shares = [[] for _ in range(n_ranks)]
    end = 0
    for number, shape in enumerate(shapes):
        begin = end  # a tensor lies at begin:end of `flat`
        end = begin + math.prod(shape)
        if unit is None:
            shares[number % n_ranks].append(flat[begin:end].view(shape))
            continue
        cuts = [begin]  # for each rank, where its piece of this tensor begins
        for rank in range(1, n_ranks):
            cut = flat.numel() * rank // n_ranks  # ranks get equal parts of `flat`, but for the units
            cut_at_unit = begin + max(0, cut - begin) // unit * unit
            cuts.append(end if cut >= end else cut_at_unit)
        for share, start, stop in zip(shares, cuts, [*cuts[1:], end]):
            if start < stop:  # a rank may have no piece of this tensor
                share.append(flat[start:stop])
    return shares
