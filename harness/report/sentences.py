"""What the rows say, in words: sentences with figures in them."""

import statistics
import textwrap

from harness.report import published
from harness.report.accumulation_tables import SHOWN, has_shares, shares
from harness.report.cells import rate_words
from harness.report.ladder import ddp_words
from harness.report.paragraphs import bullets, fill
from harness.report.plan_tables import plan_sizes_sheet
from harness.report.sheet import sheet_text
from harness.rows import bucket_sizes


def planned():
    """What make plan --advise says, and the sizes of buckets that it chose from."""
    plan = published.load_plan("plan.json")
    return [bullets(plan.advice), textwrap.indent(sheet_text(plan_sizes_sheet(plan)), "    ")]


def checked():
    """How far modelled times are from measured and from published ones."""
    check = published.load_plan("plan.json").check
    whole, parts = ([run for run in check.two_hosts if (run.micro_batches is not None) == is_part]
                    for is_part in (False, True))
    near, near_parts = (sum(abs(run.error) <= 0.1 for run in runs) for runs in (whole, parts))
    farthest, users = max(whole, key=lambda run: abs(run.error)), "predicted, user's"

    def errors(*wanted):
        return ", ".join(f"{run.error:+.1%}" for run in check.published
                         if (run.what, run.optimizer, run.gpus > 128) in wanted)
    return [bullets([
        f"Our two hosts: {near} of {len(whole)} steps are modelled within 10 %, the farthest ({farthest.label}, "
        f"{farthest.where}) {farthest.error:+.1%} off; with accumulation {near_parts} of {len(parts)}.",
        "Megatron-LLaMA's table: calibrated on one of four figures, the others are "
        f"{errors(('predicted', 'overlapped', True), ('predicted', 'distributed', True))} off.",
        "A user's 128 GPUs, where the overlapped optimizer was the slower one: by that calibration distributed "
        f"{errors(('predicted', 'distributed', False))}, overlapped {errors(('predicted', 'overlapped', False))}; "
        f"calibrated on the user's two distributed runs, overlapped {errors((users, 'overlapped', False))}; the "
        f"same with no message hidden {errors(('none hidden', 'overlapped', False))}."])]


def lead(result):
    """By how much stage 4 is ahead of DDP on one line, and what of that is bucket size -> sentences."""
    rate, tuned = result.conditions.rate, bucket_sizes.tuned(result, "ddp")
    stage4, ddp = result.timed(bucket_sizes.STAGE_4), result.timed("ddp")
    text = f"stage 4 takes {stage4.over(tuned or ddp):.2f} of the time of {ddp_words(result)}"
    if tuned is None:
        return f"{text}. DDP with a tuned size: not measured, `make network RATE={rate} ARGS=--sweep`."
    if tuned is ddp:
        return f"{text}."
    whose = ("so much of the lead is bucket size, and none of ours" if stage4.over(tuned) < 1 else
             "all of the lead over those is bucket size, and none of it ours")
    return (f"{text}, and {stage4.over(ddp):.2f} of DDP with its default ones. Of these the tuned ones take "
            f"{tuned.over(ddp):.2f}: {whose}.")


def drained(result):
    """What older tables made of the ratio to DDP: they shared the drain out over the steps of a round."""
    stage4, tuned = result.timed(bucket_sizes.STAGE_4), bucket_sizes.tuned(result, "ddp")
    if not (tuned and stage4.drain_ms):
        return "what drains after the last step: not measured apart."
    rounds = zip(stage4.rounds_ms, stage4.drain_ms, tuned.rounds_ms)
    shared = statistics.median((step + drain / 8) / other for step, drain, other in rounds)
    return (f"what drains after the last step is no step's. Older tables shared it out over a round of 8 steps: so "
            f"stage 4 would take {shared:.2f} of tuned DDP's time, not {stage4.over(tuned):.2f}.")


def seven_b():
    """What a rank of a large model holds: after a step, and at its peak."""
    plan = published.load_plan("plan.json")
    rows = {row.base: row for row in plan.rows}

    def gb(row):
        return f"{sum(row.held.values()) / 1e9:.0f} GB after a step, {row.peak / 1e9:.0f} within one"
    c = plan.conditions
    ddp, stage4 = gb(rows["ddp bf16"]), gb(rows["stage 4 bf16"])
    return [fill(f"A {c.model} model in 16 bits on {c.world} GPUs: with DDP each holds {ddp}; in stage 4 {stage4} "
                 "(counted by `make plan`).")]


APART = {"stage 4 only gradients": "gradients alone", "stage 4 only parameters": "parameters alone",
         bucket_sizes.STAGE_4: "both"}


def apart(result):
    """What each half of the overlap buys."""
    rate, neither, rows = result.conditions.rate, result.timed("stage 4 neither"), [*map(result.timed, APART)]
    if not (neither and all(rows)):
        return f"overlap taken apart: not measured, `make network RATE={rate}`."
    parts = [f"{words} {row.over(neither):.2f}" for row, words in zip(rows, APART.values())]
    return f"of the time of stage 4 without overlap, {', '.join(parts[:-1])}, {parts[-1]}."


UNTUNED = {"stage 4, whole messages": "with messages in one piece"}


def untuned(result):
    """What of stage 4 is tuning, by what a step takes without it."""
    rate, stage4 = result.conditions.rate, result.timed(bucket_sizes.STAGE_4)
    rows = [(words, result.timed(base)) for base, words in UNTUNED.items()]
    if not all(row for _, row in rows):
        return f"stage 4 without its tuning: not measured, `make network RATE={rate}`."
    return f"stage 4 takes, {', '.join(f'{words} {row.over(stage4):.2f}' for words, row in rows)} of its time."


def owner(result):
    """Beside stage 4: time, and the number and size of the messages that gradients travel in."""
    rate, stage4, found = result.conditions.rate, result.timed(bucket_sizes.STAGE_4), []
    if result.timed("owner reduce") is None:
        return f"a reduce to each owner: not measured, `make network RATE={rate}`."
    for row in filter(None, (result.timed("owner reduce"), result.timed("owner reduce", 2), stage4)):
        kind = next(kind for kind in ("reduce", "send", "reduce_scatter") if kind in row.collectives)
        number, n_bytes = row.collectives[kind], row.message_bytes[kind]
        found.append(f"{row.name} {number} messages of {n_bytes / number / 1e3:.0f} kB on average, and "
                     f"{row.over(stage4):.2f} of stage 4's time")
    return f"{'; '.join(found)}."


def share_sentence(result):
    """The claim that communication takes more than half of a step, and where it stops being true."""
    rate = result.conditions.rate
    if not has_shares(result.accumulation):
        return f"communication's share of a step: not measured, `make network RATE={rate} ARGS=--accumulation`."
    found, rows = [], result.accumulation.rows
    for name, column in zip(SHOWN, zip(*map(shares, rows))):
        by_count = {row.micro_batches: share for row, share in zip(rows, column)}
        below = next((f"below half from {k} micro-batches on" for k in by_count
                      if all(share < 0.5 for other, share in by_count.items() if other >= k)), "never below half")
        found.append(f"of {name} {column[0]:.0%}, {below if column[0] >= 0.5 else 'less than half'}")
    return f"without accumulation communication takes, of a step, {'; '.join(found)}."


def gloos_own(result):
    """What gloo's own collectives cost: a reduce-scatter that is an all-reduce, an all-gather in one message."""
    found = [(base, result.timed(base), result.timed(f"{own}, gloo's own")) for base, own in
             (("stage 2 all-gather", "stage 2"), ("stage 3 grad buffer", "stage 3"), ("fsdp2", "fsdp2"))]
    parts = [f"{base} {own.over(row):.2f}" for base, row, own in found if row and own]
    if not parts:
        return "gloo's own collectives: not measured."
    return f"with gloo's own reduce-scatter, which sends twice, and its all-gather: {', '.join(parts)} of its time."


def found_block():
    """What the rows say of peers, of bytes, of overlap, of owners and of accumulation, in words."""
    sentences = (lead, drained, gloos_own, apart, untuned, owner, share_sentence)
    return [bullets(f"{rate_words(result.conditions.rate)}: {say(result)}"
                    for say in sentences for result in published.by_rate())]
