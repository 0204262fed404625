"""Cluster-A of the R2SP paper as a simulation: models, links, and how they are read from the paper's Tables and Figure 2."""

from dataclasses import dataclass

from fastps.lab.papers.runs import SECOND, Found, lognormal
from fastps.simulation.simulate import Simulation

WORKERS = 16  # cluster-A: 16 workers, 4 servers
SPREAD = 0.05


@dataclass(frozen=True)
class Model:
    """A column of Table I, with 8 workers and 2 servers: bytes, and seconds of an iteration and blocked in transfers."""

    bytes: float
    blocked_s: float
    iteration_s: float

    @property
    def overhead(self) -> float:
        """The transfers' share of the iteration."""
        return self.blocked_s / self.iteration_s


MODELS = {
    "resnet32": Model(50e6, 0.11, 0.23),
    "alexnet": Model(240e6, 2.89, 3.39),
    "vgg16": Model(552e6, 9.04, 9.74),
    "inception-v3": Model(108e6, 1.27, 1.97),
}
LINKS = (
    "the contention model: the servers' ports are shared evenly, each direction by itself, and are as wide as makes a BSP"
    " iteration's transfers take what Table I says (cluster-A has twice its workers and servers); a worker alone is as much"
    " faster as Figure 2's text says, 25 % for ResNet32 and 60 % for VGG16, the least and the most of the four, and between"
    " them in proportion to Table I's overhead. Faster by 60 % is taken as a rate 1.6 times as large."
)
CONTENTION = LINKS + " Computing times vary by 5 % (section V: 'slightly')."


def cluster_a(model: Model, steps: int, *, speedup_is_ratio: bool = True, gain: float | None = None) -> Simulation:
    """The simulation of a model. `gain`: how much faster a worker alone is; None: by Figure 2's text."""
    least, most = MODELS["resnet32"].overhead, MODELS["vgg16"].overhead
    if gain is None:
        gain = 0.25 + 0.35 * (model.overhead - least) / (most - least)
    alone_s = model.iteration_s / (1 + gain) if speedup_is_ratio else model.iteration_s * (1 - gain)
    computing_s = model.iteration_s - model.blocked_s
    return Simulation(
        workers=WORKERS,
        steps=steps,
        compute=lognormal(computing_s * SECOND, SPREAD),
        model_bytes=model.bytes,
        bandwidth=2 * WORKERS * model.bytes / model.blocked_s,
        worker_bandwidth=2 * model.bytes / (alone_s - computing_s),
    )


def iteration_s(found: Found) -> float:
    """Mean seconds of an iteration of all workers."""
    return float(WORKERS / found["steps_per_s"])
