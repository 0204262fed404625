"""Actors and a learner on Catch, as IMPALA has them: a Publisher's versions are what the actors play with.

python examples/actors_and_learner.py

Each actor plays 16 games with the newest weights and sends what it played through a pipe. The learner takes a step of Adam for
each, with a ratio of probabilities that is cut at 1, because the actor's weights are some versions old, and publishes. No
actor ever plays with a mixture of two versions, and none waits for the learner's weights.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import torch

import fastps

ROWS, COLUMNS = 10, 5
GAMES = 16  # of an actor, played at once


class Policy(torch.nn.Module):
    """The scores of three actions, and the expected reward, of screens with a ball and a paddle."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(ROWS * COLUMNS, 64), torch.nn.ReLU())
        self.scores, self.value = torch.nn.Linear(64, 3), torch.nn.Linear(64, 1)

    def forward(self, screens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logarithms of the actions' probabilities, and the values."""
        hidden = self.body(screens)
        return torch.log_softmax(self.scores(hidden), -1), self.value(hidden).squeeze(-1)


@torch.no_grad()
def play(model: Policy, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Games of Catch: a ball falls down a column, and a paddle on the lowest row moves left, stays, or moves right."""
    games = torch.arange(GAMES)
    ball = torch.randint(COLUMNS, (GAMES,), generator=generator)
    paddle = torch.full((GAMES,), COLUMNS // 2)
    screens, actions, chances = [], [], []
    for row in range(ROWS - 1):
        screen = torch.zeros(GAMES, ROWS, COLUMNS)
        screen[games, row, ball] = 1
        screen[games, -1, paddle] = 1
        logs, _ = model(screen.flatten(1))
        action = torch.multinomial(logs.exp(), 1, generator=generator).squeeze(-1)
        paddle = (paddle + action - 1).clamp(0, COLUMNS - 1)
        screens.append(screen.flatten(1))
        actions.append(action)
        chances.append(logs[games, action])
    rewards = (paddle == ball).float() * 2 - 1
    return {
        "screens": torch.stack(screens),
        "actions": torch.stack(actions),
        "chances": torch.stack(chances),
        "rewards": rewards,
    }


def act(number: int, job: str, pipe: multiprocessing.connection.Connection) -> None:
    """An actor: play with the newest weights until the learner ends it. Ctrl-C is for the learner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    generator = torch.Generator().manual_seed(number)
    model = Policy()
    with fastps.reader(job) as reader:
        while True:
            version = reader.update(model)  # the newest weights, without a copy
            pipe.send((version, {name: each.numpy() for name, each in play(model, generator).items()}))


def loss_of(model: Policy, played: dict[str, torch.Tensor], decay: float = 0.95) -> torch.Tensor:
    """Advantage actor-critic, with the clipped ratio of the probabilities now and when the actor played."""
    logs, values = model(played["screens"])
    steps = torch.arange(ROWS - 2, -1, -1).unsqueeze(-1)
    returns = played["rewards"] * decay**steps  # the only reward comes last
    chosen = logs.gather(-1, played["actions"].unsqueeze(-1)).squeeze(-1)
    ratios = (chosen.detach() - played["chances"]).exp().clamp(max=1.0)
    advantages = returns - values
    entropy = -(logs.exp() * logs).sum(-1)
    return (0.5 * advantages.square() - ratios * advantages.detach() * chosen - 0.01 * entropy).mean()


def learn(arguments: argparse.Namespace, pipes: list[multiprocessing.connection.Connection], job: str) -> dict[str, object]:
    """The learner: a step for each rollout, and a version for each step."""
    torch.manual_seed(arguments.seed)
    model = Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mean, lags, began = -1.0, [], time.perf_counter()
    with fastps.Publisher(model, job, readers=arguments.actors) as publisher:
        while publisher.version < arguments.updates and mean < arguments.solved:
            for pipe in multiprocessing.connection.wait(pipes):
                version, arrays = pipe.recv()  # type: ignore[union-attr]
                played = {name: torch.from_numpy(each) for name, each in arrays.items()}
                lags.append(publisher.version - version)
                optimizer.zero_grad()
                loss_of(model, played).backward()
                optimizer.step()
                mean += 0.05 * (played["rewards"].mean().item() - mean)
                publisher.publish(tag={"mean reward": mean})
        seconds = time.perf_counter() - began
        figures = {"mean_reward": mean, "updates": publisher.version, "lag": sum(lags) / len(lags), "seconds": seconds}
    return {**figures, "solved": mean >= arguments.solved}


def main() -> None:
    """Start the actors, learn, and say how it went."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--actors", type=int, default=2)
    options.add_argument("--updates", type=int, default=5000, help="stop after so many updates, solved or not (5000)")
    options.add_argument("--solved", type=float, default=0.9, help="mean reward, of -1 to 1, that ends the training (0.9)")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", metavar="FILE", help="write the figures into this file")
    arguments = options.parse_args()
    torch.set_num_threads(1)  # the model is small, and the actors are forks
    context, job = multiprocessing.get_context("fork"), f"catch-{os.getpid()}"
    with ExitStack() as stack:
        pipes = []
        for number in range(arguments.actors):
            mine, theirs = context.Pipe(duplex=False)
            actor = context.Process(target=act, args=(number + 1000 * arguments.seed, job, theirs), daemon=True)
            actor.start()
            theirs.close()
            stack.callback(actor.join)
            stack.callback(actor.terminate)  # at any moment: a reader that dies harms nobody
            pipes.append(mine)
        figures = learn(arguments, pipes, job)
    print(
        f"{'solved' if figures['solved'] else 'not solved'} in {figures['seconds']:.1f} s: mean reward"
        f" {figures['mean_reward']:.2f} at version {figures['updates']}; weights were {figures['lag']:.1f} versions old"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
