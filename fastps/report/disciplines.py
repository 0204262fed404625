"""The plot of what other disciplines would have given, by a replay of the run's steps, beside what bounds the run."""

from fastps.advice.replay import limits, steady_part
from fastps.errors import Error
from fastps.report.figure import Figure, Table, bars, line_at, number_text, rounded, rows_layout
from fastps.report.findings import Facts
from fastps.tracing.summary import Row

_MOST_BARS = 14
_HOVER = (
    "%{y}: %{x:.1f} useful steps/s<br>staleness %{customdata[0]:.2f}, waiting %{customdata[1]:.0f} %,"
    " dropped %{customdata[2]:.0f} %"
)
_HEADINGS = ("--sync", "useful steps/s", "speed", "staleness", "waiting", "dropped")
_LINE = 15  # pixels between the names of two bounds


def disciplines(facts: Facts) -> Figure | None:
    """Return the plot, or None if there was no replay."""
    rows = list(facts.advice)
    if len(rows) < 2:
        return None
    own = str(facts.trace.header["policy"].get("spec"))
    shown = [row for number, row in enumerate(rows) if number < _MOST_BARS or row["sync"] == own or row["recommended"]]
    drawn = bars(
        [_label(row, own) for row in shown],
        [row["useful_steps_per_s"] for row in shown],
        [_colour(row, own) for row in shown],
        _HOVER,
        customdata=[rounded([row["staleness_mean"], 100 * row["wait_share"], 100 * row["dropped_share"]]) for row in shown],
    )
    bounds = _bounds(facts)
    lines = [line_at("x", value, name, "ink", _LINE * number) for number, (name, value) in enumerate(bounds)]
    chosen = next(row for row in rows if row["recommended"])
    text = "".join(f" {name[0].upper()}{name[1:]}: {number_text(value)} steps/s." for name, value in bounds)
    replayed, made = len(steady_part(facts.trace).steps), len(facts.trace.steps)
    return Figure(
        "disciplines",
        "What other disciplines would have given",
        f"Recommended: --sync {chosen['sync']}, {chosen['reason']}.",
        f"Bars: useful steps per second of each discipline, the fastest first.{text}",
        {
            "data": [drawn],
            "layout": rows_layout(
                "useful steps/s, predicted",
                margin={"t": 20 + _LINE * len(bounds)},
                shapes=[shape for shape, _ in lines],
                annotations=[name for _, name in lines],
            ),
        },
        90 + 24 * len(shown) + _LINE * len(bounds),
        _table(rows, own),
        f"A replay in virtual time of the {replayed:,} steps, of {made:,}, that were made while all workers were at work, under"
        f" the scheduler that the store runs. It does not predict what staleness does to the loss.{text}",
    )


def _label(row: Row, own: str) -> str:
    if row["sync"] == own:
        return f"<b>{row['sync']}</b> (this run)"
    return f"<b>{row['sync']}</b> ✓" if row["recommended"] else str(row["sync"])


def _colour(row: Row, own: str) -> str:
    return "var(--wait)" if row["sync"] == own else "var(--fold)" if row["recommended"] else "var(--muted-bar)"


def _table(rows: list[Row], own: str) -> Table:
    cells = []
    for row in rows:
        name = row["sync"] + (" (recommended)" if row["recommended"] else "") + (" (this run)" if row["sync"] == own else "")
        shares = [f"{row[key]:.0%}" for key in ("wait_share", "dropped_share")]
        cells.append([name, f"{row['useful_steps_per_s']:.1f}", f"{row['speed']:.0%}", f"{row['staleness_mean']:.2f}", *shares])
    return Table(_HEADINGS, cells, [number for number, row in enumerate(rows) if row["recommended"]])


def _bounds(facts: Facts) -> list[tuple[str, float]]:
    """The bounds that a reader may compare with: what the run made, what the cores allow."""
    try:
        rows = limits(facts.trace)
    except Error:
        return []
    names = {"measured": "measured", "cores": "limit of the cores"}
    return [(text, float(rows[name]["steps_per_s"])) for name, text in names.items() if name in rows]
