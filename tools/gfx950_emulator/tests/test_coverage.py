"""Tests which of LLVM's mnemonics for gfx950 the emulator executes. The share stands in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gfx950_emulator.binding import BINDERS
from gfx950_emulator.mfma import bind_mfma

from .test_architectures import amd, complaint

HERE = Path(__file__).parent

# What is not implemented: why -> mnemonics
LEFT = {
    "MFMAs of several blocks": r"v_mfma_\w+_\d+b_\w+",
    "the scale of the next MFMA, which compilers fuse with it": r"v_mfma_ld_scale_b32",
    "indices of registers in M0": r"s_movrel[sd]_b(32|64)|s_set_gpr_idx_\w+",
    "graphics, whole quads and waves": (
        r"s_wqm_b32|s_quadmask_b(32|64)|v_cube\w+|ds_gws_\w+|ds_(append|consume)|v_screen_partition_4se_b32"
    ),
    "normalised integers and video": (
        r"v_cvt_(pk)?norm\w+|v_cvt_pk(accum)?_u8_f32|v_cvt_pk_[iu]16_[iu]32|v_cvt_off_f32_i4|v_m?qsad_\w+"
    ),
    "float16 with the flushing of older hardware": r"v_(mad|mac|madak|madmk)_f16|v_(mad|fma|div_fixup|exp|log)_legacy_f(16|32)",
    "LDS": r"ds_cmpst_(rtn_)?f(32|64)|ds_(mskor|rsub|wrap|wrxchg2|wrxchg2st64|condxchg32)_\w+|ds_(read|write)_addtid_b32|ds_nop",
    "scratch memory": r"s_scratch_\w+|scratch_load_lds_\w+",
    "debugging, messages, traps, calls and caches": (
        r"s_cbranch_(cdbg\w+|[gi]_fork|join)|s_dcache_(discard\w*|inv_vol|wb_vol)|s_atc_\w+|s_endpgm_\w+|s_rfe_\w+|s_call_b64"
        r"|s_sendmsg(halt)?|s_setvskip|v_clrexcp"
    ),
    "another name of an instruction that is implemented": r"v_accvgpr_write|v_mul_lo_i32",
}


def mnemonics() -> list[str]:
    text = (HERE / "data" / "mnemonics.txt").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def executed(name: str) -> bool:
    if not name.startswith("v_mfma"):
        return name in BINDERS
    try:
        bind_mfma(name, {})
    except ValueError:
        return False
    return True


def test_what_is_left_is_listed_with_its_reason() -> None:
    left = [name for name in mnemonics() if not executed(name)]
    unexplained = [name for name in left if not any(re.fullmatch(pattern, name) for pattern in LEFT.values())]
    assert not unexplained
    for why, pattern in LEFT.items():
        assert any(re.fullmatch(pattern, name) for name in left), why
        assert not [name for name in mnemonics() if re.fullmatch(pattern, name) and executed(name)], why


def test_the_readme_has_the_share() -> None:
    names = mnemonics()
    done = sum(map(executed, names))
    sentence = f"executes {done:,} of the {len(names):,} mnemonics ({done / len(names):.1%})"
    assert sentence in (HERE.parent / "README.md").read_text().replace("\n", " "), sentence


@pytest.mark.skipif(not hasattr(amd, "assemble_amdgcn"), reason="this Triton does not expose LLVM's assembler")
def test_llvm_knows_the_names() -> None:
    names = mnemonics()
    assert names == sorted(set(names))
    for name in names[::16]:
        assert "not supported on this GPU" not in complaint(name, "gfx950"), name
