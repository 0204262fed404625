"""What a process learns of its job's nodes from the environment, and what is refused between nodes."""

import re
from typing import Any

import pytest
import torch

import fastps
from fastps.errors import PolicyError, UsageError
from fastps.job.disciplines import DISCIPLINES
from fastps.job.nodes import Nodes, address, check_policy, nodes_of_environment
from fastps.job.options import NodePolicy
from fastps.job.specs import parse_policy
from tests.job.conftest import Environment

OWN = {
    "FASTPS_NNODES": "2", "FASTPS_NODE_RANK": "1", "FASTPS_RENDEZVOUS": "[fd77::1]:29400", "FASTPS_LOCAL_RANK": "2",
    "FASTPS_LOCAL_WORKERS": "3",
}  # fmt: skip
TORCHRUN = {
    "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
}  # fmt: skip


def test_one_node_has_no_nodes(environment: Environment) -> None:
    assert nodes_of_environment() is None
    environment({"GROUP_WORLD_SIZE": "1"})
    assert nodes_of_environment() is None


@pytest.mark.parametrize(("variables", "host", "port"), [(OWN, "fd77::1", 29400), (TORCHRUN, "node0", 29500)])
def test_both_launchers_say_the_same(environment: Environment, variables: dict[str, str], host: str, port: int) -> None:
    environment(variables)
    assert nodes_of_environment() == Nodes(2, 1, 2, 3, host, port)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("FASTPS_NODE_RANK", "2", "expected a node from 0 to 1, found node 2"),
    ("FASTPS_NODE_RANK", "x", "FASTPS_NODE_RANK to be a whole number, found 'x'"),
    ("FASTPS_LOCAL_RANK", "3", "expected a worker from 0 to 2"),
    ("FASTPS_RENDEZVOUS", "node0", "HOST:PORT, such as node0:29400, found 'node0'"),
    ("FASTPS_NODE_TIMEOUT", "0.1", "--node-timeout (FASTPS_NODE_TIMEOUT) to be a number of 1 to 3600 seconds, found '0.1'"),
    ("FASTPS_NODE_TIMEOUT", "soon", "(FASTPS_NODE_TIMEOUT) to be a number of 1 to 3600 seconds, found 'soon'"),
])  # fmt: skip
def test_a_wrong_value_is_named(environment: Environment, name: str, value: str, message: str) -> None:
    environment(OWN, {name: value})
    with pytest.raises(UsageError, match=re.escape(message)):
        nodes_of_environment()


@pytest.mark.parametrize(("values", "message"), [
    ({"local_fragments": 2}, "(FASTPS_LOCAL_FRAGMENTS): expected --local-steps (FASTPS_LOCAL_STEPS) beside"),
    ({"local_overlap": 1}, "--local-overlap (FASTPS_LOCAL_OVERLAP): expected --local-steps"),
    ({"local_steps": 10, "local_fragments": 4}, "expected a divisor of the 10 local steps, found 4"),
    ({"local_steps": 10, "local_fragments": 5, "local_overlap": 3}, "expected at most 2 versions"),
])  # fmt: skip
def test_fragments_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        NodePolicy(**values)


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:0", "a:70000", "a:b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        address(text)


@pytest.mark.parametrize("name", list(DISCIPLINES))
def test_every_discipline_makes_sense_between_nodes_or_says_why_not(name: str) -> None:
    of = Nodes(4, 0, 0, 1, "a", 1)
    for spec in DISCIPLINES[name].examples:
        policy = parse_policy(spec)
        if policy.warm_up or policy.tune or policy.ema:
            with pytest.raises(PolicyError, match="with 4 nodes:"):
                check_policy(policy, of)
        else:
            check_policy(policy, of)


def test_a_policy_survives_the_environment(environment: Environment) -> None:
    policy = NodePolicy("asp", "continue", 7.5, "int8")
    environment(policy.environment())
    assert NodePolicy.of_environment() == policy


def test_an_optimizer_that_is_told_its_workers_is_of_no_node(environment: Environment) -> None:
    environment(OWN)
    weights = torch.nn.Parameter(torch.zeros(1))
    with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), workers=1) as optimizer:
        weights.grad = torch.ones(1)
        optimizer.step()
        assert weights.item() == -1.0
