"""A device of the host's memory, and pipes to another process."""

import os
from typing import Any

import pytest

from fastps.device.interface import HANDLE_BYTES
from fastps.lab.gpus.cuda_on_host import HostDevice

DELAY_S = 0.003


class Pipe:
    """Bytes from one process to another."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def send(self, data: bytes) -> None:
        os.write(self.writer, data)

    def receive(self, size: int = HANDLE_BYTES) -> bytes:
        return os.read(self.reader, size)

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipes() -> Any:
    made = [Pipe(), Pipe()]
    yield made
    for pipe in made:
        pipe.close()


@pytest.fixture
def device() -> Any:
    made = HostDevice("host", DELAY_S)
    yield made
    made.shut()
