"""Results of make network at several rates in one file: what is kept of those before, and of recorded steps."""

from harness.rows.results import RecordedStep


def merged(result, before, kept=("accumulation", "sweep")):
    """-> `result` with the results of other rates in `before` behind it; `before`: list of Results, each of one rate.

    Of the one at the same rate the parts called `kept` are taken over, with the conditions that they were measured
    under, where `result` has none. Of recorded steps all is kept where they are drawn, or else the exposed time.
    """
    for other in before:
        for name in kept if other.conditions.rate == result.conditions.rate else ():
            setattr(result, name, getattr(result, name) or getattr(other, name))
    result.other_rates = [other for other in before if other.conditions.rate != result.conditions.rate]
    results = [result, *result.other_rates]
    for other in results:
        if other is not to_draw(results):
            keep_exposed_only(other.rows)
    return result


def to_draw(results):
    """Of results at several rates, the one to be drawn: at the lowest there is most to see. None: no step was kept."""
    drawable = [result for result in results if any(step.seconds for row in result.rows for step in row.timeline)]
    return min(drawable, key=lambda result: result.conditions.bits_per_second, default=None)


def keep_exposed_only(rows):
    """Of the recorded steps, what the tables show."""
    for row in rows:
        row.timeline = [RecordedStep(step.exposed_seconds) for step in row.timeline]
