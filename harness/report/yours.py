"""What you have measured, beside what is published: files in measured/, which git ignores, and those in results/.

`make report` shows them; `make report PUBLISH=1` puts them in the place of the published ones.
"""

import functools

from harness.report import published
from harness.report.cells import bytes_per_param_cells, label_of
from harness.report.conditions_line import conditions_line
from harness.report.fault_tables import fault_sheets, mutation_sheet
from harness.report.gpu_table import gpu_sheet
from harness.report.loss_table import loss_sheet
from harness.report.plan_tables import plan_sheets
from harness.report.saving_table import saving_sheet
from harness.report.sheet import NONE, Notes, Sheet
from harness.rows import rates, saved
from harness.rows.fault_results import FaultResult, MutationResult
from harness.rows.gpu_results import GpuResult
from harness.rows.loss_results import LossResult
from harness.rows.plan_results import PlanResult
from harness.rows.results import Result
from harness.rows.saving_results import SavingResult
from harness.run import command_line
from harness.run.files import write

KINDS = {"bench.json": Result, "network.json": Result, "bench_variants.json": Result,
         "network_variants.json": Result, "cuda.json": GpuResult, "faults.json": FaultResult,
         "faults_mutations.json": MutationResult, "losses.json": LossResult, "saving.json": SavingResult,
         "plan.json": PlanResult, "plan_70b.json": PlanResult}


def measured():
    """-> {name: what the file holds}, of those files of KINDS that are there."""
    return {name: published.read(published.ROOT / "measured" / name, kind)
            for name, kind in KINDS.items() if (published.ROOT / "measured" / name).exists()}


def sheets():
    """Of each of your files: a Result beside the published one, and else its own tables."""
    found = []
    for name, mine in measured().items():
        if isinstance(mine, Result):
            target = target_of(name, mine)
            theirs = published.load(target).at_all_rates() if (published.ROOT / "results" / target).exists() else []
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
            published.check_whole(mine, "measured/bench.json")
    for name, mine in found.items():
        target = published.ROOT / "results" / target_of(name, mine)
        if name.startswith("network") and target.exists():
            mine = functools.reduce(lambda before, one: rates.merged(one, before.at_all_rates()),
                                    mine.at_all_rates()[::-1], published.load(name))
        if name == "network_variants.json":  # no picture shows these steps
            rates.keep_exposed_only(row for one in mine.at_all_rates() for row in one.rows)
        write("--publish", target, saved.to_json(mine), fail)
        (published.ROOT / "measured" / name).unlink()
        said.append(f"measured/{name} is {target.relative_to(published.ROOT)} now")
    return said or ["measured/ holds nothing to publish"]
