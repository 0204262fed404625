"""A3C on CartPole: each actor plays, and pushes to one shared Adam."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps

gymnasium = pytest.importorskip("gymnasium", reason="the extra fastps[demo] is not installed")

EPISODES = 240  # all actors together
WORKERS = 2


def make_model() -> torch.nn.ModuleDict:
    """Policy and value networks over the same four observations."""
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {
            "policy": torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)),
            "value": torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)),
        }
    )


def make_adam(model: torch.nn.Module) -> torch.optim.Adam:
    """The optimizer that A3C's actors share."""
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def play(model: torch.nn.ModuleDict, optimizer: Any, episodes: int, seed: int) -> list[float]:
    """Play, and learn after each episode. Returns the episodes' returns."""
    environment = gymnasium.make("CartPole-v1")
    generator = torch.Generator().manual_seed(seed)
    returns = []
    for episode in range(episodes):
        seen, _ = environment.reset(seed=1000 * seed + episode)
        observations, actions, total, over = [], [], 0, False
        while not over:
            observations.append(torch.as_tensor(seen))
            with torch.no_grad():
                chances = torch.softmax(model["policy"](observations[-1]), 0)
            actions.append(int(torch.multinomial(chances, 1, generator=generator)))
            seen, reward, terminated, truncated, _ = environment.step(actions[-1])
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
        after = torch.tensor(np.array([(1 - 0.99 ** (len(actions) - step)) / 0.01 for step in range(len(actions))]))
        values = model["value"](torch.stack(observations)).squeeze(1)
        advantage = after.float() - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        log_chances = torch.log_softmax(model["policy"](torch.stack(observations)), 1)[range(len(actions)), actions]
        optimizer.zero_grad()
        (-(log_chances * advantage).mean() + 0.01 * torch.nn.functional.mse_loss(values, after.float())).backward()
        optimizer.step()
    return returns


def actor(rank: int, model: torch.nn.ModuleDict, folder: str, seed: int) -> None:
    """An actor of A3C."""
    optimizer = fastps.DistributedOptimizer(make_adam(model), sync="asp")
    returns = play(model, optimizer, EPISODES // WORKERS, WORKERS * seed + rank)
    Path(folder, f"{rank}.txt").write_text(" ".join(str(each) for each in returns))


def _late(returns: list[float]) -> float:
    """The mean return of the last quarter."""
    return statistics.mean(returns[-len(returns) // 4 :])


def test_actors_learn_what_one_actor_learns(tmp_path: Path) -> None:
    plain = [_late(play(model := make_model(), make_adam(model), EPISODES, seed)) for seed in range(3)]
    found = []
    for seed in range(3):
        fastps.spawn(actor, (make_model(), str(tmp_path), seed), workers=WORKERS)
        of_actors = [[float(each) for each in (tmp_path / f"{rank}.txt").read_text().split()] for rank in range(WORKERS)]
        found.append(statistics.mean(_late(returns) for returns in of_actors))
    print(f"plain {plain}, with fastps {found}")
    assert statistics.median(found) >= min(plain) * 0.8
    assert statistics.median(found) > 60, "CartPole begins at about 20"
