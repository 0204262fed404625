"""The command `fastps evaluate`: evaluate the newest versions of a running job, beside the training."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fastps.cli import options
from fastps.cli.commands import WATCH

commands = typer.Typer()
ORDER = 25

EXAMPLES = (
    "Examples:  fastps evaluate eval.py --job mnist --rows mnist.jsonl"
    "   |   fastps evaluate eval.py --job mnist --every 100 --metric accuracy --mode max --best best.pt --patience 5"
    "   |   fastps evaluate eval.py --job mnist --follow-s 60 -- --images test"
)
_EVALUATION: options.Options = {
    "every": options.option(int, 1, metavar="VERSIONS", help="Evaluate once the newest is so many ahead of the last one."),
    "every_s": options.option(float, 0.0, metavar="SECONDS", help="Begin no evaluation sooner after the one before."),
    "rows": options.option(
        str | None, None, metavar="FILE", callback=options.checked, help="Write a line of JSON for each version; - for stdout."
    ),
    "metric": options.option(str, "", metavar="NAME", help="The number that says which version is better."),
    "mode": options.option(str, "", metavar="max|min", help="Whether more or less of the metric is better."),
    "best": options.option(
        Path | None, None, metavar="FILE", callback=options.checked, help="Keep the best version's state_dict here."
    ),
    "patience": options.option(
        int, 0, metavar="N", help="Ask the training to stop after N evaluations without a better one; 0: never."
    ),
    "tensorboard": options.option(Path | None, None, metavar="DIR", help="Write the numbers for TensorBoard."),
    "device": options.option(str, "cpu", help="Where the model is evaluated, such as cuda:0."),
    "follow_s": options.option(
        float, 0.0, metavar="SECONDS", help="Wait so long for a trainer that takes the job's name once it has ended."
    ),
    "idle": options.option(bool, True, "--idle/--no-idle", help="Run only while no other process wants the core."),
    "resume": options.option(bool, False, "--resume", help="Go on with the rows that are there; else the file begins anew."),
}
"""The fields of EvaluationOptions."""


@commands.command(rich_help_panel=WATCH, epilog=EXAMPLES)
@options.with_options(_EVALUATION)
def evaluate(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Has the two functions; its main part does not run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="What the script finds in sys.argv.")
    ] = None,
    job: Annotated[str, typer.Option(metavar="NAME", help="The job; it may start later.")] = "",
    build_model: Annotated[str, typer.Option(metavar="FUNCTION", help="Returns the job's model.")] = "build_model",
    function: Annotated[
        str, typer.Option("--evaluate", metavar="FUNCTION", help="Gets the model, returns a dict of numbers.")
    ] = "evaluate",
    json_file: options.Json = None,
    **given: Any,
) -> None:
    """Evaluate a running job's newest versions by functions of a script, and keep the best; no worker waits for it."""
    from fastps.errors import UsageError
    from fastps.evaluation.options import EvaluationOptions

    if not job:
        raise UsageError("--job: expected the name of a job (fastps top names the running ones), found none")
    named = {name: str(given[name] or "") for name in ("rows", "tensorboard", "best")}
    evaluation = EvaluationOptions(**{**given, **named})
    from fastps.evaluation.loop import Evaluation, enter_idle_class
    from fastps.evaluation.script import functions_of

    if evaluation.idle:
        enter_idle_class()
    sys.argv = [str(script), *(arguments or [])]
    build, judge = functions_of(script, [build_model, function])
    rows = []
    running = Evaluation(build, judge, job, evaluation)
    try:
        for row in running.rows():
            rows.append(row)
            _say(_line(row))
    finally:
        if running.best.row is not None:
            _say(f"best: {_line(running.best.row)}" + (f"; {evaluation.best}" if evaluation.best else ""))
    options.save_rows("evaluate", rows, json_file)


def _line(row: dict[str, Any]) -> str:
    from fastps.evaluation.rows import metrics_of

    numbers = ", ".join(f"{name} {value:g}" for name, value in metrics_of(row).items())
    marks = [text for key, text in (("is_best", "best so far"), ("is_stop_asked", "asked to stop")) if row.get(key)]
    seconds = f"{row['seconds']:.2g} s"
    return f"version {row['version']}: {numbers} ({', '.join([seconds, *marks])})"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
