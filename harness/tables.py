"""Makes tables, and writes them: in a terminal by rich, in pages as markdown."""

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

from harness.results import Column, Marked, Sheet, median

NONE = "–"
TEXT = "text"  # the form of a column of words, which stand to the left
WIDTH = 110  # columns of a terminal that the widest table takes


class Source(NamedTuple):
    """A Column, and how its cells are read from rows: a function, or a field's name; divided by `unit`."""
    column: Column
    get: Callable | str
    unit: float


def column(title, get, source="", form="", *, unit=1, shows="median"):
    """Describe a column for `sheet_of`: see results.Column and Source."""
    return Source(Column("", title, source, form, shows), get, unit)


def names(get="name", title=""):
    """Describe the first column, which names the rows."""
    return column(title, get, form=TEXT)


def sheet_of(title, rows, columns, notes=(), footnotes=(), row_key=None):
    """Make a Sheet. `columns`: {key: what `column` returns}; `row_key(row)`: by default a row's first cell.

    `footnotes` are read last: functions of columns may add some.
    """
    def cell(row, source):
        value = getattr(row, source.get) if isinstance(source.get, str) else source.get(row)
        if source.unit == 1 or value is None:
            return value
        return [number / source.unit for number in value] if isinstance(value, list) else value / source.unit
    cells = [[cell(row, source) for source in columns.values()] for row in rows]
    described = [dataclasses.replace(source.column, key=key) for key, source in columns.items()]
    keys = [row_key(row) if row_key else str(first) for row, (first, *_) in zip(rows, cells)]
    return Sheet(title, described, keys, cells, [note for note in notes if note], [note for note in footnotes if note])


# ------------------------------------------------------------------------------------------------------- What cells say


def small(value):
    return "0" if value == 0 else f"{value:.1e}"


def megabytes(value):
    """Write MB in few digits: tens of thousands have no decimal."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


FORMS = {"small": small, "megabytes": megabytes}


def written(cell, form, shows="median"):
    """Write a cell: None and [] as a dash, words as they are, numbers by `form`, of a list what the column shows."""
    if cell is None or cell == []:
        return NONE
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Marked):
        return written(cell.value, form) + cell.mark
    if isinstance(cell, list):
        middle = written(median(cell), form)
        ends = f"{written(min(cell), form)}–{written(max(cell), form)}"
        return {"median": middle, "range": ends, "both": f"{middle} ({ends})"}[shows]
    return FORMS[form](cell) if form in FORMS else format(cell, form)


def cells_of(sheet):
    """Return the rows of a sheet as lists of strings."""
    return [[written(cell, column.form, column.shows) for cell, column in zip(row, sheet.columns)]
            for row in sheet.rows]


def label_of(row):
    """Return the name of a row or RowId, in two lines where it has a bucket size: the table has to fit a terminal."""
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


def sheet_text(sheet, columns=100):
    """Return a sheet as it looks in a terminal of that many columns, without colours."""
    console = Console(file=io.StringIO(), width=columns, color_system=None, highlight=False)
    print_sheet(sheet, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def print_sheets(sheets, *last_lines):
    """Print tables to the terminal, and lines below them."""
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for sheet in sheets:
        print_sheet(sheet, console)
        console.print()
    for line in last_lines:
        console.print(line, style="dim", markup=False)


def markdown(sheet):
    """Return a sheet as a page has it. Columns that say where their figures come from stand to the right."""
    titles = [" ".join(column.title.split()) or sheet.title for column in sheet.columns]
    sides = ["--:" if column.source else "---" for column in sheet.columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, sides, *cells_of(sheet))]
    return "\n".join([*lines, *(f"\n{textwrap.fill(note, 118)}" for note in sheet.notes + sheet.footnotes)])


# ------------------------------------------------------------------------------- Lines about conditions, below a table


METHODS = "What rows and columns are: results/methods.md."


def settings_line(c):
    """Write ranks, model, batch and rounds of Conditions."""
    shared = f" that share {c.gpus} GPU(s)" if 0 < c.gpus < c.ranks else ""
    hosts = f" on {c.hosts} hosts of {c.cores_per_host} core(s)" if c.cores_per_host else ""
    tcp = f", TCP {c.tcp}" if c.tcp else ""
    return " · ".join([
        f"{c.backend}, {c.ranks} rank(s) x {c.threads_per_rank} thread(s){shared}{hosts}{tcp}",
        f"{c.model}: {c.parameters:,} parameters, {c.dtype}, AdamW",
        f"a rank's batch: {c.batch_size} x {c.sequence_length} bytes", f"{c.rounds} round(s) of {c.steps} steps"])


def made_line(conditions, *words):
    """Write on which machine, by which code and when something was measured, with `words` in the middle."""
    c = conditions
    return " · ".join([c.machine, f"torch {c.torch}", *words, c.date, f"commit {c.commit}"])


def conditions_line(c):
    """Write all of Conditions in a line."""
    return made_line(c, settings_line(c))


def rate_words(rate):
    """Write "300mbit" as "300 Mbit/s"."""
    return re.sub(r"(\d)([mg])bit$", lambda match: f"{match[1]} {match[2].upper()}bit/s", rate)
