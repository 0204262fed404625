"""These tests train and evaluate with one thread, so that sums have one order, and without a launcher's variables."""

from tests.support.torch_optimizers import alone as alone
