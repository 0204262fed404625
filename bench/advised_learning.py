"""Advice compared with what is learned: `python -m fastps.bench.advised_learning`.

A perceptron is trained in virtual time under every scheme of a setting, each at the best of a grid of rates, until it names a
share of the test images rightly. The setting's times of computing, without what is learned, are what advice sees. One table
says how long each scheme took over the best, and which one advice picked. docs/experiments/advice-and-learning.md has the
settings, which were fixed before the first run, and the result.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.advice.advise import Recorded, best_backups, candidates, compared, ranked
from fastps.advice.auto_sync import may_be_chosen
from fastps.job.specs import parse_policy
from fastps.simulation.simulate import TRACE_KINDS, ComputeModel, Simulation, simulate

Floats = npt.NDArray[np.float32]
MS = 1_000_000
HIDDEN, CLASSES, BATCH = 64, 10, 16
LOOK_AT = 1200  # test images
LOOK_EVERY = 48  # folded pushes
FACTOR = 2.0  # of a rate to the next
TARGETS = {"harder": 0.80, "digits": 0.94}
KINDS = ("equal", "one slow", "half slow", "lognormal")
BUDGET = {4: 6000, 16: 8000, 64: 16000}  # pushes of a run, at most


REACH = 6  # rates from the first one, each way
ADVICE_SEED = 7  # of the times that advice sees


@dataclass(frozen=True)
class Setting:
    """A job: its task, its workers, how their times differ, and the momentum of its optimizer."""

    task: str
    workers: int
    kind: str
    momentum: float

    def simulation(self, seed: int, steps: int) -> Simulation:
        """The job in virtual time: 100 ms a step; a worker ten times as slow, half of them three times, or times that vary."""
        n = self.workers
        factors = {"one slow": {0: 10.0}, "half slow": dict.fromkeys(range(n // 2), 3.0)}.get(self.kind, {})
        sigma = 0.75 if self.kind == "lognormal" else 0.05
        model = ComputeModel("lognormal", 100 * MS, sigma, factors=factors)
        return Simulation(workers=n, steps=steps, batch=BATCH, compute=model, seed=seed)


SETTINGS = (
    *(Setting("harder", 16, kind, momentum) for momentum in (0.9, 0.5, 0.0) for kind in KINDS),
    *(Setting("harder", 4, kind, 0.9) for kind in KINDS),
    *(Setting("digits", 16, kind, 0.9) for kind in KINDS),
    *(Setting("harder", 64, kind, 0.9) for kind in KINDS),
)


class Perceptron:
    """A task with its network, of one hidden layer, whose weights are one vector."""

    def __init__(self, task: str) -> None:
        from fastps.lab.papers.runs import images

        data = images(task)
        self.x, self.y = self._inputs(data, data.train_images), data.train_labels
        self.test_x, self.test_y = self._inputs(data, data.test_images)[:LOOK_AT], data.test_labels[:LOOK_AT]
        self._features = self.x.shape[1]
        sizes = (self._features * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES)
        self._ends = np.cumsum((0, *sizes))

    @staticmethod
    def _inputs(data: Any, images: npt.NDArray[np.uint8]) -> Floats:
        found: Floats = ((images.reshape(len(images), -1) - data.mean) / data.deviation).astype(np.float32)
        return found

    def first_weights(self, seed: int) -> Floats:
        """Uniform numbers within one over the root of a unit's inputs, as torch's."""
        random = np.random.default_rng(seed)
        bounds = np.repeat([self._features, self._features, HIDDEN, HIDDEN], np.diff(self._ends)) ** -0.5
        found: Floats = (random.uniform(-1, 1, self._ends[-1]) * bounds).astype(np.float32)
        return found

    def _parts(self, weights: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        a, b, c, d = (weights[first:last] for first, last in zip(self._ends, self._ends[1:], strict=False))
        return a.reshape(self._features, HIDDEN), b, c.reshape(HIDDEN, CLASSES), d

    def gradient(self, weights: Floats, chosen: npt.NDArray[np.int64]) -> Floats:
        """The gradient of the mean cross-entropy of these training images."""
        first, first_bias, second, second_bias = self._parts(weights)
        x, rows = self.x[chosen], np.arange(len(chosen))
        hidden = x @ first + first_bias
        np.maximum(hidden, 0, out=hidden)
        scores = hidden @ second + second_bias
        scores -= scores.max(1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(1, keepdims=True)
        scores[rows, self.y[chosen]] -= 1
        scores /= len(chosen)
        found = np.empty_like(weights)
        parts = self._parts(found)
        np.matmul(hidden.T, scores, out=parts[2])
        scores.sum(0, out=parts[3])
        back = (scores @ second.T) * (hidden > 0)
        np.matmul(x.T, back, out=parts[0])
        back.sum(0, out=parts[1])
        return found

    def accuracy(self, weights: Floats) -> float:
        """The share of the test images that are named rightly."""
        first, first_bias, second, second_bias = self._parts(weights)
        scores = np.maximum(self.test_x @ first + first_bias, 0) @ second + second_bias
        return float((scores.argmax(1) == self.test_y).mean())


@cache
def perceptron(task: str) -> Perceptron:
    """Load a task once."""
    return Perceptron(task)


Push = tuple[int, int, int, int]  # worker, step, the version that it read, samples
Update = tuple[int, list[Push]]  # its time in ns, and its pushes


def updates_of(spec: str, setting: Setting, seed: int) -> Iterator[Update]:
    """The updates of a run in virtual time, under the store's own scheduler."""
    steps = BUDGET[setting.workers] // setting.workers
    outcome = simulate(parse_policy(spec), setting.simulation(seed, steps), trace=True)
    assert outcome.trace is not None
    begin, fold, drop = (TRACE_KINDS.index(kind) for kind in ("begin", "fold", "drop"))
    waiting: list[list[Push]] = [[] for _ in range(setting.workers)]
    begun, base, pushes, when_ns = [0] * setting.workers, -1, list[Push](), 0
    for now_ns, version, detail, worker, _, kind in outcome.trace.tolist():
        if kind == begin:
            waiting[worker].append((worker, begun[worker], version, detail))
            begun[worker] += 1
        elif kind == drop:
            waiting[worker].pop(0)
        elif kind == fold:
            if pushes and version + detail != base:
                yield when_ns, pushes
                pushes = []
            base, when_ns = version + detail, now_ns
            pushes.append(waiting[worker].pop(0))
    if pushes:
        yield when_ns, pushes


@cache
def drawn(task: str, seed: int, worker: int, step: int, samples: int) -> npt.NDArray[np.int64]:
    """The images of a push, once for all schemes and rates."""
    return np.random.default_rng((seed, worker, step)).integers(0, len(perceptron(task).y), samples)


class Training:
    """One run: the weights of each version that may still be read, and the momentum, of the fold or of each worker."""

    def __init__(self, setting: Setting, *, rate: float, seed: int, in_worker: bool) -> None:
        self._task, self._setting, self._rate, self._in_worker = perceptron(setting.task), setting, rate, in_worker
        self._seed, self.version = seed, 0
        self._kept = {0: self._task.first_weights(seed)}
        self._momentum: dict[int, Floats] = {}

    def _smoothed(self, owner: int, gradient: Floats, ahead: bool) -> Floats:
        mu = np.float32(self._setting.momentum)
        if not mu:
            return gradient
        before = self._momentum.get(owner)
        found = gradient if before is None else mu * before + gradient
        self._momentum[owner] = found
        return gradient + mu * found if ahead else found

    def fold(self, pushes: Sequence[Push]) -> None:
        """Move the weights by the mean of the pushes, each weighted by its samples; one version's are computed together."""
        total: Floats | None = None
        groups: dict[tuple[int, int], list[npt.NDArray[np.int64]]] = {}
        for worker, step, version, samples in pushes:
            groups.setdefault((version, worker if self._in_worker else -1), []).append(
                drawn(self._setting.task, self._seed, worker, step, samples)
            )
        for (version, worker), batches in groups.items():
            chosen = np.concatenate(batches)
            found = self._task.gradient(self._kept[version], chosen)
            if self._in_worker:
                found = self._smoothed(worker, found, True)
            found = found * np.float32(len(chosen) / (BATCH * len(pushes)))
            total = found if total is None else total + found
        assert total is not None
        total = total if self._in_worker else self._smoothed(-1, total, False)
        weights = self._kept[self.version] - np.float32(self._rate) * total
        self.version += 1
        self._kept[self.version] = weights

    def forget(self, oldest: int) -> None:
        """Free the versions before this one."""
        for version in [each for each in self._kept if each < oldest]:
            del self._kept[version]

    def accuracy(self) -> float:
        """The newest weights' accuracy."""
        return self._task.accuracy(self._kept[self.version])


@cache
def schedule(spec: str, setting: Setting, seed: int) -> list[Update]:
    """The updates of a run, once for all rates."""
    return list(updates_of(spec, setting, seed))


def seconds_to_target(scheme: str, setting: Setting, rate: float, seed: int, most_s: float) -> float:
    """The virtual seconds to the target, linear between two looks; infinite if it takes more than `most_s`."""
    spec, _, modifier = scheme.partition(",momentum=")
    run = Training(setting, rate=rate, seed=seed, in_worker=modifier == "worker")
    target, folded, looked, before = TARGETS[setting.task], 0, 0, (0.0, 0.1)
    for when_ns, pushes in schedule(spec, setting, seed):
        run.fold(pushes)
        folded += len(pushes)
        if folded - looked < LOOK_EVERY:
            continue
        looked, now_s, found = folded, when_ns / 1e9, run.accuracy()
        if found >= target:
            return before[0] + (target - before[1]) / (found - before[1]) * (now_s - before[0])
        if now_s > most_s or (folded > 600 and found < 0.2):
            return math.inf
        before = (now_s, found)
    return math.inf


def best_time(scheme: str, setting: Setting, seeds: Sequence[int], start: float) -> tuple[float, float]:
    """The least mean time over the seeds, and its rate: from the start outwards until the rates on both sides are worse."""
    times: dict[int, float] = {}

    def time_at(number: int) -> float:
        if number not in times:
            most_s = 1.2 * min(times.values(), default=math.inf) * len(seeds)
            times[number] = mean_time(scheme, setting, start * FACTOR**number, seeds, most_s)
        return times[number]

    at = 0
    while math.isinf(time_at(at)) and at > -REACH:  # too large a rate diverges
        at -= 1
    for direction in (-1, 1):
        while abs(at + direction) <= REACH + 1 and time_at(at + direction) < time_at(at):
            at += direction
    return time_at(at), start * FACTOR**at


def mean_time(scheme: str, setting: Setting, rate: float, seeds: Sequence[int], most_s: float = math.inf) -> float:
    """The mean time over the seeds at one rate; infinite if one does not get there, or all take more than `most_s` together."""
    taken: list[float] = []
    for seed in seeds:
        taken.append(seconds_to_target(scheme, setting, rate, seed, most_s - sum(taken)))
        if math.isinf(taken[-1]):
            break
    return fmean(taken)


def first_rate(scheme: str, setting: Setting) -> float:
    """The rate at which the search begins: of a mean of all workers' gradients, over twice the versions' staleness."""
    of_mean = 0.1 * setting.workers * (1 - setting.momentum)
    policy = parse_policy(scheme)
    if policy.grant == "next-version":
        return of_mean
    return of_mean / (2 * policy.divisor if policy.fold == "count" else setting.workers)


def picks(setting: Setting) -> tuple[str, str]:
    """What advice recommends to a run under bsp, and what auto does."""
    simulation, n = setting.simulation(ADVICE_SEED, 100), setting.workers
    recorded = Recorded("bsp", BATCH, setting.momentum, is_sgd=setting.momentum > 0)
    specs = candidates(n, BATCH, recorded, best_backups(simulation, recorded))
    found: list[str] = []
    for is_auto in (False, True):
        policies = [policy for policy in map(parse_policy, specs) if not is_auto or may_be_chosen(policy)]
        known = replace(recorded, is_auto=is_auto)
        rows = ranked(policies, lambda policy: compared(policy, simulation), None, known)
        found += [row["sync"] for row in rows if row["recommended"]]
    return found[0], found[1]


def measured(setting: Setting, seeds: Sequence[int]) -> dict[str, Any]:
    """Train a setting under every scheme: its times, rates, and what advice and auto would have taken."""
    advised, auto = picks(setting)
    n = setting.workers
    schemes = ["bsp", "backup:1", f"backup:{max(1, n // 8)}", f"backup:{n // 2}", "asp", "dssp:3,15", "softsync:1"]
    schemes += ["softsync:4"] if n > 4 else []
    schemes += [f"{spec},momentum=worker" for spec in ("asp", *schemes[8:])] if setting.momentum else []
    times, rates = {}, {}
    for scheme in dict.fromkeys([*schemes, advised]):
        times[scheme], rates[scheme] = best_time(scheme, setting, seeds, first_rate(scheme, setting))
        schedule.cache_clear()
    untuned = times["bsp"] if auto == "bsp" else mean_time(auto, setting, rates["bsp"], seeds)
    return {**asdict(setting), "times": times, "rates": rates, "advised": advised, "auto": auto, "auto_untuned_s": untuned}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The result as Markdown, a row for each setting, and a line that counts."""
    headings = "task", "workers", "times", "momentum", "bsp, s", "best", "of bsp", "advised", "over the best", "of bsp", "auto"
    lines = [f"| {' | '.join((*headings, 'at its rate, of bsp'))} |", "|---" * 12 + "|"]
    good = worse = 0
    for row in rows:
        times, bsp = row["times"], row["times"]["bsp"]
        best = min(times, key=lambda name: times[name])
        over, of_bsp = times[row["advised"]] / times[best], times[row["advised"]] / bsp
        good, worse = good + (over <= 1.1), worse + (of_bsp > 1.05)
        cells = [
            row["task"],
            row["workers"],
            row["kind"],
            row["momentum"],
            f"{bsp:.1f}",
            f"`{best}`",
            f"{times[best] / bsp:.2f}",
        ]
        cells += [
            f"`{row['advised']}`",
            f"{over:.2f}",
            f"{of_bsp:.2f}",
            f"`{row['auto']}`",
            f"{row['auto_untuned_s'] / bsp:.2f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    text = f"Within 10 % of the best in {good} of {len(rows)} settings, more than 5 % behind bsp in {worse}."
    return "\n".join([*lines, "", text])


def beside_bsp(spec: str, rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> str:
    """Another scheme at bsp's best rate in the settings of the rows, and what advice takes with it there, as Markdown."""
    headings = (
        "task",
        "workers",
        "times",
        "momentum",
        f"`{spec}`, of bsp",
        "best of the others, of bsp",
        "advised",
        "over the best",
    )
    lines, good = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"], 0
    for row in rows:
        setting, times = Setting(*(row[name] for name in ("task", "workers", "kind", "momentum"))), row["times"]
        times = {**times, spec: mean_time(spec, setting, row["rates"]["bsp"], seeds)}
        schedule.cache_clear()
        advised, _ = picks(setting)
        over = times[advised] / min(times.values())
        good += over <= 1.1
        shares = times[spec] / times["bsp"], min(row["times"].values()) / times["bsp"]
        cells = *asdict(setting).values(), *(f"{share:.2f}" for share in shares), f"`{advised}`", f"{over:.2f}"
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", f"Within 10 % of the best in {good} of {len(rows)} settings."])


def main() -> None:
    """Measure all settings, or read those that the file has, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", help="write each setting's row, and go on from those that are there")
    parser.add_argument("--seeds", default="31,32")
    parser.add_argument("--most", type=int, default=len(SETTINGS), help="of the settings, the first so many")
    parser.add_argument(
        "--beside-bsp", metavar="SPEC", help="instead: measure this scheme at bsp's rate in the file's settings"
    )
    given = parser.parse_args()
    file, seeds = Path(given.json) if given.json else None, [int(seed) for seed in given.seeds.split(",")]
    rows = json.loads(file.read_text()) if file is not None and file.exists() else []
    if given.beside_bsp:
        print(beside_bsp(given.beside_bsp, rows, seeds))
        return
    for setting in SETTINGS[len(rows) : given.most]:
        rows.append(measured(setting, seeds))
        if file is not None:
            file.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
