"""What stands between the marks of the pages, by name: tables, sentences, pictures."""

import dataclasses
import textwrap

from harness.report import curve, published, reading_time, state_picture, step_picture, sweep_picture
from harness.report.accumulation_tables import accumulation_sheet, has_shares, share_sheet
from harness.report.bucket_tables import buckets_sheet, caps_sheet
from harness.report.cells import rate_words
from harness.report.conditions_line import conditions_line
from harness.report.fault_tables import fault_sheets, mutation_sheet
from harness.report.gpu_table import gpu_sheet
from harness.report.ladder import LADDER, ladder_block
from harness.report.line_tables import line_sheet
from harness.report.paragraphs import bullets, fill
from harness.report.plan_tables import plan_check_sheets, plan_sheets
from harness.report.row_tables import memory_sheets, time_sheet
from harness.report.saving_table import saving_sheet
from harness.report.sentences import checked, found_block, planned, seven_b
from harness.report.sheet import sheet_text, width
from harness.report.state_tables import gathered_sheet, host_sheet, state_sheet
from harness.rows import bucket_sizes
from harness.rows.fault_results import FaultResult, MutationResult
from harness.rows.gpu_results import GpuResult
from harness.rows.saving_results import SavingResult


def _conditions(result):
    return fill(conditions_line(result.conditions))


def _bench_sheets():
    result = published.load_bench()
    return [*_time_and_memory(result), _conditions(result)]


def _time_and_memory(result):
    columns = width(result.conditions)
    return [sheet_text(sheet, columns) for sheet in (time_sheet(result), *memory_sheets(result))]


def _state_sheets():
    return [sheet_text(state_sheet(published.load_bench().model_state))]


def _gathered_sheets():
    return [sheet_text(gathered_sheet(published.load_bench().gathered))]


def _host_sheets():
    return [sheet_text(host_sheet(rows)) for rows in published.load_bench().host]


def _slow_line():
    return _lines(published.by_rate()[:1])


def _network_sheets():
    return _lines(published.by_rate()[1:])


def _lines(results):
    return _one_below_the_other([(line_sheet(result), result.conditions) for result in results])


def _16bit_sheets():
    result = published.load("bench_bfloat16.json", arguments=' ARGS="--dtype bfloat16"')
    time, memory, *_ = (time_sheet(result), *memory_sheets(result))
    return [sheet_text(time), sheet_text(memory), _conditions(result)]


def _curve_sheets():
    return [sheet_text(curve.sheet(published.at_all_rates()))]


def _curve_says():
    return [bullets(curve.sentences(published.at_all_rates()))]


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
    for result in published.by_rate():
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
    return [sheet_text(sheet) for sheet in fault_sheets(published.load("faults.json", FaultResult))]


def _mutations_sheets():
    return [sheet_text(mutation_sheet(published.load("faults_mutations.json", MutationResult)))]


def _cuda_sheets():
    bench = published.load_of("cuda", "bench_cuda.json", ' ARGS="--json results/bench_cuda.json"')
    result = published.load("cuda.json", GpuResult)
    host = [sheet_text(host_sheet(rows)) for rows in result.host if rows[0].d == 8]
    return [sheet_text(gpu_sheet(result)), *host, *_time_and_memory(bench), _conditions(bench)]


def _saving_sheets():
    return [sheet_text(saving_sheet(published.load("saving.json", SavingResult)))]


def _plan_sheets():
    plans = map(published.load_plan, published.PLANS)
    first, second = (plan_sheets(dataclasses.replace(plan, check=None)) for plan in plans)
    again = [sheet._replace(notes=[]) for sheet in (second[0], *second[2:])]  # their notes stand below the first
    return [sheet_text(sheet) for sheet in (*first, *again)]


def _plan_check_sheets():
    return [sheet_text(sheet) for sheet in plan_check_sheets(published.load_plan("plan.json").check)]


def _caps_sheets():
    caps = published.load_bench().caps
    return [sheet_text(caps_sheet(caps))] if caps else ["Not measured: make bench."]


def _buckets():
    """The sweeps of bucket size as tables, and the picture of them."""
    found = [(buckets_sheet(result.sweep), result) for result in published.by_rate()
             if bucket_sizes.is_whole(result.sweep)]
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
    return step_picture.two_hosts_picture(published.load("network.json").at_all_rates())


def curve_picture():
    check = published.load_plan("plan.json").check
    return curve.picture(published.at_all_rates(), check.curve)


def buckets_picture():
    """"" where no sweep was made."""
    return sweep_picture.picture(published.load("network.json").at_all_rates())


def plan_picture():
    return step_picture.svg(*step_picture.planned_steps(published.load_plan("plan.json")))


# By the name of a file in results/.
PICTURES = {"sixteen_bits.svg": state_picture.picture, "network.svg": network_picture, "curve.svg": curve_picture,
            "buckets.svg": buckets_picture, "plan.svg": plan_picture}
