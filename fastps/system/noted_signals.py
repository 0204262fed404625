"""Signals that would end this process are noted, so that it ends between two steps."""

import os
import signal
import threading


class EndedBySignalError(SystemExit):
    """Ends the program in order, with the exit code of a shell for the signal: its workers leave, as at its end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class NotedSignals:
    """Notes signals until `close`. The program's own handlers stay, and nothing is noted outside of the main thread.

    >>> noted = NotedSignals(signal.SIGUSR2)
    >>> signal.raise_signal(signal.SIGUSR2)
    >>> noted.take(signal.SIGUSR2), noted.take(signal.SIGUSR2), noted.close()
    (True, False, None)
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._came: set[int] = set()
        self._process = os.getpid()
        in_main = threading.current_thread() is threading.main_thread()
        self._noted = [number for number in numbers if in_main and signal.getsignal(number) is signal.SIG_DFL]
        for number in self._noted:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if os.getpid() == self._process:
            self._came.add(number)
        else:  # a forked child has inherited the handler, and ends as without it
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def take(self, number: signal.Signals) -> bool:
        """Whether a signal has come since it was last taken."""
        has_come = number in self._came
        self._came.discard(number)
        return has_come

    def close(self) -> None:
        """Give the signals that are still noted back their default action."""
        if threading.current_thread() is threading.main_thread():
            for number in self._noted:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL)
