"""A program that trains loads nothing of fastps.lab."""

import sys

import pytest

from tests.support.scripts import output

TRAINING = """
import sys, torch, fastps
model = torch.nn.Linear(4, 2)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="bsp", model=model)
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
optimizer.close()
sys.exit(", ".join(name for name in sys.modules if name.startswith("fastps.lab")) or 0)
"""


@pytest.mark.slow
def test_import_and_a_training_step_load_nothing_of_the_lab() -> None:
    output([sys.executable, "-c", TRAINING])
