"""`fastps run --retries`: a launcher that begins again after its job of several nodes was lost, until the job ends otherwise.

Such a job ends on every node with the exit code that says so. Each launcher then keeps its number, meets the others at the same
rendezvous, and goes on from the newest checkpoint. `--restarts` is for one node, whose arena outlives a worker: it replaces
lost workers one by one, whatever ended them. Here the arenas and what was not saved are gone; an error of a script ends all.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fastps.errors import TRY_AGAIN, NodeLostError
from fastps.processes.nodes import NodeOptions
from fastps.processes.options import JobOptions
from fastps.processes.outcome import Outcome
from fastps.system.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger("fastps.launch")

_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 1_000_000_000, 30_000_000_000


def with_retries(
    launch: Callable[[JobOptions, NodeOptions], Outcome],
    options: JobOptions,
    nodes: NodeOptions,
    newest: Callable[[Path], str],
    clock: Clock = SYSTEM_CLOCK,
) -> Outcome:
    """Launch, and launch again after losses, at most `nodes.retries` times. Returns the last outcome.

    `newest` says which is the newest checkpoint of a folder, or "". The pause before an attempt grows from 1 s to 30 s, and
    begins again at 1 s when a checkpoint has come that is newer than the last. Raises the last NodeLostError of a meeting, and
    every other error at once.
    """
    pause_ns, resumed = _FIRST_PAUSE_NS, options.resume
    for retry in range(1, nodes.retries + 2):
        try:
            outcome = launch(options, nodes)
        except NodeLostError as error:
            if retry > nodes.retries:
                raise
            reason = str(error)
        else:
            if outcome.exit_code != TRY_AGAIN or retry > nodes.retries:
                break
            reason = outcome.end.reason if outcome.end is not None else ""
            if outcome.place is not None:
                nodes = replace(nodes, rank=str(outcome.place.number), earlier=outcome.place.job)
        if options.checkpoint:
            options = replace(options, resume=newest(Path(options.checkpoint)) or options.resume)
        pause_ns = _FIRST_PAUSE_NS if options.resume != resumed else pause_ns
        resumed = options.resume
        logger.warning(
            "%s; all nodes meet again in %g s (retry %d of %d) and %s",
            *(reason, pause_ns / 1e9, retry, nodes.retries),
            f"go on from {Path(resumed).name}" if resumed else "begin anew: there is no checkpoint",
        )
        clock.sleep_ns(pause_ns)
        pause_ns = min(2 * pause_ns, _LONGEST_PAUSE_NS)
    return outcome
