"""Configurations side by side in the terminal: a column each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from moonpool.report.rows import COMPARED, Column, differences, sections, show_difference


def figures(columns: Sequence[Column]) -> Table:
    table = _table(columns)
    for rows in sections(columns):
        for row in rows:
            table.add_row(row.name, *(row.cell(column.runs) for column in columns))
        table.add_section()
    return table


def compared(columns: Sequence[Column]) -> Table:
    """What the others have more than the first, seed by seed."""
    table = _table(columns[1:])
    found = {(each.name, each.figure): each for each in differences(columns)}
    for row in COMPARED:
        table.add_row(
            row.name, *(escape(show_difference(row, found.get((column.name, row.name)))) for column in columns[1:])
        )
    return table


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(escape(column.name), justify="right")
    return table
