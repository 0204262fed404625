"""With `--complete`, a run fails if a test was skipped for want of something that can be installed."""

from typing import Any

_MAY_BE_SKIPPED = (
    "GPU here",
    "needs two cores",
    "nvcc is not installed",
    "nvdisasm is not installed",
    "needs the failpoint build",  # another run of the same slice has it
    "this kernel",
    "no memory control group can be made here",
    "network namespaces are not allowed here",
    "only root can become another user",
    "sshd does not run here",
)
"""What a test may lack on a machine on which everything is installed, as its reason says."""


def missing(reports: list[Any]) -> list[str]:
    """The skipped tests, and why, that lack what can be installed."""
    found = []
    for report in reports:
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not any(part in reason for part in _MAY_BE_SKIPPED):
            found.append(f"{report.nodeid}: {reason}")
    return found
