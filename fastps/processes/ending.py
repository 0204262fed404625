"""How a group of processes ends: what goes on to them of the signals that come, how long they may save, and what kills them.

The first SIGINT or SIGTERM reaches the members as it came, and gives them a grace in which they save; then SIGKILL ends them.
A second one ends them at once. When a member fails, the others have a moment to end by themselves, then SIGTERM and the same
grace. The members are workers of this machine, or hosts of which each does the same with its own.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from fastps.system.clock import Clock
from fastps.system.processes import start_child

logger = logging.getLogger("fastps.launch")

_ENDS = (signal.SIGINT, signal.SIGTERM)
_PASSED_ON = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_WATCHED = (*_ENDS, *_PASSED_ON, signal.SIGRTMIN)
_ANSWER_S = 1.0
_SURVIVORS_S = 2.0  # for the others to end by themselves after a failure, and between two SIGKILLs
_ON_GPUS_NS = 3_000_000_000  # the grace after a failure, where shards are on GPUs
_SAY_NS = 1_000_000_000  # members that still run so long after a signal are worth a line
_AGAIN_NS = 1_000_000_000  # a second SIGTERM within this time is the first, sent by two
_PROBE_NS = 100_000_000  # within which a signal to every process of the job has reached each


class Member(Protocol):
    """A process of the group, or one that stands for several on another host."""

    exit_code: int | None  # None while it runs
    replaced_ns: int  # when it took the place of a member that was lost; 0: it did not

    @property
    def name(self) -> str:
        """What messages call it."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended. SIGTSTP stops, and SIGCONT wakes, what it has started, too."""


@contextlib.contextmanager
def _handling(numbers: Iterable[signal.Signals], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Within this context `handler` gets these signals. Those that the caller's shell has set to be ignored stay ignored."""
    previous = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, before in previous.items():
            if before is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            if before is not None:
                signal.signal(number, before)


class Ending:
    """Passes signals on to the members that run, and ends them."""

    def __init__(self, members: Sequence[Member], grace_s: float, clock: Clock, survivors_s: float = _SURVIVORS_S) -> None:
        """`members` is the caller's own list, which grows."""
        self.interrupts = 0  # how often SIGINT or SIGTERM came
        self.number = 0  # the first of them that was obeyed
        self.probe_id = 0  # the process id of the probe, if there is one
        self._members = members
        self._grace_ns, self._survivors_ns = int(grace_s * 1e9), int(survivors_s * 1e9)
        self._clock = clock
        self._arrived: deque[signal.Signals] = deque()
        self._due: deque[tuple[int, signal.Signals]] = deque()  # to pass on, and when
        self._probe: SignalProbe | None = None
        self._are_on_gpus = False
        self._began_ns = 0  # when the first signal to end came
        self._term_at_ns = self._say_at_ns = self._kill_at_ns = 0  # 0: never

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within this context signals wait for `obey`."""
        with _handling([*_ENDS, *_PASSED_ON, signal.SIGTSTP, signal.SIGCONT], self.note):
            with contextlib.closing(SignalProbe()) as self._probe:
                self.probe_id = self._probe.process_id
                yield

    def note(self, number: int, frame: object) -> None:
        """The handler of all signals. It logs nothing: a signal may come within a call of the logger."""
        self._arrived.append(signal.Signals(number))
        self.interrupts += number in _ENDS

    def begin(self, *, are_on_gpus: bool = False) -> None:
        """Let all end, because one has failed. `are_on_gpus`: whether others may wait, deaf to signals, for its GPU work."""
        if not self._term_at_ns and not self._kill_at_ns:
            self._term_at_ns = self._clock.now_ns() + self._survivors_ns
            self._are_on_gpus = are_on_gpus
            self._grace_ns = min(self._grace_ns, _ON_GPUS_NS) if are_on_gpus else self._grace_ns

    def obey(self) -> None:
        """Do what the signals since the last call ask for, and what the time has come for."""
        now_ns = self._clock.now_ns()
        while self._arrived:
            number = self._arrived.popleft()
            if number in _ENDS and self.number:
                if number == signal.SIGINT or now_ns - self._began_ns > _AGAIN_NS:
                    self._kill_at_ns = now_ns
            elif number in _ENDS:
                self.number, self._began_ns, self._term_at_ns = number, now_ns, 0
                self._due.append((now_ns + _PROBE_NS, number))
                self._await(now_ns)
            elif number == signal.SIGTSTP:
                self._send(number)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                self._send(number)
                if self._kill_at_ns:  # the time that they stood still is no part of their grace
                    self._await(now_ns)
            else:
                self._due.append((now_ns + _PROBE_NS, number))
        while self._members and self._due and now_ns >= self._due[0][0]:  # until the first has begun, signals wait
            self._pass_on(self._due.popleft()[1], now_ns)
        self._enforce(now_ns)

    def _await(self, now_ns: int) -> None:
        self._say_at_ns, self._kill_at_ns = now_ns + _SAY_NS, now_ns + self._grace_ns

    def _pass_on(self, number: signal.Signals, now_ns: int) -> None:
        """Send a signal, except to members that had it: a second one would interrupt what the first made them do."""
        has_come = self._probe is not None and self._probe.has_seen(number)
        for member in self._running:
            is_new = member.replaced_ns and now_ns - member.replaced_ns < _AGAIN_NS  # the signal has ended the one before it
            if not has_come or is_new:
                member.send(number)

    def _enforce(self, now_ns: int) -> None:
        if self._term_at_ns and now_ns >= self._term_at_ns:
            self._term_at_ns = 0
            self._send(signal.SIGTERM)
            self._await(now_ns)
        if self._kill_at_ns and now_ns >= self._kill_at_ns:
            self._say_at_ns, self._kill_at_ns = 0, now_ns + self._survivors_ns
            if self._are_on_gpus and (names := ", ".join(member.name for member in self._running)):
                logger.warning("killed %s, deaf to SIGTERM: the GPU may wait for work of the process that has ended", names)
            self._send(signal.SIGKILL)
        if self._say_at_ns and now_ns >= self._say_at_ns:
            self._say_at_ns = 0
            if names := ", ".join(member.name for member in self._running):
                left_s = (self._kill_at_ns - now_ns) / 1e9
                logger.warning("waiting up to %.0f s for %s to save and end; Ctrl-C kills at once", left_s, names)

    @property
    def _running(self) -> list[Member]:
        return [member for member in self._members if member.exit_code is None]

    def _send(self, number: signal.Signals) -> None:
        for member in self._running:
            member.send(number)


class SignalProbe:
    """A process of its own group, which only gets the signals that every process of the job gets.

    SLURM's scancel and the kill of a control group reach the workers without the launcher. The probe tells the launcher so.
    """

    _PROGRAM = (
        "import os, signal, sys\nwatched = set(map(int, sys.argv[1:]))\nsignal.pthread_sigmask(signal.SIG_BLOCK, watched)\n"
        "while True: os.write(1, bytes([signal.sigwait(watched)]))"
    )

    def __init__(self) -> None:
        watched = (str(int(number)) for number in _WATCHED)
        command = [sys.executable, "-I", "-S", "-c", self._PROGRAM, *watched]
        self._process = start_child(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        self._reader = self._process.stdout
        self._seen: list[int] = []
        self.process_id = self._process.pid

    def has_seen(self, number: int) -> bool:
        """Whether a signal has come since it was last asked for. The probe reports a marker after all that came before it."""
        self._process.send_signal(signal.SIGRTMIN)
        while signal.SIGRTMIN not in self._seen and select.select([self._reader], [], [], _ANSWER_S)[0]:
            report = os.read(self._reader.fileno(), 4096)
            self._seen += report
            if not report:
                return self._process.wait() == -number  # it had not begun to watch
        has_come = number in self._seen
        self._seen = [other for other in self._seen if other not in (number, signal.SIGRTMIN)]
        return has_come

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.close()
