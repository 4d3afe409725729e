"""Writes tables, pictures, and numbers in sentences into the pages, anew, from the files results/*.json.

    python -m harness.publishing.pages              # or: make report
    python -m harness.publishing.pages --measure    # or: make figures

Each program that measures writes a file in results/: a Report, which has finished tables. A page is a markdown file
with marks. This program writes the text between two marks:

    <!-- report: NAME --> … <!-- end -->    a block: tables or lines of text
    <!--NAME-->…<!--end-->                  a figure: a number in a sentence

With --measure this program first runs all programs that measure. That takes an hour, and needs root and iproute2, to
emulate two hosts. A program isn't run if its file is of this commit already, so a measurement that was interrupted goes
on where it stopped. Keep the machine quiet, because most programs measure time.

A row is a way to train a model, such as "ddp" or "stage 4 overlap", and its line in a table. A link is the network
between the two emulated hosts. The core of a stage is its optimizer without checks, the code that the tutorial shows.
"""

import dataclasses
import re
import shlex
import subprocess
import sys
import textwrap
from typing import NamedTuple

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.publishing import pictures, tables
from harness.publishing.stages import code_lines, core_lines
from harness.publishing.tables import beside, column, load, name_column
from harness.ranks import command_line

# `load` reads a file of results/ and returns a Report. Its fields:
#   made        machine, release of torch, commit and date
#   conditions  a text
#   sheets      {key: Sheet, a finished table}
#   figures     {name: text}
#   drawn       raw numbers for pictures

# Rates of the emulated links, the slowest first. Each link has a file of its own in results/.
RATES = "300mbit", "600mbit", "1gbit", "2.5gbit"
# On these links all rows are measured. On the other links only the rows of the curve are measured: a picture, and a
# table, of the time of a step at each rate.
WHOLE_RATES = "300mbit", "1gbit"
TWO_HOSTS = "-m harness.measuring.two_hosts --rounds 2"  # arguments of python


class Step(NamedTuple):
    """A program that measures and writes `file`: a step on the way to new results, not a training step."""
    name: str  # printed before the program runs
    minutes: float  # how long the program takes on two cores
    file: str  # in results/
    command: str  # arguments of python

    def is_done(self, head):
        """Return whether the file was measured at the commit `head`."""
        try:
            return load(self.file).made.commit == head
        except SystemExit:  # `load` ends the program if the file is missing or was written by an older program
            return False


STEPS = [
    Step("bench", 5, "bench.json", "bench.py"),
    Step("bench, 16 bits", 1, "bench_bfloat16.json", "bench.py --dtype bfloat16 --rounds 2"),
    Step("two hosts, 300 Mbit/s: bucket sizes, all rows", 15, "network_300mbit.json",
         f"{TWO_HOSTS} --steps 2 --rate 300mbit --sweep"),
    Step("two hosts, 1 Gbit/s: bucket sizes, all rows", 8, "network_1gbit.json",
         f"{TWO_HOSTS} --steps 2 --rate 1gbit --sweep"),
    Step("two hosts, 600 Mbit/s, of the curve", 3, "network_600mbit.json",
         f"{TWO_HOSTS} --steps 3 --rate 600mbit --rows curve --sweep"),
    Step("two hosts, 2.5 Gbit/s, of the curve", 3, "network_2.5gbit.json",
         f"{TWO_HOSTS} --steps 4 --rate 2.5gbit --rows curve --sweep"),
    Step("variants on two hosts", 5, "network_variants_300mbit.json",
         f"{TWO_HOSTS} --steps 2 --rate 300mbit --rows variants"),
    Step("muon on two hosts", 2, "network_muon_300mbit.json", f"{TWO_HOSTS} --steps 2 --rate 300mbit --rows muon"),
    Step("hybrid on two hosts, 2 x 2 ranks", 2, "network_hybrid_300mbit.json",
         f"{TWO_HOSTS} --steps 2 --rate 300mbit --ranks-per-host 2 --rows 'stage 4 overlap,hybrid'"),
    Step("small models", 2, "small.json", "-m harness.measuring.overhead"),
    Step("losses, the same bits", 6, "losses.json", "-m harness.measuring.losses"),
    Step("faults", 15, "faults.json", "-m pytest -q -p tests.harness.faults -m faults"),
    Step("plan of 7b, and its check", 1, "plan.json", "-m harness.planning.plan --check"),
    Step("plan of 70b", 1, "plan_70b.json", "-m harness.planning.plan --model 70b --tensor-parallel 8"),
]
GPU_FILE = "cuda.json"  # measured by hand on a machine with a GPU, so no step writes it
BENCH = "bench.json"
SLOWEST_LINK = f"network_{RATES[0]}.json"
PLAN = "plan.json"
PLAN_70B = "plan_70b.json"


def measure(head):
    """Run each of STEPS whose file was not measured at the commit `head`.

    If a step's program fails, this program ends with the same exit code.
    """
    due = [step for step in STEPS if not step.is_done(head)]  # these are run; the others are listed as "there"
    for step in STEPS:
        status = f"{step.minutes:g} min" if step in due else "there"
        print(f"{status:>8}  {step.name} -> {step.file}")
    print(f"commit {head}: about {sum(step.minutes for step in due):g} minutes", flush=True)
    for step in due:
        print(f"\n--- {step.name}", flush=True)
        # Faults are measured by tests. pytest has many options of its own, so that option has a longer name.
        option = "--faults-json" if step.file == "faults.json" else "--json"
        run([*shlex.split(step.command), option, str(tables.ROOT / "results" / step.file)])


def run(command):
    """Run a Python program of this repository. If it fails, end this program with the same exit code."""
    exit_code = subprocess.run([sys.executable, *command], cwd=tables.ROOT).returncode
    if exit_code:
        sys.exit(exit_code)


# --------------------------------------------------------------------- Texts of blocks, which stand between two marks


def code(*texts):
    """Return the texts as one block of code in markdown: indented, with an empty line between two texts."""
    return textwrap.indent("\n\n".join(text.rstrip() for text in texts), "    ")


def block(file, *keys):
    """Return the tables `keys` of a file in results/ as a block of code, as a terminal shows them.

    Footnotes, which explain marks in cells, stay. Notes are left out, because the page around the block explains more.
    """
    sheets = load(file).sheets
    without_notes = [dataclasses.replace(sheets[key], notes=[]) for key in keys]
    return code(*map(tables.sheet_text, without_notes))


def block_of_links(key):
    """Return the table `key` of each link on which all rows are measured."""
    return "\n\n".join(block(file, key) for file in files_of_links(WHOLE_RATES))


def files_of_links(rates):
    """Return the names of the files in results/ for links of these rates."""
    return [f"network_{rate}.json" for rate in rates]


def origin(files):
    """Return a line with the machine, the torch, the commit and the date of the measurement of `files`."""
    all_made = [load(file).made for file in files]

    def values(field):
        """Return all values of a field of `made` as text. A value that several files share is said once."""
        return " and ".join(dict.fromkeys(getattr(made, field) for made in all_made))
    return code(f"{values('machine')} · torch {values('torch')} · commit {values('commit')} · {values('date')}")


def settings():
    """Return the conditions of bench.py, and of two hosts with the slowest link, in words."""
    conditions = [load(name).conditions for name in (BENCH, SLOWEST_LINK)]
    return code(*(textwrap.fill(text, tables.BLOCK_WIDTH) for text in conditions))


def curve():
    """Return the table of the curve, which has a line for each row and a column for each link."""
    sheets = [load(name).sheets["curve"] for name in files_of_links(RATES)]
    return code(tables.sheet_text(beside(sheets[0].title, *sheets)))


# Title of a row of README's table -> folder of the stage. The row shows how many code lines the stage's core has.
CORES = {"1 naive broadcast": STAGE_1, "2 all-gather": STAGE_2, "3 grad buffer": STAGE_3, "4 overlap": STAGE_4}


LADDER_NOTE = """\
After a step a rank holds 8 + 8/d bytes per parameter in stages 1 to 3, 4 + 12/d and the bucket buffers in stage 4, and
16/d with FSDP2. The column *values sent* omits the factor (d-1)/d and stage 2's padding. Time is that of a whole
training step with `DistributedOptimizer`, divided by a step of DDP with its best bucket size. Time and peak memory,
which includes activations, were measured in fp32 on two hosts, emulated on one machine of two cores."""


def ladder():
    """Return README's table, the ladder, with rows for DDP, the stages, and FSDP2.

    It is three tables side by side: what bench.py has counted, what was measured on two hosts with the slowest link,
    and how long the cores are.
    """
    def lines_of(title):
        """Return the number of code lines for a row of the table. None, for a row of no stage, is shown as a dash."""
        return core_lines(tables.ROOT / CORES[title]) if title in CORES else None

    counted = load(BENCH).sheets["ladder"]
    report = load(SLOWEST_LINK)
    measured = report.sheets["ladder"]
    # `sheet_of` makes a table row for each title. A column's function gets the title and returns what the cell shows.
    lines = tables.sheet_of("", counted.row_keys, {
        "stage": name_column(str), "lines": column("code lines of the core", lines_of)})
    joined = beside("", counted, measured, lines)
    where = f"{report.drawn['rate']}, {report.made.machine}, {report.made.date}"
    notes = [f"{LADDER_NOTE} ({where}: [methods](results/methods.md))"]
    return tables.markdown(dataclasses.replace(joined, notes=notes))


def losses():
    """Return the table of losses, with a line that says where and when they were measured."""
    report = load("losses.json")
    sheet = report.sheets["losses"]
    made_line = tables.made_line(report.made, report.conditions)
    return tables.markdown(dataclasses.replace(sheet, notes=[*sheet.notes, made_line]))


# ------------------------------------------------------------------------------------------------ The table of variants


STAGE_3_ROW = "stage 3 grad buffer"
TAKE_IT_WHEN = {  # name of a row of the bench -> when to use that variant, or why the row is in the table of variants
    STAGE_3_ROW: "the base of the next row",
    "variants per_parameter": "few, large parameters",
    "stage 4 overlap": "the base of all that follow",
    "variants muon": "Muon, SOAP, Shampoo",
    "variants hybrid": "slow links between nodes, or latency decides",
    "variants wire16": "the link decides",
    "variants moments16": "the state decides, beta2 ≤ 0.99",
    "variants same_bits": "the bits must not depend on the number of ranks",
    "variants finite": "which rank has the nan?",
    "variants blocks": "8-bit states",
    "variants offload": "the GPU's memory decides",
    "stage 4 overlap bf16": "the base of the next row",
    "variants remainder16": "bf16, and no fp32 copies",
}


def variants():
    """Return the table of variants/README.md.

    A variant is a file of variants/ that changes a stage. The table says how many lines of code each variant has, how
    many bytes a rank sends and holds, and how long a step takes.
    """
    def short_name(row_name):
        """Return the name of the variant's file without .py; for a row of a stage, the name of the row."""
        return row_name.removeprefix("variants ")

    def lines_of(row_name):
        """Return how many code lines a variant's file has, or for a row of a stage, how many the stage's core has."""
        path = tables.ROOT / "variants" / f"{short_name(row_name)}.py"
        if path.exists():
            return len(code_lines(path))
        return core_lines(tables.ROOT / (STAGE_3 if row_name == STAGE_3_ROW else STAGE_4))

    def sheet_with(row_name, key):
        """Return the table `key`, measured on two hosts, that has the row. Two variants have result files of their own.
        """
        has_own_run = row_name in ("variants muon", "variants hybrid")
        kind = short_name(row_name) if has_own_run else "variants"
        return load(f"network_{kind}_300mbit.json").sheets[key]

    def cell_of(key, column_key):
        """Return a function for `column`: it gets a row's name, and returns that row's cell of the table `key`."""
        return lambda row_name: sheet_with(row_name, key).cells(column_key)[row_name]

    # `column` gets a title, a function (name of a row -> cell), the source of the numbers, and their format.
    sheet = tables.sheet_of("", TAKE_IT_WHEN, {
        "idea": name_column(short_name, "idea"),
        "lines": column("lines", lines_of, "counted"),
        "sent": column("sent", cell_of("rows", "sent"), "counted", ".1f"),
        "held": column("held", cell_of("rows", "bytes"), "counted", ".2f"),
        "time": column("time, 300 Mbit/s", cell_of("times", "time"), "measured"),
        "when": name_column(TAKE_IT_WHEN.get, "take it when")})
    footnotes = {}  # only its keys are used: a dict has each footnote once, and keeps their order
    for row_name in TAKE_IT_WHEN:
        footnotes |= dict.fromkeys(sheet_with(row_name, "rows").footnotes)
    # ~ marks times that are within the noise. No times are taken from the tables "rows".
    explained = [footnote for footnote in footnotes if not footnote.startswith("~")]
    return tables.markdown(dataclasses.replace(sheet, footnotes=explained))


# ---------------------------------------------------------------------------------------- All blocks, pictures, figures


# {NAME in the mark of a block: function without arguments that returns the text}.
BLOCKS = {
    "ladder": ladder,
    "made": lambda: origin([step.file for step in STEPS]),
    "made_gpu": lambda: origin([GPU_FILE]),
    "settings": settings,
    "curve": curve,
    "two_hosts": lambda: block_of_links("link"),
    "buckets": lambda: block_of_links("buckets"),
    "state": lambda: block(BENCH, "model_state"),
    "bench": lambda: block(BENCH, "rows"),
    "phases": lambda: block(BENCH, "phases"),
    "bench_16bit": lambda: block("bench_bfloat16.json", "rows"),
    "host": lambda: block(BENCH, "host"),
    "small": lambda: block("small.json", "small"),
    "faults": lambda: block("faults.json", "faults"),
    "cuda": lambda: block(GPU_FILE, "overlap", "host"),
    "plan": lambda: f"{block(PLAN, 'memory', 'time')}\n\n{block(PLAN_70B, 'time')}",
    "plan_check": lambda: block(PLAN, "published"),
    "losses": losses,
    "variants": variants,
}


def drawn_of_links(key):
    """Return the `drawn` of each link that has raw numbers of the name `key`, the slowest link first."""
    drawn_by_all = [load(name).drawn for name in files_of_links(RATES)]
    return [drawn for drawn in drawn_by_all if key in drawn]


def network():
    """Draw one step of each row that was recorded on the slowest link, and write the row's median time beside it."""
    report = load(SLOWEST_LINK)
    rounds_ms = report.sheets["link"].numbers("ms")  # label of a row -> list of ms per step, one number for each round
    median_ms = {}
    for label, rounds in rounds_ms.items():
        name = label.replace(",\n  ", ", ")  # a row's label in a table may have two lines
        median_ms[name] = tables.median(rounds)
    steps, title = pictures.read_steps(report.drawn)
    return pictures.svg([(f"{name} (median {median_ms[name]:.0f} ms)", step) for name, step in steps], title)


# {name of a file in results/: function without arguments that returns an SVG}.
PICTURES = {
    "network.svg": network,
    "curve.svg": lambda: pictures.curve(drawn_of_links("curve")),
    "buckets.svg": lambda: pictures.sweeps(drawn_of_links("sweep")),
    "gpu_overlap.svg": lambda: pictures.svg(*pictures.read_steps(load(GPU_FILE).drawn)),
    "same_bits.svg": lambda: pictures.differences(load("losses.json").drawn["differences"]),
}


def in_dark(draw):
    """Return a function that draws what `draw` does, in the colours for a dark page."""
    return lambda: pictures.in_dark(draw())


# Each picture has a second file, for readers with a dark browser.
PICTURES |= {name.replace(".svg", "_dark.svg"): in_dark(draw) for name, draw in PICTURES.items()}
# NAME of a figure, a number in a sentence of a page -> file in results/, key of the table, key of the row, key of the
# column, and the format of the number.
CELLS = {
    "held_plain": (BENCH, "phases", "compute only", "step", ".1f"),
    "peak_plain": (BENCH, "phases", "compute only", "peak", ".1f"),
    "held_stage3": (BENCH, "phases", "stage 3 grad buffer", "step", ".1f"),
    "peak_stage3": (BENCH, "phases", "stage 3 grad buffer", "peak", ".1f"),
    "sent_ddp": (BENCH, "rows", "ddp", "sent", ".1f"),
    "sent_stage1": (BENCH, "rows", "stage 1 naive broadcast", "sent", ".1f"),
    "bf16_1": (BENCH, "model_state", "stage 3 bfloat16/float32", "1", ".2f"),
    "bf16_8": (BENCH, "model_state", "stage 3 bfloat16/float32", "8", ".2f"),
    "bf16_1024": (BENCH, "model_state", "stage 3 bfloat16/float32", "1024", ".2f"),
    "fp32_1024": (BENCH, "model_state", "stage 3 float32/float32", "1024", ".2f"),
    "grads_stage3": (PLAN, "memory", "stage 3 bf16/fp32", "gradients", ".2f"),
    "grads_stage4": (PLAN, "memory", "stage 4 bf16", "gradients", ".2f"),
    "activations_7b": (PLAN, "memory", "stage 3 bf16/fp32", "activations", ".1f"),
    "ddp_7b": (PLAN, "memory", "ddp bf16", "peak", ",.0f"),
    "peak_7b": (PLAN, "memory", "stage 4 bf16", "peak", ",.0f"),
    "ddp_70b": (PLAN_70B, "time", "ddp bf16", "ms", ",.0f"),
    "stage4_70b": (PLAN_70B, "time", "stage 4 bf16", "ms", ",.0f"),
    "ms_stage3": (PLAN, "time", "stage 3 bf16/bf16", "ms", ",.0f"),
    "exposed_stage3": (PLAN, "time", "stage 3 bf16/bf16", "exposed", ",.0f"),
    "ms_stage4": (PLAN, "time", "stage 4 bf16", "ms", ",.0f"),
    "exposed_stage4": (PLAN, "time", "stage 4 bf16", "exposed", ",.0f"),
    "once_7b": (PLAN, "time", "stage 4 bf16", "once", ",.0f"),
    "each_7b": (PLAN, "time", "stage 4 bf16", "each", ",.0f"),
    "once_70b": (PLAN_70B, "time", "stage 4 bf16", "once", ",.0f"),
    "each_70b": (PLAN_70B, "time", "stage 4 bf16", "each", ",.0f"),
    "ddp_2_5gbit": ("network_2.5gbit.json", "curve", "DDP, default buckets", "2.5gbit", ""),
    "stage4_2_5gbit": ("network_2.5gbit.json", "curve", "stage 4, overlap", "2.5gbit", ""),
    "gpu_over_ddp": (GPU_FILE, "overlap", "stage 4 overlap", "over_ddp", ".2f"),
}


def figures():
    """Return {NAME: text} of all figures, the numbers inside sentences."""
    texts = dict(load(PLAN).figures)
    for name, (file, sheet_key, row_key, column_key, form) in CELLS.items():
        texts[name] = format(load(file).sheets[sheet_key].numbers(column_key)[row_key], form)
    # "over_tuned": stage 4's time on this link divided by the time of DDP with its best bucket size.
    for rate in RATES:
        texts[f"over_tuned_{rate}".replace(".", "_")] = load(f"network_{rate}.json").figures["over_tuned"]
    return texts


# ------------------------------------------------------------------------------------------------------------ The pages


def rewritten(text):
    """Return the `text` of a markdown file with all blocks and figures made anew. An unknown name raises KeyError."""
    figure_in_prose = r"<!--(\w+)-->.*?<!--end-->"  # has no spaces beside its NAME, as a block's mark has
    texts = figures() if re.search(figure_in_prose, text) else {}

    def block_anew(mark):
        """Return the block between its two marks. `mark`: a match, whose first group is the NAME."""
        name = mark[1]
        return f"<!-- report: {name} -->\n\n{BLOCKS[name]()}\n\n<!-- end -->"

    def figure_anew(mark):
        """Return the figure between its two marks. `mark`: a match, whose first group is the NAME."""
        name = mark[1]
        return f"<!--{name}-->{texts[name]}<!--end-->"

    text = re.sub(r"<!-- report: (\w+) -->\n.*?<!-- end -->", block_anew, text, flags=re.DOTALL)
    return re.sub(figure_in_prose, figure_anew, text)


def marked_pages():
    """Return the paths of all pages that have blocks or figures."""
    names = ["README.md", "docs/plan.md", "docs/questions.md", "docs/migrate.md", "variants/README.md"]
    return [*(tables.ROOT / name for name in names), *sorted((tables.ROOT / "results").glob("*.md"))]


def rewrite():
    """Write all pages and pictures, and print for each whether it has changed.

    No file is written before the texts of all files are made, so a mistake leaves every file as it was.
    """
    texts = {}  # path -> new text of the file
    try:
        for path in marked_pages():
            texts[path] = rewritten(path.read_text(encoding="utf-8"))
        for name, draw in PICTURES.items():
            texts[tables.ROOT / "results" / name] = draw()
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SystemExit(f"report: a page has a block of no such name, or a file of results/ is a part of what was to "
                         f"be measured: make figures: {error!r}") from None
    for path, text in texts.items():
        is_changed = not path.exists() or path.read_text(encoding="utf-8") != text
        if is_changed:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(tables.ROOT)}: {'rewritten' if is_changed else 'unchanged'}")


def main():
    parser = command_line.Parser("report", __doc__)
    parser.add_argument("--measure", action="store_true", help="first make the files of results/ anew: an hour")
    args = parser.parse_args()
    if not pictures.can_draw():
        raise SystemExit("report: pictures need matplotlib: pip install matplotlib")
    if args.measure:
        head = tables.commit()  # ends with + if code has changed since the commit
        if head.endswith("+"):
            parser.error("the code differs from its last commit, which figures have to name: commit first")
        measure(head)
    rewrite()
    if args.measure:
        run(["-m", "show", "--pages"])  # writes docs/watch.html and the pictures of the chapters


if __name__ == "__main__":
    main()
