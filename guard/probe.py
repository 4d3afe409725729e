"""Refuses optimizer classes that would update the parts of a model differently from the whole model.

In this project's distributed optimizers each rank updates a *share* of the model's tensors by an optimizer class such
as torch's AdamW. In stages 1 and 2 (two of the four versions) a share has whole tensors. In stages 3 and 4 it has flat
pieces of tensors, which are views of one flat memory. Classes that can't work so:

- Lamb and Muon are not element-wise: they update a piece of a tensor differently.
- Prodigy computes with all tensors together: it updates the tensors of one rank differently.
- A user's own class may replace the parameter groups, or keep a gradient whose memory a stage overwrites.

A trial finds these classes before anything is changed. On tensors of its own it steps the class as the ranks of a stage
would do. Then it steps the class on whole, plain tensors, and compares the results. Shown by tests/stages/test_probe.py
and tests/stages/test_own_classes.py.
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

# (number of steps, whether all these steps have the same gradient, magnitude of gradients). Differences accumulate over
# steps with the same gradient. Large gradients show that a class clips. The later phases show rules that hold only from
# some step on.
PHASES = [(20, True, 1.0), (4, False, 1e-3), (4, False, 1.0), (4, False, 1e3)]
# (dtype of the trial, tolerance relative to how far values move). A class that can't update fp64 is tried in fp32.
PRECISIONS = [(torch.float64, 1e-6), (torch.float32, 1e-3)]
SMALL_SHAPES = {0: (), 1: (9,), 2: (8, 8)}  # number of dimensions -> shape; for more dimensions see small_shape()
# Key of each trial that has passed in this process -> whether the class left gradients. `check` adds them, so that a
# program with many optimizers waits for one trial only.
PASSED: dict[tuple, bool] = {}


class Trial(NamedTuple):
    """What a trial steps."""
    options: dict  # the hyperparameters of the only parameter group
    device: torch.device
    shapes: list  # shapes of the tensors
    phases: list  # tuples like those of PHASES


class Outcome(NamedTuple):
    """What a trial has shown."""
    moved: list  # for each phase by how much each value has changed, (numel,)
    leaves_grads: bool  # whether a gradient is left after the last step, because a class may call zero_grad() in step()


def check_elementwise(make_optimizer, groups, unit=1, make_plain=None):
    """Refuse, for stages 3 and 4, an optimizer class that updates pieces differently from whole tensors; see `check`.

    unit: pieces start at multiples of this number of elements in a tensor, as in variants/blocks.py.
    """
    refusal = "{} is not element-wise, shards would differ: stage 2 or variants/muon.py ({})"
    return check(make_optimizer, groups, unit, are_views=True, refusal=refusal, make_plain=make_plain)


def check_one_by_one(make_optimizer, groups, are_views=False, make_plain=None):
    """Refuse, for stages 1 and 2, an optimizer class that updates a tensor differently beside others; see `check`."""
    refusal = "{} doesn't step tensors one by one: a rank's would step differently ({})"
    return check(make_optimizer, groups, None, are_views, refusal, make_plain)


def check(make_optimizer, groups, unit, are_views, refusal, make_plain=None):
    """Try, for each kind of parameter group, whether several ranks together get the result of a single rank.

    There are trials with two ranks and with three ranks, each of which updates a share. This process plays all ranks,
    without communication.

    Args:
        make_optimizer: functools.partial of the optimizer class with its arguments. Called with groups, it makes the
            optimizer of a share.
        groups: the parameter groups of the program. Values of parameters are not read.
        unit: pieces of tensors start at multiples of this number of elements. None: a share has whole tensors.
        are_views: whether the class steps views of flat memory. All steps then find their gradients in the same memory.
        refusal: text of the error. The first {} is for the optimizer's name, the second {} for the reason.
        make_plain: like `make_optimizer`, for the single rank. None: `make_optimizer`.

    Returns whether the class leaves gradients after its step, in at least one trial.

    Raises:
        ValueError: a step fails, or the results differ.
    """
    name = make_optimizer.func.__name__
    make_plain = make_plain or make_optimizer
    check_groups(make_plain, groups)
    leaves_grads = False
    for trial in trials_of(groups):
        key = make_optimizer.func, unit, are_views, repr((make_optimizer, trial))  # repr() shows all hyperparameters
        if key not in PASSED:
            whole, dtype, tolerance = unsharded(trial, make_plain)
            for n_ranks in (2, 3):
                try:
                    shared = run(trial, make_optimizer, n_ranks, dtype, unit, are_views)
                except Exception as failure:  # Muon, for example, can't step a piece of a matrix, which is a vector
                    raise ValueError(refusal.format(name, reason_of(failure))) from failure
                if not are_alike(whole, shared, tolerance):
                    # To find the reason, let one rank step views of whole tensors (unit None, are_views True). If that
                    # differs, too, the reason is that tensors are views. Otherwise it is that they are pieces.
                    whole_views = run(trial, make_plain, 1, dtype, None, True) if are_views else whole
                    if not are_alike(whole, whole_views, tolerance):
                        raise ValueError(f"{name} steps views otherwise than parameters: keep p.grad.clone(), not "
                                         "p.grad, and don't test p.requires_grad")
                    raise ValueError(refusal.format(name, "parameters differ"))
            PASSED[key] = whole.leaves_grads
        leaves_grads = leaves_grads or PASSED[key]
    return leaves_grads


def are_alike(outcome, other, tolerance):
    """Return whether all values have changed alike in two Outcomes, in each phase."""
    # allclose() takes a relative tolerance, and an absolute tolerance, which here is a part of the largest change.
    return all(torch.allclose(moved, moved_there, tolerance, tolerance * moved.abs().max().item(), equal_nan=True)
               for moved, moved_there in zip(outcome.moved, other.moved))


def check_groups(make_optimizer, groups):
    """Refuse a class whose constructor replaces its parameters or groups.

    Schedulers, clipping and saving read and write the groups that the constructor was given.
    """
    own_groups = []
    for group in groups:
        params = [torch.zeros(small_shape(param.dim()), dtype=param.dtype, device=param.device)
                  for param in group["params"][:2]]  # two parameters of a group are enough to see a replacement
        own_groups.append({**copy.deepcopy(hyperparameters(group)), "params": params})
    given_ids = [list(map(id, group["params"])) for group in own_groups]
    made_ids = [list(map(id, group["params"])) for group in make_optimizer(own_groups).param_groups]
    if made_ids != given_ids:
        raise ValueError(f"{make_optimizer.func.__name__} replaces param_groups, or parameters in them, in its "
                         "constructor")


def small_shape(n_dims):
    """Return a shape of few elements. With three or more dimensions it is (4, 4, 3, 3, …)."""
    return SMALL_SHAPES.get(n_dims, (4, 4, *[3] * (n_dims - 2)))


def large_shape(n_dims, n_rows, numel):
    """Return a shape of `numel` elements: (n_rows, 2, 2, …, number of columns)."""
    twos = [2] * (n_dims - 2)
    return n_rows, *twos, max(1, numel // n_rows // 2 ** len(twos))


def unsharded(trial, make_optimizer):
    """Let one rank update whole, plain tensors. Return (Outcome, dtype, tolerance) of the first precision that works.

    Raises ValueError: the class can't update tensors of either dtype.
    """
    for dtype, tolerance in PRECISIONS:
        try:  # 1 rank, unit None, are_views False
            return run(trial, make_optimizer, 1, dtype, None, False), dtype, tolerance
        except Exception as failure:
            cause = failure  # a second name, because Python deletes `failure` at the end of this block
            reason = reason_of(failure)
    shapes = ", ".join(map(str, trial.shapes))
    raise ValueError(f"{make_optimizer.func.__name__} fails in a trial on tensors of {shapes}: {reason}") from cause


def trials_of(groups):
    """Yield three Trials for each kind of group: one Trial of small tensors, and two Trials of large tensors.

    The tensors of a Trial have as many dimensions as the tensors of the groups. Groups that differ only in lr are of
    one kind, which is tried with the largest lr.
    """
    kinds = collections.defaultdict(list)  # text of the hyperparameters without lr -> groups that have these
    for group in groups:
        if group["params"]:
            kinds[repr({**hyperparameters(group), "lr": None, "initial_lr": None})].append(group)
    for alike in kinds.values():  # groups of one kind
        fastest = max(alike, key=lambda group: group.get("lr") or 0)
        options = hyperparameters(fastest)
        device = fastest["params"][0].device
        if options.get("lr") == 0:
            options["lr"] = 0.1  # with lr 0 no difference would show
        if not math.isfinite(options.get("lr") or 0):
            raise ValueError(f"lr is {options['lr']}: it must be a finite number")
        n_dims = sorted({param.dim() for group in alike for param in group["params"]})
        small_shapes = [small_shape(n) for n in n_dims]
        # The shapes are repeated, so that each of three ranks has a tensor.
        n_tensors = max(3, len(small_shapes))
        yield Trial(options, device, (small_shapes * 3)[:n_tensors], PHASES)
        # 8-bit optimizers use 8 bits only for some numbers of elements: more than 4096 or 65536, a power of two, or a
        # multiple of 256 or 2048. 2**17 elements meet each of these rules, and a third of them is no such multiple.
        # bitsandbytes uses 8 bits from 4096 elements on: for 6144 elements, but not for a half or a third of them.
        # The matrices have 512 rows of 256 columns, and 48 rows of 128 columns.
        for n_rows, numel in (512, 2**17), (48, 6144):
            shapes = [large_shape(n, n_rows, numel) for n in n_dims if n > 1]
            yield Trial(options, device, shapes or [(numel,)], phases=[(2, False, 1.0)])


@torch.no_grad()
def run(trial, make_optimizer, n_ranks, dtype, unit, are_views):
    """Let `n_ranks` ranks, which this process plays, update a share each, with an optimizer each. Returns an Outcome.

    dtype: the dtype of all tensors. unit, are_views: see `check`.
    """
    options, device, shapes, phases = trial
    values = torch.linspace(-1, 1, sum(map(math.prod, shapes)), dtype=dtype, device=device)  # of all tensors, flat
    grads = torch.zeros_like(values)  # the gradients of all tensors, flat
    shares = shares_of(values, shapes, n_ranks, unit)  # for each rank the parameters that it updates
    places = list(itertools.chain(*shares))  # for each parameter its place, a view of `values`
    if not are_views:  # then a parameter isn't its place, but a copy
        shares = [[place.clone().requires_grad_() for place in share] for share in shares]
    params = list(itertools.chain(*shares))
    # For each parameter its gradient, a view of `grads`.
    grad_views = list(itertools.chain(*shares_of(grads, shapes, n_ranks, unit)))
    optimizers = [make_optimizer([{**copy.deepcopy(options), "params": list(share)}]) for share in shares]
    for param, view in zip(params, grad_views):
        param.grad = view
    # As in stages 3 and 4, take_back() makes all tensors views again if a step has put others in their place.
    inner_tensors = InnerTensors(params)
    generator = torch.Generator().manual_seed(0)
    moved = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), without_global_hooks():
        for n_steps, is_steady, magnitude in phases:
            before = values.clone()
            for step in range(n_steps):
                if step == 0 or not is_steady:
                    noise = torch.randn(values.shape, generator=generator, device="cpu") * magnitude
                grads.copy_(noise)  # in each step, because a class may write into gradients, as SGD with nesterov does
                if not are_views:
                    for param, view in zip(params, grad_views):
                        param.grad = view.clone()
                for optimizer in optimizers:
                    optimizer.step()
                if are_views:
                    inner_tensors.take_back()
            for place, param in zip(places, params):
                place.copy_(param)  # changes nothing if `param` is its place
            moved.append(values - before)
    leaves_grads = any(param.grad is not None and bool(param.grad.any()) for param in params)
    return Outcome(moved, leaves_grads)


def shares_of(flat, shapes, n_ranks, unit):
    """Return for each rank its share: a list of views of `flat`, which are whole tensors or flat pieces.

    flat: (numel,), the elements of all tensors, one tensor after the other. shapes: of these tensors.
    unit: pieces start at multiples of this number of elements in a tensor. None: each rank in turn gets a whole tensor.
    """
    shares = [[] for _ in range(n_ranks)]
    end = 0
    for number, shape in enumerate(shapes):
        begin = end  # this tensor lies at begin:end of `flat`
        end = begin + math.prod(shape)
        if unit is None:
            shares[number % n_ranks].append(flat[begin:end].view(shape))
            continue
        cuts = [begin]  # for each rank, where its piece of this tensor begins
        for rank in range(1, n_ranks):
            # Ranks would get equal parts of `flat`, but a cut inside a tensor is moved back to a multiple of the unit.
            cut = flat.numel() * rank // n_ranks
            cut_at_unit = begin + max(0, cut - begin) // unit * unit
            cuts.append(end if cut >= end else cut_at_unit)
        for share, start, stop in zip(shares, cuts, [*cuts[1:], end]):
            if start < stop:  # a rank may have no piece of this tensor
                share.append(flat[start:stop])
    return shares
