"""The socket of an optimizer's state: it answers between folds, and what a stranger sends changes nothing."""

import os
import socket
from collections.abc import Iterator

import pytest
import torch

import fastps
from fastps.membership import rendezvous
from fastps.torch.any_optimizer import saved, service
from fastps.torch.any_optimizer.fold import TorchFold
from fastps.torch.tensors import Tensors
from tests.torch.any_optimizer.test_fold import Own, are_same, new_model, plain


@pytest.fixture
def served() -> Iterator[tuple[str, Own]]:
    """A job's name, and the optimizer that its service has."""
    model, inner = plain("own", steps=2)
    assert isinstance(inner, Own)
    with fastps.Store.create({"w": torch.ones(1).numpy()}, fastps.SGD(lr=0.1)) as store:
        made = service.StateService(store.job, TorchFold(inner, Tensors(list(model.parameters())).enter(store)))
        try:
            yield store.job, inner
        finally:
            made.close()
        with pytest.raises(fastps.WorkerDiedError, match=f"runs the optimizer of job {store.job} does not answer"):
            service.read(store.job, 1.0)


def test_a_state_is_read_and_loaded(served: tuple[str, Own]) -> None:
    job, inner = served
    found = service.read(job, 5.0)
    assert are_same(saved.state_of(found), inner.state_dict())
    other = Own(new_model().parameters())
    saved.load(other, found)
    assert other.count == 2 and are_same(other.state_dict(), inner.state_dict())
    inner.count = 7
    service.load(job, found, 5.0)
    assert inner.count == 2
    service.set_options(job, [{"lr": 0.25, "mode": ("a", torch.ones(2, dtype=torch.bfloat16))}], 5.0)
    assert inner.param_groups[0]["lr"] == 0.25 and inner.param_groups[0]["mode"][1].dtype == torch.bfloat16


def test_a_state_that_the_optimizer_refuses_is_told_with_its_reason(served: tuple[str, Own]) -> None:
    job, _ = served
    with pytest.raises(fastps.Error, match=r"ValueError: .*doesn't match the size of optimizer's group"):
        service.load(job, saved.saved(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)), 5.0)


@pytest.mark.parametrize(("word", "content"), [
    (b"", None), (b"load", None), (b"set", None), (b"other", None), (b"x" * 9000, None), (b"load", b""),
    (b"load", b"no archive"), (b"set", bytes(range(64))),
], ids=range(8))  # fmt: skip
def test_what_a_stranger_sends_changes_nothing(served: tuple[str, Own], word: bytes, content: bytes | None) -> None:
    job, inner = served
    before = service.read(job, 5.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5.0)
        connection.connect(rendezvous.place_name(job, "optimizer"))
        files = []
        if content is not None:
            files = [os.memfd_create("a stranger's")]
            os.write(files[0], content)
        try:
            socket.send_fds(connection, [word], files)
        finally:
            for file in files:
                os.close(file)
        answer = connection.recv(8192)
        assert answer == b"" or b"Error" in answer
    assert inner.count == 2 and are_same(saved.state_of(service.read(job, 5.0)), saved.state_of(before))
