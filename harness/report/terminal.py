"""All tables of a result, in the terminal."""

from rich.console import Console

from harness.report.accumulation_tables import accumulation_sheet, has_shares, share_sheet
from harness.report.bucket_tables import buckets_sheet, caps_sheet
from harness.report.conditions_line import conditions_line
from harness.report.line_tables import line_sheet
from harness.report.row_tables import memory_sheets, time_sheet
from harness.report.shared_tables import shared_sheet
from harness.report.sheet import dim, rich_table, width
from harness.report.state_tables import gathered_sheet, host_sheet, state_sheet


def sheets(result):
    """-> list of Sheets: time and traffic; floors, where there is a line; memory, correctness; model state."""
    line = [line_sheet(result)] if result.conditions.bits_per_second else []
    sweep = [buckets_sheet(result.sweep)] if result.sweep else []
    accumulation = [accumulation_sheet(result.accumulation.rows)] if result.accumulation else []
    accumulation += [share_sheet(result.accumulation)] if has_shares(result.accumulation) else []
    state = [state_sheet(result.model_state)] if result.model_state else []
    gathered = [gathered_sheet(result.gathered)] if result.gathered else []
    caps = [caps_sheet(result.caps)] if result.caps else []
    host = [host_sheet(rows) for rows in result.host]
    shared = [shared_sheet(result.shared)] if result.shared else []
    return [time_sheet(result), *line, *sweep, *accumulation, *memory_sheets(result), *shared, *state, *gathered, *caps,
            *host]


def show(result):
    """Prints all tables."""
    console = Console(highlight=False)
    console.width = max(console.width, width(result.conditions))
    print_sheets(sheets(result), console)
    console.print(dim(conditions_line(result.conditions)))


def print_sheets(found, console=None):
    console = console or Console(highlight=False)
    for sheet in found:
        console.print(rich_table(sheet), "", *map(dim, sheet.notes), "", sep="\n")
