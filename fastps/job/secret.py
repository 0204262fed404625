"""The secret of a job of several nodes: a text that all nodes are given, and that no message contains.

It never appears in an error, in a representation, or among the arguments of a process.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastps.errors import UsageError

VARIABLE = "FASTPS_SECRET"
SHORTEST = 16  # characters
HOW_TO_GIVE = f"give all nodes the same {VARIABLE} or --secret-file"


@dataclass(frozen=True)
class Secret:
    """A job's secret.

    >>> Secret(b"a secret that nobody sees")
    Secret()
    """

    key: bytes = field(repr=False)


def secret_of_text(text: str, where: str) -> Secret:
    """The secret in a text that was found somewhere. Raises UsageError if it is too short.

    >>> secret_of_text("0123456789abcdef", "here").key
    b'0123456789abcdef'
    """
    if len(text) < SHORTEST:
        raise UsageError(
            f"{where}: expected a secret of at least {SHORTEST} characters, found {len(text)}; make one by"
            " python -c 'import secrets; print(secrets.token_hex())'"
        )
    return Secret(os.fsencode(text))


def secret_of_environment(variables: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret of this process's job; None if it has none. Raises UsageError if it is too short."""
    return secret_of_text(variables[VARIABLE], VARIABLE) if VARIABLE in variables else None


def secret_of_file(file: Path) -> Secret:
    """The secret in a file, without the spaces and line ends around it.

    Raises UsageError if the file cannot be read, if other users may read it, or if the secret is too short.
    """
    where = f"--secret-file {file}"
    try:
        with file.open(encoding="utf-8") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{where}: expected a file with the job's secret, found none that can be read ({reason})") from None
    if mode & 0o077:
        raise UsageError(
            f"{where}: expected a file that only its owner may read, found mode {mode:04o}; run chmod 600 {file}, and make a"
            " new secret if others may have read it"
        )
    return secret_of_text(text, where)
