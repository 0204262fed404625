"""The command line. Every command parses, calls one function of the library, and shows or writes what it returned.

Errors are one sentence; exit codes are 0 done, 1 the run failed, 2 wrong usage, 130 ended by Ctrl-C. Refuses to import torch
before a command needs it, so that help and usage errors come at once.
"""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from fastps.disciplines import DISCIPLINES
from fastps.errors import Error, PolicyError, UsageError
from fastps.specs import MODIFIERS, parse_policies, parse_policy
from fastps.stragglers import PAPER_EXPONENT
from fastps.training_options import TrainingOptions
from fastps.version import __version__

SYNC_HELP = (
    f"Synchronization: {', '.join(row.usage for row in DISCIPLINES.values())}; any of them may add"
    f" {', '.join(f'{name}={usage}' for name, (usage, _) in MODIFIERS.items())}."
)
DATA_HELP = "mnist5k (5,000 real MNIST images), digits, mnist:DIR or cifar10:DIR (the original files)."
AGAINST_HELP = (
    "Peers of a step: limit, gloo, ddp, hogwild, handmade, mpi, rpc, ray; of a training: ddp, hogwild. Who is missing here is"
    " named with the reason."
)

EXPONENT_HELP = (
    "Iterations to converge are taken in proportion to N^-EXPONENT for N gradients a step. The default is of Chen et al.,"
    " Revisiting Distributed Synchronous SGD, Figure 5: 137.5e3 with N = 50, 76.2e3 with N = 100."
)
FACTORS_HELP = "NUMBER:FACTOR or FIRST-LAST:FACTOR, such as 0:3 or 0-9:3; may be repeated."
ITERATIONS_HELP = "Iterations that you measured for some N, used instead, on straight lines between them."

app = typer.Typer(
    help="The embedded parameter server for PyTorch: run, train and compare with any synchronization scheme.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the loggers fastps.* say.")] = False,
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options of all commands."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s: %(message)s", handlers=[RichHandler(console=Console(stderr=True))])


Workers = Annotated[int, typer.Option("--workers", "-n", help="Number of worker processes.")]
Epochs = Annotated[int, typer.Option(help="Passes over the training images, all workers together.")]
BatchSize = Annotated[int, typer.Option(help="Samples of a worker's batch.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate of SGD.")]
Momentum = Annotated[float, typer.Option(help="Momentum of SGD.")]
Data = Annotated[str, typer.Option(help=DATA_HELP)]
Seed = Annotated[int, typer.Option(help="Decides weights and order of samples.")]
Straggler = Annotated[
    list[str],
    typer.Option(metavar="WORKER:FACTOR", help="Stretch a worker's compute time by an honest wait; may be repeated."),
]
TransferMs = Annotated[float, typer.Option(help="What each push and each pull takes on its link: an honest wait.")]
ComputeMs = Annotated[float, typer.Option(help="An extra wait in each step, as more computing would take.")]
PullDelay = Annotated[
    str | None, typer.Option(metavar="SHARE:SECONDS", help="Let a share of the pulls' responses come late, such as 0.01:0.5.")
]
WarmStart = Annotated[Path | None, typer.Option(help="Begin with the weights that --save wrote (Rudra's warm start).")]
Save = Annotated[Path | None, typer.Option(help="Write the final weights into this file (.npz).")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON; - for stdout.")]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show the workers live.")]


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog="Examples:  fastps run -n 4 train.py --epochs 3   |   fastps run -n 4 --sync dssp:3,15 -m package.train",
)
def run(
    arguments: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="A script and its arguments.")],
    workers: Workers = 1,
    sync: Annotated[str | None, typer.Option(help=SYNC_HELP + " Default: what the script says, else bsp.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    json_file: Json = None,
) -> None:
    """Run a training script in several workers.

    Each gets torchrun's environment variables. When a worker fails, the first failure is reported and the others are ended.
    """
    from fastps.launch import Launcher
    from fastps.report import failure_panel, write_json

    policy = parse_policy(sync).spec if sync is not None else None
    if not module and not Path(arguments[0]).is_file():
        raise UsageError(f"expected a script, found no file {arguments[0]!r}; use -m for a module")
    command = [sys.executable, *(["-m"] if module else []), *arguments]
    outcome = Launcher(command, workers, sync=policy).run()
    if outcome.first_failure is not None:
        Console(stderr=True).print(failure_panel(outcome))
    if json_file is not None:
        rows = [{"worker": worker.rank, "exit_code": worker.exit_code} for worker in outcome.workers]
        write_json("run", rows, json_file)
    raise typer.Exit(outcome.exit_code)


def _console(json_file: str | None) -> Console:
    """Where tables go: stderr when stdout is for JSON; wide enough for them where there is no terminal to ask."""
    console = Console(stderr=json_file == "-")
    return console if console.is_terminal else Console(stderr=json_file == "-", width=110)


def _options(
    *,
    sync: str,
    workers: int,
    straggler: list[str],
    pull_delay: str | None,
    data: str,
    epochs: int,
    batch_size: int,
    lr: float,
    **others: Any,
) -> TrainingOptions:
    """Check what can be checked before anything starts, and make the TrainingOptions."""
    factors: dict[str, float] = {}
    for text in straggler:
        worker, _, factor = text.partition(":")
        try:
            factors[str(int(worker))] = float(factor)
        except ValueError:
            raise UsageError(f"--straggler: expected WORKER:FACTOR such as 0:3, found {text!r}") from None
        if not 0 <= int(worker) < workers or not float(factor) >= 1:
            raise UsageError(f"--straggler: expected a worker of 0 to {workers - 1} and a factor of at least 1, found {text!r}")
    smallest = {"workers": workers, "epochs": epochs, "batch-size": batch_size}
    for name, value in smallest.items():
        if value < 1:
            raise UsageError(f"--{name}: expected at least 1, found {value}")
    if not lr > 0:
        raise UsageError(f"--lr: expected more than 0, found {lr}")
    delay_share, delay_s = _pull_delay(pull_delay)
    return TrainingOptions(
        sync=sync,
        workers=workers,
        data=data,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=lr,
        straggler=factors,
        pull_delay_share=delay_share,
        pull_delay_s=delay_s,
        **others,
    )


def _pull_delay(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 0.0
    share, _, seconds = text.partition(":")
    try:
        found = float(share), float(seconds)
    except ValueError:
        raise UsageError(f"--pull-delay: expected SHARE:SECONDS such as 0.01:0.5, found {text!r}") from None
    if not (0 <= found[0] <= 1 and 0 <= found[1] <= 60):
        raise UsageError(f"--pull-delay: expected a share of 0 to 1 and 0 to 60 seconds, found {text!r}")
    return found


@app.command(epilog="Examples:  fastps train --sync bsp -n 4   |   fastps train --sync dssp:3,15 --straggler 0:3 --json -")
def train(
    sync: Annotated[str, typer.Option(help=SYNC_HELP)] = "bsp",
    workers: Workers = 4,
    epochs: Epochs = 10,
    batch_size: BatchSize = 16,
    lr: LearningRate = 0.05,
    momentum: Momentum = 0.5,
    data: Data = "mnist5k",
    seed: Seed = 0,
    straggler: Straggler = [],  # noqa: B006 - typer copies it
    transfer_ms: TransferMs = 0.0,
    compute_ms: ComputeMs = 0.0,
    pull_delay: PullDelay = None,
    warm_start: WarmStart = None,
    save: Save = None,
    json_file: Json = None,
    progress: Progress = True,
) -> None:
    """Train a small network on real images with several workers, and print a summary."""
    from fastps import compare as runs
    from fastps.data import load
    from fastps.report import training_table, write_json

    policy = parse_policy(sync)
    options = _options(
        sync=policy.spec,
        workers=workers,
        straggler=straggler,
        data=data,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        momentum=momentum,
        seed=seed,
        transfer_ms=transfer_ms,
        compute_ms=compute_ms,
        pull_delay=pull_delay,
        warm_start=str(warm_start.resolve()) if warm_start is not None else "",
        weights_file=str(save.resolve()) if save is not None else "",
    )
    if warm_start is not None and not warm_start.is_file():
        raise UsageError(f"--warm-start {warm_start}: expected a file that --save wrote, found none")
    policy.check_workers(workers)
    console = _console(json_file)
    row = runs.train(options, load(data), console, progress=progress and console.is_terminal)
    console.print(training_table([row], f"{data}, {epochs} epochs, seed {seed}"))
    if json_file is not None:
        write_json("train", [row], json_file)


@app.command(
    epilog="Example:  fastps compare --sync bsp,asp,ssp:3,dssp:3,15 --straggler 0:3 --plot accuracy.png",
)
def compare(
    sync: Annotated[
        str,
        typer.Option(
            help="Specs, separated by commas. A comma begins a new spec only where the name of a discipline follows it, so"
            " bsp,dssp:3,15 are two specs. " + SYNC_HELP
        ),
    ] = "bsp,asp,ssp:3,dssp:3,15",
    workers: Workers = 4,
    epochs: Epochs = 3,
    batch_size: BatchSize = 16,
    lr: LearningRate = 0.05,
    momentum: Momentum = 0.5,
    data: Data = "mnist5k",
    seed: Seed = 0,
    straggler: Straggler = [],  # noqa: B006 - typer copies it
    transfer_ms: TransferMs = 0.0,
    compute_ms: ComputeMs = 0.0,
    pull_delay: PullDelay = None,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy over time into this picture.")] = None,
    json_file: Json = None,
    progress: Progress = True,
) -> None:
    """Train the same network under several synchronization schemes, on the same seed and data, and print one table."""
    from fastps import compare as runs
    from fastps.data import load
    from fastps.plots import plot_accuracy
    from fastps.report import training_table, write_json

    policies = parse_policies(sync)
    options = _options(
        sync="",
        workers=workers,
        straggler=straggler,
        data=data,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        momentum=momentum,
        seed=seed,
        transfer_ms=transfer_ms,
        compute_ms=compute_ms,
        pull_delay=pull_delay,
    )
    for policy in policies:
        policy.check_workers(workers)
    console = _console(json_file)
    rows = runs.compare(policies, options, load(data), console, progress=progress and console.is_terminal)
    stragglers = f", straggler {' '.join(straggler)}" if straggler else ""
    console.print(training_table(rows, f"{data}, {epochs} epochs, seed {seed}{stragglers}", baseline=rows[0]))
    if plot is not None:
        plot_accuracy(rows, plot)
    if json_file is not None:
        write_json("compare", rows, json_file)


@app.command(epilog="Example:  fastps stragglers -n 8 --straggler 0:2 --epochs 3 --plot arrivals.png")
def stragglers(
    sync: Annotated[str, typer.Option(help="A synchronization that waits for all workers: bsp or hardsync:B.")] = "bsp",
    workers: Workers = 4,
    epochs: Epochs = 3,
    batch_size: BatchSize = 16,
    lr: LearningRate = 0.05,
    momentum: Momentum = 0.5,
    data: Data = "mnist5k",
    seed: Seed = 0,
    straggler: Straggler = [],  # noqa: B006 - typer copies it
    transfer_ms: TransferMs = 0.0,
    compute_ms: ComputeMs = 0.0,
    pull_delay: PullDelay = None,
    exponent: Annotated[float, typer.Option(help=EXPONENT_HELP)] = PAPER_EXPONENT,
    iterations: Annotated[str | None, typer.Option(metavar="N:COUNT,...", help=ITERATIONS_HELP)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the share of k-th gradients over time into this picture.")] = None,
    json_file: Json = None,
    progress: Progress = True,
) -> None:
    """Train, then show how long each step waited for its k-th gradient, and estimate how many backup workers are best."""
    from fastps import compare as runs
    from fastps import stragglers as estimate
    from fastps.data import load
    from fastps.report import straggler_rows, straggler_tables, training_table, write_json

    policy = parse_policy(sync)
    if policy.fold != "all":
        raise UsageError(f"--sync: expected a synchronization that waits for all workers, such as bsp, found {policy.spec}")
    if not 0 <= exponent <= 2:
        raise UsageError(f"--exponent: expected 0 to 2, found {exponent:g}")
    law = estimate.interpolated(estimate.parse_points(iterations)) if iterations else estimate.power_law(workers, exponent)
    options = _options(
        sync=policy.spec,
        workers=workers,
        straggler=straggler,
        data=data,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        momentum=momentum,
        seed=seed,
        transfer_ms=transfer_ms,
        compute_ms=compute_ms,
        pull_delay=pull_delay,
    )
    policy.check_workers(workers)
    console = _console(json_file)
    results = runs.results_of(options, load(data), console, progress=progress and console.is_terminal)
    arrivals = estimate.arrivals(results[0]["histograms"][0]["arrivals_ns"])
    splits = estimate.splits(arrivals, law)
    console.print(training_table([runs.merged(options, results)], f"{data}, {epochs} epochs, seed {seed}"))
    known = f"iterations {iterations}" if iterations else f"iterations in proportion to N^-{exponent:g}"
    console.print(straggler_tables(arrivals, splits, known))
    if plot is not None:
        from fastps.plots import plot_arrivals

        plot_arrivals(arrivals, plot)
    if json_file is not None:
        write_json("stragglers", straggler_rows(runs.merged(options, results), arrivals, splits), json_file)


@app.command(epilog="Examples:  fastps top   |   fastps top 5f1c2a --interval 0.5   |   fastps top --once --json -")
def top(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="The job's name; may be left out when only one is running.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one look and exit.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two looks; rates are of this time.")] = 1.0,
    json_file: Json = None,
) -> None:
    """Look at a running job: its workers and shards, live. Ctrl-C ends the look, not the job."""
    from fastps import top as looking
    from fastps.report import write_json

    if not 0.01 <= interval <= 3600:
        raise UsageError(f"--interval: expected 0.01 to 3600 seconds, found {interval:g}")
    try:
        show = looking.look_once if once else looking.watch
        rows = show(looking.choose_job(job), _console(json_file), interval_s=interval)
    except KeyboardInterrupt:
        raise typer.Exit from None
    if json_file is not None:
        write_json("top", rows, json_file)


@app.command(
    epilog="Examples:  fastps simulate --sync bsp,asp,ssp:3,dssp:3,15 -n 100 --straggler 0:3   |   fastps simulate --sync"
    " r2sp:0.8 -n 32 --model-bytes 500MB --bandwidth 100Gbit --latency 20us   |   fastps simulate --sync psp:24,0.9 -n 32"
    " --shards 32 --late-pull 0.0016:4s --json -"
)
def simulate(
    sync: Annotated[
        str, typer.Option(help="Specs, separated by commas, on the same computing times. " + SYNC_HELP)
    ] = "bsp,asp,ssp:3,dssp:3,15",
    workers: Annotated[int, typer.Option("--workers", "-n", help="Number of workers.")] = 4,
    steps: Annotated[
        int, typer.Option(help="Steps of a worker; the run ends after workers x steps pushes, by whomever.")
    ] = 1000,
    leave: Annotated[bool, typer.Option("--leave", help="Each worker leaves after its own steps instead.")] = False,
    compute: Annotated[
        str,
        typer.Option(
            help="How long a step computes: constant:TIME, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA (of the logarithm),"
            " pareto:LEAST,SHAPE, or replay:FILE (a line of times such as 10ms 12ms for all workers, or a line for each)."
        ),
    ] = "lognormal:10ms,0.3",
    speed: Annotated[list[str], typer.Option(help="Workers that are FACTOR times as fast: " + FACTORS_HELP)] = [],  # noqa: B006
    straggler: Annotated[list[str], typer.Option(help="Workers that compute FACTOR times as long: " + FACTORS_HELP)] = [],  # noqa: B006
    burst: Annotated[
        str | None,
        typer.Option(metavar="EVERY:LENGTH:FACTOR", help="Each worker is slow now and then, such as 10s:500ms:3; mean times."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples of a worker's first batch.")] = 32,
    model_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a push, and of a pull, such as 100MB.")] = "0",
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE", help="Of each server's port, each direction, such as 10Gbit; 0: without bound.")
    ] = "0",
    worker_bandwidth: Annotated[
        str, typer.Option(metavar="RATE", help="Of each worker's port, in even parts for the shards; 0: without bound.")
    ] = "0",
    latency: Annotated[str, typer.Option(metavar="TIME", help="From the last byte sent to its arrival, such as 50us.")] = "0s",
    shards: Annotated[int | None, typer.Option(help="Servers that the model is cut over; default: as the spec says.")] = None,
    slow_server: Annotated[list[str], typer.Option(help="Shards whose server is FACTOR times as slow: " + FACTORS_HELP)] = [],  # noqa: B006
    late_push: Annotated[
        str | None, typer.Option(metavar="SHARE:TIME", help="A share of the pushes comes so late, such as 0.01:0.5s.")
    ] = None,
    late_pull: Annotated[str | None, typer.Option(metavar="SHARE:TIME", help="The same for answers to workers.")] = None,
    seed: Annotated[int, typer.Option(help="Decides all draws: one seed, one trace, on any machine.")] = 0,
    train: Annotated[bool, typer.Option("--train", help="Compute each gradient, too: accuracy over virtual time.")] = False,
    data: Annotated[str, typer.Option(help="What --train trains on: " + DATA_HELP)] = "digits",
    lr: LearningRate = 0.05,
    momentum: Momentum = 0.5,
    trace: Annotated[Path | None, typer.Option(help="Write every event into this file (NumPy); for one spec.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the staleness into this picture.")] = None,
    json_file: Json = None,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show a bar.")] = True,
) -> None:
    """Play synchronization schemes in virtual time, with as many workers as you like, by the scheduler that the store runs."""
    from fastps import simulation_report as report
    from fastps.report import write_json
    from fastps.simulation_options import SimulationTexts, read_policies, read_simulation

    texts = SimulationTexts(
        compute=compute,
        speed=speed,
        straggler=straggler,
        burst=burst,
        model_bytes=model_bytes,
        bandwidth=bandwidth,
        worker_bandwidth=worker_bandwidth,
        latency=latency,
        slow_server=slow_server,
        late_push=late_push,
        late_pull=late_pull,
    )
    policies = read_policies(sync, shards)
    simulation = read_simulation(texts, workers=workers, steps=steps, leave=leave, batch=batch_size, seed=seed)
    if trace is not None and len(policies) > 1:
        raise UsageError(f"--trace is of one run: expected one spec, found {len(policies)}")
    console = _console(json_file)
    training = None
    if train:
        from fastps.data import load
        from fastps.virtual_training import VirtualTraining

        training = VirtualTraining(data=load(data), learning_rate=lr, momentum=momentum)
    outcomes = report.simulate_all(
        policies, simulation, console, trace=trace is not None, training=training, progress=progress and console.is_terminal
    )
    rows = [outcome.row for outcome in outcomes]
    console.print(report.simulation_table(rows, f"{workers:,} workers x {steps:,} steps in virtual time, seed {seed}"))
    console.print(report.simulation_footer(rows))
    if trace is not None:
        report.save_trace(outcomes[0], trace)
    if plot is not None:
        report.plot_staleness(rows, plot)
    if json_file is not None:
        write_json("simulate", rows, json_file)


@app.command(
    epilog="Examples:  fastps reproduce --quick   |   fastps reproduce dssp rudra/figure-4   |   fastps reproduce --json -"
)
def reproduce(
    ids: Annotated[
        list[str], typer.Argument(metavar="[ID]...", help="Papers or rows, as --list shows them; default: all.")
    ] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps and seeds, on the same expectations.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Show the rows and measure nothing.")] = False,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as a document.")] = None,
    json_file: Json = None,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show a bar.")] = True,
) -> None:
    """Measure the headline tables and figures of the five papers again, and say of each whether it is reproduced."""
    from fastps.report import write_json
    from fastps.reproduce import Effort, choose, show

    rows = choose(ids)
    console = _console(json_file)
    if list_only:
        console.print(show.list_table(rows))
        if json_file is not None:
            write_json(
                "reproduce --list", [{"id": row.id, "source": row.source, "claim": row.claim} for row in rows], json_file
            )
        return
    effort = Effort(quick)
    verdicts = show.reproduce_watched(rows, effort, console, progress=progress and console.is_terminal)
    console.print(show.verdict_table(verdicts, effort))
    console.print(show.notes(verdicts), markup=False, highlight=False)
    if markdown is not None:
        command = " ".join(["fastps reproduce", *ids, *(["--quick"] if quick else [])])
        show.write_markdown(verdicts, command, markdown)
    if json_file is not None:
        write_json("reproduce", [verdict.as_json() for verdict in verdicts], json_file)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas, such as 25000,1e6."""
    try:
        return tuple(int(float(number)) for number in text.split(","))
    except (ValueError, OverflowError):
        raise UsageError(f"--{name}: expected whole numbers separated by commas, found {text!r}") from None


@app.command(
    epilog="Examples:  fastps bench kernels   |   fastps bench step --workers 2,4 --parameters 25e6"
    "   |   fastps bench train -n 2"
)
def bench(
    what: Annotated[str, typer.Argument(help="kernels, lane, scheduler, step, train or all.")] = "all",
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes: shows that all runs, and measures nothing.")] = False,
    repeats: Annotated[int, typer.Option(help="Repeats of each figure; medians are shown.")] = 7,
    workers: Annotated[
        str, typer.Option("--workers", "-n", metavar="N,...", help="Numbers of workers of a step and of a training.")
    ] = "2,4",
    parameters: Annotated[str, typer.Option(metavar="N,...", help="Sizes of kernels and steps.")] = "25e3,1e6,25e6",
    against: Annotated[str, typer.Option(help=AGAINST_HELP)] = "limit,gloo,ddp,hogwild,handmade",
    json_file: Json = None,
) -> None:
    """Measure fastps beside its limits and its peers on this machine; sides take turns, and each result is checked."""
    from dataclasses import replace

    from fastps.bench.measure import SMOKE, BenchOptions
    from fastps.bench.run import run as run_bench
    from fastps.bench.show import show
    from fastps.report import write_json

    peers = tuple(against.split(","))
    options = BenchOptions(
        repeats=repeats, workers=_numbers("workers", workers), parameters=_numbers("parameters", parameters), against=peers
    )
    rows = run_bench(what, replace(SMOKE, against=peers) if smoke else options)
    show(rows, _console(json_file))
    if json_file is not None:
        write_json(f"bench {what}", rows, json_file)


def _whole(name: str, text: str) -> int:
    """One whole number, such as 25000000 or 25e6."""
    numbers = _numbers(name, text)
    if len(numbers) != 1:
        raise UsageError(f"--{name}: expected one whole number, found {text!r}")
    return numbers[0]


@app.command(epilog="Examples:  fastps doctor   |   fastps doctor --model-size 25e6 --workers 4 --optimizer adam --json -")
def doctor(
    model_size: Annotated[
        str | None,
        typer.Option(metavar="PARAMETERS", help="Also show what an arena for so many parameters takes, such as 25e6."),
    ] = None,
    workers: Workers = 4,
    optimizer: Annotated[str, typer.Option(help="With --model-size: sgd, momentum, adam, adamw, adagrad, rmsprop.")] = "sgd",
    sync: Annotated[str, typer.Option(help="With --model-size: the synchronization, which decides slots and buffers.")] = "bsp",
    json_file: Json = None,
) -> None:
    """Show what this machine offers, check that an arena works, and what a model needs; exit code 1 if something does not."""
    from dataclasses import asdict

    from fastps import doctor as examination
    from fastps.report import doctor_table, write_json

    need = None if model_size is None else examination.need_of(_whole("model-size", model_size), workers, optimizer, sync)
    console = _console(json_file)
    findings = examination.examine()
    console.print(doctor_table(findings, "this machine"))
    rows: list[dict[str, Any]] = [{"kind": "machine", **asdict(finding)} for finding in findings]
    if need is not None:
        lines = examination.need_findings(need)
        title = f"{need.parameters:,} parameters, {need.workers} workers, {need.optimizer}, {need.sync}: beyond torch's own"
        console.print(doctor_table(lines, title))
        findings += lines
        rows += [{"kind": "need", **asdict(need), "per_worker_bytes": need.per_worker_bytes, "ok": lines[-1].ok}]
    if json_file is not None:
        write_json("doctor", rows, json_file)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line and exit with its code; an error is one sentence, or with --debug a traceback."""
    try:
        app()
    except Error as error:
        if "--debug" in sys.argv:
            raise
        sys.stderr.write(f"fastps: {error}\n")
        sys.exit(getattr(error, "exit_code", 2 if isinstance(error, PolicyError | UsageError) else 1))


if __name__ == "__main__":
    main()
