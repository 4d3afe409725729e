"""The checks of each level: what runs on ranks, and what a wrong figure says about its cause.

A check is a function of the Grader: it returns lines to print, or raises Wrong.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from grade import mistakes, on_ranks
from grade.by_hand import NOT_RECEIVED, OWN, ByHand, explain, spans
from grade.grader import UNKNOWN, Wrong, first_wrong, shorten
from grade.runs import Run, play

EMPTY = "fewer parameters than ranks here: a rank that owns nothing takes part in every collective"
LATE = "a module reads parameters that have not arrived: each must wait for its own, and step() for all"
UNUSED = "ranks may use different parameters: where one has no gradient it sends zeros, if another rank has one"


class Check(NamedTuple):
    """A check; with a `fact` it is for the classes of which grader.facts has that alone."""

    name: str
    function: Callable
    fact: str = ""


def interface(grader):
    facts = grader.facts
    missing = [f"{name}()" for name in ("step", "zero_grad") if name in facts.missing]
    asked = "a class DistributedOptimizer, or a core's ShardedOptimizer"
    arguments = "params, optimizer_cls, *, process_group=None, **optimizer_kwargs"
    if grader.beside_ddp:
        asked, arguments = "a class Sharded", "params, optimizer_cls, **optimizer_kwargs"
    first_wrong([
        (not facts.name, asked, f"neither is in {grader.package}, nor in {grader.package}.optimizer"
         if not grader.beside_ddp else f"{grader.package} has none", "docs/exercise.md has a skeleton of the class"),
        (facts.kind != "class", f"{facts.name} is a class", f"its type is {facts.kind}",
         "docs/exercise.md has a skeleton"),
        (missing, "methods step() and zero_grad()", f"{facts.name} has no {' and no '.join(missing)}",
         "docs/exercise.md lists the methods that each level asks for"),
        (facts.refusal, f"{facts.name}({arguments})",
         shorten(facts.name + facts.refusal), "docs/exercise.md has the constructor's arguments")])


def is_an_optimizer(grader):
    facts = grader.facts
    asked = ("clip_grad_norm_", "no_sync", "state_dict", "load_state_dict") if facts.is_whole else ()
    missing = [name for name in asked if name in facts.missing]
    faults = []
    if not facts.is_optimizer:
        faults.append("is none")
    if missing:
        faults.append(f"has no {', '.join(missing)}")
    first_wrong([(faults, " with ".join(filter(None, ["a torch.optim.Optimizer", ", ".join(asked)])),
                  f"{facts.name} {' and '.join(faults)}",
                  "docs/exercise.md has the skeleton of level 2, for schedulers, clipping, accumulation and saving")])


def ranges(grader):
    """Check the ranges of stage 3's buffer alone. In the last case a parameter ends where the shard begins."""
    cases = {((3, 5, 2), (0, 4, 12), 0, 8): [(0, 0, 3, 0), (1, 0, 4, 4)],
             ((3, 5, 2), (0, 4, 12), 8, 16): [(1, 4, 5, 0), (2, 0, 2, 4)],
             ((20,), (0,), 8, 16): [(0, 8, 16, 0)],
             ((8, 8, 8), (0, 8, 16), 8, 16): [(1, 0, 8, 0)]}
    answers = grader.run(2, on_ranks.ranges, tuple(cases))[0]
    for ((numels, starts, first, stop), due), came in zip(cases.items(), answers):
        cause = "start and stop count from the parameter's first element, offset from the shard's"
        if [found for found in came if found[1] < found[2]] == due:
            cause = "an empty range is included: where start == stop nothing of the parameter lies in the shard"
        first_wrong([(came != due, f"of {', '.join(map(str, numels))} elements at {', '.join(map(str, starts))}, in "
                      f"shard {first} to {stop}: (index, start, stop, offset) = {', '.join(map(str, due))}",
                      shorten(", ".join(map(str, came)) or "no range"), cause)])


def by_hand(world_size, hint=None, **case):
    """-> a check of a step by hand."""
    def check(grader, **more):
        run = ByHand(**case, **more)
        explain(run, grader.run(world_size, play, run, hint=hint), grader.facts.finishes)
    return check


def of_16_bits(grader):
    """Check bfloat16, in which all figures are exact. Gradients kept in fp32 go another way through the code."""
    for options in [(), (("grad_dtype", torch.float32),)][: 2 if grader.facts.takes_grad_dtype else 1]:
        by_hand(2, dtype=torch.bfloat16, lr=1.0)(grader, options=options)


def constructor(grader):
    run = ByHand(scales=(0,) * 4, of_rank=True)
    built, stepped = zip(*(seen.snapshots for seen in grader.run(2, play, run)))
    missed = "none was" if built[-1].all() else "some were not"
    first_wrong((value.any(), "the constructor gives every rank the parameters of rank 0: here 0 everywhere",
                 came.format(spans(value != 0), rank, value.max().item()), cause)
                for came, cause, values in [
                    ("elements {} of rank {} are {:g}",
                     f"parameters are broadcast from rank 0 in the constructor, each in place: {missed}", built),
                    ("so it is; but a step with gradients of 0 makes elements {} of rank {} {:g}",
                     "what the inner optimizer steps was copied before the broadcast", stepped)]
                for rank, value in enumerate(values))


def trains(d, otherwise=UNKNOWN, hint=None, **settings):
    """-> a check: every parameter after every step is the same on all d ranks, and as in one process with all data.

    otherwise: the cause where no known mistake computes the same. hint: the cause of an exception or a hang.
    """
    run = Run(**settings)

    def check(grader):
        ranks = grader.run(d, play, run, hint=hint)
        # Zeros in a buffer are a gradient, as after torch's zero_grad(set_to_none=False): such a parameter decays.
        methods = {"change_grads": mistakes.fill_with_zeros} if ranks[0].has_zeros_for_none else {}
        one_process = mistakes.in_one_process(run, range(d), **methods)
        if run.max_norms:
            check_norms(ranks, one_process, run)
        for step in range(1, len(one_process.snapshots)):
            check_step(ranks, one_process.snapshots, step, run, otherwise)
        n = ranks[0].n_in_no_sync
        first_wrong([(n, "no communication inside no_sync()", f"{n} collectives in {run.steps} steps",
                      "gradients must stay on their rank until a backward pass outside of it, or step()")])
    return check


def check_step(ranks, due, step, run, otherwise):
    """Compare all ranks with each other and with one process, whose snapshots are `due`, after a step."""
    first = ranks[0].snapshots
    number = run.steps if run.prefetch else step
    for rank, seen in enumerate(ranks):
        if not torch.equal(seen.snapshots[step], first[step]):
            raise Wrong("all ranks have the same parameters after every step", f"after step {number}, "
                        f"{mistakes.difference(seen.snapshots[step], first[step], run)} between rank 0 and rank {rank}",
                        apart([seen.snapshots for seen in ranks], step, run), number)
    if mistakes.close(first[step], due[step]):
        return
    found = None
    if run.groups and step == 1 and not run.max_norms:
        found = mistakes.wrong_hyperparameters(first[1], run, len(ranks))
    came, cause = found or (f"{mistakes.difference(first[step], due[step], run)} from one process",
                            mistakes.likely_cause(ranks, due, step, run) or otherwise)
    raise Wrong(f"{len(ranks)} ranks train like one process that has the batches of all",
                f"after step {number}, {came}", cause, number)


def apart(snapshots, step, run):
    """-> the likely cause, when ranks differ from each other after `step`. snapshots: of each rank."""
    by_itself = mistakes.each_by_itself(run, len(snapshots))
    if all(mistakes.close(came[step], own.snapshots[step]) for came, own in zip(snapshots, by_itself)):
        return OWN
    stays = any((came[step] == came[step - 1]).any() for came in snapshots)
    return NOT_RECEIVED if stays else "not every rank receives what its owner has stepped"


def check_norms(ranks, one_process, run):
    """Compare what clip_grad_norm_ has returned in the first step, on every rank, with torch's of the whole model."""
    d, came, due = len(ranks), [seen.norms[0] for seen in ranks], one_process.norms[0]

    def are(norms):
        return len(norms) == d and all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(came, norms))

    if are([due] * d):
        return
    known = [("the norm is of this rank's own gradients: average them first",
              [seen.norms[0] for seen in mistakes.each_by_itself(run, d)]),
             *((cause, mistakes.in_one_process(**{"run": run, "ranks": range(d), **how}).norms[:1] * d)
               for cause, how in mistakes.known_mistakes(run, d))]
    if math.isclose(math.hypot(*came), due, rel_tol=1e-4):
        known.insert(0, ("each rank takes the norm of its own shard: add up the squares over the ranks, then the root",
                         came))
    raise Wrong(f"clip_grad_norm_ returns the norm of the averaged gradients of the whole model: {due:.5f}",
                ", ".join(f"{norm:.5f} on rank {rank}" for rank, norm in enumerate(came)),
                next((cause for cause, norms in known if are(norms)), UNKNOWN))


LAYERS = Run(optimizer="AdamW", steps=2, sizes=(64,) * 9, counts=True, frees=False)
NUMEL, LARGEST = 8 * 65 * 64, 64 * 64


def state(world_size):
    """-> a check of AdamW's two moments: a rank may have more than 1/d by the largest parameter. Padding has zeros."""
    def check(grader):
        held, padding = zip(*(seen.state for seen in grader.run(world_size, play, LAYERS)))
        whole = 2 * NUMEL
        more = sum(held) - whole
        zeros = sum(padding)
        shares = ", ".join(f"{n / whole:.0%} on rank {rank}" for rank, n in enumerate(held))
        once = f"AdamW's state exists once, about 1/{world_size} on each rank"
        first_wrong([
            (more > 0, once, f"{more} of its {whole} elements more than once: {shares}",
             "every rank steps every parameter: give the inner optimizer only what this rank owns"
             if min(held) >= whole else "some parameters are stepped on several ranks, or padding isn't zero"),
            (more < 0, once, f"{-more} of its {whole} elements on no rank: {shares}",
             "some parameters are stepped by an optimizer that is not a torch.optim.Optimizer, or by none"),
            (zeros > 0.1 * whole, once, f"{1 + zeros / whole:.3g} times, with padding: {zeros} elements of zeros",
             "pad a shard by less: to a multiple of d, or of 64 bytes")])
        lines = [f"state      {shares}"]
        if max(held) > whole / world_size + 2 * LARGEST:
            lines.append("unequal    sharing out by elements saves more: the largest parameter first, to who has least")
        return lines
    return check


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
    """Check the bytes, with four ranks, too: with two, a rank that gives all it has to all others sends no more than a
    sum."""
    for world_size in (4, 2):
        seen = grader.run(world_size, play, LAYERS)[0]
        traffic = Traffic(seen, world_size)
        check_traffic(traffic, seen.held / NUMEL, world_size)
    lines = [f"ladder     {traffic.rung()}",
             f"a step     {traffic.collectives}; {seen.n_in_backward or 'none'} of them in the backward pass"]
    ideal = ""
    if traffic.native < traffic.sent:
        ideal = f"; {traffic.native:.2g} where a reduce-scatter is no all-reduce, as gloo's is"
    return [*lines, f"sent       {traffic.sent:.2f} · 4Ψ · (d-1)/d bytes a rank{ideal} (DDP alone: 2)",
            f"held       {seen.held / NUMEL:.2f} bytes a parameter after a step (DDP with AdamW: 16)"]


class Traffic:
    """Adds up what a rank sends in a step, in 4Ψ · (d-1)/d bytes."""

    def __init__(self, seen, world_size):
        unit = 4 * NUMEL * (world_size - 1) / world_size
        self.entries = seen.entries
        self.by_kind = Counter()
        for entry in self.entries:
            self.by_kind[entry.kind] += entry.wire_bytes / unit
        counts = Counter(entry.kind for entry in self.entries)
        self.collectives = ", ".join(f"{n} {kind}" for kind, n in counts.items())
        self.sent = sum(self.by_kind.values())
        self.native = self.sent - self.by_kind["reduce_scatter"] / 2  # gloo's sends twice what it has to

    def rung(self):
        large = {entry.kind for entry in self.entries if entry.size >= 1024}  # flags and norms are smaller
        return next((f"the collectives and bytes of stage {stage}" for stage, (kinds, times) in LADDER.items()
                     if kinds == large and times <= self.sent <= 1.25 * times),  # padding is sent, too
                    "none of the four stages sends that")


def check_traffic(traffic, held, world_size):
    prefix = f"with {world_size} ranks, " if world_size > 2 else ""
    over, why = max((traffic.by_kind[kind] - suffices, why) for kind, (suffices, why) in TOO_MANY.items())
    first_wrong([
        (traffic.native > 3 * 1.2, "at most 3 · 4Ψ · (d-1)/d bytes sent by a rank in a step, as in stages 1 and 2",
         f"{prefix}{traffic.sent:.2f} · 4Ψ · (d-1)/d bytes, in {traffic.collectives}",
         why if over > 0 else "gradients need 2 of them, and parameters 1"),
        (world_size == 4 and held > 16 * 1.05,
         "fewer bytes a parameter held after a step than DDP with AdamW holds: 16", f"{prefix}{held:.2f}",
         "beside parameters and gradients a rank holds its own 1/d, and no whole copy")])


def overlap(grader):
    """Fail if the first layer waits for the last message: messages arrive in order, so it has waited for all."""
    awaited = grader.run(2, play, replace(LAYERS, prefetch=True, steps=3))[0].awaited
    first_wrong([(awaited and awaited[-1], "the first layer computes while the parameters of others are under way",
                  f"it has waited for {sum(awaited)} of {len(awaited)} messages, the last one too",
                  "a module waits for its own parameters alone: module.parameters(recurse=False)" if all(awaited) else
                  "what the forward pass reads first must leave first: that is the last bucket of the backward pass")])
    return [f"prefetch   the first layer waits for {sum(awaited)} of {len(awaited)} messages"]


LEVELS = {  # level -> (title, checks)
    1: ("Level 1: It trains", [
        Check("the interface", interface),
        Check("ranges_in_shard by hand", ranges, "has_ranges"),
        Check("16 elements by hand, 2 ranks", by_hand(2)),
        Check("16 elements by hand, 3 ranks", by_hand(3, numels=(5, 6, 2, 3))),
        Check("all ranks start from rank 0's parameters", constructor, "averages"),
        Check("SGD: ranks equal each other and one process, 2 ranks", trains(2)),
        Check("the same, 3 ranks", trains(3)),
        Check("AdamW", trains(2, optimizer="AdamW")),
        Check("gradients in another order on rank 1", by_hand(2, scales=(1, 2, 4, 8), reverse=True), "averages"),
        Check("one parameter, 3 ranks", by_hand(3, numels=(4,), scales=(1,), hint=EMPTY)),
        Check("prefetch_params: rank 1 is late", trains(2, LATE, prefetch=True), "prefetches"),
        Check("prefetch_params: the first layer waits for its own", overlap, "prefetches"),
        Check("the state is spread over 2 ranks", state(2)),
        Check("the state is spread over 3 ranks", state(3)),
        Check("collectives and bytes", ladder),
    ]),
    2: ("Level 2: It is an optimizer", [
        Check("its methods", is_an_optimizer),
        Check("three groups, with their own lr and weight decay", trains(2, optimizer="AdamW", groups=True)),
        Check("a scheduler of torch", trains(2, groups=True, schedule="lr")),
        Check("a scheduler that writes betas, too", trains(2, optimizer="AdamW", schedule="cycle")),
        Check("three micro-batches equal one large batch", trains(2, micro_batches=3)),
        Check("the same, inside no_sync()", trains(2, micro_batches=3, no_sync=True), "is_whole"),
        Check("a loop without zero_grad()", by_hand(2, steps=2, zero=False)),
        Check("zero_grad() drops a backward pass, and set_to_none=False, too", trains(2, discards=True)),
        Check("parameters of 16 bits", of_16_bits),
        Check("gradients are gone after a step, as it says", by_hand(2, steps=2, zero=False, gone=True), "says_gone"),
        Check("a parameter that one rank uses, one that none uses",
              trains(2, UNUSED, UNUSED, optimizer="AdamW", unused=True), "is_whole"),
        Check("clip_grad_norm_ equals torch's on the whole model",
              trains(2, groups=True, max_norms=(0.05, 100.0, 0.05)), "is_whole"),
        Check("state_dict() and load_state_dict() go on where they left off",
              trains(2, optimizer="AdamW", steps=4, resume=True, schedule="lr"), "is_whole"),
    ]),
}
