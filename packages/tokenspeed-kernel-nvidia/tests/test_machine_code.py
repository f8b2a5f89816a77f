"""Tests ``ci/machine_code.py`` on small examples of machine code with the faults that this script detects."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).parents[3] / "ci"
SUMS = ", ".join(f"%f{i}" for i in range(8))


@pytest.fixture
def machine_code(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not CI.is_dir():
        pytest.skip("this is no checkout")
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("machine_code")


def program(between: str, mmas: int = 2) -> str:
    """Returns the PTX of a loop of MMAs, with the instruction ``between`` after the MMAs and before the wait for the MMAs."""
    mma = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{SUMS}}}, %rd1, %rd2, %p1, 1, 1, 0, 0;"
    return f"""
.version 8.4
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 a, .param .u64 b, .param .u64 out, .param .u32 turns) {{
.reg .b64 %rd<9>; .reg .f32 %f<32>; .reg .pred %p<4>; .reg .b32 %r<4>;
ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [out]; ld.param.u32 %r1, [turns];
setp.ne.u64 %p1, %rd3, 0;
{" ".join(f"ld.global.f32 %f{i}, [%rd3+{4 * i}];" for i in range(9))}
mov.b32 %r2, 0;
add.s64 %rd5, %rd1, 64;
$L0:
wgmma.fence.sync.aligned;
{mma}
{mma.replace("%rd1", "%rd5") if mmas == 2 else ""}
wgmma.commit_group.sync.aligned;
{between}
wgmma.wait_group.sync.aligned 0;
add.u32 %r2, %r2, 1;
setp.lt.u32 %p2, %r2, %r1;
@%p2 bra $L0;
{" ".join(f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(8))}
ret;
}}
"""


@pytest.mark.parametrize(
    ("between", "mmas", "serialised"),
    [
        ("", 2, False),
        ("mul.f32 %f8, %f8, %f8;", 2, False),
        ("mul.f32 %f0, %f0, %f8;", 2, True),  # accesses an accumulator while MMAs may still add to it
        ("", 1, False),  # the PTX itself serialises the MMAs
    ],
)
def test_serialised_mmas_are_found(machine_code: ModuleType, tmp_path: Path, between: str, mmas: int, serialised: bool) -> None:
    triton = pytest.importorskip("triton")
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    ptx, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    ptx.write_text(program(between, mmas))
    said = subprocess.run(
        [assembler, "-v", "--gpu-name=sm_90a", ptx, "-o", cubin], capture_output=True, text=True, check=True
    ).stderr
    assert ("wgmma.mma_async instructions are serialized" in said) == serialised
    assert machine_code.serialised(cubin.read_bytes(), ptx.read_text()) == serialised


RANGES = """
                                   // +----------------------+-----
                                   // |       GPR            | PRED
                                   // |     0000000000       |
                                   // |   # 0123456789       | # 0
                                   // +----------------------+-----
        /*0000*/  LDC R1, c[0x0][0x28] ;    // |   1  ^                 |
        /*0010*/  @!P0 MOV R2, R1 ;         // |   2  v^                |
        /*0020*/  PRMT R3, RZ, 0x7610, R3 ; // |   3  ::x               | 1 v
        /*0030*/  HGMMA.64x8x16.F32.BF16 R4, gdesc[UR4], R4, gsb0 ;     // |   6  :::xx             |
        /*0040*/  IADD3 R6, R7, R2, RZ ;    // |   6  :v:::^v           |
        /*0050*/  MOV R8, R7 ;              // |   6  : ::: v^          |
"""


def test_registers_that_nothing_wrote_are_found(machine_code: ModuleType) -> None:
    assert machine_code.unwritten_general_registers(RANGES) == ["IADD3 R6, R7, R2, RZ: R7"]
    assert (
        machine_code.unwritten_general_registers(
            RANGES.replace("0020*/  PRMT R3, RZ, 0x7610, R3 ; // |   3  ::x  ", "0020*/  MOV R3, R7 ; // |   3  ::^   ^")
        )
        == []
    )
    with pytest.raises(ValueError, match="no table of general registers"):
        machine_code.unwritten_general_registers("")


def test_uniform_registers_that_nothing_wrote_are_found(machine_code: ModuleType) -> None:
    text = """
        /*0000*/                   UMOV UR4, 0x400 ;
        /*0010*/              @!UP0 UIADD3 UR6, UP0, UR4, 0x20, URZ ;
        /*0020*/                   UMOV UR8, 0x4000 ;
        /*0028*/                   UMOV UR9, 0x4000 ;
        /*0030*/                   HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR6], R24, gsb0 ;
        /*0040*/                   HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
    """
    instructions = machine_code.instructions(text)
    assert instructions[1] == ("UIADD3", "UR6, UP0, UR4, 0x20, URZ")
    assert machine_code.unwritten_uniform_registers(instructions) == ["HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], R24, gsb0: UR5, UR7"]
