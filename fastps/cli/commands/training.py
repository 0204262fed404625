"""The commands that train: train, compare, stragglers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fastps.cli import options
from fastps.cli.commands import TRAIN, WATCH
from fastps.cli.report import arrivals_table, faults_text, splits_table, straggler_rows, straggler_verdict, training_table
from fastps.cli.tables import say, show
from fastps.errors import UsageError
from fastps.job.specs import parse_policies, parse_policy
from fastps.lab import stragglers as estimate
from fastps.lab.plots import plot_accuracy, plot_arrivals
from fastps.processes.script import command_of

EXPONENT_HELP = (
    "Iterations to converge are taken in proportion to N^-EXPONENT for N gradients a step. The default is of Chen et al.,"
    " Revisiting Distributed Synchronous SGD, Figure 5: 137.5e3 with N = 50, 76.2e3 with N = 100."
)
ITERATIONS_HELP = "Iterations that you measured for some N, used instead, on straight lines between them."

commands = typer.Typer()
ORDER = 10


def _title(given: Mapping[str, Any]) -> str:
    return f"{given['data']}, {given['epochs']} epochs, seed {given['seed']}"


@commands.command(
    rich_help_panel=TRAIN,
    epilog="Examples:  fastps train --sync bsp -n 4   |   fastps train --sync dssp:3,15 --straggler 0:3 --json -"
    "   |   fastps train --sync asp --compute-ms 20 --restarts 40 --inject-faults kill:40,stop:20,seconds:600"
    " --epochs 100",
)
@options.with_options(options.TRAINING, options.PUSH, options.JOB, options.OUTPUT, epochs=10)
def train(
    context: typer.Context,
    sync: Annotated[str, typer.Option(help=options.SYNC_HELP)] = "bsp",
    warm_start: Annotated[
        Path | None, typer.Option(help="Begin with the weights that --save wrote (Rudra's warm start).")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(callback=options.checked, help="Write the final weights into this file (.npz).")
    ] = None,
    trace: options.TraceFile = None,
    tensorboard: options.TensorBoard = None,
    **given: Any,
) -> None:
    """Train a small network on real images with several workers, and print a summary."""
    from fastps.lab.demo import runs
    from fastps.lab.demo.data import load

    policy = parse_policy(sync)
    if given["checkpoint"] is None:
        options.check_beside(context, "--checkpoint", "overwrite")
    training = options.options_of(
        context,
        sync=policy.spec,
        warm_start=str(warm_start.resolve()) if warm_start is not None else "",
        weights_file=str(save.resolve()) if save is not None else "",
    )
    if warm_start is not None and not warm_start.is_file():
        raise UsageError(f"--warm-start {warm_start}: expected a file that --save wrote, found none")
    options.check_workers(policy, given)
    console, job = options.console_of(given["json_file"]), options.job_options_of(context, given["seed"])
    shown = given["progress"] and console.is_terminal
    row = runs.train(training, load(given["data"]), console, job=job, progress=shown, trace=trace, tensorboard=tensorboard)
    show(console, training_table([row], _title(given)), wide=given["wide"])
    if "chaos" in row:
        console.print(faults_text(row["chaos"]))
    if trace is not None:
        say(console, f"recorded: see fastps trace {trace}, fastps advise {trace}")
    options.save_rows("train", [row], given["json_file"])


_OF_THE_SCRIPT = ("epochs", "batch_size", "lr", "momentum", "data", "straggler", "transfer_ms", "compute_ms", "pull_delay")
_NOT_WITH_SCRIPT = (*_OF_THE_SCRIPT, "push_dtype", "seeds", "plot")


@commands.command(
    rich_help_panel=TRAIN,
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  fastps compare --sync bsp,asp,ssp:3,dssp:3,15 --straggler 0:3 --plot accuracy.svg --report page.html"
    "   |   fastps compare --sync bsp,asp --runs 5 --csv runs.csv   |   fastps compare --sync bsp,asp --seed 0,1,2"
    "   |   fastps compare --sync bsp,asp,dssp:3,15 -n 4 --script train.py --epochs 3",
)
@options.with_options({name: each for name, each in options.TRAINING.items() if name != "seed"}, options.PUSH, options.OUTPUT)
def compare(
    context: typer.Context,
    arguments: Annotated[
        list[str], typer.Argument(metavar="[SCRIPT [ARGS]...]", help="With --script: a script and its arguments.")
    ] = [],  # noqa: B006 - typer copies it
    sync: Annotated[
        str,
        typer.Option(
            help="Specs, separated by commas. A comma begins a new spec only where the name of a discipline follows it, so"
            " bsp,dssp:3,15 are two specs. " + options.SYNC_HELP
        ),
    ] = "bsp,asp,ssp:3,dssp:3,15",
    runs: Annotated[int, typer.Option(help="Runs of each, by turns; medians are shown, with the least and the most.")] = 1,
    seeds: Annotated[
        str, typer.Option("--seed", metavar="N,...", help="Decides weights and order of samples; of several, a run with each.")
    ] = "0",
    script: Annotated[bool, typer.Option("--script", help="Train a script of your own instead.")] = False,
    plot: Annotated[
        Path | None, typer.Option(callback=options.checked_picture, help="Draw accuracy over time into this picture.")
    ] = None,
    report: options.Report = None,
    **given: Any,
) -> None:
    """Train the same network, or your own script, under several synchronization schemes, and print one table."""
    from fastps.lab.demo import repeats

    if report is not None:
        from fastps.report.page import check_installed

        check_installed()  # before a long run
    if runs < 1:
        raise UsageError(f"--runs: expected 1 or more, found {runs}")
    policies = parse_policies(sync)
    for policy in policies:
        options.check_workers(policy, given)
    console = options.console_of(given["json_file"])
    run = _script_run(context, console) if script else _demo_run(context, console)
    rows = repeats.in_rounds(policies, repeats.seeds_of(seeds), runs, run)
    title = _compared(context.params)
    show(console, training_table(rows, title, rows[0]), wide=given["wide"])
    say(console, *[f"{row['sync']}: {row['last_line']}" for row in rows if row.get("last_line")])
    if told := repeats.verdict(rows):
        say(console, told, soft_wrap=True)
    if plot is not None:
        plot_accuracy(rows, plot)
    if report is not None:
        from fastps.lab.demo import comparison
        from fastps.report import page

        page.write(comparison.page_of(rows, title), report)
        say(console, f"{report}: open it in a browser")
    options.save_rows("compare", rows, given["json_file"])


def _compared(given: Mapping[str, Any]) -> str:
    """What was compared, as the title of a table."""
    if given["script"]:
        what = f"{given['arguments'][0]}, {given['workers']} workers"
    else:
        slow = " ".join(given["straggler"])
        what = f"{given['data']}, {given['epochs']} epochs, seed {given['seeds']}" + (f", straggler {slow}" if slow else "")
    return what + (f", {given['runs']} runs of each" if given["runs"] > 1 else "")


def _demo_run(context: typer.Context, console: Console) -> Callable[[Any, int], dict[str, Any]]:
    """Trains the network of `fastps train` under a policy and a seed."""
    from fastps.lab.demo import runs
    from fastps.lab.demo.data import load

    given = context.params
    if given["arguments"]:
        raise UsageError(f"expected --script before a script, found {given['arguments'][0]} without")
    training, data = options.options_of(context, sync=""), load(given["data"])
    progress = given["progress"] and console.is_terminal
    return lambda policy, seed: runs.train(replace(training, sync=policy.spec, seed=seed), data, console, progress=progress)


def _script_run(context: typer.Context, console: Console) -> Callable[[Any, int], dict[str, Any]]:
    """Runs the script under a policy."""
    from fastps.lab.measuring.compared_script import run_script

    given = context.params
    for name in options.given_options(context, *_NOT_WITH_SCRIPT):
        raise UsageError(f"{name.replace('seeds', 'seed')} beside --script: expected a script that says what is trained")
    if not given["arguments"]:
        raise UsageError("--script: expected a script and its arguments behind the options, found none")
    command = command_of(given["arguments"], False)

    def run(policy: Any, seed: int) -> dict[str, Any]:
        say(Console(stderr=True), f"{policy.spec} ...")
        return run_script(command, policy, given["workers"])

    return run


@commands.command(
    rich_help_panel=WATCH, epilog="Example:  fastps stragglers -n 8 --straggler 0:2 --epochs 3 --plot arrivals.png"
)
@options.with_options(options.TRAINING, options.OUTPUT)
def stragglers(
    context: typer.Context,
    sync: Annotated[str, typer.Option(help="A synchronization that waits for all workers: bsp or hardsync:B.")] = "bsp",
    exponent: Annotated[float, typer.Option(help=EXPONENT_HELP)] = estimate.PAPER_EXPONENT,
    iterations: Annotated[str | None, typer.Option(metavar="N:COUNT,...", help=ITERATIONS_HELP)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=options.checked_picture, help="Draw the share of k-th gradients over time into this picture."),
    ] = None,
    **given: Any,
) -> None:
    """Train, show how long each step waited for its k-th gradient, and estimate the best number of backup workers."""
    from fastps.lab.demo import runs
    from fastps.lab.demo.data import load

    policy = parse_policy(sync)
    if policy.fold != "all" or policy.warm_up:
        raise UsageError(f"--sync: expected a synchronization that waits for all workers, such as bsp, found {policy.spec}")
    if not 0 <= exponent <= 2:
        raise UsageError(f"--exponent: expected 0 to 2, found {exponent:g}")
    law = (
        estimate.interpolated(estimate.parse_points(iterations))
        if iterations
        else estimate.power_law(given["workers"], exponent)
    )
    training = options.options_of(context, sync=policy.spec)
    options.check_workers(policy, given)
    console = options.console_of(given["json_file"])
    results = runs.results_of(training, load(given["data"]), console, progress=given["progress"] and console.is_terminal)
    arrivals = estimate.arrivals(results[0]["histograms"][0]["arrivals_ns"])
    splits = estimate.splits(arrivals, law)
    show(console, training_table([runs.merged(training, results)], _title(given)), wide=given["wide"])
    known = f"iterations {iterations}" if iterations else f"iterations in proportion to N^-{exponent:g}"
    show(console, arrivals_table(arrivals), wide=given["wide"])
    if splits:
        show(console, splits_table(splits, known), wide=given["wide"])
    say(console, straggler_verdict(arrivals, splits, known))
    if plot is not None:
        plot_arrivals(arrivals, plot)
    options.save_rows("stragglers", straggler_rows(runs.merged(training, results), arrivals, splits), given["json_file"])
