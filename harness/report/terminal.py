"""All tables of a result, in the terminal."""

from rich.console import Console

from harness.report.accumulation_tables import accumulation_sheet, share_sheet
from harness.report.bucket_tables import buckets_sheet, caps_sheet
from harness.report.conditions_line import conditions_line
from harness.report.line_tables import line_sheet
from harness.report.row_tables import memory_sheets, time_sheet
from harness.report.sheet import dim, rich_table, width
from harness.report.state_tables import gathered_sheet, host_sheet, state_sheet


def sheets(result):
    """-> list of Sheets: time and traffic; floors, where there is a line; memory, correctness; model state."""
    line = [line_sheet(result)] if "bits_per_second" in result["conditions"] else []
    state = [state_sheet(result["model_state"])] if "model_state" in result else []
    gathered = [gathered_sheet(result["gathered"])] if "gathered" in result else []
    accumulation = [accumulation_sheet(result["accumulation"]["rows"])] if "accumulation" in result else []
    host = [host_sheet(rows) for rows in result.get("host", [])]
    if accumulation and "ddp" in result["accumulation"]:
        accumulation.append(share_sheet(result["accumulation"]))
    caps = [caps_sheet(result["caps"])] if "caps" in result else []
    sweep = [buckets_sheet(result["sweep"])] if "sweep" in result else []
    return [time_sheet(result), *line, *sweep, *accumulation, *memory_sheets(result), *state, *gathered, *caps, *host]


def show(result):
    """Prints all tables."""
    console = Console(highlight=False)
    console.width = max(console.width, width(result["conditions"]))
    for sheet in sheets(result):
        console.print(rich_table(sheet), "", *map(dim, sheet.notes), "", sep="\n")
    console.print(dim(conditions_line(result["conditions"])))
