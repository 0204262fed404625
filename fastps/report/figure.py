"""A plot as data: what plotly.js draws, and the same in words and numbers for readers who do not see it.

Colours are names of the page's style ("var(--compute)"); the page's script looks them up, in the light and in the dark.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Json = dict[str, Any]
_DOWN = {"autorange": "reversed"}  # the first row is on top
_MOST_NAMED = 12  # columns of a matrix whose cells have their numbers in them


@dataclass(frozen=True)
class Table:
    """Rows of text below headings; the first column names the row. `marked` rows stand out."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """One plot."""

    name: str  # its id on the page
    title: str  # what it shows, as a heading
    sentence: str  # what to see in it: the text beside the plot
    description: str  # the text in place of the plot
    spec: Json  # `data` and `layout` of plotly.js
    height: int  # in pixels
    table: Table | None = None  # the numbers, for readers of text
    note: str = ""  # how the numbers are made, or what they leave out
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the page's script needs to draw more than `spec`
    is_wide: bool = False  # whether it has a row of its own on a wide page


def paired(figures: Sequence[Figure]) -> list[Figure]:
    """Figures for a page of two columns: each that is not wide is as high as the one beside it; the last may be alone."""
    found, left = [], None
    for figure in figures:
        if figure.is_wide:
            found.append(figure)
        elif left is None:
            left = len(found)
            found.append(figure)
        else:
            height = max(found[left].height, figure.height)
            found[left], left = replace(found[left], height=height), None
            found.append(replace(figure, height=height))
    if left is not None:
        found[left] = replace(found[left], is_wide=True)
    return found


def packed(values: npt.ArrayLike, dtype: str) -> Json:
    """An array as plotly.js reads typed arrays: little endian, in base64.

    >>> packed([1, 2], "i2")
    {'dtype': 'i2', 'bdata': 'AQACAA=='}
    """
    array = np.ascontiguousarray(values, f"<{dtype}" if dtype not in ("u1", "i1") else dtype)
    return {"dtype": dtype, "bdata": base64.b64encode(array.tobytes()).decode()}


def rounded(values: npt.ArrayLike, digits: int = 4) -> list[float]:
    """Numbers with so many significant digits, for a small page.

    >>> rounded([0.123456, 1234.5678], 3)
    [0.123, 1230.0]
    """
    return [float(f"{value:.{digits}g}") for value in np.asarray(values, np.float64).ravel()]


def layout(x: str, y: str, **more: Any) -> Json:
    """A layout with titles of its axes and the page's colours; `more` wins, and adds to the axes key by key."""
    axis = {"gridcolor": "var(--line)", "zerolinecolor": "var(--line)", "linecolor": "var(--line)", "automargin": True}
    made: Json = {
        "xaxis": {**axis, "title": {"text": x, "standoff": 8}},
        "yaxis": {**axis, "title": {"text": y, "standoff": 8}},
        "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"bgcolor": "var(--panel)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "showlegend": False,
    }
    for name, value in more.items():
        made[name] = {**made[name], **value} if isinstance(made.get(name), dict) else value
    return made


def line_at(axis: str, value: float, text: str, colour: str, above: int = 0) -> tuple[Json, Json]:
    """A dashed line across the plot at a value of an axis ("x" or "y"), and its name at the line's end."""
    other = "y" if axis == "x" else "x"
    shape = {"type": "line", f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1, f"{axis}0": value, f"{axis}1": value}
    shape["line"] = {"color": f"var(--{colour})", "width": 1, "dash": "dot"}
    name: Json = {axis: value, other: 1, f"{other}ref": "paper", "text": text, "showarrow": False, "bgcolor": "var(--panel)"}
    name |= {"xanchor": "right", "yanchor": "bottom", "yshift": 1 + above, "font": {"color": f"var(--{colour})", "size": 11}}
    return shape, name


def rows_layout(x: str, **more: Any) -> Json:
    """A layout of horizontal bars or boxes, the first one on top."""
    return layout(x, "", yaxis=_DOWN, bargap=0.35, **more)


def bars(names: Sequence[str], values: npt.ArrayLike, colour: str | Sequence[str], hover: str, **more: Any) -> Json:
    """Horizontal bars, one for each name."""
    made: Json = {"type": "bar", "orientation": "h", "y": list(names), "x": rounded(values), "marker": {"color": colour}}
    return {**made, "hovertemplate": f"{hover}<extra></extra>", **more}


def heat_map(x: Sequence[str], y: Sequence[str], z: npt.NDArray[Any], unit: str, hover: str, title: str) -> Json:
    """A plot of a matrix, from pale to strong; small ones have their numbers in their cells. `title` is that of the columns."""
    spec: Json = {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": [rounded(row) for row in z],
        "colorscale": [[0, "var(--heat0)"], [0.5, "var(--heat1)"], [1, "var(--heat2)"]],
        "zmin": 0,
        "xgap": 2,
        "ygap": 2,
        "colorbar": {"title": {"text": unit}, "thickness": 10, "outlinewidth": 0},
        "hovertemplate": f"{hover}<extra></extra>",
    }
    if max(len(x), len(y)) <= _MOST_NAMED:
        spec |= {"texttemplate": "%{z:.2~f}", "showscale": False}
    return {"data": [spec], "layout": layout(title, "", yaxis=_DOWN, xaxis={"type": "category"})}


def lanes_height(count: int) -> int:
    """The height in pixels of a plot with a row for each of so many workers."""
    return int(np.clip(110 + 34 * count, 190, 900))


def seconds_text(seconds: float) -> str:
    """A duration for people.

    >>> [seconds_text(value) for value in (0.0000421, 0.0042, 0.42, 7.481, 200, 7300)]
    ['42.1 µs', '4.20 ms', '420 ms', '7.48 s', '3 min 20 s', '2 h 1 min']
    """
    if seconds < 0.9995e-3:
        return f"{1e6 * seconds:.3g} µs"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.3g} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2f} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def number_text(value: float) -> str:
    """A number for people, with three significant digits.

    >>> [number_text(each) for each in (0.0123, 3.14159, 2643.7, 1e6)]
    ['0.0123', '3.14', '2,644', '1,000,000']
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def listed(words: Sequence[str]) -> str:
    """Words as an enumeration.

    >>> listed(["1"]), listed(["1", "2"]), listed(["1", "2", "3"])
    ('1', '1 and 2', '1, 2 and 3')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
