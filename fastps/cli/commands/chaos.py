"""The commands about faults: chaos."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from fastps.cli.commands import MACHINE
from fastps.cli.options import Json, console_of, save_rows
from fastps.errors import UsageError

commands = typer.Typer()
ORDER = 60


@commands.command(
    rich_help_panel=MACHINE,
    epilog="Examples:  fastps chaos --seeds 1000   |   fastps chaos --seed 4711 --seeds 1   |   fastps chaos --seeds 300"
    " --mutant forget-pins   |   fastps chaos --nodes 3 --seeds 10000   |   fastps chaos --devices 4 --seeds 20000",
)
def chaos(
    seeds: Annotated[int, typer.Option(help="How many seeds to play.")] = 1000,
    seed: Annotated[int, typer.Option(help="The first seed; with --seeds 1 it plays that history again.")] = 0,
    mutant: Annotated[
        str | None, typer.Option(help="Switch on a fault of the protocol itself, to see that it is found; docs/reliability.md.")
    ] = None,
    nodes: Annotated[
        int, typer.Option(help="Play the messages between this many nodes, under lost edges, cuts, crashes and restarts.")
    ] = 1,
    devices: Annotated[
        int, typer.Option(help="Play jobs on up to this many simulated GPUs, and check the order of their work; 0: none.")
    ] = 0,
    json_file: Json = None,
) -> None:
    """Play the real protocol under crashes, stalls and skewed clocks, step by step, and check every step.

    Needs the failpoint build (`make hooks`), except with --nodes and --devices. Exit code 1 if any seed violates what is
    promised; its number replays it.
    """
    if seeds < 1 or seed < 0:
        raise UsageError(f"expected at least 1 seed, from 0 on; found --seeds {seeds} --seed {seed}")
    if nodes != 1 and devices:
        raise UsageError(f"expected --nodes or --devices, found both: --nodes {nodes} --devices {devices}")
    play, where = _world(nodes, devices)
    console = console_of(json_file)
    with console.status(f"{seeds:,} seeds from {seed}") as status:
        findings = play(seeds, seed, mutant=mutant, watch=lambda so_far: status.update(f"{so_far.seeds:,} of {seeds:,} seeds"))
    faults = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in findings.faults.items())
    commits = "" if where else f", {findings.versions:,} commits"
    worst = "" if where else f"; worst detection {findings.worst_detection_s:.3f} s (simulated)"
    console.print(
        f"{findings.seeds:,} seeds, {findings.steps:,} steps{commits}; {faults}; {len(findings.violations)} violations{worst}"
    )
    for found in findings.violations[:10]:
        spec = "" if where else f" ({found['spec']})"
        console.print(f"seed {found['seed']}{spec}: {found['violation']}")
    counts = {**asdict(findings), "violations": len(findings.violations), "failing": findings.violations[:100]}
    save_rows("chaos", [{**where, **counts}], json_file)
    if findings.violations:
        raise typer.Exit(1)


def _world(nodes: int, devices: int) -> tuple[Callable[..., Any], dict[str, int]]:
    if devices:
        from fastps.lab.worlds import device_chaos

        return partial(device_chaos.run, devices), {"devices": devices}
    if nodes != 1:
        from fastps.lab.worlds import node_chaos

        return partial(node_chaos.run, nodes), {"nodes": nodes}
    from fastps.lab.worlds import chaos as host_chaos

    return host_chaos.run, {}
