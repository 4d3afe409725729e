"""Tables, pictures and figures of the pages, anew from results/*.json; what you have measured beside what is there."""

import dataclasses
import functools
import math
import re
import textwrap

from harness import command_line, gpu_step, pictures, tables
from harness import results as saved
from harness import rows as catalogue
from harness.results import FaultResult, GpuResult, LossResult, MutationResult, PlanResult, Result, SavingResult
from harness.tables import Sheet

GPUS = ("cuda.json",)


def made(names):
    """Machine, torch, commit and date of these files: each once."""
    names = [name for name in names if (saved.ROOT / "results" / name).exists()]
    found = [c for name in names for _, c in saved.provenance(saved.load(name))]
    machine, torch, commit, day = (" and ".join(dict.fromkeys(getattr(c, field) for c in found))
                                   for field in ("machine", "torch", "commit", "date"))
    return code(f"{machine} · torch {torch} · commit {commit} · {day}")


def code(*texts):
    """-> a block of code for each text."""
    return textwrap.indent("\n\n".join(text.rstrip() for text in texts), "    ", lambda line: line.strip())


def pick(sheet, *columns, timed=None):
    """A sheet with these columns, by number, or all; of its notes those that explain a mark: the page says the rest.
    `timed`: conditions that say how often."""
    columns = columns or range(len(sheet.columns))
    often = [f"{timed.rounds} round(s) of {timed.steps} steps."] if timed else []
    return sheet._replace(columns=[sheet.columns[at] for at in columns],
                          rows=[[cells[at] for at in columns] for cells in sheet.rows],
                          notes=[note for note in sheet.notes if note[0] in "*~"] + often)


def shown(*sheets):
    return code(*map(tables.sheet_text, sheets))


def bench(result):
    """Time, traffic and memory of each row, in one table."""
    time, memory = tables.time_sheet(result), tables.memory_sheets(result)[0]
    time, memory = pick(time, 0, 1, 2, 3, 6, 7), pick(memory, 0, 5, len(memory.columns) - 3, len(memory.columns) - 1)
    held = {name: [cell.replace("*", "†") for cell in cells] for name, *cells in memory.rows}  # time has stars too
    rows = [[*cells, *held.get(cells[0], [tables.NONE] * 3)] for cells in time.rows]
    notes = time.notes + [note.replace("*", "†") for note in memory.notes]
    both = Sheet("A step: time, traffic, memory in MB", time.columns + memory.columns[1:], rows, notes)
    return shown(pick(both, timed=result.conditions))


def at_a_rate(sheet, result, timed=None):
    return pick(sheet._replace(title=f"{sheet.title}, {tables.rate_words(result.conditions.rate)}"), timed=timed)


def hosts(found):
    """As rank 0 of 8."""
    return [pick(tables.host_sheet(rows), 0, 1, 2, 3, 5, 6, 8) for rows in found if rows[0].d == 8]


def cuda():
    result = saved.load("cuda.json")
    return shown(gpu_step.overlap_sheet(result.steps), pick(tables.gpu_sheet(result)), *hosts(result.host))


def plans():
    """Of 7b what a rank holds, a step, and the sizes of buckets; of 70b a step."""
    (memory, _, step, _, sizes), (*_, larger, _, _) = (
        tables.plan_sheets(dataclasses.replace(saved.load(name), check=None))
        for name in ("plan.json", "plan_70b.json"))
    return shown(pick(memory, 0, 1, 2, 3, 4, 5, 8, 9), *(pick(one, 0, 1, 2, 4, 5, 6) for one in (step, larger)),
                 pick(sizes))


def mutations():
    sheet = pick(tables.mutation_sheet(saved.load("faults_mutations.json")))
    return shown(sheet._replace(rows=sheet.rows[-1:]))  # of all kinds together


BLOCKS = {
    "ladder": tables.ladder_block,
    "made": lambda: made([name for name in saved.FILES if name not in GPUS]),
    "made_gpu": lambda: made(GPUS),
    "settings": lambda: code(*(textwrap.fill(tables.settings_line(result.conditions), 100)
                               for result in (saved.load_bench(), saved.by_rate()[0]))),
    "curve": lambda: shown(pick(tables.curve_sheet(saved.at_all_rates()))),
    "two_hosts": lambda: shown(*(pick(tables.line_sheet(result), 0, 1, 3, 5, 6, timed=result.conditions)
                                 for result in saved.by_rate())),
    "accumulation": lambda: shown(*(at_a_rate(sheet, result) for result in saved.by_rate() if result.accumulation
                                    for sheet in tables.accumulation_sheets(result.accumulation))),
    "buckets": lambda: shown(*(at_a_rate(tables.buckets_sheet(result.sweep), result, result.sweep.conditions)
                               for result in saved.by_rate() if catalogue.is_whole(result.sweep))),
    "state": lambda: shown(pick(tables.state_sheet(saved.load_bench().model_state))),
    "gathered": lambda: shown(pick(tables.gathered_sheet(saved.load_bench().gathered))),
    "bench": lambda: bench(saved.load_bench()),
    "bench_16bit": lambda: bench(saved.load("bench_bfloat16.json")),
    "host": lambda: shown(*hosts(saved.load_bench().host)),
    "saving": lambda: shown(pick(tables.saving_sheet(saved.load("saving.json")))),
    "faults": lambda: shown(*map(pick, tables.fault_sheets(saved.load("faults.json")))),
    "mutations": mutations,
    "cuda": cuda,
    "plan": plans,
    "plan_check": lambda: shown(*map(pick, tables.plan_check_sheets(saved.load("plan.json").check))),
}
# By the name of a file in results/. "" where no sweep was made.
PICTURES = {"network.svg": lambda: pictures.two_hosts_picture(saved.load("network.json").at_all_rates()),
            "curve.svg": lambda: pictures.curve_picture(saved.at_all_rates()),
            "buckets.svg": lambda: pictures.sweep_picture(saved.at_all_rates()),
            "gpu_overlap.svg": lambda: gpu_step.overlap_picture(saved.load("cuda.json").steps),
            "plan.svg": lambda: pictures.svg(*pictures.planned_steps(saved.load("plan.json")))}


def figures():
    """Figures inside a sentence of a page, between <!--name--> and <!--end--> -> name -> text."""
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


SHEETS = {FaultResult: tables.fault_sheets, PlanResult: tables.plan_sheets, GpuResult: tables.gpu_sheet,
          SavingResult: tables.saving_sheet, MutationResult: tables.mutation_sheet, LossResult: tables.loss_sheet}


def sheets():
    """Of each of your files: a Result beside the published one, and else its own tables."""
    found = []
    for name in saved.FILES:
        mine = saved.load(name, "measured") if (saved.ROOT / "measured" / name).exists() else None
        if isinstance(mine, Result):
            target = target_of(name, mine)
            theirs = saved.load(target).at_all_rates() if (saved.ROOT / "results" / target).exists() else []
            found += [beside_sheet(name, one, theirs) for one in mine.at_all_rates()]
        elif mine:
            own = SHEETS[type(mine)](mine)
            found += [one._replace(title=f"Yours: {one.title}") for one in ([own] if isinstance(own, Sheet) else own)]
    return found


def target_of(name, result):
    """The published file that it belongs to: the bench has one for each kind of device, and for 16-bit rows."""
    kinds = [kind for kind in ("bfloat16", "float16") if kind in result.conditions.dtype.split()]
    kinds = ["cuda"] if result.conditions.device == "cuda" else kinds
    return f"bench_{kinds[0]}.json" if kinds and name == "bench.json" else name


def beside_sheet(name, mine, theirs):
    """`theirs`: published Results, of which one may be of the same rate."""
    same = next((one for one in theirs if one.conditions.rate == mine.conditions.rate), None)
    rate = f", {mine.conditions.rate}" if mine.conditions.rate else ""

    def published(get):
        return lambda row: same and (found := same.find(*row.row_id)) and tables.figure(found, get)
    figures = [("ms/step", "measured", "rounds_ms", ".0f"), ("x ddp", "measured", "vs_reference", ".2f"),
               ("MB sent", "counted", "wire_bytes/1e6", ".1f"),
               ("bytes a\nparam.", "counted", "bytes_per_param", ".2f")]
    return tables.sheet_of(
        f"Yours beside the published ones: {name}{rate}", mine.rows,
        [("", "", tables.label_of), *((f"{title}\n{whose}", source, one, form) for title, source, get, form in figures
                                      for whose, one in (("publ.", published(get)), ("yours", get)))],
        f"Yours: {tables.conditions_line(mine.conditions)}.",
        f"Published: {tables.conditions_line(same.conditions) if same else 'none at this rate'}.",
        tables.failures(mine.rows))


def rewritten(text, blocks=BLOCKS):
    """`text` of a markdown file, with all its blocks and figures made anew. An unknown name raises KeyError."""
    text = re.sub(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)",
                  lambda block: f"{block[1]}\n{blocks[block[2]]()}\n\n{block[3]}", text, flags=re.DOTALL)
    in_prose = r"<!--(\w+)-->.*?<!--end-->"
    found = figures() if re.search(in_prose, text) else {}
    return re.sub(in_prose, lambda mark: f"<!--{mark[1]}-->{found[mark[1]]}<!--end-->", text)


def files():
    """Pages that have blocks."""
    return [saved.ROOT / "README.md", saved.ROOT / "docs" / "plan.md", *sorted((saved.ROOT / "results").glob("*.md"))]


def main():
    command_line.Parser("report", __doc__).parse_args()
    if not pictures.can_draw():
        raise SystemExit("report: pictures need matplotlib: pip install matplotlib")
    rewrite()
    for sheet in sheets():
        print("", tables.sheet_text(sheet, tables.WIDTH), sep="\n")


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
    main()
