"""Compute-time models as text, such as "lognormal:10ms,0.3", for the options of `fastps simulate`."""

from pathlib import Path

from fastps.errors import UsageError
from fastps.lab.virtual.units import read_ns
from fastps.simulation.simulate import ComputeModel

USAGE = {
    "constant": "constant:TIME",
    "normal": "normal:MEAN,DEVIATION",
    "lognormal": "lognormal:MEDIAN,SIGMA",
    "pareto": "pareto:LEAST,SHAPE",
    "replay": "replay:FILE",
}


def parse_compute(text: str) -> ComputeModel:
    """Read a model such as "lognormal:10ms,0.3". Raises UsageError.

    A file for "replay" has one line of times with units for all workers, or one for each.

    >>> parse_compute("normal:10ms,500us").spread
    500000.0
    """
    kind, _, rest = text.partition(":")
    if kind not in USAGE:
        raise UsageError(f"--compute: expected one of {', '.join(USAGE.values())}, found {text!r}")
    if kind == "replay":
        return ComputeModel("replay", 0.0, 0.0, replay=_read_times(Path(rest)))
    parts = rest.split(",")
    if len(parts) != (1 if kind == "constant" else 2):
        raise UsageError(f"--compute: expected {USAGE[kind]}, found {text!r}")
    spread = 0.0
    if kind == "normal":
        spread = read_ns("--compute", parts[1])
    elif kind != "constant":
        try:
            spread = float(parts[1])
        except ValueError:
            raise UsageError(f"--compute: expected {USAGE[kind]} with a number, found {text!r}") from None
    model = ComputeModel(kind, read_ns("--compute", parts[0]), spread)
    model.build(1, 0)
    return model


def _read_times(file: Path) -> list[list[int]]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--compute replay: expected a text file of times, found {file}: {error}") from None
    found = [[round(read_ns("--compute replay", time)) for time in line.split()] for line in lines if line.strip()]
    if not found:
        raise UsageError(f"--compute replay: expected a line of times such as 10ms 12ms, found none in {file}")
    return found
