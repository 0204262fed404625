"""A job's secret: where it comes from, and what is refused by name without showing it."""

from pathlib import Path

import pytest

from fastps.errors import UsageError
from fastps.job.nodes import check_secret
from fastps.job.options import NodePolicy
from fastps.job.secret import secret_of_environment, secret_of_file, secret_of_text

TEXT = "0123456789abcdefg"


def _file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "secret"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_the_environment_and_a_file_say_the_same(tmp_path: Path) -> None:
    assert secret_of_environment({"FASTPS_SECRET": TEXT}) == secret_of_file(_file(tmp_path, f"{TEXT}\n"))
    assert secret_of_environment({}) is None


def test_a_secret_is_not_shown() -> None:
    secret = secret_of_text(TEXT, "here")
    assert TEXT not in repr(secret) + str(secret) + f"{secret}"


def test_a_short_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="FASTPS_SECRET: expected a secret of at least 16 characters, found 6") as caught:
        secret_of_environment({"FASTPS_SECRET": "qwertz"})
    assert "qwertz" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o602])
def test_a_file_for_others_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match=f"only its owner may read, found mode {mode:04o}; run chmod 600"):
        secret_of_file(_file(tmp_path, TEXT, mode))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found none that can be read"):
        secret_of_file(tmp_path / "missing")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="it is not text"):
        secret_of_file(binary)


def test_links_that_encrypt_need_a_secret() -> None:
    with pytest.raises(UsageError, match=r"--link zmq \(FASTPS_LINK\): expected a secret"):
        check_secret(NodePolicy(link="zmq"), None)
    check_secret(NodePolicy(link="zmq"), secret_of_text(TEXT, "here"))
    check_secret(NodePolicy(), None)
