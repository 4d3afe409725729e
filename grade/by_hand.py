"""A step by hand, and what its elements say about the mistake: they start at 0, 1, 2, …, so each can be decoded.

An element is where it should be, or where it was, or it holds what another should, padding, or a gradient.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from grade.grader import UNKNOWN, Wrong, at, shorten
from grade.on_ranks import LR, Run

SUMMED = "the gradients are summed and not averaged: divide by the number of ranks"
TWICE_AVERAGED = "the gradients are divided by the number of ranks twice"
OWN = "each rank steps with its own gradients: not averaged over the ranks, or the average went into a copy"
NOT_RECEIVED = "what was received did not reach the parameters: torch.cat copies, and so may flatten() and reshape()"
DEFAULTS = "lr and weight_decay of the constructor do not reach the inner optimizer"
ALMOST = "almost right, to two or three digits: something travels or is summed in 16 bits"
ORDER = "gradients come in another order on rank 1: what leaves must leave in one order, the same on every rank"
USED_UP = "the second step added its gradients to parameters: step() must leave a buffer that held them zeroed"
TOO_EARLY = "nothing is sent after the inner optimizer has stepped: what it steps must travel after that, not before"
STALE = "what a rank has stepped reaches the others and not its own model: its own part is to be copied, too"
OVERWRITTEN = "what was stepped was overwritten by a rank that does not own it: who broadcasts must be who has stepped"
NOTHING = {  # what the inner optimizer was fed -> why nothing has moved
    "nothing": "no torch optimizer has stepped a parameter: step() steps the inner optimizer, which owns parameters",
    "no gradients": "the inner optimizer's parameters have no gradients: they are copies that nobody gave one",
    "zeros": "the inner optimizer's gradients are all 0: main gradients must be filled with what was reduced",
    "gradients": "the inner optimizer stepped copies (main parameters), which were not copied to the model",
}
AS_PADDING = "0, as padding is"


@dataclass(frozen=True)
class ByHand(Run):
    """Elements 0, 1, 2, … in a few parameters; rank r's gradient of parameter k is 2^r · scales[k]: no sum of some is
    another's."""

    steps: int = 1
    numels: tuple = (4, 4, 4, 4)
    scales: tuple = (1, 1, 1, 1)
    dtype: torch.dtype = torch.float32
    options: tuple = ()  # further arguments of the constructor: ("name", value), …
    lr: float = LR
    reverse: bool = False  # on rank 1 gradients come in the other order
    gone: bool = False  # gradients, after a step: without zero_grad() they may add up, as in torch, or not

    def start(self):
        return torch.arange(float(sum(self.numels)))

    def grad(self, rank):
        return torch.cat([torch.full((n,), float(2**rank * s)) for n, s in zip(self.numels, self.scales)])

    def model(self, seed):
        return nn.ParameterList(nn.Parameter(part.to(self.dtype)) for part in self.start().split(self.numels))

    def make(self, candidate, model):
        return candidate.make(list(model), torch.optim.SGD, lr=self.lr, **dict(self.options))

    def shown_by(self, world_size, step):
        sizes = ",".join(map(str, self.numels))
        return "" if self.reverse or self.options or not self.zero else (
            f"--ranks {world_size} --params {sizes} --optimizer sgd --dtype {str(self.dtype)[6:]}")

    def loss(self, model, number, rank):
        terms = list(zip(model, self.scales))[:: -1 if self.reverse and rank == 1 else 1]
        return sum((param * scale).sum() for param, scale in terms) * 2**rank  # the last term's gradient is the first


@dataclass(frozen=True)
class Constructed(ByHand):
    """Rank r begins with r everywhere; gradients are 0."""

    def model(self, seed):
        return nn.ParameterList(nn.Parameter(torch.full((4,), float(seed))) for _ in range(4))

    def loss(self, model, number, rank):
        return sum(param.sum() * 0 for param in model)


def explain(case, seen, finishes=False):
    """Raises Wrong unless every element is where `case`, a ByHand, takes it, and nothing is still under way.

    seen: a Seen of each rank. finishes: whether the class has finish_param_sync().
    """
    expected, came = "every collective has arrived when a step ends", []
    is_late = [bool(one.unawaited) for one in seen]
    try:
        explain_values(case, seen)
    except Wrong as wrong:
        if not any(is_late):
            raise
        (_, expected), (_, values), *_ = wrong.lines
        came = [values]
    if any(is_late):
        rank = is_late.index(True)
        entries = seen[rank].unawaited
        counts = ", ".join(f"{n} {kind}" for kind, n in Counter(entry.kind for entry in entries).items())
        came.append(shorten(at(f"rank {rank} has not waited for {counts} when its step ends", entries[0].place)))
        raise Wrong(expected, came, "step() waits for the parameters by finish_param_sync(), unless prefetch_params() "
                    "was called" if finishes else "a collective with async_op=True returns a work: wait() for it "
                    "before what it brings is read")


def explain_values(case, seen):
    start, d, lr = case.start(), len(seen), case.lr
    own = torch.stack([case.grad(rank) for rank in range(d)])
    mean, came = own.sum(dim=0) / d, [one.snapshots[-1] for one in seen]
    allowed = [case.steps] if case.zero or case.gone else [2, 3]  # gradients of step 1 are used up, or add up

    def near(a, b):
        return (a - b).abs() <= lr / 1000

    if any(all(near(values, start - times * lr * mean).all() for values in came) for times in allowed):
        return
    due = start - lr * mean
    moved = [(start - values) / lr for values in came]  # in units of the gradient
    stays = [near(values, start) for values in came]
    expected = in_words(case, d, mean, allowed)
    if all(stay.all() for stay in stays):
        raise Wrong(expected, *nothing_moved(start, seen, near))
    ratios = torch.cat([(move / mean)[~stay] for move, stay in zip(moved, stays)])  # of what has moved
    factor = ratios[0].item()
    if torch.allclose(ratios, ratios[:1], rtol=1e-3) and not any(abs(factor - times) < 1e-3 for times in allowed):
        figure = "" if len(set(case.scales)) > 1 else f"{lr * factor * mean[0]:.3g} wherever it has moved: "
        fed = [one.inner[0].grads for one in seen if one.inner]
        cause = cause_of(factor, d, lr, is_fed=len(fed) == d and all(
            grads is not None and abs(grads.mean() / mean.mean() - 1) < 1e-3 for grads in fed))
        if case.gone and abs(factor - 3) < 1e-3:
            cause = "gradients of the step before are added: the docstring of step() says that they are gone"
        raise Wrong(expected, figure + times_as_far(factor), cause)
    is_right = (ratios - 1).abs().max() < 1e-3
    if not is_right and all(near(move * lr, own * lr)[:, ~stay].any(dim=0).all() for move, stay in zip(moved, stays)):
        raise Wrong(expected, figures(moved, stays, lr), OWN)
    if not case.zero and near(came[0], due - lr * (due + mean)).all():
        raise Wrong(expected, "step 2 moved every element by lr × (gradient + parameter)", USED_UP)
    if case.reverse and (mixed := mixed_up(moved[0], own, case, d)):
        raise Wrong(expected, mixed, ORDER)
    if decoded := decode(came, start, due, {"mean gradient": mean, "summed gradient": mean * d}, near):
        raise Wrong(expected, *decoded)
    nowhere = sum(stay.int() for stay in stays) == d
    if nowhere.any():
        raise Wrong(expected, f"elements {spans(nowhere)} have moved on no rank",
                    "nobody owns these parameters, or their gradients have not arrived")
    if any(stay.any() for stay in stays):
        some = [f"elements {spans(stay)} on rank {rank}" for rank, stay in enumerate(stays) if stay.any()]
        by_rank = [near(due[:, None], one.inner[0].own).any(dim=1) if one.inner else ~stays[0] for one in seen]
        is_own = all((stay <= its).all() for stay, its in zip(stays, by_rank))  # the rank itself has stepped these
        cause = TOO_EARLY if not any(one.after_inner for one in seen) else STALE if is_own else NOT_RECEIVED
        raise Wrong(expected, shorten(f"not moved: {', '.join(some)}; elsewhere they have"), cause)
    raise Wrong(expected, figures(moved, stays, lr), ORDER if case.reverse else UNKNOWN)


def in_words(case, d, mean, allowed):
    """-> what is expected."""
    if len(set(case.scales)) > 1:
        figure = f"{', '.join(f'{case.lr * value:.3g}' for value in dict.fromkeys(mean.tolist()))} of the parameters"
    elif not case.zero:
        figure = " or ".join(f"{case.lr * times * mean[0]:.3g}" for times in allowed) + " after two steps"
    else:
        sums = " + ".join(str(2**rank) for rank in range(d))
        figure = f"{case.lr:g} · ({sums}) / {d} = {case.lr * mean[0]:.3g}"
    return f"every element moves by lr × mean gradient, {figure}, on every rank"


def nothing_moved(start, seen, near):
    """-> (what came, the cause)."""
    stepped = [(rank, ~near(one.inner[0].model, start)) for rank, one in enumerate(seen) if one.inner]
    if between := [f"rank {rank} elements {spans(mask)}" for rank, mask in stepped if mask.any()]:
        return shorten(f"nothing has moved in the end; in between {', '.join(between)} had"), OVERWRITTEN
    fed = ["nothing" if not one.inner or not len(one.inner[0].own) else "no gradients" if one.inner[0].grads is None
           else "gradients" if one.inner[0].grads.any() else "zeros" for one in seen]
    return "nothing has moved, on any rank", NOTHING[max(fed, key=list(NOTHING).index)]


def times_as_far(factor):
    if abs(factor - round(factor)) < 1e-2 and factor > 1.5:
        return f"{round(factor)} times as far"
    if abs(factor - 1) > 1e-2 and factor > 0.02 and abs(1 / factor - round(1 / factor)) < 1e-2:
        return f"1/{round(1 / factor)} as far"
    return f"{factor:.3g} times the mean gradient"


def cause_of(factor, d, lr, is_fed):
    """-> why every element that has moved has moved `factor` times too far. is_fed: whether the inner optimizer got
    the mean gradient, on every rank."""
    if abs(factor - 1) < 1e-2:
        return ALMOST
    if is_fed and abs(factor * lr - 1e-3) > 1e-5:
        return "the inner optimizer has the right gradients, and another lr than the constructor's"
    for value, cause in [(d, SUMMED), (1 / d, TWICE_AVERAGED), (1e-3 / lr, DEFAULTS), (-1, "step against the gradient"),
                         *((d / n, f"the sum of the gradients is divided by {n}: the number of ranks is {d} here")
                           for n in range(1, 17))]:
        if abs(factor - value) < 1e-2 * abs(value):
            return cause
    return UNKNOWN


def mixed_up(moved, grads, case, d):
    """Averages of two ranks' gradients of different parameters -> a sentence, or "" if there is none."""
    parts = zip(*(values.split(case.numels) for values in (case.start(), moved, *grads[:2])))
    for (index, came, *own), (other, _, *others) in itertools.permutations(parts, 2):
        for rank in range(2):
            if ((came - (own[rank][0] + others[1 - rank][0]) / d).abs() < 1e-3).any():
                return (f"of elements {index[0]:g}-{index[-1]:g} rank {rank}'s gradient was averaged with "
                        f"rank {1 - rank}'s of elements {other[0]:g}-{other[-1]:g}")
    return ""


def decode(came, start, due, gradients, near):
    """-> (what wrong elements hold, the cause), of the first rank with some; None where one of them is unknown."""
    for rank, values in enumerate(came):
        wrong = ~near(values, due) & ~near(values, start)
        if not wrong.any():
            continue
        where = "" if all(near(other, values).all() for other in came) else f" on rank {rank}"
        if values.isnan().any():
            return f"in elements {spans(values.isnan())}: nan{where}", "memory that nobody has written, or 0 / 0"
        for name, gradient in gradients.items():
            if near(values, gradient)[wrong].all() and wrong.sum() > 1:
                return (f"in elements {spans(wrong)}: the {name}{where}",
                        "a gradient was taken for a parameter: copy what was stepped")
        found = {index: held(index, values[index], start, due, near) for index in wrong.nonzero().flatten().tolist()}
        if None in found.values():
            return None
        words = [f"in {between(first, last)}: {kind.format(between(first + shift, last + shift))}"
                 for (kind, shift), first, last in runs(found)]
        return shorten("; ".join(words)) + where, (
            "padding was taken for parameters: shard r begins at r · the longest length, and is cut at its own"
            if any(kind == AS_PADDING for kind, _ in found.values()) else
            "who packs and who cuts disagree on order or length, or a rank calls its collectives in another order")
    return None


def held(index, value, start, due, near):
    """-> what an element holds, with {} for elements, and how far the first of these is; None if it can't be told."""
    if abs(value) < 1e-9:
        return AS_PADDING, 0
    for kind, values in (("what {} should hold", due), ("what {} held before", start)):
        if (found := near(values, value)).any():
            return kind, found.nonzero()[0].item() - index
    return None


def figures(moved, stays, lr):
    """-> "rank 0: 0.1, 0.2; rank 1: 0.1", of what elements have moved by."""
    rounded = [sorted({f"{lr * value:.3g}" for value in move[~stay].tolist()}) for move, stay in zip(moved, stays)]
    return shorten("moved by " + "; ".join(f"rank {rank}: {', '.join(values)}" for rank, values in enumerate(rounded)))


def runs(found):
    """Of {index: what was found there} -> (that, first, last) of neighbours where it is the same."""
    for (_, what), its in itertools.groupby(enumerate(found), lambda one: (one[1] - one[0], found[one[1]])):
        indices = [index for _, index in its]
        yield what, indices[0], indices[-1]


def between(first, last):
    return f"elements {first}-{last}" if first < last else f"element {first}"


def spans(mask):
    """Which elements of a (n,) mask are set -> "0-3, 8"."""
    found = dict.fromkeys(mask.nonzero().flatten().tolist())
    return ", ".join(f"{a}-{b}" if a < b else str(a) for _, a, b in runs(found))
