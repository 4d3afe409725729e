"""Makes tables, and writes them: by rich for a terminal, and as markdown for pages."""

import dataclasses
import io
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.publishing.results import Column, Marked, Sheet, median

NONE = "–"
TEXT = "text"  # the form of a column of words, which are aligned left
WIDTH = 110  # characters in a line of the widest table
PAGE_WIDTH = 118  # characters in a line of a page


class ColumnReader(NamedTuple):
    """A Column, and where its cells come from."""
    column: Column
    get: Callable | str  # the name of a row's field, or a function that takes the row
    unit: float  # numbers are divided by it


def column(title, get, source="", form="", *, unit=1, shows="median"):
    """Describe a column for `sheet_of`, which adds the column's key. Returns a ColumnReader."""
    return ColumnReader(Column("", title, source, form, shows), get, unit)


def names(get="name", title=""):
    """Describe the first column, which names the rows."""
    return column(title, get, form=TEXT)


def sheet_of(title, rows, columns, notes=(), footnotes=(), row_key=None):
    """Make a Sheet of `rows`, objects of any kind. `columns`: {key of the column: ColumnReader}.

    The `get` of a column may still add `footnotes`. A row's key is `row_key(row)`, or else its first cell.
    """
    def cell(row, reader):
        value = getattr(row, reader.get) if isinstance(reader.get, str) else reader.get(row)
        if reader.unit == 1 or value is None:
            return value
        return [number / reader.unit for number in value] if isinstance(value, list) else value / reader.unit

    cells = [[cell(row, reader) for reader in columns.values()] for row in rows]
    with_keys = [dataclasses.replace(reader.column, key=key) for key, reader in columns.items()]
    row_keys = [row_key(row) for row in rows] if row_key else [str(first) for first, *_ in cells]
    return Sheet(title, with_keys, row_keys, cells, list(filter(None, notes)), list(filter(None, footnotes)))


# ------------------------------------------------------------------------------------------------------- What cells say


def small(value):
    """Write a number with two digits and its power of ten."""
    return "0" if value == 0 else f"{value:.1e}"


def megabytes(value):
    """Write MB in few digits: thousands have no decimal."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


FORMS = {"small": small, "megabytes": megabytes}


def cell_text(cell, form, shows="median"):
    """Write a cell: None and [] as a dash, words as they are, a number in its `form`, a list as `shows` says."""
    if cell is None or cell == []:
        return NONE
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Marked):
        return cell_text(cell.value, form) + cell.mark
    if isinstance(cell, list):
        middle = cell_text(median(cell), form)
        ends = f"{cell_text(min(cell), form)}–{cell_text(max(cell), form)}"
        return {"median": middle, "range": ends, "both": f"{middle} ({ends})"}[shows]
    return FORMS[form](cell) if form in FORMS else format(cell, form)


def cells_of(sheet):
    """Return the rows of a sheet as lists of strings."""
    return [[cell_text(cell, column.form, column.shows) for cell, column in zip(row, sheet.columns)]
            for row in sheet.rows]


def label_of(row):
    """Return the name of a row or RowId, in two lines if it has a bucket size: a table has to fit a terminal."""
    return row.base if row.bucket_mb is None else f"{row.base},\n  {row.size} buckets"


def failures(rows):
    return [f"{row.name}: {row.error}" for row in rows if row.error]


# ----------------------------------------------------------------------------------------------- Terminal and markdown


def print_sheet(sheet, console):
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for column in sheet.columns:
        table.add_column(f"{column.title}\n[dim]{column.source}[/dim]", no_wrap=True,
                         justify="left" if column.form == TEXT else "right")
    for cells in cells_of(sheet):
        table.add_row(*map(escape, cells))
    notes = [f"[dim]{escape(note)}[/dim]" for note in sheet.notes + sheet.footnotes]
    console.print(table, "", *notes, sep="\n")


def sheet_text(sheet, width=100):
    """Return a sheet as a terminal of that width shows it, without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    print_sheet(sheet, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def print_sheets(sheets, *last_lines):
    """Print sheets to the terminal, and lines below them."""
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for sheet in sheets:
        print_sheet(sheet, console)
        console.print()
    for line in last_lines:
        console.print(line, style="dim", markup=False)


def markdown(sheet):
    """Return a sheet as a table of markdown. Columns of numbers, those with a `source`, are aligned right."""
    titles = [" ".join(column.title.split()) or sheet.title for column in sheet.columns]
    alignments = ["--:" if column.source else "---" for column in sheet.columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, alignments, *cells_of(sheet))]
    return "\n".join([*lines, *(f"\n{textwrap.fill(note, PAGE_WIDTH)}" for note in sheet.notes + sheet.footnotes)])


# ------------------------------------------------------------------------------- Lines about conditions, below a table


METHODS = "What rows and columns are: results/methods.md."


def settings_line(c):
    """Write ranks, model, batch and rounds of `c`, the Conditions."""
    shared = f" that share {c.gpus} GPU(s)" if 0 < c.gpus < c.ranks else ""
    hosts = f" on {c.hosts} hosts of {c.cores_per_host} core(s)" if c.cores_per_host else ""
    tcp = f", TCP {c.tcp}" if c.tcp else ""
    return " · ".join([
        f"{c.backend}, {c.ranks} rank(s) x {c.threads_per_rank} thread(s){shared}{hosts}{tcp}",
        f"{c.model}: {c.parameters:,} parameters, {c.dtype}, AdamW",
        f"a rank's batch: {c.batch_size} x {c.sequence_length} bytes", f"{c.rounds} round(s) of {c.steps} steps"])


def made_line(conditions, *words):
    """Write on which machine, by which code and when something was measured, with `words` in the middle."""
    return " · ".join([conditions.machine, f"torch {conditions.torch}", *words, conditions.date,
                       f"commit {conditions.commit}"])


def conditions_line(conditions):
    return made_line(conditions, settings_line(conditions))


def rate_words(rate):
    """Write "300mbit" as "300 Mbit/s"."""
    return re.sub(r"(\d)([mg])bit$", lambda match: f"{match[1]} {match[2].upper()}bit/s", rate)
