"""Three nodes train while agents, workers, launchers, rendezvous and whole nodes are killed at moments drawn at random.

Node 0 is among the victims, and nobody is at the keyboard: launchers meet again by --retries, and a stand-in for systemd starts
those again that were killed. The job must end by itself, with exit code 0 and the weights of an undisturbed job.
FASTPS_HEALING_FAULTS says how many faults (6; 200 take 20 minutes), and FASTPS_HEALING_SEED what is drawn.
"""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.network.launched_nodes import KINDS, PROGRAM, LaunchedNodes, alone, launched

FAULTS = int(os.environ.get("FASTPS_HEALING_FAULTS", "6"))
SEED = int(os.environ.get("FASTPS_HEALING_SEED", "1"))
MEAN_S = 6.0  # between two faults
STEPS, PAUSE_S = 300, 0.03
CALM_S = 400.0  # for the job to end after the last fault
_RESTART_S = 1.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * FAULTS * MEAN_S + CALM_S + 120)]


class _Supervisor:
    """Starts launchers again as the unit of systemd does: after a signal and exit code 75, and never after 0, 1 or 2."""

    def __init__(self, nodes: LaunchedNodes) -> None:
        self._nodes = nodes
        self._ended: dict[int, float] = {}
        self.codes: Counter[int] = Counter()

    def tick(self) -> bool:
        """Look once. Returns whether a launcher runs, or will."""
        runs = False
        for node, launcher in self._nodes.launchers.items():
            code = launcher.poll()
            if code in (0, 1, 2):
                continue
            runs = True
            if code is None:
                self._ended.pop(node, None)
            elif time.monotonic() > self._ended.setdefault(node, time.monotonic()) + _RESTART_S:
                self.codes[code] += 1
                self._nodes.start(node)
        return runs

    def spend(self, seconds: float) -> bool:
        """Go on for so long, or until no launcher runs. Returns whether one does."""
        deadline, runs = time.monotonic() + seconds, True
        while runs and time.monotonic() < deadline:
            runs = self.tick()
            time.sleep(0.1)
        return runs


def test_a_job_whose_processes_are_killed_at_random_ends_by_itself_with_the_right_weights(tmp_path: Path) -> None:
    draw, faults = random.Random(SEED), Counter[str]()
    gate, saved = tmp_path / "calm", str(tmp_path / "saved")
    options = ["--retries", str(10 * FAULTS + 20), "--checkpoint", saved, "--resume", saved, "--every", "5", "--grace", "3"]
    variables = {"GATE_OF_TESTS": str(gate)}
    with launched(tmp_path, 3, PROGRAM, *options, "--", str(STEPS), str(PAUSE_S), variables=variables) as nodes:
        unit, began = _Supervisor(nodes), time.monotonic()
        nodes.await_steps(5)
        while sum(faults.values()) < FAULTS:
            assert unit.spend(min(draw.expovariate(1 / MEAN_S), 5 * MEAN_S)), nodes.texts()
            node, kind = draw.randrange(3), draw.choice(KINDS)
            faults[kind] += nodes.kill(node, kind, signal.SIGKILL) > 0
        ended = time.monotonic()
        gate.touch()
        runs = unit.spend(CALM_S)
        codes = [nodes.launchers[node].poll() for node in range(3)]
        took = f"{ended - began:.0f} s of faults, and {time.monotonic() - ended:.0f} s to the end"
        summary = f"seed {SEED}: {dict(faults)}, starts again after {dict(unit.codes)}, {took}; exit codes {codes}"
        print(summary)
        assert not runs and codes == [0, 0, 0], summary + nodes.texts()
    found = [json.loads(line) for node in range(3) for line in re.findall(r"found (\{.*\})", nodes.said(node))]
    assert {each["rank"] for each in found} == {0, 1, 2}, summary
    total, accuracy = alone(3, STEPS)
    assert [each["total"] for each in found] == pytest.approx([total] * len(found), rel=1e-3), summary
    assert all(abs(each["accuracy"] - accuracy) < 0.01 for each in found), summary
    assert all(each["version"] == STEPS for each in found), summary
