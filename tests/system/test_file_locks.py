"""A lock that another process keeps is waited for until it is free, or until the limit."""

import os
import threading
from pathlib import Path

import pytest

from fastps.system.file_locks import lock


def test_a_lock_is_waited_for_until_it_is_free_or_the_limit_has_passed(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    lock(first, 1)
    with pytest.raises(TimeoutError, match=r"another process has written there for more than 0.1 s"):
        lock(second, 0.1)
    releases = threading.Timer(0.1, os.close, (first,))
    releases.start()
    lock(second, 60)
    releases.join()
    os.close(second)
