"""What was measured as tables: for the terminal by rich, for the pages as markdown."""

import ast
import functools
import io
import re
import textwrap
import tokenize
from types import SimpleNamespace
from typing import NamedTuple

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import FOUR, ONE, THREE, TWO, results
from harness import rows as catalogue
from harness.memory import KINDS
from harness.results import Row, median, ratio
from harness.rows import RowId
from harness.training import UPDATE_BYTES

NONE = "–"


class Sheet(NamedTuple):
    """One table, in words. `columns`: (name, where it comes from); `rows`: lists of cells; `notes`: lines below."""
    title: str
    columns: list
    rows: list
    notes: list


def sheet_of(title, rows, columns, *notes):
    """-> Sheet. `columns`: (name, where it comes from, figure[, how it is written, a function or a format]), see
    `figure`. Of None and of an empty list a dash is shown, and of another list its median, if no function writes it.
    `notes`: lines, and what holds some, such as footnotes that become more while cells are made."""
    def cell(row, get, form=""):
        value = figure(row, get)
        if value is None or value == []:
            return NONE
        return form(value) if callable(form) else format(median(value) if isinstance(value, list) else value, form)
    cells = [[cell(row, *how) for _, _, *how in columns] for row in rows]
    lines = [line for note in notes for line in ([note] if isinstance(note, str) else note) if line]
    return Sheet(title, [column[:2] for column in columns], cells, lines)


def figure(row, get):
    """-> it, or None. `get`: a function of the row, or "field", "field.key" of a dict, "field/1e6": in large units."""
    if callable(get):
        return get(row)
    path, _, unit = get.partition("/")
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else getattr(row, name)
    return row if row is None or not unit else row / float(unit)


TEXTS = ("", ""), ("collectives", "counted"), ("parameters/gradients", ""), ("formula", ""), ("went on from", "")
WIDTH = 110  # columns of a terminal that the widest table takes


def print_sheet(sheet, console):
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for column in sheet.columns:
        table.add_column("{}\n[dim]{}[/dim]".format(*column), no_wrap=True,
                         justify="left" if column in TEXTS else "right")
    for cells in sheet.rows:
        table.add_row(*map(escape, cells))
    console.print(table, "", *(f"[dim]{escape(note)}[/dim]" for note in sheet.notes), sep="\n")


def sheet_text(sheet, columns=100):
    """A sheet as it looks in a terminal of so many columns, without colours."""
    console = Console(file=io.StringIO(), width=columns, color_system=None, highlight=False)
    print_sheet(sheet, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def markdown(sheet):
    """A sheet as a page has it. Columns that say where their figures come from stand to the right."""
    titles = [" ".join(name.split()) or sheet.title for name, _ in sheet.columns]
    sides = ["--:" if source else "---" for _, source in sheet.columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, sides, *sheet.rows)]
    return "\n".join([*lines, *(f"\n{textwrap.fill(note, 118)}" for note in sheet.notes)])


# ----------------------------------------------------------------------------- What several tables say in their cells


def settings_line(c):
    """Ranks, model, batch, rounds."""
    shared = f" that share {c.gpus} GPU(s)" if 0 < c.gpus < c.ranks else ""
    hosts = f" on {c.hosts} hosts of {c.cores_per_host} core(s)" if c.cores_per_host else ""
    tcp = f", TCP {c.tcp}" if c.tcp else ""
    return " · ".join([
        f"{c.backend}, {c.ranks} rank(s) x {c.threads_per_rank} thread(s){shared}{hosts}{tcp}",
        f"{c.model}: {c.parameters:,} parameters, {c.dtype}, AdamW",
        f"a rank's batch: {c.batch_size} x {c.sequence_length} bytes", f"{c.rounds} round(s) of {c.steps} steps"])


def conditions_line(c, *words):
    """`words` are in the middle: what a bench says of itself, or else these."""
    return " · ".join([c.machine, f"torch {c.torch}", *(words or [settings_line(c)]), c.date, f"commit {c.commit}"])


METHODS = "What rows and columns are: results/methods.md."


def megabytes(n):
    """In few digits: tens of thousands of MB have no decimal."""
    return f"{n / 1e6:.1f}" if n < 1e9 else f"{n / 1e6:.0f}"


def label_of(row):
    """The name of a row or RowId, in two lines where it has a bucket size: the table has to fit a terminal."""
    return row.base if row.bucket_mb is None else f"{row.base},\n  {row.size} buckets"


def failures(rows):
    return [f"{row.name}: {row.error}" for row in rows if row.error]


def beside_formula(name, form, footnotes, reason, unit=1):
    """-> figures of two columns: what was counted, with a mark where the formula says something else, and the formula.
    `footnotes`: reason -> its line, which begins with the mark."""
    def counted(row):
        value, theory, mark = getattr(row, name), getattr(row, f"{name}_theory"), ""
        if value is not None and abs(value - theory) > 0.005 * theory:
            mark = footnotes.setdefault(reason(row), f"{'*' * (len(footnotes) + 1)} {reason(row)}").split()[0]
        return None if value is None else f"{value / unit:{form}}{mark}"
    return counted, lambda row: None if getattr(row, name) is None else getattr(row, f"{name}_theory") / unit


def small(value):
    return "0" if value == 0 else f"{value:.1e}"


def rate_words(rate):
    """-> "300 Mbit/s" of "300mbit"."""
    return re.sub(r"(\d)([mg])bit$", lambda found: f"{found[1]} {found[2].upper()}bit/s", rate)


def from_to(times):
    return f"{min(times):.0f}–{max(times):.0f}"


def spread(times):
    return f"{median(times):.0f} ({from_to(times)})"


def time_sheet(result):
    c, marks = result.conditions, {}
    noise = max((abs(again - 1) for again in c.noise), default=0)  # how far ddp was from itself in any round

    def beside(row):
        if row.rounds_ms and row.vs_reference is not None:
            return f"{row.vs_reference:.2f}{'~' * (row.kind != 'reference' and abs(row.vs_reference - 1) <= noise)}"

    def why(row):
        if c.backend == "gloo" and "reduce_scatter" in row.collectives:
            return "gloo's reduce-scatter is an all-reduce underneath: it sends twice the bytes."
        return "more than the formula: padding, and flags on which the ranks agree."
    sent, formula = beside_formula("wire_bytes", ".1f", marks, why, 1e6)
    return sheet_of(
        "Time and traffic of a step", result.rows,
        [("", "", label_of), ("ms/step\nmedian", "measured", "rounds_ms", ".0f"),
         ("min–max", "measured", "rounds_ms", from_to), ("x ddp", "measured", beside),
         ("exposed\nms", "measured", "exposed_ms", ".0f"),
         ("collectives", "counted", lambda row: "\n".join(
             f"{count} {kind.replace('_', '-')}" for kind, count in row.collectives.items()) or None),
         ("MB sent\na rank", "counted", sent), ("", "formula", formula, ".1f")],
        f"x ddp: median of the ratios round by round. MB: 10⁶ bytes, mean over the ranks. {METHODS}",
        f"~ within the noise: ddp, timed again, took {min(c.noise):.2f} to {max(c.noise):.2f} times as long."
        if c.noise else "", marks.values(), failures(result.rows))


def memory_sheets(result):
    """-> Sheets: memory and correctness; and of what kind it is, where that was counted."""
    c, marks, rows = result.conditions, {}, [row for row in result.rows if row.kind != "noise"]
    of_16_bits = ", in 16 bits from replicated training with fp32 copies" * any(row.dtype != "float32" for row in rows)
    phases = [("model\ninit", "model"), ("optimizer\ninit", "optimizer"), ("forward\nbackward", "backward"),
              ("step", "step"), ("peak", "peak"), *[("reserved", "reserved")] * (c.device == "cuda")]
    counted, formula = beside_formula(
        "bytes_per_param", ".2f", marks,
        lambda row: "not the formula's: padding, shards that are not equal, or tensors that live on after the step.")
    memory = sheet_of(
        "Memory of a rank, and the difference from ddp", rows,
        [("", "", label_of), *((name, "counted", f"memory_bytes.{key}/1e6", ".1f") for name, key in phases),
         ("bytes a\nparam.", "counted", counted), ("", "formula", formula, ".2f"),
         ("largest\n|Δ|", "measured", "max_abs_diff", small)],
        "Memory after each phase in MB, of the rank that holds most. Bytes a parameter: parameters, gradients and "
        "optimizer state after a step, mean over the ranks.",
        f"Largest |Δ|: of any parameter on any rank, from ddp{of_16_bits}, after 3 steps; "
        f"allowed: {small(c.tolerance)}.", marks.values())
    peaks = ("peak:\nbuild", "build"), ("\nforward", "forward"), ("\nbackward", "backward"), ("\nstep", "step")
    kinds = sheet_of(
        "Peak within each phase, and what a rank holds after a step, counted, in MB", rows,
        [("", "", label_of), *((name, "", f"peak_bytes.{phase}", megabytes) for name, phase in peaks),
         *((name, "", f"held_bytes.{kind}", megabytes)
           for name, kind in zip(("held:\nparam.", "\ngrads", "\nstate", "\nbuffers"), KINDS)),
         ("activa-\ntions", "", "activation_bytes", megabytes)],
        "Peaks: of the second step. Held: on the rank that holds most; buffers are what is none of the other kinds. "
        "Activations: what the forward pass leaves for the backward pass.")
    return [memory, *[kinds] * any(row.held_bytes for row in rows)]


# ---------------------------------------------- What a line allows: no row can be faster than that, and how near is it?


SHORT = {"float32": "", "bfloat16": " bf16", "float16": " fp16"}  # behind the name of a row
ALONE, TUNED = "compute only", "ddp, tuned"


def line_ms(result, row):
    """-> ms that its bytes take by the formula; None of a row that has failed."""
    sent = row.wire_bytes_theory
    return None if sent is None else sent * 8e3 / result.conditions.bits_per_second


def over_floor(result, row):
    """Floor: the larger of compute only, of the same dtype, and the line's time."""
    line, alone = line_ms(result, row), result.timed(ALONE + SHORT[row.dtype])
    return ratio(row.rounds_ms, [max(line, ms) for ms in alone.rounds_ms]) if alone and line is not None else None


def stage4_over(result, row):
    stage4 = result.timed(catalogue.OVERLAP + SHORT[row.dtype])
    return ratio(stage4.rounds_ms, row.rounds_ms) if stage4 else None


def line_sheet(result):
    """What no row can be faster than, and stage 4 beside each row."""
    return sheet_of(
        f"A link of {rate_words(result.conditions.rate)}", result.rows,
        [("", "", label_of), ("ms a step\nmedian (min–max)", "measured", "rounds_ms", spread),
         ("drain\nms", "measured", "drain_ms", ".0f"),
         ("exposed\nms", "measured", "exposed_ms", ".0f"),
         ("line\nms", "formula", lambda row: line_ms(result, row), ".0f"),
         ("x floor", "measured", lambda row: over_floor(result, row), ".2f"),
         ("stage 4\nover this", "measured", lambda row: stage4_over(result, row), ".2f")],
        f"Line: bytes by the formula, over the rate. Ratios: medians, round by round. {METHODS}", failures(result.rows))


# Name in table and picture -> row, from the slowest to the fastest.
CURVES = {"stage 2, all-gather": "stage 2 all-gather", "replicated, no overlap": "rung 0 replicated",
          "stage 3, grad buffer": "stage 3 grad buffer", "FSDP2": "fsdp2", "DDP, default buckets": "ddp",
          "DDP, tuned buckets": TUNED, "stage 4, overlap": catalogue.OVERLAP, "floor": "floor"}


def row_of(result, base):
    return catalogue.tuned(result, "ddp") if base == TUNED else result.timed(base)


def over_computing(result, base):
    """-> the median of the ratios of a step's time to that of computing alone, round by round; None: not measured."""
    alone = result.timed(ALONE)
    if base == "floor":
        return max(1.0, line_ms(result, result.find(catalogue.OVERLAP)) / alone.median_ms)
    row = row_of(result, base)
    return row.over(alone) if row else None


def curve_sheet(results):
    """A column a rate, the slowest first."""
    results = sorted(results, key=lambda result: result.conditions.bits_per_second)

    def of(base, get):
        return lambda result: (row := row_of(result, base)) and get(result, row)
    measures = sheet_of("", results, [
        *((name, "", lambda result, base=base: over_computing(result, base), ".2f") for name, base in CURVES.items()),
        ("stage 4 over tuned DDP", "", of(TUNED, stage4_over), ".2f"),
        ("stage 4 over the floor", "", of(catalogue.OVERLAP, over_floor), ".2f"),
        ("DDP's best buckets", "", of(TUNED, lambda _, row: row.size)),
        ("compute only, ms", "", of(ALONE, lambda _, row: row.rounds_ms), ".0f"),
        ("rounds x steps", "", lambda result: f"{result.conditions.rounds} x {result.conditions.steps}"),
        ("stage 4's drain, ms", "", of(catalogue.OVERLAP, lambda _, row: row.drain_ms), ".0f")])
    made = {rate_words(result.conditions.rate): result.conditions for result in results}
    return Sheet("Time per step over computing alone",
                 [("", ""), *((rate.replace(" ", "\n"), "measured") for rate in made)],
                 [[name, *cells] for (name, _), *cells in zip(measures.columns, *measures.rows)],
                 [f"Medians of the ratios round by round. {METHODS}",
                  *(f"{rate}: {c.machine}, {c.date}, commit {c.commit}." for rate, c in made.items())])


def accumulation_sheets(accumulation):
    """-> Sheets: what an exchange each costs stage 4, and what communication takes of a step."""
    first = accumulation.rows[0]  # with one micro-batch both ways are the same
    noise = max(abs(each / once - 1) for once, each in zip(first.no_sync_ms, first.each_ms))

    def price(one):
        found = ratio(one.each_ms, one.no_sync_ms)
        return f"{found:.2f}{'~' * (abs(found - 1) <= noise)}"
    exchanges = sheet_of(
        "Accumulation in stage 4, ms a micro-batch", accumulation.rows,
        [("micro-batches\na step", "", "micro_batches"),
         ("in no_sync:\none exchange", "measured", "no_sync_ms", spread),
         ("without:\nan exchange each", "measured", "each_ms", spread), ("x no_sync", "measured", price)],
        "Median (min–max). In no_sync whole gradients stay on each rank; without, they are reduced into the shard.",
        f"~ within the noise: with one micro-batch both are the same, yet up to {noise:.0%} apart.")
    shares = sheet_of(
        "Communication's share of a step with one exchange", accumulation.rows,
        [("micro-batches\na step", "", "micro_batches"),
         ("compute only,\nms a micro-batch", "measured", "compute_ms", ".0f"),
         *((f"{name}\n", "measured", lambda one, ms=ms: 1 - ratio(one.compute_ms, getattr(one, ms)), ".0%")
           for name, ms in (("DDP", "ddp_ms"), ("stage 3", "stage3_ms"), ("stage 4", "no_sync_ms")))],
        f"1 - compute only / this row. DDP: the row {RowId('ddp', accumulation.ddp_mb).name}.")
    return [exchanges, shares]


def buckets_sheet(sweep):
    """The time of each row by the size of its buckets; of stage 4 also what the size costs in messages and memory."""
    c, found = sweep.conditions, {row.row_id: row for row in sweep.rows}

    def at(base, get):
        return lambda size: figure(found.get((base, size), Row("")), get)
    return sheet_of(
        "Bucket size, ms a step",
        [size for size in (*catalogue.SIZES, None) if any(row_id.bucket_mb == size for row_id in found)],
        [("", "", lambda size: RowId("", size).size),
         ("ddp\n", "measured", at(catalogue.REFERENCE, "rounds_ms"), ".0f"),
         ("stage 4\n", "measured", at(catalogue.OVERLAP, "rounds_ms"), ".0f"),
         ("its messages\nof gradients", "counted", at(catalogue.OVERLAP, lambda row: row.collectives.get(
             "send") or row.collectives.get("reduce_scatter"))),
         ("its bytes a\nparameter", "counted", at(catalogue.OVERLAP, "bytes_per_param"), ".2f")],
        f"Medians of {c.rounds} round(s) of {c.steps} steps. DDP's default is {catalogue.DEFAULT_MB} MB. The "
        f"model's gradients have {c.parameters * 4 / 1e6:.1f} MB.", failures(sweep.rows))


def caps_sheet(rows):
    return sheet_of(
        f"The default bucket of stage 4, fp32, {rows[0].ranks} ranks", rows,
        [("", "", "model"), ("model\nMB", "counted", "model_bytes/1e6", ",.1f"), ("buckets\n", "counted", "buckets"),
         ("their MB,\nmedian", "counted", "median_bytes/1e6", ".1f"),
         ("\nlargest", "counted", "largest_bytes/1e6", ".1f"), ("b, native\n", "counted", "b_native", ".2f"),
         ("b, exchanged\n", "counted", "b_exchanged", ".2f"),
         ("bytes a\nparameter", "counted", "bytes_per_param", ".2f")],
        "b: bytes a parameter of the two bucket buffers, with a native reduce-scatter (NCCL), or where parts are "
        "exchanged (gloo). The last column: 4 + 12/d + b, native; stages 1 to 3 hold 8 + 8/d.")


def state_sheet(states):
    def state(d, row):
        counted, theory = row.bytes_per_param[d], row.bytes_per_param_theory[d]
        return f"{counted:.2f}" + f"\n({theory:.2f})" * (abs(counted - theory) > 0.01 * theory)
    return sheet_of(
        "Model state, bytes a parameter, by number of ranks", states,
        [("parameters/gradients", "", "name"), ("formula", "", "formula"),
         *((f"d = {d}", "counted", functools.partial(state, d)) for d in states[0].bytes_per_param)],
        "b: the two bucket buffers of stage 4. In brackets: the formula, where padding adds more than 1 %.")


def host_sheet(rows):
    """Of one number of tensors and one d, as make bench WHAT=host measures them."""
    first = rows[0]
    phases = {"forw.": "forward", "backw.": "backward", "step": "step", "zero": "zero_grad", "whole": "whole"}
    return sheet_of(
        f"Best host time of a step, ms, measured: {first.tensors} tensors of 16 x 16, rank 0 of {first.d}", rows,
        [("", "", "name"), *((name, "", f"best_ms.{key}", ".2f") for name, key in phases.items()),
         ("x plain", "", f"best_ms.whole/{first.best_ms['whole']}", ".2f"),
         ("median", "", "median_ms.whole", ".2f"), ("µs/tensor", "", f"best_ms.whole/{first.tensors / 1e3}", ".0f")],
        f"Best of {first.steps} steps, all rows in turn; median and µs a tensor: of the whole step. "
        "Messages go nowhere; ddp is in a group of one, on gloo. Buckets of stage 4: 0.02 MB.")


def gathered_sheet(rows):
    return sheet_of(
        "Elements gathered per step, over the model's", rows,
        [("", "", "name"), *((f"d = {d}", "counted", lambda row, d=d: row.over_numel.get(d), ".2f")
                             for d in rows[0].over_numel)],
        "What is above 1.00 is padding.")


# ---------------------------------------------------------------------------- The tables of what is measured by itself


def fault_sheets(result):
    """Of a FaultResult: what was done to runs, and the run that moved on."""
    return [
        sheet_of("Faults", result.rows,
                 [("", "", "fault"), ("times", "counted", "times", ".0f"), ("went on from", "", "seen"),
                  ("at the\nend", "compared", "end")],
                 conditions_line(result.conditions, f"stage {result.stage} on two ranks or three")),
        sheet_of("A run that changes stages, beside undisturbed DDP", result.journey,
                 [("after\nstep", "", "step", ".0f"), ("trained until there by", "", "where"),
                  ("validation\nloss", "measured", "loss", ".4f"), ("of DDP", "measured", "undisturbed", ".4f"),
                  ("|Δ|", "measured", lambda row: abs(row.loss - row.undisturbed), ".0e")],
                 "The number of ranks changes the order of sums, and so the last bits.")]


def mutation_sheet(result):
    """Of a MutationResult: kind of change -> what became of it."""
    outcomes = {"refused": "refused", "loaded,\nstepped, saved": "loaded", "wrong": "wrong"}
    together = results.MutationRow("together", *(sum(getattr(row, outcome) for row in result.rows)
                                                 for outcome in outcomes.values()))
    return sheet_of(
        "Checkpoints that somebody has changed", [*result.rows, together],
        [("", "", "kind"), ("tried", "counted", lambda row: row.refused + row.loaded + row.wrong),
         *((name, "counted", outcome, ".0f") for name, outcome in outcomes.items())],
        conditions_line(result.conditions, f"seed {result.seed}"))


def gpu_sheet(result):
    c, plain = result.conditions, {row.model: row.step_ms for row in result.rows if row.stage == "fused AdamW"}

    def beside(row):
        return row.step_ms / plain[row.model] if plain[row.model] and row.d == 1 and not row.error else None
    return sheet_of(
        "The sharded update on a GPU", result.rows,
        [("", "", lambda row: f"{row.model}: {row.stage}"), ("d", "", "d"),
         ("step\nms", "measured", lambda row: "out of memory" if row.error else f"{row.step_ms:.2f}"),
         ("x AdamW", "measured", beside, ".2f"), ("GB/s", "measured", "bytes_per_s/1e9", ".0f"),
         ("x copy", "measured", f"bytes_per_s/{c.copy_bytes_per_s}", ".2f"), ("new", "counted", "allocations", ".0f"),
         ("peak", "counted", "peak_bytes/1e6", ".0f"), ("reserved", "counted", "reserved_bytes/1e6", ".0f")],
        f"GB/s: {UPDATE_BYTES} bytes for each parameter that this rank owns, over the whole step; a copy on the "
        f"device moves {c.copy_bytes_per_s / 1e9:.0f}. new: allocations in one step. Peak and reserved in MB.",
        conditions_line(c, c.dtype, f"median of {c.steps} steps, no communication"))


def loss_sheet(result):
    """-> a Sheet: a row for each way to train, a pair of columns for each beta2."""
    c, found = result.conditions, {(row.name, row.beta2): row for row in result.rows}

    def more(name, beta2):
        row = found[name, beta2]
        return " ".join(f"{loss - base:+.4f}" for loss, base in zip(row.losses, found[row.base, beta2].losses))

    def pair(beta2):
        return [(f"beta2 {beta2}\nloss", "measured", lambda name: found[name, beta2].losses, ".4f"),
                ("more, by seed", "measured", lambda name: more(name, beta2))]
    betas = dict.fromkeys(row.beta2 for row in result.rows)
    return sheet_of(
        f"Losses after {c.steps} steps", dict.fromkeys(row.name for row in result.rows),
        [("", "", str), *(column for beta2 in betas for column in pair(beta2))],
        "Loss: nats a byte of text that no step has seen, the median over the seeds. More: than stage 4 of the same "
        "dtype, same seed.",
        conditions_line(c, f"{c.backend}, {c.ranks} ranks", f"{c.model}: {c.parameters:,} parameters, AdamW",
                        f"a rank's batch: {c.batch_size} x {c.sequence_length} bytes of the source of Python's "
                        "standard library"))


def saving_sheet(result):
    c, seconds_of = result.conditions, {row.name: row.median_s for row in result.rows}

    def rates(row):  # GB a second
        return [c.bytes / seconds / 1e9 for seconds in row.rounds_s]
    return sheet_of(
        f"Saving and loading {c.bytes / 1e9:.1f} GB on {c.ranks} ranks", result.rows,
        [("", "", "name"), ("seconds", "measured", "rounds_s", ".2f"), ("GB/s", "measured", rates, ".2f"),
         ("from–to", "measured", rates, lambda found: f"{min(found):.2f}–{max(found):.2f}"),
         ("of the\ndisk's rate", "measured",
          lambda row: seconds_of[row.beside] / row.median_s if row.beside else None, ".2f")],
        f"An asynchronous save holds up the step that calls it for {median(result.held_up_ms):,.0f} ms, in which it "
        f"copies; a step without one takes {c.step_ms:,.0f} ms. Steps that ran while it was written, "
        f"{median(result.n_behind):.0f} a round, took {median(result.behind_ms):,.0f} ms more than as many without. "
        f"{METHODS}", conditions_line(c, "stage 4, AdamW, fp32", f"{c.rounds} rounds, all rows in turn, medians"))


def plan_sheets(result):
    """What a rank holds, the same by number of ranks, time, and what the check found."""
    c, rows = SimpleNamespace(**result.conditions), result.rows
    tokens = c.batch_size * c.sequence_length * c.accumulate / c.tensor_parallel
    memory = sheet_of(
        f"GB on a rank of {c.world}: {c.model}, {c.parameters:,} parameters a rank", rows,
        [("", "", lambda row: label_of(row).replace("\n  ", "\n")),
         *((name, "counted", f"held.{kind}/1e9", ".2f")
           for name, kind in zip(("params", "grads", "main", "moments", "buffers"), rows[0].held)),
         ("padding", "counted", "padding/1e9", ".2f"), ("activ.", "counted", lambda row: c.activations / 1e9, ".2f"),
         ("peak", "counted", "peak/1e9", ".2f"), ("fits\nfrom d", "counted", lambda row: row.fits_from or None)],
        "After a step, on rank 0. main: fp32 copies of 16-bit parameters. padding: what is more than the formula. "
        f"activ.: of a micro-batch of {c.batch_size} x {c.sequence_length}. peak: the most at one moment of a step. "
        f"fits from d: from this number of ranks on the peak is at most {c.device_memory:g} GB; torch's allocator "
        "takes more, and stage 4 that accumulates in no_sync() whole gradients.")
    time = sheet_of(
        f"A step of {c.model} on {c.world * c.tensor_parallel} x {c.device}", rows,
        [("", "", "name"), ("ms\na step", "modelled", lambda row: 1e3 * row.step.seconds, ",.0f"),
         ("exposed\nms", "modelled", lambda row: 1e3 * row.step.exposed_seconds, ",.0f"),
         ("tokens/s\na device", "modelled", lambda row: tokens / row.step.seconds, ",.0f"),
         ("1 of 8:\nonce", "modelled", "once_ms", ",.0f"), ("\neach", "modelled", "each_ms", ",.0f"),
         ("GB at\nthe peak", "counted", "peak/1e9", ".1f")],
        f"Assumed: {c.flops / 1e12:.0f} TFLOP/s, {c.efficiency:.0%} of what the maker states, "
        f"{c.memory_rate / 1e12:.2f} TB/s of memory, rings of {c.in_node / 1e9:.0f} GB/s in a node and "
        f"{c.between / 1e9:.0f} GB/s between nodes of {c.per_node}, {c.latency_in_node * 1e6:.0f} and "
        f"{c.latency_between * 1e6:.0f} µs a hop. Nobody is late, Python takes no time, tensor parallelism sends "
        f"nothing. {c.accumulate} micro-batch(es) a step. 1 of 8: ms of one of eight micro-batches, with one exchange "
        "a step, as in no_sync(), or with one each.")
    ranks = sheet_of(
        "ms a micro-batch, by number of ranks", rows,
        [("", "", "name"), *((f"d = {d}", "modelled", lambda row, d=d: row.ms.get(d), ",.0f")
                             for d in rows[0].ms if d > 1)], f"Buckets are those that are best on {c.world}.")
    sizes = sheet_of(
        f"Sizes of buckets: {c.model} on {c.world} ranks", result.sizes,
        [("", "", "base"), ("bucket", "", lambda size: size.size + " *" * (not size.is_bucket)),
         ("ms\n", "modelled", "ms", ",.0f"), ("GB at\nthe peak", "counted", "peak/1e9", ".1f")],
        "Taken: the smallest that is at most 2 % slower than the fastest.",
        "* not taken: two such buffers exceed half of all gradients.")
    return [memory, state_sheet(rows), time, ranks, sizes, *(plan_check_sheets(result.check) if result.check else [])]


def plan_check_sheets(check):
    found = {}  # row without its size -> errors of ModelledRuns
    for run in check.two_hosts:
        found.setdefault(run.base, []).append(run.error)
    return [sheet_of(
        "Two hosts: error of the model, all links and sizes of buckets", found.items(),
        [("", "", lambda one: one[0]), ("steps", "", lambda one: len(one[1])),
         *((f"{name}\nerror", "modelled", lambda one, of=of: of(one[1]), "+.1%")
           for name, of in (("from", min), ("median", median), ("to", max)))],
    ), sheet_of(
        "LLaMA-13B on 8 x A100 a node: tokens/s a GPU", check.published,
        [("", "", "what"), ("", "", "optimizer"), ("GPUs", "", "gpus"), ("sequences\na step", "", "sequences"),
         ("", "published", "published", ",.0f"), ("", "modelled", "modelled", ",.0f"),
         ("error", "modelled", "error", "+.1%")],
        "What is assumed, and calibrated on which rows: results/methods.md.")]


CORE = ("optimizer.py", "buffer.py", "transport.py")


def code_lines(path):
    """-> number -> text of the lines of a Python file that are code: no blanks, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    found = {number for token in tokenize.generate_tokens(io.StringIO(source).readline)
             if token.string.strip() and token.type != tokenize.COMMENT
             for number in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    return {number: lines[number - 1].split("  #")[0] for number in sorted(found)}


def core_lines(folder):
    """Code lines of a stage's core."""
    return sum(len(code_lines(folder / name)) for name in CORE if (folder / name).exists())


class Rung(NamedTuple):
    """A row of README's ladder: the bench's row of that name, and its stage's folder."""
    row: str
    folder: str
    title: str
    collectives: str


LADDER = [
    Rung("ddp", "", "DDP, replicated AdamW", "all-reduce, in buckets"),
    Rung("rung 0 replicated", "", "0 replicated", "all-reduce"),
    Rung("stage 1 naive broadcast", ONE, "1 naive broadcast", "all-reduce, d broadcasts"),
    Rung("stage 2 all-gather", TWO, "2 all-gather", "all-reduce, all-gather"),
    Rung("stage 3 grad buffer", THREE, "3 grad buffer", "reduce-scatter, all-gather"),
    Rung("stage 4 overlap", FOUR, "4 overlap", "reduce-scatter, all-gather, in buckets"),
]


def ladder_block():
    """What can be counted, and one column of time, measured on two hosts with the slowest line, as markdown."""
    result = results.by_rate()[0]
    c, tuned = result.conditions, catalogue.tuned(result, "ddp")
    ddp = tuned or result.find("ddp")
    counted = {row.name: row.bytes_per_param for row in results.load_bench().model_state}

    def of_row(get):
        return lambda rung: get(ddp if rung.row == "ddp" else result.find(rung.row) or Row(rung.row))

    def held(rung):
        """Bytes a parameter after a step: of stages 3 and 4 as the bench counted them, padding and buffers included."""
        formula = {d: 8 + 8 / d if rung.folder else 16 for d in (2, 8, 64)}
        of_ranks = counted.get(f"stage {rung.title[0]} float32/float32", formula)
        return " · ".join(f"{of_ranks[d]:.1f}" for d in formula)
    sheet = sheet_of("", LADDER, [
        ("stage", "", "title"), ("collectives", "", "collectives"),
        ("bytes per parameter on 2 · 8 · 64 ranks", "", held),
        ("peak memory, MB", "", of_row(lambda row: max(row.peak_bytes.values()) / 1e6 if row.peak_bytes else None),
         ".0f"),
        ("values sent per parameter", "", lambda rung: catalogue.find(rung.row).sends / 4, "g"),
        ("code lines of the core", "", lambda rung: core_lines(results.ROOT / rung.folder) if rung.folder else None),
        ("time ÷ DDP's", "", of_row(lambda row: row.over(ddp)), ".2f")])
    words = "DDP's with its default buckets" if tuned is None else (
        f"tuned DDP's ({'default' if tuned.bucket_mb is None else tuned.size} buckets, the fastest tried)")
    note = (f"The model has {c.parameters:,} parameters in fp32. Bytes: after a step, gradients included, with AdamW "
            "(stages 1 to 3: 8 + 8/d; stage 4: 4 + 12/d + b, b for two bucket buffers). The peak includes "
            "activations. Multiply the values sent by (d-1)/d; stage 2 also sends padding. Time: a step of "
            f"`DistributedOptimizer`, divided by {words}. Two emulated hosts, a link of "
            f"{rate_words(c.rate)}, median of {c.rounds} rounds ({c.machine}, {c.date}).")
    return markdown(sheet._replace(notes=[note]))


def sheets(result):
    """-> list of Sheets: time and traffic; floors, where there is a line; memory, correctness; model state."""
    def of(make, part):
        return [make(part)] if part else []
    return [
        time_sheet(result), *of(line_sheet, result.conditions.bits_per_second and result),
        *of(buckets_sheet, result.sweep), *(accumulation_sheets(result.accumulation) if result.accumulation else []),
        *memory_sheets(result), *of(state_sheet, result.model_state), *of(gathered_sheet, result.gathered),
        *of(caps_sheet, result.caps), *map(host_sheet, result.host)]


def show(result):
    """Prints all tables of a bench."""
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for sheet in sheets(result):
        print_sheet(sheet, console)
        console.print()
    console.print(conditions_line(result.conditions), style="dim", markup=False)
