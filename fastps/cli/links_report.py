"""The report of `fastps doctor --nodes`: a table of links, and the file of it as commands read it again."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastps.cli.tables import Column, Rows
from fastps.errors import UsageError

if TYPE_CHECKING:
    from fastps.diagnostics.links import MeasuredLink
    from fastps.simulation.links import MeasuredLinks, ModelOnNodes


def links_table(links: "Sequence[MeasuredLink]") -> Rows:
    """Make a table with one row per link. Rates are of floats as a job sends them; MB are millions of bytes."""
    cells = []
    for link in links:
        rates = link.rates
        speeds = (rates.up_bytes_s, rates.down_bytes_s, rates.both_bytes_s, rates.together_bytes_s)
        times = (rates.round_trip_ns, rates.round_trip_p95_ns, rates.small_round_trip_ns)
        shown = [f"{speed / 1e6:.1f}" for speed in speeds] + [f"{time / 1e6:.2f}" for time in times]
        cells.append([str(link.node), link.machine, link.address, *shown])
    headings = (
        "to node 0, MB/s",
        "from node 0",
        "both at once, each",
        "all nodes at once",
        "round trip, ms",
        "95%",
        "100 kB, ms",
    )
    columns = [Column("node"), Column("machine", left=True), Column("address", left=True), *map(Column, headings)]
    return Rows("links to node 0", columns, cells)


def parameters_of(text: str) -> int:
    """The parameters that a text gives: a number such as 25e6, or a checkpoint. Raises UsageError, CheckpointError."""
    if Path(text).exists():
        from fastps.checkpoint.loading import load

        return sum(array.size for array in load(text).weights().values())
    try:
        number = float(text)
    except ValueError:
        raise UsageError(f"--parameters: expected a number such as 25e6 or a checkpoint, found {text!r}") from None
    if not (number.is_integer() and number >= 1):
        raise UsageError(f"--parameters: expected a whole number of 1 or more, found {text!r}")
    return int(number)


def links_of(
    file: Path, parameters: str | None, nodes: int, link_dtype: str, homes: str
) -> "tuple[MeasuredLinks, ModelOnNodes]":
    """The measured links of a file, and the model that travels on them. Raises UsageError, CheckpointError."""
    from fastps.simulation.links import ModelOnNodes, read_links

    if parameters is None:
        raise UsageError("--links: expected --parameters beside it, such as 25e6, or a checkpoint")
    return read_links(file), ModelOnNodes(parameters_of(parameters), nodes, link_dtype, homes)
