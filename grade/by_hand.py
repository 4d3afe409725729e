"""Decodes a step by hand: elements start at 0, 1, 2, …, so that each tells what it holds, and so the mistake.

An element is where it should be, or where it was, or it holds what another should, padding, or a gradient.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from grade.grader import UNKNOWN, Wrong, at, shorten
from grade.runs import LR, Run

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
AVERAGED_AGAIN = "step 1's average stays on its owner alone, and is averaged again: keep it everywhere, or nowhere"
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
    """Starts at 0, 1, 2, …; rank r's gradient of parameter k is 2^r · scales[k]: no sum of some is that of others."""

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


def explain(case, ranks, finishes):
    """Raise Wrong unless every element is where `case` takes it, and nothing is in flight. ranks: Seen of each."""
    wrong = what_is_wrong(case, ranks)
    expected = in_words(case, len(ranks)) if wrong else "every collective has arrived when a step ends"
    for rank, seen in enumerate(ranks):
        if seen.unawaited:
            counts = Counter(entry.kind for entry in seen.unawaited)
            listed = ", ".join(f"{n} {kind}" for kind, n in counts.items())
            late = at(f"rank {rank} has not waited for {listed} when its step ends", seen.unawaited[0].place)
            raise Wrong(expected, [*wrong[:1], shorten(late)],
                        "step() waits for the parameters by finish_param_sync(), unless prefetch_params() was called"
                        if finishes else "a collective with async_op=True returns a work: wait() for it before what it "
                        "brings is read")
    if wrong:
        raise Wrong(expected, *wrong)


def factors(case):
    """-> by how many mean gradients an element may have moved: those of step 1 are used up, or add up."""
    return [case.steps] if case.zero or case.gone else [2, 3]


def in_words(case, d):
    """-> what is expected."""
    sums = " + ".join(str(2**rank) for rank in range(d))
    lr_times_mean = case.lr * (2**d - 1) / d
    if len(set(case.scales)) > 1:
        figure = f"{', '.join(f'{lr_times_mean * scale:.3g}' for scale in case.scales)} of the parameters"
    elif case.zero:
        figure = f"{case.lr:g} · ({sums}) / {d} = {lr_times_mean:.3g}"
    else:
        figure = " or ".join(f"{lr_times_mean * times:.3g}" for times in factors(case)) + " after two steps"
    return f"every element moves by lr × mean gradient, {figure}, on every rank"


class Movement:
    """Holds where the elements of all ranks began and are: tensors (d, numel), a row of each rank, or (numel,)."""

    def __init__(self, case, ranks):
        self.case = case
        self.ranks = ranks
        self.d = len(ranks)
        self.start = case.start()
        self.own_grads = torch.stack([case.grad(rank) for rank in range(self.d)])
        self.mean_grad = self.own_grads.mean(dim=0)
        self.came = torch.stack([seen.snapshots[-1] for seen in ranks])
        self.due = self.start - case.lr * self.mean_grad
        self.stays = self.near(self.came, self.start)
        self.moved = (self.start - self.came) / case.lr  # in units of the gradient

    def near(self, a, b):
        return (a - b).abs() <= self.case.lr / 1000

    def is_right(self):
        steps = (self.start - times * self.case.lr * self.mean_grad for times in factors(self.case))
        return any(self.near(self.came, due).all() for due in steps)


def what_is_wrong(case, ranks):
    """-> (what came, the likely cause); () where nothing is. ranks: Seen of each."""
    movement = Movement(case, ranks)
    if movement.is_right():
        return ()
    if movement.stays.all():
        return nothing_moved(movement)
    for found in (moved_alike(movement), moved_by_own(movement), added_to_parameters(movement),
                  case.reverse and mixed_up(movement),
                  decode(movement), not_moved(movement)):
        if found:
            return found
    return shorten(moved_by_rank(movement)), ORDER if case.reverse else UNKNOWN


def moved_alike(movement):
    """-> what came, where every element that has moved has moved the same number of times too far."""
    case, lr = movement.case, movement.case.lr
    ratios = (movement.moved / movement.mean_grad)[~movement.stays]
    factor = ratios[0].item()
    if not torch.allclose(ratios, ratios[:1], rtol=1e-3) or any(abs(factor - n) < 1e-3 for n in factors(case)):
        return ()
    text = times_as_far(factor)
    if len(set(case.scales)) == 1:
        text = f"{lr * factor * movement.mean_grad[0]:.3g} wherever it has moved: {text}"
    return text, cause_of(factor, movement)


def moved_by_own(movement):
    """-> what came, where elements have moved by a rank's own gradient in place of the average."""
    lr, stays = movement.case.lr, movement.stays
    by_each = movement.near(movement.moved[:, None] * lr, movement.own_grads * lr)  # (d of elements, d of gradients, n)
    is_right = movement.near(movement.came, movement.due)
    for rank in range(movement.d):
        wrong = ~is_right & by_each[:, rank] & ~stays
        if wrong.all(dim=0).any() and (is_right | wrong).all():
            elements = wrong.all(dim=0)
            moved = lr * movement.own_grads[rank][elements][0]
            return (f"elements {spans(elements)} have moved by {moved:.3g} on every rank: lr × rank {rank}'s gradient",
                    f"all ranks have rank {rank}'s gradient of these parameters: average it over the ranks")
    if not (by_each.any(dim=1) | stays).all():
        return ()
    return shorten(moved_by_rank(movement)), OWN


def moved_by_rank(movement):
    figures = [sorted({f"{movement.case.lr * value:.3g}" for value in moved[~stays].tolist()})
               for moved, stays in zip(movement.moved, movement.stays)]
    return "moved by " + "; ".join(f"rank {rank}: {', '.join(values)}" for rank, values in enumerate(figures))


def added_to_parameters(movement):
    second = movement.case.lr * (movement.due + movement.mean_grad)
    if movement.case.zero or not movement.near(movement.came[0], movement.due - second).all():
        return ()
    return "step 2 moved every element by lr × (gradient + parameter)", USED_UP


def not_moved(movement):
    """-> which elements haven't moved, on which ranks."""
    stays, ranks = movement.stays, movement.ranks
    if (nowhere := stays.all(dim=0)).any():
        return (f"elements {spans(nowhere)} have moved on no rank",
                "nobody owns these parameters, or their gradients have not arrived")
    if not stays.any():
        return ()
    listed = [f"elements {spans(row)} on rank {rank}" for rank, row in enumerate(stays) if row.any()]
    by_itself = [movement.near(movement.due[:, None], seen.inner.own).any(dim=1) if seen.inner else stays[0] < 0
                 for seen in ranks]
    if not any(seen.after_inner for seen in ranks):
        cause = TOO_EARLY
    elif (stays <= torch.stack(by_itself)).all():  # the rank itself has stepped these
        cause = STALE
    else:
        cause = NOT_RECEIVED
    return shorten(f"not moved: {', '.join(listed)}; elsewhere they have"), cause


def nothing_moved(movement):
    start, ranks = movement.start, movement.ranks
    masks = [~movement.near(seen.inner.model, start) if seen.inner else start < 0 for seen in ranks]
    if between := [f"rank {rank} elements {spans(mask)}" for rank, mask in enumerate(masks) if mask.any()]:
        return shorten(f"nothing has moved in the end; in between {', '.join(between)} had"), OVERWRITTEN
    return "nothing has moved, on any rank", NOTHING[max(map(fed_with, ranks), key=[*NOTHING].index)]


def fed_with(seen):
    """-> what a rank's inner optimizer was fed, a key of NOTHING."""
    if not seen.inner or not len(seen.inner.own):
        return "nothing"
    if seen.inner.grads is None:
        return "no gradients"
    return "gradients" if seen.inner.grads.any() else "zeros"


def times_as_far(factor):
    if abs(factor - round(factor)) < 1e-2 and factor > 1.5:
        return f"{round(factor)} times as far"
    if abs(factor - 1) > 1e-2 and factor > 0.02 and abs(1 / factor - round(1 / factor)) < 1e-2:
        return f"1/{round(1 / factor)} as far"
    return f"{factor:.3g} times the mean gradient"


def cause_of(factor, movement):
    """-> why every element that has moved has moved `factor` times too far."""
    case, d, mean_grad = movement.case, movement.d, movement.mean_grad
    causes = []
    if case.gone:
        causes += [(3, ADDED)]
    elif not case.zero:
        causes += [(2 + 1 / d, AVERAGED_AGAIN)]
    causes += [(1, ALMOST), (1e-3 / case.lr, DEFAULTS)]
    fed = [seen.inner and seen.inner.grads for seen in movement.ranks]
    if case.steps == 1 and all(grads is not None and abs(grads.mean() / mean_grad.mean() - 1) < 1e-3 for grads in fed):
        causes += [(factor, "the inner optimizer has the right gradients, and another lr than the constructor's")]
    causes += [(d, SUMMED), (1 / d, TWICE_AVERAGED), (-1, "step against the gradient")]
    causes += [(d / n, f"the sum of the gradients is divided by {n}: the number of ranks is {d} here")
               for n in range(1, 17)]
    return next((cause for value, cause in causes if abs(factor - value) < 1e-2 * abs(value)), UNKNOWN)


def mixed_up(movement):
    """-> what came, where two ranks' gradients of different parameters were averaged."""
    numels = movement.case.numels
    parts = zip(*(values.split(numels) for values in (movement.start, movement.moved[0], *movement.own_grads[:2])))
    for (index, moved, *own), (other, _, *others) in itertools.permutations(parts, 2):
        for rank in range(2):
            if ((moved - (own[rank][0] + others[1 - rank][0]) / movement.d).abs() < 1e-3).any():
                return (f"of elements {index[0]:g}-{index[-1]:g} rank {rank}'s gradient was averaged with "
                        f"rank {1 - rank}'s of elements {other[0]:g}-{other[-1]:g}", ORDER)
    return ()


def decode(movement):
    """-> (what wrong elements hold, the cause), of the first rank with some; () where one of them is unknown."""
    near = movement.near
    wrong = ~near(movement.came, movement.due) & ~movement.stays
    if not wrong.any():
        return ()
    rank = wrong.any(dim=1).int().argmax().item()
    values, mask = movement.came[rank], wrong[rank]
    where = "" if near(movement.came, values).all() else f" on rank {rank}"
    if values.isnan().any():
        return f"in elements {spans(values.isnan())}: nan{where}", "memory that nobody has written, or 0 / 0"
    gradients = {"mean gradient": movement.mean_grad, "summed gradient": movement.mean_grad * movement.d}
    for name, gradient in gradients.items():
        if near(values, gradient)[mask].all() and mask.sum() > 1:
            return (f"in elements {spans(mask)}: the {name}{where}",
                    "a gradient was taken for a parameter: copy what was stepped")
    found = {index: content(index, values[index], movement) for index in mask.nonzero().flatten().tolist()}
    if None in found.values():
        return ()
    words = [f"in {between(first, last)}: {kind.format(between(first + shift, last + shift))}"
             for (kind, shift), first, last in runs(found)]
    return shorten("; ".join(words)) + where, (
        "padding was taken for parameters: shard r begins at r · the longest length, and is cut at its own"
        if (PADDING, 0) in found.values() else
        "who packs and who cuts disagree on order or length, or a rank calls its collectives in another order")


def content(index, value, movement):
    """-> (what the element at `index` holds, with {} for elements, how far away the first of these is); or None."""
    if abs(value) < 1e-9:
        return PADDING, 0
    for kind, values in (("what {} should hold", movement.due), ("what {} held before", movement.start)):
        if len(places := movement.near(values, value).nonzero().flatten()):
            return kind, places[0].item() - index
    return None


def runs(found):
    """Yield (content, first, last) of neighbouring indices with the same content. found: index -> content."""
    for (_, content), pairs in itertools.groupby(enumerate(found), lambda pair: (pair[1] - pair[0], found[pair[1]])):
        indices = [index for _, index in pairs]
        yield content, indices[0], indices[-1]


def between(first, last):
    return f"elements {first}-{last}" if first < last else f"element {first}"


def spans(mask):
    """-> which elements of a mask (n,) are set, as "0-3, 8"."""
    indices = dict.fromkeys(mask.nonzero().flatten().tolist())
    return ", ".join(f"{first}-{last}" if first < last else str(first) for _, first, last in runs(indices))
