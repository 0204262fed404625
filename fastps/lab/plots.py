"""Plots of runs. matplotlib is imported only when a plot is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastps.errors import UsageError
from fastps.system.extras import how_to_install

if TYPE_CHECKING:
    from fastps.lab.stragglers import Arrival

Row = dict[str, Any]
Line = tuple[str, Sequence[tuple[float, float]]]
"""A line's name and its points."""
_DASHES, _MARKS = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v", "x", "*")
# Of Okabe and Ito, which all kinds of colour vision tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
_OF_A_PAPER = (3.4, 2.5)  # inches: a column of a page with two


def check_picture(file: Path, option: str) -> None:
    """Raise UsageError, naming the option, if no such picture can be drawn here."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise UsageError(f"{option} needs matplotlib: {how_to_install('demo')}") from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise UsageError(f"{option} {file}: expected a file whose name ends with one of .{', .'.join(known)}")


def plot_accuracy(rows: Sequence[Row], file: Path) -> None:
    """Draw test accuracy over seconds, a line a run. Raises UsageError."""
    lines = [(row["sync"], [(at_s, 100 * share) for at_s, share in row["accuracy_over_time"]]) for row in rows]
    ranges = [[(100 * least, 100 * most) for least, most in row.get("accuracy_range", ())] for row in rows]
    save_lines(lines, "seconds", "test accuracy, %", file, ranges)


def plot_arrivals(rows: "Sequence[Arrival]", file: Path) -> None:
    """Draw which share of the versions had their k-th gradient after so many milliseconds, a line a k. Raises UsageError."""
    lines = [(f"k = {row.k}", [(1e3 * at_s, 100 * share) for at_s, share in row.cdf]) for row in shown_of(rows)]
    y = "versions whose k-th gradient has come, %"
    save_lines(lines, "ms from the version's beginning", y, file, xscale="log", drawstyle="steps-post")


def plot_staleness(rows: Sequence[Row], file: Path) -> None:
    """Draw the share of folded pushes over their staleness, a line a policy. Raises UsageError."""
    lines: list[Line] = []
    for row in rows:
        folded = sum(count for _, count in row["staleness"])
        lines.append((row["sync"], [(versions, 100 * count / folded) for versions, count in row["staleness"]]))
    save_lines(lines, "staleness, versions", "folded pushes, %", file, yscale="log")  # bsp has all of them in one place


def shown_of(rows: "Sequence[Any]") -> list[Any]:
    """All rows when they are few; else the first, the middle, that at nine tenths and the last four, as in the paper."""
    if len(rows) <= 8:
        return list(rows)
    chosen = {0, len(rows) // 2, 9 * len(rows) // 10, *range(len(rows) - 4, len(rows))}
    return [rows[index] for index in sorted(chosen)]


def save_lines(
    lines: Sequence[Line],
    x: str,
    y: str,
    file: Path,
    ranges: Sequence[Sequence[tuple[float, float]]] = (),
    *,
    xscale: str = "linear",
    yscale: str = "linear",
    drawstyle: str = "default",
) -> None:
    """Draw lines into one pair of axes, and write the picture; `ranges` are drawn as bands around them. Raises UsageError.

    Lines differ in colour, dashes and marks. A PDF or SVG has the width of a paper's column.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    is_of_a_paper = file.suffix.lower() in (".pdf", ".svg", ".eps")
    with rc_context({"font.size": 8} if is_of_a_paper else {}):
        figure = Figure(figsize=_OF_A_PAPER if is_of_a_paper else (8, 5), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(lines):
            dashes, mark = _DASHES[number % len(_DASHES)], _MARKS[number % len(_MARKS)]
            at, values = [point[0] for point in points], [point[1] for point in points]
            every = max(1, len(at) // 20)
            style: dict[str, Any] = {
                "color": _COLOURS[number % len(_COLOURS)],
                "linestyle": dashes,
                "marker": mark,
                "markersize": 4,
                "markevery": every,
                "drawstyle": drawstyle,
            }
            (drawn,) = axes.plot(at, values, label=name, **style)
            if number < len(ranges) and ranges[number]:
                least, most = zip(*ranges[number], strict=True)
                axes.fill_between(at, least, most, color=drawn.get_color(), alpha=0.15, linewidth=0)
        axes.set(xlabel=x, ylabel=y, xscale=xscale, yscale=yscale)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        try:
            figure.savefig(file)
        except (OSError, ValueError) as error:
            raise UsageError(f"--plot {file}: the picture cannot be written: {error}") from None
