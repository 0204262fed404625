"""The figures of this machine's running jobs for Prometheus: `fastps top --prometheus :9400` serves them at /metrics.

Beside them /healthz says whether the jobs make progress.

Every scrape looks into the arenas through read-only observers; nothing happens between scrapes, and the workers do nothing for
it. Jobs may begin and end meanwhile. The first scrape after a job's end still has its final counts. The package
`prometheus_client` writes the text format and serves it.
"""

import logging
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fastps.errors import Error, UnsupportedError, UsageError
from fastps.job.launchers import whole
from fastps.membership import discovery
from fastps.store.observer import Look, Observer, observe
from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.extras import how_to_install
from fastps.telemetry.health import Progress, routed, serve
from fastps.telemetry.scalars import COUNTER, JOB, SCALARS, SHARD, STALENESS, STALENESS_LIMITS, Scalar, values_of

logger = logging.getLogger("fastps.telemetry")

_LOCALHOST = "127.0.0.1"
_OF_HOME = re.compile(r".+\.home\d+")  # the arenas of the homes of a job of several nodes have no workers


def parse_address(text: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT, :PORT or PORT; without a host the address that only this machine reaches.

    Raises UsageError.

    >>> parse_address(":9400"), parse_address("0.0.0.0:9400"), parse_address("[::1]:9400")
    (('127.0.0.1', 9400), ('0.0.0.0', 9400), ('::1', 9400))
    """
    host, _, port = text.rpartition(":")
    if whole(port, 65535) is None:
        raise UsageError(f"--prometheus: expected :PORT or HOST:PORT such as :9400, found {text!r}")
    return host.removeprefix("[").removesuffix("]") or _LOCALHOST, int(port)


@contextmanager
def served(address: str, job: str | None = None) -> Iterator[str]:
    """Serve the figures of `job`, or of all jobs of this user, while the block runs; yields the URL.

    Raises UnsupportedError without the package, and UsageError for an address at which nothing can listen.
    """
    host, port = parse_address(address)
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError:
        raise UnsupportedError(
            f"--prometheus: expected the package prometheus_client, which is not installed: {how_to_install('prometheus')}"
        ) from None
    registry = CollectorRegistry()
    collector = JobCollector(job)
    registry.register(collector)
    try:
        server, thread = serve(routed(make_wsgi_app(registry), collector.health), host, port)
    except OSError as error:
        raise UsageError(f"--prometheus {address}: expected an address that is free, found: {error.strerror}") from None
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        collector.close()


class JobCollector:
    """A collector of prometheus_client: the metrics of all jobs at the moment of a scrape."""

    def __init__(self, job: str | None) -> None:
        self._job = job
        self._observers: dict[str, Observer] = {}
        self._refused: set[str] = set()
        self._lock = threading.Lock()  # scrapes come in threads of their own
        self._progress = Progress()

    def describe(self) -> Iterable[Any]:
        """No names in advance: registering the collector then looks at no job."""
        return []

    def collect(self) -> Iterator[Any]:
        """The families of metrics, with a sample for each owner of each job."""
        with self._lock:
            looks = self._looks()
        yield from families(looks)

    def health(self, limit_s: float) -> tuple[bool, str]:
        """Whether jobs run and each has made a step within the limit, as far as this was asked, and a line about each."""
        with self._lock:
            running = {job: look for job, look in self._looks().items() if not look.over}
            return self._progress.check(running, SYSTEM_CLOCK.now_ns(), limit_s)

    def close(self) -> None:
        """Release the jobs."""
        with self._lock:
            for observer in self._observers.values():
                observer.close()
            self._observers.clear()

    def _looks(self) -> dict[str, Look]:
        """A look at each job, by its name. A job that has ended is looked at a last time."""
        for job in discovery.listening():
            if job not in self._observers and self._job in (None, job, job.split(".node")[0]) and not _OF_HOME.fullmatch(job):
                self._attach(job)
        looks = {job: observer.look() for job, observer in sorted(self._observers.items())}
        for job, look in looks.items():
            if look.over:
                self._observers.pop(job).close()
        return looks

    def _attach(self, job: str) -> None:
        try:
            self._observers[job] = observe(job, timeout_s=0.0)
        except Error as error:  # it ended meanwhile, or is of another user or another version of fastps
            if job not in self._refused:
                self._refused.add(job)
                logger.info("job %s is not served: %s", job, error)


def families(looks: dict[str, Look]) -> Iterator[Any]:
    """The metrics of these looks. Labels: the job, and the number of a worker, shard or node."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    found: dict[Scalar, Any] = {}
    for scalar in SCALARS:
        kind = CounterMetricFamily if scalar.kind == COUNTER else GaugeMetricFamily
        found[scalar] = kind(scalar.metric, scalar.help, labels=["job"] if scalar.owner == JOB else ["job", scalar.owner])
    for job, look in looks.items():
        for scalar, number, value in values_of(look):
            found[scalar].add_metric([job] if scalar.owner == JOB else [job, str(number)], value)
    yield from (family for family in found.values() if family.samples)
    staleness = HistogramMetricFamily(STALENESS.metric, STALENESS.help, labels=["job", SHARD])
    for job, look in looks.items():
        for shard in look.shards:
            total = sum(versions * count for versions, count in shard.staleness)
            staleness.add_metric([job, str(shard.shard)], buckets_of(shard.staleness), total)
    if staleness.samples:
        yield staleness


def buckets_of(counts: Iterable[tuple[int, int]]) -> list[tuple[str, float]]:
    """The counts of (versions, pushes) as cumulative buckets.

    >>> buckets_of([(0, 5), (2, 1), (255, 2)])[:4], buckets_of([(0, 5), (2, 1), (255, 2)])[-1]
    ([('0.0', 5), ('1.0', 5), ('2.0', 6), ('3.0', 6)], ('+Inf', 8))
    """
    counts = list(counts)
    found: list[tuple[str, float]] = [
        (str(float(limit)), sum(count for versions, count in counts if versions <= limit)) for limit in STALENESS_LIMITS
    ]
    return [*found, ("+Inf", sum(count for _, count in counts))]
