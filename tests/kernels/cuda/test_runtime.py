"""What a GPU is given to compile and to launch, with a recorder in the place of CuPy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastps.kernels.cuda import runtime
from fastps.kernels.cuda.launch_args import DTYPES, RULE_NAMES


class Recorder:
    """CuPy's functions that launches use, as in cupy/cuda/function.pyx of CuPy 14: a stream is anything with `ptr`."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launched: list[tuple[Any, ...]] = []
        self.cuda = SimpleNamespace(Device=lambda number: _Device(), function=SimpleNamespace(Module=lambda: self))

    def load(self, code: bytes) -> None:
        self.loaded.append(code)

    def get_function(self, name: str) -> Any:
        def launch(grid: Any, block: Any, arguments: Any, shared: int, stream: Any) -> None:
            self.launched.append((name, grid, block, arguments, shared, stream.ptr))

        return launch


class _Device:
    compute_capability = "90"

    def __enter__(self) -> None:
        """Make it current."""

    def __exit__(self, *raised: object) -> None:
        """Make the one before current."""


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(runtime, "load_cupy", lambda: recorder)
    for cached in (runtime.fold_kernel, runtime.check_kernel, runtime._module):
        cached.cache_clear()
    return recorder


def test_one_kernel_is_compiled_for_the_gpus_architecture_and_launched_on_a_stream_by_its_number(cupy: Recorder) -> None:
    compiled: list[tuple[str, str]] = []

    def compile_text(architecture: str, text: str) -> bytes:
        compiled.append((architecture, text))
        return b"code"

    for _ in range(2):
        runtime.fold_kernel(0, 1, "float16", "", compile_text)(1234, 16, 32, 7)
    runtime.check_kernel(0, "float16", compile_text)(5678, 16, 32, 7)
    assert [architecture for architecture, _ in compiled] == ["sm_90", "sm_90"] and cupy.loaded == [b"code", b"code"]
    assert "FPS_FOLD_KERNEL(adam_float16, 1, 1)" in compiled[0][1] and "RULES(FPS_FOLD_KERNELS)" not in compiled[0][1]
    fold, _, check = cupy.launched
    assert fold == ("fps_fold_adam_float16", (7,), (256,), (np.uint64(16), np.uint64(32)), 0, 1234)
    assert check[0] == "fps_check_float16" and check[-1] == 5678


def test_nvrtc_makes_the_one_kernel_and_the_checks() -> None:
    text = runtime.source(folds=f"FPS_FOLD_KERNEL({RULE_NAMES[0]}_float32, 0, {DTYPES['float32']})")
    try:
        code = runtime.compile_with_nvrtc("sm_80", text)
        assert runtime.key_of("sm_80", text) != runtime.key_of("sm_80", text + " ")
    except runtime.CudaUnavailableError as error:
        pytest.skip(str(error))
    made = [name for name in runtime.kernel_names() if f".text.{name}\0".encode() in code]
    assert made == ["fps_fold_sgd_float32", "fps_check_float32", "fps_check_float16", "fps_check_bfloat16"]
