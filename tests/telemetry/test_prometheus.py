"""What Prometheus scrapes: the observer's figures under TensorBoard's names, for jobs that begin and end meanwhile."""

import os
import signal
import socket
import sys
import urllib.request
from dataclasses import replace
from typing import Any

import pytest

import fastps
from fastps.telemetry.prometheus import families, parse_address, served
from fastps.telemetry.scalars import COUNTER, STALENESS, values_of
from tests.support.scripts import started
from tests.telemetry.jobs import look_at, needs, step, stepping

needs("prometheus_client", "prometheus")


def _scrape(url: str) -> dict[str, Any]:
    """The families of metrics by name, as Prometheus' own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url, timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(response.read().decode())}


def _job(name: str) -> str:
    return f"prometheus-{os.getpid()}-{name}"


def test_a_scrape_has_the_observers_figures() -> None:
    job = _job("figures")
    with stepping(job) as worker, served("127.0.0.1:0", job) as url:
        step(worker, 5)
        look = look_at(job)
        found = _scrape(url)
    for scalar, number, value in values_of(look):
        family = found[scalar.metric]
        assert (family.type, family.documentation) == (scalar.kind, scalar.help)
        labels = {"job": job} | ({} if scalar.owner == "job" else {scalar.owner: str(number)})
        suffix = "_total" if scalar.kind == COUNTER else ""
        [sample] = [each for each in family.samples if each.labels == labels]
        assert (sample.name, sample.value) == (scalar.metric + suffix, value)
    buckets = {each.labels.get("le"): each.value for each in found[STALENESS.metric].samples if each.name.endswith("_bucket")}
    assert buckets["0.0"] == buckets["+Inf"] == 5


def test_jobs_may_begin_and_end_and_the_last_counts_are_scraped() -> None:
    first, second = _job("first"), _job("second")

    def updates() -> dict[str, float]:
        found = _scrape(url).get("fastps_job_updates")
        samples = {each.labels["job"]: each.value for each in found.samples} if found else {}
        return {job: value for job, value in samples.items() if job in (first, second)}

    with served("127.0.0.1:0") as url:
        assert updates() == {}
        with stepping(first) as worker:
            step(worker, 2)
            assert updates() == {first: 2}
            with stepping(second) as other:
                step(other, 3)
                assert updates() == {first: 2, second: 3}
            step(worker, 2)
        assert updates() == {first: 4, second: 3}, "both have ended: their final counts, once more"
        assert updates() == {}
        with stepping(first) as worker:
            step(worker)
            assert updates() == {first: 1}, "a new job of the same name"


def test_only_the_named_job_is_served() -> None:
    with stepping(_job("named")), stepping(_job("other")), served("127.0.0.1:0", _job("named")) as url:
        labels = {sample.labels["job"] for family in _scrape(url).values() for sample in family.samples}
    assert labels == {_job("named")}


def test_nodes_have_samples_of_their_own() -> None:
    job = _job("nodes")
    nodes = [fastps.NodeStatistics(node, state="live", sent_bytes=10 * node) for node in range(3)]
    with stepping(job):
        look = replace(look_at(job), nodes=nodes)
    [sent] = [family for family in families({job: look}) if family.name == "fastps_node_sent_bytes"]
    assert [(each.labels["node"], each.value) for each in sent.samples] == [("0", 0), ("1", 10), ("2", 20)]


@pytest.mark.parametrize("text", ["", "here", "9400x", ":", "localhost:99999"])
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(fastps.UsageError, match="--prometheus: expected :PORT or HOST:PORT such as :9400, found"):
        parse_address(text)


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(fastps.UsageError, match=f"--prometheus :{port}: expected an address that is free, found: Address"):
            with served(f":{port}"):
                pass


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(fastps.UnsupportedError, match=r"prometheus_client, which is not installed: pip install"):
        with served(":0"):
            pass


@pytest.mark.slow
def test_the_command_serves_localhost_until_ctrl_c() -> None:
    server = started([sys.executable, "-m", "fastps.cli", "top", "--prometheus", ":0"])
    assert server.stderr is not None
    line = server.stderr.readline()
    url = line.split()[1].rstrip(";")
    assert url.startswith("http://127.0.0.1:")
    job = _job("command")
    with stepping(job) as worker:
        step(worker, 3)
        found = _scrape(url)["fastps_job_updates"]
        assert [each.value for each in found.samples if each.labels["job"] == job] == [3]
    server.send_signal(signal.SIGINT)
    out, err = server.communicate(timeout=30)
    assert (server.returncode, out, err) == (0, "", "")
