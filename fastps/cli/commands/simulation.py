"""The commands of virtual time: simulate, reproduce."""

from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastps.cli import options
from fastps.cli.commands import CHOOSE, MACHINE
from fastps.cli.tables import say, show
from fastps.errors import UsageError
from fastps.lab.demo.options import LEARNING_RATE
from fastps.lab.plots import plot_staleness
from fastps.lab.virtual.options import SimulationTexts, read_policies, read_simulation

if TYPE_CHECKING:
    from fastps.cli.simulation_report import Player


def _option(text: "Field[Any]") -> tuple[Any, Any]:
    """A field of SimulationTexts as an option: several texts, one, or none."""
    if text.default == ():
        return options.option(list[str], [], **text.metadata)
    return options.option(str if text.default is not None else str | None, text.default, **text.metadata)


TEXTS: options.Options = {text.name: _option(text) for text in fields(SimulationTexts)}
commands = typer.Typer()
ORDER = 40
_NOT_WITH_SCRIPT = ("steps", "leave", "train", "data", "lr", "momentum", "trace")


@commands.command(
    rich_help_panel=CHOOSE,
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  fastps simulate --script -n 16 --compute lognormal:50ms,0.3 --straggler 0:3 --sync bsp,asp train.py"
    " --epochs 3   |    fastps simulate --sync bsp,asp,ssp:3,dssp:3,15 -n 100 --straggler 0:3   |   fastps simulate --sync"
    " r2sp:0.8 -n 32 --model-bytes 500MB --bandwidth 100Gbit --latency 20us   |   fastps simulate --sync psp:24,0.9 -n 32"
    " --shards 32 --late-pull 0.0016:4s --json -   |   fastps simulate --sync softsync:1,softsync:30 -n 30"
    " --compute constant:25ms --model-bytes 350kB --service-rate 4.8GB --update-time 1ms   |   fastps simulate -n 64"
    " --links links.json --parameters 25e6 --compute lognormal:300ms,0.1",
)
@options.with_options(TEXTS, options.ON_LINKS)
def simulate(
    context: typer.Context,
    arguments: Annotated[
        list[str], typer.Argument(metavar="[SCRIPT [ARGS]...]", help="With --script: a script and its arguments.")
    ] = [],  # noqa: B006
    sync: Annotated[
        str, typer.Option(help="Specs, separated by commas, on the same computing times. " + options.SYNC_HELP)
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
    links: options.Links = None,
    parameters: options.Parameters = None,
    seed: Annotated[int, typer.Option(help="Decides all draws: one seed, one trace, on any machine.")] = 0,
    train: Annotated[bool, typer.Option("--train", help="Compute each gradient, too: accuracy over virtual time.")] = False,
    script: Annotated[bool, typer.Option("--script", help="Run your own script, each worker a process.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --script: write the final weights into a folder per spec.")
    ] = None,
    data: Annotated[str, typer.Option(help="What --train trains on: " + options.DATA_HELP)] = "digits",
    lr: options.LearningRate = LEARNING_RATE,
    momentum: options.Momentum = 0.5,
    trace: Annotated[
        Path | None,
        typer.Option(callback=options.checked, help="Write every event into this file (NumPy); for one spec."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=options.checked_picture, help="Draw the staleness into this picture.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", callback=options.checked_page, help="Compare the specs on a page."),
    ] = None,
    wide: options.Wide = False,
    json_file: options.Json = None,
    progress: options.Bar = True,
    **given: Any,
) -> None:
    """Play synchronization schemes in virtual time, with as many workers as you like, by the scheduler that the store runs."""
    from fastps.cli import simulation_report as report
    from fastps.lab.measuring.simulated_links import ModelOnNodes, on_links, read_links
    from fastps.lab.virtual import side_by_side
    from fastps.report.page import check_installed, write

    if page is not None:
        check_installed()
    texts = SimulationTexts(**{name: given[name] for name in TEXTS})
    policies = read_policies(sync, shards)
    simulation = read_simulation(texts, workers=workers, steps=steps, leave=leave, batch=batch_size, cores=cores, seed=seed)
    runs = [(policy, simulation) for policy in policies]
    if links is None:
        options.check_beside(context, "--links", "parameters", "link_dtype")
    else:
        if parameters is None:
            raise UsageError("--links: expected --parameters beside it, such as 25e6, or a checkpoint")
        found = read_links(links)
        model = ModelOnNodes(options.parameters_of(parameters), workers, given["link_dtype"])
        runs = [on_links(simulation, policy, found, model) for policy in policies]
    if trace is not None and len(policies) > 1:
        raise UsageError(f"--trace records one run: expected one spec, found {len(policies)}")
    console = options.console_of(json_file)
    outcomes = report.simulate_all(runs, console, _player(context), progress=progress and console.is_terminal)
    rows = [outcome.row for outcome in outcomes]
    made = f"of {arguments[0]}" if script else f"x {steps:,} steps"
    title = f"{workers:,} {'nodes' if links is not None else 'workers'} {made} in virtual time, seed {seed}"
    show(console, report.simulation_table(rows, title), wide=wide)
    console.print(report.simulation_footer(rows))
    options.save_rows("simulate", rows, json_file)
    if trace is not None:
        report.save_trace(outcomes[0], trace)
    if plot is not None:
        plot_staleness(rows, plot)
    if page is not None:
        write(side_by_side.page_of(rows, title), page)


def _player(context: typer.Context) -> "Player":
    given = context.params
    if given["script"]:
        return _script_player(context)
    if given["arguments"] or given["checkpoint"] is not None:
        found = given["arguments"][0] if given["arguments"] else "--checkpoint"
        raise UsageError(f"expected --script before a script or its checkpoint, found {found} without")
    if given["train"]:
        if given["kill"]:
            raise UsageError("--kill beside --train: expected --script, which runs each worker as a process")
        from fastps.lab.demo.data import load
        from fastps.lab.virtual.training import VirtualTraining, train_virtually

        training = VirtualTraining(data=load(given["data"]), learning_rate=given["lr"], momentum=given["momentum"])
        return lambda policy, simulation, tick: train_virtually(policy, simulation, training, tick=tick)
    options.check_beside(context, "--train", "data", "lr", "momentum")
    from fastps.simulation import simulate as simulation

    return lambda policy, described, tick: simulation.simulate(policy, described, trace=given["trace"] is not None, tick=tick)


def _script_player(context: typer.Context) -> "Player":
    from fastps.lab.virtual import script

    given = context.params
    for name in options.given_options(context, *_NOT_WITH_SCRIPT):
        raise UsageError(f"{name} beside --script: expected a script that says what is trained, and for how many steps")
    if not given["arguments"]:
        raise UsageError("--script: expected a script and its arguments behind the options, found none")
    command, folder = script.command_of(given["arguments"]), given["checkpoint"]
    script.check_workers(given["workers"])
    return lambda policy, simulation, tick: script.play(
        policy, simulation, command, tick, folder and folder / policy.spec.replace("/", "-")
    )


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
    json_file: options.Json = None,
    progress: options.Bar = True,
) -> None:
    """Measure the headline tables and figures of the five papers again, and say of each whether it is reproduced."""
    from fastps.cli.report import list_table, verdict_table
    from fastps.lab.papers import Effort, choose
    from fastps.lab.papers import show as output

    rows = choose(ids)
    console = options.console_of(json_file)
    if list_only:
        show(console, list_table(rows))
        listed = [{"id": row.id, "source": row.source, "claim": row.claim} for row in rows]
        return options.save_rows("reproduce --list", listed, json_file)
    effort = Effort(quick)
    verdicts = output.reproduce_watched(rows, effort, console, progress=progress and console.is_terminal)
    show(console, verdict_table(verdicts, effort))
    say(console, output.notes(verdicts))
    if markdown is not None:
        command = " ".join(["fastps reproduce", *ids, *(["--quick"] if quick else [])])
        output.write_markdown(verdicts, command, markdown)
    options.save_rows("reproduce", [verdict.as_json() for verdict in verdicts], json_file)
