"""What was measured as tables: for the terminal by rich, for the pages as markdown."""

import ast
import io
import re
import statistics
import textwrap
import tokenize
from typing import NamedTuple

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import results
from harness import rows as catalogue
from harness.memory import KINDS
from harness.results import Row
from harness.rows import Choice
from harness.training import UPDATE_BYTES

# --------------------------------------------------------------------------------------- A table, in words, and as text


NONE = "–"


class Sheet(NamedTuple):
    """One table, in words. `columns`: (name, where it comes from); `rows`: lists of cells; `notes`: lines below."""
    title: str
    columns: list
    rows: list
    notes: list


class Notes(list):
    """Footnotes: `mark(reason)` gives the sign to put beside a figure. The same reason has the same sign."""

    def mark(self, reason):
        lines = [line.split(" ", 1)[1] for line in self]
        if reason not in lines:
            self.append(f"{'*' * (len(self) + 1)} {reason}")
            lines.append(reason)
        return "*" * (lines.index(reason) + 1)


def rich_table(sheet):
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for name, source in sheet.columns:
        table.add_column(f"{name}\n[dim]{source}[/dim]", no_wrap=True,
                         justify="left" if is_text((name, source)) else "right")
    for cells in sheet.rows:
        table.add_row(*map(escape, cells))
    return table


def is_text(column):
    return column in (("", ""), ("collectives", "counted"), ("parameters/gradients", ""), ("formula", ""),
                      ("went on from", ""))


def dim(text):
    return f"[dim]{escape(text)}[/dim]"


def width(conditions):
    """Columns that the tables of a result are made for: on CUDA memory has one more."""
    return 110 if conditions.device == "cuda" else 100


def sheet_text(sheet, columns=100):
    """A sheet as it looks in a terminal of so many columns, without colours."""
    console = Console(file=io.StringIO(), width=columns, color_system=None, highlight=False)
    console.print(rich_table(sheet), "", *map(dim, sheet.notes), sep="\n")
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


# ----------------------------------------------------------------------- Under which conditions figures hold, in a line


def conditions_line(conditions):
    c = conditions
    shared = f" that share {c.gpus} GPU(s)" if 0 < c.gpus < c.ranks else ""
    hosts = f" on {c.hosts} hosts of {c.cores_per_host} core(s)" if c.cores_per_host else ""
    tcp = f", TCP {c.tcp}" if c.tcp else ""
    return " · ".join([
        c.machine, f"torch {c.torch}",
        f"{c.backend}, {c.ranks} rank(s) x {c.threads_per_rank} thread(s){shared}{hosts}{tcp}",
        f"{c.model}: {c.parameters:,} parameters, {c.dtype}, AdamW",
        f"a rank's batch: {c.batch_size} x {c.sequence_length} bytes",
        f"{c.rounds} rounds of {c.steps} steps", f"{c.date}{commit_of(c)}"])


def commit_of(conditions):
    """Of which code the figures are; older results don't say."""
    return f" · commit {conditions.commit}" if conditions.commit else ""


# --------------------------------------------------------------------- What a measured row says in the cells of a table


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


# -------------------------------------------------------- Time, traffic and memory of a step: the tables of every bench


def time_sheet(result):
    rows, conditions, wire_notes = result.rows, result.conditions, Notes()
    return Sheet(
        "Time and traffic of a step",
        [("", ""), ("ms/step\nmedian", "measured"), ("min–max", "measured"), ("x ddp", "measured"),
         ("exposed\nms", "measured"), ("collectives", "counted"), ("MB sent\na rank", "counted"), ("", "formula")],
        [[label_of(row), *time_cells(row, conditions), exposed_cell(row), collectives_cell(row),
          *wire_cells(row, conditions, wire_notes)]
         for row in rows],
        ["x ddp: median of the ratios round by round. MB: 10⁶ bytes, mean over the ranks.",
         *[EXPOSED] * any(row.timeline for row in rows), *noise_note(conditions), *wire_notes, *failures(rows)])


def memory_sheets(result):
    """-> Sheets: memory and correctness; and of what kind it is, where that was counted: older results lack it."""
    rows, conditions, memory_notes = result.rows, result.conditions, Notes()
    has_16_bits = any(row.dtype != "float32" for row in rows)
    of_16_bits = ", in 16 bits from replicated training with fp32 copies" * has_16_bits
    memory = Sheet(
        "Memory of a rank, and the difference from ddp",
        [("", ""), ("model\ninit", "counted"), ("optimizer\ninit", "counted"), ("forward\nbackward", "counted"),
         ("step", "counted"), *((key, "counted") for key in peaks_of(conditions)), ("bytes a\nparam.", "counted"),
         ("", "formula"), ("largest\n|Δ|", "measured")],
        [[label_of(row), *memory_cells(row, conditions), *bytes_per_param_cells(row, memory_notes),
          difference_cell(row)]
         for row in rows if row.kind != "noise"],
        ["Memory after each phase in MB, of the rank that holds most. Bytes a parameter: parameters, gradients and "
         "optimizer state after a step, mean over the ranks.",
         f"Largest |Δ|: of any parameter on any rank, from ddp{of_16_bits}, after 3 steps; "
         f"allowed: {number_cell(conditions.tolerance)}.",
         *memory_notes])
    return [memory, *[kinds_sheet(rows)] * any(row.held_bytes for row in rows)]


def kinds_sheet(rows):
    """The peak within each phase of a step, and what it comes from. Counted."""
    def cells(row):
        peaks, held = row.peak_bytes, row.held_bytes
        found = [*(peaks.get(phase) for phase in ("build", "forward", "backward", "step")),
                 *(held.get(kind) for kind in KINDS), row.activation_bytes]
        return [label_of(row), *(NONE if n_bytes is None else megabytes_cell(n_bytes) for n_bytes in found)]
    return Sheet(
        "Peak within each phase, and what a rank holds after a step, counted, in MB",
        [(name, "") for name in ("", "peak:\nbuild", "\nforward", "\nbackward", "\nstep", "held:\nparam.", "\ngrads",
                                 "\nstate", "\nbuffers", "activa-\ntions")],
        [cells(row) for row in rows if row.kind != "noise"],
        ["Forward, backward and step: of the second step, which finds a state. The four kinds add up to all that is "
         "held, on the rank that holds most. State: moments and main parameters. Buffers: what is left, such as the "
         "bucket buffers of stage 4; the one buffer of stage 3 and DDP's buckets are gradients. Activations: what the "
         "forward pass leaves for the backward pass."])


# ---------------------------------------------- What a line allows: no row can be faster than that, and how near is it?


SHORT = {"float32": "", "bfloat16": " bf16", "float16": " fp16"}  # behind the name of a row
DRAIN = ("A step: from one point of the loop to the same point of the next, so with its waits for parameters. Drain: "
         "what the last one has left under way, which a run pays once; – where it is in each step's time still.")


def line_cells(result, base, bucket_mb=None):
    """What the line says of one row, with stage 4 beside it: ratios round by round. Of no row: dashes."""
    row = result.find(base, bucket_mb)
    if row is None or row.wire_bytes_theory is None:  # it was not measured, or has failed
        return LineCells(*[NONE] * 7)
    short = SHORT[row.dtype]
    compute, stage4 = (_rounds(result.find(other + short)) for other in ("compute only", catalogue.OVERLAP))
    mine, line_ms = row.rounds_ms, row.wire_bytes_theory * 8 / result.conditions.bits_per_second * 1000
    median, spread, _ = time_cells(row, result.conditions)
    return LineCells(median, f"{median} ({spread})" if mine else NONE, drain_cell(row), exposed_cell(row),
                     f"{line_ms:.0f}", _ratio(mine, [max(line_ms, one) for one in compute]), _ratio(stage4, mine))


class LineCells(NamedTuple):
    median: str
    spread: str
    drain: str
    exposed: str
    line: str
    over_floor: str
    stage4_over: str


def drain_cell(row):
    """A run pays it once, at its end. Older results have it in each step."""
    return f"{statistics.median(row.drain_ms):.0f}" if row.drain_ms else NONE


def _rounds(row):
    return row.rounds_ms if row else []


def _ratio(ones, others):
    pairs = list(zip(ones, others))
    return f"{statistics.median(one / other for one, other in pairs):.2f}" if pairs else NONE


def line_sheet(result):
    """What no row can be faster than, and stage 4 beside each row."""
    rows = [[label_of(row), *line_cells(result, *row.choice)[1:]] for row in result.rows]
    return Sheet(
        f"What the line of {rate_words(result.conditions.rate)} allows",
        [("", ""), ("ms a step\nmedian (min–max)", "measured"), ("drain\nms", "measured"),
         ("exposed\nms", "measured"), ("line\nms", "formula"), ("x floor", "measured"),
         ("stage 4\nx this", "measured")], rows,
        [DRAIN, EXPOSED,
         "Line: bytes by the formula, over the rate. Floor: the larger of compute only, of the same dtype, and the "
         "line's time. Ratios: medians, round by round.",
         *(["compute + bytes: while it computes as many bytes travel as in stage 4, and nothing waits for them before "
            "the step ends."] if result.timed("compute + bytes") else []), *failures(result.rows)])


# ---------------------------------------------------------------------------------- What overlap is worth at every line


ALONE, TUNED = "compute only", "ddp, tuned"
# Name in table and picture -> row, from the slowest to the fastest.
CURVES = {"stage 2, all-gather": "stage 2 all-gather", "rung 0, no overlap": "rung 0 replicated",
          "stage 3, grad buffer": "stage 3 grad buffer", "FSDP2": "fsdp2", "DDP, default buckets": "ddp",
          "DDP, tuned buckets": TUNED, "stage 4, overlap": catalogue.OVERLAP, "floor": "floor"}


def row_of(result, base):
    return catalogue.tuned(result, "ddp") if base == TUNED else result.timed(base)


def over_computing(result, base):
    """-> the median of the ratios of a step's time to that of computing alone, round by round; None: not measured."""
    alone = result.timed(ALONE)
    if base == "floor":
        stage4 = result.find(catalogue.OVERLAP)
        return max(1.0, stage4.wire_bytes_theory * 8e3 / result.conditions.bits_per_second / alone.median_ms)
    row = row_of(result, base)
    return row.over(alone) if row else None


def curve_sheet(results):
    """A column a rate, the slowest first."""
    results = sorted(results, key=lambda result: result.conditions.bits_per_second)

    def cells(base):
        return [NONE if (ratio := over_computing(result, base)) is None else f"{ratio:.2f}" for result in results]

    def drain(result):
        return line_cells(result, catalogue.OVERLAP).drain

    def over(result, base):
        stage4, row = result.timed(catalogue.OVERLAP), row_of(result, base)
        return f"{stage4.over(row):.2f}" if stage4 and row else NONE
    rows = [[name, *cells(base)] for name, base in CURVES.items()]
    rows += [["stage 4 over tuned DDP", *(over(result, TUNED) for result in results)],
             ["stage 4 over the floor", *(line_cells(result, catalogue.OVERLAP).over_floor for result in results)],
             ["DDP's best buckets", *(tuned.size if (tuned := row_of(result, TUNED)) else NONE for result in results)],
             ["compute only, ms", *(f"{result.timed(ALONE).median_ms:.0f}" for result in results)],
             ["stage 4's drain, ms", *map(drain, results)]]
    return Sheet(
        "The curve: a step over computing alone",
        [("", ""), *((rate_words(result.conditions.rate).replace(" ", "\n"), "measured") for result in results)], rows,
        ["Medians of the ratios round by round. Floor: the larger of computing alone and the line's time, by the "
         "formula. Tuned: with the size of buckets that was best at this rate.", *map(condition, results)])


def condition(result):
    c = result.conditions
    return f"{rate_words(c.rate)}: {c.machine}, {c.rounds} rounds of {c.steps} steps, {c.date}, commit {c.commit}."


# -------------------------------------------------------- Several micro-batches a step, and communication's share of it


def accumulation_sheet(accumulation):
    """`accumulation`: AccumulatedRows."""
    def spread(times):
        return f"{statistics.median(times):.0f} ({min(times):.0f}–{max(times):.0f})"
    ratios = [[each / once for once, each in zip(one.no_sync_ms, one.each_ms)] for one in accumulation]
    noise = max(abs(ratio - 1) for ratio in ratios[0])  # with one micro-batch both ways are the same
    medians = [statistics.median(of_rounds) for of_rounds in ratios]
    rows = [[str(one.micro_batches), spread(one.no_sync_ms), spread(one.each_ms),
             f"{median:.2f}{'~' * (abs(median - 1) <= noise)}"] for one, median in zip(accumulation, medians)]
    counts = [one.micro_batches for one in accumulation]
    dearer = [count for i, count in enumerate(counts) if min(medians[i:]) > 1 + noise]
    where = f"from {dearer[0]} micro-batches a step on," if dearer else f"no number up to {counts[-1]} from which on"
    return Sheet(
        "Accumulation in stage 4, ms a micro-batch",
        [("micro-batches\na step", ""), ("in no_sync:\none exchange", "measured"),
         ("without:\nan exchange each", "measured"), ("x no_sync", "measured")], rows,
        ["Median (min–max). In no_sync whole gradients stay on each rank, 4 bytes a parameter in fp32; without, they "
         "are reduced into the shard.",
         f"Break-even: {where} an exchange each costs more time than the noise of this run.",
         f"~ within that noise: with one micro-batch both are the same, and were up to {noise:.0%} apart in a round."])


class Share(NamedTuple):
    """What communication takes of a step of DDP, stage 3, stage 4: medians over rounds."""
    DDP: float
    stage_3: float
    stage_4: float


SHOWN = ("DDP", "stage 3", "stage 4")  # the same, to be shown


def shares(one):
    """Of an AccumulatedRow -> Share."""
    return Share(*(statistics.median(1 - alone / mine for alone, mine in zip(one.compute_ms, times))
                   for times in (one.ddp_ms, one.stage3_ms, one.no_sync_ms)))


def has_shares(accumulation):
    """Whether more than stage 4 was timed."""
    return accumulation is not None and all(row.compute_ms for row in accumulation.rows)


def share_sheet(accumulation):
    """Of an Accumulation that has the time of computing alone."""
    rows = [[str(one.micro_batches), f"{statistics.median(one.compute_ms):.0f}",
             *(f"{share:.0%}" for share in shares(one))] for one in accumulation.rows]
    return Sheet(
        "What communication takes of a step, one exchange a step",
        [("micro-batches\na step", ""), ("compute only,\nms a micro-batch", "measured"),
         *((f"{name}\n", "measured") for name in SHOWN)], rows,
        ["1 - compute only / this row, of the time of a micro-batch; medians, round by round. "
         f"DDP: the row {Choice('ddp', accumulation.ddp_mb).name}."])


# --------------------------------------------------------------------------- Time by bucket size, and stage 4's default


def buckets_sheet(sweep):
    """The time of each row by the size of its buckets; of stage 4 also what the size costs in messages and memory."""
    found = {row.choice: row for row in sweep.rows}
    bases = (*catalogue.PEERS, catalogue.OVERLAP)

    def cells(bucket_mb):
        rows = [found.get((base, bucket_mb)) for base in bases]
        times = [f"{row.median_ms:.0f}" if row and row.rounds_ms else NONE for row in rows]
        stage4 = rows[-1]
        if stage4 is None or stage4.bytes_per_param is None:
            return [Choice("", bucket_mb).size, *times, NONE, NONE]
        n_buckets = stage4.collectives.get("send", 0) or stage4.collectives.get("reduce_scatter", 0)
        return [Choice("", bucket_mb).size, *times, str(n_buckets or NONE), f"{stage4.bytes_per_param:.2f}"]
    c = sweep.conditions
    return Sheet(
        "Bucket size, ms a step",
        [("", ""), ("ddp\n", "measured"), *((f"ddp +\n{base.removeprefix('ddp + ')}", "measured")
                                           for base in catalogue.PEERS[1:]),
         ("stage 4\n", "measured"), ("its messages\nof gradients", "counted"),
         ("its bytes a\nparameter", "counted")],
        [cells(size) for size in (*catalogue.SIZES, None) if any(choice.bucket_mb == size for choice in found)],
        [f"Medians of {c.rounds} round(s) of {c.steps} steps. DDP's default is {catalogue.DEFAULT_MB} MB. The "
         f"model's gradients have {c.parameters * 4 / 1e6:.1f} MB.", *failures(sweep.rows)])


def caps_sheet(rows):
    return Sheet(
        f"The default bucket of stage 4, fp32, {rows[0].ranks} ranks",
        [("", ""), ("model\nMB", "counted"), ("buckets\n", "counted"), ("their MB,\nmedian", "counted"),
         ("\nlargest", "counted"), ("b, native\n", "counted"), ("b, exchanged\n", "counted"),
         ("bytes a\nparameter", "counted")],
        [[row.model, f"{row.model_bytes / 1e6:,.1f}", str(row.buckets),
          *(f"{n_bytes / 1e6:.1f}" for n_bytes in (row.median_bytes, row.largest_bytes)),
          *(f"{held:.2f}" for held in (row.b_native, row.b_exchanged, row.bytes_per_param))] for row in rows],
        ["b: bytes a parameter of the two bucket buffers, with a native reduce-scatter (NCCL), or where parts are "
         "exchanged (gloo). The last column: 4 + 12/d + b, native; stages 1 to 3 hold 8 + 8/d."])


# -------------------------------------------------- What ranks hold and gather, by their number, and what the host does


def state_sheet(states):
    ranks = list(states[0].bytes_per_param)
    notes = ["Rank 0 of d, played by one process."]
    if any("+ b" in row.formula for row in states):
        notes[0] += (" b: the two bucket buffers of stage 4. Below the count in brackets: the formula, where they "
                     "differ by more than 1 % (padding).")
    return Sheet(
        "Model state, bytes a parameter, by number of ranks",
        [("parameters/gradients", ""), ("formula", ""), *((f"d = {d}", "counted") for d in ranks)],
        [[row.name, row.formula, *(_state(row, d) for d in ranks)] for row in states], notes)


def _state(row, d):
    counted, theory = row.bytes_per_param[d], row.bytes_per_param_theory[d]
    return f"{counted:.2f}" if abs(counted - theory) <= 0.01 * theory else f"{counted:.2f}\n({theory:.2f})"


def host_sheet(rows):
    """Of one number of tensors and one d, as make bench WHAT=host measures them."""
    plain, first = rows[0].best_ms, rows[0]
    phases = ("forward", "backward", "step", "zero_grad", "whole")
    body = [[row.name, *(f"{row.best_ms[phase]:.2f}" for phase in phases),
             f"{row.best_ms['whole'] / plain['whole']:.2f}", f"{row.median_ms['whole']:.2f}",
             f"{1e3 * row.best_ms['whole'] / row.tensors:.0f}"] for row in rows]
    names = ("", "forw.", "backw.", "step", "zero", "whole", "x plain", "median", "µs/tensor")
    return Sheet(f"Host time of a step in ms, measured: {first.tensors} tensors of 16 x 16, rank 0 of {first.d}",
                 [(name, "") for name in names], body,
                 [f"Best of {first.steps} steps, all rows in turn; median and µs a tensor: of the whole step. "
                  "Messages go nowhere, and nothing is waited for; ddp is in a group of one, on gloo. Buckets of stage "
                  "4: 0.02 MB."])


def gathered_sheet(rows):
    ranks = list(rows[0].over_numel)
    return Sheet(
        "Elements that a step gathers, over those of the model, by number of ranks",
        [("", ""), *((f"d = {d}", "counted") for d in ranks)],
        [[row.name, *(f"{row.over_numel[d]:.2f}" for d in ranks)] for row in rows],
        ["What is above 1.00 is padding."])


# -------------------------------------------------------------------------------------------- The tables of make faults


def fault_sheets(result):
    """Of a FaultResult: what was done to runs, and the run that moved on."""
    dates = sorted({row.date for row in result.rows})
    survived = Sheet(
        "What was done to a run, and what was seen",
        [("", ""), ("times", "counted"), ("went on from", ""), ("at the\nend", "compared")],
        [[row.fault, f"{row.times}", row.seen, row.end] for row in result.rows],
        [f"Stage {result.stage} on two ranks or three. Equal: parameters and optimizer state are, to the bit, those "
         "of an undisturbed run. Whole: each checkpoint is, to the bit, of one of the two runs.",
         f"torch {result.torch} · {' and '.join(dates)}"])
    losses = Sheet(
        "A run that moves on, beside DDP undisturbed",
        [("after\nstep", ""), ("trained until there by", ""), ("validation\nloss", "measured"),
         ("of DDP", "measured"), ("|Δ|", "measured")],
        [[f"{row.step}", row.where, f"{row.loss:.4f}", f"{row.undisturbed:.4f}",
          f"{abs(row.loss - row.undisturbed):.0e}"] for row in result.journey],
        ["The number of ranks changes the order of sums, and so the last bits."])
    return [survived, losses]


def mutation_sheet(result):
    """Of a MutationResult: kind of change -> what became of it."""
    rows = [[row.kind, f"{row.refused + row.loaded + row.wrong}", f"{row.refused}", f"{row.loaded}", f"{row.wrong}"]
            for row in result.rows]
    totals = [f"{sum(int(row[column]) for row in rows)}" for column in range(1, 5)]
    return Sheet(
        "Checkpoints that somebody has changed",
        [("", ""), ("tried", "counted"), ("refused", "counted"), ("loaded,\nstepped, saved", "counted"),
         ("wrong", "counted")],
        [*rows, ["together", *totals]],
        ["Checksums were made right again, but of a bit of the manifest. Refused: model and optimizer are what they "
         "were. Wrong: anything else, such as another error, a step that fails, a process that ends, more than 10 s "
         "or 1 GB. Plain torch and stages 1, 3 and 4 on one rank, AdamW, SGD and Adagrad, float32 and bfloat16.",
         f"torch {result.torch} · {result.date} · seed {result.seed}"])


# ------------------------------------------------------------------------------------ The table of make bench WHAT=cuda


def gpu_sheet(result):
    """The table of a result."""
    plain = {row.model: row.step_ms for row in result.rows if row.stage == "fused AdamW"}
    rate, rows = result.conditions.copy_bytes_per_s, []
    for row in result.rows:
        name = [f"{row.model}: {row.stage}", str(row.d)]
        if row.error:
            rows.append([*name, "out of memory", *[NONE] * 6])
            continue
        base = plain[row.model]
        beside = f"{row.step_ms / base:.2f}" if base and row.d == 1 else NONE
        rows.append([*name, f"{row.step_ms:.2f}", beside, f"{row.bytes_per_s / 1e9:.0f}",
                     f"{row.bytes_per_s / rate:.2f}", str(row.allocations),
                     *(NONE if n_bytes is None else f"{n_bytes / 1e6:.0f}"
                       for n_bytes in (row.peak_bytes, row.reserved_bytes))])
    c = result.conditions
    return Sheet(
        "The sharded update on a GPU",
        [("", ""), ("d", ""), ("step\nms", "measured"), ("x AdamW", "measured"), ("GB/s", "measured"),
         ("x copy", "measured"), ("new", "counted"), ("peak", "counted"), ("reserved", "counted")], rows,
        [f"GB/s: {UPDATE_BYTES} bytes for each parameter that this rank owns, over the whole step; a copy on the "
         f"device moves {rate / 1e9:.0f}. new: allocations in one step. Peak and reserved in MB. "
         "What a stage does in the backward pass is not in these times.",
         f"{c.machine} · torch {c.torch} · {c.dtype} · median of {c.steps} steps, no communication · "
         f"{c.date}{commit_of(c)}"])


# --------------------------------------------------------------------------------------- The table of harness/losses.py


def loss_sheet(result):
    """-> a Sheet: a row for each way to train, a pair of columns for each beta2."""
    betas = list(dict.fromkeys(row.beta2 for row in result.rows))
    rows = [[name, *(cell for beta2 in betas for cell in _cells(result, name, beta2))]
            for name in dict.fromkeys(row.name for row in result.rows)]
    columns = [(text.format(beta2), "measured") for beta2 in betas for text in ("beta2 {}\nloss", "more, by seed")]
    c = result.conditions
    return Sheet(
        f"Losses after {c.steps} steps", [("", ""), *columns], rows,
        ["Loss: nats a byte of text that no step has seen, the median over the seeds. More: than stage 4 of the same "
         "dtype, same seed.",
         f"{c.machine} · torch {c.torch} · {c.backend}, {c.ranks} ranks · {c.model}: {c.parameters:,} parameters, "
         f"AdamW · a rank's batch: {c.batch_size} x {c.sequence_length} bytes of the source of Python's standard "
         f"library · {c.date}{commit_of(c)}"])


def _cells(result, name, beta2):
    row = next(row for row in result.rows if (row.name, row.beta2) == (name, beta2))
    return f"{statistics.median(row.losses):.4f}", " ".join(f"{more:+.4f}" for more in result.more(row))


# ---------------------------------------------------------------------------------------------- The tables of make plan


def plan_sheets(result):
    """What a rank holds, the same by number of ranks, time, and what the check found."""
    check = plan_check_sheets(result.check) if result.check else []
    return [plan_memory_sheet(result), state_sheet(result.rows), plan_time_sheet(result), plan_ranks_sheet(result),
            plan_sizes_sheet(result), *check]


def plan_memory_sheet(result):
    c, rows = result.conditions, []
    for row in result.rows:
        figures = [*row.held.values(), row.padding, c.activations, row.peak]
        name = row.base if row.bucket_mb is None else f"{row.base},\n{row.size} buckets"
        rows.append([name, *(f"{n_bytes / 1e9:.2f}" for n_bytes in figures), str(row.fits_from or NONE)])
    names = ("params", "grads", "main", "moments", "buffers", "padding", "activ.", "peak", "fits\nfrom d")
    return Sheet(
        f"What a rank of {c.world} holds, in GB: {c.model}, {c.parameters:,} parameters a rank",
        [("", ""), *((name, "counted") for name in names)], rows,
        ["GB: 10⁹ bytes, after a step, on rank 0. main: fp32 copies of 16-bit parameters. buffers: those that buckets "
         "travel in. padding: of all these, what is more than the formula: of padded, or of uneven, shards. "
         f"activ.: of a micro-batch of {c.batch_size} x {c.sequence_length}. peak: the most at one "
         f"moment of a step. fits from d: of the d below, the one from which on the peak is at most "
         f"{c.device_memory:g} GB; torch's allocator takes more, and stage 4 that accumulates in no_sync() whole "
         "gradients. Buckets are those that are best on most ranks."])


def plan_time_sheet(result):
    c = result.conditions
    tokens = c.batch_size * c.sequence_length * c.accumulate / c.tensor_parallel
    return Sheet(
        f"A step of {c.model} on {c.world * c.tensor_parallel} x {c.device}",
        [("", ""), ("ms\na step", "modelled"), ("exposed\nms", "modelled"), ("tokens/s\na device", "modelled"),
         ("1 of 8:\nonce", "modelled"), ("\neach", "modelled"), ("GB at\nthe peak", "counted")],
        [[row.name, f"{1e3 * row.step.seconds:,.0f}", f"{1e3 * row.step.exposed_seconds:,.0f}",
          f"{tokens / row.step.seconds:,.0f}", f"{row.once_ms:,.0f}", f"{row.each_ms:,.0f}", f"{row.peak / 1e9:.1f}"]
         for row in result.rows],
        [f"Assumed: {c.flops / 1e12:.0f} TFLOP/s, {c.efficiency:.0%} of what the maker states, "
         f"{c.memory_rate / 1e12:.2f} TB/s of memory, rings of {c.in_node / 1e9:.0f} GB/s in a node and "
         f"{c.between / 1e9:.0f} GB/s between nodes of {c.per_node}, {c.latency_in_node * 1e6:.0f} and "
         f"{c.latency_between * 1e6:.0f} µs a hop. Nobody is late, Python takes no time, tensor parallelism sends "
         f"nothing. {c.accumulate} micro-batch(es) a step. exposed: the device waits for messages. 1 of 8: ms of one "
         "of eight micro-batches, with one exchange a step, as in no_sync(), or with one each."])


def plan_ranks_sheet(result):
    ranks = [d for d in result.rows[0].ms if d > 1]
    return Sheet(
        "ms a micro-batch, by number of ranks",
        [("", ""), *((f"d = {d}", "modelled") for d in ranks)],
        [[row.name, *(f"{row.ms[d]:,.0f}" for d in ranks)] for row in result.rows],
        [f"Buckets are those that are best on {result.conditions.world}."])


def plan_sizes_sheet(result):
    return Sheet(
        f"Sizes of buckets: a micro-batch of {result.conditions.model} on {result.conditions.world} ranks",
        [("", ""), ("bucket", ""), ("ms\n", "modelled"), ("GB at\nthe peak", "counted")],
        [[size.base, f"{size.size}{'' if size.is_bucket else ' *'}", f"{size.ms:,.0f}", f"{size.peak / 1e9:.1f}"]
         for size in result.sizes],
        ["* not taken: two buffers take more than half of what whole gradients do, and stage 3 keeps those whole."])


def plan_check_sheets(check):
    found = {}  # (rate, row without its size) -> ModelledRuns
    for run in check.two_hosts:
        found.setdefault((run.where, run.base), []).append(run)
    near = sum(abs(run.error) <= 0.1 for run in check.two_hosts)
    (flops, _), (users_flops, users_line) = check.hardware
    return [
        Sheet("Two hosts: modelled beside measured steps",
              [("", ""), ("", ""), ("rows", ""), ("from\nerror", "modelled"), ("to\nerror", "modelled")],
              [[where, row, f"{len(runs)}", *(f"{most(run.error for run in runs):+.1%}" for most in (min, max))]
               for (where, row), runs in found.items()],
              ["The rate of computing is calibrated on compute only. Assumed: 5 GB/s of memory, 200 µs a message, 1448 "
               "of 1514 bytes on the line are data, sending takes no time of the one core that computes, and a table "
               "without compute only computed as fast as the one with it.",
               f"Within 10 %: {near} of {len(check.two_hosts)}. Where computing is the limit, the model leaves out "
               "what sending and Python take of the core that computes: compute + bytes shows a part of it."]),
        Sheet("LLaMA-13B on 8 x A100 a node: tokens/s a GPU",
              [("", ""), ("", ""), ("GPUs", ""), ("sequences\na step", ""), ("", "published"), ("", "modelled"),
               ("error", "modelled")],
              [[run.what, run.optimizer, f"{run.gpus}", f"{run.sequences}", f"{run.published:,.0f}",
                f"{run.modelled:,.0f}", f"{run.error:+.1%}"] for run in check.published],
              ["256 and 512 GPUs: Megatron-LLaMA's README; 128 GPUs: a user, issue 22 there. Calibrated: computing "
               f"on the first row, {flops:.0f} TFLOP/s; below, on the user's two rows, {users_flops:.0f} TFLOP/s and "
               f"{users_line:.0f} of 100 GB/s between nodes. none hidden: each message is waited for at once.",
               "Assumed: 2 GPUs share a layer, sequences of 2048, 2048 of them a step with 256 and 512 GPUs, 4 a "
               "micro-batch, the user's 2; overlapped: stage 4 with buckets of 400 MiB, and fp32 gradients sent after "
               "each micro-batch; distributed: stage 3, once a step."])]


# --------------------------------------------------------------------------------- The tables of make bench WHAT=saving


def saving_sheet(result):
    c, rows = result.conditions, []
    for row in result.rows:
        rates = [c.bytes / seconds / 1e9 for seconds in row.rounds_s]
        share = f"{result.row(row.beside).median_s / row.median_s:.2f}" if row.beside else NONE
        rows.append([row.name, f"{row.median_s:.2f}", f"{statistics.median(rates):.2f}",
                     f"{min(rates):.2f}–{max(rates):.2f}", share])
    held, behind = statistics.median(result.held_up_ms), statistics.median(result.behind_ms)
    return Sheet(
        f"Saving and loading {c.bytes / 1e9:.1f} GB on {c.ranks} ranks",
        [("", ""), ("seconds", "measured"), ("GB/s", "measured"), ("from–to", "measured"),
         ("of the\ndisk's rate", "measured")], rows,
        ["Disk: each rank writes its bytes into a file, 1 MiB at a time, and calls fsync, or reads them, all at once. "
         "torch.save: the same tensors of each rank, with fsync. checkpoint.save makes a checksum, and tells the disk "
         "to begin every 16 MiB; checkpoint.load compares the checksum, then reads again. In each round another row "
         "writes first. Files are read after the system has been asked to forget them. The slowest rank counts.",
         f"An asynchronous save holds up the step that calls it for {held:,.0f} ms, in which it copies; a step without "
         f"one takes {c.step_ms:,.0f} ms. Steps that ran while it was written, "
         f"{statistics.median(result.n_behind):.0f} a round, took {behind:,.0f} ms more than as many "
         "without: the cores are shared.",
         f"{c.machine} · torch {c.torch} · stage 4, AdamW, fp32 · {c.rounds} rounds, all rows in turn, medians · "
         f"{c.date}{commit_of(c)}"])


# --------------------------------- Tensor-parallel rows: time, memory, and what data and tensor parallelism send, apart


def shared_sheet(rows):
    """Of SharedRows, of one `tp`."""
    def cells(row):
        if row.error:
            return [row.name, *[NONE] * (len(KINDS) + 7)]
        ratio = statistics.median(mine / ddp for mine, ddp in zip(row.rounds_ms, row.ddp_ms))
        counted = [row.dp_bytes, row.tp_bytes, *(row.held_bytes[kind] for kind in KINDS), row.activation_bytes,
                   row.peak_bytes]
        return [row.name, f"{statistics.median(row.rounds_ms):.0f}", f"{ratio:.2f}", *map(megabytes_cell, counted),
                number_cell(row.max_abs_diff)]
    names = ("", "ms/step", "x ddp", "sent:\nDP", "\nTP", "held:\nparam.", "\ngrads", "\nstate", "\nbuffers",
             "activa-\ntions", "peak", "largest\n|Δ|")
    return Sheet(
        f"Layers shared by {rows[0].tp} ranks each: time measured, bytes counted, in MB a rank and step",
        [(name, "") for name in names], [cells(row) for row in rows],
        ["The batch is that of the other rows: ranks that share layers see their sequences together. Sent among "
         "data-parallel (DP) and among tensor-parallel ranks (TP). Held after a step, by the rank that holds most.",
         *(f"{row.name}: {row.error}" for row in rows if row.error)])


# --------------------------------------------------- What takes how long to read: words of a page, code lines of a file


WORDS_A_MINUTE, CODE_LINES_A_MINUTE = 200, 5
CORE = ("optimizer.py", "buffer.py", "transport.py")


def words(text):
    return len(text.split())


def code_lines(path):
    """-> number -> text of the lines of a Python file that are code: no blanks, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    found, no_code = set(), (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
                             tokenize.ENCODING, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    return {number: lines[number - 1].split("  #")[0] for number in sorted(found)}


def core_lines(folder):
    """Code lines of a stage's core."""
    return sum(len(code_lines(folder / name)) for name in CORE if (folder / name).exists())


def minutes(page, folder=None):
    """To read a page, its generated tables aside, and the core in `folder`."""
    text = re.sub(r"(<!-- report: \w+ -->\n).*?(<!-- end -->)", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return words(text) / WORDS_A_MINUTE + (core_lines(folder) / CODE_LINES_A_MINUTE if folder else 0)


# --------------------------------- The ladder of README.md: formulas, what was counted, and one column of measured time


class Rung(NamedTuple):
    """A row of README's ladder: that of the bench, its stage's folder, and the formulas that its chapter derives."""
    row: str
    folder: str
    title: str
    collectives: str
    formula: str  # of bytes a parameter after a step
    travels: int  # of Ψ parameters' bytes, of which (d-1)/d are sent


LADDER = [
    Rung("ddp", "", "DDP, replicated AdamW", "all-reduce, in buckets", "16", 2),
    Rung("rung 0 replicated", "", "0 replicated", "all-reduce", "16", 2),
    Rung("stage 1 naive broadcast", catalogue.STAGE_1, "1 naive broadcast", "all-reduce, d broadcasts",
         "8 + 8/d", 3),
    Rung("stage 2 all-gather", catalogue.STAGE_2, "2 all-gather", "all-reduce, all-gather", "8 + 8/d", 3),
    Rung("stage 3 grad buffer", catalogue.STAGE_3, "3 grad buffer", "reduce-scatter, all-gather", "8 + 8/d", 2),
    Rung("stage 4 overlap", catalogue.STAGE_4, "4 overlap", "reduce-scatter, all-gather, in buckets",
         "4 + 12/d + b", 2),
]
RANKS = 2, 8, 64


def ladder_block():
    """What can be counted, and one column of time, measured on two hosts with the slowest line."""
    result = results.by_rate()[0]
    ddp = catalogue.tuned(result, "ddp") or result.find("ddp")
    lines = [f"stage | collectives | bytes a parameter, {' · '.join(map(str, RANKS))} ranks | peak, MB | Ψ sent "
             "| code lines | time", "---|---|---|---|---|---|---"]
    for rung in LADDER:
        row = ddp if rung.row == "ddp" else result.find(rung.row) or Row(rung.row)
        lines.append(" | ".join([
            rung.title, rung.collectives, " · ".join(f"{held(rung, d):.1f}" for d in RANKS),
            f"{max(row.peak_bytes.values()) / 1e6:.0f}" if row.peak_bytes else NONE, f"{rung.travels}",
            str(core_lines(results.ROOT / rung.folder)) if rung.folder else NONE,
            f"{row.over(ddp):.2f}" if row.rounds_ms and ddp.rounds_ms else NONE]))
    return ["\n".join(lines), textwrap.fill(notes(result, ddp), 118)]


def held(rung, d):
    """Bytes a parameter after a step: of stages 3 and 4 counted in the bench's file, padding and buffers included."""
    for row in results.load_bench().model_state:
        if row.name == f"stage {rung.title[0]} float32/float32":
            return row.bytes_per_param[d]
    return 8 + 8 / d if rung.formula == "8 + 8/d" else float(rung.formula)


def notes(result, ddp):
    c = result.conditions
    return ("Counted: bytes a parameter after a step, AdamW, fp32 (1 to 3: 8 + 8/d; 4: 4 + 12/d + b; b: two bucket "
            f"buffers); peak in a step, with activations; Ψ: {c.parameters:,} parameters' bytes, of which (d-1)/d are "
            "sent. Code lines: of the core. Time: of a step, core and guard (2, 3: without gloo's own reduce-scatter "
            f"and all-gather), over that of {ddp_words(result)}, on two hosts with a line of {rate_words(c.rate)}, "
            f"median of {c.rounds} rounds ({c.machine}, {c.date}).")


def ddp_words(result):
    """Which DDP a sentence that says "ahead" speaks of."""
    tuned = catalogue.tuned(result, "ddp")
    if tuned is None:
        return "DDP with its default buckets"
    size = "its default" if tuned.bucket_mb is None else tuned.size
    return f"DDP with {size} buckets, the best size tried"


# ------------------------------------------------------------------------------ All tables of a result, in the terminal


def sheets(result):
    """-> list of Sheets: time and traffic; floors, where there is a line; memory, correctness; model state."""
    line = [line_sheet(result)] if result.conditions.bits_per_second else []
    sweep = [buckets_sheet(result.sweep)] if result.sweep else []
    accumulation = [accumulation_sheet(result.accumulation.rows)] if result.accumulation else []
    accumulation += [share_sheet(result.accumulation)] if has_shares(result.accumulation) else []
    state = [state_sheet(result.model_state)] if result.model_state else []
    gathered = [gathered_sheet(result.gathered)] if result.gathered else []
    caps = [caps_sheet(result.caps)] if result.caps else []
    host = [host_sheet(rows) for rows in result.host]
    shared = [shared_sheet(result.shared)] if result.shared else []
    return [time_sheet(result), *line, *sweep, *accumulation, *memory_sheets(result), *shared, *state, *gathered, *caps,
            *host]


def show(result):
    """Prints all tables."""
    console = Console(highlight=False)
    console.width = max(console.width, width(result.conditions))
    print_sheets(sheets(result), console)
    console.print(dim(conditions_line(result.conditions)))


def print_sheets(found, console=None):
    console = console or Console(highlight=False)
    for sheet in found:
        console.print(rich_table(sheet), "", *map(dim, sheet.notes), "", sep="\n")
