"""The commands that train: train, compare, stragglers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fastps.cli import options
from fastps.cli.commands import TRAIN, WATCH
from fastps.cli.report import arrivals_table, faults_text, splits_table, straggler_rows, straggler_verdict, training_table
from fastps.cli.tables import say, show
from fastps.errors import UsageError
from fastps.job.specs import parse_policies, parse_policy
from fastps.lab import stragglers as estimate
from fastps.lab.plots import plot_accuracy, plot_arrivals

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


@commands.command(
    rich_help_panel=TRAIN,
    epilog="Example:  fastps compare --sync bsp,asp,ssp:3,dssp:3,15 --straggler 0:3 --plot accuracy.png --report page.html",
)
@options.with_options(options.TRAINING, options.PUSH, options.OUTPUT)
def compare(
    context: typer.Context,
    sync: Annotated[
        str,
        typer.Option(
            help="Specs, separated by commas. A comma begins a new spec only where the name of a discipline follows it, so"
            " bsp,dssp:3,15 are two specs. " + options.SYNC_HELP
        ),
    ] = "bsp,asp,ssp:3,dssp:3,15",
    plot: Annotated[
        Path | None, typer.Option(callback=options.checked_picture, help="Draw accuracy over time into this picture.")
    ] = None,
    report: options.Report = None,
    **given: Any,
) -> None:
    """Train the same network under several synchronization schemes, on the same seed and data, and print one table."""
    from fastps.lab.demo import runs
    from fastps.lab.demo.data import load

    if report is not None:
        from fastps.report.page import check_installed

        check_installed()  # before a long run
    policies = parse_policies(sync)
    training = options.options_of(context, sync="")
    for policy in policies:
        options.check_workers(policy, given)
    console = options.console_of(given["json_file"])
    rows = runs.compare(policies, training, load(given["data"]), console, progress=given["progress"] and console.is_terminal)
    slow = " ".join(given["straggler"])
    title = _title(given) + (f", straggler {slow}" if slow else "")
    show(console, training_table(rows, title, rows[0]), wide=given["wide"])
    if plot is not None:
        plot_accuracy(rows, plot)
    if report is not None:
        from fastps.lab.demo import comparison
        from fastps.report import page

        page.write(comparison.page_of(rows, title), report)
        say(console, f"{report}: open it in a browser")
    options.save_rows("compare", rows, given["json_file"])


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
