"""The checks of each level, and what a wrong figure says about its cause.

A check is a function of the Grader: it returns lines to print, or raises Wrong. To find a cause, a wrong result is
compared with results of known mistakes: what one process computes that sums where the mean is due, and so on.
"""

import inspect
import math
from dataclasses import replace

import torch

from grade import on_ranks
from grade.grader import UNKNOWN, Wrong, shorten
from grade.on_ranks import LR, Run, in_one_process, mean

SUMMED = "the gradients are summed and not averaged: divide by the number of ranks"
TWICE_AVERAGED = "the gradients are divided by the number of ranks twice"
OWN = "each rank steps with its own gradients: not averaged over the ranks, or the average went into a copy"
NOT_RECEIVED = "what was received did not reach the parameters: torch.cat copies, and so may flatten() and reshape()"
KEPT = "gradients of the step before are added again: zero_grad() must forget them"
DEFAULTS = "lr and weight_decay of the constructor do not reach the inner optimizer"
FORGETS = "the optimizer's state is new in each step: make the inner optimizer once, in the constructor"


# ------------------------------------------------------------------------------------------------------------- level 1


def interface(grader):
    cls = grader.cls
    if cls is None:
        raise Wrong("a class DistributedOptimizer, or a core's ShardedOptimizer",
                    f"neither is in {grader.package}, nor in {grader.package}.optimizer",
                    "docs/exercise.md has a skeleton of the class")
    missing = [f"{name}()" for name in ("step", "zero_grad") if not callable(getattr(cls, name, None))]
    if missing:
        raise Wrong("methods step() and zero_grad()", f"{cls.__name__} has no {' and no '.join(missing)}",
                    "docs/exercise.md lists the methods that each level asks for")
    try:
        inspect.signature(cls).bind([], torch.optim.SGD, process_group=None, lr=LR)
    except TypeError as error:
        raise Wrong(f"{cls.__name__}(params, optimizer_cls, *, process_group=None, **optimizer_kwargs)",
                    f"{cls.__name__}{inspect.signature(cls)}: {error}",
                    "docs/exercise.md has the constructor's arguments") from None


def by_hand(grader, world_size):
    """The mean of the gradients 1 … d is (d + 1) / 2, and SGD moves each element by lr times that."""
    due = (world_size + 1) / 2
    start = torch.arange(16.0)
    moved = [(start - came) / LR for came in grader.run(world_size, on_ranks.by_hand)]  # in units of the gradient
    if all(torch.allclose(value, torch.full((16,), due), rtol=1e-3) for value in moved):
        return
    sums = " + ".join(map(str, range(1, world_size + 1)))
    mean_gradient = f"({sums}) / {world_size}"
    expected = f"every element moves by lr × mean gradient, {LR} · {mean_gradient} = {LR * due:g}, on every rank"
    stays = [value.abs() < 1e-6 for value in moved]
    if all(stay.all() for stay in stays):
        raise Wrong(expected, "nothing has moved, on any rank",
                    "step() changes nothing in the model: does the inner optimizer own parameters, with gradients?")
    steps = [value[~stay] for value, stay in zip(moved, stays)]  # of what has moved
    factors = [(world_size, f"{world_size} times as far", SUMMED),
               (1 / world_size, f"1/{world_size} as far", TWICE_AVERAGED),
               (1e-3 / LR, "torch's default lr times the mean gradient", DEFAULTS)]
    for factor, words, cause in factors:
        if all(torch.allclose(step, torch.full_like(step, factor * due), rtol=1e-3) for step in steps):
            raise Wrong(expected, f"{LR * factor * due:.3g} wherever it has moved: {words}", cause)
    own = torch.arange(1.0, world_size + 1)
    is_right = [torch.allclose(step, torch.full_like(step, due), rtol=1e-3) for step in steps]
    if not all(is_right) and all(torch.isclose(step[:, None], own, rtol=1e-3).any(dim=1).all() for step in steps):
        raise Wrong(expected, figures(steps), OWN)
    is_owned = sum((~stay).int() for stay in stays) > 0  # somebody has stepped it
    if not is_owned.all():
        raise Wrong(expected, f"elements {spans(~is_owned)} have moved on no rank",
                    "nobody owns these parameters, or their gradients have not arrived")
    if any(stay.any() for stay in stays):
        some = [f"elements {spans(stay)} on rank {rank}" for rank, stay in enumerate(stays) if stay.any()]
        raise Wrong(expected, f"not moved: {', '.join(some)}; elsewhere they have", NOT_RECEIVED)
    raise Wrong(expected, figures(steps))


def figures(steps):
    """-> "rank 0: 0.1, 0.2; rank 1: 0.1", of what elements have moved by in units of the gradient."""
    rounded = [sorted({f"{LR * value:.3g}" for value in step.tolist()}) for step in steps]
    return shorten("moved by " + "; ".join(f"rank {rank}: {', '.join(values)}" for rank, values in enumerate(rounded)))


def spans(mask):
    """Which elements of a (n,) mask are set -> "0-3, 8"."""
    indices = mask.nonzero().flatten().tolist()
    starts = [i for i in indices if i - 1 not in indices]
    stops = [i for i in indices if i + 1 not in indices]
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, stops))


def constructor(grader):
    values = grader.run(2, on_ranks.constructed)
    for rank, value in enumerate(values):
        if value.any():
            raise Wrong("the constructor gives every rank the parameters of rank 0: here 0 everywhere",
                        f"elements {spans(value != 0)} of rank {rank} are {value.unique().tolist()[-1]:g}",
                        "parameters are broadcast from rank 0 in the constructor, each in place: " +
                        ("none was" if value.all() else "some were not"))


def equals_one_process(grader, world_size, run, mistakes=(), otherwise=UNKNOWN):
    """Every parameter after every step, on every rank: the same on all, and as in one process with the data of all.

    mistakes: (cause, Run, arguments of in_one_process): what is computed by who makes it. otherwise: the cause then.
    """
    answers = grader.run(world_size, on_ranks.train, run)
    ranks = [snapshots for snapshots, _, _ in answers]
    reference, norms = in_one_process(run, world_size)
    check_norms(answers, norms, run, world_size)

    def likely():
        for cause, other_run, arguments in mistakes:
            wrong, _ = in_one_process(other_run, world_size, **arguments)
            if all(map(close, ranks[0], wrong)):
                return cause
        return otherwise

    for step in range(len(reference)):
        after = f"after step {run.steps - len(reference) + step + 1}"
        for rank in range(1, world_size):
            if not torch.equal(ranks[rank][step], ranks[0][step]):
                raise Wrong("all ranks have the same parameters after every step",
                            f"{after}, {difference(ranks[rank][step], ranks[0][step])}"
                            f" between rank 0 and rank {rank}", differs_by_rank(ranks, step, run, world_size))
        if not close(ranks[0][step], reference[step]):
            raise Wrong(f"{world_size} ranks train like one process that has the batches of all",
                        f"{after}, {difference(ranks[0][step], reference[step])} from one process",
                        likely())
    if run.no_sync and answers[0][2]:
        raise Wrong("no communication inside no_sync()", f"{answers[0][2]} collectives in {run.steps} steps",
                    "gradients must stay on their rank until a backward pass outside of it, or step()")


def differs_by_rank(ranks, step, run, world_size):
    """-> the likely cause, when ranks differ from each other after `step`."""
    own = [snapshots for snapshots, _ in with_own_gradients(run, world_size)]
    if all(close(ranks[rank][step], own[rank][step]) for rank in range(world_size)):
        return OWN
    if step and any((snapshots[step] == snapshots[step - 1]).any() for snapshots in ranks):
        return NOT_RECEIVED
    return "not every rank receives what its owner has stepped"


def with_own_gradients(run, world_size):
    """-> what in_one_process returns, of each rank by itself."""
    return [in_one_process(run, world_size, combine=lambda grads, rank=rank: grads[rank]) for rank in range(world_size)]


def close(a, b):
    """Over three ranks and more the order of a sum is the layout's: equal up to rounding."""
    return torch.allclose(a, b, rtol=1e-4, atol=2e-6)


def difference(came, expected):
    """-> "2.weight, 2.bias differ by up to 0.12", of two (numel,)."""
    names, numels = zip(*((name, param.numel()) for name, param in on_ranks.model_of(0).named_parameters()))
    is_equal = torch.equal if close(came, expected) else close  # two ranks may differ by the last bits, and mustn't
    differing = [name for name, a, b in zip(names, came.split(numels), expected.split(numels)) if not is_equal(a, b)]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return f"{', '.join(differing[:3])}{more} differ by up to {(came - expected).abs().max():.2g}"


def sgd(grader, world_size):
    run = Run("SGD")
    equals_one_process(grader, world_size, run, [
        (SUMMED, run, {"combine": sum}),
        (KEPT, run, {"zeroes": False}),
        (TWICE_AVERAGED, run, {"combine": lambda grads: mean(grads) / len(grads)}),
        (DEFAULTS, replace(run, defaults=True), {}),
    ])


def adamw(grader):
    run = Run("AdamW")
    equals_one_process(grader, 2, run, [
        (DEFAULTS, replace(run, defaults=True), {}),
        (FORGETS, run, {"forgets": True}),
        ("the inner optimizer is not optimizer_cls", replace(run, optimizer="SGD"), {}),
    ])


def prefetch(grader):
    cause = "a module reads parameters that have not arrived: each must wait for its own, and step() for all"
    equals_one_process(grader, 2, Run("SGD", prefetch=True), otherwise=cause)


def state(grader, world_size):
    """Elements of AdamW's two moments. A rank may have more than 1/d by the size of the largest parameter."""
    answers = grader.run(world_size, on_ranks.state_elements)
    held = [count for count, _, _ in answers]
    _, whole, largest = answers[0]
    shares = ", ".join(f"{count / whole:.0%} on rank {rank}" for rank, count in enumerate(held))
    expected = f"AdamW's state exists once, about 1/{world_size} on each rank"
    if sum(held) > whole:
        cause = ("every rank steps every parameter: give the inner optimizer only what this rank owns"
                 if min(held) >= whole else "some parameters are stepped on several ranks")
        raise Wrong(expected, f"{sum(held) / whole:.3g} times in all: {shares}", cause)
    if sum(held) < whole:
        raise Wrong(expected, f"{sum(held) / whole:.0%} of it in all: {shares}",
                    "some parameters are stepped by an optimizer that is not a torch.optim.Optimizer, or by none")
    if max(held) > whole / world_size + largest:
        raise Wrong(expected, f"once, and not in equal parts: {shares}",
                    "share out by elements: the largest parameter first, to the rank that has least")
    return [f"state      {shares}"]


LADDER = {  # stage -> kinds of its collectives, bytes that a rank sends, in 4Ψ · (d-1)/d and on gloo
    1: ({"all_reduce", "broadcast"}, 3),
    2: ({"all_reduce", "all_gather"}, 3),
    3: ({"reduce_scatter", "all_gather"}, 3),  # with gloo a reduce-scatter sends as much as an all-reduce
    4: ({"send", "recv", "broadcast"}, 2),  # on gloo parts travel by messages, parameters by broadcasts
}


def ladder(grader):
    found = grader.run(2, on_ranks.traffic)[0]
    unit = 4 * found["numel"] / 2  # 4Ψ · (d-1)/d bytes, d = 2
    sent = found["wire_bytes"] / unit
    collectives = ", ".join(f"{count} {kind}" for kind, count in found["collectives"].items())
    if sent > 3 * 1.2:
        cause = "an all-reduce takes twice the bytes of a broadcast from the owner, or of an all-gather"
        raise Wrong("at most 3 · 4Ψ · (d-1)/d bytes sent by a rank in a step, as in stages 1 and 2",
                    f"{sent:.2f} · 4Ψ · (d-1)/d bytes, in {collectives}", cause)
    rungs = [stage for stage, (kinds, times) in LADDER.items()
             if kinds == found["large"] and times <= sent <= 1.25 * times]  # padding is sent, too
    stage = f"the collectives and bytes of stage {rungs[0]}" if rungs else "none of the four stages sends that"
    early = f"{found['during_backward'] or 'none'} of them in the backward pass"
    ideal = "; 2 where a reduce-scatter is no all-reduce, as gloo's is" if "reduce_scatter" in found["large"] else ""
    return [f"ladder     {stage}",
            f"a step     {collectives}; {early}",
            f"sent       {sent:.2f} · 4Ψ · (d-1)/d bytes a rank{ideal} (DDP alone: 2)",
            f"held       {found['live'] / found['numel']:.2f} bytes a parameter after a step (DDP with AdamW: 16)"]


# ------------------------------------------------------------------------------------------------------------- level 2

ASKED = ("clip_grad_norm_", "no_sync", "state_dict", "load_state_dict")  # of a DistributedOptimizer


def is_an_optimizer(grader):
    asked = () if grader.is_core else ASKED
    missing = [name for name in asked if not callable(getattr(grader.cls, name, None))]
    faults = [] if issubclass(grader.cls, torch.optim.Optimizer) else ["is none"]
    faults += [f"has no {', '.join(missing)}"] if missing else []
    if faults:
        raise Wrong(" with ".join(filter(None, ["a torch.optim.Optimizer", ", ".join(asked)])),
                    f"{grader.cls.__name__} {' and '.join(faults)}",
                    "docs/exercise.md has the skeleton of level 2, for schedulers, clipping, accumulation and saving")


def groups(grader):
    run = Run("AdamW", groups=True)
    equals_one_process(grader, 2, run, [
        ("every parameter is stepped with the constructor's lr and weight_decay: give the inner optimizer groups, too",
         replace(run, groups=False), {})])


def schedule(grader):
    run = Run("SGD", groups=True, schedule=True)
    equals_one_process(grader, 2, run, [
        ("the lr of a scheduler doesn't arrive: before each step copy it from param_groups to the inner optimizer's",
         replace(run, schedule=False), {})])


def accumulate(grader, no_sync=False):
    run = Run("SGD", micro_batches=3, no_sync=no_sync)
    equals_one_process(grader, 2, run, [
        ("only the last micro-batch counts: the gradients of those before were dropped", run, {"only_last": True}),
        (SUMMED, run, {"combine": sum}), (KEPT, run, {"zeroes": False})])


def no_sync(grader):
    accumulate(grader, no_sync=True)


def clip(grader):
    run = Run("SGD", max_norm=0.05)
    equals_one_process(grader, 2, run, [
        ("the norm is right, and the gradients were not scaled by max_norm / norm", replace(run, max_norm=None), {})])


def check_norms(answers, norms, run, world_size):
    """What clip_grad_norm_ has returned in the first step, on every rank, against torch's on the whole model."""
    came = [of_rank[0] for _, of_rank, _ in answers if of_rank]
    if not came or all(math.isclose(norm, norms[0], rel_tol=1e-4) for norm in came):
        return
    own = [norms[0] for _, norms in with_own_gradients(run, world_size)]
    summed = in_one_process(run, world_size, combine=sum)[1][0]
    if math.isclose(math.hypot(*came), norms[0], rel_tol=1e-4):
        cause = "each rank takes the norm of its own shard: add up the squares over the ranks, then the root"
    elif all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(came, own)):
        cause = "the norm is of this rank's own gradients: average them first"
    elif math.isclose(came[0], summed, rel_tol=1e-4):
        cause = SUMMED
    else:
        cause = UNKNOWN
    raise Wrong(f"clip_grad_norm_ returns the norm of the averaged gradients of the whole model: {norms[0]:.5f}",
                ", ".join(f"{norm:.5f} on rank {rank}" for rank, norm in enumerate(came)), cause)


def round_trip(grader):
    run = Run("AdamW", steps=4, resume=True)
    equals_one_process(grader, 2, run, [
        ("the state is lost: load_state_dict() leaves the inner optimizer as new", run, {"forgets": True})])


def of_all(cls):
    return True


def of_the_whole(cls):
    return cls.__name__ != "ShardedOptimizer"


LEVELS = {  # level -> (name, checks: (name, function, of which classes))
    1: ("It trains", [
        ("the interface", interface, of_all),
        ("16 elements by hand, 2 ranks", lambda grader: by_hand(grader, 2), of_all),
        ("16 elements by hand, 3 ranks", lambda grader: by_hand(grader, 3), of_all),
        ("all ranks start from rank 0's parameters", constructor, of_all),
        ("SGD: ranks equal each other and one process, 2 ranks", lambda grader: sgd(grader, 2), of_all),
        ("the same, 3 ranks", lambda grader: sgd(grader, 3), of_all),
        ("AdamW", adamw, of_all),
        ("prefetch_params: rank 1 is late", prefetch, lambda cls: hasattr(cls, "prefetch_params")),
        ("the state is spread over 2 ranks", lambda grader: state(grader, 2), of_all),
        ("the state is spread over 3 ranks", lambda grader: state(grader, 3), of_all),
        ("collectives and bytes", ladder, of_all),
    ]),
    2: ("It is an optimizer", [
        ("its methods", is_an_optimizer, of_all),
        ("two groups, with their own lr and weight decay", groups, of_all),
        ("a scheduler of torch", schedule, of_all),
        ("three micro-batches equal one large batch", accumulate, of_all),
        ("the same, inside no_sync()", no_sync, of_the_whole),
        ("clip_grad_norm_ equals torch's on the whole model", clip, of_the_whole),
        ("state_dict() and load_state_dict() go on where they left off", round_trip, of_the_whole),
    ]),
}
