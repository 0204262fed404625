"""What is made once on a machine: kept between processes, made anew where nothing can be kept."""

from pathlib import Path

import pytest

from fastps.system.cache import cache_folder, kept


def test_what_was_made_is_found_again_and_made_anew_where_it_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = iter([b"first", b"second", b"third"])
    assert [kept("kernel", lambda: next(made)) for _ in range(2)] == [b"first", b"first"]
    assert [path.name for path in (tmp_path / "fastps").iterdir()] == ["kernel"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [kept("kernel", lambda: next(made)) for _ in range(2)] == [b"second", b"third"]


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/fastps"
