"""Predictions for nodes compared with live runs: `python -m fastps.bench.nodes_predicted`.

Nodes are network namespaces of this machine. `fastps doctor --nodes` measures the links between the first two, and `fastps
simulate --links` predicts 2 and 3 nodes from them. Workers compute by sleeping, one on each node.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastps.job.specs import parse_policies, parse_policy
from fastps.lab.measuring.advised_nodes import simulation_of_nodes
from fastps.lab.measuring.namespaces import Cluster, cluster, missing_reason
from fastps.lab.measuring.simulated_links import MeasuredLinks, ModelOnNodes, on_links, read_links
from fastps.lab.papers.live_nodes import LiveJob, LiveRunError, run_live
from fastps.simulation.simulate import ComputeModel, Simulation, simulate
from fastps.system.json_report import write_json
from fastps.system.ports import free_port
from fastps.tracing.file import Trace
from fastps.tracing.parts import load

Row = dict[str, Any]
RATES_MBIT = (100, 1000, 0)
NODES = (2, 3)
SPECS = "bsp,asp"
STEPS = 200  # of each node in the simulation


def measure_links(nodes: Cluster, count: int, file: Path) -> MeasuredLinks:
    """Run `fastps doctor` on so many nodes, and read its report. Raises LiveRunError."""
    place = f"{nodes.address(0)}:{free_port()}"
    command = [sys.executable, "-m", "fastps", "doctor", "--nnodes", str(count), "--rendezvous", place]
    started = [
        subprocess.Popen(
            nodes.command(node, [*command, "--node-rank", str(node), *(["--output", str(file)] if node == 0 else [])]),
            text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for node in range(count)
    ]  # fmt: skip
    for process in started:
        errors = process.communicate(timeout=120)[1]
        if process.returncode:
            raise LiveRunError(f"fastps doctor failed: {errors[-500:]}")
    return read_links(file)


def predict(spec: str, links: MeasuredLinks, model: ModelOnNodes, simulation: Simulation) -> float:
    """Steps of all nodes per second."""
    return float(simulate(*on_links(simulation, parse_policy(spec), links, model)).row["steps_per_s"])


def compare(rate_mbit: int, specs: Sequence[str], job: LiveJob, repeats: int, most: int = max(NODES)) -> list[Row]:
    """Rows of one kind of link: for each number of nodes and discipline the predicted and the measured rate.

    "advised" is predicted from the traces of the first run, of two nodes under the first discipline.
    """
    rows, traces = [], list[Trace]()
    with cluster(most, rate_mbit) as nodes, tempfile.TemporaryDirectory(prefix="fastps-predicted-") as folder:
        links = measure_links(nodes, 2, Path(folder) / "links.json")
        compute = ComputeModel("constant", 1e6 * job.compute_ms)
        for count in range(2, most + 1):
            for spec in specs:
                recorded = Path(folder) if not traces else None
                own = replace(job, sync=spec, workers=[1] * count)
                runs = [run_live(nodes, replace(own, traces=recorded if turn == 0 else None)) for turn in range(repeats)]
                traces = traces or [load(Path(folder) / f"run.node{node}.trace") for node in range(2)]
                model = ModelOnNodes(job.parameters, count, job.link_dtype)
                simulated = predict(spec, links, model, Simulation(workers=count, steps=STEPS, compute=compute))
                advised = predict(spec, links, model, simulation_of_nodes(traces, count, links))
                rates = [run.steps_per_s(own.workers) for run in runs]
                live = statistics.median(rates)
                rows.append(
                    {
                        "link": f"{rate_mbit} Mbit/s" if rate_mbit else "veth", "nodes": count, "sync": spec, "live": live,
                        "live_min": min(rates), "live_max": max(rates), "predicted": simulated, "error": simulated / live - 1,
                        "advised": advised, "advice_error": advised / live - 1,
                    }
                )  # fmt: skip
                print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def main() -> None:
    """Print a line for each link, number of nodes and discipline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sync", default=SPECS, help="disciplines, separated by commas; the first one is recorded")
    parser.add_argument("--rates", default=",".join(map(str, RATES_MBIT)), help="Mbit/s of the links; 0: as they are")
    parser.add_argument("--parameters", type=float, default=2.5e6)
    parser.add_argument("--compute-ms", type=float, default=50.0, help="how long a worker sleeps in each step")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout")
    given = parser.parse_args()
    reason = missing_reason()
    if reason:
        print(reason)
        return
    specs = [policy.spec for policy in parse_policies(given.sync)]
    job = LiveJob(specs[0], (1, 1), int(given.parameters), given.compute_ms, given.seconds)
    rows = [row for rate in given.rates.split(",") for row in compare(int(rate), specs, job, given.repeats)]
    if given.json:
        write_json("bench nodes_predicted", rows, given.json)
    if given.json != "-":
        _show(rows)


def _show(rows: Sequence[Row]) -> None:
    print(f"{'link':12} nodes {'sync':8} {'live':>7} {'(range)':>15} {'predicted':>9} {'error':>7} {'advised':>8} {'error':>7}")
    for row in rows:
        spread = f"{row['live_min']:.1f}-{row['live_max']:.1f}"
        print(
            f"{row['link']:12} {row['nodes']:5} {row['sync']:8} {row['live']:7.1f} {spread:>15} {row['predicted']:9.1f}"
            f" {row['error']:+7.1%} {row['advised']:8.1f} {row['advice_error']:+7.1%}"
        )


if __name__ == "__main__":
    main()
