"""malloc keeps freed memory where a model is large, and where nobody has configured malloc."""

import pytest

from fastps.system.malloc import keep_freed_memory

LARGE = 1 << 30


@pytest.mark.parametrize(
    ("variable", "value"), [("FASTPS_KEEP_MEMORY", "0"), ("MALLOC_ARENA_MAX", "2"), ("LD_PRELOAD", ""), ("GLIBC_TUNABLES", "")]
)
def test_a_setting_of_the_user_is_left_alone(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    assert not keep_freed_memory(LARGE)


def test_a_small_model_changes_nothing() -> None:
    assert not keep_freed_memory(1 << 20)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert not keep_freed_memory(LARGE)
