"""The nodes of a job, as data: how many there are, which one this is, and how they find each other.

`fastps run --nnodes` and torchrun set the variables; a job of one node has none of this.
"""

import os
from dataclasses import dataclass, replace

from fastps.errors import PolicyError, UnsupportedError, UsageError
from fastps.job.fault_policy import LOSS_CHOICES, FaultPolicy
from fastps.job.layout import LEAF, Layout
from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Rule
from fastps.kernels.update import fold

NODE_TIMEOUT_S = 3.0
LINK_DTYPES = ("float32", "bfloat16", "float16", "int8")
WITHIN = {"bsp": "bsp", "asp": "asp,combine=true"}
LEAF_RULE = Rule(LEAF, fold.RULES["sgd"], ())
"""The rule of a leaf arena, whose fold is the home's: it has no state of its own."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, from the point of view of one process.

    Attributes:
        count: the number of nodes.
        number: this node's number, from 0. Node 0 is the home: it holds the weights and the optimizer's state.
        local_rank, local_workers: this worker's number on its node, and the workers of the node.
        host, port: the rendezvous, at which the nodes find each other.
        within: how the workers of one node are summed: "bsp" waits for all of them, "asp" takes what is there.
        on_node_loss: when a node is lost, the others "stop" with an error that names it, or "continue" without it.
        link_dtype: what floats travel in: "float32", or with error feedback "bfloat16", "float16" or "int8".
        timeout_s: a node that is not heard for this long is lost.
    """

    count: int
    number: int
    local_rank: int
    local_workers: int
    host: str
    port: int
    within: str = "bsp"
    on_node_loss: str = "stop"
    timeout_s: float = NODE_TIMEOUT_S
    link_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(f"expected a node from 0 to {self.count - 1}, found node {self.number} of {self.count} nodes")
        if not 0 <= self.local_rank < self.local_workers:
            raise UsageError(
                f"expected a worker from 0 to {self.local_workers - 1} on this node, found {self.local_rank}: check LOCAL_RANK"
            )
        if self.within not in WITHIN:
            raise UsageError(f"expected within to be one of {', '.join(WITHIN)}, found {self.within!r}")
        if self.on_node_loss not in LOSS_CHOICES:
            raise UsageError(f"expected on_node_loss to be one of {', '.join(LOSS_CHOICES)}, found {self.on_node_loss!r}")
        if self.link_dtype not in LINK_DTYPES:
            raise UsageError(f"expected link_dtype to be one of {', '.join(LINK_DTYPES)}, found {self.link_dtype!r}")
        if not 1 <= self.timeout_s <= 3600:
            raise UsageError(f"expected a node timeout from 1 to 3600 seconds, found {self.timeout_s:g}")

    @property
    def is_home(self) -> bool:
        """Whether this node holds the weights and the optimizer's state."""
        return self.number == 0


def nodes() -> Nodes | None:
    """The nodes of this process's job, from the environment; None for a job of one node. Raises UsageError."""
    own = "FASTPS_NNODES" in os.environ
    count = _number("FASTPS_NNODES" if own else "GROUP_WORLD_SIZE", 1)
    if count <= 1:
        return None
    number = _number("FASTPS_NODE_RANK" if own else "GROUP_RANK", None)
    local_rank = _number("FASTPS_LOCAL_RANK" if own else "LOCAL_RANK", None)
    local_workers = _number("FASTPS_LOCAL_WORKERS" if own else "LOCAL_WORLD_SIZE", None)
    if own:
        host, port = address(os.environ.get("FASTPS_RENDEZVOUS", ""))
    else:
        host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", None)
    within = os.environ.get("FASTPS_WITHIN", "bsp")
    loss = os.environ.get("FASTPS_ON_NODE_LOSS", "stop")
    link_dtype = os.environ.get("FASTPS_LINK_DTYPE", "float32")
    return Nodes(count, number, local_rank, local_workers, host, port, within, loss, _timeout_s(), link_dtype)


def address(text: str) -> tuple[str, int]:
    """A host and a port from "HOST:PORT". Raises UsageError.

    >>> address("node0:29400")
    ('node0', 29400)
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"expected the rendezvous as HOST:PORT, such as node0:29400, found {text!r}")
    return host.strip("[]"), int(port)


def home_layout(layout: Layout, of: Nodes) -> Layout:
    """The layout of the home arena, whose workers are the nodes. Raises PolicyError, UnsupportedError."""
    check_policy(layout.policy, of)
    if layout.owner_lanes:
        raise UnsupportedError("a job of several nodes keeps its arenas in host memory: set FASTPS_PLACEMENT=host")
    if layout.gradient_type != "float32":
        raise UnsupportedError(
            f"a job of several nodes sums float32 gradients: expected push_dtype=torch.float32, found {layout.gradient_type}"
        )
    faults = FaultPolicy(of.on_node_loss, layout.faults.nonfinite)
    return replace(layout, workers=of.count, extra_bytes=0, faults=faults, server="workers")


def leaf_layout(layout: Layout, of: Nodes) -> Layout:
    """The layout of a leaf arena, whose workers are those of one node, and whose agent is its server."""
    policy = replace(parse_policy(WITHIN[of.within]), clip=layout.policy.clip)  # which is of each worker's gradient
    parameters = tuple(replace(parameter, shard=0) for parameter in layout.parameters)
    faults = replace(layout.faults, nonfinite="allow")  # the home checks the sums
    return replace(
        layout, parameters=parameters, rule=LEAF_RULE, policy=policy, workers=of.local_workers, faults=faults, server="process"
    )


def check_policy(policy: Policy, of: Nodes) -> None:
    """Raise PolicyError for a discipline that makes no sense between nodes, with the reason."""
    policy.check_workers(of.count)
    reasons = {
        "auto measures the workers of one arena: choose a discipline": policy.warm_up > 0,
        "a batch that the coordinator tunes is for a worker, not for a node: leave tune=true out": policy.tune,
        "the moving average stays on node 0, where no worker can read it: leave ema out": policy.ema > 0,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is not None:
        raise PolicyError(f"{policy.spec} with {of.count} nodes: {reason}")


def _number(name: str, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise UsageError(
            f"the environment says that the job has several nodes: expected {name} to be a whole number, found {text!r}"
        )
    return int(text)


def _timeout_s() -> float:
    text = os.environ.get("FASTPS_NODE_TIMEOUT", str(NODE_TIMEOUT_S))
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"expected FASTPS_NODE_TIMEOUT to be a number of seconds, found {text!r}") from None
