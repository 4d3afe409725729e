"""The checks of each level: what runs on ranks, and what a wrong figure says about its cause.

A check is a function of the Grader: it returns lines to print, or raises Wrong. To find a cause, a wrong result is
compared with results of known mistakes: what one process computes that sums where the mean is due, and so on.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import torch

from grade import on_ranks
from grade.by_hand import ALMOST, DEFAULTS, NOT_RECEIVED, OWN, SUMMED, TWICE_AVERAGED, ByHand, explain, spans
from grade.grader import UNKNOWN, Wrong, first_wrong, shorten
from grade.on_ranks import Run, in_one_process, play

NO_GROUPS = "every parameter is stepped with the constructor's lr and weight_decay: the inner optimizer needs groups"
EMPTY = "fewer parameters than ranks here: a rank that owns nothing takes part in every collective"
LATE = "a module reads parameters that have not arrived: each must wait for its own, and step() for all"


def interface(grader):
    facts = grader.facts
    missing = [f"{name}()" for name in ("step", "zero_grad") if name in facts.missing]
    first_wrong([
        (not facts.name, "a class DistributedOptimizer, or a core's ShardedOptimizer",
         f"neither is in {grader.package}, nor in {grader.package}.optimizer",
         "docs/exercise.md has a skeleton of the class"),
        (facts.kind != "class", f"{facts.name} is a class", f"its type is {facts.kind}",
         "docs/exercise.md has a skeleton"),
        (missing, "methods step() and zero_grad()", f"{facts.name} has no {' and no '.join(missing)}",
         "docs/exercise.md lists the methods that each level asks for"),
        (facts.refusal, f"{facts.name}(params, optimizer_cls, *, process_group=None, **optimizer_kwargs)",
         shorten(facts.name + facts.refusal), "docs/exercise.md has the constructor's arguments")])


def is_an_optimizer(grader):
    facts = grader.facts
    asked = () if facts.is_core else ("clip_grad_norm_", "no_sync", "state_dict", "load_state_dict")
    missing = [name for name in asked if name in facts.missing]
    faults = ["is none"] * (not facts.is_optimizer) + [f"has no {', '.join(missing)}"] * bool(missing)
    first_wrong([(faults, " with ".join(filter(None, ["a torch.optim.Optimizer", ", ".join(asked)])),
                  f"{facts.name} {' and '.join(faults)}",
                  "docs/exercise.md has the skeleton of level 2, for schedulers, clipping, accumulation and saving")])


def ranges(grader):
    """Of stage 3's buffer, before anything is built on it. In the last case a parameter ends where the shard begins."""
    cases = {((3, 5, 2), (0, 4, 12), 0, 8): [(0, 0, 3, 0), (1, 0, 4, 4)],
             ((3, 5, 2), (0, 4, 12), 8, 16): [(1, 4, 5, 0), (2, 0, 2, 4)],
             ((20,), (0,), 8, 16): [(0, 8, 16, 0)],
             ((8, 8, 8), (0, 8, 16), 8, 16): [(1, 0, 8, 0)]}
    answers = grader.run(2, on_ranks.ranges, tuple(cases))[0]
    first_wrong((came != due, f"of {', '.join(map(str, numels))} elements at {', '.join(map(str, starts))}, in shard "
                 f"{first} to {stop}: (index, start, stop, offset) = {', '.join(map(str, due))}",
                 shorten(", ".join(map(str, came)) or "no range"),
                 "start and stop count from the parameter's first element, offset from the shard's")
                for ((numels, starts, first, stop), due), came in zip(cases.items(), answers))


def by_hand(world_size, hint=None, **case):
    """-> a check."""
    def check(grader, **more):
        one, finishes = ByHand(**case, **more), grader.facts.finishes
        explain(one, grader.run(world_size, play, one, hint=hint), finishes)
    return check


def of_16_bits(grader):
    """All figures are exact in bfloat16. Where gradients may be kept in fp32, that is another way through the code."""
    for options in [(), (("grad_dtype", torch.float32),)][: 1 + grader.facts.takes_grad_dtype]:
        by_hand(2, dtype=torch.bfloat16, lr=1.0)(grader, options=options)


def constructor(grader):
    built, stepped = zip(*(one.snapshots for one in grader.run(2, play, ByHand(scales=(0,) * 4, of_rank=True))))
    ways = "none was" if built[-1].all() else "some were not"
    first_wrong((value.any(), "the constructor gives every rank the parameters of rank 0: here 0 everywhere",
                 said.format(spans(value != 0), rank, value.max().item()), cause)
                for said, cause, values in [
                    ("elements {} of rank {} are {:g}",
                     f"parameters are broadcast from rank 0 in the constructor, each in place: {ways}", built),
                    ("so it is; but a step with gradients of 0 makes elements {} of rank {} {:g}",
                     "what the inner optimizer steps was copied before the broadcast", stepped)]
                for rank, value in enumerate(values))


def trains(d, otherwise=UNKNOWN, **settings):
    """-> a check: every parameter after every step is the same on all d ranks, and as in one process with all data.
    otherwise: the cause where no known mistake computes the same."""
    run = Run(**settings)

    def check(grader):
        ranks, one_process = grader.run(d, play, run), in_one_process(run, range(d))
        if run.max_norms:
            check_norms([one.norms[0] for one in ranks], one_process.norms[0], run)
        first, due = ranks[0].snapshots, one_process.snapshots
        for step in range(1, len(due)):
            number = run.steps if run.prefetch else step
            for rank, its in enumerate(one.snapshots for one in ranks):
                if not torch.equal(its[step], first[step]):
                    raise Wrong("all ranks have the same parameters after every step", f"after step {number}, "
                                f"{difference(its[step], first[step])} between rank 0 and rank {rank}",
                                apart([one.snapshots for one in ranks], step, run), number)
            if not close(first[step], due[step]):
                came, cause = (run.groups and step == 1 and wrong_hyperparameters(first[1], run, d)) or (
                    f"{difference(first[step], due[step])} from one process",
                    likely(first, due, step, run, d) or otherwise)
                raise Wrong(f"{d} ranks train like one process that has the batches of all",
                            f"after step {number}, {came}", cause, number)
        quiet = ranks[0].in_no_sync
        first_wrong([(quiet, "no communication inside no_sync()", f"{quiet} collectives in {run.steps} steps",
                      "gradients must stay on their rank until a backward pass outside of it, or step()")])
    return check


def apart(ranks, step, run):
    """-> the likely cause, when ranks differ from each other after `step`."""
    if all(close(its[step], own.snapshots[step]) for its, own in zip(ranks, each_by_itself(run, len(ranks)))):
        return OWN
    stays = any((its[step] == its[step - 1]).any() for its in ranks)
    return NOT_RECEIVED if stays else "not every rank receives what its owner has stepped"


def mistakes(run, d):
    """Known ones that `run` can show: [(cause, how in_one_process makes it)]."""
    n = run.micro_batches

    def loads(change):
        return {"load_state_dict": lambda self, saved: torch.optim.Optimizer.load_state_dict(
            self, {**saved, **change(self, saved)})}

    def values(self, param):
        return param.detach().clone()

    rows = [
        (run.schedule, "the lr of a scheduler doesn't arrive: before each step copy it from param_groups to the inner "
         "optimizer's", {"used": lambda self, now: self.start}),
        (run.schedule, "the scheduler's lr arrives, its betas don't: hand on all that param_groups holds, and not lr "
         "alone", {"used": lambda self, now: [{**old, "lr": new["lr"]} for old, new in zip(self.start, now)]}),
        (run.groups, NO_GROUPS, {"run": replace(run, groups=False)}),
        (n > 1, "only the last micro-batch counts: the gradients of those before were dropped",
         {"factor": lambda step, micro: micro == n - 1}),
        (n > 1, "only the first micro-batch counts", {"factor": lambda step, micro: micro == 0}),
        (n > 1, "micro-batches that were averaged are sent again with the next one",
         {"factor": lambda step, micro: n - micro}),
        (n > 1, "micro-batches are averaged: their gradients add up, as in torch", {"factor": lambda *_: 1 / n}),
        (run.max_norms, "the norm is right, and the gradients were not scaled by max_norm / norm",
         {"scaled": lambda self, ratio, norm: (1, norm)}),
        (run.max_norms, "gradients are scaled also where their norm is below max_norm: the factor is at most 1",
         {"scaled": lambda self, ratio, norm: (ratio, norm)}),
        (run.max_norms, "√d times the norm: every rank adds the squares of the whole model, so they count d times",
         {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm * d**0.5)}),
        (run.max_norms, "the norm after clipping: return the one before",
         {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm * min(ratio, 1))}),
        (run.max_norms, "the root is missing: this is the square of the norm",
         {"scaled": lambda self, ratio, norm: (min(ratio, 1), norm**2)}),
        (run.resume, "the state is lost: load_state_dict() leaves the inner optimizer as new",
         loads(lambda self, saved: {"state": {}})),
        (run.resume, "the lr of a scheduler is lost: state_dict() has the groups' hyperparameters, too",
         loads(lambda self, saved: {"param_groups": self.state_dict()["param_groups"]})),
        (run.resume, "the lr that is loaded is that of the last step: a scheduler has changed the outer groups since",
         loads(lambda self, saved: {"param_groups": [{**one, "lr": one["last_lr"]} for one in saved["param_groups"]]})),
        (run.resume, "state and lr are lost: load_state_dict() leaves both as new",
         {"load_state_dict": lambda self, saved: None}),
        (True, SUMMED, {"factor": lambda *_: d}),
        (True, TWICE_AVERAGED, {"factor": lambda *_: 1 / d}),
        (True, "gradients of the step before are added again: zero_grad() must forget them",
         {"kept": lambda self, param: param.grad}),
        (True, "parameters were taken for gradients: new gradients miss the buffer, which zero_grad() should have "
         "zeroed", {"kept": values, "factor": lambda step, micro: step == 0}),
        (True, "gradients were added to parameters: the buffer must be zeroed when these have been copied out",
         {"kept": values}),
        (True, DEFAULTS, {"run": replace(run, defaults=True)}),
        (run.optimizer != "SGD", "the optimizer's state is new in each step: make the inner optimizer once, in the "
         "constructor", {"kept": lambda self, param: self.state.clear()}),
        (run.optimizer != "SGD", "the inner optimizer is not optimizer_cls", {"run": replace(run, optimizer="SGD")})]
    return [(cause, {"run": run, "ranks": range(d), **how}) for is_possible, cause, how in rows if is_possible]


def likely(came, due, step, run, d):
    """-> the cause, where one process that makes a known mistake gets what `came`; "" otherwise. came, due: snapshots
    after each step, of which that of `step` is the first to differ."""
    for cause, how in mistakes(run, d):
        if all(map(close, came, in_one_process(**how).snapshots)):
            return cause
    own = torch.stack([one.snapshots[1] for one in each_by_itself(run, d)])
    if step == 1 and torch.isclose(own, came[1], rtol=1e-4, atol=2e-6).any(dim=0).all():  # that of its owner
        return OWN
    is_near = (came[step] - due[step]).abs().max() < 0.01 * (due[step] - due[step - 1]).abs().max()
    return ALMOST if is_near and not run.prefetch else ""


def wrong_hyperparameters(came, run, d):
    """-> (which parameters were stepped with whose hyperparameters, the cause) after the first step; None if unknown:
    the step is done with every group's lr and every group's weight decay, and compared parameter by parameter."""
    names, numels = names_and_numels(run)
    start = [{key: group[key] for key in ("lr", "weight_decay")} for group in run.params(run.model(0))]
    words = {"own": "its own", "constructor": "the constructor's", 0: "group 0's", 1: "group 1's", 2: "group 2's",
             "no": "no"}
    sources = {"constructor": run.settings()[1], "no": {"weight_decay": 0}, **dict(enumerate(start))}
    how_stepped = {}  # name: (whose lr, whose weight decay)
    for whose in itertools.product([*words][:-1], words):
        chosen = [{key: sources.get(source, own)[key] for key, source in zip(own, whose)} for own in start]
        values = in_one_process(replace(run, steps=1), range(d), used=lambda self, now: chosen).snapshots[1]
        for name, *both in zip(names, values.split(numels), came.split(numels)):
            if close(*both):
                how_stepped.setdefault(name, whose)
    wrong = {name: how_stepped.get(name) for name in names if how_stepped.get(name) != ("own", "own")}
    if None in wrong.values():
        return None
    lr_of, decay_of = how = next(iter(wrong.values()))
    alike = [name for name in wrong if wrong[name] == how]
    lrs = {lr for lr, _ in wrong.values()}
    return (f"{', '.join(alike[:2])}{' …' * (len(alike) > 2)} moved with {words[lr_of]} lr and {words[decay_of]} "
            "weight decay",
            NO_GROUPS if set(wrong.values()) == {("constructor", "constructor")} else
            "the weight decay of a group is lost: hand on everything that a group holds, and not lr alone"
            if lrs == {"own"} else "the first group's lr is taken for all: copy each group's own"
            if lrs <= {"own", 0} else
            "groups are paired wrongly: a rank that owns nothing of a group still needs that group, empty")


def each_by_itself(run, d):
    return [in_one_process(run, [rank]) for rank in range(d)]


def close(a, b):
    """Over three ranks and more the order of a sum is the layout's: equal up to rounding."""
    return torch.allclose(a, b, rtol=1e-4, atol=2e-6)


def names_and_numels(run):
    return zip(*((name, param.numel()) for name, param in run.model(0).named_parameters()))


def difference(came, due):
    """-> "2.weight, 2.bias differ by up to 0.12", of two (numel,)."""
    names, numels = names_and_numels(Run())
    is_equal = torch.equal if close(came, due) else close  # two ranks may differ by the last bits, and mustn't
    differing = [name for name, a, b in zip(names, came.split(numels), due.split(numels)) if not is_equal(a, b)]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return f"{', '.join(differing[:3])}{more} differ by up to {(came - due).abs().max():.2g}"


def check_norms(came, due, run):
    """What clip_grad_norm_ has returned in the first step, on every rank, against torch's on the whole model."""
    d = len(came)

    def are(norms):
        return len(norms) == d and all(math.isclose(*both, rel_tol=1e-4) for both in zip(came, norms))

    if not are([due] * d):
        adds_up = math.isclose(math.hypot(*came), due, rel_tol=1e-4)
        known = [("each rank takes the norm of its own shard: add up the squares over the ranks, then the root",
                  came * adds_up),
                 ("the norm is of this rank's own gradients: average them first",
                  [one.norms[0] for one in each_by_itself(run, d)]),
                 *((cause, in_one_process(**how).norms[:1] * d) for cause, how in mistakes(run, d))]
        raise Wrong(f"clip_grad_norm_ returns the norm of the averaged gradients of the whole model: {due:.5f}",
                    ", ".join(f"{norm:.5f} on rank {rank}" for rank, norm in enumerate(came)),
                    next((cause for cause, norms in known if are(norms)), UNKNOWN))


LAYERS = Run(optimizer="AdamW", steps=2, sizes=(64,) * 9, counts=True, frees=False)
NUMEL, LARGEST = 8 * 65 * 64, 64 * 64


def state(world_size):
    """-> a check of AdamW's two moments: a rank may have more than 1/d by the largest parameter. Padding has zeros."""
    def check(grader):
        (held, padding), whole = zip(*(one.state for one in grader.run(world_size, play, LAYERS))), 2 * NUMEL
        more, zeros = sum(held) - whole, sum(padding)
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
        unequal = "unequal    sharing out by elements saves more: the largest parameter first, to who has least"
        return [f"state      {shares}", *[unequal] * (max(held) > whole / world_size + 2 * LARGEST)]
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
    """Judged with four ranks, too: with two, a rank that gives all it has to all others sends no more than a sum."""
    for world_size in (4, 2):
        one, by_kind = grader.run(world_size, play, LAYERS)[0], Counter()
        for entry in one.entries:
            by_kind[entry.kind] += entry.wire_bytes / (4 * NUMEL * (world_size - 1) / world_size)
        counts = Counter(entry.kind for entry in one.entries)
        sent, collectives = sum(by_kind.values()), ", ".join(f"{n} {kind}" for kind, n in counts.items())
        of, held = f"with {world_size} ranks, " * (world_size > 2), one.held / NUMEL
        native = sent - by_kind["reduce_scatter"] / 2  # gloo's sends twice what it has to
        over, why = max((by_kind[kind] - suffices, why) for kind, (suffices, why) in TOO_MANY.items())
        first_wrong([
            (native > 3 * 1.2, "at most 3 · 4Ψ · (d-1)/d bytes sent by a rank in a step, as in stages 1 and 2",
             f"{of}{sent:.2f} · 4Ψ · (d-1)/d bytes, in {collectives}",
             why if over > 0 else "gradients need 2 of them, and parameters 1"),
            (world_size == 4 and held > 16 * 1.05,
             "fewer bytes a parameter held after a step than DDP with AdamW holds: 16", f"{of}{held:.2f}",
             "beside parameters and gradients a rank holds its own 1/d, and no whole copy")])
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
    awaited = grader.run(2, play, replace(LAYERS, prefetch=True, steps=3))[0].awaited
    first_wrong([(awaited and awaited[-1], "the first layer computes while the parameters of others are under way",
                  f"it has waited for {sum(awaited)} of {len(awaited)} messages, the last one too",
                  "a module waits for its own parameters alone: module.parameters(recurse=False)" if all(awaited) else
                  "what the forward pass reads first must leave first: that is the last bucket of the backward pass")])
    return [f"prefetch   the first layer waits for {sum(awaited)} of {len(awaited)} messages"]


LEVELS = {  # level -> (title, checks: (name, function), and where it isn't of all classes: the fact that it is of)
    1: ("Level 1: It trains", [
        ("the interface", interface),
        ("ranges_in_shard by hand", ranges, "has_ranges"),
        ("16 elements by hand, 2 ranks", by_hand(2)),
        ("16 elements by hand, 3 ranks", by_hand(3, numels=(5, 6, 2, 3))),
        ("all ranks start from rank 0's parameters", constructor),
        ("SGD: ranks equal each other and one process, 2 ranks", trains(2)),
        ("the same, 3 ranks", trains(3)),
        ("AdamW", trains(2, optimizer="AdamW")),
        ("gradients in another order on rank 1", by_hand(2, scales=(1, 2, 4, 8), reverse=True)),
        ("one parameter, 3 ranks", by_hand(3, numels=(4,), scales=(1,), hint=EMPTY)),
        ("prefetch_params: rank 1 is late", trains(2, LATE, prefetch=True), "prefetches"),
        ("prefetch_params: the first layer waits for its own", overlap, "prefetches"),
        ("the state is spread over 2 ranks", state(2)),
        ("the state is spread over 3 ranks", state(3)),
        ("collectives and bytes", ladder),
    ]),
    2: ("Level 2: It is an optimizer", [
        ("its methods", is_an_optimizer),
        ("three groups, with their own lr and weight decay", trains(2, optimizer="AdamW", groups=True)),
        ("a scheduler of torch", trains(2, groups=True, schedule="lr")),
        ("a scheduler that writes betas, too", trains(2, optimizer="AdamW", schedule="cycle")),
        ("three micro-batches equal one large batch", trains(2, micro_batches=3)),
        ("the same, inside no_sync()", trains(2, micro_batches=3, no_sync=True), "is_whole"),
        ("a loop without zero_grad()", by_hand(2, steps=2, zero=False)),
        ("parameters of 16 bits", of_16_bits),
        ("gradients are gone after a step, as it says", by_hand(2, steps=2, zero=False, gone=True), "says_gone"),
        ("clip_grad_norm_ equals torch's on the whole model", trains(2, max_norms=(0.05, 100.0, 0.05)), "is_whole"),
        ("state_dict() and load_state_dict() go on where they left off",
         trains(2, optimizer="AdamW", steps=4, resume=True, schedule="lr"), "is_whole"),
    ]),
}
