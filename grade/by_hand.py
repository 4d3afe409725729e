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
ADDED = "gradients of the step before are added: the docstring of step() says that they are gone"
OVERWRITTEN = "what was stepped was overwritten by a rank that does not own it: who broadcasts must be who has stepped"
NOTHING = {  # what the inner optimizer was fed -> why nothing has moved
    "nothing": "no torch optimizer has stepped a parameter: step() steps the inner optimizer, which owns parameters",
    "no gradients": "the inner optimizer's parameters have no gradients: they are copies that nobody gave one",
    "zeros": "the inner optimizer's gradients are all 0: main gradients must be filled with what was reduced",
    "gradients": "the inner optimizer stepped copies (main parameters), which were not copied to the model",
}
PADDING = "0, as padding is"


@dataclass(frozen=True)
class ByHand(Run):
    """Elements 0, 1, 2, …; rank r's gradient of parameter k is 2^r · scales[k]: no sum of some is that of others."""

    steps: int = 1
    numels: tuple = (4, 4, 4, 4)
    scales: tuple = (1, 1, 1, 1)
    dtype: torch.dtype = torch.float32
    options: tuple = ()  # further arguments of the constructor: ("name", value), …
    lr: float = LR
    reverse: bool = False  # on rank 1 gradients come in the other order
    gone: bool = False  # gradients, after a step: without zero_grad() they may add up, as in torch, or not
    of_rank: bool = False  # elements are r everywhere on rank r

    def start(self):
        return torch.arange(float(sum(self.numels)))

    def grad(self, rank):
        return torch.cat([torch.full((n,), float(2**rank * s)) for n, s in zip(self.numels, self.scales)])

    def model(self, seed):
        values = torch.full_like(self.start(), seed) if self.of_rank else self.start()
        return nn.ParameterList(nn.Parameter(part.to(self.dtype)) for part in values.split(self.numels))

    def settings(self):
        return torch.optim.SGD, {"lr": self.lr, **dict(self.options)}

    def shown_by(self, world_size, step):
        sizes = ",".join(map(str, self.numels))
        return "" if self.reverse or self.options or self.of_rank or not self.zero else (
            f"--ranks {world_size} --params {sizes} --optimizer sgd --dtype {str(self.dtype)[6:]}")

    def loss(self, model, number, rank):
        terms = list(zip(model, self.scales))[:: -1 if self.reverse and rank == 1 else 1]
        return sum((param * scale).sum() for param, scale in terms) * 2**rank  # the last term's gradient is the first


def explain(case, seen, finishes):
    """Raises Wrong unless every element is where `case` takes it, and nothing is under way. seen: of each rank."""
    found = what_is_wrong(case, seen)
    expected = in_words(case, len(seen)) if found else "every collective has arrived when a step ends"
    for rank, one in enumerate(seen):
        if one.unawaited:
            counts = ", ".join(f"{n} {kind}" for kind, n in Counter(entry.kind for entry in one.unawaited).items())
            late = at(f"rank {rank} has not waited for {counts} when its step ends", one.unawaited[0].place)
            raise Wrong(expected, [*found[:1], shorten(late)],
                        "step() waits for the parameters by finish_param_sync(), unless prefetch_params() was called"
                        if finishes else "a collective with async_op=True returns a work: wait() for it before what it "
                        "brings is read")
    if found:
        raise Wrong(expected, *found)


def factors(case):
    """-> by how many mean gradients an element may have moved: those of step 1 are used up, or add up."""
    return [case.steps] if case.zero or case.gone else [2, 3]


def in_words(case, d):
    """-> what is expected."""
    sums, units = " + ".join(str(2**rank) for rank in range(d)), case.lr * (2**d - 1) / d
    if len(set(case.scales)) > 1:
        figure = f"{', '.join(f'{units * scale:.3g}' for scale in case.scales)} of the parameters"
    elif case.zero:
        figure = f"{case.lr:g} · ({sums}) / {d} = {units:.3g}"
    else:
        figure = " or ".join(f"{units * times:.3g}" for times in factors(case)) + " after two steps"
    return f"every element moves by lr × mean gradient, {figure}, on every rank"


def what_is_wrong(case, seen):
    """-> (what came, the likely cause); () where nothing is. Of tensors (d, numel), a row of each rank."""
    start, d, lr = case.start(), len(seen), case.lr
    own, came = torch.stack([case.grad(rank) for rank in range(d)]), torch.stack([one.snapshots[-1] for one in seen])
    mean, allowed = own.mean(dim=0), factors(case)
    due = start - lr * mean

    def near(a, b):
        return (a - b).abs() <= lr / 1000

    if any(near(came, start - times * lr * mean).all() for times in allowed):
        return ()
    moved, stays = (start - came) / lr, near(came, start)  # in units of the gradient
    if stays.all():
        return nothing_moved(start, seen, near)
    ratios = (moved / mean)[~stays]
    factor = ratios[0].item()
    if torch.allclose(ratios, ratios[:1], rtol=1e-3) and not any(abs(factor - times) < 1e-3 for times in allowed):
        figure = "" if len(set(case.scales)) > 1 else f"{lr * factor * mean[0]:.3g} wherever it has moved: "
        return figure + times_as_far(factor), cause_of(factor, case, seen, mean)
    figures = [sorted({f"{lr * value:.3g}" for value in its[~stay].tolist()}) for its, stay in zip(moved, stays)]
    by_rank = "moved by " + "; ".join(f"rank {rank}: {', '.join(values)}" for rank, values in enumerate(figures))
    is_own = near(moved[:, None] * lr, own * lr).any(dim=1)  # of some rank
    if (ratios - 1).abs().max() >= 1e-3 and (is_own | stays).all():
        return shorten(by_rank), OWN
    if not case.zero and near(came[0], due - lr * (due + mean)).all():
        return "step 2 moved every element by lr × (gradient + parameter)", USED_UP
    if case.reverse and (mixed := mixed_up(moved[0], own, case)):
        return mixed, ORDER
    if decoded := decode(came, start, due, {"mean gradient": mean, "summed gradient": mean * d}, near):
        return decoded
    if (nowhere := stays.all(dim=0)).any():
        return (f"elements {spans(nowhere)} have moved on no rank",
                "nobody owns these parameters, or their gradients have not arrived")
    if stays.any():
        some = [f"elements {spans(stay)} on rank {rank}" for rank, stay in enumerate(stays) if stay.any()]
        by_itself = [near(due[:, None], one.inner.own).any(dim=1) if one.inner else stays[0] < 0 for one in seen]
        return shorten(f"not moved: {', '.join(some)}; elsewhere they have"), (
            TOO_EARLY if not any(one.after_inner for one in seen) else
            STALE if (stays <= torch.stack(by_itself)).all() else NOT_RECEIVED)  # the rank itself has stepped these
    return shorten(by_rank), ORDER if case.reverse else UNKNOWN


def nothing_moved(start, seen, near):
    masks = [~near(one.inner.model, start) if one.inner else start < 0 for one in seen]
    if between := [f"rank {rank} elements {spans(mask)}" for rank, mask in enumerate(masks) if mask.any()]:
        return shorten(f"nothing has moved in the end; in between {', '.join(between)} had"), OVERWRITTEN
    fed = ["nothing" if not one.inner or not len(one.inner.own) else "no gradients" if one.inner.grads is None
           else "gradients" if one.inner.grads.any() else "zeros" for one in seen]
    return "nothing has moved, on any rank", NOTHING[max(fed, key=[*NOTHING].index)]


def times_as_far(factor):
    if abs(factor - round(factor)) < 1e-2 and factor > 1.5:
        return f"{round(factor)} times as far"
    if abs(factor - 1) > 1e-2 and factor > 0.02 and abs(1 / factor - round(1 / factor)) < 1e-2:
        return f"1/{round(1 / factor)} as far"
    return f"{factor:.3g} times the mean gradient"


def cause_of(factor, case, seen, mean):
    """-> why every element that has moved has moved `factor` times too far."""
    d, defaults = len(seen), 1e-3 / case.lr
    fed = [one.inner and one.inner.grads for one in seen]
    is_fed = all(grads is not None and abs(grads.mean() / mean.mean() - 1) < 1e-3 for grads in fed)
    causes = [(3, ADDED)] * case.gone + [(1, ALMOST), (defaults, DEFAULTS)]
    causes += [(factor, "the inner optimizer has the right gradients, and another lr than the constructor's")] * is_fed
    causes += [(d, SUMMED), (1 / d, TWICE_AVERAGED), (-1, "step against the gradient")]
    causes += [(d / n, f"the sum of the gradients is divided by {n}: the number of ranks is {d} here")
               for n in range(1, 17)]
    return next((cause for value, cause in causes if abs(factor - value) < 1e-2 * abs(value)), UNKNOWN)


def mixed_up(moved, grads, case):
    """Averages of two ranks' gradients of different parameters -> a sentence, or "" if there is none."""
    parts = zip(*(values.split(case.numels) for values in (case.start(), moved, *grads[:2])))
    for (index, came, *own), (other, _, *others) in itertools.permutations(parts, 2):
        for rank in range(2):
            if ((came - (own[rank][0] + others[1 - rank][0]) / len(grads)).abs() < 1e-3).any():
                return (f"of elements {index[0]:g}-{index[-1]:g} rank {rank}'s gradient was averaged with "
                        f"rank {1 - rank}'s of elements {other[0]:g}-{other[-1]:g}")
    return ""


def decode(came, start, due, gradients, near):
    """-> (what wrong elements hold, the cause), of the first rank with some; () where one of them is unknown."""
    wrong = ~near(came, due) & ~near(came, start)
    if not wrong.any():
        return ()
    rank = wrong.any(dim=1).int().argmax().item()
    values, mask = came[rank], wrong[rank]
    where = "" if near(came, values).all() else f" on rank {rank}"
    if values.isnan().any():
        return f"in elements {spans(values.isnan())}: nan{where}", "memory that nobody has written, or 0 / 0"
    for name, gradient in gradients.items():
        if near(values, gradient)[mask].all() and mask.sum() > 1:
            return (f"in elements {spans(mask)}: the {name}{where}",
                    "a gradient was taken for a parameter: copy what was stepped")
    found = {}  # element -> (what it holds, with {} for elements, how far away the first of these is)
    for index in mask.nonzero().flatten().tolist():
        alike = [(kind, near(those, values[index]).nonzero().flatten().tolist())
                 for kind, those in (("what {} should hold", due), ("what {} held before", start))]
        ways = [(kind, places[0] - index) for kind, places in alike if places]
        if not ways and abs(values[index]) >= 1e-9:
            return ()
        found[index] = (PADDING, 0) if abs(values[index]) < 1e-9 else ways[0]
    words = [f"in {between(first, last)}: {kind.format(between(first + shift, last + shift))}"
             for (kind, shift), first, last in runs(found)]
    return shorten("; ".join(words)) + where, (
        "padding was taken for parameters: shard r begins at r · the longest length, and is cut at its own"
        if (PADDING, 0) in found.values() else
        "who packs and who cuts disagree on order or length, or a rank calls its collectives in another order")


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
