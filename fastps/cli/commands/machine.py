"""The commands about this machine and what runs on it: top, bench, doctor, gpu-check."""

import contextlib
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fastps.cli import options
from fastps.cli.commands import MACHINE, WATCH
from fastps.cli.report import doctor_table, links_table, trials_table
from fastps.cli.tables import say, show
from fastps.errors import UsageError
from fastps.job.options import NodePolicy
from fastps.processes.script import command_of

AGAINST_HELP = (
    "Peers of a step: limit, gloo, ddp, hogwild, handmade, mpi, rpc, ray, and on GPUs limit, nccl, ddp; of a training: ddp,"
    " hogwild, rpc, ray. A peer that cannot run here is named with the reason. Of a step also"
    " ablations of fastps itself: alone, plain, streaming, attributes, server. Of nodes: limit, gloo, ddp. Of readers: torchrl."
)

PROMETHEUS_HELP = (
    "Serve the figures of JOB, or of all running jobs of this user, at /metrics for Prometheus, until Ctrl-C; jobs may begin"
    " and end meanwhile. Without a host only this machine reaches it. Needs the extra [prometheus]."
)

commands = typer.Typer()
ORDER = 20


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
            help="kernels, lane, scheduler, sim, step, rows, train, optimizer, memory, readers, collectives or all; nodes,"
            " as root."
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
    command, caution = command_of(arguments, False), others_use()
    trials = try_script(command, lambda workers: say(progress, f"workers: {workers} ..."))
    show(console, trials_table(trials))
    say(console, *verdict(trials), *([caution] if caution else []))
    options.save_rows("doctor", [{"kind": "trial", **asdict(trial)} for trial in trials], json_file)


def _doctor_links(context: typer.Context) -> None:
    """Meet the other nodes, measure the links, and print the same report on every node."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns of every address that has no name
    from fastps.lab.measuring.links import examine_links

    given = context.params
    nodes = options.placed_nodes(context, lambda: NodePolicy(link_dtype=given["link_dtype"]))
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
    "gpu-check",
    rich_help_panel=MACHINE,
    epilog="Examples:  fastps gpu-check   |   fastps gpu-check --quick -o report.html   |   fastps gpu-check --minutes 8",
)
def gpu_check(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, and neither training nor compute-sanitizer.")] = False,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", min=1, help="End within M minutes: parts that no GPU has run first, each with a share."),
    ] = None,
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
    code = run.check(report, settings, lambda line: say(console, line, soft_wrap=True), minutes)
    say(console, *report.says(), f"{report.file}: the report", soft_wrap=True)
    options.save_rows("gpu-check", report.rows, json_file)
    raise typer.Exit(code)
