"""A launcher's presence at the rendezvous, in a thread: its signs of life, and how the nodes agree on the end of the job.

Each launcher counts up a number of its node, and node 0 notices a number that stands still. At its end each launcher reports
how its node ended. Node 0 waits for all reports, says how the job ended, and keeps the rendezvous until the others have read
that. A launcher that cannot reach the rendezvous of its job any more has lost node 0.
"""

import contextlib
import json
import threading
from collections.abc import Callable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastps.errors import TRY_AGAIN, AttachError
from fastps.network.place import End, Meeting, end_of_job
from fastps.network.tcp_store import connect_store, is_refused
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.time_limit import call_within

ENDED = 1 << 40  # more signs of life than any launcher gives
_BEAT_S = 1.0  # several while another launcher looks
_HASTY_S = 0.1  # between two looks at the end
_ANSWER_S = 5.0
_REFUSALS = 3  # in a row: nothing listens at the rendezvous any more
_REPORTS_S = 15.0  # for the others to report after node 0 was lost by them: they end their workers before
_READ_S = 2.0  # for the others to read how the job ended
_ENDS, _END = "ends", "end of job"
_LONGEST = 2000  # characters of a reason


def beats_key(node: int) -> str:
    """The key of a node's signs of life."""
    return f"beats/{node}"


def holder_key(node: int) -> str:
    """The key at which the launcher that is a node has its token."""
    return f"holder/{node}"


def report(store: Store, node: int, code: int, reason: str) -> None:
    """Report how a node ended."""
    store.set(f"end/{node}", json.dumps([code, reason, int(store.add(_ENDS, 1))]))


def forget(store: Store, node: int) -> None:
    """Take back the report of a node that comes again."""
    store.delete_key(f"end/{node}")


def reported(store: Store, node: int) -> End | None:
    """How a node ended; None before its report."""
    return _read(store, f"end/{node}")


def _read(store: Store, key: str) -> End | None:
    """An end at a key, at which anybody may have written; None if there is nothing."""
    if not store.check([key]):
        return None
    try:
        code, reason, order = json.loads(store.get(key))
    except (TypeError, ValueError):
        code = reason = order = None
    if not (type(code) is int and 0 <= code < 256 and isinstance(reason, str) and type(order) is int):
        return End(1, "it left a report that no launcher makes")
    return End(code, reason[:_LONGEST], order)


def of_launch(store: Store) -> Store:
    """What the launchers of a job share, from any connection to its rendezvous."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore("launch", store)


class _OthersError(Exception):
    """Another job meets at the rendezvous."""


class Presence(threading.Thread):
    """From when a node has its number, the thread that shows that its launcher lives. `end` frees the number.

    `on_loss` gets the reason if the job ends before this node does: node 0 or the rendezvous is lost, or node 0 says so. A look
    may fail, because the network is cut: the next one opens another connection.
    """

    def __init__(
        self, given: Meeting, number: int, holder: str, on_loss: Callable[[str], None], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(name="fastps-presence", daemon=True)
        self._given, self._number, self._holder = given, number, holder
        self._on_loss, self._clock = on_loss, clock
        self._store: Store | None = None
        self._wakes, self._has_parted, self._ends = threading.Event(), threading.Event(), threading.Event()
        self._own: End | None = None
        self._has_reported = False
        self._of_job: End | None = None
        self._decided_ns = self._reported_ns = 0
        self._refusals, self._heard_ns = 0, clock.now_ns()
        self._beats: dict[int, tuple[int, int]] = {}  # of each other node: the number, and when it last changed
        self.loss = ""

    def run(self) -> None:
        """Look once a second, and more often at the end."""
        while not self._ends.is_set():
            self._wakes.wait(_HASTY_S if self._own is not None or self._refusals else _BEAT_S)
            self._wakes.clear()
            try:
                call_within(_ANSWER_S, self._look)
                self._refusals, self._heard_ns = 0, self._clock.now_ns()
            except _OthersError:
                self._lose("the rendezvous was started again")
            except (AttachError, RuntimeError, TimeoutError):
                self._store = None
                self._on_silence()
            if self.loss or self._is_over():
                self._has_parted.set()

    def part(self, own: End) -> End:
        """Report how this node ended, and wait for how the job did. Node 0 returns when the others have read it."""
        self._own = own
        self._wakes.set()
        self._has_parted.wait()
        if self._of_job is not None:
            return self._of_job
        return own if own.code else End(TRY_AGAIN, f"{self.loss}, before all nodes had ended")

    def end(self) -> None:
        """Say that this launcher ends, if the rendezvous answers, and end the thread."""
        self._ends.set()
        self._wakes.set()
        self.join(_ANSWER_S)
        with contextlib.suppress(AttachError, RuntimeError, TimeoutError, _OthersError):
            call_within(_BEAT_S, lambda: self._connected().add(beats_key(self._number), ENDED))

    def _connected(self) -> Store:
        """The job's own rendezvous. Raises AttachError, RuntimeError; _OthersError for that of another job."""
        if self._store is None:
            self._store = of_launch(connect_store(self._given.host, self._given.port, _BEAT_S))
        key = holder_key(self._number)
        if not self._store.check([key]) or self._store.get(key).decode() != self._holder:
            raise _OthersError
        return self._store

    def _look(self) -> None:
        store = self._connected()
        store.add(beats_key(self._number), 1)
        if self._own is not None and not self._has_reported:
            report(store, self._number, self._own.code, self._own.reason)
            self._has_reported, self._reported_ns = True, self._clock.now_ns()
        if self._number == 0:
            self._watch(store)
            self._decide(store)
        elif self._of_job is None and (found := _read(store, _END)) is not None:
            store.set(f"read/{self._number}", "")
            self._of_job = found
            if found.code and self._own is None:
                self._lose(found.reason)

    def _is_over(self) -> bool:
        """Whether this launcher has nothing to wait for: it knows how the job ended, or need not."""
        if self._own is None or not self._has_reported:
            return False
        if self._number == 0:
            return self._decided_ns > 0 and self._is_read()
        if self._own.code not in (0, TRY_AGAIN) or (self._own.code and self._given.goes_on):
            return True  # nothing that others say changes it, or this node may come again
        waits_s = (self._clock.now_ns() - self._reported_ns) / 1e9
        return self._of_job is not None or (self._own.code > 0 and waits_s > _REPORTS_S + _READ_S)

    def _on_silence(self) -> None:
        """Lose the rendezvous if its machine says that nothing listens there, or has not answered for too long."""
        place = f"{self._given.host}:{self._given.port}"
        refuses = is_refused(self._given.host, self._given.port, _BEAT_S)
        self._refusals = self._refusals + 1 if refuses else 0
        silent_s = (self._clock.now_ns() - self._heard_ns) / 1e9
        if self._refusals >= _REFUSALS:
            self._lose(f"the rendezvous at {place} has ended")
        elif silent_s > self._given.silence_s and self._own is not None:
            self._lose(f"the rendezvous at {place} has not answered for {silent_s:.0f} s")

    def _lose(self, reason: str) -> None:
        if not self.loss:
            self.loss = reason
            if self._own is None:
                self._on_loss(reason)

    def _watch(self, store: Store) -> None:
        """On node 0 report for each launcher that gives no sign of life any more, until it gives one."""
        text = f"its launcher has given no sign of life for {self._given.silence_s:g} s"
        for node in range(1, self._given.nodes):
            now_ns, beats = self._clock.now_ns(), int(store.add(beats_key(node), 0))
            before, since_ns = self._beats.setdefault(node, (beats, now_ns))
            found = reported(store, node)
            if beats != before:
                self._beats[node] = beats, now_ns
                if found is not None and found.reason == text:
                    forget(store, node)
            elif 0 < beats < ENDED and now_ns - since_ns > self._given.silence_s * 1e9 and found is None:
                report(store, node, TRY_AGAIN, text)

    def _decide(self, store: Store) -> None:
        """On node 0 say how the job ended, once that cannot change any more, or the others have taken too long."""
        if self._own is None or self._decided_ns:
            return
        ends = {node: end for node in range(self._given.nodes) if (end := reported(store, node)) is not None}
        of_job, now_ns = end_of_job(ends, self._given.goes_on), self._clock.now_ns()
        is_late = self._own.code > 0 and now_ns - self._reported_ns > _REPORTS_S * 1e9
        is_final = self._own.code > 0 and (self._own.code != TRY_AGAIN or of_job.code == 1)
        if len(ends) == self._given.nodes or is_late or is_final:
            store.set(_END, json.dumps([of_job.code, of_job.reason, 0]))
            self._of_job, self._decided_ns = of_job, now_ns

    def _is_read(self) -> bool:
        assert self._store is not None
        others = [f"read/{node}" for node in range(1, self._given.nodes)]
        is_late = self._clock.now_ns() - self._decided_ns > _READ_S * 1e9
        with contextlib.suppress(RuntimeError):
            return is_late or all(self._store.check([key]) for key in others)
        return True
