"""The command that starts a user's own script: run."""

import contextlib
import logging
import os
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastps.cli import config, options
from fastps.cli.commands import TRAIN
from fastps.cli.options import CONFIGURATION, NODES_PANEL, OUTPUT_PANEL, WORKERS_PANEL
from fastps.cli.report import faults_text
from fastps.cli.tables import say
from fastps.errors import UsageError
from fastps.job.environment import check_job
from fastps.job.options import tell_misspelt
from fastps.job.specs import parse_policy
from fastps.processes.script import command_of

if TYPE_CHECKING:
    from fastps.processes.launcher import Launcher
    from fastps.processes.nodes import NodeOptions
    from fastps.processes.options import JobOptions
    from fastps.processes.outcome import Outcome
    from fastps.processes.output import LogOptions

SYNC_HELP = "Discipline, such as bsp, asp or dssp:3,15, if the script names none. Default: bsp. `fastps disciplines` lists all."
JOB_HELP = "The job's name, for fastps top and readers. Default: the script's name and a number."
GPUS_HELP = (
    "GPUs of the workers, in turn: with 0,1 and -n 4 workers 0 and 2 get GPU 0. Each finds its own as cuda:0. With one GPU the"
    " shards lie on it, else in host memory (FASTPS_PLACEMENT=host|device)."
)
ENV_HELP = (
    "What tells a worker its number: FASTPS_RANK and FASTPS_WORKERS (fastps), or RANK, WORLD_SIZE and the rest, too (torchrun),"
    " by which Accelerate, Lightning and the Trainer start a process group. auto: torchrun if the script's own text names RANK,"
    " WORLD_SIZE or init_process_group."
)
START_METHOD_HELP = (
    "fork: import torch once and fork all workers from that process. spawn: a new process for each, for a script that sets"
    " OMP_NUM_THREADS or MKL_NUM_THREADS before it imports torch."
)
CONFIG_HELP = "Read options from this file in TOML, where the command line and the environment give none: workers = 4."
PRINT_CONFIG_HELP = "Print the options as such a file, with where each comes from, and start nothing."
HOSTS_HELP = "Start a node on each of these hosts over ssh; the first is node 0, on port 29400."
SSH_HELP = "With --hosts: what gets a host and a command line. Default: ssh -o BatchMode=yes."
SECRET_HELP = "A file with a secret that all nodes prove to know; FASTPS_SECRET is another way."
RETRIES_HELP = "Meet the other nodes again after a loss (exit code 75), so many times; go on from the newest checkpoint."
GRACE_HELP = "How long workers may take to save and end after Ctrl-C, SIGTERM or another's failure."
_NAME_BYTES = 40  # of a script's name in a job's

commands = typer.Typer()
ORDER = 15


def _outcome(launcher: "Launcher", tensorboard: Path | None) -> "Outcome":
    from fastps.telemetry.tensorboard import TICK_S, written

    with written(tensorboard, lambda: launcher.arena) as tick:
        return launcher.run() if tick is None else launcher.run(tick, TICK_S)


def _tell(outcome: "Outcome", log_format: str) -> None:
    """Say how a job failed."""
    from fastps.processes.outcome import failure_lines, failure_panel

    if outcome.faults is not None:
        Console(stderr=True).print(faults_text(outcome.faults))
    if outcome.failed and log_format == "json":
        logging.getLogger("fastps.launch").error("the job failed: %s", "; ".join(failure_lines(outcome)))
    elif outcome.failed:
        Console(stderr=True).print(failure_panel(outcome))


def _rows(outcome: "Outcome", job: str, sync: str | None) -> list[dict[str, Any]]:
    """A row for each process of a worker."""
    return [
        {
            "worker": each.rank,
            "restart": each.restart,
            "exit_code": each.exit_code,
            "lost_steps": each.lost_steps,
            "job": job,
            "sync": sync,
            "began_s": (each.began_ns - outcome.began_ns) / 1e9,
            "ended_s": (each.ended_ns - outcome.began_ns) / 1e9 if each.ended_ns else outcome.seconds,
            "reason": each.ending if each.failed else "",
            "last_error": each.errors.tail[-1] if each.failed and each.errors.tail else "",
        }
        for each in outcome.workers
    ]


def _newest(folder: Path) -> str:
    """The newest checkpoint of a folder; "" if it has none. Raises CheckpointError if all are damaged."""
    from fastps.checkpoint.loading import has_checkpoints, load

    return str(load(folder).folder.resolve()) if has_checkpoints(folder) else ""


def _logs_of(context: typer.Context) -> "LogOptions":
    """How the output is written down; in JSON that of the launcher's loggers, too. Raises UsageError."""
    from fastps.processes.output import JsonFormatter, LogOptions

    form = context.params["log_format"]
    if form not in ("text", "json"):
        raise UsageError(f"--log-format: expected text or json, found {form!r}")
    if form == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.getLogger().handlers[:] = [handler]
    return LogOptions(context.params["log_dir"], form == "json")


def _run_on_hosts(context: typer.Context) -> int:
    from fastps.processes.hosts import HostsLauncher, HostsOptions

    given = context.params
    if given["nnodes"] is not None or given["node_rank"] != "auto":
        raise UsageError("--hosts counts and numbers the nodes: expected neither --nnodes nor --node-rank beside it")
    if given["config_file"] is not None:
        raise UsageError("--hosts gives this command line to each host: expected no --config beside it")
    tail = given["arguments"]
    begin, end = sys.argv.index("run") + 1, len(sys.argv) - len(tail)
    options = _without(sys.argv[begin:end], ("--hosts", "--ssh-command"))
    launcher = HostsLauncher(HostsOptions.of(given["hosts"], given["ssh_command"], given["grace"]), [*options, *tail])
    code = launcher.run()
    if launcher.failure and code < 128:
        say(Console(stderr=True), launcher.failure, soft_wrap=True)
    return code


def _without(options: list[str], names: tuple[str, ...]) -> list[str]:
    """Command-line options less some of them, which have values.

    >>> _without(["-n", "4", "--hosts", "a,b", "--hosts=a"], ("--hosts",))
    ['-n', '4']
    """
    kept, skips = [], False
    for option in options:
        if skips or option.partition("=")[0] in names:
            skips = not skips and option in names
            continue
        kept.append(option)
    return kept


def _is_a_workers(context: typer.Context, name: str) -> bool:
    """Whether an option is from the variables of the worker that this command runs in, and so not of the job that it starts."""
    source = context.get_parameter_source(name)
    return "FASTPS_RANK" in os.environ and source is not None and source.name == "ENVIRONMENT"


def _job_name(context: typer.Context, is_of_nodes: bool) -> str | None:
    """The job's name; None where the nodes agree on one.

    Raises UsageError for a name that a job cannot have, or that a running job has.
    """
    name: str | None = context.params["job"]
    if name is None or _is_a_workers(context, "job"):
        script = Path(context.params["arguments"][0]).stem
        plain = re.sub(r"[^\w-]", "-", script)[:_NAME_BYTES] if script.isascii() else "job"
        return None if is_of_nodes else f"{plain}-{secrets.token_hex(3)}"
    if is_of_nodes:
        raise UsageError("--job (FASTPS_JOB): the nodes agree on a name by themselves: expected no name, found one")
    from fastps.membership import discovery

    if check_job(name) in discovery.listening():
        raise UsageError(f"--job (FASTPS_JOB): expected a name that no running job has, found {name}, which runs")
    return name


@commands.command(
    rich_help_panel=TRAIN,
    context_settings={"allow_interspersed_args": False},
    epilog="Examples:  fastps run -n 4 train.py --epochs 3   |   fastps run -n 4 --sync dssp:3,15 -m package.train"
    "   |   fastps run -n 4 --restarts 8 --checkpoint runs/a --every 500 train.py"
    "   |   fastps run --gpus 0,1,2,3 -n 4 train.py   |   fastps run --nnodes 2 --rendezvous node0:29400 -n 4 train.py",
)
@options.with_options(options.JOB, options.PLACE, options.NODES)
def run(
    context: typer.Context,
    arguments: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="A script and its arguments.", show_default=False)
    ] = [],  # noqa: B006 - typer copies it
    workers: options.Workers = 1,
    sync: Annotated[str | None, typer.Option(metavar="SPEC", envvar="FASTPS_SYNC", show_envvar=False, help=SYNC_HELP)] = None,
    job: Annotated[str | None, typer.Option(metavar="NAME", envvar="FASTPS_JOB", show_envvar=False, help=JOB_HELP)] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    trace: options.TraceFile = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="N,...", envvar="FASTPS_GPUS", show_envvar=False, help=GPUS_HELP, rich_help_panel=WORKERS_PANEL),
    ] = None,
    env: Annotated[str, typer.Option(metavar="auto|fastps|torchrun", help=ENV_HELP, rich_help_panel=WORKERS_PANEL)] = "auto",
    start_method: Annotated[
        str, typer.Option(metavar="fork|spawn", help=START_METHOD_HELP, rich_help_panel=WORKERS_PANEL)
    ] = "fork",
    grace: Annotated[float, typer.Option(metavar="SECONDS", help=GRACE_HELP, rich_help_panel=WORKERS_PANEL)] = 30.0,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Leave out the line at the start.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write each worker's lines to DIR/RANK/stdout.log.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = None,
    log_format: Annotated[
        str, typer.Option(metavar="text|json", help="json: an object a line, with time and rank.", rich_help_panel=OUTPUT_PANEL)
    ] = "text",
    tensorboard: options.TensorBoard = None,
    json_file: options.Json = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            is_eager=True,
            callback=config.read,
            help=CONFIG_HELP,
            rich_help_panel=CONFIGURATION,
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help=PRINT_CONFIG_HELP, rich_help_panel=CONFIGURATION)
    ] = False,
    seed: Annotated[int, typer.Option(help="With --inject-faults: decides them.", rich_help_panel=WORKERS_PANEL)] = 0,
    hosts: Annotated[str, typer.Option(metavar="HOST,HOST,...", help=HOSTS_HELP, rich_help_panel=NODES_PANEL)] = "",
    ssh_command: Annotated[
        str,
        typer.Option(metavar="COMMAND", envvar="FASTPS_SSH", help=SSH_HELP, show_default=False, rich_help_panel=NODES_PANEL),
    ] = "",
    secret_file: Annotated[Path | None, typer.Option(metavar="FILE", help=SECRET_HELP, rich_help_panel=NODES_PANEL)] = None,
    retries: Annotated[int, typer.Option(metavar="N", help=RETRIES_HELP, rich_help_panel=NODES_PANEL)] = 0,
    **given: Any,
) -> None:
    """Run a training script in several workers.

    When a worker fails, the first failure is reported and the others are ended; with --restarts it is replaced.
    """
    if print_config:
        return typer.echo("\n".join(config.lines(context)))
    if not arguments:
        raise UsageError("expected a script, found none, as in fastps run -n 4 train.py; fastps run --help lists the options")
    from fastps.device.placement import parse_gpus, place_by_trial
    from fastps.processes.launcher import Launcher
    from fastps.processes.retries import with_retries

    tell_misspelt()
    policy = parse_policy(sync) if sync is not None else None
    if hosts:
        raise typer.Exit(_run_on_hosts(context))
    nodes, job_options = options.nodes_of(context), options.job_options_of(context, seed)
    if policy is not None and workers > 0:
        policy.values(workers if nodes is None else nodes.count)  # raises PolicyError for more than there are
    if nodes is None:
        options.check_beside(context, "--nnodes (on one node --restarts replaces lost workers)", "retries")
    command, name = command_of(arguments, module), _job_name(context, nodes is not None)
    if gpus is not None:
        os.environ["FASTPS_GPUS"] = parse_gpus(gpus)
        if reason := place_by_trial(workers):
            logging.getLogger("fastps.launch").warning("%s", reason)
    with contextlib.redirect_stdout(
        sys.stderr if options.owns_stdout(json_file) else sys.stdout
    ):  # what workers say are no rows
        rows: list[dict[str, Any]] = []

        def launch(job_options: "JobOptions", nodes: "NodeOptions | None") -> "Outcome":
            launcher = Launcher(
                command,
                workers,
                sync=policy.spec if policy is not None else None,
                job=name,
                options=job_options,
                env=env,
                start_method=start_method,
                nodes=nodes,
                trace=None if _is_a_workers(context, "trace") else trace,
                greets=not quiet,
                logs=_logs_of(context),
            )
            outcome = _outcome(launcher, tensorboard)
            rows.extend(_rows(outcome, launcher.job, sync))
            return outcome

        outcome = launch(job_options, None) if nodes is None else with_retries(launch, job_options, nodes, _newest)
        _tell(outcome, log_format)
    options.save_rows("run", rows, json_file)
    raise typer.Exit(outcome.exit_code)
