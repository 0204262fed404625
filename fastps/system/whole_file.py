"""Files that are replaced as a whole: whatever happens, a reader finds the file before or the new one, and never a part."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A stream whose contents replace the file once the block has ended, and are on the disk then. Raises OSError.

    If the block raises, the file stays as it is.
    """
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
