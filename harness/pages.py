"""Tables and pictures of the pages, anew from results/*.json; and what you have measured beside what is published."""

import argparse
import dataclasses
import functools
import re
import statistics
import textwrap

from harness import command_line, pictures, tables
from harness import results as saved
from harness import rows as catalogue
from harness.command_line import write
from harness.results import FaultResult, GpuResult, LossResult, MutationResult, PlanResult, Result, SavingResult
from harness.tables import (
    LADDER,
    NONE,
    SHOWN,
    Notes,
    Sheet,
    accumulation_sheet,
    buckets_sheet,
    bytes_per_param_cells,
    caps_sheet,
    conditions_line,
    ddp_words,
    fault_sheets,
    gathered_sheet,
    gpu_sheet,
    has_shares,
    host_sheet,
    label_of,
    ladder_block,
    line_sheet,
    loss_sheet,
    memory_sheets,
    mutation_sheet,
    plan_check_sheets,
    plan_sheets,
    plan_sizes_sheet,
    rate_words,
    saving_sheet,
    share_sheet,
    shares,
    sheet_text,
    state_sheet,
    time_sheet,
    width,
)

# ----------------------------------------------------------------------------------------------------------- paragraphs
# Sentences as lines of a page.


def fill(text):
    return textwrap.fill(text, 100)


def bullets(sentences):
    return "\n".join(textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
                     for text in sentences)


# ------------------------------------------------------------------------------------------------------------ sentences
# What the rows say, in words: sentences with figures in them.


def planned():
    """What make plan --advise says, and the sizes of buckets that it chose from."""
    plan = saved.load_plan("plan.json")
    return [bullets(plan.advice), textwrap.indent(sheet_text(plan_sizes_sheet(plan)), "    ")]


def checked():
    """How far modelled times are from measured and from published ones."""
    check = saved.load_plan("plan.json").check
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
    rate, tuned = result.conditions.rate, catalogue.tuned(result, "ddp")
    stage4, ddp = result.timed(catalogue.OVERLAP), result.timed("ddp")
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
    stage4, tuned = result.timed(catalogue.OVERLAP), catalogue.tuned(result, "ddp")
    if not (tuned and stage4.drain_ms):
        return "what drains after the last step: not measured apart."
    rounds = zip(stage4.rounds_ms, stage4.drain_ms, tuned.rounds_ms)
    shared = statistics.median((step + drain / 8) / other for step, drain, other in rounds)
    return (f"what drains after the last step is no step's. Older tables shared it out over a round of 8 steps: so "
            f"stage 4 would take {shared:.2f} of tuned DDP's time, not {stage4.over(tuned):.2f}.")


def seven_b():
    """What a rank of a large model holds: after a step, and at its peak."""
    plan = saved.load_plan("plan.json")
    rows = {row.base: row for row in plan.rows}

    def gb(row):
        return f"{sum(row.held.values()) / 1e9:.0f} GB after a step, {row.peak / 1e9:.0f} within one"
    c = plan.conditions
    ddp, stage4 = gb(rows["ddp bf16"]), gb(rows["stage 4 bf16"])
    return [fill(f"A {c.model} model in 16 bits on {c.world} GPUs: with DDP each holds {ddp}; in stage 4 {stage4} "
                 "(counted by `make plan`).")]


APART = {"stage 4 only gradients": "gradients alone", "stage 4 only parameters": "parameters alone",
         catalogue.OVERLAP: "both"}


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
    rate, stage4 = result.conditions.rate, result.timed(catalogue.OVERLAP)
    rows = [(words, result.timed(base)) for base, words in UNTUNED.items()]
    if not all(row for _, row in rows):
        return f"stage 4 without its tuning: not measured, `make network RATE={rate}`."
    return f"stage 4 takes, {', '.join(f'{words} {row.over(stage4):.2f}' for words, row in rows)} of its time."


def owner(result):
    """Beside stage 4: time, and the number and size of the messages that gradients travel in."""
    rate, stage4, found = result.conditions.rate, result.timed(catalogue.OVERLAP), []
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
                    for say in sentences for result in saved.by_rate())]


# --------------------------------------------------------------------------------------------------------------- blocks
# What stands between the marks of the pages, by name: tables, sentences, pictures.


def _conditions(result):
    return fill(conditions_line(result.conditions))


def _bench_sheets():
    result = saved.load_bench()
    return [*_time_and_memory(result), _conditions(result)]


def _time_and_memory(result):
    columns = width(result.conditions)
    return [sheet_text(sheet, columns) for sheet in (time_sheet(result), *memory_sheets(result))]


def _state_sheets():
    return [sheet_text(state_sheet(saved.load_bench().model_state))]


def _gathered_sheets():
    return [sheet_text(gathered_sheet(saved.load_bench().gathered))]


def _host_sheets():
    return [sheet_text(host_sheet(rows)) for rows in saved.load_bench().host]


def _slow_line():
    return _lines(saved.by_rate()[:1])


def _network_sheets():
    return _lines(saved.by_rate()[1:])


def _lines(results):
    return _one_below_the_other([(line_sheet(result), result.conditions) for result in results])


def _16bit_sheets():
    result = saved.load("bench_bfloat16.json", arguments=' ARGS="--dtype bfloat16"')
    time, memory, *_ = (time_sheet(result), *memory_sheets(result))
    return [sheet_text(time), sheet_text(memory), _conditions(result)]


def _curve_sheets():
    return [sheet_text(pictures.sheet(saved.at_all_rates()))]


def _curve_says():
    return [bullets(pictures.sentences(saved.at_all_rates()))]


def _one_below_the_other(found):
    """`found`: (sheet, conditions) each -> texts; a note that several have is below the first."""
    texts, seen = [], set()
    for sheet, conditions in found:
        notes = [note for note in sheet.notes if note not in seen]
        seen.update(notes)
        texts += [sheet_text(sheet._replace(notes=notes)).rstrip(), fill(conditions_line(conditions))]
    return texts


def _accumulation_sheets():
    found = []
    for result in saved.by_rate():
        if result.accumulation:
            sheet = accumulation_sheet(result.accumulation.rows)
            found.append((sheet._replace(title=f"{sheet.title}, {rate_words(result.conditions.rate)}"),
                          result.accumulation.conditions))
            if has_shares(result.accumulation):
                shares = share_sheet(result.accumulation)
                found.append((shares._replace(title=f"{shares.title}, {rate_words(result.conditions.rate)}"),
                              result.accumulation.conditions))
    return _one_below_the_other(found) or [
        'Not measured: make network RATE=300mbit ARGS="--accumulation".']


def _faults_sheets():
    return [sheet_text(sheet) for sheet in fault_sheets(saved.load("faults.json", FaultResult))]


def _mutations_sheets():
    return [sheet_text(mutation_sheet(saved.load("faults_mutations.json", MutationResult)))]


def _cuda_sheets():
    bench = saved.load_of("cuda", "bench_cuda.json", ' ARGS="--json results/bench_cuda.json"')
    result = saved.load("cuda.json", GpuResult)
    host = [sheet_text(host_sheet(rows)) for rows in result.host if rows[0].d == 8]
    return [sheet_text(gpu_sheet(result)), *host, *_time_and_memory(bench), _conditions(bench)]


def _saving_sheets():
    return [sheet_text(saving_sheet(saved.load("saving.json", SavingResult)))]


def _plan_sheets():
    plans = map(saved.load_plan, saved.PLANS)
    first, second = (plan_sheets(dataclasses.replace(plan, check=None)) for plan in plans)
    again = [sheet._replace(notes=[]) for sheet in (second[0], *second[2:])]  # their notes stand below the first
    return [sheet_text(sheet) for sheet in (*first, *again)]


def _plan_check_sheets():
    return [sheet_text(sheet) for sheet in plan_check_sheets(saved.load_plan("plan.json").check)]


def _caps_sheets():
    caps = saved.load_bench().caps
    return [sheet_text(caps_sheet(caps))] if caps else ["Not measured: make bench."]


def _buckets():
    """The sweeps of bucket size as tables, and the picture of them."""
    found = [(buckets_sheet(result.sweep), result) for result in saved.by_rate()
             if catalogue.is_whole(result.sweep)]
    if not found:
        return ["Not measured: `make network RATE=300mbit ARGS=--sweep`."]
    texts = _one_below_the_other([
        (sheet._replace(title=f"{sheet.title}, {rate_words(result.conditions.rate)}"), result.sweep.conditions)
        for sheet, result in found])
    return [*(textwrap.indent(text, "    ") for text in texts), "![ms a step by size of bucket](buckets.svg)"]


def _reading():
    """How long the pages and the four cores take, one after the other."""
    pages = [("This page", "", ""), *((f"[Stage {rung.title}]({rung.folder}/README.md)", rung.folder, ", then its core")
                                      for rung in LADDER if rung.folder)]
    lines, total = [], 0
    for name, folder, core in pages:
        at = saved.ROOT / folder
        minutes = tables.minutes(at / "README.md", at if folder else None)
        total += minutes
        lines.append(f"- {name}{core}: {minutes:.0f} minutes")
    rate = f"{tables.WORDS_A_MINUTE} words and {tables.CODE_LINES_A_MINUTE} code lines a minute"
    return ["\n".join([*lines, f"- together {total / 60:.1f} hours, at {rate}"])]


BLOCKS = {
    "bench": _bench_sheets,
    "state": _state_sheets,
    "gathered": _gathered_sheets,
    "host": _host_sheets,
    "caps": _caps_sheets,
    "slow_line": _slow_line,
    "network": _network_sheets,
    "bench_16bit": _16bit_sheets,
    "curve": _curve_sheets,
    "accumulation": _accumulation_sheets,
    "cuda": _cuda_sheets,
    "faults": _faults_sheets,
    "mutations": _mutations_sheets,
    "saving": _saving_sheets,
    "plan": _plan_sheets,
    "plan_check": _plan_check_sheets,
}
# These, and not as it looks in a terminal.
MARKDOWN = {"ladder": ladder_block, "reading": _reading, "seven_b": seven_b, "curve_says": _curve_says,
            "found": found_block, "buckets": _buckets,
            "planned": planned, "checked": checked}


def network_picture():
    return pictures.two_hosts_picture(saved.load("network.json").at_all_rates())


def curve_picture():
    check = saved.load_plan("plan.json").check
    return pictures.curve_picture(saved.at_all_rates(), check.curve)


def buckets_picture():
    """"" where no sweep was made."""
    return pictures.sweep_picture(saved.load("network.json").at_all_rates())


def plan_picture():
    return pictures.svg(*pictures.planned_steps(saved.load_plan("plan.json")))


# By the name of a file in results/.
PICTURES = {"sixteen_bits.svg": pictures.state_picture, "network.svg": network_picture, "curve.svg": curve_picture,
            "buckets.svg": buckets_picture, "plan.svg": plan_picture}


# ---------------------------------------------------------------------------------------------------------------- yours
# What you have measured, beside what is published: files in measured/, which git ignores, and those in results/.


KINDS = {"bench.json": Result, "network.json": Result, "bench_variants.json": Result,
         "network_variants.json": Result, "cuda.json": GpuResult, "faults.json": FaultResult,
         "faults_mutations.json": MutationResult, "losses.json": LossResult, "saving.json": SavingResult,
         "plan.json": PlanResult, "plan_70b.json": PlanResult}


def measured():
    """-> {name: what the file holds}, of those files of KINDS that are there."""
    return {name: saved.read(saved.ROOT / "measured" / name, kind)
            for name, kind in KINDS.items() if (saved.ROOT / "measured" / name).exists()}


def sheets():
    """Of each of your files: a Result beside the published one, and else its own tables."""
    found = []
    for name, mine in measured().items():
        if isinstance(mine, Result):
            target = target_of(name, mine)
            theirs = saved.load(target).at_all_rates() if (saved.ROOT / "results" / target).exists() else []
            found += [beside_sheet(name, one, theirs) for one in mine.at_all_rates()]
        else:
            own = {GpuResult: lambda result: [gpu_sheet(result)], FaultResult: fault_sheets, PlanResult: plan_sheets,
                   SavingResult: lambda result: [saving_sheet(result)],
                   MutationResult: lambda result: [mutation_sheet(result)],
                   LossResult: lambda result: [loss_sheet(result)]}
            found += [sheet._replace(title=f"Yours: {sheet.title}") for sheet in own[type(mine)](mine)]
    return found


def target_of(name, result):
    """The published file that it belongs to: the bench has one for each kind of device, and for 16-bit rows."""
    if name != "bench.json":
        return name
    of_16_bits = next((dtype for dtype in ("bfloat16", "float16") if dtype in result.conditions.dtype.split()), None)
    return "bench_cuda.json" if result.conditions.device == "cuda" else (
        f"bench_{of_16_bits}.json" if of_16_bits else "bench.json")


def beside_sheet(name, mine, theirs):
    """`theirs`: published Results, of which one may be of the same rate."""
    same = next((one for one in theirs if one.conditions.rate == mine.conditions.rate), None)
    rate = f", {mine.conditions.rate}" if mine.conditions.rate else ""

    def cells(row):
        pair = [same and same.find(*row.choice), row]
        return [label_of(row), *map(_ms, pair), *map(_ratio, pair), *map(_sent, pair), *map(_held, pair)]
    columns = [("ms/step", "measured"), ("x ddp", "measured"), ("MB sent", "counted"), ("bytes a\nparam.", "counted")]
    return Sheet(
        f"Yours beside the published ones: {name}{rate}",
        [("", ""), *((f"{title}\n{whose}", source) for title, source in columns for whose in ("publ.", "yours"))],
        [cells(row) for row in mine.rows],
        [f"Yours: {conditions_line(mine.conditions)}.",
         f"Published: {conditions_line(same.conditions) if same else 'none at this rate'}.",
         *[f"{row.name}: {row.error}" for row in mine.rows if row.error]])


def _ms(row):
    return f"{row.median_ms:.0f}" if row and row.rounds_ms else NONE


def _ratio(row):
    return NONE if row is None or row.vs_reference is None else f"{row.vs_reference:.2f}"


def _sent(row):
    return NONE if row is None or row.wire_bytes is None else f"{row.wire_bytes / 1e6:.1f}"


def _held(row):
    return bytes_per_param_cells(row, Notes())[0].rstrip("*") if row else NONE


def publish():
    """Puts your files into results/, those of other rates behind yours -> lines that say so.

    A part of a bench is refused, before anything is written.
    """
    fail, said = functools.partial(command_line.fail, "report"), []
    found = measured()
    for name, mine in found.items():
        if target_of(name, mine) == "bench.json":
            saved.check_whole(mine, "measured/bench.json")
    for name, mine in found.items():
        target = saved.ROOT / "results" / target_of(name, mine)
        if name.startswith("network") and target.exists():
            mine = functools.reduce(lambda before, one: saved.merged(one, before.at_all_rates()),
                                    mine.at_all_rates()[::-1], saved.load(name))
        if name == "network_variants.json":  # no picture shows these steps
            saved.keep_exposed_only(row for one in mine.at_all_rates() for row in one.rows)
        write("--publish", target, saved.to_json(mine), fail)
        (saved.ROOT / "measured" / name).unlink()
        said.append(f"measured/{name} is {target.relative_to(saved.ROOT)} now")
    return said or ["measured/ holds nothing to publish"]


# ---------------------------------------------------------------------------------------------------------------- pages
# Tables and pictures of the pages, anew from results/*.json.


COLUMNS = 110  # of a table that stands in the terminal only


def rewritten(text):
    """`text` of a markdown file, with all its blocks made anew. An unknown name raises KeyError."""
    def block(match):
        start, name, end = match.groups()
        lines = "\n\n".join({**BLOCKS, **MARKDOWN}[name]()).splitlines()
        indent = "" if name in MARKDOWN else "    "
        return "\n".join([start, *(f"{indent}{line}".rstrip() for line in lines), "", end])
    return re.sub(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)", block, text, flags=re.DOTALL)


def files():
    """Pages that have blocks."""
    root = saved.ROOT
    return [root / "README.md", root / "docs" / "plan.md", *sorted((root / "results").glob("*.md"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = functools.partial(command_line.fail, "report")
    parser.add_argument("--publish", action="store_true", help="first put what is in measured/ into results/")
    if parser.parse_args().publish:
        print(*publish(), sep="\n")
    rewrite()
    for sheet in sheets():
        print("", sheet_text(sheet, COLUMNS), sep="\n")


def rewrite():
    """Pages and pictures, and says of each whether it has changed."""
    texts = []  # nothing is written before all of it is there
    for path in [*files(), *(saved.ROOT / "results" / name for name in PICTURES)]:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            texts.append((path, before, PICTURES[path.name]() if path.name in PICTURES else rewritten(before)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"there is no such block, or results/ holds something else than results: {error!r}"
            raise SystemExit(f"report: {path.name}: {reason}") from None
    for path, before, after in texts:
        if after != before:
            write("page", path, after, functools.partial(command_line.fail, "report"))
        print(f"{path.relative_to(saved.ROOT)}: {'unchanged' if after == before else 'rewritten'}")


if __name__ == "__main__":
    from harness.pages import main  # ranks are handed functions of that name

    main()
