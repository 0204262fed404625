"""One edge to node 0's agent for a node that does not keep to the protocol: it sends any bytes, and notes all that it hears."""

import contextlib
import hashlib
import json
import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed import PrefixStore, TCPStore

from fastps.job.secret import Secret
from fastps.job.update_rules import Hyper
from fastps.job.wire import CHUNK_BYTES
from fastps.network import rows
from fastps.network.edge import chunk_ranges
from fastps.network.link import GlooLink, Link, LinkLostError, Memory
from fastps.network.messages import HEADER_BYTES, Header, Kind
from fastps.network.rendezvous import LARGEST_MESSAGE
from fastps.network.secret import EdgeName, mac
from fastps.network.sums import Terms, pack, payload_bytes
from fastps.network.zeromq_link import ZeromqLink
from tests.support.processes import wait_until

OPEN_S, ANSWER_S, END_S = 5.0, 10.0, 12.0
UNTOUCHED = 0xA5


@dataclass(frozen=True)
class Job:
    """What a hostile node knows of a job: all that the rendezvous says, and the secret."""

    port: int
    name: str
    layout: str
    link: str
    secret: Secret | None
    node: int

    @staticmethod
    def found(port: int, link: str, secret: Secret | None, node: int) -> "Job":
        """Read the job's name and layout at the rendezvous, as soon as node 0 has made its optimizer."""
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        keys = lambda: [each for each in store.list_keys() if each.endswith("/layout")]  # noqa: E731
        wait_until(keys, 60, "node 0 has not made its optimizer")
        key = keys()[0]
        name = key.removeprefix("fastps/").removesuffix("/layout")
        return Job(port, name, store.get(key).decode(), link, secret, node)

    @property
    def digest(self) -> bytes:
        """Of what the home holds: the model, or rows of the nodes, which are replicas."""
        found = json.loads(self.layout)
        text = self.layout if found["sync"] != "bsp" else self._rows_text(found)
        return hashlib.sha256(text.encode()).digest()

    def _rows_text(self, model: dict[str, Any]) -> str:
        floats = -(-(rows._FIXED.size + payload_bytes(self.groups, self.parameters)) // 64) * 16
        name = f"rows of {hashlib.sha256(self.layout.encode()).hexdigest()}"
        parameter = {"name": name, "shape": [model["workers"] * floats], "stride": [1], "offset": 0, "shard": 0, "group": 0}
        parameter |= {"is_carried": False, "is_table": False, "type": "float32"}
        rule = {"name": "rows", "planes": [], "initial": [], "code": ""}
        found = model | {"parameters": [parameter], "carried": [], "groups": 1, "extra_bytes": 0, "rule": rule}
        found["faults"] = {"max_workers": 0, "nonfinite": "allow", "on_worker_loss": model["faults"]["on_worker_loss"]}
        return json.dumps(found, sort_keys=True, separators=(",", ":"))

    @property
    def groups(self) -> int:
        return int(json.loads(self.layout)["groups"])

    @property
    def parameters(self) -> int:
        return len(json.loads(self.layout)["parameters"])

    @property
    def floats(self) -> int:
        """The number of floats of a sum, with padding to cache lines."""
        last = json.loads(self.layout)["parameters"][-1]
        return -(-(int(last["offset"]) + math.prod(last["shape"])) // 16) * 16

    def terms(self, hyper: Hyper, *, present: bool = True) -> bytes:
        return pack(Terms([hyper] * self.groups, np.full(self.parameters, present)))


class RawEdge:
    """The node's side of an edge, without any rule. It keeps every header that comes, apart from beats."""

    def __init__(self, job: Job, store: TCPStore, *, has_data: bool = True) -> None:
        self.job = job
        mine = PrefixStore(f"fastps/{job.name}", store)
        self.epoch = int(mine.add(f"epoch/{job.node}", 1))
        self._prefix = f"edge/{job.node}/{self.epoch}"
        self.heard: list[Header] = []
        self.is_over = threading.Event()
        self._news = threading.Condition()
        self._control = self._link(mine, "control", HEADER_BYTES)
        self._data = None
        threading.Thread(target=self._listen, daemon=True).start()
        if has_data:
            try:
                self._data = self._link(mine, "data", LARGEST_MESSAGE)
            except LinkLostError:
                self._control.close()
                raise

    def _link(self, store: Any, what: str, largest: int) -> Link:
        name = f"{self._prefix}/{what}"
        if self.job.link == "gloo":
            return GlooLink(store, name, 1, "127.0.0.1", OPEN_S)
        name = f"{self.job.name}/{name}"
        return ZeromqLink(store, name, 1, "127.0.0.1", OPEN_S, secret=self.job.secret, largest=largest)

    def _listen(self) -> None:
        memory = np.zeros(HEADER_BYTES, np.uint8)
        with contextlib.suppress(LinkLostError):
            while True:
                self._control.wait(self._control.receive(memory), OPEN_S)
                header = Header.unpack(memory.tobytes())
                if header.kind == Kind.BEAT:
                    continue
                with self._news:
                    self.heard.append(header)
                    self._news.notify_all()
                if header.kind in (Kind.REFUSED, Kind.FAILED, Kind.REOPEN):
                    break
        with self._news:
            self.is_over.set()
            self._news.notify_all()

    def hear(self, *kinds: Kind, timeout_s: float = ANSWER_S) -> Header | None:
        """Wait for the first header of these kinds that was not returned before, or for the edge's end (None)."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while True:
                for at, header in enumerate(self.heard):
                    if header.kind in kinds:
                        return self.heard.pop(at)
                left_s = deadline - time.monotonic()
                if self.is_over.is_set():
                    return None
                assert left_s > 0, f"no answer of {[kind.name for kind in kinds]} within {timeout_s:g} s, heard {self.heard}"
                self._news.wait(left_s)

    def send(self, header: "Header | bytes") -> None:
        """Send 512 bytes."""
        data = header if isinstance(header, bytes) else header.pack()
        with contextlib.suppress(LinkLostError):
            self._control.wait(self._control.send(np.frombuffer(data, np.uint8).copy()), ANSWER_S)

    def send_floats(self, messages: list[Memory]) -> None:
        """Send messages on the other link."""
        assert self._data is not None
        with contextlib.suppress(LinkLostError):
            for transfer in [self._data.send(message) for message in messages]:
                self._data.wait(transfer, ANSWER_S)

    def receive_floats(self, floats: int) -> Memory | None:
        """Receive a model; None if the edge is lost."""
        assert self._data is not None
        memory = np.zeros(4 * floats, np.uint8)
        try:
            for first, last in chunk_ranges(0, floats):
                self._data.wait(self._data.receive(memory[4 * first : 4 * last]), ANSWER_S)
        except LinkLostError:
            return None
        return memory

    def bait(self) -> Memory:
        """Memory that the first floats of node 0 would overwrite."""
        memory = np.full(min(4 * self.job.floats, CHUNK_BYTES), UNTOUCHED, np.uint8)
        with contextlib.suppress(LinkLostError):
            if self._data is not None:
                self._data.receive(memory)
        return memory

    def close(self) -> None:
        self._control.close()
        if self._data is not None:
            self._data.close()

    # -- the secret --------------------------------------------------------------------------------

    def name(self) -> EdgeName:
        """What a proof is about."""
        return EdgeName(self.job.name, self.job.node, self.epoch, self.job.digest)

    def proof(self, nonces: bytes, secret: Secret) -> Header:
        name = self.name()
        code = mac(secret, "edge", "leaf", nonces, name.job, name.node, name.epoch, name.layout)
        return Header(Kind.PROOF, layout=name.layout, text=code)

    @property
    def was_given_up(self) -> bool:
        """Whether node 0 has ended the edge without a reason: on a busy machine this process may be slower than it waits."""
        return self.is_over.is_set() and all(header.kind == Kind.REOPEN for header in self.heard)

    def prove(self) -> None:
        """Prove the secret, if there is one, and expect that node 0 proves it, too, unless it gives the edge up."""
        if self.job.secret is None:
            return
        own = bytes(range(32))
        self.send(Header(Kind.CHALLENGE, layout=self.job.digest, text=own.hex()))
        found = self.hear(Kind.CHALLENGE)
        if found is None:
            assert self.was_given_up, f"node 0 refused a correct challenge: {self.heard}"
            return
        self.send(self.proof(own + bytes.fromhex(found.text), self.job.secret))
        proven = self.hear(Kind.PROOF) is not None
        assert proven or self.was_given_up, f"node 0 refused a correct proof: {self.heard}"
