"""Rudra's machines as simulations: a server that handles messages one by one, and the four configurations of Table 4."""

from fastps.reproduce.runs import SECOND, lognormal
from fastps.simulation.simulate import Simulation

LEARNERS = 30
SPREAD = 0.05
# Section 3.3: 16 tasks that send 300 MB to one receiver take over a second.
PORT = 16 * 300e6
# Section 4.2: 54 learners of 4 samples take 125 minutes for 1.2 million images with everything overlapped (Table 4).
STEP_S = 125 * 60 * 54 * 4 / 1.2e6
ONE_BY_ONE = (
    "a server 'handles each incoming message one by one', and pushing gradients and weights are blocking calls (section 3.2): a"
    f" message occupies it, either way, for its bytes at {PORT / 1e9:g} GB/s (section 3.3: 16 pushes of 300 MB take 'over a"
    " second')"
)


def image_net(steps: int) -> dict[str, tuple[str, Simulation]]:
    """Return spec and simulation of Table 4's configurations, by name."""
    found = {}
    for name, spec, batch, learners in (
        ("base-hardsync", "hardsync:256", 16, 18),
        ("base-softsync", "softsync:1", 16, 18),
        ("adv-softsync", "adv:1,groups=7", 4, 54),
        ("adv*-softsync", "adv*:1,groups=7", 4, 54),
    ):
        computing_s = 54 * 3600 / 1.2e6 * 16 if batch == 16 else STEP_S
        found[name] = (
            spec,
            Simulation(
                workers=learners,
                steps=steps,
                batch=batch,
                compute=lognormal(computing_s * SECOND, SPREAD),
                model_bytes=289e6,
                service_rate=PORT,
            ),
        )
    return found
