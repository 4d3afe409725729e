"""Round numbers for axes."""

import math


def round_step(span, most_ticks=6):
    """The distance of ticks: 1, 2 or 5 times a power of ten, so that at most `most_ticks` lie in `span`."""
    power = 10 ** math.floor(math.log10(span / most_ticks))
    return next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= most_ticks)
