"""What a measured row says in the cells of a table."""

import re

from harness.report.sheet import NONE

EXPOSED = ("Exposed: communication during which nothing computes, in the median of five recorded steps, on the rank "
           "with more of it.")


def megabytes_cell(n_bytes):
    """In few digits: tens of thousands of MB have no decimal."""
    return f"{n_bytes / 1e6:.1f}" if n_bytes < 1e9 else f"{n_bytes / 1e6:.0f}"


def label_of(row):
    """The name of a row or Choice, in two lines where it has a bucket size: the table has to fit a terminal."""
    return row.base if row.bucket_mb is None else f"{row.base},\n  {row.size} buckets"


def failures(rows):
    return [f"{row.name}: {row.error}" for row in rows if row.error]


def time_cells(row, conditions):
    if not row.rounds_ms:
        return [NONE, NONE, NONE]
    times, ratio = row.rounds_ms, NONE
    if row.vs_reference is not None:
        is_noise = row.kind != "reference" and abs(row.vs_reference - 1) <= _noise(conditions)
        ratio = f"{row.vs_reference:.2f}{'~' * is_noise}"
    return [f"{row.median_ms:.0f}", f"{min(times):.0f}–{max(times):.0f}", ratio]


def _noise(conditions):
    """How far two timings of the same thing were apart in any round: 0.05 is 5 %."""
    return max((abs(ratio - 1) for ratio in conditions.noise), default=0)


def noise_note(conditions):
    """What `~` means, with the ratios that say it; nothing where nothing was timed twice."""
    ratios = conditions.noise
    return [f"~ within the noise of this run: ddp, timed again in each round, took {min(ratios):.2f} to "
            f"{max(ratios):.2f} times as long, {_noise(conditions):.0%} off at most."] if ratios else []


def exposed_cell(row):
    exposed = [step.exposed_seconds * 1000 for step in row.timeline]
    return f"{max(exposed):.0f}" if exposed else NONE


def collectives_cell(row):
    return "\n".join(f"{count} {kind.replace('_', '-')}" for kind, count in row.collectives.items()) or NONE


def wire_cells(row, conditions, notes):
    if row.wire_bytes is None:
        return [NONE, NONE]
    counted, theory = row.wire_bytes, row.wire_bytes_theory
    mark = ""
    if _differ(counted, theory):
        is_gloo = conditions.backend == "gloo" and "reduce_scatter" in row.collectives
        mark = notes.mark("gloo's reduce-scatter is an all-reduce underneath: it sends twice the bytes." if is_gloo else
                          "more than the formula: padding, and flags on which the ranks agree.")
    return [f"{counted / 1e6:.1f}{mark}", f"{theory / 1e6:.1f}"]


def peaks_of(conditions):
    """What there is of the largest moment: bytes of tensors, and on CUDA what torch's allocator took for them."""
    return ["peak", "reserved"] if conditions.device == "cuda" else ["peak"]


def memory_cells(row, conditions):
    phases = row.memory_bytes
    keys = ("model", "optimizer", "backward", "step", *peaks_of(conditions))
    return [f"{phases[key] / 1e6:.1f}" if phases else NONE for key in keys]


def bytes_per_param_cells(row, notes):
    if row.bytes_per_param is None:
        return [NONE, NONE]
    counted, theory = row.bytes_per_param, row.bytes_per_param_theory
    reason = "not the formula's: padding, shards that are not equal, or tensors that live on after the step."
    mark = notes.mark(reason) if _differ(counted, theory) else ""
    return [f"{counted:.2f}{mark}", f"{theory:.2f}"]


def _differ(counted, theory):
    return abs(counted - theory) > 0.005 * theory


def difference_cell(row):
    return NONE if row.max_abs_diff is None else number_cell(row.max_abs_diff)


def number_cell(value):
    return "0" if value == 0 else f"{value:.1e}"


def rate_words(rate):
    """-> "300 Mbit/s" of "300mbit"."""
    return re.sub(r"(\d)([mg])bit$", lambda found: f"{found[1]} {found[2].upper()}bit/s", rate)
