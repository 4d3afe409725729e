"""The checks of each level: what runs on ranks, and what a wrong figure says about its cause.

A check is a function of the Grader: it returns lines to print, or raises Wrong. To find a cause, a wrong result is
compared with results of known mistakes: what one process computes that sums where the mean is due, and so on.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn

from grade import on_ranks
from grade.by_hand import (
    ALMOST,
    DEFAULTS,
    NOT_RECEIVED,
    OWN,
    SUMMED,
    TWICE_AVERAGED,
    ByHand,
    Constructed,
    explain,
    spans,
)
from grade.grader import UNKNOWN, NotRun, Wrong, shorten, shown
from grade.on_ranks import Run, in_one_process, mean, play

NO_GROUPS = "every parameter is stepped with the constructor's lr and weight_decay: the inner optimizer needs groups"
EMPTY = "fewer parameters than ranks here: a rank that owns nothing takes part in every collective"
LATE = "a module reads parameters that have not arrived: each must wait for its own, and step() for all"


# ------------------------------------------------------------------------------------------------------------- level 1


def interface(grader):
    facts = grader.facts
    missing = [f"{name}()" for name in ("step", "zero_grad") if name in facts.missing]
    for is_wrong, *lines in [
            (not facts.name, "a class DistributedOptimizer, or a core's ShardedOptimizer",
             f"neither is in {grader.package}, nor in {grader.package}.optimizer",
             "docs/exercise.md has a skeleton of the class"),
            (facts.kind != "class", f"{facts.name} is a class", f"its type is {facts.kind}",
             "docs/exercise.md has a skeleton"),
            (missing, "methods step() and zero_grad()", f"{facts.name} has no {' and no '.join(missing)}",
             "docs/exercise.md lists the methods that each level asks for"),
            (facts.refusal, f"{facts.name}(params, optimizer_cls, *, process_group=None, **optimizer_kwargs)",
             shorten(facts.name + facts.refusal), "docs/exercise.md has the constructor's arguments")]:
        if is_wrong:
            raise NotRun(*lines)


def ranges(grader):
    """Of stage 3's buffer, before anything is built on it. In the last case a parameter ends where the shard begins."""
    cases = {((3, 5, 2), (0, 4, 12), 0, 8): [(0, 0, 3, 0), (1, 0, 4, 4)],
             ((3, 5, 2), (0, 4, 12), 8, 16): [(1, 4, 5, 0), (2, 0, 2, 4)],
             ((20,), (0,), 8, 16): [(0, 8, 16, 0)],
             ((8, 8, 8), (0, 8, 16), 8, 16): [(1, 0, 8, 0)]}
    answers = grader.run(2, on_ranks.ranges, tuple(cases))[0]
    for ((numels, starts, first, stop), due), came in zip(cases.items(), answers):
        if came != due:
            raise Wrong(f"of {', '.join(map(str, numels))} elements at {', '.join(map(str, starts))}, in shard {first} "
                        f"to {stop}: (index, start, stop, offset) = {', '.join(map(str, due))}",
                        shorten(", ".join(map(str, came)) or "no range"),
                        "start and stop count from the parameter's first element, offset from the shard's")


def by_hand(world_size, hint=None, **case):
    """-> a check."""
    def check(grader, **more):
        one = ByHand(**case, **more)
        with shown(one, world_size):
            explain(one, grader.run(world_size, play, one, hint=hint), "finish_param_sync" not in grader.facts.missing)
    return check


def of_16_bits(grader):
    """All figures are exact in bfloat16. Where gradients may be kept in fp32, that is another way through the code."""
    in_16 = by_hand(2, dtype=torch.bfloat16, lr=1.0)
    in_16(grader)
    if "grad_dtype" in grader.facts.arguments:
        in_16(grader, options=(("grad_dtype", torch.float32),))


def constructor(grader):
    expected = "the constructor gives every rank the parameters of rank 0: here 0 everywhere"
    built, stepped = zip(*(one.snapshots for one in grader.run(2, play, Constructed())))
    for rank, value in enumerate(built):
        if value.any():
            raise Wrong(expected, f"elements {spans(value != 0)} of rank {rank} are {value[value != 0][0].item():g}",
                        "parameters are broadcast from rank 0 in the constructor, each in place: " +
                        ("none was" if value.all() else "some were not"))
    for rank, value in enumerate(stepped):
        if value.any():
            raise Wrong(expected, f"so it is; but a step with gradients of 0 makes elements {spans(value != 0)} of "
                        f"rank {rank} {value[value != 0][0].item():g}",
                        "what the inner optimizer steps was copied before the broadcast")


def trains(world_size, otherwise=UNKNOWN, **settings):
    """-> a check: every parameter after every step is the same on all ranks, and as in one process with all data.

    otherwise: the cause where no known mistake computes the same.
    """
    run = Run(**settings)

    def check(grader):
        answers = grader.run(world_size, play, run)
        with shown(run, world_size):
            reference, norms = in_one_process(run, world_size)
            check_norms([one.norms[0] for one in answers if one.norms], norms, run, world_size)
            check_values([one.snapshots for one in answers], reference, run, otherwise)
            if answers[0].in_no_sync:
                raise Wrong("no communication inside no_sync()",
                            f"{answers[0].in_no_sync} collectives in {run.steps} steps",
                            "gradients must stay on their rank until a backward pass outside of it, or step()")
    return check


def check_values(ranks, reference, run, otherwise):
    """Of `ranks` the snapshots of each, beside one process's."""
    first, world_size = ranks[0], len(ranks)
    for step in range(1, len(reference)):
        number = run.steps if run.prefetch else step
        for rank, its in enumerate(ranks):
            if not torch.equal(its[step], first[step]):
                raise Wrong("all ranks have the same parameters after every step",
                            f"after step {number}, {difference(its[step], first[step])} between rank 0 and rank {rank}",
                            differs_by_rank(ranks, step, run), number)
        if not close(first[step], reference[step]):
            came, cause = (run.groups and step == 1 and wrong_hyperparameters(first[step], run, world_size)) or (
                f"{difference(first[step], reference[step])} from one process",
                likely(first, reference, run, world_size) or otherwise)
            raise Wrong(f"{world_size} ranks train like one process that has the batches of all",
                        f"after step {number}, {came}", cause, number)


def mistakes(run):
    """Known ones -> (cause, whether `run` can show it, what is another run then, arguments of in_one_process)."""
    n = run.micro_batches

    def values(param):
        return param.detach().clone()

    return [
        ("the lr of a scheduler doesn't arrive: before each step copy it from param_groups to the inner optimizer's",
         run.schedule, {}, {"hyper": lambda now, start: start}),
        ("the scheduler's lr arrives, its betas don't: hand on all that param_groups holds, and not lr alone",
         run.schedule, {}, {"hyper": lambda now, start: [{**old, "lr": new["lr"]} for old, new in zip(start, now)]}),
        (NO_GROUPS, run.groups, {"groups": False}, {}),
        ("only the last micro-batch counts: the gradients of those before were dropped",
         n > 1, {}, {"weights": [0] * (n - 1) + [1]}),
        ("only the first micro-batch counts", n > 1, {}, {"weights": [1] + [0] * (n - 1)}),
        ("micro-batches that were averaged are sent again with the next one",
         n > 1, {}, {"weights": list(range(n, 0, -1))}),
        ("micro-batches are averaged: their gradients add up, as in torch", n > 1, {}, {"weights": [1 / n] * n}),
        ("the norm is right, and the gradients were not scaled by max_norm / norm",
         run.max_norms, {"max_norms": ()}, {}),
        ("gradients are scaled also where their norm is below max_norm: the factor is at most 1",
         run.max_norms, {}, {"always": True}),
        ("the state is lost: load_state_dict() leaves the inner optimizer as new", run.resume, {}, {"forgets": True}),
        ("the lr of a scheduler is lost: state_dict() has the groups' hyperparameters, too",
         run.resume, {}, {"restarts": "start"}),
        ("the lr that is loaded is that of the last step: a scheduler has changed the outer groups since",
         run.resume, {}, {"restarts": "step"}),
        ("state and lr are lost: load_state_dict() leaves both as new",
         run.resume, {}, {"restarts": "start", "forgets": True}),
        (SUMMED, True, {}, {"combine": sum}),
        (TWICE_AVERAGED, True, {}, {"combine": lambda grads: mean(grads) / len(grads)}),
        ("gradients of the step before are added again: zero_grad() must forget them",
         True, {}, {"kept": lambda param: param.grad}),
        ("parameters were taken for gradients: new gradients miss the buffer, which zero_grad() should have zeroed",
         True, {}, {"kept": values, "misses": True}),
        ("gradients were added to parameters: the buffer must be zeroed when these have been copied out",
         True, {}, {"kept": values}),
        (DEFAULTS, True, {"defaults": True}, {}),
        ("the optimizer's state is new in each step: make the inner optimizer once, in the constructor",
         run.optimizer != "SGD", {}, {"forgets": True}),
        ("the inner optimizer is not optimizer_cls", run.optimizer != "SGD", {"optimizer": "SGD"}, {}),
    ]


def likely(came, reference, run, world_size):
    """-> the cause, where one process that makes a known mistake gets what `came`; "" otherwise.

    came, reference: snapshots after each step, of which one differs.
    """
    for cause, is_possible, other, arguments in mistakes(run):
        if is_possible and all(map(close, came, in_one_process(replace(run, **other), world_size, **arguments)[0])):
            return cause
    first_wrong = next(step for step, due in enumerate(reference) if not close(came[step], due))
    own = torch.stack([snapshots[1] for snapshots, _ in with_own_gradients(run, world_size)])
    if first_wrong == 1 and torch.isclose(own, came[1], rtol=1e-4, atol=2e-6).any(dim=0).all():  # that of its owner
        return OWN
    before, due = reference[first_wrong - 1 : first_wrong + 1]
    is_near = (came[first_wrong] - due).abs().max() < 0.01 * (due - before).abs().max()
    return ALMOST if is_near and not run.prefetch else ""


def wrong_hyperparameters(came, run, world_size):
    """-> (which parameters were stepped with whose hyperparameters, the cause) after the first step; None if unknown.

    That step is done here with every group's lr and every group's weight decay, and compared parameter by parameter.
    """
    model = run.model(0)
    names, numels = zip(*((name, param.numel()) for name, param in model.named_parameters()))
    words = {"own": "its own", "constructor": "the constructor's",
             **{index: f"group {index}'s" for index, _ in enumerate(run.params(model))}, "no": "no"}
    how_stepped = [None] * len(names)  # of each parameter: (whose lr, whose weight decay)
    for whose in itertools.product([*words][:-1], words):
        def hyper(now, start):
            sources = {"constructor": run.settings()[1], "no": {"weight_decay": 0}, **dict(enumerate(start))}
            chosen = list(zip(("lr", "weight_decay"), whose))
            return [{**own, **{key: sources.get(source, own)[key] for key, source in chosen}} for own in now]
        values = in_one_process(replace(run, steps=1), world_size, hyper=hyper)[0][1]
        how_stepped = [how or (whose if close(*both) else None)
                       for how, *both in zip(how_stepped, values.split(numels), came.split(numels))]
    if None in how_stepped:
        return None
    wrong = {name: how for name, how in zip(names, how_stepped) if how != ("own", "own")}
    lr_of, decay_of = next(iter(wrong.values()))
    alike = [name for name, how in wrong.items() if how == (lr_of, decay_of)]
    said = (f"{', '.join(alike[:2])}{' …' * (len(alike) > 2)} moved with {words[lr_of]} lr and {words[decay_of]} "
            "weight decay")
    if set(wrong.values()) == {("constructor", "constructor")}:
        return said, NO_GROUPS
    lrs = {lr_of for lr_of, _ in wrong.values()}
    if lrs == {"own"}:
        return said, "the weight decay of a group is lost: hand on everything that a group holds, and not lr alone"
    if lrs <= {"own", 0}:
        return said, "the first group's lr is taken for all: copy each group's own"
    return said, "groups are paired wrongly: a rank that owns nothing of a group still needs that group, empty"


def differs_by_rank(ranks, step, run):
    """-> the likely cause, when ranks differ from each other after `step`."""
    own = [snapshots[step] for snapshots, _ in with_own_gradients(run, len(ranks))]
    if all(map(close, [its[step] for its in ranks], own)):
        return OWN
    stays = any((its[step] == its[step - 1]).any() for its in ranks)
    return NOT_RECEIVED if stays else "not every rank receives what its owner has stepped"


def with_own_gradients(run, world_size):
    """-> what in_one_process returns, of each rank by itself."""
    return [in_one_process(run, world_size, combine=lambda grads, rank=rank: grads[rank]) for rank in range(world_size)]


def close(a, b):
    """Over three ranks and more the order of a sum is the layout's: equal up to rounding."""
    return torch.allclose(a, b, rtol=1e-4, atol=2e-6)


def difference(came, expected):
    """-> "2.weight, 2.bias differ by up to 0.12", of two (numel,)."""
    names, numels = zip(*((name, param.numel()) for name, param in Run().model(0).named_parameters()))
    is_equal = torch.equal if close(came, expected) else close  # two ranks may differ by the last bits, and mustn't
    differing = [name for name, a, b in zip(names, came.split(numels), expected.split(numels)) if not is_equal(a, b)]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return f"{', '.join(differing[:3])}{more} differ by up to {(came - expected).abs().max():.2g}"


@dataclass(frozen=True)
class Layers(Run):
    """Eight layers, whose state and traffic are counted."""

    optimizer: str = "AdamW"
    steps: int = 2
    n_layers: int = 8
    counts, frees = True, False

    def model(self, seed):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(self.n_layers)))

    def loss(self, model, number, rank):
        return model(torch.ones(2, 64)).sum()


NUMEL, LARGEST = 8 * 65 * 64, 64 * 64


def state(grader, world_size):
    """Elements of AdamW's two moments: a rank may have more than 1/d by the largest parameter. Padding has zeros."""
    (held, padding), whole = zip(*(one.state for one in grader.run(world_size, play, Layers()))), 2 * NUMEL
    more, padding = sum(held) - whole, sum(padding)
    shares = ", ".join(f"{n / whole:.0%} on rank {rank}" for rank, n in enumerate(held))
    for is_wrong, came, cause in [
            (more > 0, f"{more} of its {whole} elements more than once: {shares}",
             "every rank steps every parameter: give the inner optimizer only what this rank owns"
             if min(held) >= whole else "some parameters are stepped on several ranks, or padding isn't zero"),
            (more < 0, f"{-more} of its {whole} elements on no rank: {shares}",
             "some parameters are stepped by an optimizer that is not a torch.optim.Optimizer, or by none"),
            (padding > 0.1 * whole, f"{1 + padding / whole:.3g} times, with padding: {padding} elements of zeros",
             "pad a shard by less: to a multiple of d, or of 64 bytes")]:
        if is_wrong:
            raise Wrong(f"AdamW's state exists once, about 1/{world_size} on each rank", came, cause)
    is_uneven = max(held) > whole / world_size + 2 * LARGEST
    return [f"state      {shares}", *["unequal    sharing out by elements saves more: the largest parameter first, to "
                                      "who has least"] * is_uneven]


LADDER = {  # stage -> kinds of its collectives, bytes that a rank sends, in 4Ψ · (d-1)/d and on gloo
    1: ({"all_reduce", "broadcast"}, 3),
    2: ({"all_reduce", "all_gather"}, 3),
    3: ({"reduce_scatter", "all_gather"}, 3),  # with gloo a reduce-scatter sends as much as an all-reduce
    4: ({"send", "recv", "broadcast"}, 2),  # on gloo parts travel by messages, parameters by broadcasts
}
TOO_MANY = {  # kind -> bytes that suffice, in 4Ψ · (d-1)/d; why there are more
    "all_reduce": (2, "an all-reduce takes twice the bytes of a broadcast from the owner, or of an all-gather"),
    "all_gather": (1, "a rank gives the all-gather more than it owns: send gradients by all_reduce or reduce_scatter"),
    "broadcast": (1, "parameters are broadcast more than once: the owner alone sends them, and sends each once"),
    "reduce_scatter": (2, "gradients are reduced more than once a step"),
}


def ladder(grader):
    """Judged with four ranks, too: with two, a rank that gives all it has to all others sends no more than a sum."""
    for world_size in (4, 2):
        one = grader.run(world_size, play, Layers())[0]
        by_kind = Counter()
        for entry in one.entries:
            by_kind[entry.kind] += entry.wire_bytes / (4 * NUMEL * (world_size - 1) / world_size)
        counts = Counter(entry.kind for entry in one.entries)
        sent, collectives = sum(by_kind.values()), ", ".join(f"{n} {kind}" for kind, n in counts.items())
        of, held = f"with {world_size} ranks, " * (world_size > 2), one.held / NUMEL
        native = sent - by_kind["reduce_scatter"] / 2  # gloo's sends twice what it has to
        if native > 3 * 1.2:
            over, cause = max((by_kind[kind] - due, why) for kind, (due, why) in TOO_MANY.items())
            raise Wrong("at most 3 · 4Ψ · (d-1)/d bytes sent by a rank in a step, as in stages 1 and 2",
                        f"{of}{sent:.2f} · 4Ψ · (d-1)/d bytes, in {collectives}",
                        cause if over > 0 else "gradients need 2 of them, and parameters 1")
        if world_size == 4 and held > 16 * 1.05:
            raise Wrong("fewer bytes a parameter held after a step than DDP with AdamW holds: 16", f"{of}{held:.2f}",
                        "beside parameters and gradients a rank holds its own 1/d, and no whole copy")
    large = {entry.kind for entry in one.entries if entry.size >= 1024}  # flags and norms are smaller
    stage = next((f"the collectives and bytes of stage {stage}" for stage, (kinds, times) in LADDER.items()
                  if kinds == large and times <= sent <= 1.25 * times),  # padding is sent, too
                 "none of the four stages sends that")
    ideal = f"; {native:.2g} where a reduce-scatter is no all-reduce, as gloo's is" if native < sent else ""
    return [f"ladder     {stage}",
            f"a step     {collectives}; {one.in_backward or 'none'} of them in the backward pass",
            f"sent       {sent:.2f} · 4Ψ · (d-1)/d bytes a rank{ideal} (DDP alone: 2)",
            f"held       {held:.2f} bytes a parameter after a step (DDP with AdamW: 16)"]


def overlap(grader):
    """What travels before the bucket that the first layer waits for has come by then, too."""
    awaited = grader.run(2, play, Layers(prefetch=True, steps=3))[0].awaited
    if awaited and awaited[-1]:
        raise Wrong("the first layer computes while the parameters of others are under way",
                    f"it has waited for {sum(awaited)} of {len(awaited)} messages, the last one too",
                    "a module waits for its own parameters alone: module.parameters(recurse=False)" if all(awaited) else
                    "what the forward pass reads first must leave first: that is the last bucket of the backward pass")
    return [f"prefetch   the first layer waits for {sum(awaited)} of {len(awaited)} messages"]


# ------------------------------------------------------------------------------------------------------------- level 2


def is_an_optimizer(grader):
    asked = () if grader.is_core else ("clip_grad_norm_", "no_sync", "state_dict", "load_state_dict")
    missing = [name for name in asked if name in grader.facts.missing]
    faults = ["is none"] * (not grader.facts.is_optimizer) + [f"has no {', '.join(missing)}"] * bool(missing)
    if faults:
        raise NotRun(" with ".join(filter(None, ["a torch.optim.Optimizer", ", ".join(asked)])),
                     f"{grader.facts.name} {' and '.join(faults)}",
                     "docs/exercise.md has the skeleton of level 2, for schedulers, clipping, accumulation and saving")


def check_norms(came, norms, run, world_size):
    """What clip_grad_norm_ has returned in the first step, on every rank, against torch's on the whole model."""
    def are(*values):
        return all(math.isclose(norm, value, rel_tol=1e-4) for norm, value in zip(came, values * len(came)))

    if not came or are(norms[0]):
        return
    own = [norms[0] for _, norms in with_own_gradients(run, world_size)]
    known = {"each rank takes the norm of its own shard: add up the squares over the ranks, then the root":
             math.isclose(math.hypot(*came), norms[0], rel_tol=1e-4),
             "the norm is of this rank's own gradients: average them first": are(*own),
             SUMMED: are(in_one_process(run, world_size, combine=sum)[1][0]),
             "√d times the norm: every rank adds the squares of the whole model, so they count d times":
             are(norms[0] * world_size**0.5),
             "the norm after clipping: return the one before": are(run.max_norms[0]),
             "the root is missing: this is the square of the norm": are(norms[0] ** 2),
             "the norm is of 1/d of the averaged gradients: they are divided twice": are(norms[0] / world_size),
             UNKNOWN: True}
    raise Wrong(f"clip_grad_norm_ returns the norm of the averaged gradients of the whole model: {norms[0]:.5f}",
                ", ".join(f"{norm:.5f} on rank {rank}" for rank, norm in enumerate(came)),
                next(cause for cause, is_it in known.items() if is_it))


def of_the_whole(facts):
    return facts.name != "ShardedOptimizer"


def of_prefetching(facts):
    return "prefetch_params" not in facts.missing


LEVELS = {  # level -> (name, checks: (name, function), where it isn't of all classes: of which)
    1: ("It trains", [
        ("the interface", interface),
        ("ranges_in_shard by hand", ranges, lambda facts: facts.has_ranges),
        ("16 elements by hand, 2 ranks", by_hand(2)),
        ("16 elements by hand, 3 ranks", by_hand(3, numels=(5, 6, 2, 3))),
        ("all ranks start from rank 0's parameters", constructor),
        ("SGD: ranks equal each other and one process, 2 ranks", trains(2)),
        ("the same, 3 ranks", trains(3)),
        ("AdamW", trains(2, optimizer="AdamW")),
        ("gradients in another order on rank 1", by_hand(2, scales=(1, 2, 4, 8), reverse=True)),
        ("one parameter, 3 ranks", by_hand(3, numels=(4,), scales=(1,), hint=EMPTY)),
        ("prefetch_params: rank 1 is late", trains(2, LATE, prefetch=True), of_prefetching),
        ("prefetch_params: the first layer waits for its own", overlap, of_prefetching),
        ("the state is spread over 2 ranks", lambda grader: state(grader, 2)),
        ("the state is spread over 3 ranks", lambda grader: state(grader, 3)),
        ("collectives and bytes", ladder),
    ]),
    2: ("It is an optimizer", [
        ("its methods", is_an_optimizer),
        ("three groups, with their own lr and weight decay", trains(2, optimizer="AdamW", groups=True)),
        ("a scheduler of torch", trains(2, groups=True, schedule="lr")),
        ("a scheduler that writes betas, too", trains(2, optimizer="AdamW", schedule="cycle")),
        ("three micro-batches equal one large batch", trains(2, micro_batches=3)),
        ("the same, inside no_sync()", trains(2, micro_batches=3, no_sync=True), of_the_whole),
        ("a loop without zero_grad()", by_hand(2, steps=2, zero=False)),
        ("parameters of 16 bits", of_16_bits),
        ("gradients are gone after a step, as it says", by_hand(2, steps=2, zero=False, gone=True),
         lambda facts: facts.says_gone),
        ("clip_grad_norm_ equals torch's on the whole model", trains(2, max_norms=(0.05, 100.0, 0.05)), of_the_whole),
        ("state_dict() and load_state_dict() go on where they left off",
         trains(2, optimizer="AdamW", steps=4, resume=True, schedule="lr"), of_the_whole),
    ]),
}
