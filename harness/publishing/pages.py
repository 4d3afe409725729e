"""Writes the tables, pictures and figures of the pages anew from results/*.json; makes these files anew, too.

    python -m harness.publishing.pages              # or: make report
    python -m harness.publishing.pages --measure    # or: make figures

Pages show finished tables. --measure first runs every program that measures, at one commit and on one machine: an hour,
with root and iproute2 for two hosts. A program whose file is of this commit already is left out, so a measurement that
was interrupted goes on where it stopped. Keep the machine quiet: most programs measure time.
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

RATES = "300mbit", "600mbit", "1gbit", "2.5gbit"  # of links with a file each, the slowest first
WHOLE_RATES = "300mbit", "1gbit"  # of links with all rows; the other links have the rows of the curve
TWO_HOSTS = "-m harness.measuring.two_hosts --rounds 2"


class Step(NamedTuple):
    """A program to run, which writes `file`."""
    name: str
    minutes: float  # on two cores
    file: str
    command: str

    def is_done(self, head):
        """Return whether the file holds figures of commit `head`."""
        try:
            return load(self.file).made.commit == head
        except SystemExit:  # there is no such file, or a file of other fields
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
GPU_FILE = "cuda.json"  # of a machine with a GPU
BENCH = "bench.json"
SLOWEST_LINK = f"network_{RATES[0]}.json"
PLAN = "plan.json"
PLAN_70B = "plan_70b.json"


def measure(head):
    """Run the steps whose files are not of commit `head`. Ends the program with the exit code of one that fails."""
    due = [step for step in STEPS if not step.is_done(head)]
    for step in STEPS:
        status = f"{step.minutes:g} min" if step in due else "there"
        print(f"{status:>8}  {step.name} -> {step.file}")
    print(f"commit {head}: about {sum(step.minutes for step in due):g} minutes", flush=True)
    for step in due:
        print(f"\n--- {step.name}", flush=True)
        option = "--faults-json" if step.file == "faults.json" else "--json"
        run([*shlex.split(step.command), option, str(tables.ROOT / "results" / step.file)])


def run(command):
    """Run a program of ours, and end with its exit code if that isn't 0."""
    exit_code = subprocess.run([sys.executable, *command], cwd=tables.ROOT).returncode
    if exit_code:
        sys.exit(exit_code)


# ------------------------------------------------------------------------------------------- What stands between marks


def code(*texts):
    """Return a block of code, with an empty line between the texts."""
    return textwrap.indent("\n\n".join(text.rstrip() for text in texts), "    ")


def block(file, *keys):
    """Return tables of a file, as a terminal shows them, with footnotes and without notes."""
    sheets = load(file).sheets
    without_notes = [dataclasses.replace(sheets[key], notes=[]) for key in keys]
    return code(*map(tables.sheet_text, without_notes))


def block_of_links(key):
    """Return the table `key` of each link with all rows."""
    return "\n\n".join(block(file, key) for file in files_of_links(WHOLE_RATES))


def files_of_links(rates):
    return [f"network_{rate}.json" for rate in rates]


def origin(files):
    """Return machine, torch, commit and date of these files, each once."""
    all_made = [load(file).made for file in files]

    def each_once(field):
        return " and ".join(dict.fromkeys(getattr(made, field) for made in all_made))
    return code(f"{each_once('machine')} · torch {each_once('torch')} · commit {each_once('commit')} · "
                f"{each_once('date')}")


def settings():
    """Return the conditions of the bench, and of two hosts with the slowest link."""
    conditions = [load(name).conditions for name in (BENCH, SLOWEST_LINK)]
    return code(*(textwrap.fill(text, tables.BLOCK_WIDTH) for text in conditions))


def curve():
    """Return the curve's table, a column for each link."""
    sheets = [load(name).sheets["curve"] for name in files_of_links(RATES)]
    return code(tables.sheet_text(beside(sheets[0].title, *sheets)))


# Title of a row of README's table -> folder whose core is counted.
CORES = {"1 naive broadcast": STAGE_1, "2 all-gather": STAGE_2, "3 grad buffer": STAGE_3, "4 overlap": STAGE_4}


LADDER_NOTE = """\
After a step a rank holds 8 + 8/d bytes per parameter in stages 1 to 3, 4 + 12/d and the bucket buffers in stage 4, and
16/d with FSDP2. The column *values sent* omits the factor (d-1)/d and stage 2's padding. Time is that of a whole
training step with `DistributedOptimizer`, divided by a step of DDP with its best bucket size. Time and peak memory,
which includes activations, were measured in fp32 on two hosts, emulated on one machine of two cores."""


def ladder():
    """Return README's table: what is counted, what two hosts with the slowest link measured, and lines of the cores."""
    def lines_of(title):
        return core_lines(tables.ROOT / CORES[title]) if title in CORES else None

    counted = load(BENCH).sheets["ladder"]
    report = load(SLOWEST_LINK)
    measured = report.sheets["ladder"]
    lines = tables.sheet_of("", counted.row_keys, {
        "stage": name_column(str), "lines": column("code lines of the core", lines_of)})
    joined = beside("", counted, measured, lines)
    where = f"{report.drawn['rate']}, {report.made.machine}, {report.made.date}"
    notes = [f"{LADDER_NOTE} ({where}: [methods](results/methods.md))"]
    return tables.markdown(dataclasses.replace(joined, notes=notes))


def losses():
    """Return the table of losses, with the line that says where they were measured."""
    report = load("losses.json")
    sheet = report.sheets["losses"]
    made_line = tables.made_line(report.made, report.conditions)
    return tables.markdown(dataclasses.replace(sheet, notes=[*sheet.notes, made_line]))


# ------------------------------------------------------------------------------------------------ The table of variants


STAGE_3_ROW = "stage 3 grad buffer"
TAKE_IT_WHEN = {  # name of a row of the bench -> when to take that variant
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
    """Return the table of variants/README.md: how long each variant is, what it sends, holds and takes."""
    def short_name(row_name):
        return row_name.removeprefix("variants ")

    def lines_of(row_name):
        """Count the code lines of a variant's file, or of the core of a stage."""
        path = tables.ROOT / "variants" / f"{short_name(row_name)}.py"
        if path.exists():
            return len(code_lines(path))
        return core_lines(tables.ROOT / (STAGE_3 if row_name == STAGE_3_ROW else STAGE_4))

    def sheet_with(row_name, key):
        """Return the table `key` of two hosts that has a row: muon and hybrid were measured in runs of their own."""
        has_own_run = row_name in ("variants muon", "variants hybrid")
        kind = short_name(row_name) if has_own_run else "variants"
        return load(f"network_{kind}_300mbit.json").sheets[key]

    def cell_of(key, column_key):
        return lambda row_name: sheet_with(row_name, key).cells(column_key)[row_name]

    sheet = tables.sheet_of("", TAKE_IT_WHEN, {
        "idea": name_column(short_name, "idea"),
        "lines": column("lines", lines_of, "counted"),
        "sent": column("sent", cell_of("rows", "sent"), "counted", ".1f"),
        "held": column("held", cell_of("rows", "bytes"), "counted", ".2f"),
        "time": column("time, 300 Mbit/s", cell_of("times", "time"), "measured"),
        "when": name_column(TAKE_IT_WHEN.get, "take it when")})
    explained = [footnote for row_name in TAKE_IT_WHEN for footnote in sheet_with(row_name, "rows").footnotes
                 if not footnote.startswith("~")]  # ~ is a mark of times
    return tables.markdown(dataclasses.replace(sheet, footnotes=list(dict.fromkeys(explained))))


# ---------------------------------------------------------------------------------------- All blocks, pictures, figures


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
    """Return the raw numbers of the links whose files have `key` among them, the slowest link first."""
    drawn = [load(name).drawn for name in files_of_links(RATES)]
    return [of_link for of_link in drawn if key in of_link]


def network():
    """Draw the recorded steps of the slowest link, each with the median of its row in the table."""
    report = load(SLOWEST_LINK)
    rounds_ms = report.sheets["link"].numbers("ms")
    median_ms = {}
    for label, rounds in rounds_ms.items():
        name = label.replace(",\n  ", ", ")  # a row's label in a table may have two lines
        median_ms[name] = tables.median(rounds)
    steps, title = pictures.read_steps(report.drawn)
    return pictures.svg([(f"{name} (median {median_ms[name]:.0f} ms)", step) for name, step in steps], title)


# By the name of a file in results/. Pictures draw raw numbers, which Reports have under `drawn`.
PICTURES = {
    "network.svg": network,
    "curve.svg": lambda: pictures.curve(drawn_of_links("curve")),
    "buckets.svg": lambda: pictures.sweeps(drawn_of_links("sweep")),
    "gpu_overlap.svg": lambda: pictures.svg(*pictures.read_steps(load(GPU_FILE).drawn)),
    "same_bits.svg": lambda: pictures.differences(load("losses.json").drawn["differences"]),
}


def in_dark(draw):
    return lambda: pictures.in_dark(draw())


PICTURES |= {name.replace(".svg", "_dark.svg"): in_dark(draw) for name, draw in PICTURES.items()}
# Name of a figure in a sentence of docs/ -> file, table, row, column, and the form of the number.
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
    """Return {name: text} of figures inside sentences, which stand between <!--name--> and <!--end-->."""
    texts = dict(load(PLAN).figures)
    for name, (file, sheet, row, key, form) in CELLS.items():
        texts[name] = format(load(file).sheets[sheet].numbers(key)[row], form)
    for rate in RATES:
        texts[f"over_tuned_{rate}".replace(".", "_")] = load(f"network_{rate}.json").figures["over_tuned"]
    return texts


# ------------------------------------------------------------------------------------------------------------ The pages


def rewritten(text):
    """Return the `text` of a markdown file with all blocks and figures made anew. An unknown name raises KeyError."""
    figure_in_prose = r"<!--(\w+)-->.*?<!--end-->"
    texts = figures() if re.search(figure_in_prose, text) else {}

    def block_anew(mark):
        name = mark[1]
        return f"<!-- report: {name} -->\n\n{BLOCKS[name]()}\n\n<!-- end -->"

    def figure_anew(mark):
        name = mark[1]
        return f"<!--{name}-->{texts[name]}<!--end-->"

    text = re.sub(r"<!-- report: (\w+) -->\n.*?<!-- end -->", block_anew, text, flags=re.DOTALL)
    return re.sub(figure_in_prose, figure_anew, text)


def marked_pages():
    """Return the pages that have blocks or figures."""
    names = ["README.md", "docs/plan.md", "docs/questions.md", "docs/migrate.md", "variants/README.md"]
    return [*(tables.ROOT / name for name in names), *sorted((tables.ROOT / "results").glob("*.md"))]


def rewrite():
    """Write pages and pictures, and say of each whether it has changed. Nothing is written before all of it is made."""
    texts = {}  # path -> its new text
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
        head = tables.commit()
        if head.endswith("+"):
            parser.error("the code differs from its last commit, which figures have to name: commit first")
        measure(head)
    rewrite()
    if args.measure:
        run(["-m", "show", "--pages"])


if __name__ == "__main__":
    main()
