"""Writes the tables, pictures and figures of the pages anew from results/*.json, and prints yours beside them."""

import dataclasses
import functools
import math
import re
import textwrap
from typing import NamedTuple

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.measuring import every_row, links, losses
from harness.publishing import pictures, row_names, tables
from harness.publishing import results as saved
from harness.publishing.results import Report, Row, Sheet
from harness.publishing.stages import core_lines
from harness.publishing.tables import TEXT, column, names, rate_words
from harness.ranks import command_line
from harness.training import rows as catalogue

FP32_BYTES = 4
GPUS = ("cuda.json",)


def origin(files):
    """Return a block with machine, torch, commit and date of these files, each once."""
    files = [name for name in files if (saved.ROOT / "results" / name).exists()]
    conditions = [part for name in files for _, part in saved.provenance(saved.load(name))]
    machine, torch, commit, day = (" and ".join(dict.fromkeys(getattr(part, field) for part in conditions))
                                   for field in ("machine", "torch", "commit", "date"))
    return code(f"{machine} · torch {torch} · commit {commit} · {day}")


def code(*texts):
    """Return a block of code, with an empty line between the texts."""
    return textwrap.indent("\n\n".join(text.rstrip() for text in texts), "    ", lambda line: line.strip())


def pick(sheet, *keys, timed=None):
    """Return a sheet with these columns, or all, and its footnotes. `timed`: Conditions, whose rounds it shows."""
    all_keys = [column.key for column in sheet.columns]
    places = [all_keys.index(key) for key in keys or all_keys]
    footnotes = [*sheet.footnotes]
    if timed:
        footnotes.append(f"{timed.rounds} round(s) of {timed.steps} steps.")
    return dataclasses.replace(sheet, columns=[sheet.columns[place] for place in places], notes=[],
                               rows=[[cells[place] for place in places] for cells in sheet.rows], footnotes=footnotes)


def shown(*sheets):
    """Return a block of sheets, as a terminal shows them."""
    return code(*map(tables.sheet_text, sheets))


def bench(result):
    """Return a block with time, traffic and memory of each row, in one table."""
    time = pick(every_row.time_sheet(result), "name", "ms", "range", "over_ddp", "sent", "formula")
    memory = pick(every_row.memory_sheets(result)[0], "name", "peak", "bytes", "difference")
    memory_columns = memory.columns[1:]  # without the names
    cells_of = {name: cells for name, *cells in memory.rows}
    nothing = [None] * len(memory_columns)  # the row that notes the noise has no memory
    rows = [[*cells, *cells_of.get(cells[0], nothing)] for cells in time.rows]
    sheet = Sheet("A step: time, traffic, memory in MB", time.columns + memory_columns, time.row_keys, rows,
                  footnotes=time.footnotes + memory.footnotes)
    return shown(pick(sheet, timed=result.conditions))


def phases(result):
    """Return a block with the memory of each row after each phase of the first step, and its peak in the second."""
    sheet = pick(every_row.memory_sheets(result)[0], "name", "model", "optimizer", "backward", "step", "peak")
    return shown(dataclasses.replace(sheet, title="Memory of a rank after each phase, and its peak, MB"))


def at_a_rate(sheet, result, timed=None):
    return pick(dataclasses.replace(sheet, title=f"{sheet.title}, {rate_words(result.conditions.rate)}"), timed=timed)


def host(result):
    """Return the sheet of the host's time as rank 0 of 8."""
    return pick(result.host[8], "name", "forward", "backward", "step", "whole", "over_plain", "per_tensor")


def cuda():
    report = saved.load("cuda.json")
    return shown(report.sheets["overlap"], pick(report.sheets["updates"]), host(report))


def plans():
    """Return a block of make plan: memory, time and sizes of buckets for 7b, and time for 70b."""
    plan, larger = saved.load("plan.json").sheets, saved.load("plan_70b.json").sheets
    memory = pick(plan["memory"], "name", "parameters", "gradients", "main parameters", "state", "buffers", "peak",
                  "fits_from")
    times = [pick(sheets["time"], "name", "ms", "exposed", "once", "each", "peak") for sheets in (plan, larger)]
    return shown(memory, *times, pick(plan["sizes"]))


def sheets_of(name, *keys):
    """Return a block with tables of a Report."""
    sheets = saved.load(name).sheets
    return shown(*(pick(sheets[key]) for key in keys))


# ---------------------------------------------------------------------------------------------------- README's ladder


class Rung(NamedTuple):
    """A row of README's ladder. `state`: its row in the bench's table of model state."""
    row: str  # of the bench
    folder: str  # of the stage
    title: str
    collectives: str
    state: str = ""


LADDER = [
    Rung(row_names.REFERENCE, "", "DDP, replicated AdamW", "all-reduce, in buckets"),
    Rung(row_names.REPLICATED, "", "replicated", "all-reduce"),
    Rung(row_names.NAIVE_BROADCAST, STAGE_1, "1 naive broadcast", "all-reduce, d broadcasts"),
    Rung(row_names.ALL_GATHER, STAGE_2, "2 all-gather", "all-reduce, all-gather"),
    Rung(row_names.GRAD_BUFFER, STAGE_3, "3 grad buffer", "reduce-scatter, all-gather", "stage 3 float32/float32"),
    Rung(row_names.OVERLAP, STAGE_4, "4 overlap", "reduce-scatter, all-gather, in buckets", "stage 4 float32/float32"),
]


def ladder_sheet():
    """Make the table of what can be counted, and one column of time, measured on two hosts with the slowest link."""
    slowest = saved.by_rate()[0]
    result = saved.load_bench()
    conditions = slowest.conditions
    tuned = row_names.tuned_row(slowest, row_names.REFERENCE)
    ddp = tuned or slowest.find(row_names.REFERENCE)
    ranks = (2, 8, 64)

    def row_of(rung):
        return ddp if rung.row == row_names.REFERENCE else slowest.find(rung.row) or Row(rung.row)

    def held(rung):
        """Write bytes per parameter after a step: of stages 3 and 4 as counted, padding and buffers included."""
        if rung.state:
            by_ranks = [result.sheets["model_state"].numbers(f"{d}")[rung.state] for d in ranks]
        else:
            by_ranks = [8 + 8 / d if rung.folder else 16 for d in ranks]
        return " · ".join(f"{n_bytes:.1f}" for n_bytes in by_ranks)

    def peak_bytes(rung):
        return max(row_of(rung).peak_bytes.values(), default=None)

    def n_lines(rung):
        return core_lines(saved.ROOT / rung.folder) if rung.folder else None
    sheet = tables.sheet_of("", LADDER, {
        "stage": names("title", "stage"), "collectives": column("collectives", "collectives", form=TEXT),
        "held": column(f"bytes per parameter on {' · '.join(map(str, ranks))} ranks", held),
        "peak": column("peak memory, MB", peak_bytes, form=".0f", unit=1e6),
        "sends": column("values sent per parameter", lambda rung: catalogue.find(rung.row).sends, form="g",
                        unit=FP32_BYTES),
        "lines": column("code lines of the core", n_lines),
        "time": column("time ÷ DDP's", lambda rung: row_of(rung).over(ddp), form=".2f")})
    words = f"tuned DDP's ({tuned.size} buckets)" if tuned else "DDP's with its default buckets"
    sheet.notes = [
        f"{conditions.parameters:,} parameters in fp32, AdamW. Bytes after a step: 8 + 8/d; in stage 4, 4 + 12/d + "
        f"bucket buffers. The peak includes activations of {conditions.batch_size} sequences "
        f"({result.conditions.batch_size} in results/). Values sent: times (d-1)/d; stage 2 adds padding. Time: "
        f"`DistributedOptimizer`'s step, divided by {words}. Two emulated hosts, {rate_words(conditions.rate)}, "
        f"median of {conditions.rounds} rounds ({conditions.machine}, {conditions.date})."]
    return sheet


BLOCKS = {
    "ladder": lambda: tables.markdown(ladder_sheet()),
    "made": lambda: origin([name for name in saved.FILES if name not in GPUS]),
    "made_gpu": lambda: origin(GPUS),
    "settings": lambda: code(*(textwrap.fill(tables.settings_line(result.conditions), 100)
                               for result in (saved.load_bench(), saved.by_rate()[0]))),
    "curve": lambda: shown(pick(links.curve_sheet(saved.at_all_rates()))),
    "two_hosts": lambda: shown(*(pick(links.link_sheet(result), "name", "ms", "exposed", "over_floor", "stage4_over",
                                      timed=result.conditions) for result in saved.by_rate())),
    "accumulation": lambda: shown(*(at_a_rate(sheet, result) for result in saved.by_rate() if result.accumulation
                                    for sheet in links.accumulation_sheets(result.accumulation))),
    "buckets": lambda: shown(*(at_a_rate(links.buckets_sheet(result.sweep), result, result.sweep.conditions)
                               for result in saved.by_rate() if row_names.is_whole(result.sweep))),
    "state": lambda: shown(pick(saved.load_bench().sheets["model_state"])),
    "gathered": lambda: shown(pick(saved.load_bench().sheets["gathered"])),
    "bench": lambda: bench(saved.load_bench()),
    "phases": lambda: phases(saved.load_bench()),
    "bench_16bit": lambda: bench(saved.load("bench_bfloat16.json")),
    "host": lambda: shown(host(saved.load_bench())),
    "faults": lambda: sheets_of("faults.json", "faults"),
    "cuda": cuda,
    "plan": plans,
    "plan_check": lambda: sheets_of("plan.json", "published"),
}
# By the name of a file in results/. "" where no sweep was made.
PICTURES = {"network.svg": lambda: links.steps_picture(saved.load("network.json").at_all_rates()),
            "curve.svg": lambda: links.curve_picture(saved.at_all_rates()),
            "buckets.svg": lambda: links.sweep_picture(saved.at_all_rates()),
            "gpu_overlap.svg": lambda: drawn_steps("cuda.json"),
            "plan.svg": lambda: drawn_steps("plan.json"),
            "same_bits.svg": lambda: losses.picture(saved.load("losses.json"))}


def drawn_steps(name):
    report = saved.load(name)
    return pictures.svg(list(report.steps.items()), report.title)


def asked_figures():
    """Return {name: text} of what docs/questions.md and docs/migrate.md quote: bytes, and modelled times."""
    bench = saved.load_bench()
    plan = saved.load("plan.json").sheets
    memory = plan["memory"]
    times = plan["time"]
    times_70b = saved.load("plan_70b.json").sheets["time"]
    plain = bench.find(row_names.COMPUTE_ONLY).memory_bytes
    stage_3 = bench.find(row_names.GRAD_BUFFER).memory_bytes
    planned = "stage 3 bf16/fp32"
    overlapped = row_names.STAGE_4_BF16
    state = bench.sheets["model_state"]
    megabytes = {
        "held_plain": plain["step"], "peak_plain": plain["peak"],
        "held_stage3": stage_3["step"], "peak_stage3": stage_3["peak"],
        "sent_ddp": bench.find(row_names.REFERENCE).wire_bytes,
        "sent_stage1": bench.find(row_names.NAIVE_BROADCAST).wire_bytes}
    bytes_each = {f"bf16_{d}": state.numbers(f"{d}")["stage 3 bfloat16/float32"] for d in (1, 8, 1024)}
    bytes_each["fp32_1024"] = state.numbers("1024")["stage 3 float32/float32"]
    gigabytes = {"grads_stage3": memory.numbers("gradients")[planned],
                 "grads_stage4": memory.numbers("gradients")[overlapped]}
    ms = {"ms_stage3": times.numbers("ms")[planned], "exposed_stage3": times.numbers("exposed")[planned],
          "ms_stage4": times.numbers("ms")[overlapped], "exposed_stage4": times.numbers("exposed")[overlapped],
          "once_7b": times.numbers("once")[overlapped], "each_7b": times.numbers("each")[overlapped],
          "once_70b": times_70b.numbers("once")[overlapped], "each_70b": times_70b.numbers("each")[overlapped]}
    return {**{name: f"{n_bytes / 1e6:.1f}" for name, n_bytes in megabytes.items()},
            **{name: f"{number:.2f}" for name, number in {**bytes_each, **gigabytes}.items()},
            **{name: f"{number:,.0f}" for name, number in ms.items()},
            "activations_7b": f"{memory.numbers('activations')[planned]:.1f}"}


def figures():
    """Return {name: text} of figures inside sentences, which stand between <!--name--> and <!--end-->."""
    plan = saved.load("plan.json")
    memory = plan.sheets["memory"]
    published = plan.sheets["published"]
    check = plan.figures
    ms_70b = saved.load("plan_70b.json").sheets["ranks"].numbers("1024")
    keys = [column.key for column in published.columns]
    runs = [dict(zip(keys, cells)) for cells in published.rows]

    def percents(calibration, is_users, *optimizers):
        """Return the errors of these published runs; the user's were on 128 GPUs."""
        return [100 * abs(run["error"]) for run in runs if run["calibration"] == calibration
                and run["optimizer"] in optimizers and (run["gpus"] == 128) == is_users]
    numbers = {
        "ddp_7b": memory.numbers("peak")["ddp bf16"], "peak_7b": memory.numbers("peak")[row_names.STAGE_4_BF16],
        "ddp_70b": ms_70b["ddp bf16"], "stage4_70b": ms_70b[row_names.STAGE_4_BF16],
        "fitting": sum(d is not None for d in memory.numbers("fits_from").values()),
        "off_theirs": math.ceil(max(percents("predicted", False, "overlapped", "distributed"))),
        "off_users": math.floor(min(percents("predicted", True, "overlapped"))),
        "off_users_own": math.floor(min(percents("predicted, user's", True, "overlapped"))),
        "off_none_hidden": math.ceil(max(percents("none hidden", True, "overlapped"))),
        "flops_theirs": check["publisher's TFLOP/s"], "flops_users": check["user's TFLOP/s"],
        "between_users": check["user's GB/s of a node"]}
    over_tuned = {}
    for result in saved.at_all_rates():
        ddp = row_names.tuned_row(result, row_names.REFERENCE)
        over_tuned[f"over_tuned_{result.conditions.rate}".replace(".", "_")] = (
            f"{result.find(row_names.OVERLAP).over(ddp):.2f}")
    return {**over_tuned, **asked_figures(), **{name: f"{number:,.0f}" for name, number in numbers.items()}}


# --------------------------------------------------------------------------------------- What you measured, beside ours


def measured_sheets():
    """Return tables of each of your files: a Result beside the published one, the tables of a Report as they are."""
    sheets = []
    for name in saved.FILES:
        if not (saved.ROOT / "measured" / name).exists():
            continue
        measured = saved.load(name, "measured")
        if isinstance(measured, Report):
            sheets += [dataclasses.replace(sheet, title=f"Yours: {sheet.title}") for sheet in measured.sheets.values()]
            continue
        target = published_file(name, measured)
        published = saved.load(target).at_all_rates() if (saved.ROOT / "results" / target).exists() else []
        sheets += [compared_sheet(name, of_rate, published) for of_rate in measured.at_all_rates()]
    return sheets


def published_file(name, result):
    """Return the published file that a Result belongs to: the bench has one for each device, and for 16-bit rows."""
    if name == "bench.json" and result.conditions.device == "cuda":
        return "bench_cuda.json"
    if name == "bench.json" and "bfloat16" in result.conditions.dtype.split():
        return "bench_bfloat16.json"
    return name


def compared_sheet(name, result, published):
    """Make the table of a Result beside that of the same rate among the `published` Results."""
    rate = result.conditions.rate
    match = next((other for other in published if other.conditions.rate == rate), None)

    def read_published(field):
        def read(row):
            published_row = match.find(*row.row_id) if match else None
            return getattr(published_row, field) if published_row else None
        return read
    columns = {"name": names(tables.label_of)}
    for title, field, form in (("ms/step", "rounds_ms", ".0f"), ("x ddp", "vs_reference", ".2f"),
                               ("MB sent", "wire_bytes", ".1f"), ("bytes a\nparam.", "bytes_per_param", ".2f")):
        unit = 1e6 if field == "wire_bytes" else 1
        source = "measured" if field in ("rounds_ms", "vs_reference") else "counted"
        columns[f"published {field}"] = column(f"{title}\npubl.", read_published(field), source, form, unit=unit)
        columns[f"your {field}"] = column(f"{title}\nyours", field, source, form, unit=unit)
    return tables.sheet_of(
        f"Yours beside the published ones: {name if rate is None else f'{name}, {rate}'}", result.rows, columns,
        [f"Yours: {tables.conditions_line(result.conditions)}.",
         f"Published: {tables.conditions_line(match.conditions) if match else 'none at this rate'}.",
         *tables.failures(result.rows)])


# ------------------------------------------------------------------------------------------------------------ The pages


def rewritten(text, blocks=BLOCKS):
    """Return the `text` of a markdown file with all blocks and figures made anew. An unknown name raises KeyError."""
    text = re.sub(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)",
                  lambda block: f"{block[1]}\n{blocks[block[2]]()}\n\n{block[3]}", text, flags=re.DOTALL)
    in_prose = r"<!--(\w+)-->.*?<!--end-->"
    texts = figures() if re.search(in_prose, text) else {}
    return re.sub(in_prose, lambda mark: f"<!--{mark[1]}-->{texts[mark[1]]}<!--end-->", text)


def files():
    """Return the pages that have blocks."""
    docs = [saved.ROOT / "docs" / f"{name}.md" for name in ("plan", "questions", "migrate")]
    return [saved.ROOT / "README.md", *docs, *sorted((saved.ROOT / "results").glob("*.md"))]


def main():
    command_line.Parser("report", __doc__).parse_args()
    if not pictures.can_draw():
        raise SystemExit("report: pictures need matplotlib: pip install matplotlib")
    rewrite()
    for sheet in measured_sheets():
        print("", tables.sheet_text(sheet, tables.WIDTH), sep="\n")


def rewrite():
    """Write pages and pictures, and say of each whether it has changed. Nothing is written before all of it is made."""
    texts = []
    for path in [*files(), *(saved.ROOT / "results" / name for name in PICTURES)]:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            after = PICTURES[path.name]() if path.name in PICTURES else rewritten(before)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = ("no such block, a file that FILES in harness/publishing/results.py lacks, or one of other "
                      f"fields: {error!r}")
            raise SystemExit(f"report: {path.name}: {reason}") from None
        texts.append((path, before, after))
    for path, before, after in texts:
        if after != before:
            command_line.write("page", path, after, functools.partial(command_line.fail, "report"))
        print(f"{path.relative_to(saved.ROOT)}: {'unchanged' if after == before else 'rewritten'}")


if __name__ == "__main__":
    main()
