"""What the examples of Hugging Face learn: in one process, in one process with late gradients, and by two workers of fastps.

    python -P -m fastps.bench.integrations.accuracy transformers --seeds 10
    python -P -m fastps.bench.integrations.accuracy accelerate --seeds 10

Each row trains with the same seeds. The third row gives each worker the plain program's batch, and the fourth shares that batch
between the two workers and divides the learning rate by the square root of two. A figure is the accuracy on 360 images.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_RUN = ("-m", "fastps.cli", "run", "-n", "2", "--sync", "ssp:3")
_LATE = ("-P", "-m", "fastps.bench.integrations.delayed", "1")
_LR = {"transformers": 0.005, "accelerate": 0.002}  # of the examples
Row = tuple[tuple[str, ...], str, tuple[str, ...]]


def rows(framework: str) -> dict[str, Row]:
    """How Python is called, the program's name, and the program's options, for each row."""
    plain, with_fastps = f"{framework}_digits_plain.py", f"{framework}_digits.py"
    shared = ("--accumulate", "1", "--lr", f"{_LR[framework] / 2**0.5:.2g}")
    return {
        "one process": ((), plain, ()),
        "one process, each gradient one step late": (_LATE, plain, ()),
        "two workers, ssp:3, each with that batch": (_RUN, with_fastps, ()),
        f"two workers, ssp:3, {' '.join(shared)}": (_RUN, with_fastps, shared),
    }


def accuracy(row: Row, examples: Path, seed: int) -> float:
    """The accuracy in percent after a run with this seed. Raises CalledProcessError."""
    before, name, options = row
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *before, str(examples.resolve() / name), *options, "--seed", str(seed), "--json", "found.json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        return 100 * float(json.loads(Path(folder, "found.json").read_text())["accuracy"])


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=sorted(_LR))
    parser.add_argument("--seeds", type=int, default=10, help="runs of each row (10)")
    parser.add_argument("--examples", type=Path, default=Path("examples"), help="the folder of the programs (examples)")
    given = parser.parse_args()
    print("| run | mean | standard deviation | least and most |\n|---|--:|--:|---|")
    for name, row in rows(given.framework).items():
        found = [accuracy(row, given.examples, seed) for seed in range(given.seeds)]
        deviation = statistics.stdev(found) if len(found) > 1 else 0.0
        ends = f"{min(found):.1f} to {max(found):.1f} %"
        print(f"| {name} | {statistics.mean(found):.2f} % | {deviation:.2f} | {ends} |", flush=True)


if __name__ == "__main__":
    main()
