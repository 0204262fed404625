"""A file is replaced as a whole, or not at all."""

from pathlib import Path

import pytest

from fastps.system.whole_file import replacing


def test_a_file_is_replaced_once_the_block_has_ended_and_stays_if_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for text in (b"first", b"second"):
        before = file.read_bytes() if file.exists() else None
        with replacing(file) as stream:
            stream.write(text)
            assert (file.read_bytes() if file.exists() else None) == before
        assert file.read_bytes() == text
    with pytest.raises(ZeroDivisionError), replacing(file) as stream:
        stream.write(b"a part")
        stream.write(bytes([1 // 0]))
    assert file.read_bytes() == b"second" and list(tmp_path.iterdir()) == [file]
