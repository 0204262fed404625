"""A worker of fastps.spawn, in its own process: take the work, do it, report.

    python -m fastps.processes.spawned RANK WORK OUTCOME,OUTCOME,...

WORK and OUTCOME are descriptors that the process inherits. A failed worker prints nothing: its caller raises what it reports.
"""

import os
import sys
from collections.abc import Callable

from fastps.errors import UsageError
from fastps.processes import handover
from fastps.system import exit_handlers


def main() -> None:
    """Run the worker that the command line names."""
    rank, work, outcomes = int(sys.argv[1]), int(sys.argv[2]), [int(number) for number in sys.argv[3].split(",")]
    own = outcomes[rank] if len(outcomes) > rank else outcomes[0]
    for other in outcomes:
        if other != own:
            os.close(other)
    os.set_inheritable(own, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # lines of workers do not mix
    run(lambda: _load(work, rank), rank, own)


def run(load: Callable[[], handover.Work], rank: int, outcome: int) -> None:
    """Do the work that `load` returns, as this worker, and report. Raises SystemExit with code 1 if it fails."""
    try:
        work = load()
        if rank == 0 and work.model is not None:
            exit_handlers.finish_at_close()
        try:
            work.fn(rank, *work.args)
        except SystemExit as end:
            if end.code:
                raise
        state = None
        if rank == 0 and work.model is not None:
            exit_handlers.close_all(finish=True)
            state = work.model.state_dict()
        exit_handlers.close_all()
        handover.report(outcome, state)
    except SystemExit:
        raise
    except BaseException as error:
        exit_handlers.close_all(f"{type(error).__name__}: {error}")
        handover.report(outcome, error=error)
        sys.exit(1)


def _load(descriptor: int, rank: int) -> handover.Work:
    """Take over the caller's setting and the work. Raises UsageError if the work needs a module that is not found here."""
    setting, load = handover.read(descriptor)
    os.close(descriptor)
    sys.path[:], sys.argv[:] = setting.path, setting.argv
    handover.remember(setting.sources)
    try:
        return load()
    except Exception as error:
        raise UsageError(
            f"worker {rank} cannot load {setting.name!r} and its arguments: expected modules that a new process can import,"
            f" found {type(error).__name__}: {error}; put the file's folder on sys.path, or give start_method='fork',"
            " with torch.set_num_threads(1) before anything computes: a fork may hang once torch has begun threads"
        ) from error


if __name__ == "__main__":
    main()
