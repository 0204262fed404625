"""What a probe is told: a job that makes steps, one that makes none, none at all, and what is no probe."""

import os
import urllib.error
import urllib.request

from fastps.telemetry.health import Progress
from fastps.telemetry.prometheus import served
from tests.telemetry.jobs import look_at, needs, step, stepping

needs("prometheus_client", "prometheus")


def _asked(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_job_is_stalled_once_it_has_made_no_step_for_the_time_that_the_probe_names() -> None:
    job, progress = f"health-{os.getpid()}-stalled", Progress()
    with stepping(job) as worker:
        step(worker, 2)
        looks = {job: look_at(job)}
        assert progress.check(looks, 0, 60) == (True, f"job {job}: live")
        assert progress.check(looks, 60 * 10**9, 60)[0]
        assert progress.check(looks, 61 * 10**9, 60) == (False, f"job {job}: no step for 61 s")
        step(worker, 1)
        assert progress.check({job: look_at(job)}, 62 * 10**9, 60)[0]
        assert not progress.check({job: look_at(job)}, 200 * 10**9, 60)[0]
        assert progress.check({}, 200 * 10**9, 60) == (False, "no running job")  # what has ended is forgotten
        assert progress.check({job: look_at(job)}, 400 * 10**9, 60)[0]


def test_probes_are_answered_beside_the_metrics_and_other_paths_are_not_found() -> None:
    job = f"health-{os.getpid()}-served"
    with stepping(job) as worker, served("127.0.0.1:0", job) as url:
        base = url.removesuffix("/metrics")
        step(worker, 1)
        assert _asked(f"{base}/healthz") == (200, f"job {job}: live\n")
        assert _asked(f"{base}/healthz?seconds=0")[0] == _asked(f"{base}/healthz?seconds=x")[0] == 400
        assert "fastps_job_updates_total" in _asked(url)[1]
        assert _asked(f"{base}/")[0] == _asked(f"{base}/health")[0] == 404
    with served("[::1]:0", job) as url:
        assert _asked(url.replace("/metrics", "/healthz")) == (503, "no running job\n")
