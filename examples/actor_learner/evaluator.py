"""The evaluator of the actors: a process that only reads. It judges the newest weights of a running job until they are solved.

python examples/actor_learner/evaluator.py JOB

main.py starts one by itself. As a program it watches a job that runs already, as often as one likes; `fastps top` names the
running jobs. No actor waits for it.
"""

import argparse
import sys
from collections.abc import Iterator

from task import JUDGE_EVERY, judge, network, parser

import fastps


def evaluate(job: str, arguments: argparse.Namespace) -> tuple[float, int]:
    """Judge a job's weights until they solve the task or the job ends; returns the last mean return and its version."""
    model = network(arguments.seed)
    with fastps.reader(job, timeout_s=30) as reader:

        def versions() -> Iterator[int]:
            while reader.wait(reader.version + JUDGE_EVERY):
                yield reader.update(model)  # the model's parameters are now the newest weights: no copy

        return judge(versions(), model, arguments)


def main() -> None:
    """Watch the named job."""
    options = parser(__doc__)
    options.add_argument("job", help="the job's name")
    arguments = options.parse_args()
    mean, version = evaluate(arguments.job, arguments)
    print(f"mean return {mean:.1f} at version {version}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
