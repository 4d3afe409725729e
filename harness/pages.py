"""Tables and pictures of the pages, anew from results/*.json; and what you have measured beside what is published."""

import argparse
import dataclasses
import functools
import re
import textwrap

from harness import command_line, pictures, tables
from harness import results as saved
from harness import rows as catalogue
from harness.command_line import write
from harness.results import FaultResult, GpuResult, LossResult, MutationResult, PlanResult, Result, SavingResult

# ------------------------------------- What stands between the marks of the pages, by name: tables, sentences, pictures


def texts(*sheets, columns=100):
    return [tables.sheet_text(sheet, columns) for sheet in sheets]


def conditions(c):
    return textwrap.fill(tables.conditions_line(c), 100)


def time_and_memory(result):
    return texts(tables.time_sheet(result), *tables.memory_sheets(result), columns=tables.width(result.conditions))


def bench(result):
    return [*time_and_memory(result), conditions(result.conditions)]


def in_16_bits():
    result = saved.load("bench_bfloat16.json")
    return [*texts(tables.time_sheet(result), tables.memory_sheets(result)[0]), conditions(result.conditions)]


def cuda():
    result = saved.load("cuda.json")
    return [*texts(tables.gpu_sheet(result), *(tables.host_sheet(rows) for rows in result.host if rows[0].d == 8)),
            *bench(saved.load_of("cuda", "bench_cuda.json"))]


def one_below_the_other(found):
    """`found`: (sheet, conditions) each -> texts; a note that several have is below the first."""
    lines, seen = [], set()
    for sheet, of_sheet in found:
        notes = [note for note in sheet.notes if note not in seen]
        seen.update(notes)
        lines += [tables.sheet_text(sheet._replace(notes=notes)).rstrip(), conditions(of_sheet)]
    return lines


def lines(results):
    return one_below_the_other([(tables.line_sheet(result), result.conditions) for result in results])


def at_a_rate(sheet, result):
    return sheet._replace(title=f"{sheet.title}, {tables.rate_words(result.conditions.rate)}")


def accumulation():
    found = []
    for result in saved.by_rate():
        measured = result.accumulation
        made = [tables.accumulation_sheet(measured.rows)] if measured else []
        made += [tables.share_sheet(measured)] if tables.has_shares(measured) else []
        found += [(at_a_rate(sheet, result), measured.conditions) for sheet in made]
    return one_below_the_other(found) or [
        'Not measured: make bench WHAT=network RATE=300mbit ARGS="--accumulation".']


def buckets():
    """The sweeps of bucket size as tables, and the picture of them."""
    found = [(at_a_rate(tables.buckets_sheet(result.sweep), result), result.sweep.conditions)
             for result in saved.by_rate() if catalogue.is_whole(result.sweep)]
    if not found:
        return ["Not measured: `make bench WHAT=network RATE=300mbit ARGS=--sweep`."]
    return [*(textwrap.indent(text, "    ") for text in one_below_the_other(found)),
            "![ms a step by size of bucket](buckets.svg)"]


def plans():
    first, second = (tables.plan_sheets(dataclasses.replace(plan, check=None))
                     for plan in map(saved.load, ("plan.json", "plan_70b.json")))
    again = [sheet._replace(notes=[]) for sheet in (second[0], *second[2:])]  # their notes stand below the first
    return texts(*first, *again)


BLOCKS = {
    "bench": lambda: bench(saved.load_bench()),
    "state": lambda: texts(tables.state_sheet(saved.load_bench().model_state)),
    "gathered": lambda: texts(tables.gathered_sheet(saved.load_bench().gathered)),
    "host": lambda: texts(*map(tables.host_sheet, saved.load_bench().host)),
    "caps": lambda: texts(tables.caps_sheet(saved.load_bench().caps)),
    "slow_line": lambda: lines(saved.by_rate()[:1]),
    "network": lambda: lines(saved.by_rate()[1:]),
    "bench_16bit": in_16_bits,
    "curve": lambda: texts(tables.curve_sheet(saved.at_all_rates())),
    "accumulation": accumulation,
    "cuda": cuda,
    "faults": lambda: texts(*tables.fault_sheets(saved.load("faults.json"))),
    "mutations": lambda: texts(tables.mutation_sheet(saved.load("faults_mutations.json"))),
    "saving": lambda: texts(tables.saving_sheet(saved.load("saving.json"))),
    "plan": plans,
    "plan_check": lambda: texts(*tables.plan_check_sheets(saved.load("plan.json").check)),
}
MARKDOWN = {"ladder": tables.ladder_block, "buckets": buckets}  # these, and not as it looks in a terminal
# By the name of a file in results/. "" where no sweep was made.
PICTURES = {"sixteen_bits.svg": pictures.state_picture,
            "network.svg": lambda: pictures.two_hosts_picture(saved.load("network.json").at_all_rates()),
            "curve.svg": lambda: pictures.curve_picture(saved.at_all_rates()),
            "buckets.svg": lambda: pictures.sweep_picture(saved.at_all_rates()),
            "plan.svg": lambda: pictures.svg(*pictures.planned_steps(saved.load("plan.json")))}


# --------------------------------------------------------------------- What you have measured, beside what is published


SHEETS = {FaultResult: tables.fault_sheets, PlanResult: tables.plan_sheets,
          **{kind: lambda result, sheet=sheet: [sheet(result)] for kind, sheet in (
              (GpuResult, tables.gpu_sheet), (SavingResult, tables.saving_sheet),
              (MutationResult, tables.mutation_sheet), (LossResult, tables.loss_sheet))}}


def measured():
    """-> {name: what the file holds}, of those that are there."""
    paths = [saved.ROOT / "measured" / name for name in saved.FILES]
    return {path.name: saved.read(path) for path in paths if path.exists()}


def sheets():
    """Of each of your files: a Result beside the published one, and else its own tables."""
    found = []
    for name, mine in measured().items():
        if isinstance(mine, Result):
            target = target_of(name, mine)
            theirs = saved.load(target).at_all_rates() if (saved.ROOT / "results" / target).exists() else []
            found += [beside_sheet(name, one, theirs) for one in mine.at_all_rates()]
        else:
            found += [sheet._replace(title=f"Yours: {sheet.title}") for sheet in SHEETS[type(mine)](mine)]
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

    figures = [("ms/step", "measured", tables.median_ms, ".0f"),
               ("x ddp", "measured", tables.of("vs_reference"), ".2f"),
               ("MB sent", "counted", tables.of("wire_bytes", 1e6), ".1f"),
               ("bytes a\nparam.", "counted", tables.of("bytes_per_param"), ".2f")]

    def published(get):
        return lambda row: same and (found := same.find(*row.choice)) and get(found)
    return tables.sheet_of(
        f"Yours beside the published ones: {name}{rate}", mine.rows,
        [("", "", tables.label_of), *((f"{title}\n{whose}", source, of(get), form)
                                      for title, source, get, form in figures
                                      for whose, of in (("publ.", published), ("yours", lambda get: get)))],
        f"Yours: {tables.conditions_line(mine.conditions)}.",
        f"Published: {tables.conditions_line(same.conditions) if same else 'none at this rate'}.",
        tables.failures(mine.rows))


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
        if name in ("network_variants.json", "network_muon.json"):  # no picture shows these steps
            saved.keep_exposed_only(row for one in mine.at_all_rates() for row in one.rows)
        write("--publish", target, saved.to_json(mine), fail)
        (saved.ROOT / "measured" / name).unlink()
        said.append(f"measured/{name} is {target.relative_to(saved.ROOT)} now")
    return said or ["measured/ holds nothing to publish"]


# ----------------------------------------------------------- Tables and pictures of the pages, anew from results/*.json


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
        print("", tables.sheet_text(sheet, COLUMNS), sep="\n")


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
