"""A table, in words, and as text.

Each column says where its figure comes from: measured (clock, subtraction), counted (ledger, memory), or a formula.
"""

import io
from typing import NamedTuple

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

NONE = "–"


class Sheet(NamedTuple):
    """One table, in words. `columns`: (name, where it comes from); `rows`: lists of cells; `notes`: lines below."""
    title: str
    columns: list
    rows: list
    notes: list


class Notes(list):
    """Footnotes: `mark(reason)` gives the sign to put beside a figure. The same reason has the same sign."""

    def mark(self, reason):
        lines = [line.split(" ", 1)[1] for line in self]
        if reason not in lines:
            self.append(f"{'*' * (len(self) + 1)} {reason}")
            lines.append(reason)
        return "*" * (lines.index(reason) + 1)


def rich_table(sheet):
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for name, source in sheet.columns:
        table.add_column(f"{name}\n[dim]{source}[/dim]", no_wrap=True,
                         justify="left" if is_text((name, source)) else "right")
    for cells in sheet.rows:
        table.add_row(*map(escape, cells))
    return table


def is_text(column):
    return column in (("", ""), ("collectives", "counted"), ("parameters/gradients", ""), ("formula", ""),
                      ("went on from", ""))


def dim(text):
    return f"[dim]{escape(text)}[/dim]"


def width(conditions):
    """Columns that the tables of a result are made for: on CUDA memory has one more."""
    return 110 if conditions.device == "cuda" else 100


def sheet_text(sheet, columns=100):
    """A sheet as it looks in a terminal of so many columns, without colours."""
    console = Console(file=io.StringIO(), width=columns, color_system=None, highlight=False)
    console.print(rich_table(sheet), "", *map(dim, sheet.notes), sep="\n")
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
