"""Makes tables, saves them as json, and prints them: to a terminal, by the library rich, and as markdown for pages.

A program that measures makes finished tables, each a `Sheet`, and saves them in one `Report`: a file of results/.
Pages, which are markdown files such as README.md, show these tables as they are. This module doesn't import torch,
which takes seconds, so pages are written at once.

A program measures everything several times, in rounds, so a cell of a table may hold a list with a number for each
round. Pages find a cell by the keys of its row and its column.
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
NONE = "–"  # what a table shows for a cell without a value
# Two values of Column.form, which says how cells are written. Any other form is a format of Python, such as ".2f".
TEXT = "text"  # for a column of words, which are aligned left
SMALL = "small"  # for numbers such as 1.2e-07, which the function `small` writes
BLOCK_WIDTH = 100  # characters in a line of a block of code on a page
TERMINAL_WIDTH = 110  # characters in a line of the widest table that a program prints
MARKDOWN_WIDTH = 118  # characters in a line of a page's source
# A note that programs put under their tables.
METHODS = "What rows and columns are: results/methods.md."


# ----------------------------------------------------------------------------------------------- A table and its parts


@dataclass
class Marked:
    """A cell with a number, followed by a mark.

    The mark is "~" (the number is within the noise), a sign that a footnote explains, or a formula in brackets.
    """
    value: float
    mark: str


@dataclass
class Column:
    """Describes a column of a Sheet.

    `source` says where the numbers come from: measured, counted, formula, modelled, published; "" for words.
    `form` says how a number is written: a format such as ".2f", or SMALL. The form of words is TEXT.
    `shows` says what is written for a cell that has a number for each round: their "median", "range", or "both".
    """
    key: str
    title: str
    source: str = ""
    form: str = ""
    shows: str = "median"


@dataclass
class Sheet:
    """One table, with titles and keys of its columns, and keys of its rows.

    A row is a list of cells. A cell is None, words, a number, a Marked number, or a list with a number for each round.
    `footnotes` explain marks in cells. `notes` explain the rest; most pages don't show them.
    """
    title: str
    columns: list[Column]
    row_keys: list[str]
    rows: list[list]
    notes: list[str] = field(default_factory=list)
    footnotes: list[str] = field(default_factory=list)

    def cells(self, key):
        """Return {key of the row: cell} of the column `key`."""
        place = [column.key for column in self.columns].index(key)
        return {row_key: row[place] for row_key, row in zip(self.row_keys, self.rows)}

    def numbers(self, key):
        """Return what `cells` returns, with the number alone in place of each Marked number."""
        return {row_key: cell.value if isinstance(cell, Marked) else cell for row_key, cell in self.cells(key).items()}


class ColumnToFill(NamedTuple):
    """Describes a column for `sheet_of`, which makes a row of cells from each *record*, an object of any kind."""
    column: Column  # whose key is "" until `sheet_of` sets it
    get: Callable | str  # a function that gets a record and returns a value, or the name of an attribute of the record
    unit: float  # the value is divided by this number

    def cell(self, record):
        """Return the cell of this column for a record."""
        value = getattr(record, self.get) if isinstance(self.get, str) else self.get(record)
        if self.unit == 1 or value is None:
            return value
        if isinstance(value, list):
            return [number / self.unit for number in value]
        return value / self.unit


def column(title, get, source="", form="", *, unit=1, shows="median"):
    """Return a ColumnToFill: see there and at Column for the arguments.

    Where this file has a local of the name `column`, that is a Column of a Sheet.
    """
    return ColumnToFill(Column("", title, source, form, shows), get, unit)


def name_column(get="name", title=""):
    """Return a ColumnToFill for words, mostly the first column, which names the records."""
    return column(title, get, form=TEXT)


def sheet_of(title, rows, columns, notes=(), marks=None, row_key=None):
    """Make a Sheet with a row for each record in `rows`. The columns make cells of the records.

    Args:
        columns: {key of the column: ColumnToFill}.
        notes: texts; None and "" are left out.
        marks: {mark: explanation}. The explanation becomes a footnote if a cell has that mark.
        row_key: a function that gets a record and returns the row's key; by default that is its first cell.
    """
    rows_of_cells = [[to_fill.cell(record) for to_fill in columns.values()] for record in rows]
    with_keys = [dataclasses.replace(to_fill.column, key=key) for key, to_fill in columns.items()]
    row_keys = [row_key(record) for record in rows] if row_key else [str(cells[0]) for cells in rows_of_cells]
    used_marks = {cell.mark for cells in rows_of_cells for cell in cells if isinstance(cell, Marked)}
    # A mark may begin with a blank, which separates it from the number, but not in a footnote.
    footnotes = [f"{mark.strip()} {explanation}" for mark, explanation in (marks or {}).items() if mark in used_marks]
    return Sheet(title, with_keys, row_keys, rows_of_cells, list(filter(None, notes)), footnotes)


def beside(title, *sheets):
    """Return one table that has the columns of several tables side by side.

    The first table gives the rows and their names. The first column of each other table is left out. A row that another
    table doesn't have gets empty cells.
    """
    first, *others = sheets
    columns = [*first.columns]
    rows = [[*row] for row in first.rows]
    notes = [*first.notes]
    footnotes = [*first.footnotes]
    for other in others:
        columns += other.columns[1:]  # without the first column, as in each row below
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
    """Return the median over rounds of value / other value.

    It is divided round by round, because the two values of a round were measured within seconds of each other.
    """
    return median([value / other for value, other in zip(values, other_values)])


def small(value):
    """Return a number as text with two digits and a power of ten."""
    return "0" if value == 0 else f"{value:.1e}"


def cell_text(cell, form, shows="median"):
    """Return a cell as text: None and [] as a dash, words as they are, a number in `form`, a list as `shows` says."""
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
    """Print a table and, below it, its notes and footnotes. `console`: where rich prints."""
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for column in sheet.columns:
        table.add_column(f"{column.title}\n[dim]{column.source}[/dim]", no_wrap=True,
                         justify="left" if column.form == TEXT else "right")
    for texts in texts_of(sheet):
        table.add_row(*map(escape, texts))
    notes = [f"[dim]{escape(note)}[/dim]" for note in sheet.notes + sheet.footnotes]
    console.print(table, "", *notes, sep="\n")


def sheet_text(sheet):
    """Return the text that a terminal of BLOCK_WIDTH characters would show of a sheet, without colours."""
    console = Console(file=io.StringIO(), width=BLOCK_WIDTH, color_system=None, highlight=False)
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
    """Return a sheet as a table of markdown. A column that has a `source` has numbers, which are aligned right."""
    # The first column of some tables has no title. There the table's own title is written.
    titles = [" ".join(column.title.split()) or sheet.title for column in sheet.columns]
    alignments = ["--:" if column.source else "---" for column in sheet.columns]
    lines = [f"| {' | '.join(texts)} |" for texts in (titles, alignments, *texts_of(sheet))]
    notes = [f"\n{textwrap.fill(note, MARKDOWN_WIDTH)}" for note in sheet.notes + sheet.footnotes]
    return "\n".join([*lines, *notes])


# ------------------------------------------------------------------------------------- By which code, where, and when


class Made(NamedTuple):
    """The origin of numbers: on which machine, by which code and when they were made."""
    machine: str
    torch: str
    commit: str
    date: str


def made_here(machine=None):
    """Return a Made for what this code measures today. By default `machine` is the name of this machine's processor."""
    return Made(machine or cpu_name(), importlib.metadata.version("torch"), commit(), date.today().isoformat())


def made_line(made, *words):
    """Return a line with machine, torch, date and commit of a measurement, and with `words` in the middle."""
    return " · ".join([made.machine, f"torch {made.torch}", *filter(None, words), made.date, f"commit {made.commit}"])


def commit(folder=ROOT):
    """Return the name of the last commit, such as "abc1234", or "unknown" where the folder is in no git repository.

    If code has changed since that commit, the name ends with a plus sign.
    """
    def git(*command):
        """Return what git prints for a command."""
        return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout
    try:
        # Only changes of code count, because results and pages are often being written while this runs.
        is_changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "Makefile") != ""
        head = git("rev-parse", "--short", "HEAD").strip()
        return f"{head}+" if is_changed else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name():
    """Return the number and name of the processors, such as "2 x Xeon"; without a /proc, the architecture alone."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


# -------------------------------------------------------------------------------------------- Reports, saved as json


# All files of results/ have this number. Raise it when a field of a Report changes its name or its meaning: older files
# are refused then.
SCHEMA = 3


@dataclass
class Report:
    """Holds what a program measured.

    `sheets`: {key: Sheet}, finished tables.
    `conditions`: how it was measured, in words; "" if a note of a table says that.
    `figures`: {name: text}, numbers that pages show inside sentences; not pictures.
    `drawn`: raw numbers by name. Only harness/publishing/pictures.py reads them, to draw pictures.
    """
    made: Made
    sheets: dict
    conditions: str = ""
    figures: dict = field(default_factory=dict)
    drawn: dict = field(default_factory=dict)


def to_json(report):
    """Return a Report as the text of a json file, with the schema first, and with nine digits of each number."""
    # asdict leaves `made`, a NamedTuple, as it is, and json would write that as a list.
    fields = {"schema": SCHEMA, **dataclasses.asdict(report), "made": report.made._asdict()}
    # json has no option for the number of digits, so the text is read once more, and each number is rounded.
    # parse_float gets each number that isn't whole as text.
    rounded = json.loads(json.dumps(fields), parse_float=lambda digits: float(f"{float(digits):.9g}"))
    return json.dumps(rounded, indent=1) + "\n"


def from_json(text):
    """Return the Report that `to_json` wrote as `text`.

    Raises ValueError, whose message is one line, if the text is no json, or has another schema or other fields.
    """
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
    """Return the Sheet whose fields were read from json, where Column and Marked have become dicts."""
    columns = [Column(**column) for column in fields["columns"]]
    rows = [[Marked(**cell) if isinstance(cell, dict) else cell for cell in row] for row in fields["rows"]]
    return Sheet(**{**fields, "columns": columns, "rows": rows})


def load(name):
    """Return the Report in the file `name` of results/. If it can't be read, end the program with one line."""
    path = ROOT / "results" / name
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"report: {path} can't be shown: measure it again, by make figures, or take the committed "
                         f"one: {error}") from None


def save_and_show(path, report, fail):
    """Write a report to the file `path`, which is the program's option --json, unless it is None; print its tables.

    If the file can't be written, the tables are printed nevertheless. `fail(message)`, which is called then, ends the
    program.
    """
    try:
        if path:
            command_line.write("--json", path, to_json(report), fail)
    finally:
        print_report(report)
    if path:
        print(f"written to {path}")  # plain print, because rich would read [a] in a path as markup
