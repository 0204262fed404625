"""Rudra's machines as simulations: a server that handles messages one by one, and the four configurations of Table 4."""

from fastps.lab.papers.runs import SECOND, lognormal
from fastps.simulation.simulate import Simulation

LEARNERS = 30
SPREAD = 0.05
# Section 3.3: 16 tasks that send 300 MB to one receiver take over a second.
PORT = 16 * 300e6
# Section 5.5: one learner takes 54 hours for 1.2 million images, in batches of 256.
SAMPLE_S = 54 * 3600 / 1.2e6
ONE_BY_ONE = (
    "a server 'handles each incoming message one by one', and pushing gradients and weights are blocking calls (section 3.2): a"
    f" message occupies it, either way, for its bytes at {PORT / 1e9:g} GB/s (section 3.3: 16 pushes of 300 MB take 'over a"
    " second')"
)


def step_s(batch: int) -> float:
    """Return the seconds that a step of Table 4's learners computes.

    It is on the line through those of 4 and of 8 samples, of which 54 learners of adv*, which overlaps everything, process 1.2
    million in 125 (Table 4) and 96 minutes (section 5.5; it does not name the architecture, and stands with adv*'s run).

    >>> round(step_s(4), 2), round(step_s(16), 2)
    (1.35, 3.52)
    """
    four_s, eight_s = (minutes * 60 * 54 * samples / 1.2e6 for minutes, samples in ((125, 4), (96, 8)))
    return four_s + (eight_s - four_s) * (batch - 4) / 4


def image_net(steps: int) -> dict[str, tuple[str, Simulation]]:
    """Return spec and simulation of Table 4's configurations, by name."""
    found = {}
    for name, spec, batch, learners in (
        ("base-hardsync", "hardsync:256", 16, 18),
        ("base-softsync", "softsync:1", 16, 18),
        ("adv-softsync", "adv:1,groups=7", 4, 54),
        ("adv*-softsync", "adv*:1,groups=7", 4, 54),
    ):
        found[name] = (
            spec,
            Simulation(
                workers=learners,
                steps=steps,
                batch=batch,
                compute=lognormal(step_s(batch) * SECOND, SPREAD),
                model_bytes=289e6,
                service_rate=PORT,
            ),
        )
    return found
