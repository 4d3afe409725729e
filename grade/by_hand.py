"""Names the mistake in a step: elements start at 0, 1, 2, …, so that a wrong value shows where it came from."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from grade.grader import UNKNOWN, Wrong, shorten
from grade.runs import LR, Run, counted

SUMMED = "the gradients are summed and not averaged: divide by the number of ranks"
TWICE_AVERAGED = "the gradients are divided by the number of ranks twice"
NOT_AVERAGED = "each rank steps with its own gradients: not averaged over the ranks, or the average went into a copy"
NOT_RECEIVED = "received values did not reach the parameters: torch.cat copies, and flatten() and reshape() may copy"
DEFAULTS = "lr and weight_decay of the constructor do not reach the inner optimizer"
ALMOST = "almost right, to two or three digits: something is sent, added up or kept in 16 bits"
LATE = "the values arrive after step() has returned: step() must wait for the thread or work that copies them"
ONE_STEP_OLD = "the values arrive one step late: they were copied or sent before the inner optimizer's step"
ORDER = "gradients are computed in another order on rank 1: send them in an order that all ranks share"
USED_UP = "step 2 added its gradients to parameters that were left in a buffer: step() must leave the buffer zeroed"
TOO_EARLY = "no collective begins after the inner optimizer's step: send parameters after that step, not before it"
STALE = "updated parameters reach the other ranks and not their owner's model: copy them into that model, too"
AVERAGED_AGAIN = "step 1's average stays on its owner alone, and is averaged again: keep it on every rank, or on none"
OVERWRITTEN = "updated parameters were overwritten by a rank that does not own them: their owner must broadcast them"
NOTHING = {  # the gradients of an inner optimizer, on some rank at least -> why no element has moved
    "nothing": "no torch optimizer has stepped a parameter: step() must step an inner optimizer that has some",
    "no gradients": "the inner optimizer's parameters have no gradients: give gradients to these copies",
    "zeros": "the inner optimizer's gradients are all 0: copy the reduced gradients into them",
    "gradients": "the inner optimizer stepped copies (main parameters), which were not copied to the model"}
NOT_AWAITED = "a collective with async_op=True returns a work: wait() for it before its result is read"
NOT_FINISHED = "step() waits for the parameters by finish_param_sync(), unless prefetch_params() was called"
TORCH_LR = 1e-3  # the default of torch's optimizers
PADDING = "0, as padding is"
PADDED = "padding was taken for parameters: shard r begins at r · the longest length, and ends after its own length"
MISPLACED = "packing and cutting disagree on order or length, or a rank calls its collectives in another order"


BASE = 7  # rank r's gradient is 7^r
DIVISORS = 1, 2, 3, 4, 6, 9  # of a sum of gradients: the numbers of ranks, their squares and products


@functools.cache
def combinations(d):
    """Return {(ranks, divisor): the sum of these ranks' gradients / divisor}.

    No two sums are equal; with a BASE of 2, 3 or 5 some would be. A divisor that isn't among DIVISORS would be mistaken
    for another combination: (1 + 7) / 8 is rank 0's gradient.
    """
    subsets = [ranks for n in range(1, d + 1) for ranks in itertools.combinations(range(d), n)]
    return {(ranks, divisor): sum(BASE**rank for rank in ranks) / divisor for ranks in subsets for divisor in DIVISORS}


def combination_of(gradient, d):
    """Return the (ranks, divisor) whose combination is this gradient, or None."""
    return next((found for found, value in combinations(d).items() if abs(gradient - value) < 1e-3 * value), None)


def in_words(combination):
    ranks, divisor = combination
    text = f"rank {ranks[0]}'s gradient"
    if len(ranks) > 1:
        text = f"the gradients of ranks {', '.join(map(str, ranks))}, added"
    return text if divisor == 1 else f"{text} and divided by {divisor}"


def cause_of(combination, d):
    """Return the mistake by which ranks step with this combination of gradients, and not with the mean of d."""
    ranks, divisor = combination
    missing = [str(rank) for rank in range(d) if rank not in ranks]
    if missing and divisor == 1 and len(ranks) == 1:
        return f"all ranks have rank {ranks[0]}'s gradient of these parameters: average it over the ranks"
    if missing:
        return f"the gradient of rank {' and '.join(missing)} is missing from the sum"
    if divisor == 1:
        return SUMMED
    if divisor == d * d:
        return TWICE_AVERAGED
    return f"the sum of the gradients is divided by {divisor}: the number of ranks is {d} here"


@dataclass(frozen=True)
class ByHand(Run):
    """Describes a run from 0, 1, 2, … on; rank r's gradient of parameter k is 7^r · scales[k]."""
    steps: int = 1
    numels: tuple = (4, 4, 4, 4)
    scales: tuple = (1, 1, 1, 1)
    lr: float = LR
    reverses: bool = False  # rank 1 computes its gradients in the other order
    start_is_rank: bool = False  # all elements are r on rank r
    nan_rank: int | None = None  # the rank whose gradients are nan

    def start(self):
        return torch.arange(float(sum(self.numels)))

    def grad(self, rank):
        return torch.cat([torch.full((n,), float(BASE**rank * scale)) for n, scale in zip(self.numels, self.scales)])

    def model(self, seed):  # the seed is the rank
        values = torch.full_like(self.start(), seed) if self.start_is_rank else self.start()
        return nn.ParameterList(nn.Parameter(part.to(self.dtype)) for part in values.split(self.numels))

    def settings(self):
        return torch.optim.SGD, {"lr": self.lr}

    def loss(self, model, number, rank):
        factor = float("nan") if rank == self.nan_rank else BASE**rank
        terms = list(zip(model, self.scales))
        if self.reverses and rank == 1:
            terms.reverse()  # the gradient of the last term comes first
        return sum((param * scale).sum() for param, scale in terms) * factor

    def factors(self):
        """Return by how many mean gradients an element may have moved.

        Without zero_grad() step 2 adds its gradient to step 1's, as in torch (1 + 2), or step 1 uses it up (1 + 1).
        """
        return [self.steps] if self.zeroes else [2, 3]

    def expected(self, d):
        lr_times_mean = self.lr * sum(BASE**rank for rank in range(d)) / d
        if len(set(self.scales)) > 1:
            figure = f"{', '.join(f'{lr_times_mean * scale:.3g}' for scale in self.scales)} of the parameters"
        elif self.zeroes:
            grads = " + ".join(f"{BASE**rank * self.scales[0]}" for rank in range(d))
            figure = f"{self.lr:g} · ({grads}) / {d} = {lr_times_mean * self.scales[0]:.3g}"
        else:
            figure = " or ".join(f"{lr_times_mean * factor:.3g}" for factor in self.factors()) + " after two steps"
        return f"every element moves by lr × mean gradient, {figure}, on every rank"


def check_movement(case, ranks, finishes, again):
    """Raise Wrong unless every element is where `case` takes it, and no collective is in flight.

    ranks: the Seen of each rank. finishes: whether the optimizer has finish_param_sync(). again: a function that runs
    another ByHand and returns its `ranks`, or None.
    """
    fault = Movement(case, ranks, again).fault()
    expected = case.expected(len(ranks)) if fault else "every collective has arrived when a step ends"
    for rank, seen in enumerate(ranks):
        if seen.never_awaited:
            late = f"rank {rank} has not waited for {counted(seen.never_awaited)} when its step ends"
            if place := seen.never_awaited[0].place:
                late += f" ({place})"
            came = [fault[0], shorten(late)] if fault else shorten(late)
            raise Wrong(expected, came, NOT_FINISHED if finishes else NOT_AWAITED)
    if fault:
        came, cause = fault
        raise Wrong(expected, came, cause)


class Content(NamedTuple):
    """Says what an element holds. {} in `text` stands for another element, whose index is greater by `shift`."""
    text: str
    shift: int


def near(a, b):
    return (a - b).abs() <= 1e-4


class Movement:
    """Holds the elements of all ranks before and after the steps: tensors (d, numel), a row per rank, or (numel,).

    A method that explains elements returns (what came, the likely cause), or () if it has no explanation.
    """

    def __init__(self, case, ranks, again):
        self.case = case
        self.ranks = ranks
        self.again = again
        self.d = len(ranks)
        self.start = case.start()
        self.element_scales = case.grad(0)  # because rank 0's gradient of an element is 1 · scale
        self.mean_grad = torch.stack([case.grad(rank) for rank in range(self.d)]).mean(dim=0)
        self.came = torch.stack([seen.snapshots[-1] for seen in ranks])
        self.due = self.start - case.lr * self.mean_grad  # the right elements after one step
        self.is_right = near(self.came, self.due)
        self.stays = near(self.came, self.start)
        self.is_wrong = ~self.is_right & ~self.stays
        self.moved = (self.start - self.came) / case.lr  # a sum of gradients

    def fault(self):
        """Return (what came, the likely cause), or () if every element is right."""
        ends = (self.start - factor * self.case.lr * self.mean_grad for factor in self.case.factors())
        if any(near(self.came, end).all() for end in ends):
            return ()
        if self.stays.all():
            return self.nothing_moved()
        if self.case.reverses:  # an earlier check, in which all ranks have one order, has passed
            return self.moved_by_rank(), ORDER
        return (self.moved_alike() or self.added_to_parameters() or self.combined() or self.decoded()
                or self.not_moved() or (self.moved_by_rank(), UNKNOWN))

    def nothing_moved(self):
        listed = []
        for rank, seen in enumerate(self.ranks):
            moves_within = seen.inner and ~near(seen.inner.model, self.start)
            if seen.inner and moves_within.any():
                listed.append(f"rank {rank} elements {spans(moves_within)}")
        if listed:
            return (shorten(f"nothing has moved; after the inner step {', '.join(listed)} had"),
                    self.comes_late() or OVERWRITTEN)
        stepped = [seen.inner for seen in self.ranks if seen.inner and len(seen.inner.own)]
        grads = [inner.grads for inner in stepped if inner.grads is not None]
        kind = "gradients" if any(grad.any() for grad in grads) else "zeros"
        if not grads:
            kind = "no gradients" if stepped else "nothing"
        return "nothing has moved, on any rank", self.comes_late() or NOTHING[kind]

    def moved_alike(self):
        """Explain elements all of which have stayed, or have moved by one multiple of the mean gradient."""
        ratios = (self.moved / self.mean_grad)[~self.stays]
        factor = ratios[0].item()
        is_due = any(abs(factor - due) < 1e-3 for due in self.case.factors())
        if is_due or not ratios.isfinite().all() or not torch.allclose(ratios, ratios[:1], rtol=1e-3):
            return ()
        text = f"{factor:.3g} times the mean gradient"
        if len(set(self.case.scales)) == 1:
            text = f"{self.case.lr * factor * self.mean_grad[0]:.3g} wherever it has moved: {text}"
        for cause, known in self.known_factors(factor):
            if abs(factor - known) < 1e-2 * abs(known):
                return text, cause
        combination = combination_of(factor * self.mean_grad[0] / self.element_scales[0], self.d)
        return text, cause_of(combination, self.d) if combination else UNKNOWN

    def known_factors(self, factor):
        """Yield (cause, number of mean gradients by which elements then move), the likeliest first."""
        case = self.case
        if not case.zeroes:  # step 1 moves by the mean; step 2 by (the mean on its owner + all gradients) / d
            yield AVERAGED_AGAIN, 1 + (1 / self.d + 1)
        yield ALMOST, 1
        yield DEFAULTS, TORCH_LR / case.lr
        inner_grads = [seen.inner and seen.inner.grads for seen in self.ranks]
        are_right = all(grads is not None and abs(grads.mean() / self.mean_grad.mean() - 1) < 1e-3
                        for grads in inner_grads)
        if case.steps == 1 and are_right:  # then the lr explains any factor
            yield "the inner optimizer has the right gradients, and another lr than the constructor's", factor
        yield "step against the gradient", -1

    def combined(self):
        """Explain elements that have moved by a combination of the ranks' gradients other than their mean."""
        indices_by_combination = {}  # combination -> the wrong elements that it has moved, on some rank
        for rank, index in self.is_wrong.nonzero().tolist():
            combination = combination_of(self.moved[rank, index] / self.element_scales[index], self.d)
            indices_by_combination.setdefault(combination, []).append(index)
        if not indices_by_combination or None in indices_by_combination:
            return ()
        if len(indices_by_combination) > 1:
            is_own = all(len(ranks) == divisor == 1 for ranks, divisor in indices_by_combination)
            first = next(iter(indices_by_combination))
            return self.moved_by_rank(), NOT_AVERAGED if is_own else cause_of(first, self.d)
        combination, indices = next(iter(indices_by_combination.items()))
        elements = torch.zeros(len(self.start), dtype=torch.bool)
        elements[indices] = True
        ranks = [rank for rank in range(self.d) if self.is_wrong[rank].any()]
        where = "every rank" if len(ranks) == self.d else f"rank {', '.join(map(str, ranks))}"
        distance = self.start[indices[0]] - self.came[ranks[0], indices[0]]
        return (f"elements {spans(elements)} have moved by {distance:.3g} on {where}: lr × {in_words(combination)}",
                cause_of(combination, self.d))

    def moved_by_rank(self):
        listed = []
        for rank, (moved, stays) in enumerate(zip(self.moved, self.stays)):
            distances = sorted({f"{self.case.lr * value:.3g}" for value in moved[~stays].tolist()})
            listed.append(f"rank {rank}: {', '.join(distances)}")
        return shorten(f"moved by {'; '.join(listed)}")

    def added_to_parameters(self):
        mistaken_move = self.case.lr * (self.due + self.mean_grad)  # in step 2, from `due`
        if self.case.zeroes or not near(self.came[0], self.due - mistaken_move).all():
            return ()
        return "step 2 moved every element by lr × (gradient + parameter)", USED_UP

    def decoded(self):
        """Explain the contents of wrong elements, on the first rank that has some."""
        if not self.is_wrong.any():
            return ()
        rank = self.is_wrong.nonzero()[0, 0].item()
        values = self.came[rank]
        mask = self.is_wrong[rank]
        where = "" if near(self.came, values).all() else f" on rank {rank}"
        if not values.isfinite().all():
            return (f"in elements {spans(~values.isfinite())}: {values[~values.isfinite()][0]:g}",
                    "memory that nobody has written, 0 / 0, or a gradient too large for 16 bits of fp16 (65,504)")
        for name, gradient in (("mean", self.mean_grad), ("summed", self.mean_grad * self.d)):
            if near(values, gradient)[mask].all() and mask.sum() > 1:
                return (f"in elements {spans(mask)}: the {name} gradient{where}",
                        "a gradient was taken for a parameter: copy what was stepped")
        contents = {index: self.content(index, values[index]) for index in mask.nonzero().flatten().tolist()}
        if None in contents.values():
            return ()
        words = [f"in {named(first, last)}: {content.text.format(named(first + content.shift, last + content.shift))}"
                 for content, first, last in runs(contents)]
        is_padded = any(content.text == PADDING for content in contents.values())
        return shorten("; ".join(words)) + where, PADDED if is_padded else MISPLACED

    def content(self, index, value):
        """Return the Content of element `index`; None if its value is unknown."""
        if abs(value) < 1e-9:
            return Content(PADDING, 0)
        for text, values in (("what {} should hold", self.due), ("what {} held before", self.start)):
            same = near(values, value).nonzero()
            if len(same):
                return Content(text, shift=same[0].item() - index)
        return None

    def not_moved(self):
        """Explain elements that have not moved, on some ranks or on all."""
        if not self.stays.any():
            return ()
        cause = self.comes_late() if any(seen.after_inner for seen in self.ranks) else TOO_EARLY
        if (nowhere := self.stays.all(dim=0)).any():
            return (f"elements {spans(nowhere)} have moved on no rank",
                    cause or "nobody owns these parameters, or their gradients have not arrived")
        listed = [f"elements {spans(mask)} on rank {rank}" for rank, mask in enumerate(self.stays) if mask.any()]
        if not cause:
            cause = STALE if all(map(self.has_stepped, self.ranks, self.stays)) else NOT_RECEIVED
        return shorten(f"not moved: {', '.join(listed)}; elsewhere they have"), cause

    def comes_late(self):
        """Return the reason why elements that have not moved will move later; "" if they never do."""
        settled = self.again(replace(self.case, settles=True))
        if settled and all(near(seen.snapshots[-1], self.due).all() for seen in settled):
            return LATE
        one_more = self.again(replace(self.case, steps=self.case.steps + 1))
        if one_more and all(near(seen.snapshots[-1], self.due)[stays].all()
                            for seen, stays in zip(one_more, self.stays)):
            return ONE_STEP_OLD
        return ""

    def has_stepped(self, seen, mask):
        """Return whether a rank's inner optimizer has stepped all of the elements in `mask`."""
        stepped = seen.inner.own if seen.inner else torch.zeros(0)
        return near(self.due[mask, None], stepped).any(dim=1).all()  # is each due value among the stepped ones?


def runs(contents):
    """Return (content, first, last) of neighbouring indices with the same content. contents: index -> content."""
    merged = []
    for index, content in contents.items():
        if merged and merged[-1][0] == content and merged[-1][2] == index - 1:
            merged[-1][2] = index
        else:
            merged.append([content, index, index])
    return merged


def interval(first, last):
    return f"{first}-{last}" if first < last else f"{first}"


def named(first, last):
    return f"element{'s' if first < last else ''} {interval(first, last)}"


def spans(mask):
    """Return the indices that are set in a mask (n,), as "0-3, 8"."""
    indices = dict.fromkeys(mask.nonzero().flatten().tolist())
    return ", ".join(interval(first, last) for _, first, last in runs(indices))
