"""A Ray cluster of one node, on this machine, for one test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SETTING = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_AUTH_MODE": "disabled"}
"""Ray reads some of these once in a process, so all tests have the same."""


@contextmanager
def cluster(ray: Any, **resources: int) -> Iterator[None]:
    """Start a cluster that no other process has started, and end it."""
    os.environ.update(SETTING)
    options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    ray.init(address="local", num_cpus=2, **options, **resources)
    try:
        yield
    finally:
        ray.shutdown()
