"""Tables and pictures of the pages, anew from results/*.json.

    python -m harness.report.report        # or: make report

writes what stands in README.md, docs/plan.md and results/*.md between a line that says <!-- report: NAME --> and
<!-- end -->. NAME is one of BLOCKS or MARKDOWN. No figure between these lines is typed by hand. PICTURES are drawn
anew too.
"""

import argparse
import functools
import json
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from harness.measure import gpu, timeline
from harness.plan import plan
from harness.report import docs, tables
from harness.rows import buckets
from harness.run import cli

ROOT = Path(__file__).resolve().parents[2]


def _load(name, arguments=""):
    """`arguments`: of the command that makes the file, which is called as what stands before a _ in its name."""
    path = ROOT / "results" / name
    command = f"make {path.stem.split('_')[0]}{arguments}"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"report: {path} is missing: run {command} first") from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"report: {path} is damaged: run {command} again ({error})") from None


def _conditions(result):
    return _fill(tables.conditions_line(result["conditions"]))


def _fill(text):
    return textwrap.fill(text, 100)


def _by_rate(*others):
    """The results of all rates, and those in other files, the slowest line first."""
    found = [_load(name) for name in ("network.json", *others)]
    results = [result for latest in found for result in (latest, *latest["other_rates"])]
    return sorted(results, key=lambda result: result["conditions"]["bits_per_second"])


def _load_of(device, name, arguments=""):
    """A result of the bench on that kind of device: a page says "On a GPU", or speaks of gloo."""
    result = _load(name, arguments)
    if result["conditions"]["device"] != device:
        raise SystemExit(f"report: results/{name} must be measured with device {device}, and is of "
                         f"{result['conditions']['device']}: CUDA_VISIBLE_DEVICES= hides GPUs from make bench")
    return result


def _load_bench():
    result = _load_of("cpu", "bench.json")
    right = {row["name"] for row in result["rows"] if "error" not in row}
    if not {"model_state", "gathered", "host"} <= result.keys() or {rung.row for rung in LADDER} - right:
        raise SystemExit("report: results/bench.json is a part of the bench: run make bench without --quick or --rows")
    return result


def _bench_sheets():
    result = _load_bench()
    return [*_time_and_memory(result), _conditions(result)]


def _time_and_memory(result):
    columns = tables.width(result["conditions"])
    return [tables.sheet_text(sheet, columns) for sheet in (tables.sheets(result)[0], *tables.memory_sheets(result))]


def _state_sheets():
    return [tables.sheet_text(tables.state_sheet(_load_bench()["model_state"]))]


def _gathered_sheets():
    return [tables.sheet_text(tables.gathered_sheet(_load_bench()["gathered"]))]


def _host_sheets():
    return [tables.sheet_text(tables.host_sheet(rows)) for rows in _load_bench()["host"]]


def _network_sheets():
    found = [(tables.line_sheet(result), result["conditions"]) for result in _by_rate("network_xeon.json")]
    return _one_below_the_other([(sheet._replace(title=f"{sheet.title}, {conditions['machine']}"), conditions)
                                 for sheet, conditions in found])


def _one_below_the_other(found):
    """`found`: (sheet, conditions) each -> texts; a note that several have is below the first."""
    texts, seen = [], set()
    for sheet, conditions in found:
        notes = [note for note in sheet.notes if note not in seen]
        seen.update(notes)
        texts += [tables.sheet_text(sheet._replace(notes=notes)).rstrip(), _fill(tables.conditions_line(conditions))]
    return texts


def _machines_sheets():
    return [tables.sheet_text(tables.machines_sheet(_by_rate("network_xeon.json")))]


def _accumulation_sheets():
    found = []
    for result in _by_rate():
        if "accumulation" in result:
            sheet = tables.accumulation_sheet(result["accumulation"]["rows"])
            found.append((sheet._replace(title=f"{sheet.title}, {result['conditions']['rate']}"),
                          result["accumulation"]["conditions"]))
            if "ddp" in result["accumulation"]:
                shares = tables.share_sheet(result["accumulation"])
                found.append((shares._replace(title=f"{shares.title}, {result['conditions']['rate']}"),
                              result["accumulation"]["conditions"]))
    return _one_below_the_other(found) or [
        'Not measured: make network RATE=300mbit ARGS="--accumulation".']


def _faults_sheets():
    """What was done to runs, the loop of kills, and the run that moved on: results/faults.json."""
    result = _load("faults.json")
    scenarios = result["scenarios"]
    survived = tables.Sheet(
        "What was done to a run, and what was seen",
        [("", ""), ("times", "counted"), ("went on from", ""), ("at the\nend", "compared")],
        [["SIGKILL to a rank, at a random moment", f"{result['kills']}", "the newest complete checkpoint", "equal"],
         *([row["fault"], f"{row['times']}", row["seen"], row["end"]] for row in scenarios["rows"])],
        [f"Stage {scenarios['stage']} on {scenarios['ranks']} ranks. Equal: parameters and optimizer state are, to the "
         "bit, those of an undisturbed run. Whole: each checkpoint is, to the bit, of one of the two runs.",
         f"torch {scenarios['torch']} · {scenarios['date']}; random kills: torch {result['torch']} · {result['date']}"])
    losses = tables.Sheet(
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
    return [tables.sheet_text(survived), tables.sheet_text(losses)]


def _cuda_sheets():
    bench = _load_of("cuda", "bench_cuda.json", ' ARGS="--json results/bench_cuda.json"')
    return [tables.sheet_text(gpu.sheet(_load("cuda.json"))), *_time_and_memory(bench), _conditions(bench)]


PLANS = {"plan.json": ' ARGS="--advise --check --json results/plan.json"',
         "plan_70b.json": ' MODEL=70b ARGS="--tensor-parallel 8 --json results/plan_70b.json"'}


def _plans():
    return [_load(name, arguments) for name, arguments in PLANS.items()]


def _plan_sheets():
    first, second = (tables.plan_sheets({**result, "check": None}) for result in _plans())
    again = [sheet._replace(notes=[]) for sheet in (second[0], second[-1])]  # their notes stand below the first
    return [tables.sheet_text(sheet) for sheet in (*first, *again)]


def _plan_check_sheets():
    return [tables.sheet_text(sheet) for sheet in tables.plan_check_sheets(_plans()[0]["check"])]


def _planned():
    """What make plan --advise says."""
    return [_bullets(_plans()[0]["advice"])]


def _checked():
    """How far modelled times are from measured and from published ones."""
    check = _plans()[0]["check"]
    runs = check["two_hosts"]
    whole, parts = ([(modelled / measured - 1, f"{row}, {where}") for where, row, measured, modelled in runs
                     if (" x " in row) == is_part] for is_part in (False, True))
    near, near_parts = (sum(abs(error) <= 0.1 for error, _ in found) for found in (whole, parts))
    farthest, which = max(whole, key=lambda run: abs(run[0]))

    users = "predicted, user's"

    def errors(*words):
        return ", ".join(f"{modelled / found - 1:+.1%}" for what, kind, gpus, _, _, found, modelled
                         in check["published"]["rows"] if (what, kind, gpus > 128) in words)
    return [_bullets([
        f"Our two hosts: {near} of {len(whole)} steps are modelled within 10 %, the farthest ({which}) {farthest:+.1%} "
        f"off; with accumulation {near_parts} of {len(parts)}.",
        "Megatron-LLaMA's table: calibrated on one of four figures, the others are "
        f"{errors(('predicted', 'overlapped', True), ('predicted', 'distributed', True))} off.",
        "A user's 128 GPUs, where the overlapped optimizer was the slower one: by that calibration distributed "
        f"{errors(('predicted', 'distributed', False))}, overlapped {errors(('predicted', 'overlapped', False))}; "
        f"calibrated on the user's two distributed runs, overlapped {errors((users, 'overlapped', False))}; the "
        f"same with no message hidden {errors(('none hidden', 'overlapped', False))}."])]


class Rung(NamedTuple):
    """A row of README's ladder: that of the bench, its stage's folder, and the formulas that its chapter derives."""
    row: str
    folder: str
    title: str
    collectives: str
    bytes_per_param: str
    sent: str


LADDER = [
    Rung("ddp", "", "DDP, replicated AdamW", "all-reduce", "16", "2·4Ψ"),
    Rung("stage 1 naive broadcast", "stage1_naive_broadcast", "1 naive broadcast", "all-reduce, d broadcasts",
         "8 + 8/d", "3·4Ψ"),
    Rung("stage 2 all-gather", "stage2_allgather", "2 all-gather", "all-reduce, all-gather", "8 + 8/d", "3·4Ψ"),
    Rung("stage 3 grad buffer", "stage3_gradbuffer", "3 grad buffer", "reduce-scatter, all-gather", "8 + 8/d", "2·4Ψ"),
    Rung("stage 4 overlap", "stage4_overlap", "4 overlap", "reduce-scatter, all-gather, for each bucket",
         "4 + 12/d + b", "2·4Ψ"),
]


def _ladder():
    """Formulas, what was counted on two hosts with the slowest line, and one column of measured time."""
    result = _by_rate()[0]
    rows, c = {row["name"]: row for row in result["rows"]}, result["conditions"]
    ddp = buckets.tuned(result, "ddp") or rows["ddp"]
    lines = ["stage | collectives | bytes a parameter | MB a rank sends | code lines | time", "---|---|---|---|---|---"]
    for rung in LADDER:
        row = ddp if rung.row == "ddp" else rows.get(rung.row, {})
        sent, held = row.get("wire_bytes"), row.get("bytes_per_param")
        mark = "\\*" if sent and sent > 1.01 * row["wire_bytes_theory"] else ""  # what gloo's reduce-scatter sends
        lines.append(" | ".join([
            rung.title, rung.collectives,
            rung.bytes_per_param + (f" = {held:.2f}" if held and rung.folder else ""),
            f"{rung.sent}: {sent / 1e6:.1f}{mark}" if sent else rung.sent,
            str(docs.core_lines(ROOT / rung.folder)) if rung.folder else tables.NONE,
            f"{buckets.ratio(row, ddp):.2f}" if row.get("step_ms") and ddp.get("step_ms") else tables.NONE]))
    notes = (f"Counted: on {c['ranks']} ranks, {c['parameters']:,} parameters, AdamW, fp32. Ψ: parameters, of whose "
             "bytes (d-1)/d are sent. \\* gloo's reduce-scatter sends twice its bytes. b: two bucket buffers. Code "
             f"lines: of the core. Measured: time of a step over that of {_ddp_words(result)}, on two hosts "
             f"with a line of {c['rate']}, median of {c['rounds']} rounds ({c['machine']}, {c['date']}).")
    return ["\n".join(lines), textwrap.fill(notes, 118)]


def _ddp_words(result):
    """Which DDP a sentence that says "ahead" speaks of."""
    tuned = buckets.tuned(result, "ddp")
    if tuned is None:
        return "DDP with its default buckets"
    size = buckets.size_of(tuned["name"])
    return f"DDP with {'its default' if size == 'default' else size} buckets, the best size tried"


def _times(result):
    return {row["name"]: row for row in result["rows"] if row.get("step_ms")}


def _lead(result):
    """By how much stage 4 is ahead of DDP on one line, and what of that is bucket size -> sentences."""
    rows, rate = _times(result), result["conditions"]["rate"]
    stage4, ddp, tuned = rows[buckets.STAGE_4], rows["ddp"], buckets.tuned(result, "ddp")
    text = f"{rate}: stage 4 takes {buckets.ratio(stage4, tuned or ddp):.2f} of the time of {_ddp_words(result)}"
    if tuned is None:
        return f"{text}. DDP with a tuned size: not measured, `make network RATE={rate} ARGS=--sweep`."
    if tuned is ddp:
        return f"{text}."
    by_default, size = buckets.ratio(stage4, ddp), buckets.ratio(tuned, ddp)
    whose = ("so much of the lead is bucket size, and none of ours" if buckets.ratio(stage4, tuned) < 1 else
             "all of the lead over those is bucket size, and none of it ours")
    return (f"{text}, and {by_default:.2f} of DDP with its default ones. Of these the tuned ones take {size:.2f}: "
            f"{whose}.")


def _ahead():
    """README's own line for each rate."""
    return [_bullets(_leads())]


def _leads():
    """The time of stage 4 beside DDP's, in few words."""
    found = []
    for result in _by_rate():
        rows, tuned = _times(result), buckets.tuned(result, "ddp")
        by_tuned = f"{buckets.ratio(rows[buckets.STAGE_4], tuned):.2f}" if tuned else "not measured"
        found.append(f"{result['conditions']['rate']}: {buckets.ratio(rows[buckets.STAGE_4], rows['ddp']):.2f} of "
                     f"default DDP; of DDP with the best size: {by_tuned}.")
    return found


def _bullets(sentences):
    return "\n".join(textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
                     for text in sentences)


APART = {"stage 4 only gradients": "gradients alone", "stage 4 only parameters": "parameters alone",
         buckets.STAGE_4: "both"}


def _apart(result):
    """What each half of the overlap buys."""
    rows, rate = _times(result), result["conditions"]["rate"]
    if not {"stage 4 neither", *APART} <= rows.keys():
        return f"{rate}: overlap taken apart: not measured, `make network RATE={rate}`."
    parts = [f"{words} {buckets.ratio(rows[name], rows['stage 4 neither']):.2f}" for name, words in APART.items()]
    return f"{rate}: of the time of stage 4 without overlap, {', '.join(parts[:-1])}, {parts[-1]}."


def _owner(result):
    """Beside stage 4: time, and the number and size of the messages that gradients travel in."""
    rows, rate = _times(result), result["conditions"]["rate"]
    if "owner reduce" not in rows:
        return f"{rate}: a reduce to each owner: not measured, `make network RATE={rate}`."
    stage4, found = rows[buckets.STAGE_4], []
    for name in ("owner reduce", "owner reduce, 2 MB buckets", buckets.STAGE_4):
        if name in rows:
            kind = next(kind for kind in ("reduce", "send", "reduce_scatter") if kind in rows[name]["collectives"])
            number, n_bytes = rows[name]["collectives"][kind], rows[name]["message_bytes"][kind]
            found.append(f"{name} {number} messages of {n_bytes / number / 1e3:.0f} kB on average, and "
                         f"{buckets.ratio(rows[name], stage4):.2f} of stage 4's time")
    return f"{rate}: {'; '.join(found)}."


def _share(result):
    """The claim that communication takes more than half of a step, and where it stops being true."""
    rate, measured = result["conditions"]["rate"], result.get("accumulation", {})
    if "ddp" not in measured:
        return f"{rate}: communication's share of a step: not measured, `make network RATE={rate} ARGS=--accumulation`."
    found = []
    for key, name in tables.SHARES.items():
        by_count = {one["micro_batches"]: tables.shares(one)[key] for one in measured["rows"]}
        below = next((f"below half from {k} micro-batches on" for k in by_count
                      if all(share < 0.5 for other, share in by_count.items() if other >= k)), "never below half")
        first = next(iter(by_count.values()))
        found.append(f"of {name} {first:.0%}, {below if first >= 0.5 else 'less than half'}")
    return f"{rate}: without accumulation communication takes, of a step, {'; '.join(found)}."


def _sent(result):
    """What of stage 4's lead over stage 3 and FSDP2 is overlap, and what gloo's reduce-scatter, which sends twice."""
    rows, rate = _times(result), result["conditions"]["rate"]
    cells = {row[0]: row for row in tables.line_sheet(result).rows}
    found = [f"{name} {cells[row][5]} of the formula's floor and {cells[row][6]} of that of the bytes it sent"
             for row, name in (("stage 3 grad buffer", "stage 3"), ("fsdp2", "FSDP2"), (buckets.STAGE_4, "stage 4"))
             if row in rows]
    return f"{rate}: {', '.join(found)}."


def _found():
    """What the rows say of peers, of bytes, of overlap, of owners and of accumulation, in words."""
    return [_bullets(say(result) for say in (_lead, _sent, _apart, _owner, _share) for result in _by_rate())]


def _caps_sheets():
    caps = _load_bench().get("caps")
    return [tables.sheet_text(tables.caps_sheet(caps))] if caps else ["Not measured: make bench."]


def _buckets():
    """The sweeps of bucket size as tables, and the picture of them."""
    found = [(tables.buckets_sheet(result["sweep"]), result) for result in _by_rate()
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
        minutes = docs.minutes(ROOT / folder / "README.md", ROOT / folder if folder else None)
        total += minutes
        lines.append(f"- {name}{core}: {minutes:.0f} minutes")
    rate = f"{docs.WORDS_A_MINUTE} words and {docs.CODE_LINES_A_MINUTE} code lines a minute"
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
MARKDOWN = {"ladder": _ladder, "reading": _reading, "ahead": _ahead, "found": _found, "buckets": _buckets,
            "planned": _planned, "checked": _checked}


def rewritten(text):
    """`text` of a markdown file, with all its blocks made anew. An unknown name raises KeyError."""
    def block(match):
        start, name, end = match.groups()
        lines = "\n\n".join({**BLOCKS, **MARKDOWN}[name]()).splitlines()
        indent = "" if name in MARKDOWN else "    "
        return "\n".join([start, *(f"{indent}{line}".rstrip() for line in lines), "", end])
    return re.sub(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)", block, text, flags=re.DOTALL)


def network_picture():
    latest = _load("network.json")
    return timeline.picture([latest, *latest["other_rates"]])


def buckets_picture():
    """"" where no sweep was made."""
    latest = _load("network.json")
    return buckets.picture([latest, *latest["other_rates"]])


def plan_picture(name):
    return timeline.svg(*plan.picture(_load(name, PLANS[name])))


PICTURES = {ROOT / "results" / "network.svg": network_picture, ROOT / "results" / "buckets.svg": buckets_picture,
            **{(ROOT / "results" / name).with_suffix(".svg"): functools.partial(plan_picture, name) for name in PLANS}}


def files():
    """Pages that have blocks."""
    return [ROOT / "README.md", ROOT / "docs" / "plan.md", *sorted((ROOT / "results").glob("*.md"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = functools.partial(cli.fail, "report")
    parser.parse_args()
    texts = []  # nothing is written before all of it is there
    for path in [*files(), *PICTURES]:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        try:
            texts.append((path, before, PICTURES[path]() if path in PICTURES else rewritten(before)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"there is no such block, or results/ holds something else than results: {error!r}"
            raise SystemExit(f"report: {path.name}: {reason}") from None
    for path, before, after in texts:
        if after != before:
            cli.write("page", path, after, functools.partial(cli.fail, "report"))
        print(f"{path.relative_to(ROOT)}: {'unchanged' if after == before else 'rewritten'}")


if __name__ == "__main__":
    main()
