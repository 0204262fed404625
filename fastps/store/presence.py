"""Which parameters have a gradient in a push: the presence bitmap, and the tables that got rows for the next one."""

from collections.abc import Iterable

from fastps.job.layout import Parameter


def presence_of(present: Iterable[int], parameters: int) -> bytes:
    """The bitmap of the parameters that have a gradient, as little-endian uint64 words.

    >>> presence_of([0, 2], 3)[0]
    5
    """
    bits = sum(1 << index for index in present)
    return bits.to_bytes(8 * -(-parameters // 64), "little")


class Presence:
    """What a push has whose caller says nothing: all dense parameters, and the tables whose rows were given."""

    def __init__(self, parameters: tuple[Parameter, ...]) -> None:
        self._dense = [index for index, parameter in enumerate(parameters) if not parameter.is_table]
        self._count = len(parameters)
        self._everything = presence_of(range(self._count), self._count)
        self._given: set[int] = set()

    def add(self, table: int) -> None:
        """Let the next push have rows of this table."""
        self._given.add(table)

    def take(self) -> bytes:
        """The bitmap of the next push; the one after it begins without rows."""
        if len(self._dense) == self._count:
            return self._everything
        found = presence_of([*self._dense, *self._given], self._count)
        self._given.clear()
        return found
