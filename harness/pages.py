"""Tables, pictures and figures of the pages, anew from results/*.json; what you have measured beside what is there."""

import dataclasses
import functools
import math
import re
import textwrap

from harness import command_line, gpu_overlap, pictures, tables
from harness import results as saved
from harness import rows as catalogue
from harness.results import FaultResult, GpuResult, LossResult, MutationResult, PlanResult, Result, SavingResult
from harness.tables import Sheet

# ------------------------------------------- What stands between the marks of the pages, by name: tables and pictures


GPUS = ("cuda.json",)


def made(names):
    """Machine, torch, commit and date of these files: each once."""
    names = [name for name in names if (saved.ROOT / "results" / name).exists()]
    found = [c for name in names for _, c in saved.provenance(saved.load(name))]
    machine, torch, commit, day = (" and ".join(dict.fromkeys(value for c in found if (value := getattr(c, field))))
                                   for field in ("machine", "torch", "commit", "date"))
    return [f"{machine} · torch {torch} · commit {commit} · {day}"]


def pick(sheet, *columns):
    """A sheet with these columns, by number, or all; of its notes those that explain a mark: the page says the rest."""
    columns = columns or range(len(sheet.columns))
    return sheet._replace(columns=[sheet.columns[at] for at in columns],
                          rows=[[cells[at] for at in columns] for cells in sheet.rows],
                          notes=[note for note in sheet.notes if note[0] in "*~"])


def texts(*sheets):
    return [tables.sheet_text(sheet).rstrip() for sheet in sheets]


def timed(sheet, c):
    """The sheet, whose last note says how often it was timed."""
    return sheet._replace(notes=[*sheet.notes, f"{c.rounds} round(s) of {c.steps} steps."])


def bench(result):
    """Time, traffic and memory of each row, in one table."""
    time, memory = tables.time_sheet(result), tables.memory_sheets(result)[0]
    time, memory = pick(time, 0, 1, 2, 3, 6, 7), pick(memory, 0, 5, len(memory.columns) - 3, len(memory.columns) - 1)
    held = {name: [cell.replace("*", "†") for cell in cells] for name, *cells in memory.rows}  # time has stars too
    rows = [[*cells, *held.get(cells[0], [tables.NONE] * 3)] for cells in time.rows]
    notes = time.notes + [note.replace("*", "†") for note in memory.notes]
    both = Sheet("A step: time, traffic, memory in MB", time.columns + memory.columns[1:], rows, notes)
    return texts(timed(both, result.conditions))


def at_a_rate(sheet, result):
    return pick(sheet._replace(title=f"{sheet.title}, {tables.rate_words(result.conditions.rate)}"))


def accumulation():
    return texts(*(at_a_rate(sheet, result) for result in saved.by_rate()
                   if tables.has_shares(measured := result.accumulation)
                   for sheet in (tables.accumulation_sheet(measured.rows), tables.share_sheet(measured))))


def buckets():
    return texts(*(timed(at_a_rate(tables.buckets_sheet(result.sweep), result), result.sweep.conditions)
                   for result in saved.by_rate() if catalogue.is_whole(result.sweep)))


def host(found):
    """As rank 0 of 8."""
    return texts(*(pick(tables.host_sheet(rows), 0, 1, 2, 3, 5, 6, 8) for rows in found if rows[0].d == 8))


def cuda():
    result = saved.load("cuda.json")
    steps = [gpu_overlap.sheet(result.steps)] if result.steps else []
    return [*texts(*steps, pick(tables.gpu_sheet(result))), *host(result.host)]


def plans():
    """Of 7b what a rank holds, a step, and the sizes of buckets; of 70b a step."""
    (memory, _, step, _, sizes), (*_, larger, _, _) = (
        tables.plan_sheets(dataclasses.replace(saved.load(name), check=None))
        for name in ("plan.json", "plan_70b.json"))
    return texts(pick(memory, 0, 1, 2, 3, 4, 5, 8, 9), *(pick(one, 0, 1, 2, 4, 5, 6) for one in (step, larger)),
                 pick(sizes))


BLOCKS = {
    "made": lambda: made([name for name in saved.FILES if name not in GPUS]),
    "made_gpu": lambda: made(GPUS),
    "settings": lambda: [textwrap.fill(tables.settings_line(result.conditions), 100)
                         for result in (saved.load_bench(), saved.by_rate()[0])],
    "curve": lambda: texts(pick(tables.curve_sheet(saved.at_all_rates()))),
    "two_hosts": lambda: texts(*(timed(pick(tables.line_sheet(result), 0, 1, 3, 5, 6), result.conditions)
                                 for result in saved.by_rate())),
    "accumulation": accumulation,
    "buckets": buckets,
    "state": lambda: texts(pick(tables.state_sheet(saved.load_bench().model_state))),
    "gathered": lambda: texts(pick(tables.gathered_sheet(saved.load_bench().gathered))),
    "bench": lambda: bench(saved.load_bench()),
    "bench_16bit": lambda: bench(saved.load("bench_bfloat16.json")),
    "host": lambda: host(saved.load_bench().host),
    "saving": lambda: texts(pick(tables.saving_sheet(saved.load("saving.json")))),
    "faults": lambda: texts(*map(pick, tables.fault_sheets(saved.load("faults.json")))),
    "mutations": lambda: texts((sheet := pick(tables.mutation_sheet(saved.load("faults_mutations.json"))))._replace(
        rows=sheet.rows[-1:])),  # of all kinds together
    "cuda": cuda,
    "plan": plans,
    "plan_check": lambda: texts(*map(pick, tables.plan_check_sheets(saved.load("plan.json").check))),
}
MARKDOWN = {"ladder": tables.ladder_block}  # this, and not as it looks in a terminal
# By the name of a file in results/. "" where no sweep was made.
PICTURES = {"network.svg": lambda: pictures.two_hosts_picture(saved.load("network.json").at_all_rates()),
            "curve.svg": lambda: pictures.curve_picture(saved.at_all_rates()),
            "buckets.svg": lambda: pictures.sweep_picture(saved.at_all_rates()),
            "gpu_overlap.svg": lambda: gpu_overlap.picture(saved.load("cuda.json").steps),
            "plan.svg": lambda: pictures.svg(*pictures.planned_steps(saved.load("plan.json")))}


# ----------------------------------------------------- Figures inside a sentence, by name: <!--name-->0.83<!--end-->


def figures():
    """-> name -> text."""
    plan, larger = ({row.base: row for row in saved.load(name).rows} for name in ("plan.json", "plan_70b.json"))
    check, stage4, network = saved.load("plan.json").check, plan["stage 4 bf16"], saved.at_all_rates()

    def errors(what, is_users, *optimizers):
        """Of these published runs, in percent."""
        return [100 * abs(run.error) for run in check.published
                if run.what == what and run.optimizer in optimizers and (run.gpus == 128) == is_users]
    numbers = {
        "ddp_7b": plan["ddp bf16"].peak / 1e9, "held_7b": sum(stage4.held.values()) / 1e9,
        "peak_7b": stage4.peak / 1e9, "ddp_70b": larger["ddp bf16"].ms[1024],
        "stage3_70b": larger["stage 3 bf16/bf16"].ms[1024], "stage4_70b": larger["stage 4 bf16"].ms[1024],
        "fitting": sum(row.fits_from > 0 for row in plan.values()), "runs": len(check.two_hosts),
        "near": sum(abs(run.error) <= 0.1 for run in check.two_hosts),
        "off_theirs": math.ceil(max(errors("predicted", False, "overlapped", "distributed"))),
        "off_users": math.floor(min(errors("predicted", True, "overlapped"))),
        "off_users_own": math.floor(min(errors("predicted, user's", True, "overlapped"))),
        "off_none_hidden": math.ceil(max(errors("none hidden", True, "overlapped"))),
        "flops_theirs": check.hardware[0][0], "flops_users": check.hardware[1][0],
        "between_users": check.hardware[1][1]}
    over_tuned = {f"over_tuned_{result.conditions.rate}".replace(".", "_"):
                  f"{result.find(catalogue.OVERLAP).over(catalogue.tuned(result, 'ddp')):.2f}" for result in network}
    return {"buckets_7b": stage4.size, **over_tuned, **{name: f"{number:,.0f}" for name, number in numbers.items()}}


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
               ("x ddp", "measured", "vs_reference", ".2f"),
               ("MB sent", "counted", "wire_bytes/1e6", ".1f"),
               ("bytes a\nparam.", "counted", "bytes_per_param", ".2f")]

    def published(get):
        return lambda row: same and (found := same.find(*row.choice)) and tables.figure(found, get)
    return tables.sheet_of(
        f"Yours beside the published ones: {name}{rate}", mine.rows,
        [("", "", tables.label_of), *((f"{title}\n{whose}", source, of(get), form)
                                      for title, source, get, form in figures
                                      for whose, of in (("publ.", published), ("yours", lambda get: get)))],
        f"Yours: {tables.conditions_line(mine.conditions)}.",
        f"Published: {tables.conditions_line(same.conditions) if same else 'none at this rate'}.",
        tables.failures(mine.rows))


# ----------------------------------------------------------- Tables and pictures of the pages, anew from results/*.json


COLUMNS = 110  # of a table that stands in the terminal only


def rewritten(text):
    """`text` of a markdown file, with all its blocks and figures made anew. An unknown name raises KeyError."""
    def block(match):
        start, name, end = match.groups()
        lines = "\n\n".join({**BLOCKS, **MARKDOWN}[name]()).splitlines()
        indent = "" if name in MARKDOWN else "    "
        return "\n".join([start, *(f"{indent}{line}".rstrip() for line in lines), "", end])
    text = re.sub(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)", block, text, flags=re.DOTALL)
    in_prose = r"<!--(\w+)-->.*?<!--end-->"
    found = figures() if re.search(in_prose, text) else {}
    return re.sub(in_prose, lambda mark: f"<!--{mark[1]}-->{found[mark[1]]}<!--end-->", text)


def files():
    """Pages that have blocks."""
    root = saved.ROOT
    return [root / "README.md", root / "docs" / "plan.md", *sorted((root / "results").glob("*.md"))]


def main():
    command_line.Parser("report", __doc__).parse_args()
    if not pictures.can_draw():
        raise SystemExit("report: pictures need matplotlib: pip install matplotlib")
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
            command_line.write("page", path, after, functools.partial(command_line.fail, "report"))
        print(f"{path.relative_to(saved.ROOT)}: {'unchanged' if after == before else 'rewritten'}")


if __name__ == "__main__":
    from harness.pages import main  # ranks are handed functions of that name

    main()
