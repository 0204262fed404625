"""Plots of runs. matplotlib is imported only when a plot is asked for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastps.errors import UsageError
from fastps.system.extras import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fastps.advice.stragglers import Arrival
    from fastps.cli.report import Row


def plot_accuracy(rows: "Sequence[Row]", file: Path) -> None:
    """Draw test accuracy over seconds, a line a run. Raises UsageError."""

    def draw(axes: "Axes") -> None:
        for row in rows:
            points = row["accuracy_over_time"]
            axes.plot([point[0] for point in points], [100 * point[1] for point in points], marker="o", label=row["sync"])
        axes.set_xlabel("seconds")
        axes.set_ylabel("test accuracy, %")

    save_picture(draw, file)


def plot_arrivals(rows: "Sequence[Arrival]", file: Path) -> None:
    """Draw which share of the versions had their k-th gradient after so many milliseconds, a line a k. Raises UsageError."""

    def draw(axes: "Axes") -> None:
        for row in shown_of(rows):
            axes.step(
                [1e3 * point[0] for point in row.cdf], [100 * point[1] for point in row.cdf], where="post", label=f"k = {row.k}"
            )
        axes.set_xscale("log")
        axes.set_xlabel("ms from the version's beginning")
        axes.set_ylabel("versions whose k-th gradient has come, %")

    save_picture(draw, file)


def shown_of(rows: "Sequence[Any]") -> list[Any]:
    """All rows when they are few; else the first, the middle, that at nine tenths and the last four, as in the paper."""
    if len(rows) <= 8:
        return list(rows)
    chosen = {0, len(rows) // 2, 9 * len(rows) // 10, *range(len(rows) - 4, len(rows))}
    return [rows[index] for index in sorted(chosen)]


def save_picture(draw: "Callable[[Axes], None]", file: Path) -> None:
    """Draw into one pair of axes and write the picture. Raises UsageError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(f"--plot needs matplotlib: {how_to_install('demo')}") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {file}: the picture cannot be written: {error}") from None
