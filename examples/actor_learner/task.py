"""A3C on CartPole, what the plain program and the one with fastps share: the network, an actor's rollouts and loss, the judge.

An actor plays 4 environments at once for 32 steps, computes the advantages of its actions (GAE), and takes a step of Adam.
The task is solved when the policy, always with its likeliest action, has a mean return of 475 over 20 episodes.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import nn

ENVIRONMENT = "CartPole-v1"
SOLVED = 475.0  # mean return
EPISODES = 20  # of a judgement
JUDGE_EVERY = 10  # updates
LARGEST_NORM = 0.5  # of a gradient


def parser(description: str) -> argparse.ArgumentParser:
    """The options of both programs."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--updates", type=int, default=20_000, help="stop after so many updates, solved or not (20,000)")
    made.add_argument("--solved", type=float, default=SOLVED, help=f"mean return that ends the training ({SOLVED:g})")
    made.add_argument("--environments", type=int, default=4, help="environments of each actor (4)")
    made.add_argument("--steps", type=int, default=32, help="steps of each environment before an update (32)")
    made.add_argument("--lr", type=float, default=1e-3, help="learning rate of Adam (0.001)")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--json", metavar="FILE", help="write the measured figures into this file")
    return made


class ActorCritic(nn.Module):
    """A policy and a value function, each a small network of its own over the same observations."""

    def __init__(self, observations: int = 4, actions: int = 2, width: int = 64) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, actions))
        self.value = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of the actions, and the expected returns."""
        return self.policy(observations), self.value(observations).squeeze(-1)


def network(seed: int) -> ActorCritic:
    """A network with the same initial weights in every process, which computes in one thread: it gains nothing from more."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return ActorCritic()


class Actor:
    """One actor: it plays its environments with the model's policy, and computes the loss of what it played."""

    def __init__(self, rank: int, arguments: argparse.Namespace, model: ActorCritic) -> None:
        self._model = model
        self._steps = arguments.steps
        self._environments = gymnasium.make_vec(ENVIRONMENT, num_envs=arguments.environments)
        seed = 1000 * arguments.seed + rank
        seen, _ = self._environments.reset(seed=seed)
        self._seen = torch.as_tensor(seen)
        self._has_ended = torch.zeros(arguments.environments, dtype=torch.bool)
        self._generator = torch.Generator().manual_seed(seed)

    def learn(self, gamma: float = 0.99, decay: float = 0.95, value_weight: float = 0.5, entropy_weight: float = 0.01) -> None:
        """Play, and set the model's gradients, clipped, to those of advantage actor-critic."""
        seen, actions, rewards, terminated, ended = self._play()
        scores, values = self._model(seen)
        log_chances = torch.log_softmax(scores[:-1], -1)
        with torch.no_grad():
            # The step after an episode's end only resets the environment. It is no experience.
            counts = ~ended[:-1]
            errors = rewards + gamma * values[1:] * ~terminated - values[:-1]
            advantages, advantage = torch.empty_like(errors), torch.zeros_like(errors[0])
            for step in reversed(range(len(errors))):
                advantage = errors[step] + gamma * decay * ~ended[step + 1] * advantage
                advantages[step] = advantage
            returns = advantages + values[:-1]
            kept = advantages[counts]
            advantages = (advantages - kept.mean()) / (kept.std() + 1e-6)
        gains = log_chances.gather(-1, actions.unsqueeze(-1)).squeeze(-1) * advantages
        entropy = -(log_chances.exp() * log_chances).sum(-1)
        value_errors = nn.functional.smooth_l1_loss(values[:-1], returns, reduction="none")
        (value_weight * value_errors - gains - entropy_weight * entropy)[counts].mean().backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), LARGEST_NORM)

    @torch.no_grad()
    def _play(self) -> tuple[torch.Tensor, ...]:
        """Observations and ends of all steps and of the one after; actions, rewards and failures of all steps."""
        seen, actions, rewards, terminated, ended = [self._seen], [], [], [], [self._has_ended]
        for _ in range(self._steps):
            chances = torch.softmax(self._model.policy(self._seen), -1)
            action = torch.multinomial(chances, 1, generator=self._generator).squeeze(-1)
            observation, reward, has_failed, is_cut, _ = self._environments.step(action.numpy())
            self._seen, self._has_ended = torch.as_tensor(observation), torch.as_tensor(has_failed | is_cut)
            actions.append(action)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            terminated.append(torch.as_tensor(has_failed))
            seen.append(self._seen)
            ended.append(self._has_ended)
        return tuple(torch.stack(each) for each in (seen, actions, rewards, terminated, ended))


@torch.no_grad()
def mean_return(model: ActorCritic, seed: int, episodes: int = EPISODES) -> float:
    """The mean return of the policy's likeliest actions, over episodes that begin from this seed."""
    environments = gymnasium.make_vec(ENVIRONMENT, num_envs=episodes)
    seen, _ = environments.reset(seed=seed)
    total, lives = 0.0, np.ones(episodes, bool)
    while lives.any():
        action = model.policy(torch.as_tensor(seen)).argmax(-1).numpy()
        seen, reward, has_failed, is_cut, _ = environments.step(action)
        total += float(reward[lives].sum())
        lives &= ~(has_failed | is_cut)
    return total / episodes


def judge(versions: Iterator[int], model: ActorCritic, arguments: argparse.Namespace) -> tuple[float, int]:
    """Judge the model at each version that it is given, until it solves the task; returns the last mean and its version."""
    began, mean, version = time.perf_counter(), 0.0, 0
    for number, version in enumerate(versions):
        mean = mean_return(model, 1_000_000 * arguments.seed + number)
        if mean >= arguments.solved or number % 10 == 0:
            print(f"version {version}: mean return {mean:.1f} after {time.perf_counter() - began:.1f} s", flush=True)
        if mean >= arguments.solved:
            break
    return mean, version


def report(seconds: float, mean: float, version: int, arguments: argparse.Namespace) -> None:
    """Print how long the training took, and whether it solved the task."""
    is_solved = mean >= arguments.solved
    print(f"{'solved' if is_solved else 'not solved'} in {seconds:.2f} s: mean return {mean:.1f} at version {version}")
    if arguments.json:
        figures = {"seconds": seconds, "mean_return": mean, "version": version, "solved": is_solved}
        Path(arguments.json).write_text(json.dumps(figures))
