"""Checks a package, level by level. A check compares figures of its ranks, and names the likely cause of a wrong one.

The function of a check returns None, or lines to print. It raises Wrong where the package fails.
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
from harness.publishing.stages import code_lines

EMPTY = "fewer parameters than ranks here: a rank that owns nothing takes part in every collective"
LATE = "a module reads parameters that have not arrived: each must wait for its own, and step() for all"
UNUSED = "ranks may use different parameters: where one has no gradient it sends zeros, if another rank has one"
EIGHT_LAYERS = Run(optimizer="AdamW", steps=2, sizes=(64,) * 9, counts_memory=True, zeroes_last_grads=False)
LARGEST_NUMEL = 64 * 64  # of a layer's weight
NUMEL = 8 * (LARGEST_NUMEL + 64)  # with the biases
MAX_STATE_PADDING = 0.1  # of the state's elements
MAX_SENT_PADDING = 0.2  # of the bytes that are sent without padding


class Check:
    """Calls `function(grader, **settings)`, but only if the field `fact` of grader.facts is true; "": always."""

    def __init__(self, name, function, fact="", **settings):
        self.name = name
        self.fact = fact
        self.function = functools.partial(function, **settings)


def interface(grader):
    facts = grader.facts
    skeleton = "docs/exercise.md has a skeleton of the class"
    expected = "a class DistributedOptimizer, or a core's ShardedOptimizer"
    came = f"neither is in {grader.package}, nor in {grader.package}.optimizer"
    arguments = "params, optimizer_cls, *, process_group=None, **optimizer_kwargs"
    if grader.beside_ddp:
        expected = "a class Sharded"
        came = f"{grader.package} has none"
        arguments = "params, optimizer_cls, **optimizer_kwargs"
    require(facts.name, expected, came, skeleton)
    require(facts.kind == "class", f"{facts.name} is a class", f"its type is {facts.kind}", skeleton)
    missing = [f"{name}()" for name in ("step", "zero_grad") if name in facts.missing]
    require(not missing, "methods step() and zero_grad()", f"{facts.name} has no {' and no '.join(missing)}",
            "docs/exercise.md lists the methods that each level asks for")
    require(not facts.refusal, f"{facts.name}({arguments})", shorten(f"{facts.name}{facts.refusal}"),
            "docs/exercise.md has the constructor's arguments")


def is_an_optimizer(grader):
    facts = grader.facts
    expected = "a torch.optim.Optimizer"
    faults = []
    if not facts.is_optimizer:
        faults.append("is none")
    if facts.is_whole:
        methods = "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict"
        expected += f" with {', '.join(methods)}"
        missing = [name for name in methods if name in facts.missing]
        if missing:
            faults.append(f"has no {', '.join(missing)}")
    require(not faults, expected, f"{facts.name} {' and '.join(faults)}",
            "docs/exercise.md has the skeleton of level 2, for schedulers, clipping, accumulation and saving")


RANGES = {  # (numels, starts, start and stop of the shard) -> (index, start, stop, offset) of each range in it
    ((3, 5, 2), (0, 4, 12), 0, 8): [(0, 0, 3, 0), (1, 0, 4, 4)],
    ((3, 5, 2), (0, 4, 12), 8, 16): [(1, 4, 5, 0), (2, 0, 2, 4)],
    ((20,), (0,), 8, 16): [(0, 8, 16, 0)],
    ((8, 8, 8), (0, 8, 16), 8, 16): [(1, 0, 8, 0)]}  # the shard begins where a parameter ends


def ranges(grader):
    """Check what ranges_in_shard of stage 3's buffer returns for RANGES."""
    answers = grader.run(2, on_ranks.ranges, tuple(RANGES))[0]
    for (numels, starts, shard_start, shard_stop), answer in zip(RANGES, answers):
        expected = RANGES[numels, starts, shard_start, shard_stop]
        cause = "start and stop count from the parameter's first element, offset from the shard's"
        if [(index, start, stop, offset) for index, start, stop, offset in answer if start < stop] == expected:
            cause = "an empty range is included: where start == stop nothing of the parameter lies in the shard"
        require(answer == expected, f"of {listed(numels)} elements at {listed(starts)}, in shard {shard_start} to "
                f"{shard_stop}: (index, start, stop, offset) = {listed(expected)}",
                shorten(listed(answer) or "no range"), cause)


def listed(values):
    return ", ".join(map(str, values))


def by_hand(grader, d, hint=None, **case):
    """Check the few elements of a ByHand, whose values were computed by hand."""
    run = ByHand(**case)
    check_movement(run, grader.run(d, play, run, hint=hint), grader.facts.finishes)


def of_16_bits(grader):
    """Check bfloat16, in which all these figures are exact, also with fp32 gradients, which need code of their own."""
    by_hand(grader, 2, dtype=torch.bfloat16, lr=1.0)
    if grader.facts.takes_grad_dtype:
        by_hand(grader, 2, dtype=torch.bfloat16, lr=1.0, options=(("grad_dtype", torch.float32),))


def constructor(grader):
    """Check that parameters are 0, as rank 0 has them, on every rank: when they are built, and after a step by 0."""
    expected = "the constructor gives every rank the parameters of rank 0: here 0 everywhere"
    ranks = grader.run(2, play, ByHand(scales=(0,) * 4, start_is_rank=True))
    built, stepped = zip(*(seen.snapshots for seen in ranks))
    missed = "none was" if built[-1].all() else "some were not"
    for rank, values in enumerate(built):
        require(not values.any(), expected, f"elements {spans(values != 0)} of rank {rank} are {values.max():g}",
                f"parameters are broadcast from rank 0 in the constructor, each in place: {missed}")
    for rank, values in enumerate(stepped):
        require(not values.any(), expected, "so it is; but a step with gradients of 0 makes elements "
                f"{spans(values != 0)} of rank {rank} {values.max():g}",
                "what the inner optimizer steps was copied before the broadcast")


def trains(grader, d, otherwise=UNKNOWN, hint=None, **settings):
    """Check that parameters are the same on d ranks, after every step, and as in one process with all data.

    otherwise: the cause where no known mistake computes the same. hint: the cause of an exception or a hang.
    """
    run = Run(**settings)
    ranks = grader.run(d, play, run, hint=hint)
    methods = {}
    if ranks[0].has_zeros_for_none:  # then a parameter without a gradient decays, as with torch's set_to_none=False
        methods["change_grads"] = mistakes.fill_with_zeros
    one_process = mistakes.in_one_process(run, range(d), **methods)
    if run.max_norms:
        check_norms(ranks, one_process.norms[0], run)
    for step in range(1, len(one_process.snapshots)):
        check_equal(ranks, step, run)
        check_trained(ranks, one_process.snapshots, step, run, otherwise)
    n_calls = ranks[0].n_in_no_sync
    require(n_calls == 0, "no communication inside no_sync()", f"{n_calls} collectives in {run.steps} steps",
            "gradients must stay on their rank until a backward pass outside of it, or step()")


def check_equal(ranks, step, run):
    """Compare the parameters of all ranks with those of rank 0."""
    first = ranks[0].snapshots[step]
    number = run.number_of(step)
    for rank, seen in enumerate(ranks):
        if not torch.equal(seen.snapshots[step], first):
            raise Wrong("all ranks have the same parameters after every step", f"after step {number}, "
                        f"{mistakes.difference(seen.snapshots[step], first, run)} between rank 0 and rank {rank}",
                        cause_of_unequal(ranks, step, run), number)


def cause_of_unequal(ranks, step, run):
    runs_alone = mistakes.each_alone(run, len(ranks))
    if all(mistakes.close(seen.snapshots[step], alone.snapshots[step]) for seen, alone in zip(ranks, runs_alone)):
        return NOT_AVERAGED
    if any((seen.snapshots[step] == seen.snapshots[step - 1]).any() for seen in ranks):
        return NOT_RECEIVED
    return "not every rank receives what its owner has stepped"


def check_trained(ranks, expected, step, run, otherwise):
    """Compare parameters, which are the same on all ranks, with `expected`: the snapshots of one process."""
    params = ranks[0].snapshots[step]
    if mistakes.close(params, expected[step]):
        return
    fault = ()
    if run.groups and step == 1 and not run.max_norms:
        fault = mistakes.wrong_hyperparameters(params, run, len(ranks))
    if not fault:
        cause = mistakes.likely_cause(ranks, expected, step, run) or otherwise
        fault = f"{mistakes.difference(params, expected[step], run)} from one process", cause
    difference, cause = fault
    raise Wrong(f"{len(ranks)} ranks train like one process that has the batches of all",
                f"after step {run.number_of(step)}, {difference}", cause, run.number_of(step))


def check_norms(ranks, expected, run):
    """Compare what clip_grad_norm_ has returned on each rank, in the first step, with torch's norm of all gradients."""
    d = len(ranks)
    norms = torch.tensor([seen.norms[0] for seen in ranks])

    def are_close_to(values):
        return mistakes.close(norms, torch.tensor(values))

    if are_close_to(expected):
        return
    if mistakes.close(norms.norm(), torch.tensor(expected)):
        cause = "each rank takes the norm of its own shard: add up the squares over the ranks, then the root"
    elif are_close_to([seen.norms[0] for seen in mistakes.each_alone(run, d)]):
        cause = "the norm is of this rank's own gradients: average them first"
    else:
        known = (cause for cause, seen in mistakes.mistaken_runs(run, d) if are_close_to(seen.norms[0]))
        cause = next(known, UNKNOWN)
    raise Wrong(f"clip_grad_norm_ returns the norm of the averaged gradients of the whole model: {expected:.5f}",
                listed(f"{norm:.5f} on rank {rank}" for rank, norm in enumerate(norms.tolist())), cause)


def state(grader, d):
    """Check that AdamW's two moments exist once. A rank may hold 1/d and the largest parameter."""
    n_held, n_padding = zip(*(seen.state for seen in grader.run(d, play, EIGHT_LAYERS)))  # elements on each rank
    whole = 2 * NUMEL
    total = sum(n_held)
    n_zeros = sum(n_padding)
    shares = listed(f"{n / whole:.0%} on rank {rank}" for rank, n in enumerate(n_held))
    once = f"AdamW's state exists once, about 1/{d} on each rank"
    cause = "some parameters are stepped on several ranks, or padding isn't zero"
    if min(n_held) >= whole:
        cause = "every rank steps every parameter: give the inner optimizer only what this rank owns"
    require(total <= whole, once, f"{total - whole} of its {whole} elements more than once: {shares}", cause)
    require(total >= whole, once, f"{whole - total} of its {whole} elements on no rank: {shares}",
            "some parameters are stepped by an optimizer that is not a torch.optim.Optimizer, or by none")
    require(n_zeros <= MAX_STATE_PADDING * whole, once, f"{1 + n_zeros / whole:.3g} times, with padding: {n_zeros} "
            "elements of zeros", "pad a shard by less: to a multiple of d, or of 64 bytes")
    lines = [f"state      {shares}"]
    if max(n_held) > whole / d + 2 * LARGEST_NUMEL:
        lines.append("unequal    sharing out by elements saves more: the largest parameter first, to who has least")
    return lines


# Bytes are counted in units of 4Ψ · (d-1)/d, where Ψ is the number of parameters: what an all-gather of them sends.
LADDER = {  # stage -> (kinds of its collectives, units that a rank sends on gloo)
    1: ({"all_reduce", "broadcast"}, 3),
    2: ({"all_reduce", "all_gather"}, 3),
    3: ({"reduce_scatter", "all_gather"}, 3),  # with gloo a reduce-scatter sends as much as an all-reduce
    4: ({"send", "recv", "broadcast"}, 2),  # with gloo gradients are sent as messages, parameters as broadcasts
}
SUFFICIENT = {  # kind -> (units that suffice, the cause where there are more)
    "all_reduce": (2, "an all-reduce takes twice the bytes of a broadcast from the owner, or of an all-gather"),
    "all_gather": (1, "a rank gives the all-gather more than it owns: send gradients by all_reduce or reduce_scatter"),
    "broadcast": (1, "parameters are broadcast more than once: the owner alone sends them, and sends each once"),
    "reduce_scatter": (2, "gradients are reduced more than once a step")}


class Traffic:
    """Adds up what a rank sends in a step, in the units of LADDER."""

    def __init__(self, entries, d):
        self.by_kind = Counter()
        for entry in entries:
            self.by_kind[entry.kind] += entry.wire_bytes / (4 * NUMEL * (d - 1) / d)
        self.collectives = counted(entries)
        self.sent = sum(self.by_kind.values())
        self.sent_on_nccl = self.sent - self.by_kind["reduce_scatter"] / 2  # gloo's reduce-scatter is an all-reduce
        self.rung = "none of the four stages sends that"
        kinds_sent = {entry.kind for entry in entries if entry.size >= 1024}  # flags and norms are smaller
        for stage, (kinds, units) in LADDER.items():
            if kinds == kinds_sent and units <= self.sent <= 1.25 * units:  # padding is sent, too
                self.rung = f"the collectives and bytes of stage {stage}"


def ladder(grader):
    """Check what is sent and held. With two ranks an all-gather of all gradients would pass, so try four ranks, too."""
    for d, with_ranks in ((4, "with 4 ranks, "), (2, "")):
        seen = grader.run(d, play, EIGHT_LAYERS)[0]
        traffic = Traffic(seen.entries, d)
        held = seen.held / NUMEL  # bytes per parameter
        excess, cause = max((traffic.by_kind[kind] - units, cause) for kind, (units, cause) in SUFFICIENT.items())
        require(traffic.sent_on_nccl <= 3 * (1 + MAX_SENT_PADDING),
                "at most 3 · 4Ψ · (d-1)/d bytes sent by a rank in a step, as in stages 1 and 2",
                f"{with_ranks}{traffic.sent:.2f} · 4Ψ · (d-1)/d bytes, in {traffic.collectives}",
                cause if excess > 0 else "gradients need 2 of them, and parameters 1")
        if d > 2:  # with two ranks half of the state and a buffer may be as much
            require(held <= 16 * 1.05, "fewer bytes a parameter held after a step than DDP with AdamW holds: 16",
                    f"{with_ranks}{held:.2f}",
                    "beside parameters and gradients a rank holds its own 1/d, and no whole copy")
    native = ""
    if traffic.sent_on_nccl < traffic.sent:
        native = f"; {traffic.sent_on_nccl:.2g} where a reduce-scatter is no all-reduce, as gloo's is"
    return [f"ladder     {traffic.rung}",
            f"a step     {traffic.collectives}; {seen.n_in_backward or 'none'} of them in the backward pass",
            f"sent       {traffic.sent:.2f} · 4Ψ · (d-1)/d bytes a rank"
            f"{native} (DDP alone: 2)",
            f"held       {held:.2f} bytes a parameter after a step (DDP with AdamW: 16)"]


def overlap(grader):
    """Fail if the first layer waits for the last message: messages arrive in order, so it has waited for all."""
    waited = grader.run(2, play, replace(EIGHT_LAYERS, prefetch=True, steps=3))[0].first_layer_waited  # by message
    cause = "what the forward pass reads first must leave first: that is the last bucket of the backward pass"
    if all(waited):
        cause = "a module waits for its own parameters alone: module.parameters(recurse=False)"
    require(not waited or not waited[-1], "the first layer computes while the parameters of others are under way",
            f"it has waited for {sum(waited)} of {len(waited)} messages, the last one too", cause)
    return [f"prefetch   the first layer waits for {sum(waited)} of {len(waited)} messages"]


def is_short(grader, most, hint, what=""):
    """Check that the module has at most `most` code lines. `what`: what else they must contain, in words."""
    n_lines = len(code_lines(Path(grader.facts.file)))
    require(n_lines <= most, f"at most {most} code lines{what}", str(n_lines), hint)
    return [f"lines      {n_lines}"]


def follows_loaded(grader):
    """Check that a step of bfloat16 parameters starts from weights that were loaded after the constructor."""
    run = Run(dtype=torch.bfloat16, reloads=True, steps=1)
    for rank, seen in enumerate(grader.run(2, play, run)):
        distance = (seen.snapshots[-1] - flat(run.model(OTHER_SEED).parameters())).abs().max().item()
        require(distance <= LR, f"after a step of lr {LR} no weight is further than {LR} from what was loaded",
                f"{distance:.2g} on rank {rank}")


def overlaps(grader):
    """Check that at the last gradient some message is in flight for which nobody has waited yet."""
    n_messages = grader.run(2, play, EIGHT_LAYERS)[0].n_in_flight
    require(n_messages > 0, "some messages are in flight when the last gradient is computed", "none is")
    return [f"in flight  {n_messages} messages when the last gradient is computed"]


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
