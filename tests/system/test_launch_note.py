"""A worker's note to its launcher: it arrives, and nothing hangs on who else sends one."""

import pytest

from fastps.system import launch_note
from fastps.system.launch_note import LaunchNote


def test_a_note_reaches_its_launcher_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = LaunchNote(), LaunchNote()
    monkeypatch.setenv(launch_note.VARIABLE, second.name)
    for _ in range(2000):  # more than its socket holds
        launch_note.send()
    assert (first.has_come(), second.has_come()) == (False, True)
    first.close()
    second.close()
    launch_note.send()  # to nobody


@pytest.mark.parametrize("name", ["", "x" * 200, "nobody"])
def test_a_name_at_which_no_launcher_listens_is_passed_by(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_note.VARIABLE, name)
    launch_note.send()
