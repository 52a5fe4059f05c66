"""Layout of a table: a row a line, or a cell a line where the terminal is too narrow for that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

#: Characters between two columns, and least ones of the column that breaks lines.
_BETWEEN, _NARROWEST = 3, 10


def table(*columns: tuple[str, Any], wraps: str = "component") -> Table:
    """An empty table with these columns and justifications; column `wraps` may break lines.

    Where the terminal is too narrow for the others, each cell has a line of its own, after the name
    of its column: rich would cut cells off, so that "24 MB" is "24 M".
    """
    from rich import box
    from rich.table import Table

    class Stacking(Table):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            if _least_width(self, console) <= options.max_width:
                yield from super().__rich_console__(console, options)
                return
            for row in zip(*(column.cells for column in self.columns), strict=True):
                yield pairs((str(column.header), cell) for column, cell in
                            zip(self.columns, row, strict=True) if cell)  # fmt: skip
                yield ""

    made = Stacking(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name, justify in columns:
        made.add_column(name, justify=justify, no_wrap=name != wraps, overflow="fold")
    return made


def _least_width(wide: Table, console: Console) -> int:
    """Characters of the columns that do not break lines, and some of the one that does."""
    widths = (
        max(console.measure(cell).maximum for cell in (column.header, *column.cells))
        if column.no_wrap
        else _NARROWEST
        for column in wide.columns
    )
    return sum(widths) + _BETWEEN * (len(wide.columns) - 1)


def pairs(rows: Iterable[tuple[str, Any]]) -> Table:
    """Names and their values, a line each; a value may break lines."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made
