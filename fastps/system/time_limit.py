"""A time limit for a call that may hang, such as one over a connection that is cut."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def call_within(timeout_s: float, call: Callable[[], Result], discard: Callable[[Result], None]) -> Result:
    """Call, and return the result or raise the error. After the timeout a later result is handed to `discard`.

    The call runs in a thread of its own, which lives on after the timeout. Raises TimeoutError.

    >>> call_within(1.0, lambda: 3, lambda late: None)
    3
    """
    lock = threading.Lock()
    ended = threading.Event()
    results: list[Result] = []
    errors: list[BaseException] = []
    late: list[bool] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        with lock:
            ended.set()
        if late:
            for result in results:
                discard(result)

    threading.Thread(target=run, name="fastps-time-limit", daemon=True).start()
    ended.wait(timeout_s)
    with lock:
        if not ended.is_set():
            late.append(True)
            raise TimeoutError(f"expected an answer within {timeout_s:g} s")
    if errors:
        raise errors[0]
    return results[0]
