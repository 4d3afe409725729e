"""Holds the checks of levels 1 and 2, which grade the sharded optimizer of a learner's package.

A level is a title and a list of Checks. The function of a Check trains with the package's optimizer on d processes, the
ranks, and compares what was noted there with the right values. `by_hand` computes the right values by arithmetic, and
`trains` takes them from one process that has the batches of all ranks. The function returns lines to print, or None.
If the package fails it raises a verdict, Wrong: what was expected, what came instead, and the likely cause.
require(condition, expected, came, cause) does so unless the condition holds. A Failed is the Wrong of an exception, a
death or a hang on a rank.

    Run, ByHand    describe a training run (grade/runs.py, grade/by_hand.py). `settings` are values for their fields
    Seen           what was noted on one rank in a run. Its snapshots hold all parameters of the model after the
                   constructor and after each step; grade/runs.py explains its other fields
    ledger         lists the collectives that a rank begins
    whole, core    the graded class is whole if it is a DistributedOptimizer. A core is a ShardedOptimizer, which lacks
                   no_sync(), clipping and saving
    inner          optimizer: one of torch's, which the class builds for the parameters that a rank owns
"""

import functools
from collections import Counter
from dataclasses import replace

import torch

from grade import mistakes
from grade.by_hand import ByHand, check_movement, spans
from grade.compare import check_norm, check_params, difference
from grade.grader import Failed, require
from grade.runs import LR, OTHER_SEED, Run, counted, flat_copy, play

# Likely causes, which a learner reads. Each names a mistake, or the rule that the package seems to break.
EMPTY = "fewer parameters than ranks here: a rank that owns nothing takes part in every collective"
LATE = "a module reads parameters that have not arrived: each must wait for its own, and step() for all"
UNUSED = "where a rank has no gradient in a step it sends zeros, and none of an earlier step; divide by all d"
LONG = "the first steps are right: what is counted or added up from step to step goes wrong later"
THAWED = "a parameter that was frozen in the constructor needs an owner, too: ask for .grad in step()"
STRIDES = "a parameter may lie transposed in memory: reshape() goes by its shape, storage and view(-1) by its memory"
GROUPS = "groups match one to one, empty ones too: a rank that owns nothing of a group still needs that group"
PLACES = "process_group may have some of all ranks: src is group_src then, and d is the size of the group"
MAIN_COPIES = "fp32 copies of 16-bit parameters belong to state_dict(): made anew from the model they are rounded"

N_LAYERS = 8
WIDTH = 64  # a layer's number of inputs, and of outputs
EIGHT_LAYERS = Run(optimizer="AdamW", steps=2, sizes=(WIDTH,) * (N_LAYERS + 1), counts_memory=True)
LARGEST_NUMEL = WIDTH * WIDTH  # elements of a layer's weight, the largest parameter of EIGHT_LAYERS
NUMEL = N_LAYERS * (LARGEST_NUMEL + WIDTH)  # elements of all weights and biases of EIGHT_LAYERS; Ψ in texts
# In a Run with `unused`, elements 0-5 of a snapshot are a parameter that one rank uses, 6-11 one that no rank uses.
USED_BY_NONE = slice(6, 12)
MAX_SENT_PADDING = 0.2  # how much padding a rank may send, as a part of the bytes that it sends without padding
MAX_GROWTH = 0.01  # how many bytes more a rank may keep after each step, for each element of the parameters


class Check:
    """Has a name, which is printed, and a function, which is called with a Grader: function(grader, **settings).

    fact: the name of an attribute of grader.facts, which describes the graded class. The check runs only if the
    attribute is true: "is_whole", or "prefetches" if the class has prefetch_params(). With "" the check always runs.
    """

    def __init__(self, name, function, fact="", /, **settings):
        self.name = name
        self.fact = fact
        self.function = functools.partial(function, **settings)


def play_on(grader, run, d=2, cause_of_error=None):
    """Let d ranks do a Run, and return the Seen of each. Raise Failed, with `cause_of_error`, if a rank fails."""
    n_ranks = d + 1 if run.without_rank_0 else d  # one more for rank 0, which doesn't train
    return grader.run(n_ranks, play, run, cause_of_error=cause_of_error)[-d:]  # of the ranks that have trained


def interface(grader):
    """Check that the package has a class, with the methods that training calls."""
    facts = grader.facts
    require(facts.name, "a class DistributedOptimizer, or a core's ShardedOptimizer",
            f"neither is in {grader.package}, nor in {grader.package}.optimizer", "docs/exercise.md has a skeleton")
    missing = [f"{name}()" for name in ("step", "zero_grad") if name in facts.missing]
    require(not missing, "methods step() and zero_grad()", f"{facts.name} has no {' and no '.join(missing)}",
            "docs/exercise.md lists the methods that each level asks for")


def is_an_optimizer(grader):
    """Check that the class has the base class and the methods of level 2. A core needs only the base class."""
    facts = grader.facts
    expected = "a torch.optim.Optimizer"
    lacks = []
    if not facts.is_optimizer:
        lacks.append("is none")
    if facts.is_whole:
        methods = "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict"
        expected += f" with {', '.join(methods)}"
        missing = [name for name in methods if name in facts.missing]
        if missing:
            lacks.append(f"has no {', '.join(missing)}")
    require(not lacks, expected, f"{facts.name} {' and '.join(lacks)}",
            "docs/exercise.md has the skeleton of level 2, for schedulers, clipping, accumulation and saving")


def by_hand(grader, d=2, cause_of_error=None, **settings):
    """Check every element of the parameters after a ByHand with these settings, against values from arithmetic."""
    run = ByHand(**settings)

    def play_again(other_run):
        """Return the Seen of each rank in another run, or None if a rank fails. check_movement tries causes so."""
        try:
            return play_on(grader, other_run, d)
        except Failed:
            return None

    check_movement(run, play_on(grader, run, d, cause_of_error), grader.facts.finishes, play_again)


def of_16_bits(grader):
    """Check bfloat16 parameters. bfloat16 represents all numbers of this run, and fp16 doesn't: they are too large."""
    by_hand(grader, dtype=torch.bfloat16, lr=2.0**-20, scales=(2**17,) * 4)


def nan_arrives(grader):
    """Check that a nan in rank 1's gradients makes parameters nan on every rank, as in torch."""
    for rank, seen in enumerate(play_on(grader, ByHand(nan_rank=1))):
        is_finite = seen.snapshots[-1].isfinite()
        require(not is_finite.any(), "where rank 1's gradient is nan, parameters become nan on every rank, as in torch",
                f"elements {spans(is_finite)} are finite on rank {rank}", "a nan is replaced, or its step left out: "
                "training goes on with fewer gradients, and nobody learns of it")


def constructor(grader, **settings):
    """Check that the constructor copies rank 0's parameters to every rank. A step with gradients of 0 must keep them.

    Before the constructor all elements are r on rank r, so all must become 0.
    """
    expected = "the constructor gives every rank the parameters of the first rank: here 0 everywhere"
    ranks = play_on(grader, ByHand(scales=(0,) * 4, start_is_rank=True, **settings))
    built = [seen.snapshots[0] for seen in ranks]  # for each rank its parameters when the constructor has returned
    # No element of the last rank was 0 before the constructor. If none is 0 now, the rank has received nothing.
    missed = "none was" if built[-1].all() else "some were not"
    for rank, values in enumerate(built):
        require(not values.any(), expected, f"elements {spans(values != 0)} of rank {rank} are {values.max():g}",
                f"parameters are broadcast from the first rank in the constructor, each in place: {missed}")
    for rank, seen in enumerate(ranks):
        values = seen.snapshots[1]
        require(not values.any(), expected, "the constructor does; but a step with gradients of 0 makes elements "
                f"{spans(values != 0)} of rank {rank} {values.max():g}",
                "the inner optimizer's copies were made before the broadcast")


def of_some_ranks(grader):
    """Check the constructor and a step on ranks 1 and 2 of 3, which train in a process group of their own."""
    constructor(grader, without_rank_0=True)
    by_hand(grader, cause_of_error=PLACES, without_rank_0=True)


def trains(grader, d=2, cause_if_unknown="", cause_of_error=None, **settings):
    """Check that d ranks have the parameters of one process with all their batches, after every step of a Run.

    cause_if_unknown: the cause to name if no mistake of grade/mistakes.py gives the parameters that the ranks have.
    """
    run = Run(**settings)
    ranks = play_on(grader, run, d, cause_of_error)
    one_process = mistakes.in_one_process(run, range(d))
    lines = []
    if run.unused:
        lines.append("unused     what no rank uses stays")
        used_by_none = ranks[0].snapshots[-1][USED_BY_NONE]
        # Run.model fills this parameter with 1. Weight decay may have changed it, which is right, too.
        if (used_by_none != 1).any():
            lines = ["unused     what no rank uses has a gradient of zeros, as in a buffer, and decays"]
            one_process = mistakes.in_one_process(run, range(d), before_step=mistakes.fill_with_zeros)
    for step in range(1, len(one_process.snapshots)):
        if run.max_norms:
            check_norm(run, ranks, one_process.norms[step - 1], step)
        check_params(run, ranks, one_process.snapshots, step, cause_if_unknown)
    require(not any(seen.draws for seen in ranks), "a step leaves the random numbers of torch and random as they are",
            "a step changes their state",
            "a seed or a draw in step() repeats or shifts what the model draws: use a generator of your own")
    n_calls = ranks[0].n_in_no_sync
    require(not n_calls, "no communication inside no_sync()", f"{n_calls} collectives in {run.steps} steps",
            "gradients must stay on their rank until a backward pass outside of it, or step()")
    return lines


def resumes_in_16_bits(grader):
    """Check that a run that saves, and loads into a new optimizer, has the same bits as a run that goes straight on."""
    run = Run(optimizer="AdamW", steps=4, dtype=torch.bfloat16)
    straight = play_on(grader, run)[0].snapshots
    resumed = play_on(grader, replace(run, resume=True))[0].snapshots
    for step in (3, 4):
        require(torch.equal(resumed[step], straight[step]),
                "bfloat16: training goes on from state_dict() as if nothing had happened", f"after step {step}, "
                f"{difference(resumed[step], straight[step], run)} from the run that goes on", MAIN_COPIES)


def state(grader, d=2):
    """Check that each element of AdamW's two moments exists on exactly one rank."""
    n_held = [seen.n_state for seen in play_on(grader, EIGHT_LAYERS, d)]  # for each rank its elements that aren't 0
    whole = 2 * NUMEL  # elements of both moments
    total = sum(n_held)
    shares = ", ".join(f"{n / whole:.0%} on rank {rank}" for rank, n in enumerate(n_held))
    expected = f"AdamW's state exists once, about 1/{d} on each rank"
    cause = "some parameters are stepped on several ranks, or padding isn't zero"
    if min(n_held) >= whole:
        cause = "every rank steps every parameter: give the inner optimizer only what this rank owns"
    require(total <= whole, expected, f"{total - whole} of its {whole} elements more than once: {shares}", cause)
    require(total >= whole, expected, f"{whole - total} of its {whole} elements on no rank: {shares}",
            "some parameters are stepped by an optimizer that is not a torch.optim.Optimizer, or by none")
    lines = [f"state      {shares}"]
    if max(n_held) > whole / d + 2 * LARGEST_NUMEL:  # a fair share, and both moments of the largest parameter more
        lines.append("unequal    allowed, but wasteful: the largest parameter first, to the rank that has least")
    return lines


# Bytes sent are counted in units. A unit is what a rank sends in an all-gather of all parameters: 4Ψ · (d-1)/d bytes.
# The parameters have Ψ elements of 4 bytes. An all-reduce of all gradients takes 2 units.
SUFFICIENT = {  # kind of collective -> (units that suffice for a step, the likely cause of more units)
    "all_reduce": (2, "an all-reduce takes twice the bytes of a broadcast from the owner, or of an all-gather"),
    "all_gather": (1, "a rank gives the all-gather more than it owns: send gradients by all_reduce or reduce_scatter"),
    "broadcast": (1, "parameters are broadcast more than once: the owner alone sends them, and sends each once"),
    "reduce_scatter": (2, "gradients are reduced more than once a step")}


def units_sent(entries, d):
    """Return {kind of collective: units that a rank sends}. entries: the collectives of a step, from the ledger."""
    units = Counter()
    for entry in entries:
        units[entry.kind] += entry.wire_bytes / (4 * NUMEL * (d - 1) / d)
    return units


def cause_of_excess(units):
    """Return the likely cause of too many units, by the kind of collective that exceeds its sufficient units most."""
    excess = {kind: units[kind] - sufficient for kind, (sufficient, _) in SUFFICIENT.items()}
    kind = max(excess, key=excess.get)
    _, cause = SUFFICIENT[kind]
    # "of them" means units: the learner has read "3 · 4Ψ · (d-1)/d bytes" above.
    return cause if excess[kind] > 0 else "gradients need 2 of them, and parameters 1"


def sends_and_holds(grader):
    """Check the bytes that a rank sends in a step and holds after it, on four ranks and on two.

    With only two ranks, a package that gathers every rank's gradients on every rank would pass.
    """
    for d in 4, 2:
        with_ranks = "with 4 ranks, " if d == 4 else ""
        seen = play_on(grader, EIGHT_LAYERS, d)[0]
        units = units_sent(seen.entries, d)
        sent = units.total()
        # gloo does a reduce-scatter as an all-reduce, which sends twice the bytes of NCCL's reduce-scatter.
        sent_on_nccl = sent - units["reduce_scatter"] / 2
        collectives = counted(seen.entries)
        held = seen.held / NUMEL  # bytes per parameter
        require(sent_on_nccl <= 3 * (1 + MAX_SENT_PADDING),
                "at most 3 · 4Ψ · (d-1)/d bytes sent by a rank in a step, as in stages 1 and 2",
                f"{with_ranks}{sent:.2f} · 4Ψ · (d-1)/d bytes, in {collectives}", cause_of_excess(units))
        # DDP holds 16 bytes for each parameter: 4 of the parameter, 4 of its gradient, 8 of AdamW's two moments. On two
        # ranks a right package may hold as many: half of the moments, and a buffer. So this isn't checked there.
        if d > 2:
            due = 8 + 8 / d  # a parameter, its gradient, and this rank's part of the moments
            require(held <= 16 * 1.05, "fewer bytes a parameter held after a step than DDP with AdamW holds: 16",
                    f"{with_ranks}{held:.2f}", f"parameters and gradients take 8 and 1/{d} of the moments {8 / d:g}: "
                    f"{held - due:.2g} more are kept")
    # The figures of the loop's last pass, with two ranks, are printed.
    native = ""
    if sent_on_nccl < sent:  # on NCCL a rank sends less
        native = f"; {sent_on_nccl:.2g} where a reduce-scatter is no all-reduce, as gloo's is"
    return [f"a step     {collectives}; {seen.n_in_backward or 'none'} of them in the backward pass",
            f"sent       {sent:.2f} · 4Ψ · (d-1)/d bytes a rank{native} (DDP alone: 2)",
            f"held       {held:.2f} bytes a parameter after a step (DDP with AdamW: 16)"]


def keeps_nothing(grader):
    """Check that a rank holds as much after step 6 as after step 2."""
    after_2 = play_on(grader, EIGHT_LAYERS)  # a run of two steps
    after_6 = play_on(grader, replace(EIGHT_LAYERS, steps=6))
    # How many bytes more a rank holds after 4 further steps: the most of all ranks.
    n_more = max(later.held - earlier.held for earlier, later in zip(after_2, after_6))
    growth = n_more / 4 / NUMEL  # bytes in a step, for each element of the parameters
    require(growth <= MAX_GROWTH, "a rank holds as much after step 6 as after step 2",
            f"{growth:.2f} bytes a parameter more in each step", "each step leaves something behind: in a list, "
            "a closure or a graph")


def first_layer_waits(grader):
    """Check that after prefetch_params() the first layer computes before the last message of parameters has arrived."""
    seen = play_on(grader, replace(EIGHT_LAYERS, prefetch=True, steps=3))[0]
    waited = seen.first_layer_waited  # for each message, in order of sending: whether the first layer has waited for it
    # `waited` is empty if the package sends nothing after the inner optimizer's step.
    cause = "send first the parameters that the forward pass reads first: the last bucket of the backward pass"
    if all(waited):
        cause = "a module waits for its own parameters alone: module.parameters(recurse=False)"
    require(not waited or not waited[-1], "the first layer computes while the parameters of others are under way",
            f"it has waited for {sum(waited)} of {len(waited)} messages, the last one too", cause)
    return [f"prefetch   the first layer waits for {sum(waited)} of {len(waited)} messages"]


def transposed(grader):
    """Check matrices that lie transposed in memory. A package may refuse them by an exception, but not mix them up."""
    try:
        trains(grader, cause_if_unknown=STRIDES, strides=True)
    except Failed as failed:  # failed.came begins with the exception in a line
        return ["refused    " + failed.came.split("\n")[0]]


def follows_loaded(grader):
    """Check that a step of bfloat16 parameters starts from weights that were loaded after the constructor.

    SGD moves an element by lr · gradient, and gradients are below 1 here. Older weights are farther away.
    """
    run = Run(dtype=torch.bfloat16, reloads=True, steps=1)
    loaded = flat_copy(run.model(OTHER_SEED).parameters())
    for rank, seen in enumerate(play_on(grader, run)):
        distance = (seen.snapshots[-1] - loaded).abs().max().item()
        require(distance <= LR, f"after a step of lr {LR} no weight is further than {LR} from what was loaded",
                f"{distance:.2g} on rank {rank}")


def sends_in_backward(grader):
    """Check that messages are sent in the background: some are in flight when the last gradient is computed."""
    n_messages = play_on(grader, EIGHT_LAYERS)[0].n_in_flight
    require(n_messages, "some messages are in flight when the last gradient is computed", "none is")
    return [f"in flight  {n_messages} messages when the last gradient is computed"]


# A drill is a copy of a stage with a fault, which a learner has to find. Only drills have these checks.
CHECKS_OF_DRILLS = [Check("weights that are loaded after the constructor are trained", follows_loaded),
                    Check("gradients are in flight while the backward pass computes", sends_in_backward)]
LEVELS = {  # level -> (title, Checks). A Check gets its name, its function, a fact if it needs one, and settings
    1: ("Level 1: It trains", [
        Check("the interface", interface),
        Check("16 elements by hand, 2 ranks", by_hand),
        Check("16 elements by hand, 3 ranks", by_hand, d=3, numels=(5, 6, 2, 3)),
        Check("all ranks start from rank 0's parameters", constructor),
        Check("SGD: ranks equal each other and one process, 2 ranks", trains),
        Check("the same, 3 ranks", trains, d=3),
        Check("AdamW", trains, optimizer="AdamW"),
        Check("gradients in another order on rank 1", by_hand, scales=(1, 2, 4, 8), reverses=True),
        Check("one parameter, 3 ranks", by_hand, d=3, numels=(4,), scales=(1,), cause_of_error=EMPTY),
        Check("prefetch_params: rank 1 is late", trains, "prefetches", cause_if_unknown=LATE, prefetch=True),
        Check("prefetch_params: the first layer waits for its own", first_layer_waits, "prefetches"),
        Check("the state is spread over 2 ranks", state),
        Check("the state is spread over 3 ranks", state, d=3),
        Check("collectives and bytes", sends_and_holds),
        Check("nothing is kept from step to step", keeps_nothing),
    ]),
    2: ("Level 2: It is an optimizer", [
        Check("its methods", is_an_optimizer),
        Check("three groups, with their own lr and weight decay", trains, optimizer="AdamW", groups=True,
              cause_if_unknown=GROUPS),
        Check("a scheduler of torch", trains, groups=True, schedule="lr"),
        Check("a scheduler that writes betas, too", trains, optimizer="AdamW", schedule="cycle"),
        Check("three micro-batches equal one large batch", trains, micro_batches=3),
        Check("the same, inside no_sync()", trains, "is_whole", micro_batches=3, no_sync=True),
        Check("a loop without zero_grad()", by_hand, steps=2, zeroes=False),
        Check("zero_grad() drops a backward pass, and set_to_none=False, too", trains, discards=True),
        Check("parameters of 16 bits", of_16_bits),
        Check("a nan on one rank", nan_arrives),
        Check("a process group of ranks 1 and 2", of_some_ranks),
        Check("120 steps", trains, optimizer="AdamW", steps=120, sizes=(2, 2), cause_if_unknown=LONG),
        Check("a layer that was frozen in the constructor", trains, "is_whole", thaws=True,
              cause_if_unknown=THAWED, cause_of_error=THAWED),
        Check("matrices that lie transposed in memory", transposed, "is_whole"),
        Check("a parameter that one rank uses, one that none uses", trains, "is_whole", cause_if_unknown=UNUSED,
              cause_of_error=UNUSED, optimizer="AdamW", unused=True, steps=4),
        Check("clip_grad_norm_ equals torch's on the whole model", trains, "is_whole", groups=True,
              max_norms=(0.05, 100.0, 0.05)),
        Check("state_dict() and load_state_dict() go on where they left off", trains, "is_whole",
              optimizer="AdamW", steps=4, resume=True, schedule="lr"),
        Check("the same, with parameters of 16 bits", resumes_in_16_bits, "is_whole"),
    ]),
}
