"""A server that folds each push, but the pushes of one drain together: protocol of the store, A.12, with `combine=True`.

"`combine=True` sums first, adds 1 [to the version] and uses the mean learning rate." Who may go on, and when, is the server's
own matter. Refuses to know what a drain is: whoever found pushes together closes them together.
"""

from typing import Any


class Combined:
    """`server` is an oracle of a discipline that folds each push; `most` pushes are one sum at most."""

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
        """The drain is over: one version with all that it has found, in order of the workers."""
        folded, self.found = sorted(self.found), []
        self.version += bool(folded)
        return folded, []
