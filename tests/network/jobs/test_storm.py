"""Three nodes train while faults happen at moments drawn at random.

Workers, agents and nodes are killed and nodes started again; nodes are stopped, cut off and slowed; connections are reset; and
one packet in a hundred is lost, where the command nft is installed.
FASTPS_STORM_SECONDS sets how long it takes (20), and FASTPS_STORM_SEED what is drawn. Node 0 is only reset and slowed.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastps.bench.two_nodes.namespaces import missing_reason
from tests.support.network.bridge import Bridge, bridge
from tests.support.network.launched_nodes import DIGITS
from tests.support.nodes import await_files

REASON = missing_reason()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]

SECONDS = float(os.environ.get("FASTPS_STORM_SECONDS", "20"))
SEED = int(os.environ.get("FASTPS_STORM_SEED", "1"))
QUIET_S = 5.0  # at the end, all nodes train for so long without a pause
MARK = "STORM_OF_TESTS"

SCRIPT = (
    DIGITS
    + """model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), timeout_s=60)
draw = torch.Generator().manual_seed(os.getpid())
last, steps, longest, before = 0, 0, 0.0, time.monotonic()
end = pathlib.Path(os.environ["STORM_END"])
while not end.exists():
    rows = torch.randint(0, 1500, (16,), generator=draw)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
    optimizer.step()
    assert optimizer.version >= last, "a version went back"
    last, steps, now = optimizer.version, steps + 1, time.monotonic()
    if steps >= 3:
        end.with_name(f"trains-{fastps.rank()}").touch()
    longest, before = max(longest, now - before), now
    time.sleep(0.01)
optimizer.wait_for_others()
found = {"rank": fastps.rank(), "steps": steps, "longest_s": longest}
with torch.no_grad():
    found["accuracy"] = float((model(inputs[1500:]).argmax(1) == labels[1500:]).float().mean())
found["digest"] = zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in model.parameters()))
if fastps.rank() == 0:
    home = optimizer.worker.store
    if home.layout.server != "replica":
        home = optimizer._placement._view(optimizer.worker)._arenas()[0]
    found["version"] = home.version
    found["lanes"] = [home.arena.counters(lane) for lane in range(home.layout.lanes)]
print("found", json.dumps(found), flush=True)
optimizer.close()
"""
)


class Storm:
    """The nodes' launchers, and the faults."""

    def __init__(self, nodes: Bridge, folder: Path, sync: str) -> None:
        self._nodes, self._folder, self._sync = nodes, folder, sync
        self._draw = random.Random(SEED)
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.faults: Counter[str] = Counter()
        self._starts = 0
        self.launchers = {node: self._launch(node) for node in range(3)}

    def _launch(self, node: int) -> "subprocess.Popen[bytes]":
        folder, self._starts = self._folder, self._starts + 1
        words = "--on-node-loss", "continue", "--sync", self._sync, str(folder / "train.py")
        own = {MARK: self._mark, "TMPDIR": f"{folder}/temporary", "STORM_END": f"{folder}/end", "OMP_NUM_THREADS": "1"}
        with (folder / f"out-{node}-{self._starts}").open("wb") as out:
            how = {"stdout": out, "stderr": subprocess.STDOUT, "env": {**os.environ, **own}, "start_new_session": True}
            return self._nodes.launch(node, *words, **how)

    def calm(self) -> None:
        """Wait, without faults, until all nodes have come back and train."""
        limit = time.monotonic() + 120
        broken = time.monotonic()
        while time.monotonic() < broken + QUIET_S:
            self.start_ended()
            time.sleep(0.1)
            if min(path.stat().st_mtime for path in self._folder.glob("trains-*")) < time.time() - 2:
                broken = time.monotonic()
                assert broken < limit, "not all nodes came back"

    def processes(self, node: int | None = None) -> list[psutil.Process]:
        """What is running of a node, or of all."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                own = variables.get("FASTPS_NODE_RANK", "")
                if variables.get(MARK) == self._mark and (node is None or own == str(node) or _is_launcher(process, node)):
                    found.append(process)
        return found

    def held(self) -> dict[str, int]:
        """What node 0's agent holds: threads, descriptors, and those of them that are memory or sockets."""
        (agent,) = filter(_is_agent, self.processes(0))
        links = [str(each.readlink()) for each in Path(f"/proc/{agent.pid}/fd").iterdir() if os.path.lexists(each)]
        kinds = {kind: sum(kind in link for link in links) for kind in ("memfd", "socket")}
        return {"threads": agent.num_threads(), "descriptors": len(links), **kinds}

    def fault(self) -> None:
        """One fault at a node, and its end."""
        node = self._draw.choice((1, 2))
        kinds = ["kill worker", "kill agent", "kill node", "cut", "cut", "stop", "slow", "reset", "reset"]
        kind = self._draw.choice([*kinds, "lose"] if self._nodes.can_lose() else kinds)
        self.faults[kind] += 1
        if kind.startswith("kill"):
            self._kill(kind.partition(" ")[2], node)
        elif kind in ("cut", "slow", "lose"):
            cut_s = min(self._draw.choice((0.1, 1, 2, 6, 20)), SECONDS / 8) if kind == "cut" else 0.0
            change, amount, seconds = getattr(self._nodes, kind), *{"cut": (1, cut_s), "slow": (2, 2), "lose": (1, 5)}[kind]
            change(node, amount)
            time.sleep(seconds)
            change(node, 0)
        elif kind == "reset":
            self._nodes.reset(self._draw.choice((0, node)))
        else:
            self._stop(node, self._draw.choice((0.5, 1, 5)))
        self.start_ended()

    def start_ended(self) -> None:
        """Start a node that has ended again, as a supervisor does."""
        for node in (1, 2):
            if self.launchers[node].poll() is not None:
                self.faults["start"] += 1
                self.launchers[node] = self._launch(node)

    def _kill(self, what: str, node: int) -> None:
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                is_agent = _is_agent(process)
                is_worker = not is_agent and "FASTPS_LOCAL_RANK" in process.environ()
                if what == "node" or (is_agent if what == "agent" else is_worker):
                    process.kill()
        if what == "node":
            self.launchers[node].wait(10)

    def _stop(self, node: int, seconds: float) -> None:
        agents = list(filter(_is_agent, self.processes(node)))
        for number, after_s in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0)):
            for process in agents:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(after_s)


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _is_agent(process: psutil.Process) -> bool:
    return "fastps.network.agent" in _words(process)


def _is_launcher(process: psutil.Process, node: int) -> bool:
    words = _words(process)
    return "--node-rank" in words and words[words.index("--node-rank") + 1] == str(node)


def _found(folder: Path) -> list[dict[str, Any]]:
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("out-*"))]
    return [json.loads(line) for text in texts for line in re.findall(r"found (\{.*\})", text)]


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_training_goes_on_through_all_faults_and_every_push_is_counted(sync: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "temporary").mkdir()
    with bridge(3) as nodes:
        storm = Storm(nodes, tmp_path, sync)
        try:
            await_files(tmp_path, 3, 100, "trains-*")
            began = time.monotonic()
            held = [storm.held()]
            while time.monotonic() < began + SECONDS:
                storm.fault()
                time.sleep(1)
            storm.calm()
            held.append(storm.held())
            (tmp_path / "end").touch()
            for launcher in storm.launchers.values():
                launcher.wait(120)
        finally:
            left = storm.processes()
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
    found = _found(tmp_path)
    log = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(tmp_path.glob("out-*")))
    summary = f"seed {SEED}: {sum(storm.faults.values())} faults {dict(storm.faults)}; {held}; {found}\n{log}"
    print(summary)
    assert not left, summary
    assert storm.launchers[0].returncode == 0, summary
    assert list((tmp_path / "temporary").iterdir()) == [], summary
    # Threads and sockets of edges that were lost last may end a few seconds later.
    assert all(held[1][kind] <= held[0][kind] + 8 for kind in held[0]), summary
    assert held[1]["memfd"] <= held[0]["memfd"], summary  # one of the start may still be there at the first look
    home = next(each for each in found if each["rank"] == 0)
    for lane in home["lanes"]:
        assert lane["posted"] == lane["done"], summary
    assert {each["rank"] for each in found} == {0, 1, 2}, f"a node did not come back: {summary}"
    assert all(each["accuracy"] > 0.85 for each in found), summary
    if sync == "bsp":
        assert len({each["digest"] for each in found}) == 1, summary
    if sync == "asp":
        folded = sum(lane["folded"] for lane in home["lanes"])
        assert home["version"] == folded, summary
