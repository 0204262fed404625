"""A simulated job of several nodes: edges that break, and a stand-in for the home's arenas."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

Token = tuple[int, int, int]
"""One push: the node, the agent's incarnation, and a number that this agent has counted up."""


class ViolationError(Exception):
    """What is promised does not hold."""


@dataclass
class Channel:
    """One edge, by its epoch. A broken one delivers what has not been lost, and takes nothing more."""

    epoch: int
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    is_broken: bool = False
    has_leaf: bool = True  # whether the leaf still uses it

    def send(self, queue: deque[Any], message: object) -> None:
        """Send, or lose the message if the edge is broken."""
        if not self.is_broken:
            queue.append(message)

    def lose(self, rng: random.Random) -> None:
        """Break the edge: in each direction the last messages are lost."""
        self.is_broken = True
        for queue in (self.up, self.down):
            for _ in range(rng.randint(0, len(queue))):
                queue.pop()


class Arena:
    """A stand-in for the home's arenas: it folds each part of a push at once, or one push of every live lane together."""

    def __init__(self, parts: int, together: bool) -> None:
        self.parts, self._together = parts, together
        self.versions = [0] * parts
        self.lanes: dict[int, list[deque[Token]]] = {}
        self.folded: dict[tuple[Token, int], int] = {}

    def attach(self, node: int) -> None:
        """Give a node new lanes. What the old ones had posted is folded first."""
        self.leave(node)
        self.lanes[node] = [deque() for _ in range(self.parts)]

    def leave(self, node: int) -> None:
        """Take a node's lanes out of the quorum."""
        for part, queue in enumerate(self.lanes.pop(node, [])):
            for token in queue:
                self._fold([token], part)
        for part in range(self.parts):
            self._fold_due(part)

    def post(self, node: int, part: int, token: Token) -> None:
        """Post one part of a push."""
        self.lanes[node][part].append(token)
        self._fold_due(part)

    def _fold_due(self, part: int) -> None:
        queues = [lanes[part] for lanes in self.lanes.values()]
        if not self._together:
            for queue in queues:
                while queue:
                    self._fold([queue.popleft()], part)
        while self._together and queues and all(queues):
            self._fold([queue.popleft() for queue in queues], part)

    def _fold(self, tokens: list[Token], part: int) -> None:
        self.versions[part] += 1
        for token in tokens:
            if (token, part) in self.folded:
                raise ViolationError(f"part {part} of push {token} is folded twice")
            self.folded[token, part] = self.versions[part]
