"""The checks of each level: what runs on ranks, and what a wrong figure says about its cause.

A function of a check returns lines to print, or raises Wrong.
"""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from grade import mistakes, on_ranks
from grade.by_hand import NOT_AVERAGED, NOT_RECEIVED, ByHand, check_movement, spans
from grade.grader import UNKNOWN, Wrong, require, shorten
from grade.runs import LR, OTHER_SEED, Run, counted, flat, play
from harness.take import code_lines

EMPTY = "fewer parameters than ranks here: a rank that owns nothing takes part in every collective"
LATE = "a module reads parameters that have not arrived: each must wait for its own, and step() for all"
UNUSED = "ranks may use different parameters: where one has no gradient it sends zeros, if another rank has one"
LAYERS = Run(optimizer="AdamW", steps=2, sizes=(64,) * 9, counts_memory=True, zeroes_last_grads=False)
NUMEL, LARGEST = 8 * (64 * 64 + 64), 64 * 64  # of eight layers, and of a layer's weight
PADDING_OF_STATE, PADDING_SENT = 0.1, 0.2  # how much is tolerated


class Check:
    """A check: a function of the Grader, with `settings`. With a `fact` it is run only where grader.facts has that."""

    def __init__(self, name, function, fact="", **settings):
        self.name, self.fact = name, fact
        self.function = functools.partial(function, **settings)


def interface(grader):
    facts, skeleton = grader.facts, "docs/exercise.md has a skeleton of the class"
    expected = "a class DistributedOptimizer, or a core's ShardedOptimizer"
    came = f"neither is in {grader.package}, nor in {grader.package}.optimizer"
    arguments = "params, optimizer_cls, *, process_group=None, **optimizer_kwargs"
    if grader.beside_ddp:
        expected, came = "a class Sharded", f"{grader.package} has none"
        arguments = "params, optimizer_cls, **optimizer_kwargs"
    require(facts.name, expected, came, skeleton)
    require(facts.kind == "class", f"{facts.name} is a class", f"its type is {facts.kind}", skeleton)
    missing = [f"{name}()" for name in ("step", "zero_grad") if name in facts.missing]
    require(not missing, "methods step() and zero_grad()", f"{facts.name} has no {' and no '.join(missing)}",
            "docs/exercise.md lists the methods that each level asks for")
    require(not facts.refusal, f"{facts.name}({arguments})", shorten(f"{facts.name}{facts.refusal}"),
            "docs/exercise.md has the constructor's arguments")


def is_an_optimizer(grader):
    facts, expected = grader.facts, "a torch.optim.Optimizer"
    faults = [] if facts.is_optimizer else ["is none"]
    if facts.is_whole:
        methods = "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict"
        missing = [name for name in methods if name in facts.missing]
        expected += f" with {', '.join(methods)}"
        faults += [f"has no {', '.join(missing)}"] * bool(missing)
    require(not faults, expected, f"{facts.name} {' and '.join(faults)}",
            "docs/exercise.md has the skeleton of level 2, for schedulers, clipping, accumulation and saving")


RANGES = {  # numels, starts, start and stop of the shard -> (index, start, stop, offset) of each range in it
    ((3, 5, 2), (0, 4, 12), 0, 8): [(0, 0, 3, 0), (1, 0, 4, 4)],
    ((3, 5, 2), (0, 4, 12), 8, 16): [(1, 4, 5, 0), (2, 0, 2, 4)],
    ((20,), (0,), 8, 16): [(0, 8, 16, 0)],
    ((8, 8, 8), (0, 8, 16), 8, 16): [(1, 0, 8, 0)]}  # a parameter ends where the shard begins


def ranges(grader):
    """Check the ranges of stage 3's buffer alone."""
    for came, ((numels, starts, shard_start, shard_stop), expected) in zip(
            grader.run(2, on_ranks.ranges, tuple(RANGES))[0], RANGES.items()):
        cause = "start and stop count from the parameter's first element, offset from the shard's"
        if [part for part in came if part[1] < part[2]] == expected:
            cause = "an empty range is included: where start == stop nothing of the parameter lies in the shard"
        require(came == expected, f"of {', '.join(map(str, numels))} elements at {', '.join(map(str, starts))}, in "
                f"shard {shard_start} to {shard_stop}: (index, start, stop, offset) = {', '.join(map(str, expected))}",
                shorten(", ".join(map(str, came)) or "no range"), cause)


def by_hand(grader, d, hint=None, **case):
    """Check a few elements, whose figures are computed in grade/by_hand.py."""
    run = ByHand(**case)
    check_movement(run, grader.run(d, play, run, hint=hint), grader.facts.finishes)


def of_16_bits(grader):
    """Check bfloat16, in which all figures are exact. Gradients kept in fp32 go another way through the code."""
    by_hand(grader, 2, dtype=torch.bfloat16, lr=1.0)
    if grader.facts.takes_grad_dtype:
        by_hand(grader, 2, dtype=torch.bfloat16, lr=1.0, options=(("grad_dtype", torch.float32),))


def constructor(grader):
    ranks = grader.run(2, play, ByHand(scales=(0,) * 4, start_is_rank=True))
    built, stepped = zip(*(seen.snapshots for seen in ranks))
    missed = "none was" if built[-1].all() else "some were not"
    for snapshots, came, cause in (
            (built, "elements {} of rank {} are {:g}",
             f"parameters are broadcast from rank 0 in the constructor, each in place: {missed}"),
            (stepped, "so it is; but a step with gradients of 0 makes elements {} of rank {} {:g}",
             "what the inner optimizer steps was copied before the broadcast")):
        for rank, values in enumerate(snapshots):
            require(not values.any(), "the constructor gives every rank the parameters of rank 0: here 0 everywhere",
                    came.format(spans(values != 0), rank, values.max().item()), cause)


def trains(grader, d, otherwise=UNKNOWN, hint=None, **settings):
    """Check that parameters are the same on d ranks, after every step, and as in one process with all data.

    otherwise: the cause where no known mistake computes the same. hint: the cause of an exception or a hang.
    """
    run = Run(**settings)
    ranks = grader.run(d, play, run, hint=hint)
    # Zeros in a buffer are a gradient, as after torch's zero_grad(set_to_none=False): such a parameter decays.
    methods = {"change_grads": mistakes.fill_with_zeros} if ranks[0].has_zeros_for_none else {}
    one_process = mistakes.in_one_process(run, range(d), **methods)
    if run.max_norms:
        check_norms(ranks, one_process.norms[0], run)
    for step in range(1, len(one_process.snapshots)):
        check_equal(ranks, step, run)
        check_trained(ranks, one_process.snapshots, step, run, otherwise)
    n = ranks[0].n_in_no_sync
    require(n == 0, "no communication inside no_sync()", f"{n} collectives in {run.steps} steps",
            "gradients must stay on their rank until a backward pass outside of it, or step()")


def check_equal(ranks, step, run):
    """Compare the parameters of all ranks with each other."""
    first, number = ranks[0].snapshots[step], run.number_of(step)
    for rank, seen in enumerate(ranks):
        if not torch.equal(seen.snapshots[step], first):
            raise Wrong("all ranks have the same parameters after every step", f"after step {number}, "
                        f"{mistakes.difference(seen.snapshots[step], first, run)} between rank 0 and rank {rank}",
                        cause_of_unequal(ranks, step, run), number)


def cause_of_unequal(ranks, step, run):
    alone = mistakes.each_alone(run, len(ranks))
    if all(mistakes.close(seen.snapshots[step], own.snapshots[step]) for seen, own in zip(ranks, alone)):
        return NOT_AVERAGED
    stays = any((seen.snapshots[step] == seen.snapshots[step - 1]).any() for seen in ranks)
    return NOT_RECEIVED if stays else "not every rank receives what its owner has stepped"


def check_trained(ranks, expected, step, run, otherwise):
    """Compare parameters, which all ranks have alike, with the snapshots that are `expected`: those of one process."""
    came, number, fault = ranks[0].snapshots[step], run.number_of(step), ()
    if mistakes.close(came, expected[step]):
        return
    if run.groups and step == 1 and not run.max_norms:
        fault = mistakes.wrong_hyperparameters(came, run, len(ranks))
    difference, cause = fault or (f"{mistakes.difference(came, expected[step], run)} from one process",
                                  mistakes.likely_cause(ranks, expected, step, run) or otherwise)
    raise Wrong(f"{len(ranks)} ranks train like one process that has the batches of all",
                f"after step {number}, {difference}", cause, number)


def check_norms(ranks, expected, run):
    """Compare what clip_grad_norm_ has returned in the first step, on every rank, with torch's of the whole model."""
    d, came = len(ranks), torch.tensor([seen.norms[0] for seen in ranks])

    def agrees(norm, norms=came):
        return mistakes.close(norms, torch.tensor(norm))

    if agrees(expected):
        return
    if agrees(expected, came.norm()):
        cause = "each rank takes the norm of its own shard: add up the squares over the ranks, then the root"
    elif agrees([seen.norms[0] for seen in mistakes.each_alone(run, d)]):
        cause = "the norm is of this rank's own gradients: average them first"
    else:
        cause = next((cause for cause, seen in mistakes.mistaken_runs(run, d) if agrees(seen.norms[0])), UNKNOWN)
    raise Wrong(f"clip_grad_norm_ returns the norm of the averaged gradients of the whole model: {expected:.5f}",
                ", ".join(f"{norm:.5f} on rank {rank}" for rank, norm in enumerate(came.tolist())), cause)


def state(grader, d):
    """Check that AdamW's two moments exist once. A rank may hold 1/d and the largest parameter."""
    held, padding = zip(*(seen.state for seen in grader.run(d, play, LAYERS)))
    whole, total, zeros = 2 * NUMEL, sum(held), sum(padding)
    shares = ", ".join(f"{n / whole:.0%} on rank {rank}" for rank, n in enumerate(held))
    once = f"AdamW's state exists once, about 1/{d} on each rank"
    cause = "some parameters are stepped on several ranks, or padding isn't zero"
    if min(held) >= whole:
        cause = "every rank steps every parameter: give the inner optimizer only what this rank owns"
    require(total <= whole, once, f"{total - whole} of its {whole} elements more than once: {shares}", cause)
    require(total >= whole, once, f"{whole - total} of its {whole} elements on no rank: {shares}",
            "some parameters are stepped by an optimizer that is not a torch.optim.Optimizer, or by none")
    require(zeros <= PADDING_OF_STATE * whole, once, f"{1 + zeros / whole:.3g} times, with padding: {zeros} elements "
            "of zeros", "pad a shard by less: to a multiple of d, or of 64 bytes")
    is_uneven = max(held) > whole / d + 2 * LARGEST
    return [f"state      {shares}", UNEVEN] if is_uneven else [f"state      {shares}"]


UNEVEN = "unequal    sharing out by elements saves more: the largest parameter first, to who has least"
LADDER = {  # stage -> kinds of its collectives, bytes that a rank sends on gloo, in 4Ψ · (d-1)/d, Ψ: parameters
    1: ({"all_reduce", "broadcast"}, 3),
    2: ({"all_reduce", "all_gather"}, 3),
    3: ({"reduce_scatter", "all_gather"}, 3),  # with gloo a reduce-scatter sends as much as an all-reduce
    4: ({"send", "recv", "broadcast"}, 2),  # on gloo parts travel by messages, parameters by broadcasts
}
TOO_MANY = {  # kind -> bytes that suffice, in 4Ψ · (d-1)/d; why there are more
    "all_reduce": (2, "an all-reduce takes twice the bytes of a broadcast from the owner, or of an all-gather"),
    "all_gather": (1, "a rank gives the all-gather more than it owns: send gradients by all_reduce or reduce_scatter"),
    "broadcast": (1, "parameters are broadcast more than once: the owner alone sends them, and sends each once"),
    "reduce_scatter": (2, "gradients are reduced more than once a step")}


class Traffic:
    """Adds up what a rank sends in a step, in 4Ψ · (d-1)/d bytes."""

    def __init__(self, entries, d):
        self.by_kind = Counter()
        for entry in entries:
            self.by_kind[entry.kind] += entry.wire_bytes / (4 * NUMEL * (d - 1) / d)
        self.collectives = counted(entries)
        self.sent = sum(self.by_kind.values())
        self.sent_if_native = self.sent - self.by_kind["reduce_scatter"] / 2  # gloo's sends twice what it has to
        kinds = {entry.kind for entry in entries if entry.size >= 1024}  # flags and norms are smaller
        self.rung = next((f"the collectives and bytes of stage {stage}" for stage, (its_kinds, least) in LADDER.items()
                          if kinds == its_kinds and least <= self.sent <= 1.25 * least),  # padding is sent, too
                         "none of the four stages sends that")


def ladder(grader):
    """Check what is sent and held, with four ranks, too: with two, an all-gather of all gradients sends no more than an
    all-reduce."""
    for d, with_ranks in ((4, "with 4 ranks, "), (2, "")):
        seen = grader.run(d, play, LAYERS)[0]
        traffic, held = Traffic(seen.entries, d), seen.held / NUMEL
        excess, cause = max((traffic.by_kind[kind] - suffices, why) for kind, (suffices, why) in TOO_MANY.items())
        require(traffic.sent_if_native <= 3 * (1 + PADDING_SENT),
                "at most 3 · 4Ψ · (d-1)/d bytes sent by a rank in a step, as in stages 1 and 2",
                f"{with_ranks}{traffic.sent:.2f} · 4Ψ · (d-1)/d bytes, in {traffic.collectives}",
                cause if excess > 0 else "gradients need 2 of them, and parameters 1")
        require(d == 2 or held <= 16 * 1.05, "fewer bytes a parameter held after a step than DDP with AdamW holds: 16",
                f"{with_ranks}{held:.2f}",
                "beside parameters and gradients a rank holds its own 1/d, and no whole copy")
    native = ""
    if traffic.sent_if_native < traffic.sent:
        native = f"; {traffic.sent_if_native:.2g} where a reduce-scatter is no all-reduce, as gloo's is"
    return [f"ladder     {traffic.rung}",
            f"a step     {traffic.collectives}; {seen.n_in_backward or 'none'} of them in the backward pass",
            f"sent       {traffic.sent:.2f} · 4Ψ · (d-1)/d bytes a rank"
            f"{native} (DDP alone: 2)",
            f"held       {held:.2f} bytes a parameter after a step (DDP with AdamW: 16)"]


def overlap(grader):
    """Fail if the first layer waits for the last message: messages arrive in order, so it has waited for all."""
    waited = grader.run(2, play, replace(LAYERS, prefetch=True, steps=3))[0].first_layer_waited
    cause = "what the forward pass reads first must leave first: that is the last bucket of the backward pass"
    if all(waited):
        cause = "a module waits for its own parameters alone: module.parameters(recurse=False)"
    require(not any(waited[-1:]), "the first layer computes while the parameters of others are under way",
            f"it has waited for {sum(waited)} of {len(waited)} messages, the last one too", cause)
    return [f"prefetch   the first layer waits for {sum(waited)} of {len(waited)} messages"]


def is_short(grader, most, hint, what=""):
    """Check that the module has at most so many code lines."""
    n = len(code_lines(Path(grader.facts.file)))
    require(n <= most, f"at most {most} code lines{what}", str(n), hint)
    return [f"lines      {n}"]


def follows_loaded(grader):
    """Check that a step of bfloat16 parameters starts from weights that were loaded after the constructor."""
    run = Run(dtype=torch.bfloat16, reloads=True, steps=1)
    for rank, seen in enumerate(grader.run(2, play, run)):
        far = (seen.snapshots[-1] - flat(run.model(OTHER_SEED).parameters())).abs().max().item()
        require(far <= LR, f"after a step of lr {LR} no weight is further than {LR} from what was loaded",
                f"{far:.2g} on rank {rank}")


def overlaps(grader):
    """Check that at the last gradient some message is in flight for which nobody has waited yet."""
    n = grader.run(2, play, LAYERS)[0].n_in_flight
    require(n > 0, "some messages are in flight when the last gradient is computed", "none is")
    return [f"in flight  {n} messages when the last gradient is computed"]


OF_DRILLS = [Check("weights that are loaded after the constructor are trained", follows_loaded),
             Check("gradients are in flight while the backward pass computes", overlaps)]
LEVELS = {  # level -> (title, checks)
    1: ("Level 1: It trains", [
        Check("the interface", interface),
        Check("ranges_in_shard by hand", ranges, "has_ranges"),
        Check("16 elements by hand, 2 ranks", by_hand, d=2),
        Check("16 elements by hand, 3 ranks", by_hand, d=3, numels=(5, 6, 2, 3)),
        Check("all ranks start from rank 0's parameters", constructor, "averages"),
        Check("SGD: ranks equal each other and one process, 2 ranks", trains, d=2),
        Check("the same, 3 ranks", trains, d=3),
        Check("AdamW", trains, d=2, optimizer="AdamW"),
        Check("gradients in another order on rank 1", by_hand, "averages", d=2, scales=(1, 2, 4, 8), reverses=True),
        Check("one parameter, 3 ranks", by_hand, d=3, numels=(4,), scales=(1,), hint=EMPTY),
        Check("prefetch_params: rank 1 is late", trains, "prefetches", d=2, otherwise=LATE, prefetch=True),
        Check("prefetch_params: the first layer waits for its own", overlap, "prefetches"),
        Check("the state is spread over 2 ranks", state, d=2),
        Check("the state is spread over 3 ranks", state, d=3),
        Check("collectives and bytes", ladder),
    ]),
    2: ("Level 2: It is an optimizer", [
        Check("its methods", is_an_optimizer),
        Check("three groups, with their own lr and weight decay", trains, d=2, optimizer="AdamW", groups=True),
        Check("a scheduler of torch", trains, d=2, groups=True, schedule="lr"),
        Check("a scheduler that writes betas, too", trains, d=2, optimizer="AdamW", schedule="cycle"),
        Check("three micro-batches equal one large batch", trains, d=2, micro_batches=3),
        Check("the same, inside no_sync()", trains, "is_whole", d=2, micro_batches=3, no_sync=True),
        Check("a loop without zero_grad()", by_hand, d=2, steps=2, zeroes=False),
        Check("zero_grad() drops a backward pass, and set_to_none=False, too", trains, d=2, discards=True),
        Check("parameters of 16 bits", of_16_bits),
        Check("gradients are gone after a step, as it says", by_hand, "says_gone", d=2, steps=2, zeroes=False,
              uses_up=True),
        Check("a parameter that one rank uses, one that none uses", trains, "is_whole", d=2, otherwise=UNUSED,
              hint=UNUSED, optimizer="AdamW", unused=True),
        Check("clip_grad_norm_ equals torch's on the whole model", trains, "is_whole", d=2, groups=True,
              max_norms=(0.05, 100.0, 0.05)),
        Check("state_dict() and load_state_dict() go on where they left off", trains, "is_whole", d=2,
              optimizer="AdamW", steps=4, resume=True, schedule="lr"),
    ]),
}
