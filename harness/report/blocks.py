"""What stands between the marks of the pages, by name: tables, sentences, pictures."""

import functools
import textwrap

from harness.report import published, reading_time, step_picture, sweep_picture
from harness.report.accumulation_tables import accumulation_sheet, share_sheet
from harness.report.bucket_tables import buckets_sheet, caps_sheet
from harness.report.conditions_line import conditions_line
from harness.report.gpu_table import gpu_sheet
from harness.report.ladder import LADDER, ladder_block
from harness.report.line_tables import line_sheet, machines_sheet
from harness.report.paragraphs import fill
from harness.report.plan_tables import plan_check_sheets, plan_sheets
from harness.report.row_tables import memory_sheets, time_sheet
from harness.report.sentences import ahead, checked, found_block, planned
from harness.report.sheet import Sheet, sheet_text, width
from harness.report.state_tables import gathered_sheet, host_sheet, state_sheet


def _conditions(result):
    return fill(conditions_line(result["conditions"]))


def _bench_sheets():
    result = published.load_bench()
    return [*_time_and_memory(result), _conditions(result)]


def _time_and_memory(result):
    columns = width(result["conditions"])
    return [sheet_text(sheet, columns) for sheet in (time_sheet(result), *memory_sheets(result))]


def _state_sheets():
    return [sheet_text(state_sheet(published.load_bench()["model_state"]))]


def _gathered_sheets():
    return [sheet_text(gathered_sheet(published.load_bench()["gathered"]))]


def _host_sheets():
    return [sheet_text(host_sheet(rows)) for rows in published.load_bench()["host"]]


def _network_sheets():
    found = [(line_sheet(result), result["conditions"]) for result in published.by_rate("network_xeon.json")]
    return _one_below_the_other([(sheet._replace(title=f"{sheet.title}, {conditions['machine']}"), conditions)
                                 for sheet, conditions in found])


def _one_below_the_other(found):
    """`found`: (sheet, conditions) each -> texts; a note that several have is below the first."""
    texts, seen = [], set()
    for sheet, conditions in found:
        notes = [note for note in sheet.notes if note not in seen]
        seen.update(notes)
        texts += [sheet_text(sheet._replace(notes=notes)).rstrip(), fill(conditions_line(conditions))]
    return texts


def _machines_sheets():
    return [sheet_text(machines_sheet(published.by_rate("network_xeon.json")))]


def _accumulation_sheets():
    found = []
    for result in published.by_rate():
        if "accumulation" in result:
            sheet = accumulation_sheet(result["accumulation"]["rows"])
            found.append((sheet._replace(title=f"{sheet.title}, {result['conditions']['rate']}"),
                          result["accumulation"]["conditions"]))
            if "ddp" in result["accumulation"]:
                shares = share_sheet(result["accumulation"])
                found.append((shares._replace(title=f"{shares.title}, {result['conditions']['rate']}"),
                              result["accumulation"]["conditions"]))
    return _one_below_the_other(found) or [
        'Not measured: make network RATE=300mbit ARGS="--accumulation".']


def _faults_sheets():
    """What was done to runs, the loop of kills, and the run that moved on: results/faults.json."""
    result = published.load("faults.json")
    scenarios = result["scenarios"]
    survived = Sheet(
        "What was done to a run, and what was seen",
        [("", ""), ("times", "counted"), ("went on from", ""), ("at the\nend", "compared")],
        [["SIGKILL to a rank, at a random moment", f"{result['kills']}", "the newest complete checkpoint", "equal"],
         *([row["fault"], f"{row['times']}", row["seen"], row["end"]] for row in scenarios["rows"])],
        [f"Stage {scenarios['stage']} on {scenarios['ranks']} ranks. Equal: parameters and optimizer state are, to the "
         "bit, those of an undisturbed run. Whole: each checkpoint is, to the bit, of one of the two runs.",
         f"torch {scenarios['torch']} · {scenarios['date']}; random kills: torch {result['torch']} · {result['date']}"])
    losses = Sheet(
        "A run that moves on, beside DDP undisturbed",
        [("after\nstep", ""), ("trained until there by", ""), ("validation\nloss", "measured"),
         ("of DDP", "measured"), ("|Δ|", "measured")],
        [[f"{row['step']}", row["where"], f"{row['loss']:.4f}", f"{row['undisturbed']:.4f}",
          f"{abs(row['loss'] - row['undisturbed']):.0e}"] for row in result["journey"]],
        ["The number of ranks changes the order of sums, and so the last bits.",
         f"{result['kills']} random kills by SIGKILL, in {result['steps']} steps of stage {result['stage']} on "
         f"{result['ranks']} ranks; {result['while_saving']} of them while a checkpoint was written, which was every "
         f"{result['save_every']} steps. Nothing before a complete checkpoint was lost, and at the end all "
         f"{result['tensors']} tensors of parameters and state were, to the bit, those of an undisturbed run.",
         f"torch {scenarios['torch']} · {scenarios['date']}; random kills: torch {result['torch']} · {result['date']}"])
    return [sheet_text(survived), sheet_text(losses)]


def _cuda_sheets():
    bench = published.load_of("cuda", "bench_cuda.json", ' ARGS="--json results/bench_cuda.json"')
    return [sheet_text(gpu_sheet(published.load("cuda.json"))), *_time_and_memory(bench), _conditions(bench)]


def _plan_sheets():
    first, second = (plan_sheets({**result, "check": None}) for result in published.plans())
    again = [sheet._replace(notes=[]) for sheet in (second[0], second[-1])]  # their notes stand below the first
    return [sheet_text(sheet) for sheet in (*first, *again)]


def _plan_check_sheets():
    return [sheet_text(sheet) for sheet in plan_check_sheets(published.plans()[0]["check"])]


def _caps_sheets():
    caps = published.load_bench().get("caps")
    return [sheet_text(caps_sheet(caps))] if caps else ["Not measured: make bench."]


def _buckets():
    """The sweeps of bucket size as tables, and the picture of them."""
    found = [(buckets_sheet(result["sweep"]), result) for result in published.by_rate()
             if "sweep" in result]
    if not found:
        return ["Not measured: `make network RATE=300mbit ARGS=--sweep`."]
    texts = _one_below_the_other([
        (sheet._replace(title=f"{sheet.title}, {result['conditions']['rate']}"), result["sweep"]["conditions"])
        for sheet, result in found])
    return [*(textwrap.indent(text, "    ") for text in texts), "![ms a step by size of bucket](buckets.svg)"]


def _reading():
    """How long the pages and the four cores take, one after the other."""
    pages = [("This page", "", ""), *((f"[Stage {rung.title}]({rung.folder}/README.md)", rung.folder, ", then its core")
                                      for rung in LADDER if rung.folder)]
    lines, total = [], 0
    for name, folder, core in pages:
        at = published.ROOT / folder
        minutes = reading_time.minutes(at / "README.md", at if folder else None)
        total += minutes
        lines.append(f"- {name}{core}: {minutes:.0f} minutes")
    rate = f"{reading_time.WORDS_A_MINUTE} words and {reading_time.CODE_LINES_A_MINUTE} code lines a minute"
    return ["\n".join([*lines, f"- together {total / 60:.1f} hours, at {rate}"])]


BLOCKS = {
    "bench": _bench_sheets,
    "state": _state_sheets,
    "gathered": _gathered_sheets,
    "host": _host_sheets,
    "caps": _caps_sheets,
    "network": _network_sheets,
    "machines": _machines_sheets,
    "accumulation": _accumulation_sheets,
    "cuda": _cuda_sheets,
    "faults": _faults_sheets,
    "plan": _plan_sheets,
    "plan_check": _plan_check_sheets,
}
# These, and not as it looks in a terminal.
MARKDOWN = {"ladder": ladder_block, "reading": _reading, "ahead": ahead, "found": found_block, "buckets": _buckets,
            "planned": planned, "checked": checked}


def network_picture():
    latest = published.load("network.json")
    return step_picture.two_hosts_picture([latest, *latest["other_rates"]])


def buckets_picture():
    """"" where no sweep was made."""
    latest = published.load("network.json")
    return sweep_picture.picture([latest, *latest["other_rates"]])


def plan_picture(name):
    return step_picture.svg(*step_picture.planned_steps(published.load(name, published.PLANS[name])))


_RESULTS = published.ROOT / "results"
PICTURES = {_RESULTS / "network.svg": network_picture, _RESULTS / "buckets.svg": buckets_picture,
            **{(_RESULTS / name).with_suffix(".svg"): functools.partial(plan_picture, name)
               for name in published.PLANS}}
