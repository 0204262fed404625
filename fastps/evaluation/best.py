"""The best version so far: its metric, its checkpoint, and how many evaluations have not been better since."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fastps.errors import UsageError
from fastps.evaluation.options import EvaluationOptions
from fastps.evaluation.rows import Row, metrics_of
from fastps.system.whole_file import replacing


class Best:
    """Compares each version with the best before. `earlier`: rows of an evaluation that this one goes on with."""

    def __init__(self, options: EvaluationOptions, earlier: Iterable[Row]) -> None:
        self.row: Row | None = None
        self._options = options
        self._without = 0  # evaluations since the best
        for row in earlier:
            self._compare(row)

    def take(self, row: Row, model: torch.nn.Module) -> bool:
        """Note in the row whether it is the best so far, and then keep the model. Returns whether patience has run out.

        Raises UsageError if the row lacks the metric or the checkpoint cannot be written.
        """
        if not self._options.metric:
            return False
        if self._options.metric not in row:
            found = ", ".join(metrics_of(row)) or "none"
            raise UsageError(f"metric {self._options.metric!r}: expected it in what evaluate() returns, found {found}")
        row["is_best"] = self._compare(row)
        if row["is_best"] and self._options.best:
            save(model, Path(self._options.best))
        return bool(self._options.patience) and self._without >= self._options.patience

    def _compare(self, row: Row) -> bool:
        value = row.get(self._options.metric)
        before = self.row[self._options.metric] if self.row else None
        is_better = value is not None and math.isfinite(value)
        if is_better and before is not None:
            is_better = value > before if self._options.mode == "max" else value < before
        self._without = 0 if is_better else self._without + 1
        if is_better:
            self.row = row
        return is_better


def save(model: torch.nn.Module, file: Path) -> None:
    """Write the model's state_dict on the CPU, as `torch.load` reads it, in place of the file before: old or new, never a part.

    Raises UsageError.
    """
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.detach().cpu().clone()  # a view would be written with all of the memory that it shows
    try:
        with replacing(file) as stream:
            torch.save(state, stream)
    except OSError as error:
        raise UsageError(f"best {file}: expected a file that can be written, found: {error.strerror}") from None
