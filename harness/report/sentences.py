"""What the rows say, in words: sentences with figures in them."""

from harness.report import published
from harness.report.accumulation_tables import SHARES, shares
from harness.report.ladder import ddp_words
from harness.report.line_tables import line_sheet
from harness.report.paragraphs import bullets
from harness.rows import bucket_sizes


def planned():
    """What make plan --advise says."""
    return [bullets(published.plans()[0]["advice"])]


def checked():
    """How far modelled times are from measured and from published ones."""
    check = published.plans()[0]["check"]
    runs = check["two_hosts"]
    whole, parts = ([(modelled / measured - 1, f"{row}, {where}") for where, row, measured, modelled in runs
                     if (" x " in row) == is_part] for is_part in (False, True))
    near, near_parts = (sum(abs(error) <= 0.1 for error, _ in found) for found in (whole, parts))
    farthest, which = max(whole, key=lambda run: abs(run[0]))

    users = "predicted, user's"

    def errors(*words):
        return ", ".join(f"{modelled / found - 1:+.1%}" for what, kind, gpus, _, _, found, modelled
                         in check["published"]["rows"] if (what, kind, gpus > 128) in words)
    return [bullets([
        f"Our two hosts: {near} of {len(whole)} steps are modelled within 10 %, the farthest ({which}) {farthest:+.1%} "
        f"off; with accumulation {near_parts} of {len(parts)}.",
        "Megatron-LLaMA's table: calibrated on one of four figures, the others are "
        f"{errors(('predicted', 'overlapped', True), ('predicted', 'distributed', True))} off.",
        "A user's 128 GPUs, where the overlapped optimizer was the slower one: by that calibration distributed "
        f"{errors(('predicted', 'distributed', False))}, overlapped {errors(('predicted', 'overlapped', False))}; "
        f"calibrated on the user's two distributed runs, overlapped {errors((users, 'overlapped', False))}; the "
        f"same with no message hidden {errors(('none hidden', 'overlapped', False))}."])]


def times(result):
    return {row["name"]: row for row in result["rows"] if row.get("step_ms")}


def lead(result):
    """By how much stage 4 is ahead of DDP on one line, and what of that is bucket size -> sentences."""
    rows, rate = times(result), result["conditions"]["rate"]
    stage4, ddp, tuned = rows[bucket_sizes.STAGE_4], rows["ddp"], bucket_sizes.tuned(result, "ddp")
    text = f"{rate}: stage 4 takes {bucket_sizes.ratio(stage4, tuned or ddp):.2f} of the time of {ddp_words(result)}"
    if tuned is None:
        return f"{text}. DDP with a tuned size: not measured, `make network RATE={rate} ARGS=--sweep`."
    if tuned is ddp:
        return f"{text}."
    by_default, size = bucket_sizes.ratio(stage4, ddp), bucket_sizes.ratio(tuned, ddp)
    whose = ("so much of the lead is bucket size, and none of ours" if bucket_sizes.ratio(stage4, tuned) < 1 else
             "all of the lead over those is bucket size, and none of it ours")
    return (f"{text}, and {by_default:.2f} of DDP with its default ones. Of these the tuned ones take {size:.2f}: "
            f"{whose}.")


def ahead():
    """README's own line for each rate."""
    return [bullets(leads())]


def leads():
    """The time of stage 4 beside DDP's, in few words."""
    found = []
    for result in published.by_rate():
        rows, tuned = times(result), bucket_sizes.tuned(result, "ddp")
        by_tuned = f"{bucket_sizes.ratio(rows[bucket_sizes.STAGE_4], tuned):.2f}" if tuned else "not measured"
        by_default = bucket_sizes.ratio(rows[bucket_sizes.STAGE_4], rows["ddp"])
        found.append(f"{result['conditions']['rate']}: {by_default:.2f} of "
                     f"default DDP; of DDP with the best size: {by_tuned}.")
    return found


APART = {"stage 4 only gradients": "gradients alone", "stage 4 only parameters": "parameters alone",
         bucket_sizes.STAGE_4: "both"}


def apart(result):
    """What each half of the overlap buys."""
    rows, rate = times(result), result["conditions"]["rate"]
    if not {"stage 4 neither", *APART} <= rows.keys():
        return f"{rate}: overlap taken apart: not measured, `make network RATE={rate}`."
    parts = [f"{words} {bucket_sizes.ratio(rows[name], rows['stage 4 neither']):.2f}" for name, words in APART.items()]
    return f"{rate}: of the time of stage 4 without overlap, {', '.join(parts[:-1])}, {parts[-1]}."


def owner(result):
    """Beside stage 4: time, and the number and size of the messages that gradients travel in."""
    rows, rate = times(result), result["conditions"]["rate"]
    if "owner reduce" not in rows:
        return f"{rate}: a reduce to each owner: not measured, `make network RATE={rate}`."
    stage4, found = rows[bucket_sizes.STAGE_4], []
    for name in ("owner reduce", "owner reduce, 2 MB buckets", bucket_sizes.STAGE_4):
        if name in rows:
            kind = next(kind for kind in ("reduce", "send", "reduce_scatter") if kind in rows[name]["collectives"])
            number, n_bytes = rows[name]["collectives"][kind], rows[name]["message_bytes"][kind]
            found.append(f"{name} {number} messages of {n_bytes / number / 1e3:.0f} kB on average, and "
                         f"{bucket_sizes.ratio(rows[name], stage4):.2f} of stage 4's time")
    return f"{rate}: {'; '.join(found)}."


def share_sentence(result):
    """The claim that communication takes more than half of a step, and where it stops being true."""
    rate, measured = result["conditions"]["rate"], result.get("accumulation", {})
    if "ddp" not in measured:
        return f"{rate}: communication's share of a step: not measured, `make network RATE={rate} ARGS=--accumulation`."
    found = []
    for key, name in SHARES.items():
        by_count = {one["micro_batches"]: shares(one)[key] for one in measured["rows"]}
        below = next((f"below half from {k} micro-batches on" for k in by_count
                      if all(share < 0.5 for other, share in by_count.items() if other >= k)), "never below half")
        first = next(iter(by_count.values()))
        found.append(f"of {name} {first:.0%}, {below if first >= 0.5 else 'less than half'}")
    return f"{rate}: without accumulation communication takes, of a step, {'; '.join(found)}."


def sent(result):
    """What of stage 4's lead over stage 3 and FSDP2 is overlap, and what gloo's reduce-scatter, which sends twice."""
    rows, rate = times(result), result["conditions"]["rate"]
    cells = {row[0]: row for row in line_sheet(result).rows}
    found = [f"{name} {cells[row][5]} of the formula's floor and {cells[row][6]} of that of the bytes it sent"
             for row, name in (("stage 3 grad buffer", "stage 3"), ("fsdp2", "FSDP2"),
                               (bucket_sizes.STAGE_4, "stage 4"))
             if row in rows]
    return f"{rate}: {', '.join(found)}."


def found_block():
    """What the rows say of peers, of bytes, of overlap, of owners and of accumulation, in words."""
    sentences = (lead, sent, apart, owner, share_sentence)
    return [bullets(say(result) for say in sentences for result in published.by_rate())]
