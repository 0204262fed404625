"""A training with an evaluator beside it, which keeps the best weights and ends the training once they get no better.

python examples/early_stopping.py
fastps evaluate examples/early_stopping.py --job early --metric accuracy --mode max   # one more, from another terminal

The training is plain torch on 400 points of which every fifth has the wrong label, so it learns those by heart in the end. A
version is published after each step. The evaluator is a process of its own that runs while nobody else wants a core, so no step
waits for an evaluation.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

import fastps

INPUTS, POINTS, JUDGED = 20, 400, 4000


def build_model() -> torch.nn.Module:
    """A perceptron with BatchNorm, whose running means are a part of each version."""
    return torch.nn.Sequential(torch.nn.Linear(INPUTS, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 2))


def data(points: int, seed: int, *, noise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(points, INPUTS, generator=generator)
    classes = (inputs[:, :4].sum(1) > inputs[:, 4].square()).long()
    wrong = torch.rand(points, generator=generator) < 0.2
    return inputs, torch.where(wrong, 1 - classes, classes) if noise else classes


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> dict[str, float]:
    """Accuracy on points that the training does not see, with the right labels."""
    inputs, classes = data(JUDGED, 1, noise=False)
    return {"accuracy": (model.eval()(inputs).argmax(1) == classes).double().mean().item()}


def main() -> None:
    """Train until the evaluator asks to stop, and show the best version."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=200_000, help="stop after so many steps, asked or not (200,000)")
    options.add_argument("--patience", type=int, default=10, help="evaluations without a better one (10)")
    options.add_argument("--idle", action=argparse.BooleanOptionalAction, default=True, help="the evaluator's scheduling class")
    options.add_argument("--out", metavar="FOLDER", help="rows.jsonl and best.pt come here; default: nothing stays")
    options.add_argument("--json", metavar="FILE", help="write the figures into this file")
    arguments = options.parse_args()
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs, classes = data(POINTS, 0, noise=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.out or temporary)
        better = {"metric": "accuracy", "mode": "max", "best": folder / "best.pt", "patience": arguments.patience}
        with (
            fastps.Publisher(model, "early") as publisher,
            fastps.evaluator(build_model, evaluate, "early", folder / "rows.jsonl", idle=arguments.idle, **better) as evaluator,
        ):
            while publisher.version < arguments.steps and not publisher.stop_asked:
                batch = torch.randint(POINTS, (32,))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model.train()(inputs[batch]), classes[batch]).backward()
                optimizer.step()
                publisher.publish()
            steps, was_asked = publisher.version, publisher.stop_asked
        model.load_state_dict(torch.load(folder / "best.pt"))
        best, rows = evaluator.best, evaluator.rows()
    assert best is not None
    print(
        f"{'asked to stop' if was_asked else 'ended'} after {steps} steps and {len(rows)} evaluations; the best, version"
        f" {best['version']}, has an accuracy of {100 * best['accuracy']:.1f} %"
    )
    if arguments.json:
        figures = {"steps": steps, "was_asked": was_asked, "rows": rows, "best": best, "loaded": evaluate(model)}
        Path(arguments.json).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
