"""The commands about this machine and what runs on it: run, top, bench, doctor, gpu-check."""

import contextlib
import logging
import os
import re
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastps.cli import options
from fastps.cli.commands import MACHINE, TRAIN, WATCH
from fastps.cli.report import doctor_table, faults_text, links_table, trials_table
from fastps.cli.tables import say, show
from fastps.errors import UsageError
from fastps.job.options import NodePolicy
from fastps.job.specs import parse_policy

if TYPE_CHECKING:
    from fastps.processes.launcher import Launcher
    from fastps.processes.outcome import Outcome

AGAINST_HELP = (
    "Peers of a step: limit, gloo, ddp, hogwild, handmade, mpi, rpc, ray, and on GPUs limit, nccl, ddp; of a training: ddp,"
    " hogwild, rpc, ray. A peer that cannot run here is named with the reason. Of a step also"
    " ablations of fastps itself: alone, plain, streaming, attributes, server. Of nodes: limit, gloo, ddp. Of readers: torchrl."
)

GPUS_HELP = (
    "GPUs of the workers, in turn: with 0,1 and -n 4 workers 0 and 2 get GPU 0. Each finds its own as cuda:0. With one GPU the"
    " shards lie on it, else in host memory (FASTPS_PLACEMENT=host|device)."
)

ENV_HELP = (
    "What tells a worker its number: fastps (FASTPS_RANK and FASTPS_WORKERS only, so that Accelerate, Lightning and the Trainer"
    " start no process group beside it), torchrun (RANK, WORLD_SIZE and the rest, too), or auto: torchrun where the script's"
    " own text names RANK, WORLD_SIZE or init_process_group."
)

START_METHOD_HELP = (
    "fork: import torch once and fork all workers from that process, for scripts and modules of Python. spawn: a new process"
    " for each, for a script that sets environment variables before it imports torch (OMP_NUM_THREADS, MKL_NUM_THREADS)."
)

PROMETHEUS_HELP = (
    "Serve the figures of JOB, or of all running jobs of this user, at /metrics for Prometheus, until Ctrl-C; jobs may begin"
    " and end meanwhile. Without a host only this machine reaches it. Needs the extra [prometheus]."
)

HOSTS_HELP = "Start a node on each of these hosts over ssh; the first is node 0, on port 29400."
SSH_HELP = "With --hosts: what gets a host and a command line. Default: ssh -o BatchMode=yes."
SECRET_HELP = "A file with a secret that all nodes prove to know; FASTPS_SECRET is another way."
GRACE_HELP = "So long workers may take to save and end after Ctrl-C, SIGTERM or another's failure."

commands = typer.Typer()
ORDER = 20


def _command_of(arguments: list[str], module: bool) -> list[str]:
    """What each worker runs. A Python interpreter before the script, as for other launchers, is this one. Raises UsageError."""
    if module:
        return [sys.executable, "-m", *arguments]
    if _names_python(arguments[0]) and len(arguments) > 1:
        arguments = arguments[1:]
        if arguments[0].startswith("-"):
            return [sys.executable, *arguments]  # flags of Python's own, -m among them
    if not Path(arguments[0]).is_file():
        if arguments[0].startswith("-"):
            raise UsageError(f"expected options of fastps run and then a script, found {arguments[0]!r}, which is neither")
        raise UsageError(f"expected a script, found no file {arguments[0]!r}; fastps run -m runs a module")
    return [sys.executable, *arguments]


def _names_python(argument: str) -> bool:
    """Whether this is an interpreter: a bare name that no script here has, or a program of that name in another folder."""
    path = Path(argument)
    if not re.fullmatch(r"python[0-9.]*", path.name):
        return False
    return not path.is_file() if path.parent == Path() else os.access(path, os.X_OK)


def _outcome(launcher: "Launcher", tensorboard: Path | None) -> "Outcome":
    from fastps.telemetry.tensorboard import TICK_S, written

    with written(tensorboard, lambda: launcher.arena) as tick:
        return launcher.run() if tick is None else launcher.run(tick, TICK_S)


def _report(outcome: "Outcome", json_file: str | None) -> int:
    from fastps.processes.outcome import failure_panel

    if outcome.faults is not None:
        Console(stderr=True).print(faults_text(outcome.faults))
    if outcome.first_failure is not None:
        Console(stderr=True).print(failure_panel(outcome))
    keys = {"worker": "rank", "restart": "restart", "exit_code": "exit_code", "lost_steps": "lost_steps"}
    options.save_rows("run", [{key: getattr(each, name) for key, name in keys.items()} for each in outcome.workers], json_file)
    return outcome.exit_code


def _run_on_hosts(context: typer.Context) -> int:
    from fastps.processes.hosts import HostsLauncher, HostsOptions

    given = context.params
    if given["nnodes"] is not None or given["node_rank"] != "auto":
        raise UsageError("--hosts counts and numbers the nodes: expected neither --nnodes nor --node-rank beside it")
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


@commands.command(
    rich_help_panel=TRAIN,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog="Examples:  fastps run -n 4 train.py --epochs 3   |   fastps run -n 4 --sync dssp:3,15 -m package.train"
    "   |   fastps run -n 4 --restarts 8 --checkpoint runs/a --every 500 train.py"
    "   |   fastps run --gpus 0,1,2,3 -n 4 train.py   |   fastps run --nnodes 2 --rendezvous node0:29400 -n 4 train.py",
)
@options.with_options(options.PLACE, options.NODES, options.JOB)
def run(
    context: typer.Context,
    arguments: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="A script and its arguments.")],
    workers: options.Workers = 1,
    sync: Annotated[
        str | None, typer.Option(help=options.SYNC_HELP + " For scripts that do not choose one. Default: bsp.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="N,...", help=GPUS_HELP)] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    env: Annotated[str, typer.Option(metavar="auto|fastps|torchrun", help=ENV_HELP)] = "auto",
    start_method: Annotated[str, typer.Option(metavar="fork|spawn", help=START_METHOD_HELP)] = "fork",
    hosts: Annotated[str, typer.Option(metavar="HOST,HOST,...", help=HOSTS_HELP)] = "",
    ssh_command: Annotated[str, typer.Option(metavar="COMMAND", envvar="FASTPS_SSH", help=SSH_HELP, show_default=False)] = "",
    secret_file: Annotated[Path | None, typer.Option(metavar="FILE", help=SECRET_HELP)] = None,
    grace: Annotated[float, typer.Option(metavar="SECONDS", help=GRACE_HELP)] = 30.0,
    trace: options.TraceFile = None,
    tensorboard: options.TensorBoard = None,
    seed: options.Seed = 0,
    json_file: options.Json = None,
    **given: Any,
) -> None:
    """Run a training script in several workers.

    When a worker fails, the first failure is reported and the others are ended; with --restarts it is replaced.
    """
    from fastps.device.placement import parse_gpus, place_by_trial
    from fastps.processes.launcher import Launcher

    policy = parse_policy(sync) if sync is not None else None
    if hosts:
        raise typer.Exit(_run_on_hosts(context))
    nodes, job = options.nodes_of(context), options.job_options_of(context, seed)
    if policy is not None and workers > 0:
        policy.values(workers if nodes is None else nodes.count)  # raises PolicyError for more than there are
    if gpus is not None:
        os.environ["FASTPS_GPUS"] = parse_gpus(gpus)
        if reason := place_by_trial(workers):
            logging.getLogger("fastps.launch").warning("%s", reason)
    spec, command = policy.spec if policy is not None else None, _command_of(arguments, module)
    with contextlib.redirect_stdout(sys.stderr if json_file == "-" else sys.stdout):  # what workers say is no JSON
        launcher = Launcher(
            command, workers, sync=spec, options=job, env=env, start_method=start_method, nodes=nodes, trace=trace
        )
        outcome = _outcome(launcher, tensorboard)
    raise typer.Exit(_report(outcome, json_file))


@commands.command(
    rich_help_panel=WATCH,
    epilog="Examples:  fastps top   |   fastps top 5f1c2a --interval 0.5   |   fastps top --once --json -"
    "   |   fastps top --prometheus :9400",
)
def top(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="The job's name; may be left out when only one is running.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one look and exit.")] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two looks; rates are of this time.")] = 1.0,
    prometheus: Annotated[str, typer.Option(metavar="[HOST]:PORT", help=PROMETHEUS_HELP)] = "",
    wide: options.Wide = False,
    json_file: options.Json = None,
) -> None:
    """Look at a running job: its workers and shards, live. Ctrl-C ends the look, not the job."""
    from fastps.cli import top as looking

    if not 0.01 <= interval <= 3600:
        raise UsageError(f"--interval: expected 0.01 to 3600 seconds, found {interval:g}")
    if prometheus:
        if once or json_file is not None:
            raise UsageError("--prometheus serves until Ctrl-C: expected neither --once nor --json beside it")
        return _serve(prometheus, job)
    show = looking.look_once if once else looking.watch
    rows = show(looking.choose_job(job), options.console_of(json_file), interval_s=interval, wide=wide)
    options.save_rows("top", rows, json_file)


def _serve(address: str, job: str | None) -> None:
    from fastps.telemetry.prometheus import served

    with contextlib.suppress(KeyboardInterrupt), served(address, job) as url:
        say(Console(stderr=True), f"serving {url}; Ctrl-C ends it", soft_wrap=True)
        threading.Event().wait()  # for ever


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas, such as 25000,1e6."""
    try:
        return tuple(int(float(number)) for number in text.split(","))
    except (ValueError, OverflowError):
        raise UsageError(f"--{name}: expected whole numbers separated by commas, found {text!r}") from None


@commands.command(
    rich_help_panel=MACHINE,
    epilog="Examples:  fastps bench kernels   |   fastps bench step --workers 2,4 --parameters 25e6"
    "   |   fastps bench train -n 2   |   fastps bench nodes --parameters 25e3,25e6",
)
def bench(
    what: Annotated[
        str,
        typer.Argument(
            help="kernels, lane, scheduler, sim, step, rows, train, memory, readers, collectives or all; nodes, as root."
        ),
    ] = "all",
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny sizes: shows that all runs, and measures nothing.")] = False,
    repeats: Annotated[int, typer.Option(help="Repeats of each figure; medians are shown.")] = 7,
    workers: Annotated[
        str,
        typer.Option(
            "--workers", "--processes", "-n", metavar="N,...", help="Numbers of workers of a step, a training and a collective."
        ),
    ] = "2,4",
    parameters: Annotated[str, typer.Option(metavar="N,...", help="Sizes of kernels and steps.")] = "25e3,1e6,25e6",
    against: Annotated[str | None, typer.Option(help=AGAINST_HELP)] = None,
    backend: Annotated[str, typer.Option(help="Of kernels: cpu, or cuda on a GPU.")] = "cpu",
    device: Annotated[str, typer.Option(help="Of a step: cpu, or cuda with workers on the GPUs in turn.")] = "cpu",
    sync: Annotated[str, typer.Option(metavar="SPEC,...", help="Of fastps in a step: bsp, asp or both.")] = "bsp,asp",
    wide: options.Wide = False,
    json_file: options.Json = None,
) -> None:
    """Measure fastps beside its limits and its peers on this machine; sides take turns, and each result is checked."""
    from fastps.bench.measure import SMOKE, BenchOptions
    from fastps.bench.run import run as run_bench
    from fastps.cli.bench_report import show_benchmarks

    default = "limit,gloo,ddp,hogwild,handmade" if device == "cpu" else "limit,nccl,ddp"
    peers = tuple((against or default).split(","))
    settings = BenchOptions(
        repeats=repeats, workers=_numbers("workers", workers), parameters=_numbers("parameters", parameters), against=peers
    )
    settings = settings if not smoke else replace(SMOKE, against=peers)
    settings = replace(settings, backend=backend, device=device, sync=tuple(sync.split(",")))
    rows = run_bench(what, settings)
    show_benchmarks(rows, options.console_of(json_file), wide=wide)
    options.save_rows(f"bench {what}", rows, json_file)


@commands.command(
    rich_help_panel=MACHINE,
    epilog="Examples:  fastps doctor   |   fastps doctor --model-size 25e6 --workers 4 --optimizer adam --json -"
    "   |   fastps doctor --nnodes 2 --rendezvous node0:29400 --parameters 25e6   |   fastps doctor --script train.py --lr 0.1",
    context_settings={"allow_interspersed_args": False},
)
@options.with_options(options.PLACE, {"link_dtype": options.NODES["link_dtype"]})
def doctor(
    context: typer.Context,
    arguments: Annotated[list[str], typer.Argument(metavar="[SCRIPT ARGUMENTS...]", help="With --script.")] = [],  # noqa: B006
    script: Annotated[
        bool, typer.Option("--script", help="Run this script's first steps with 1, 2 and 4 workers: do more workers pay?")
    ] = False,
    model_size: Annotated[
        str | None,
        typer.Option(metavar="PARAMETERS", help="Also show what an arena for so many parameters takes, such as 25e6."),
    ] = None,
    workers: options.Workers = 4,
    optimizer: Annotated[
        str, typer.Option(help="With --model-size: sgd, momentum, adam, amsgrad, ...; a wrong name lists all.")
    ] = "sgd",
    sync: Annotated[str, typer.Option(help="With --model-size: the synchronization, which decides slots and buffers.")] = "bsp",
    dtype: Annotated[str, typer.Option(help="With --model-size: float32, float16, bfloat16 or float64.")] = "float32",
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Measure the links between nodes instead; implied by --nnodes or --rendezvous.")
    ] = False,
    parameters: Annotated[
        list[str],
        typer.Option(
            metavar="N|CHECKPOINT", help="With --nodes, on node 0: what bounds a step of this model; may be repeated."
        ),
    ] = [],  # noqa: B006 - typer copies it
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --nodes: also write the links as JSON, on node 0 and all others.")
    ] = None,
    wide: options.Wide = False,
    json_file: options.Json = None,
    **given: Any,
) -> None:
    """Show what this machine offers, check that an arena works, and what a model needs; exit code 1 if something does not.

    With --nodes, or --nnodes and --rendezvous on each node, measure the links between nodes instead. With --script say in three
    sentences whether more workers help a script on this machine, what bounds them, and what they take: a minute or two.
    """
    if script or arguments:
        return _try_script(script, arguments, json_file)
    if nodes or (given["nnodes"] or 1) > 1 or given["rendezvous"]:
        return _doctor_links(context)
    options.check_beside(context, "--nodes", "parameters", "output", "link_dtype", "node_rank", "interface", "trusted_network")
    if model_size is None:
        options.check_beside(context, "--model-size", "workers", "optimizer", "sync", "dtype")
    from fastps.lab.measuring import doctor as examination

    sizes = () if model_size is None else _numbers("model-size", model_size)
    if len(sizes) > 1:
        raise UsageError(f"--model-size: expected one whole number, found {model_size!r}")
    need = examination.need_of(sizes[0], workers, optimizer, sync, dtype) if sizes else None
    console = options.console_of(json_file)
    findings = examination.examine()
    show(console, doctor_table(findings, "this machine"))
    rows: list[dict[str, Any]] = [{"kind": "machine", **asdict(finding)} for finding in findings]
    if need is not None:
        lines = examination.need_findings(need)
        title = f"{need.parameters:,} parameters of {dtype}, {need.workers} workers, {need.optimizer}, {need.sync}"
        show(console, doctor_table(lines, f"{title}: beyond torch's own"))
        findings += lines
        rows += [{"kind": "need", **asdict(need), "per_worker_bytes": need.per_worker_bytes, "ok": lines[-1].ok}]
    options.save_rows("doctor", rows, json_file)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _try_script(script: bool, arguments: list[str], json_file: str | None) -> None:
    if not script or not arguments:
        raise UsageError("expected --script SCRIPT ARGUMENTS, or neither --script nor a script")
    from fastps.lab.measuring.trial import others_use, try_script, verdict

    console, progress = options.console_of(json_file), Console(stderr=True)
    command, caution = _command_of(arguments, False), others_use()
    trials = try_script(command, lambda workers: say(progress, f"workers: {workers} ..."))
    show(console, trials_table(trials))
    say(console, *verdict(trials), *([caution] if caution else []))
    options.save_rows("doctor", [{"kind": "trial", **asdict(trial)} for trial in trials], json_file)


def _doctor_links(context: typer.Context) -> None:
    """Meet the other nodes, measure the links, and print the same report on every node."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of every address that has no name
    from fastps.lab.measuring.links import examine_links

    given = context.params
    policy = NodePolicy(link_dtype=given["link_dtype"])
    nodes = options.placed_nodes(context, policy)
    if nodes is None:
        raise UsageError("--nodes: expected --nnodes N and --rendezvous HOST:PORT beside it, the same on every node")
    sizes = [options.parameters_of(text) for text in given["parameters"]]
    console = options.console_of(given["json_file"])
    report = examine_links(nodes, sizes)
    show(console, links_table(report.links), wide=given["wide"])
    say(console, *(bound.shown for bound in report.bounds), soft_wrap=True)
    for target in (given["output"], given["json_file"]):
        options.save_rows("doctor", report.rows(), target and str(target))


@commands.command(
    "gpu-check", rich_help_panel=MACHINE, epilog="Examples:  fastps gpu-check   |   fastps gpu-check --quick -o report.html"
)
def gpu_check(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, and neither training nor compute-sanitizer.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            callback=options.checked,
            help="The report: a page if the name ends with .html, else JSON. Default: gpu-NAME-DATE.json here.",
        ),
    ] = None,
    json_file: options.Json = None,
) -> None:
    """Check everything that needs a GPU, and write a report that says what works and what to use.

    Exit code 0: all that could run passed; 1: something failed; 3: there is no GPU.
    """
    from fastps.bench.gpu import run
    from fastps.device.interface import DeviceError

    try:
        report, settings = run.make_report(output, quick)
    except DeviceError as error:
        say(Console(stderr=True), f"gpu-check: no device: {error}", soft_wrap=True)
        raise typer.Exit(3) from None
    console = options.console_of(json_file)
    code = run.check(report, settings, lambda line: say(console, line, soft_wrap=True))
    say(console, *report.says(), f"{report.file}: the report", soft_wrap=True)
    options.save_rows("gpu-check", report.rows, json_file)
    raise typer.Exit(code)
