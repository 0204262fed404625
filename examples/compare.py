"""Run an example and its plain counterpart in turn, and show both: the same task with torch alone and with fastps.

python examples/compare.py hogwild_mnist --runs 5
python examples/compare.py actor_learner --runs 5 --workers 2

The sides alternate, because the speed of a shared machine changes within minutes. Each run has a seed of its own, the same for
both sides. Further arguments go to both programs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def commands(example: str, workers: int) -> dict[str, list[str]]:
    """The command of each side."""
    folder = FOLDER / example
    launch = [sys.executable, "-m", "fastps", "run", "-n", str(workers)]
    return {
        "plain": [sys.executable, str(folder / "plain.py"), "--workers", str(workers)],
        "fastps": [*launch, str(folder / "main.py")],
    }


def measured(command: list[str]) -> dict[str, float]:
    """Run one side, and return the figures that its worker 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        ended = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
        if ended.returncode or not file.exists():
            sys.exit(f"{' '.join(command)} failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        return json.loads(file.read_text())


def main() -> None:
    """Run the pairs, print each, and then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "example", choices=sorted(file.parent.name for file in FOLDER.glob("*/plain.py") if (file.parent / "main.py").exists())
    )
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs (5)")
    parser.add_argument("--workers", "-n", type=int, default=2, help="workers of each side (2)")
    parser.add_argument("--first-seed", type=int, default=1, help="seed of the first pair (1)")
    parser.add_argument("--json", metavar="FILE", help="write the figures of all runs into this file")
    arguments, rest = parser.parse_known_args()
    sides = commands(arguments.example, arguments.workers)
    runs = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.runs):
        pair = {side: measured([*command, "--seed", str(seed), *rest]) for side, command in sides.items()}
        runs.append({"seed": seed, **pair})
        print(f"seed {seed}: " + "; ".join(f"{side} {shown(figures)}" for side, figures in pair.items()), flush=True)
    for side in sides:
        medians = {name: statistics.median(run[side][name] for run in runs) for name in runs[0][side]}
        print(f"median of {side}: {shown(medians)}")
    ratios = [run["fastps"]["seconds"] / run["plain"]["seconds"] for run in runs]
    print(
        f"seconds of fastps over those of plain: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"example": arguments.example, "runs": runs}, indent=1))


def shown(figures: dict[str, float]) -> str:
    """Figures by name, on one line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in figures.items())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
