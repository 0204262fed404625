"""Options that several commands share: their types, help texts and checks."""

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastps.errors import UsageError
from fastps.job.launchers import launcher_place
from fastps.job.options import NodePolicy, Range
from fastps.job.secret import secret_of_file
from fastps.lab.demo.options import LEARNING_RATE, TrainingOptions

if TYPE_CHECKING:
    from fastps.job.policy import Policy
    from fastps.processes.nodes import NodeOptions
    from fastps.processes.options import JobOptions


def checked(target: Path | str | None, option: typer.CallbackParam) -> Path | str | None:
    """Check that a file can be written, before a run starts."""
    if target is not None and str(target) != "-" and not Path(target).resolve().parent.is_dir():
        raise UsageError(f"{option.opts[0]} {target}: expected a file in a folder that exists")
    return target


def checked_picture(target: Path | None, option: typer.CallbackParam) -> Path | None:
    """Check that a picture can be written, before a run starts."""
    if target is not None:
        from fastps.lab.plots import check_picture

        check_picture(target, option.opts[0])
    checked(target, option)
    return target


def checked_page(target: Path | None, option: typer.CallbackParam) -> Path | None:
    """Check that a page can be written, before a run starts."""
    if target is not None and target.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{option.opts[0]} {target}: expected a file whose name ends with .html, because the report is a page")
    checked(target, option)
    return target


WORKERS_PANEL, LOSSES = "Workers", "Losses and checkpoints"
OUTPUT_PANEL, CONFIGURATION, NODES_PANEL = "Output", "Configuration", "Several nodes"
PANELS = (WORKERS_PANEL, LOSSES, OUTPUT_PANEL, CONFIGURATION, NODES_PANEL)
"""The groups of options in a command's help, in order; an option without one is among the first."""

Options = dict[str, tuple[Any, Any]]
"""Options that several commands share: the annotation and the default of each parameter."""

SYNC_HELP = "Synchronization, such as bsp, asp or dssp:3,15; `fastps disciplines` lists all."
PUSH_DTYPES = ("float32", "float16", "bfloat16")
DATA_HELP = "mnist5k (5,000 real MNIST images), digits, mnist:DIR or cifar10:DIR (the original files)."
Workers = Annotated[int, typer.Option("--workers", "-n", help="Number of worker processes.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate of SGD.")]
Momentum = Annotated[float, typer.Option(help="Momentum of SGD.")]
Seed = Annotated[int, typer.Option(help="Decides weights and order of samples.")]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        envvar="FASTPS_TRACE",
        show_envvar=False,
        callback=checked,
        help="Record the run, for fastps trace and fastps advise.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE.html", callback=checked_page, help="Write a page with plots, which opens without a network."),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="DIR",
        rich_help_panel=OUTPUT_PANEL,
        help="Write loss, speed, staleness, waits and losses of workers for TensorBoard, once a second; into a folder below DIR"
        " if DIR has the files of another run. Needs the extra [tensorboard].",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", callback=checked, help="Write the rows as JSON; - for stdout.", rich_help_panel=OUTPUT_PANEL
    ),
]
Csv = Annotated[
    str | None,
    typer.Option(
        "--csv", metavar="FILE", callback=checked, help="Write the rows as CSV; - for stdout.", rich_help_panel=OUTPUT_PANEL
    ),
]
_csv_file: ContextVar[str | None] = ContextVar("csv_file", default=None)
Wide = Annotated[bool, typer.Option("--wide", help="Show all columns, also where they do not fit the width.")]
Bar = Annotated[bool, typer.Option("--progress/--no-progress", help="Show a bar.")]
Links = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Workers are nodes, on the links that fastps doctor --nodes --output FILE has measured."),
]
Parameters = Annotated[
    str | None, typer.Option(metavar="N|CHECKPOINT", help="With --links: what travels, such as 25e6 or a checkpoint.")
]


def option(kind: Any, default: Any, *flags: str, **settings: Any) -> tuple[Any, Any]:
    """The annotation and the default of a parameter."""
    return Annotated[kind, typer.Option(*flags, **settings)], default


TRAINING: Options = {
    "workers": (Workers, 4),
    "epochs": option(int, 3, help="Passes over the training images, all workers together."),
    "batch_size": option(int, 16, help="Samples of a worker's batch."),
    "lr": (LearningRate, LEARNING_RATE),
    "momentum": (Momentum, 0.5),
    "data": option(str, "mnist5k", help=DATA_HELP),
    "seed": (Seed, 0),
    "straggler": option(
        list[str], [], metavar="WORKER:FACTOR", help="Stretch a worker's compute time by an honest wait; may be repeated."
    ),
    "transfer_ms": option(float, 0.0, help="What each push and each pull takes on its link: an honest wait."),
    "compute_ms": option(float, 0.0, help="An extra wait in each step, as more computing would take."),
    "pull_delay": option(
        str | None, None, metavar="SHARE:SECONDS", help="Let a share of the pulls' responses come late, such as 0.01:0.5."
    ),
}
"""Of the commands that train a network of their own."""
_RANGES = {
    **dict.fromkeys(("workers", "epochs", "batch_size"), Range("at least 1", 1, math.inf)),
    "lr": Range("more than 0, and finite", math.ulp(0.0), sys.float_info.max),
    "momentum": Range("0 to less than 1", 0, math.nextafter(1.0, 0.0)),
    **dict.fromkeys(("transfer_ms", "compute_ms"), Range("0 to 86400000 ms, which is a day", 0, 86_400_000)),
}
PUSH: Options = {
    "push_dtype": option(
        str,
        PUSH_DTYPES[0],
        help=f"What gradients are pushed in: {', '.join(PUSH_DTYPES)}. Sums and updates are in float32 all the same.",
    )
}


def _launch(kind: Any, default: Any, *flags: str, panel: str | None = None, variable: str | None = None, **more: Any) -> Any:
    """An option that workers have as a variable: it counts where the command line gives none."""
    return option(kind, default, *flags, rich_help_panel=panel, envvar=variable, show_envvar=False, **more)


JOB: Options = {
    "restarts": option(int, 0, help="Replace so many lost workers, in all; the job goes on meanwhile."),
    "checkpoint": _launch(
        Path | None,
        None,
        "--checkpoint",
        variable="FASTPS_CHECKPOINT",
        metavar="DIR",
        help="Write checkpoints into this folder.",
    ),
    "resume": _launch(
        Path | None,
        None,
        variable="FASTPS_RESUME",
        metavar="CHECKPOINT|DIR",
        help="Go on from this checkpoint, or from the newest of a folder.",
    ),
    "every": _launch(
        int,
        0,
        panel=LOSSES,
        variable="FASTPS_CHECKPOINT_EVERY",
        metavar="UPDATES",
        help="With --checkpoint: updates between two checkpoints; 0: 1000.",
    ),
    "overwrite": _launch(
        bool,
        False,
        "--overwrite",
        panel=LOSSES,
        variable="FASTPS_OVERWRITE",
        help="With --checkpoint: delete other runs' checkpoints there.",
    ),
    "on_worker_loss": _launch(
        str,
        "",
        panel=LOSSES,
        variable="FASTPS_ON_WORKER_LOSS",
        metavar="stop|continue",
        help="What the others do when a worker is lost, if the script does not say. Default: stop; with --restarts continue.",
        show_default=False,
    ),
    "max_workers": _launch(
        int,
        0,
        panel=LOSSES,
        variable="FASTPS_MAX_WORKERS",
        help="The most workers attached at a time; 0: as many as at the start.",
    ),
    "nonfinite": _launch(
        str,
        "",
        "--nonfinite",
        panel=LOSSES,
        variable="FASTPS_NONFINITE",
        metavar="reject|raise|allow",
        help="What becomes of a push with Inf or NaN, if the script does not say. Default: reject.",
        show_default=False,
    ),
    "inject_faults": option(
        str | None,
        None,
        metavar="kill:N,stop:N,seconds:S",
        help="Kill and stop (for 1 to 5 s) workers at random moments of the first S seconds; give --restarts for the killed.",
        rich_help_panel=LOSSES,
    ),
    "server": _launch(
        str,
        "",
        panel=WORKERS_PANEL,
        variable="FASTPS_SERVER",
        metavar="workers|process",
        help="Fold pushes in waiting workers, or in a server process, if the script does not say. Default: workers.",
        show_default=False,
    ),
}
"""Of the commands that start workers: how the job handles faults, and its checkpoints."""
PLACE: Options = {
    "nnodes": option(
        int | None,
        None,
        "--nnodes",
        metavar="N",
        help="Nodes of the job; run the same command on each. Default: SLURM's or MPI's, else 1.",
        rich_help_panel=NODES_PANEL,
    ),
    "rendezvous": option(
        str, "", metavar="HOST:PORT", help="Where the nodes find each other; HOST is node 0.", rich_help_panel=NODES_PANEL
    ),
    "node_rank": option(
        str,
        "auto",
        metavar="auto|N",
        help="This node's number; auto: HOST is 0, others as they come.",
        rich_help_panel=NODES_PANEL,
    ),
    "interface": _launch(
        str,
        "",
        panel=NODES_PANEL,
        variable="FASTPS_INTERFACE",
        metavar="NAME|ADDRESS",
        help="The interface to the other nodes. Default: the one that leads to the rendezvous.",
        show_default=False,
    ),
    "trusted_network": _launch(
        bool,
        False,
        "--trusted-network",
        panel=NODES_PANEL,
        variable="FASTPS_TRUSTED_NETWORK",
        help="Listen at a public address, too.",
    ),
}
"""Of the commands that run on each of several nodes: how the nodes find each other."""
NODES: Options = {
    each.name: option(
        type(each.default),
        each.default,
        each.flag,
        metavar=each.metavar or each.words,
        help=each.help,
        rich_help_panel=NODES_PANEL,
    )
    for each in NodePolicy.options().values()
}
"""How a job treats its nodes: the fields of NodePolicy. Their variables are read on several nodes alone, by `nodes_of`."""
ON_LINKS: Options = {"link_dtype": NODES["link_dtype"]}
OUTPUT: Options = {
    "wide": (Wide, False),
    "json_file": (Json, None),
    "progress": option(bool, True, "--progress/--no-progress", help="Show the workers live."),
}


def with_options(*groups: Options, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these groups in its `**given`. `defaults` replace those of the groups."""
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, default), annotation=annotation)
        for group in groups
        for name, (annotation, default) in group.items()
    ]

    def give(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
        command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]  # typer reads it
        return command

    return give


def given_options(context: typer.Context, *names: str) -> list[str]:
    """Those of these options that the command line itself has, as they are written there."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [f"--{name.replace('_', '-')}" for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def check_beside(context: typer.Context, needed: str, *names: str) -> None:
    """Refuse options that have no effect without another. Raises UsageError."""
    for option in given_options(context, *names):
        raise UsageError(f"{option} has no effect alone: expected {needed} beside it, found none")


def with_csv(command: Callable[..., None]) -> Callable[..., None]:
    """The command with --csv, if it has --json: `save_rows` writes both."""
    signature = inspect.signature(command)
    if "json_file" not in signature.parameters:
        return command

    @functools.wraps(command)
    def run(*arguments: Any, csv_file: str | None, **given: Any) -> None:
        if csv_file == "-" == given["json_file"]:
            raise UsageError("--csv - and --json -: expected one of the two on standard output, found both")
        _csv_file.set(csv_file)
        command(*arguments, **given)

    own = inspect.Parameter("csv_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Csv)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), own])  # type: ignore[attr-defined]
    return run


def owns_stdout(json_file: str | None) -> bool:
    """Whether the standard output is for the rows of --json or --csv alone."""
    return "-" in (json_file, _csv_file.get())


def console_of(json_file: str | None) -> Console:
    """Return the console for tables: stderr if stdout is for JSON or CSV; wide if there is no terminal."""
    console = Console(stderr=owns_stdout(json_file))
    return console if console.is_terminal else Console(stderr=owns_stdout(json_file), width=110)


def save_rows(command: str, rows: Sequence[Mapping[str, Any]], json_file: str | None) -> None:
    """Write the reports of a command in JSON and CSV, if they are asked for."""
    from fastps.system.json_report import write_csv, write_json

    if json_file is not None:
        write_json(command, rows, json_file)
    if (csv_file := _csv_file.get()) is not None:
        write_csv(rows, csv_file)


def options_of(context: typer.Context, *, sync: str, **others: Any) -> TrainingOptions:
    """Check what can be checked before anything starts, and make the TrainingOptions of a command that trains.

    Its options are read from typer's own record of them, since all such commands have the same.
    """
    given = context.params
    workers = given["workers"]
    delay_share, delay_s = _pull_delay(given["pull_delay"])
    factors: dict[str, float] = {}
    for text in given["straggler"]:
        worker, _, factor = text.partition(":")
        try:
            factors[str(int(worker))] = float(factor)
        except ValueError:
            raise UsageError(f"--straggler: expected WORKER:FACTOR such as 0:3, found {text!r}") from None
        if not (0 <= int(worker) < workers and 1 <= float(factor) <= 1e6):
            raise UsageError(f"--straggler: expected a worker of 0 to {workers - 1} and a factor of 1 to 1e6, found {text!r}")
    for name, allowed in _RANGES.items():
        if not allowed.least <= given[name] <= allowed.most:
            raise UsageError(f"--{name.replace('_', '-')}: expected {allowed.text}, found {given[name]}")
    push_dtype = given.get("push_dtype", PUSH_DTYPES[0])
    if push_dtype not in PUSH_DTYPES:
        raise UsageError(f"--push-dtype: expected one of {', '.join(PUSH_DTYPES)}, found {push_dtype!r}")
    same = ("workers", "data", "epochs", "batch_size", "momentum", "seed", "transfer_ms", "compute_ms")
    return TrainingOptions(
        sync=sync,
        learning_rate=given["lr"],
        straggler=factors,
        pull_delay_share=delay_share,
        pull_delay_s=delay_s,
        push_dtype=push_dtype,
        **{name: given[name] for name in same if name in given},
        **others,
    )


def check_workers(policy: "Policy", given: Mapping[str, Any]) -> None:
    """Check that a job of this discipline can have the workers that are given. Raises PolicyError, LayoutError."""
    from fastps.job.plan import check_lanes

    policy.check_workers(given["workers"])
    check_lanes(policy, max(given["workers"], given.get("max_workers", 0)))


def nodes_of(context: typer.Context) -> "NodeOptions | None":
    """Make the NodeOptions of `fastps run`; None for a job of one node. Raises UsageError."""

    def policy() -> NodePolicy:
        values = {}
        for name, option in NodePolicy.options().items():
            source = context.get_parameter_source(option.name)
            text = os.environ.get(option.variable) if source is None or source.name != "COMMANDLINE" else None
            values[name] = option.read(text, option.shown) if text else context.params[option.name]
        return NodePolicy(**values)

    return placed_nodes(context, policy)


def placed_nodes(context: typer.Context, policy: Callable[[], NodePolicy]) -> "NodeOptions | None":
    """The nodes that the options and what started this command describe; None for one node. Raises UsageError."""
    from fastps.processes.nodes import NodeOptions

    given = context.params
    count, rendezvous, rank = given["nnodes"], given["rendezvous"], given["node_rank"]
    file = given.get("secret_file")
    secret = secret_of_file(file) if file is not None else None
    if count == 1 and not rendezvous:
        return None  # whatever launched this command
    place = launcher_place()
    count = count if count is not None else place.nodes or 1
    if count == 1 and not rendezvous:
        return None
    rank = str(place.node) if rank == "auto" and place.node >= 0 else rank
    network = given["interface"], given["trusted_network"]
    rendezvous = rendezvous or os.environ.get("FASTPS_RENDEZVOUS", "") or place.rendezvous
    return NodeOptions(count, rendezvous, rank, policy(), *network, secret=secret, retries=given.get("retries", 0))


def job_options_of(context: typer.Context, seed: int) -> "JobOptions":
    """Return a command's options on restarts, losses, checkpoints and injected faults."""
    from fastps.checkpoint.loading import has_checkpoints, load
    from fastps.checkpoint.runs import check_folder
    from fastps.lab.live_faults import FaultPlan
    from fastps.processes.options import GRACE_S, JobOptions

    given = context.params
    checkpoint, resume, faults = given["checkpoint"], given["resume"], given["inject_faults"]
    if checkpoint is None:
        check_beside(context, "--checkpoint", "every")
    if None not in (resume, checkpoint) and resume.resolve() == checkpoint.resolve() and not has_checkpoints(resume):
        resume = None  # the first run of a command that goes on from its own checkpoints
    if resume is not None and not resume.exists():
        raise UsageError(f"--resume {resume}: expected a checkpoint or a directory of them, found nothing there")
    resumed = load(resume) if resume is not None else None
    if checkpoint is not None and not given["overwrite"]:
        check_folder(checkpoint, resumed, overwrite=False)
    same = ("restarts", "on_worker_loss", "nonfinite", "max_workers", "every", "overwrite", "server")
    return JobOptions(
        checkpoint=str(checkpoint.resolve()) if checkpoint is not None else "",
        resume=str(resumed.folder.resolve()) if resumed is not None else "",  # one folder for all workers
        injector=FaultPlan.parse(faults, seed).injector if faults is not None else None,
        grace_s=given.get("grace", GRACE_S),
        **{name: given[name] for name in same},
    )


def parameters_of(text: str) -> int:
    """The parameters that a text gives: a number such as 25e6, or a checkpoint. Raises UsageError, CheckpointError."""
    if Path(text).exists():
        from fastps.checkpoint.loading import load

        return sum(array.size for array in load(text).weights().values())
    try:
        number = float(text)
    except ValueError:
        raise UsageError(f"--parameters: expected a number such as 25e6 or a checkpoint, found {text!r}") from None
    if not (number.is_integer() and number >= 1):
        raise UsageError(f"--parameters: expected a whole number of 1 or more, found {text!r}")
    return int(number)


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
