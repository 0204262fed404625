"""What the CUDA compiler makes of every kernel: no spilled register, 16-byte loads, no atomic and no barrier. Needs nvcc."""

import shutil
from pathlib import Path

import pytest

from fastps.bench.gpu import machine_code
from fastps.kernels.cuda.launch_args import DTYPES
from fastps.kernels.cuda.runtime import CudaUnavailableError, kernel_names

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NEEDS_NVDISASM = pytest.mark.skipif(machine_code.disassembler() is None, reason="nvdisasm is not installed")
NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
FOUR_BLOCKS, FIVE_BLOCKS = (65536 // (blocks * 256) // 8 * 8 for blocks in (4, 5))  # registers a thread


@NEEDS_NVCC
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_no_kernel_spills_and_five_blocks_share_a_multiprocessor(architecture: str) -> None:
    found = machine_code.resources(architecture)
    assert sorted(found) == sorted(kernel_names())
    assert {name: each for name, each in found.items() if each.stack_bytes or each.spilled_bytes} == {}
    most = {name: each.registers for name, each in found.items()}
    assert max(most.pop(f"fps_fold_adagrad_{dtype}") for dtype in DTYPES) <= FOUR_BLOCKS
    assert max(most.values()) <= FIVE_BLOCKS


@NEEDS_NVCC
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_no_kernel_has_a_warning(architecture: str, tmp_path: Path) -> None:
    machine_code._compile(tmp_path, "", f"-arch={architecture}", "-cubin", "-Werror=all-warnings")


@NEEDS_NVCC
def test_every_kernel_moves_16_bytes_at_a_time_and_uses_no_atomic() -> None:
    """In PTX, which is the same for every architecture; machine code is not."""
    found = machine_code.instructions("compute_90")
    assert sorted(found) == sorted(kernel_names())
    for name, made in found.items():
        if name.startswith(("fps_check", "fps_copy")):
            wide = [each for each in made if ".v4.u32" in each or ".v4.b32" in each]
            assert any(each.startswith("ld.") for each in wide), name
            assert name != "fps_copy" or any(each.startswith("st.") for each in wide), name
        else:
            assert sum(each.startswith("ld.") and ".v4.f32" in each for each in made) >= 2, name
            assert any(each.startswith("st.") and ".v4.f32" in each for each in made), name
            assert any(each.startswith("st.") and ".v4.u16" in each for each in made), f"{name}: 8 bytes of shown halves"
            if not name.endswith("float32"):
                assert any(each.startswith("ld.") and ".v4.u16" in each for each in made), f"{name}: 8 bytes of halves"
        forbidden = ("atom", "red.", "bar.", "barrier", "ld.shared", "st.shared", "ld.local", "st.local")
        assert [each for each in made if each.startswith(forbidden)] == [], name


@NEEDS_NVCC
@NEEDS_NVDISASM
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_machine_code_of_every_kernel_moves_16_bytes_at_a_time_and_uses_no_atomic(architecture: str) -> None:
    found = machine_code.machine_instructions(architecture)
    assert sorted(found) == sorted(kernel_names())
    for name, made in found.items():
        wide = [each for each in made if each.startswith(("LDG.", "LD.", "STG.", "ST.")) and ".128" in each]
        if name.startswith(("fps_check", "fps_copy")):
            assert any(each.startswith("LD") for each in wide), name
            assert name != "fps_copy" or any(each.startswith("ST") for each in wide), name
        else:
            assert sum(each.startswith("LD") for each in wide) >= 2, name
            assert any(each.startswith("ST") for each in wide), name
        forbidden = ("ATOM", "RED.", "BAR.", "LDS", "STS", "LDL", "STL")
        assert [each for each in made if each.startswith(forbidden)] == [], name


@NEEDS_NVCC
def test_spills_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = machine_code.source().replace("ADAGRAD ? 4 : 5", "ADAGRAD ? 4 : 8")
    assert narrow != machine_code.source()
    monkeypatch.setattr(machine_code, "source", lambda _: narrow)
    assert any(each.spilled_bytes for each in machine_code.resources("sm_90").values())


def test_without_a_disassembler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "disassembler", lambda: None)
    with pytest.raises(CudaUnavailableError, match="pip install nvidia-cuda-nvdisasm"):
        machine_code.machine_instructions("sm_90")


def test_without_a_compiler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(CudaUnavailableError, match="expected nvcc"):
        machine_code.resources("sm_90")


@NEEDS_NVCC
def test_what_the_compiler_refuses_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "source", lambda _: "no such thing")
    with pytest.raises(RuntimeError, match="nvcc refused"):
        machine_code.resources("sm_90")
