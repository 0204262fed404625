"""A server that folds each push, but the pushes of one drain together: protocol of the store, A.12, with `combine=True`.

"`combine=True` sums first, adds 1 [to the version] and uses the mean learning rate." The wrapped server decides the grants. The
caller decides which pushes one drain finds, and calls `close` at the end of the drain.
"""

from typing import Any


class Combined:
    """Combine the pushes of `server`, an oracle of a discipline that folds each push; one sum has at most `most` pushes."""

    def __init__(self, server: Any, most: int = 1024) -> None:
        self.server = server
        self.most = most
        self.found: list[int] = []
        self.version = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def push(self, p: int, now_ns: int) -> tuple[list[int], list[int]]:
        _, granted = self.server.push(p, now_ns)
        self.found.append(p)
        return self.close()[0] if len(self.found) == self.most else [], granted

    def leave(self, worker: int, now_ns: int) -> tuple[list[int], list[int]]:
        return [], self.server.leave(worker, now_ns)[1]

    def close(self) -> tuple[list[int], list[int]]:
        """End the drain: fold all pushes that it found into one version, in worker order."""
        folded, self.found = sorted(self.found), []
        self.version += bool(folded)
        return folded, []
