"""Names the mistake of a learner's package in a step whose right result can be computed by hand.

The package's sharded optimizer trains on d processes, the ranks. A ByHand describes this run. The elements of the
parameters start at 0, 1, 2, …, so that a wrong value shows where it came from. Rank r's gradient is 7^r, so that a
wrong gradient shows whose gradients are in it. check_movement finds wrong elements, and Movement explains them.

Each rank owns a part of the parameters. The package builds one of torch's optimizers for this part, the inner
optimizer. After its step the rank sends what it owns to the others. A Seen is what was noted on a rank in the run:

    snapshots       all parameters after the constructor and after each step
    inner           copies that were made when the inner optimizer had stepped: `model`, all parameters; `own`, the
                    inner optimizer's; `grads`, the gradients of those. None if it has never stepped
    after_inner     the collectives that began after that
    never_awaited   the collectives whose results nobody has waited for

Most names in capitals are causes: texts that tell a learner the likely mistake.
"""

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
# Causes where no element has moved. The keys say what the inner optimizers have stepped: no parameters ("nothing"), or
# parameters with no gradients, with gradients of zero, or with gradients that aren't zero.
NOTHING = {
    "nothing": "no torch optimizer has stepped a parameter: step() must step an inner optimizer that has some",
    "no gradients": "the inner optimizer's parameters have no gradients: give gradients to these copies",
    "zeros": "the inner optimizer's gradients are all 0: copy the reduced gradients into them",
    "gradients": "the inner optimizer stepped copies (main parameters), which were not copied to the model"}
NOT_AWAITED = "a collective with async_op=True returns a work: wait() for it before its result is read"
NOT_FINISHED = "step() waits for the parameters by finish_param_sync(), unless prefetch_params() was called"
PADDED = "padding was taken for parameters: shard r begins at r · the longest length, and ends after its own length"
MISPLACED = "packing and cutting disagree on order or length, or a rank calls its collectives in another order"

TORCH_LR = 1e-3  # torch's default lr, with which an inner optimizer steps that gets no lr
PADDING = "0, as padding is"  # words for what an element holds that is 0
BASE = 7  # rank r's gradient is 7^r
# By these a package may have divided a sum of gradients: the number of ranks, 2 or 3, or a product of two of these.
DIVISORS = 1, 2, 3, 4, 6, 9


class Combination(NamedTuple):
    """A gradient with which a rank may have stepped: the sum of the gradients of `ranks`, divided by `divisor`."""
    ranks: tuple
    divisor: int

    def value(self):
        """Return the combination as a number, for a parameter with scale 1: there rank r's gradient is 7^r."""
        return sum(BASE**rank for rank in self.ranks) / self.divisor

    def is_one_gradient(self):
        """Return whether the combination is just one rank's gradient."""
        return len(self.ranks) == 1 and self.divisor == 1

    def in_words(self):
        """Return, for example, "the gradients of ranks 0, 1, added and divided by 4"."""
        words = f"rank {self.ranks[0]}'s gradient"
        if len(self.ranks) > 1:
            words = f"the gradients of ranks {', '.join(map(str, self.ranks))}, added"
        return words if self.divisor == 1 else f"{words} and divided by {self.divisor}"

    def cause(self, d):
        """Return the likely cause if d ranks step with this combination in place of the mean of all gradients."""
        if self.is_one_gradient():
            return f"all ranks have rank {self.ranks[0]}'s gradient of these parameters: average it over the ranks"
        missing = [str(rank) for rank in range(d) if rank not in self.ranks]
        if missing:
            return f"the gradient of rank {' and '.join(missing)} is missing from the sum"
        if self.divisor == 1:
            return SUMMED
        if self.divisor == d * d:
            return TWICE_AVERAGED
        return f"the sum of the gradients is divided by {self.divisor}: the number of ranks is {d} here"


def combinations(d):
    """Return the Combinations of the gradients of d ranks, with each divisor of DIVISORS.

    No two of them have the same value, so the value identifies the combination. With a BASE of 2, 3 or 5, or with
    further divisors, some would have the same value: (1 + 7) / 8 is rank 0's gradient.
    """
    subsets = [ranks for n in range(1, d + 1) for ranks in itertools.combinations(range(d), n)]
    return [Combination(ranks, divisor) for ranks in subsets for divisor in DIVISORS]


def combination_of(ratio, d):
    """Return the Combination that is `ratio` times the mean of d ranks' gradients, or None if there is none."""
    gradient = ratio * Combination(range(d), d).value()
    for combination in combinations(d):
        value = combination.value()
        if abs(gradient - value) < 1e-3 * value:
            return combination
    return None


@dataclass(frozen=True)
class ByHand(Run):
    """Describes a run that begins with elements 0, 1, 2, …. Rank r's gradient of parameter k is 7^r · scales[k].

    It has the fields of Run, which grade/runs.py explains, but a model, a loss and an optimizer of its own.
    """
    steps: int = 1
    numels: tuple = (4, 4, 4, 4)  # for each parameter its number of elements
    scales: tuple = (1, 1, 1, 1)  # for each parameter the factor of its gradients
    lr: float = LR
    reverses: bool = False  # whether rank 1 computes the parameters' gradients in reverse order
    start_is_rank: bool = False  # whether all elements begin as r on rank r
    nan_rank: int | None = None  # the rank whose gradients are nan, if any

    def start(self):
        """Return all elements before the first step (numel,)."""
        return torch.arange(float(sum(self.numels)))

    def grad(self, rank):
        """Return rank's gradients of all elements (numel,)."""
        base = float("nan") if rank == self.nan_rank else float(BASE**rank)
        return torch.cat([torch.full((n,), base * scale) for n, scale in zip(self.numels, self.scales)])

    def model(self, rank):
        """Return a new model. Run.model has a seed in place of `rank`: a rank's number is its seed."""
        values = torch.full_like(self.start(), rank) if self.start_is_rank else self.start()
        return nn.ParameterList(nn.Parameter(part.to(self.dtype)) for part in values.split(self.numels))

    def inner_optimizer(self):
        """Return the class of the inner optimizer, and its arguments."""
        return torch.optim.SGD, {"lr": self.lr}

    def loss(self, model, number, rank):
        """Return the sum of parameter · gradient: its derivatives are the gradients. All batches have the same."""
        params_and_grads = list(zip(model, self.grad(rank).split(self.numels)))
        if self.reverses and rank == 1:
            params_and_grads.reverse()  # autograd begins with the product that was computed last
        return sum((param * grad).sum() for param, grad in params_and_grads)

    def factors(self):
        """Return a list of factors. After all steps an element may have moved by factor · lr · mean gradient.

        Two steps without zero_grad() move it by 1, then by 1 + 1, if gradients add up, as in torch. If step 1 uses its
        gradient up, they move it by 1, then by 1. Both are right.
        """
        return [self.steps] if self.zeroes else [2, 3]

    def expected(self, d):
        """Return in a sentence what is right on d ranks, for the learner."""
        mean_move = self.lr * Combination(range(d), d).value()  # how far a step moves a parameter whose scale is 1
        if len(set(self.scales)) > 1:
            moves = f"{', '.join(f'{mean_move * scale:.3g}' for scale in self.scales)} of the parameters"
        elif self.zeroes:
            grads = " + ".join(f"{BASE**rank * self.scales[0]}" for rank in range(d))
            moves = f"{self.lr:g} · ({grads}) / {d} = {mean_move * self.scales[0]:.3g}"
        else:
            moves = " or ".join(f"{mean_move * factor:.3g}" for factor in self.factors()) + " after two steps"
        return f"every element moves by lr × mean gradient, {moves}, on every rank"


def check_movement(run, ranks, has_finish, play_again):
    """Raise Wrong, a verdict, if an element has moved wrongly, or if nobody has waited for a collective.

    ranks: the Seen of each rank. has_finish: whether the optimizer has finish_param_sync(). play_again: a function that
    plays another ByHand on the ranks, and returns the Seen of each, or None if a rank fails.
    """
    came, cause = Movement(run, ranks, play_again).explanation() or ("", "")  # "" if every element is right
    expected = run.expected(len(ranks)) if came else "every collective has arrived when a step ends"
    for rank, seen in enumerate(ranks):
        if seen.never_awaited:
            in_flight = f"rank {rank} has not waited for {counted(seen.never_awaited)} when its step ends"
            if place := seen.never_awaited[0].place:  # "file:line" of the call; "" if it isn't in the learner's code
                in_flight += f" ({place})"
            raise Wrong(expected, f"{came}\n{shorten(in_flight)}", NOT_FINISHED if has_finish else NOT_AWAITED)
    if came:
        raise Wrong(expected, came, cause)


class Content(NamedTuple):
    """Says in `text` what an element holds. {} in `text` stands for the element whose index is greater by `shift`."""
    text: str
    shift: int = 0


RIGHT = Content("")  # the Content of an element that isn't wrong


def near(a, b):
    """Return a mask of the elements that are equal up to rounding."""
    return (a - b).abs() <= 1e-4


class Movement:
    """Explains why elements are wrong after the steps of a ByHand. run, ranks, play_again: as in check_movement.

    An element has moved if its value isn't that of the start. A method that explains knows one kind of mistake. It
    returns (what came, in words; the likely cause), or None if the elements don't show its kind.
    """

    def __init__(self, run, ranks, play_again):
        self.run = run
        self.ranks = ranks
        self.play_again = play_again
        self.d = len(ranks)
        # These have one value for each element (numel,):
        self.start = run.start()
        self.mean_grad = torch.stack([run.grad(rank) for rank in range(self.d)]).mean(dim=0)
        self.right_move = run.lr * self.mean_grad  # what one step should take away
        self.due = self.start - self.right_move  # the right values after one step
        # These have one value for each rank and element (d, numel):
        self.end = torch.stack([seen.snapshots[-1] for seen in ranks])  # the values after the last step
        self.stays = near(self.end, self.start)  # where an element has not moved
        self.is_wrong = ~self.stays & ~near(self.end, self.due)
        self.moves = self.start - self.end  # what the steps have taken away
        self.ratios = self.moves / self.right_move  # each element has moved by ratio · lr · mean gradient

    def explanation(self):
        """Explain elements that are wrong after all steps; return None if all are right."""
        for factor in self.run.factors():
            if near(self.end, self.start - factor * self.right_move).all():
                return None
        if self.stays.all():
            return self.nothing_moved()
        # In an earlier check all ranks have computed their gradients in the same order, and it has passed. So the order
        # is the cause. In this run the scales differ, so that a gradient of another parameter shows.
        if self.run.reverses:
            return self.moved_by_rank(), ORDER
        # The first method that returns an explanation decides.
        return (self.moved_alike() or self.added_to_parameters() or self.combined() or self.decoded()
                or self.not_moved() or (self.moved_by_rank(), UNKNOWN))

    def nothing_moved(self):
        """Explain why no element has moved on any rank."""
        # {rank: `inner` of its Seen}, for ranks on which an inner optimizer has stepped.
        inner_steps = {rank: seen.inner for rank, seen in enumerate(self.ranks) if seen.inner}
        listed = []
        for rank, inner in inner_steps.items():
            moved = ~near(inner.model, self.start)  # the elements of the model that had moved at that moment
            if moved.any():
                listed.append(f"rank {rank} elements {spans(moved)}")
        if listed:
            return (shorten(f"nothing has moved; after the inner step {', '.join(listed)} had"),
                    self.comes_late() or OVERWRITTEN)
        if any(inner.grads.any() for inner in inner_steps.values()):
            kind = "gradients"
        elif any(len(inner.grads) for inner in inner_steps.values()):
            kind = "zeros"
        elif any(len(inner.own) for inner in inner_steps.values()):
            kind = "no gradients"
        else:
            kind = "nothing"
        return "nothing has moved, on any rank", self.comes_late() or NOTHING[kind]

    def moved_alike(self):
        """Explain elements that have moved by the same multiple of the mean gradient, wherever they have moved."""
        ratios = self.ratios[~self.stays]
        factor = ratios[0].item()
        is_right = any(abs(factor - right) < 1e-3 for right in self.run.factors())
        is_alike = ratios.isfinite().all() and torch.allclose(ratios, ratios[:1], rtol=1e-3)
        if is_right or not is_alike:  # if the factor is right, only elements that have not moved are wrong
            return None
        text = f"{factor * self.right_move[0]:.3g} wherever it has moved: {factor:.3g} times the mean gradient"
        for cause, known in self.known_factors(factor):
            if abs(factor - known) < 1e-2 * abs(known):
                return text, cause
        combination = combination_of(factor, self.d)
        return text, combination.cause(self.d) if combination else UNKNOWN

    def known_factors(self, factor):
        """Yield (cause, factor): with this cause elements move by factor · lr · mean gradient. The likeliest is first.

        factor: the factor by which elements have moved here.
        """
        # Step 1 moves elements by the mean gradient. Step 2 averages what the ranks have then: all have a new gradient,
        # and the owner has the mean, too. So step 2 moves elements by (mean + d · mean) / d.
        if not self.run.zeroes:
            yield AVERAGED_AGAIN, 1 + (1 / self.d + 1)
        yield ALMOST, 1
        yield DEFAULTS, TORCH_LR / self.run.lr
        has_right_grads = all(seen.inner and abs(seen.inner.grads.mean() / self.mean_grad.mean() - 1) < 1e-3
                              for seen in self.ranks)
        if self.run.steps == 1 and has_right_grads:  # then only the lr can be wrong, whatever the factor is
            yield "the inner optimizer has the right gradients, and another lr than the constructor's", factor
        yield "step against the gradient", -1  # where gradients have the wrong sign

    def combined(self):
        """Explain wrong elements that have moved by a Combination of the ranks' gradients that isn't their mean."""
        places = self.is_wrong.nonzero().tolist()  # [rank, element]
        combinations_by_place = [combination_of(self.ratios[rank, index], self.d) for rank, index in places]
        if not places or None in combinations_by_place:
            return None
        first = combinations_by_place[0]
        if len(set(combinations_by_place)) > 1:  # the elements have moved by different combinations
            is_own = all(combination.is_one_gradient() for combination in combinations_by_place)
            return self.moved_by_rank(), NOT_AVERAGED if is_own else first.cause(self.d)
        ranks = sorted({rank for rank, _ in places})
        # All wrong elements have moved by the same combination.
        where = "every rank" if len(ranks) == self.d else f"rank {', '.join(map(str, ranks))}"
        rank, index = places[0]
        return (f"elements {spans(self.is_wrong.any(dim=0))} have moved by {self.moves[rank, index]:.3g} on {where}: "
                f"lr × {first.in_words()}", first.cause(self.d))

    def moved_by_rank(self):
        """Return in words by how much each rank's elements have moved."""
        listed = []
        for rank, (moves, stays) in enumerate(zip(self.moves, self.stays)):
            distances = sorted({f"{move:.3g}" for move in moves[~stays].tolist()})
            listed.append(f"rank {rank}: {', '.join(distances)}")
        return shorten(f"moved by {'; '.join(listed)}")

    def added_to_parameters(self):
        """Explain a step 2 whose gradients were added to parameters, because step 1 has left parameters in a buffer."""
        # After step 1 the parameters are self.due. Step 2 takes due + gradient for the gradient.
        after_step_2 = self.due - self.run.lr * (self.due + self.mean_grad)
        if self.run.zeroes or not near(self.end[0], after_step_2).all():
            return None
        return "step 2 moved every element by lr × (gradient + parameter)", USED_UP

    def decoded(self):
        """Explain wrong elements by what they hold, on the first rank that has wrong elements."""
        if not self.is_wrong.any():
            return None
        rank = self.is_wrong.any(dim=1).nonzero()[0].item()  # the first such rank
        values = self.end[rank]
        is_wrong = self.is_wrong[rank]
        is_finite = values.isfinite()
        if not is_finite.all():
            return (f"in elements {spans(~is_finite)}: {values[~is_finite][0]:g}",
                    "memory that nobody has written, 0 / 0, or a gradient too large for 16 bits of fp16 (65,504)")
        where = "" if near(self.end, values).all() else f" on rank {rank}"  # "": all ranks have the same values
        for name, gradient in (("mean", self.mean_grad), ("summed", self.mean_grad * self.d)):
            if near(values, gradient)[is_wrong].all() and is_wrong.sum() > 1:
                return (f"in elements {spans(is_wrong)}: the {name} gradient{where}",
                        "a gradient was taken for a parameter: copy what was stepped")
        # For each element its Content: RIGHT if it isn't wrong, None if nothing explains it.
        contents = [self.content(index, value) if is_wrong[index] else RIGHT for index, value in enumerate(values)]
        if None in contents:
            return None
        words = []
        for content, first, last in stretches(contents):
            if content is not RIGHT:
                other = elements(first + content.shift, last + content.shift)
                words.append(f"in {elements(first, last)}: {content.text.format(other)}")
        is_padded = any(content.text == PADDING for content in contents)
        return shorten("; ".join(words)) + where, PADDED if is_padded else MISPLACED

    def content(self, index, value):
        """Return the Content of the wrong element `index`, which has this value, or None if nothing explains it."""
        if abs(value) < 1e-9:
            return Content(PADDING)
        for text, values in (("what {} should hold", self.due), ("what {} held before", self.start)):
            same = near(values, value).nonzero()  # the indices of elements that have this value in `values`
            if len(same):
                return Content(text, shift=same[0].item() - index)
        return None

    def not_moved(self):
        """Explain elements that have not moved, on some ranks or on all."""
        if not self.stays.any():
            return None
        # comes_late returns "" if the elements never move. Then the cause is found below.
        cause = self.comes_late() if any(seen.after_inner for seen in self.ranks) else TOO_EARLY
        stays_everywhere = self.stays.all(dim=0)
        if stays_everywhere.any():
            return (f"elements {spans(stays_everywhere)} have moved on no rank",
                    cause or "nobody owns these parameters, or their gradients have not arrived")
        listed = [f"elements {spans(stays)} on rank {rank}" for rank, stays in enumerate(self.stays) if stays.any()]
        if not cause:
            # Whether each rank's inner optimizer has stepped copies of the elements that have not moved in its model.
            is_stepped = all(self.has_stepped(seen, stays) for seen, stays in zip(self.ranks, self.stays))
            cause = STALE if is_stepped else NOT_RECEIVED
        return shorten(f"not moved: {', '.join(listed)}; elsewhere they have"), cause

    def comes_late(self):
        """Return the cause if elements that have not moved move later; "" if they never do.

        This plays two more runs: one waits before the parameters are copied, and one has a step more.
        """
        waiting = replace(self.run, settles=True)
        longer = replace(self.run, steps=self.run.steps + 1)
        for cause, run in ((LATE, waiting), (ONE_STEP_OLD, longer)):
            ranks = self.play_again(run)
            if ranks and all(near(seen.snapshots[-1], self.due)[stays].all() for seen, stays in zip(ranks, self.stays)):
                return cause
        return ""

    def has_stepped(self, seen, stays):
        """Return whether a rank's inner optimizer has stepped all elements that have not moved in the rank's model.

        seen: the rank's. stays: a mask of the elements that have not moved.
        """
        own = seen.inner.own if seen.inner else torch.zeros(0)
        is_stepped = near(self.due[:, None], own).any(dim=1)  # for each element: whether its due value is among `own`
        return is_stepped[stays].all()


def stretches(contents):
    """Yield (content, first index, last index) for each stretch of equal neighbours in a list."""
    first = 0
    for content, group in itertools.groupby(contents):
        last = first + len(list(group)) - 1
        yield content, first, last
        first = last + 1


def interval(first, last):
    """Return "3-5", or "3" if both are 3."""
    return f"{first}-{last}" if first < last else f"{first}"


def elements(first, last):
    """Return "elements 3-5", or "element 3"."""
    return f"element{'s' if first < last else ''} {interval(first, last)}"


def spans(mask):
    """Return in words the indices where a mask (n,) is True: "0-3, 8"."""
    return ", ".join(interval(first, last) for is_set, first, last in stretches(mask.tolist()) if is_set)
