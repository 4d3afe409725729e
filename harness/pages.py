"""Tables and pictures of the pages, anew from results/*.json; and what you have measured beside what is published."""

import argparse
import dataclasses
import functools
import re
import textwrap

from harness import command_line, pictures
from harness import results as saved
from harness import rows as catalogue
from harness.command_line import write
from harness.results import FaultResult, GpuResult, LossResult, MutationResult, PlanResult, Result, SavingResult
from harness.tables import (
    NONE,
    Notes,
    Sheet,
    accumulation_sheet,
    buckets_sheet,
    bytes_per_param_cells,
    caps_sheet,
    conditions_line,
    curve_sheet,
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
    rate_words,
    saving_sheet,
    share_sheet,
    sheet_text,
    state_sheet,
    time_sheet,
    width,
)

# --------------------------------------------------------------------------------------------------------------- blocks
# What stands between the marks of the pages, by name: tables, sentences, pictures.


def _conditions(result):
    return textwrap.fill(conditions_line(result.conditions), 100)


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
    return [sheet_text(curve_sheet(saved.at_all_rates()))]


def _one_below_the_other(found):
    """`found`: (sheet, conditions) each -> texts; a note that several have is below the first."""
    texts, seen = [], set()
    for sheet, conditions in found:
        notes = [note for note in sheet.notes if note not in seen]
        seen.update(notes)
        texts += [sheet_text(sheet._replace(notes=notes)).rstrip(), textwrap.fill(conditions_line(conditions), 100)]
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
        'Not measured: make bench WHAT=network RATE=300mbit ARGS="--accumulation".']


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
        return ["Not measured: `make bench WHAT=network RATE=300mbit ARGS=--sweep`."]
    texts = _one_below_the_other([
        (sheet._replace(title=f"{sheet.title}, {rate_words(result.conditions.rate)}"), result.sweep.conditions)
        for sheet, result in found])
    return [*(textwrap.indent(text, "    ") for text in texts), "![ms a step by size of bucket](buckets.svg)"]


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
MARKDOWN = {"ladder": ladder_block, "buckets": _buckets}


def network_picture():
    return pictures.two_hosts_picture(saved.load("network.json").at_all_rates())


def curve_picture():
    return pictures.curve_picture(saved.at_all_rates())


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
    args = parser.parse_args()
    if not pictures.can_draw():
        raise SystemExit("report: pictures need matplotlib: pip install matplotlib")
    if args.publish:
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
