"""Makes tables, saves them as json, and writes them: by rich for a terminal, as markdown for pages.

A program that measures makes finished tables, each a `Sheet`, and saves them in one `Report`. Pages show these tables
as they are. No torch is imported here: pages are written quickly.
"""

import dataclasses
import importlib.metadata
import io
import json
import platform
import statistics
import subprocess
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import NamedTuple

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.ranks import command_line

ROOT = Path(__file__).resolve().parents[2]
NONE = "–"
TEXT = "text"  # the form of a column of words, which are aligned left
SMALL = "small"  # the form of small numbers: see `small`
BLOCK_WIDTH = 100  # characters in a line of a block of code on a page
TERMINAL_WIDTH = 110  # characters in a line of the widest table
MARKDOWN_WIDTH = 118  # characters in a line of a page's source
METHODS = "What rows and columns are: results/methods.md."


# ----------------------------------------------------------------------------------------------- A table, and its parts


@dataclass
class Marked:
    """A number and the mark behind it in a cell: ~ for noise, a footnote's mark, or a formula in brackets."""
    value: float
    mark: str


@dataclass
class Column:
    """A column of a Sheet.

    `source` says where the numbers come from: measured, counted, formula, modelled, published, or "".
    `form` is how a number is written: a format such as ".2f", SMALL, or TEXT.
    `shows`, for a cell with a number for each round: "median", "range", or "both".
    """
    key: str
    title: str
    source: str = ""
    form: str = ""
    shows: str = "median"


@dataclass
class Sheet:
    """One table. A row is a list of cells: None, words, a number, a Marked number, or a list with a number a round.

    `footnotes` explain marks in cells, `notes` explain the rest. Pages show footnotes only.
    """
    title: str
    columns: list[Column]
    row_keys: list[str]
    rows: list[list]
    notes: list[str] = field(default_factory=list)
    footnotes: list[str] = field(default_factory=list)

    def cells(self, key):
        """Return {key of the row: cell} of a column."""
        place = [column.key for column in self.columns].index(key)
        return {row_key: row[place] for row_key, row in zip(self.row_keys, self.rows)}

    def numbers(self, key):
        """Return {key of the row: cell} of a column; of a Marked cell the number."""
        return {row_key: cell.value if isinstance(cell, Marked) else cell for row_key, cell in self.cells(key).items()}


class ColumnToFill(NamedTuple):
    """A Column without a key, and where its cells come from."""
    column: Column
    get: Callable | str  # a function of a row, or the name of a row's attribute
    unit: float  # by which numbers are divided

    def cell(self, row):
        value = getattr(row, self.get) if isinstance(self.get, str) else self.get(row)
        if self.unit == 1 or value is None:
            return value
        if isinstance(value, list):
            return [number / self.unit for number in value]
        return value / self.unit


def column(title, get, source="", form="", *, unit=1, shows="median"):
    """Describe a column for `sheet_of`. Returns a ColumnToFill."""
    return ColumnToFill(Column("", title, source, form, shows), get, unit)


def name_column(get="name", title=""):
    """Describe the first column, which names the rows."""
    return column(title, get, form=TEXT)


def sheet_of(title, rows, columns, notes=(), marks=None, row_key=None):
    """Make a Sheet of `rows`, objects of any kind.

    Args:
        columns: {key of the column: ColumnToFill}.
        marks: {mark: explanation}, which becomes a footnote if a cell has that mark.
        row_key: a function of a row; by default a row's key is its first cell.
    """
    cells = [[to_fill.cell(row) for to_fill in columns.values()] for row in rows]
    with_keys = [dataclasses.replace(to_fill.column, key=key) for key, to_fill in columns.items()]
    row_keys = [row_key(row) for row in rows] if row_key else [str(row_cells[0]) for row_cells in cells]
    used_marks = {cell.mark for row_cells in cells for cell in row_cells if isinstance(cell, Marked)}
    footnotes = [f"{mark.strip()} {explanation}" for mark, explanation in (marks or {}).items() if mark in used_marks]
    return Sheet(title, with_keys, row_keys, cells, list(filter(None, notes)), footnotes)


def beside(title, *sheets):
    """Return one table with the columns of several. All have the same rows; the names of rows come from the first."""
    first, *others = sheets
    columns = [*first.columns]
    rows = [[*row] for row in first.rows]
    notes = [*first.notes]
    footnotes = [*first.footnotes]
    for other in others:
        columns += other.columns[1:]
        row_of = dict(zip(other.row_keys, other.rows))
        empty_row = [None] * len(other.columns)
        for row_key, row in zip(first.row_keys, rows):
            row += row_of.get(row_key, empty_row)[1:]
        notes += other.notes
        footnotes += other.footnotes
    return Sheet(title, columns, first.row_keys, rows, notes, footnotes)


# ------------------------------------------------------------------------------------------------------- What cells say


def median(values):
    """Return the median, or None of an empty list."""
    return statistics.median(values) if values else None


def ratio(values, other_values):
    """Return the median over rounds of value / other: within a round both were measured seconds apart."""
    return median([value / other for value, other in zip(values, other_values)])


def small(value):
    """Write a number with two digits and its power of ten."""
    return "0" if value == 0 else f"{value:.1e}"


def cell_text(cell, form, shows="median"):
    """Write a cell: None and [] as a dash, words as they are, a number in its `form`, a list as `shows` says."""
    if cell is None or cell == []:
        return NONE
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Marked):  # one number, never a list
        return cell_text(cell.value, form) + cell.mark
    if isinstance(cell, list):
        middle = cell_text(median(cell), form)
        ends = f"{cell_text(min(cell), form)}–{cell_text(max(cell), form)}"
        return {"median": middle, "range": ends, "both": f"{middle} ({ends})"}[shows]
    return small(cell) if form == SMALL else format(cell, form)


def texts_of(sheet):
    """Return the rows of a sheet as lists of strings."""
    return [[cell_text(cell, column.form, column.shows) for cell, column in zip(row, sheet.columns)]
            for row in sheet.rows]


# ----------------------------------------------------------------------------------------------- Terminal and markdown


def print_sheet(sheet, console):
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for column in sheet.columns:
        table.add_column(f"{column.title}\n[dim]{column.source}[/dim]", no_wrap=True,
                         justify="left" if column.form == TEXT else "right")
    for texts in texts_of(sheet):
        table.add_row(*map(escape, texts))
    notes = [f"[dim]{escape(note)}[/dim]" for note in sheet.notes + sheet.footnotes]
    console.print(table, "", *notes, sep="\n")


def sheet_text(sheet, width=BLOCK_WIDTH):
    """Return a sheet as a terminal of that width shows it, without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    print_sheet(sheet, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def print_report(report):
    """Print all tables of a report to the terminal, and its conditions below them."""
    console = Console(highlight=False)
    console.width = max(console.width, TERMINAL_WIDTH)
    for sheet in report.sheets.values():
        print_sheet(sheet, console)
        console.print()
    console.print(made_line(report.made, report.conditions), style="dim", markup=False)


def markdown(sheet):
    """Return a sheet as a table of markdown. Columns with a `source` have numbers, which are aligned right."""
    # The first column of some tables has no title: the table's own title stands there.
    titles = [" ".join(column.title.split()) or sheet.title for column in sheet.columns]
    alignments = ["--:" if column.source else "---" for column in sheet.columns]
    lines = [f"| {' | '.join(texts)} |" for texts in (titles, alignments, *texts_of(sheet))]
    notes = [f"\n{textwrap.fill(note, MARKDOWN_WIDTH)}" for note in sheet.notes + sheet.footnotes]
    return "\n".join([*lines, *notes])


# ------------------------------------------------------------------------------------- By which code, where, and when


class Made(NamedTuple):
    """On which machine, by which code, and when something was measured."""
    machine: str
    torch: str
    commit: str
    date: str


def made_here(machine=None):
    """Return Made of this code, today; by default of this machine's processor."""
    return Made(machine or cpu_name(), importlib.metadata.version("torch"), commit(), date.today().isoformat())


def made_line(made, *words):
    """Write machine, torch, date and commit of a measurement, with `words` in the middle."""
    return " · ".join([made.machine, f"torch {made.torch}", *filter(None, words), made.date, f"commit {made.commit}"])


def commit(folder=ROOT):
    """Return the commit of the code, "abc1234", with a + where code has changed since; outside of git "unknown"."""
    def git(*command):
        return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout
    try:
        # Only code counts: results and pages are often being written while this runs.
        is_changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "Makefile") != ""
        head = git("rev-parse", "--short", "HEAD").strip()
        return f"{head}+" if is_changed else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name():
    """Return the number and name of the processors; where Linux doesn't say them, the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


# ------------------------------------------------------------------------------------------------- Reports, and json


SCHEMA = 3  # of all files of results/: raise it when a field changes its name or its meaning


@dataclass
class Report:
    """What a program measured.

    `conditions`: in words; "" where a note says them. `sheets`: {key: finished table}.
    `figures`: {name: text} of numbers that a page says in a sentence.
    `drawn`: raw numbers, which only pictures read.
    """
    made: Made
    sheets: dict
    conditions: str = ""
    figures: dict = field(default_factory=dict)
    drawn: dict = field(default_factory=dict)


def to_json(report):
    """Write a Report as json: the schema first, nine digits of each number."""
    fields = {"schema": SCHEMA, **dataclasses.asdict(report), "made": report.made._asdict()}
    rounded = json.loads(json.dumps(fields), parse_float=lambda digits: float(f"{float(digits):.9g}"))
    return json.dumps(rounded, indent=1) + "\n"


def from_json(text):
    """Read a Report. Raises ValueError, in one line: no json, another schema, other fields."""
    try:
        fields = json.loads(text)
        schema = fields.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema}, this program's is {SCHEMA}")
        fields["made"] = Made(**fields["made"])
        fields["sheets"] = {key: sheet_from(sheet) for key, sheet in fields["sheets"].items()}
        return Report(**fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it has other fields: {error}") from None


def sheet_from(fields):
    """Make a Sheet of its fields, as json has them."""
    columns = [Column(**column) for column in fields["columns"]]
    rows = [[Marked(**cell) if isinstance(cell, dict) else cell for cell in row] for row in fields["rows"]]
    return Sheet(**{**fields, "columns": columns, "rows": rows})


def load(name):
    """Read a file of results/. Ends the program, in one line, if it can't be read."""
    path = ROOT / "results" / name
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"report: {path} can't be shown: measure it again, by make figures, or take the committed "
                         f"one: {error}") from None


def save_and_show(path, report, fail):
    """Write a report to --json, if there is a path, and print its tables, also where the file can't be written."""
    try:
        if path:
            command_line.write("--json", path, to_json(report), fail)
    finally:
        print_report(report)
    if path:
        print(f"written to {path}")  # not by rich, for which [a] in a path is markup
