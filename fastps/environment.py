"""Which worker this process is, and which job it belongs to: read from the environment that a launcher sets.

Understands fastps' own launcher and torchrun; without either, this process is alone. Refuses to change the environment.
"""

import hashlib
import os
import secrets

from fastps.errors import UsageError

TRACE_VARIABLE = "FASTPS_TRACE"  # the file that a launch records its trace into


def rank() -> int:
    """This worker's number, from 0; 0 when alone."""
    return _number("RANK", 0)


def world_size() -> int:
    """Number of workers of the job; 1 when alone."""
    return _number("WORLD_SIZE", 1)


def job_name(instance: int) -> str:
    """The name that all workers of this launch derive for their `instance`-th optimizer, and no other launch does.

    From FASTPS_JOB, else from torchrun's run id, address and restart count; random when alone.
    """
    own = os.environ.get("FASTPS_JOB")
    if own is None:
        keys = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        values = [os.environ.get(key, "") for key in keys]
        if not any(values[:3]):
            if world_size() > 1:
                raise UsageError(
                    f"WORLD_SIZE is {world_size()}, but neither FASTPS_JOB nor torchrun's variables say which job this is:"
                    " start with `fastps run -n N script.py` or torchrun, or set FASTPS_JOB to the same text for all"
                )
            return secrets.token_hex(8)
        own = hashlib.sha256("\0".join(values).encode()).hexdigest()[:16]
    return own if instance == 0 else f"{own}.{instance}"


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"expected the environment variable {name} to be a whole number, found {text!r}") from None
