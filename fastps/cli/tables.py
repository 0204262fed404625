"""Tables on a terminal, and tab-separated rows elsewhere. No header and no value is cut, whatever the width."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_BORDER = 3  # between two columns


@dataclass(frozen=True)
class Column:
    """A column of a table; `wide` ones are left out where the table does not fit the width, unless all are asked for."""

    heading: str
    wide: bool = False
    left: bool = False


def show(
    console: Console,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    wide: bool = False,
    marked: Sequence[int] = (),
) -> None:
    """Print a table.

    A table that is too wide for the terminal loses its wide columns first, unless `wide` asks for them; one that is still too
    wide is printed as a block of lines for each row. Where there is no terminal, rows are tab-separated with all columns.

    Args:
        console: what is printed to.
        title: the line above the table.
        columns, rows: the headings, and the cells of each row in the same order.
        wide: whether columns that do not fit are shown, too.
        marked: the rows in bold.
    """
    if not console.is_terminal:
        lines = [[column.heading for column in columns], *rows]
        text = "\n".join("\t".join(cell.replace("\n", " ") for cell in line) for line in lines)
        console.print(Text(f"# {title}\n{text}"), soft_wrap=True)
        return
    console.print(table_of(console.width, title, columns, rows, wide=wide, marked=marked))


def table_of(
    width: int,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    wide: bool = False,
    marked: Sequence[int] = (),
) -> "Table | Text":
    """The table, or the blocks, that `show` prints at a width."""
    chosen = range(len(columns))
    if not wide and _width_of(columns, rows, chosen) > width:
        chosen = [index for index in chosen if not columns[index].wide]  # type: ignore[assignment]
    if _width_of(columns, rows, chosen) > width:
        return _blocks(title, columns, rows, chosen)
    hidden = len(columns) - len(chosen)
    table = Table(title=title, caption=f"{hidden} more columns: --wide" if hidden else None, title_justify="left")
    for index in chosen:
        is_text = columns[index].left or any(" " in row[index].strip() for row in rows)
        table.add_column(Text(columns[index].heading), justify="left" if is_text or index == 0 else "right", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*(Text(row[index]) for index in chosen), style="bold" if number in marked else None)
    return table


def _width_of(columns: Sequence[Column], rows: Sequence[Sequence[str]], chosen: Sequence[int]) -> int:
    widths = (max(cell_len(line) for cell in _cells(columns, rows, index) for line in cell.split("\n")) for index in chosen)
    return sum(width + _BORDER for width in widths) + 1


def _cells(columns: Sequence[Column], rows: Sequence[Sequence[str]], index: int) -> list[str]:
    return [columns[index].heading, *(row[index] for row in rows)]


def _blocks(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], chosen: Sequence[int]) -> Text:
    """A block of lines a row: the first cell, then each other one behind its heading, folded at words."""
    first, *others = chosen
    lines = [title]
    for row in rows:
        lines.append(f"{columns[first].heading}: {row[first]}")
        lines += [f"  {columns[index].heading}: {row[index]}" for index in others]
    return Text("\n".join(lines), overflow="fold")
