"""torch's entry point of the backend: it makes the backend known, and never lets `import torch` fail."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fastps_backend


def test_torch_is_given_the_entry_point_that_cannot_fail() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch.backends"] == {
        "fastps": f"{fastps_backend.__name__}:{fastps_backend.register.__name__}"
    }


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("broken", ["raise RuntimeError('half of it is gone')", "import no_such_package"])
def test_import_of_torch_survives_a_package_that_cannot_be_imported(broken: str, tmp_path: Path) -> None:
    (tmp_path / "fastps").mkdir()
    (tmp_path / "fastps" / "__init__.py").write_text(broken)
    ended = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(1).item())"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "1.0\n"), ended.stderr
    assert 'torch.distributed has no backend "fastps"' in ended.stderr
