"""What a failed job shows: the first worker that failed, its last line, and how the others ended."""

from rich.panel import Panel
from rich.text import Text

from fastps.processes.outcome import Outcome
from fastps.system.memory_limits import OUT_OF_MEMORY


def failure_panel(outcome: Outcome) -> Panel:
    """Format the first failure of a job, the worker's last line, and how the other workers ended.

    Earlier output, such as a traceback, has been passed on already.
    """
    first = outcome.first_failure
    assert first is not None
    lines = [f"worker {first.rank} failed first: {first.ending}"]
    others = [f"worker {worker.rank}: {worker.ending}" for worker in outcome.workers if worker is not first]
    lines += [f"the others: {', '.join(others)}"] if others else []
    lines += [f"its last line: {first.tail[-1]}"] if first.tail else ["it wrote nothing to stderr"]
    lines += [outcome.hint] if outcome.hint else []
    lines += [OUT_OF_MEMORY] if any(worker.was_out_of_memory for worker in outcome.workers) else []
    # Text, not a string: rich would take a user's [words] for styles, and :100: for an emoji.
    return Panel(Text.from_ansi("\n".join(lines)), title="fastps: the job failed", border_style="red")
