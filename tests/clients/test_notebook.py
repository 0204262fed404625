"""A notebook that starts its own workers."""

from pathlib import Path

import pytest

from tests.clients import digits

nbclient = pytest.importorskip("nbclient", reason="the extra fastps[clients] is not installed")
nbformat = pytest.importorskip("nbformat", reason="the extra fastps[clients] is not installed")

IMPORTED = """
import fastps
from tests.clients import digits
from tests.clients.test_multiprocessing import hogwild
model = digits.make_model()
fastps.spawn(hogwild, (model,), workers=2, model=model)
print(digits.accuracy(model))
"""

OWN = """
import fastps
from tests.clients import digits
model = digits.make_model()
def train(rank, model):
    optimizer = fastps.DistributedOptimizer(digits.make_sgd(model), sync="asp")
    digits.train(model, optimizer, rank, 2)
try:
    fastps.spawn(train, (model,), workers=2, model=model)
except fastps.UsageError as error:
    print(error)
fastps.spawn(train, (model,), workers=2, model=model, start_method="fork")
print(digits.accuracy(model))
"""


def _printed(cell: str, folder: Path) -> list[str]:
    (folder / "tests").symlink_to(Path(__file__).parents[1])
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    return "".join(output["text"] for output in notebook.cells[0].outputs if output.get("name") == "stdout").splitlines()


def test_imported_function_trains_in_workers_of_a_notebook(tmp_path: Path) -> None:
    (accuracy,) = _printed(IMPORTED, tmp_path)
    assert float(accuracy) >= digits.least_accuracy()


def test_function_of_a_cell_is_refused_in_one_sentence_and_trains_by_fork(tmp_path: Path) -> None:
    sentence, accuracy = _printed(OWN, tmp_path)
    assert "start_method='fork'" in sentence
    assert float(accuracy) >= digits.least_accuracy()
