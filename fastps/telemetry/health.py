"""Whether running jobs make progress: what a probe asks, and the HTTP server that answers it beside the metrics."""

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from fastps.job.launchers import whole
from fastps.store.observer import Look

STALLED_S = 300  # without a step, unless the probe says another time
_TEXT = [("Content-Type", "text/plain; charset=utf-8")]  # given as a copy: wsgiref appends to it
App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass
class _Progress:
    steps: int
    since_ns: int  # when it was seen to have made them


class Progress:
    """When each job was last seen to have made a step. It knows of nothing between two calls of `check`.

    >>> look = Look(0, [], [], True, {}, False)
    >>> progress = Progress()
    >>> progress.check({"mnist": look}, 0, 60), progress.check({"mnist": look}, 61 * 10**9, 60)
    ((True, 'job mnist: live'), (False, 'job mnist: no step for 61 s'))
    >>> progress.check({}, 0, 60)
    (False, 'no running job')
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Progress] = {}

    def check(self, looks: Mapping[str, Look], now_ns: int, limit_s: float) -> tuple[bool, str]:
        """Whether there are jobs and each has made a step within the limit, and a line about each."""
        self._seen = {job: seen for job, seen in self._seen.items() if job in looks}
        lines, is_live = [], bool(looks)
        for job, look in looks.items():
            steps = sum(worker.steps for worker in look.workers)
            seen = self._seen.get(job)
            if seen is None or steps != seen.steps:
                seen = self._seen[job] = _Progress(steps, now_ns)
            age_s = (now_ns - seen.since_ns) / 1e9
            is_live = is_live and age_s <= limit_s
            lines.append(f"job {job}: {'live' if age_s <= limit_s else f'no step for {age_s:.0f} s'}")
        return is_live, "\n".join(lines) or "no running job"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def routed(metrics: App, health: Callable[[float], tuple[bool, str]]) -> App:
    """An application that answers at /metrics and /healthz, and with 404 elsewhere.

    /healthz answers 200, or 503 if a job is stalled or none runs; `?seconds=60` says what stalled is.
    """

    def answer(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = request.get("PATH_INFO", "")
        if path == "/metrics":
            return metrics(request, start)
        if path != "/healthz":
            start("404 Not Found", [*_TEXT])
            return [b"expected /metrics or /healthz\n"]
        given = parse_qs(request.get("QUERY_STRING", "")).get("seconds", [str(STALLED_S)])[0]
        limit_s = whole(given)
        if not limit_s:
            start("400 Bad Request", [*_TEXT])
            return [b"expected seconds=N, a whole number of 1 or more\n"]
        is_live, text = health(limit_s)
        start("200 OK" if is_live else "503 Service Unavailable", [*_TEXT])
        return [f"{text}\n".encode("utf-8", "replace")]

    return answer


def serve(app: App, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    """Serve an application in a thread, which ends with `shutdown` of the server. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    kind = type("Server", (_Server,), {"address_family": family})
    server: WSGIServer = make_server(host, port, app, kind, _Quiet)
    thread = threading.Thread(target=server.serve_forever, name="fastps-metrics", daemon=True)
    thread.start()
    return server, thread
