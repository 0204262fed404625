"""What a GPU is given to compile and to launch, with a recorder in the place of CuPy."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastps.kernels.cuda import runtime
from fastps.kernels.cuda.launch_args import DTYPES, RULE_NAMES, Launch, argument_bytes, check_launch, copy_launches


class Recorder:
    """CuPy's functions that launches use, as in cupy/cuda/function.pyx of CuPy 14.

    A stream is anything with `ptr`. Of NumPy's arrays `_pointer` takes those of size one, and passes the address of their data;
    cuLaunchKernel reads the size of the kernel's parameter from there, before it returns, at most 4,096 bytes.
    """

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launched: list[tuple[Any, ...]] = []
        self.cuda = SimpleNamespace(Device=lambda number: _Device(), function=SimpleNamespace(Module=lambda: self))

    def load(self, code: bytes) -> None:
        self.loaded.append(code)

    def get_function(self, name: str) -> Any:
        def launch(grid: Any, block: Any, arguments: Any, shared: int, stream: Any) -> None:
            [argument] = arguments
            if not isinstance(argument, np.ndarray) or argument.size != 1 or not grid[0]:
                raise TypeError(f"Only numpy.ndarrays of size one can be passed by value, found {argument}")
            address, size = argument.__array_interface__["data"][0], argument_bytes(name)
            assert argument.nbytes >= size <= 4096
            self.launched.append((name, grid, block, ctypes.string_at(address, size), shared, stream.ptr))

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
    for cached in (runtime.kernel, runtime._module):
        cached.cache_clear()
    return recorder


def test_one_kernel_is_compiled_for_the_gpus_architecture_and_launched_on_a_stream_by_its_number(cupy: Recorder) -> None:
    compiled: list[tuple[str, str]] = []

    def compile_text(architecture: str, text: str) -> bytes:
        compiled.append((architecture, text))
        return b"code"

    argument = np.arange(4096, dtype=np.uint16).view(np.uint8)[:4096]
    check_argument = check_launch([(0, 5000)], 16, 32, 1, 48)
    for _ in range(2):
        runtime.kernel(0, "fps_fold_adam_float16", "", compile_text)(1234, Launch(argument, 7))
    runtime.kernel(0, "fps_check_float16", "", compile_text)(5678, check_argument)
    runtime.kernel(0, "fps_copy", "", compile_text)(5678, copy_launches([(16, 32, 16)])[0])
    assert [architecture for architecture, _ in compiled] == ["sm_90", "sm_90"] and cupy.loaded == [b"code", b"code"]
    assert "FPS_FOLD_KERNEL(adam_float16, 1, 1)" in compiled[0][1] and "RULES(FPS_FOLD_KERNELS)" not in compiled[0][1]
    fold, _, check, copy = cupy.launched
    assert fold == ("fps_fold_adam_float16", (7,), (256,), argument.tobytes(), 0, 1234)
    assert check == ("fps_check_float16", (2,), (256,), check_argument.argument.tobytes(), 0, 5678)
    assert copy[0] == "fps_copy" and copy[-1] == 5678


def test_nvrtc_makes_the_one_kernel_and_the_checks() -> None:
    text = runtime.source(folds=f"FPS_FOLD_KERNEL({RULE_NAMES[0]}_float32, 0, {DTYPES['float32']})")
    try:
        code = runtime.compile_with_nvrtc("sm_80", text)
        assert runtime.key_of("sm_80", text) != runtime.key_of("sm_80", text + " ")
    except runtime.CudaUnavailableError as error:
        pytest.skip(str(error))
    made = [name for name in runtime.kernel_names() if f".text.{name}\0".encode() in code]
    assert made == ["fps_fold_sgd_float32", "fps_check_float32", "fps_check_float16", "fps_check_bfloat16", "fps_copy"]
