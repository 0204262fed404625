"""The commands of virtual time: simulate, reproduce."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastps.cli.commands import CHOOSE, MACHINE
from fastps.cli.options import (
    DATA_HELP,
    ON_LINKS,
    SYNC_HELP,
    Bar,
    Json,
    LearningRate,
    Links,
    Momentum,
    Options,
    Parameters,
    Wide,
    console_of,
    option,
    with_options,
)
from fastps.errors import UsageError
from fastps.training.options import LEARNING_RATE

FACTORS_HELP = "NUMBER:FACTOR or FIRST-LAST:FACTOR, such as 0:3 or 0-9:3; may be repeated."

TEXTS: Options = {
    "compute": option(
        str,
        "lognormal:10ms,0.3",
        help="How long a step computes: constant:TIME, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA (of the logarithm),"
        " pareto:LEAST,SHAPE, or replay:FILE (a line of times such as 10ms 12ms for all workers, or a line for each).",
    ),
    "speed": option(list[str], [], help="Workers that are FACTOR times as fast: " + FACTORS_HELP),
    "straggler": option(list[str], [], help="Workers that compute FACTOR times as long: " + FACTORS_HELP),
    "burst": option(
        str | None,
        None,
        metavar="EVERY:LENGTH:FACTOR",
        help="Each worker is slow now and then, such as 10s:500ms:3; mean times.",
    ),
    "model_bytes": option(str, "0", metavar="SIZE", help="Bytes of a push, and of a pull, such as 100MB."),
    "bandwidth": option(
        str, "0", metavar="RATE", help="Of each server's port, each direction, such as 10Gbit; 0: without bound."
    ),
    "worker_bandwidth": option(
        str, "0", metavar="RATE", help="Of each worker's port, in even parts for the shards; 0: without bound."
    ),
    "latency": option(str, "0s", metavar="TIME", help="From the last byte sent to its arrival, such as 50us."),
    "service_time": option(
        str, "0s", metavar="TIME", help="Of a server for each message, push or answer, one after the other, such as 100us."
    ),
    "service_rate": option(
        str, "0", metavar="RATE", help="And bytes of it that a server goes through, such as 5GB; 0: without bound."
    ),
    "update_time": option(str, "0s", metavar="TIME", help="Of a server for each update, such as 1ms."),
    "slow_server": option(list[str], [], help="Shards whose server is FACTOR times as slow: " + FACTORS_HELP),
    "late_push": option(str | None, None, metavar="SHARE:TIME", help="A share of the pushes comes so late, such as 0.01:0.5s."),
    "late_pull": option(str | None, None, metavar="SHARE:TIME", help="The same for answers to workers."),
}
"""The options that are read as texts with units: the fields of SimulationTexts."""

commands = typer.Typer()
ORDER = 40


@commands.command(
    rich_help_panel=CHOOSE,
    epilog="Examples:  fastps simulate --sync bsp,asp,ssp:3,dssp:3,15 -n 100 --straggler 0:3   |   fastps simulate --sync"
    " r2sp:0.8 -n 32 --model-bytes 500MB --bandwidth 100Gbit --latency 20us   |   fastps simulate --sync psp:24,0.9 -n 32"
    " --shards 32 --late-pull 0.0016:4s --json -   |   fastps simulate --sync softsync:1,softsync:30 -n 30"
    " --compute constant:25ms --model-bytes 350kB --service-rate 4.8GB --update-time 1ms   |   fastps simulate -n 64"
    " --links links.json --parameters 25e6 --compute lognormal:300ms,0.1",
)
@with_options(TEXTS, ON_LINKS)
def simulate(
    sync: Annotated[
        str, typer.Option(help="Specs, separated by commas, on the same computing times. " + SYNC_HELP)
    ] = "bsp,asp,ssp:3,dssp:3,15",
    workers: Annotated[int, typer.Option("--workers", "-n", help="Number of workers; with --links, of nodes.")] = 4,
    steps: Annotated[
        int, typer.Option(help="Steps of a worker; the run ends after workers x steps pushes, by whomever.")
    ] = 1000,
    leave: Annotated[bool, typer.Option("--leave", help="Each worker leaves after its own steps instead.")] = False,
    batch_size: Annotated[int, typer.Option(help="Samples of a worker's first batch.")] = 32,
    shards: Annotated[int | None, typer.Option(help="Servers that the model is cut over; default: as the spec says.")] = None,
    cores: Annotated[
        float, typer.Option(metavar="C", help="Cores that computing workers share, in slices of 4 ms; 0: each has one.")
    ] = 0.0,
    links: Links = None,
    parameters: Parameters = None,
    seed: Annotated[int, typer.Option(help="Decides all draws: one seed, one trace, on any machine.")] = 0,
    train: Annotated[bool, typer.Option("--train", help="Compute each gradient, too: accuracy over virtual time.")] = False,
    data: Annotated[str, typer.Option(help="What --train trains on: " + DATA_HELP)] = "digits",
    lr: LearningRate = LEARNING_RATE,
    momentum: Momentum = 0.5,
    trace: Annotated[Path | None, typer.Option(help="Write every event into this file (NumPy); for one spec.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the staleness into this picture.")] = None,
    wide: Wide = False,
    json_file: Json = None,
    progress: Bar = True,
    **given: Any,
) -> None:
    """Play synchronization schemes in virtual time, with as many workers as you like, by the scheduler that the store runs."""
    from fastps.cli import simulation_report as report
    from fastps.cli.links_report import links_of
    from fastps.cli.tables import show
    from fastps.simulation.links import on_links
    from fastps.simulation.options import SimulationTexts, read_policies, read_simulation
    from fastps.system.json_report import write_json

    texts = SimulationTexts(**{name: given[name] for name in TEXTS})
    policies = read_policies(sync, shards)
    simulation = read_simulation(texts, workers=workers, steps=steps, leave=leave, batch=batch_size, cores=cores, seed=seed)
    runs = [(policy, simulation) for policy in policies]
    if links is not None:
        found, model = links_of(links, parameters, workers, given["link_dtype"], given["homes"])
        runs = [on_links(simulation, policy, found, model) for policy in policies]
    if trace is not None and len(policies) > 1:
        raise UsageError(f"--trace records one run: expected one spec, found {len(policies)}")
    console = console_of(json_file)
    training = None
    if train:
        from fastps.lab.virtual.training import VirtualTraining
        from fastps.training.data import load

        training = VirtualTraining(data=load(data), learning_rate=lr, momentum=momentum)
    outcomes = report.simulate_all(
        runs, console, trace=trace is not None, training=training, progress=progress and console.is_terminal
    )
    rows = [outcome.row for outcome in outcomes]
    title = f"{workers:,} {'nodes' if links is not None else 'workers'} x {steps:,} steps in virtual time, seed {seed}"
    show(console, report.simulation_table(rows, title), wide=wide)
    console.print(report.simulation_footer(rows))
    if trace is not None:
        report.save_trace(outcomes[0], trace)
    if plot is not None:
        report.plot_staleness(rows, plot)
    if json_file is not None:
        write_json("simulate", rows, json_file)


@commands.command(
    rich_help_panel=MACHINE,
    epilog="Examples:  fastps reproduce --quick   |   fastps reproduce dssp rudra/figure-4   |   fastps reproduce --json -",
)
def reproduce(
    ids: Annotated[
        list[str], typer.Argument(metavar="[ID]...", help="Papers or rows, as --list shows them; default: all.")
    ] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps and seeds, on the same expectations.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Show the rows and measure nothing.")] = False,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as a document.")] = None,
    json_file: Json = None,
    progress: Bar = True,
) -> None:
    """Measure the headline tables and figures of the five papers again, and say of each whether it is reproduced."""
    from fastps.cli.reproduce_report import list_table, verdict_table
    from fastps.cli.tables import show
    from fastps.lab.papers import Effort, choose
    from fastps.lab.papers import show as output
    from fastps.system.json_report import write_json

    rows = choose(ids)
    console = console_of(json_file)
    if list_only:
        show(console, list_table(rows))
        if json_file is not None:
            write_json(
                "reproduce --list", [{"id": row.id, "source": row.source, "claim": row.claim} for row in rows], json_file
            )
        return
    effort = Effort(quick)
    verdicts = output.reproduce_watched(rows, effort, console, progress=progress and console.is_terminal)
    show(console, verdict_table(verdicts, effort))
    console.print(output.notes(verdicts), markup=False, highlight=False)
    if markdown is not None:
        command = " ".join(["fastps reproduce", *ids, *(["--quick"] if quick else [])])
        output.write_markdown(verdicts, command, markdown)
    if json_file is not None:
        write_json("reproduce", [verdict.as_json() for verdict in verdicts], json_file)
