"""The nodes of a job, as data: how many there are, which one this is, and where they find each other."""

import os
from dataclasses import dataclass, field, replace

from fastps.errors import PolicyError, UnsupportedError, UsageError
from fastps.job import environment, launchers
from fastps.job.fault_policy import FaultPolicy
from fastps.job.launchers import FASTPS, TORCHRUN, Launched, whole
from fastps.job.layout import LEAF, Layout
from fastps.job.limits import ROOM_HEADER_BYTES
from fastps.job.options import NodePolicy, value_of
from fastps.job.policy import Policy
from fastps.job.secret import VARIABLE as SECRET
from fastps.job.secret import Secret, secret_of_environment
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD, Rule, Update
from fastps.kernels.update import fold

_WITHIN = {"bsp": "bsp", "asp": "asp,combine=true"}
_LEAF_RULE = Rule(LEAF, fold.RULES["sgd"], ())  # without state: the home has it


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, from the point of view of one worker."""

    count: int  # the number of nodes; 0 before the nodes have met, if the launcher does not say
    # This node's number, from 0; -1 before the nodes have met, if the launcher does not say.
    number: int
    local_rank: int  # this worker's number on its node
    local_workers: int  # the workers of the node
    host: str  # of the rendezvous, at which the nodes find each other
    port: int
    policy: NodePolicy = field(default_factory=NodePolicy)
    # The name or address of this node's interface to the others; "" for the one that leads to the rendezvous.
    interface: str = ""
    trusts_network: bool = False  # whether this node may listen at a public address
    # How this process was started, if its launcher keeps no store at the rendezvous. Worker 0 then keeps it.
    launched: Launched | None = None

    def __post_init__(self) -> None:
        if self.count and not 0 <= self.number < self.count:
            raise UsageError(f"expected a node from 0 to {self.count - 1}, found node {self.number} of {self.count} nodes")
        if not 0 <= self.local_rank < self.local_workers:
            raise UsageError(
                f"expected a worker from 0 to {self.local_workers - 1} on this node, found {self.local_rank}: check LOCAL_RANK"
            )

    @property
    def is_first(self) -> bool:
        """Whether this is node 0, with whose weights the job begins."""
        return self.number == 0


def nodes_of_environment() -> Nodes | None:
    """The nodes of this process's job; None for a job of one node. Raises UsageError."""
    launcher = next((each for each in (FASTPS, TORCHRUN) if each.nodes[0] in os.environ), None)
    if launcher is None:
        return _nodes_without_store()
    count = launchers.number(launcher.nodes)
    if count <= 1:
        return None
    number, local_rank, local_workers = map(launchers.number, (launcher.node, launcher.local_rank, launcher.local_workers))
    if launcher is FASTPS:
        host, port = address(os.environ.get("FASTPS_RENDEZVOUS", ""))
    else:
        host, port = os.environ.get("MASTER_ADDR", ""), launchers.number(("MASTER_PORT",))
    return Nodes(count, number, local_rank, local_workers, host, port, *_settings())


def _settings() -> tuple[NodePolicy, str, bool]:
    """The policy, the interface to the other nodes, and whether its network is trusted. Raises UsageError."""
    policy = NodePolicy.of_environment()
    check_secret(policy, secret_of_environment())
    return policy, os.environ.get("FASTPS_INTERFACE", ""), value_of("FASTPS_TRUSTED_NETWORK") == "1"


def check_secret(policy: NodePolicy, secret: Secret | None) -> None:
    """Raise UsageError if the links need a secret and the job has none."""
    if policy.link == "zmq" and secret is None:
        raise UsageError(
            f"--link zmq (FASTPS_LINK): expected a secret, by which the nodes know each other's keys, found none; give {SECRET}"
            " or --secret-file"
        )


def _nodes_without_store() -> Nodes | None:
    found = launchers.launched()
    if (
        found is None
        or found.nodes == 1
        or (found.rank, found.workers) != (environment.own_rank(), environment.own_world_size())
    ):
        return None
    rendezvous = os.environ.get("FASTPS_RENDEZVOUS") or found.rendezvous
    if not rendezvous:
        raise UsageError(
            f"{found.launcher} started {found.workers} processes on several nodes, and does not say where they can meet: set"
            " FASTPS_RENDEZVOUS=HOST:PORT for all of them, where HOST is the machine of process 0 and PORT is free there"
        )
    host, port = address(rendezvous)
    place = found.nodes, found.node, found.local_rank, found.local_workers
    return Nodes(*place, host, port, *_settings(), launched=found)


def address(text: str) -> tuple[str, int]:
    """A host and a port from "HOST:PORT". Raises UsageError.

    >>> address("node0:29400")
    ('node0', 29400)
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and whole(port, 65535)):
        raise UsageError(f"expected the rendezvous as HOST:PORT, such as node0:29400, found {text!r}")
    return host.strip("[]"), int(port)


def are_replicas(policy: Policy, nodes: NodePolicy) -> bool:
    """Whether each node of a job has the whole state, and the nodes exchange sums. Else node 0's home has it.

    A sum over all nodes is a version of all their pushes; it travels as it is, and is not encrypted.
    """
    travels = nodes.link == "gloo" and nodes.link_dtype == "float32"
    is_plain = policy.is_level and policy.shards == 1 and policy.scale in ("mean", "square-root", "linear")
    return is_plain and travels and not nodes.local_steps


def home_layout(layout: Layout, nodes: Nodes) -> Layout:
    """The layout of the job between nodes, whose workers are the nodes: of the home arena, if there is one.

    Raises PolicyError, UnsupportedError.
    """
    check_policy(layout.policy, nodes)
    replicas = are_replicas(layout.policy, nodes.policy)
    if layout.owner_lanes:
        raise UnsupportedError("a job of several nodes keeps its arenas in host memory: set FASTPS_PLACEMENT=host")
    if layout.gradient_type == "float64" and not replicas:
        raise UnsupportedError(
            "a job of several nodes: expected float32, bfloat16 or float16 parameters, found float64; use one node, or"
            " model.float()"
        )
    if layout.gradient_type != "float32" and not replicas:
        raise UnsupportedError(
            f"a job of several nodes sums float32 gradients: expected push_dtype=torch.float32, found {layout.gradient_type}"
        )
    if layout.rule.number == fold.RULE_SUMMING and not (nodes.policy.local_steps or replicas):
        raise UnsupportedError(
            f"rule {layout.rule.name!r} reads sums over whole parameters, and a job of several nodes cuts parameters into"
            " parts: expected a rule without sums, or --local-steps (FASTPS_LOCAL_STEPS), with which each node applies it"
        )
    faults = FaultPolicy(nodes.policy.on_node_loss, layout.faults.nonfinite)
    masters = layout.parameters
    if not replicas:  # no model reads a home's weights
        masters = tuple(replace(parameter, type="float32") for parameter in layout.parameters)
    home = replace(
        layout,
        parameters=masters,
        workers=nodes.count,
        extra_bytes=layout.extra_bytes if replicas else 0,
        faults=faults,
        server="workers",
        lanes_are="nodes",
        carried=(),
    )
    return replace(home, rule=outer_update(nodes.policy).rule) if nodes.policy.local_steps else home


def leaf_layout(layout: Layout, nodes: Nodes) -> Layout:
    """The layout of a leaf arena, whose workers are those of one node, and whose agent is its server."""
    if are_replicas(layout.policy, nodes.policy):
        within = layout.policy if nodes.policy.within == "bsp" else parse_policy(_WITHIN["asp"])
        policy = replace(within, clip=layout.policy.clip, ema=layout.policy.ema)
        lanes = layout.faults.lanes(nodes.local_workers)
        others = (nodes.count - 1) * layout.faults.max_workers or layout.workers - nodes.local_workers
        room = ROOM_HEADER_BYTES
        if layout.extra_bytes:  # of the buffers of a model, also for those of the other nodes' workers
            room = layout.extra_bytes * (1 + -(-others // lanes))
        return replace(layout, policy=policy, workers=nodes.local_workers, server="replica", extra_bytes=room)
    policy = replace(parse_policy(_WITHIN[nodes.policy.within]), clip=layout.policy.clip)  # a worker clips its own gradient
    parameters = tuple(replace(parameter, shard=0) for parameter in layout.parameters)
    faults = replace(layout.faults, nonfinite="allow")  # the home checks the sums
    return replace(
        layout,
        parameters=parameters,
        rule=layout.rule if nodes.policy.local_steps else _LEAF_RULE,
        policy=policy,
        workers=nodes.local_workers,
        faults=faults,
        server="agent",
        carried=tuple(replace(each, shard=0) for each in layout.carried),
    )


def outer_update(policy: NodePolicy) -> Update:
    """The home's rule with local_steps, and its hyper-parameters.

    >>> outer_update(NodePolicy(local_steps=32)).hyper[:2]
    (0.7, 0.9)
    """
    return SGD(policy.outer_lr, policy.outer_momentum, nesterov=policy.outer_momentum > 0)


def check_policy(policy: Policy, nodes: Nodes) -> None:
    """Raise PolicyError for a discipline that makes no sense between nodes, with the reason."""
    policy.check_workers(nodes.count)
    local = nodes.policy.local_steps > 0
    reasons = {
        "auto measures the workers of one arena: choose a discipline": policy.warm_up > 0,
        "a batch that the coordinator tunes is for a worker, not for a node: leave tune=true out": policy.tune,
        "local_steps exchanges whole models: choose a discipline without shards": policy.shards > 1 and local,
        "the moving average stays on node 0, where no worker can read it: leave ema out": (
            policy.ema > 0 and not are_replicas(policy, nodes.policy)
        ),
        "a node pushes the sum of its workers: leave momentum=worker out": policy.momentum == "worker",
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is not None:
        raise PolicyError(f"{policy.spec} with {nodes.count} nodes: {reason}")
