"""Tables on a terminal, and tab-separated rows elsewhere. No header and no value is cut, whatever the width."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
_BORDER = 3  # between two columns


@dataclass(frozen=True)
class Column:
    """A column: its heading, and which value of a row it shows."""

    heading: str
    value: str | Callable[[Any], object] = ""  # the value's key, or a function of the row; by default the key is the heading
    form: str = ""  # the value's format, as in an f-string
    unit: float = 1  # what a number is divided by
    missing: str = "-"  # the cell of a value that is None
    wide: bool = False  # whether it is left out where the table does not fit the width, unless all are asked for
    left: bool = False  # whether its cells begin at the left; the first column's always do

    def cell(self, row: Row) -> str:
        """The text of this column in a row.

        >>> Column("wait ms", "wait_s", ".1f", 1e-3).cell({"wait_s": 0.02}), Column("loss").cell({"loss": None})
        ('20.0', '-')
        """
        value: Any = self.value(row) if callable(self.value) else row[self.value or self.heading]
        if value is None:
            return self.missing
        return format(value if self.unit == 1 else value / self.unit, self.form)


@dataclass(frozen=True)
class Rows:
    """What a table shows."""

    title: str  # the line above the table
    columns: Sequence[Column]  # the first one names the row
    cells: Sequence[Sequence[str]]  # the cells of each row, in the order of the columns
    marked: Sequence[int] = ()  # the numbers of the rows in bold

    @classmethod
    def of(cls, title: str, columns: Sequence[Column], rows: Iterable[Row], marked: Sequence[int] = ()) -> "Rows":
        """The table of these rows, each of which has a value for every column."""
        return cls(title, columns, [[column.cell(row) for column in columns] for row in rows], marked)

    def at(self, width: int, wide: bool = False) -> "Table | Text":
        """The table at a width.

        Where it does not fit it loses its wide columns first, unless `wide` asks for them; a table that is still too wide
        becomes a block of lines for each row.

        >>> print(Rows("runs", [Column("sync"), Column("staleness")], [["dssp:3,15", "2.00"]]).at(12))
        runs
        sync: dssp:3,15
          staleness: 2.00
        """
        chosen = list(range(len(self.columns)))
        if not wide and self._width_of(chosen) > width:
            chosen = [index for index in chosen if not self.columns[index].wide]
        hidden = len(self.columns) - len(chosen)
        caption = f"{hidden} more with --wide" if hidden else None
        if self._width_of(chosen) > width:
            return self._blocks(chosen, caption)
        is_tall = any("\n" in row[index] for row in self.cells for index in chosen)
        table = Table(title=Text(self.title), caption=caption, title_justify="left", caption_justify="left", show_lines=is_tall)
        for index in chosen:
            column = self.columns[index]
            is_left = column.left or index == chosen[0]
            table.add_column(Text(column.heading), justify="left" if is_left else "right", no_wrap=True)
        for number, row in enumerate(self.cells):
            table.add_row(*(Text(row[index]) for index in chosen), style="bold" if number in self.marked else None)
        return table

    def _width_of(self, chosen: Sequence[int]) -> int:
        cells = [[self.columns[index].heading, *(row[index] for row in self.cells)] for index in chosen]
        return 1 + sum(_BORDER + max(cell_len(line) for cell in column for line in cell.split("\n")) for column in cells)

    def _blocks(self, chosen: Sequence[int], caption: str | None) -> Text:
        first, *others = chosen
        lines = [self.title]
        for row in self.cells:
            lines.append(f"{self.columns[first].heading}: {row[first]}")
            for index in others:  # a cell of several lines goes below its heading
                cell = row[index] if "\n" not in row[index] else "".join(f"\n    {line}" for line in row[index].split("\n"))
                lines.append(f"  {self.columns[index].heading}: {cell}")
        return Text("\n".join([*lines, *filter(None, [caption])]), overflow="fold")


def show(console: Console, rows: Rows, *, wide: bool = False) -> None:
    """Print a table that fits the terminal; where there is none, all columns of all rows, separated by tabs."""
    if console.is_terminal:
        console.print(rows.at(console.width, wide))
        return
    lines = [[column.heading for column in rows.columns], *rows.cells]
    shown = "\n".join("\t".join(" ".join(cell.split("\n")) for cell in line) for line in lines)
    console.file.write(f"# {rows.title}\n{shown}\n")


def say(console: Console, *lines: str, soft_wrap: bool = False) -> None:
    """Print lines as they are: brackets are no markup, and numbers have no colours."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=soft_wrap)
