"""Tests the sanitizer, instruction by instruction: bounds, and registers and LDS that are uninitialised.

Kernels with seeded faults are in `test_sanitizer_kernels`. This file tests each rule, and correct code that comes close to
violating the rule.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import EmulationError, SanitizerError

from .isa import MASK32, MASK64, WAVE, bits_of
from .sanitizing import FULL, LANES, reported, run

# Bounds


@pytest.mark.parametrize(
    ("text", "at", "match"),
    [
        ("global_load_dword v3, v1, s[4:5] offset:4000", "global_load_dword", "past the end of array 0"),
        ("global_store_dword v1, v2, s[4:5] offset:-4", "global_store_dword", "4 bytes before array"),
        ("buffer_load_dword v3, v1, s[4:7], s10 offen", "buffer_load_dword", "past the end of array 0"),
        ("buffer_store_byte v2, v1, s[4:7], s10 offen offset:3", "buffer_store_byte", "past the end of array 0"),
        ("v_mov_b32_e32 v3, -8\nbuffer_load_dword v4, v3, s[4:7], 0 offen", "buffer_load_dword", "offset -8, before the buffer"),
        ("v_mov_b32_e32 v3, -8\nbuffer_store_dword v2, v3, s[4:7], 0 offen offset:12", "buffer_store_dword", "offset -8"),
        ("s_load_dwordx2 s[12:13], s[4:5], 0xffc", "s_load_dwordx2", "past the end of array 0"),
        ("ds_read_b32 v3, v1 offset:772", "ds_read_b32", r"LDS read of 4 bytes at 0x400; the workgroup has 1024 bytes"),
        ("ds_write_b64 v1, v[1:2] offset:768", "ds_write_b64", "LDS write of 8 bytes"),
        ("ds_add_u32 v1, v2 offset:776", "ds_add_u32", "LDS atomic of 4 bytes"),
        ("ds_write2st64_b32 v1, v1, v2 offset1:4", "ds_write2st64_b32", "0x400"),
        ("ds_read_b64_tr_b16 v[4:5], v3 offset:520", "ds_read_b64_tr_b16", "0x400"),
        ("s_mov_b32 m0, 0x304\nglobal_load_lds_dword v1, s[4:5]", "global_load_lds_dword", "direct load to LDS of 4 bytes"),
        ("scratch_load_dword v3, off, off offset:-8", "scratch_load_dword", "scratch"),
    ],
)
def test_out_of_bounds(text: str, at: str, match: str) -> None:
    reported(text, "out-of-bounds", at, match, s={10: 4096 - 252}, v={3: 8 * LANES[:WAVE]}, lds=FULL)


@pytest.mark.parametrize(
    "text",
    [
        "v_mov_b32_e32 v3, 0x80000000\nbuffer_load_dword v4, v3, s[4:7], 0 offen\n"
        "buffer_store_dwordx2 v[1:2], v3, s[4:7], 0 offen offset:16",
        "s_mov_b64 exec, 1\nglobal_load_dword v3, v1, s[4:5] offset:4092",
        "s_mov_b32 m0, 0x7fffffff\nglobal_load_lds_dwordx4 v1, s[4:5] offset:4000",
        "s_mov_b32 s6, 16\nbuffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen",
        "ds_read_b32 v3, v1 offset:768",
    ],
)
def test_accesses_that_are_switched_off_or_within_bounds(text: str) -> None:
    run(text, lds=FULL)


# Uninitialised registers

_STORE = "global_store_dword v1, v3, s[8:9]"  # reports v3 unless the preceding text wrote it


@pytest.mark.parametrize(
    ("text", "at", "match"),
    [
        (_STORE, "global_store_dword", "v3 was never written in lane 0 of wave 0, and is stored"),
        ("buffer_store_dwordx2 v[2:3], v1, s[4:7], 0 offen", "buffer_store_dwordx2", "v3 was never written"),
        ("global_load_dword v4, v3, s[4:5]", "global_load_dword", "v3 was never written .* is an address"),
        ("buffer_load_dword v4, v1, s[4:7], s11 offen", "buffer_load_dword", "s11 was never written"),
        ("global_load_dword v4, v1, s[12:13]", "global_load_dword", "s12 was never written"),
        ("s_load_dword s14, s[12:13], 0x0", "s_load_dword", "s12 was never written"),
        ("global_load_lds_dword v1, s[4:5]", "global_load_lds_dword", "m0 was never written"),
        ("ds_read_b32 v4, v3", "ds_read_b32", "v3 was never written"),
        ("ds_write_b32 v3, v1", "ds_write_b32", "v3 was never written"),
        ("ds_bpermute_b32 v4, v3, v1", "ds_bpermute_b32", "v3 was never written"),
        ("ds_add_u32 v1, v3", "ds_add_u32", "v3 was never written"),
        ("global_atomic_add v1, v3, s[8:9]", "global_atomic_add", "v3 was never written"),
        ("s_cbranch_scc1 .Lend\n.Lend:", "s_cbranch_scc1", "scc was never written .* decides the branch"),
        ("s_cmp_eq_u32 s12, 0\ns_cbranch_scc0 .Lend\n.Lend:", "s_cbranch_scc0", "scc"),
        ("s_cbranch_vccz .Lend\n.Lend:", "s_cbranch_vccz", "vcc_lo"),
        ("v_cmp_eq_u32_e32 vcc, 0, v3\ns_cbranch_vccnz .Lend\n.Lend:", "s_cbranch_vccnz", "vcc_lo"),
        (
            "v_cmp_eq_u32_e32 vcc, 0, v3\ns_and_saveexec_b64 s[12:13], vcc\ns_cbranch_execz .Lend\n.Lend:",
            "s_cbranch_execz",
            "exec_lo",
        ),
        ("s_mov_b64 exec, 0\ns_cmp_eq_u32 s12, 0\ns_cbranch_scc0 .Lend\n.Lend:", "s_cbranch_scc0", "scc"),
        ("global_store_dword v1, a3, s[8:9]", "global_store_dword", "a3 was never written"),
        (f"v_mov_b32_e32 v3, v4\n{_STORE}", "global_store_dword", "v3"),
        (f"v_mov_b32_e32 v3, s12\n{_STORE}", "global_store_dword", "v3"),
        (f"v_accvgpr_write_b32 a1, v4\nv_accvgpr_read_b32 v3, a1\n{_STORE}", "global_store_dword", "v3"),
        (f"v_add_u32_e32 v3, v1, v4\n{_STORE}", "global_store_dword", "v3"),
        ("v_pk_mov_b32 v[3:4], v[1:2], v[4:5] op_sel:[0,1]\nglobal_store_dword v1, v4, s[8:9]", "global_store_dword", "v4"),
        (f"s_add_u32 s12, s13, 5\nv_mov_b32_e32 v3, s12\n{_STORE}", "global_store_dword", "v3"),
        (
            f"s_mov_b32 s12, s6\ns_bfe_i64 s[12:13], s[12:13], 0x110010\nv_mov_b32_e32 v3, s12\n{_STORE}",
            "global_store_dword",
            "v3",
        ),
        (f"v_readfirstlane_b32 s12, v4\nv_mov_b32_e32 v3, s12\n{_STORE}", "global_store_dword", "v3"),
        (f"v_readlane_b32 s12, v2, s13\nv_mov_b32_e32 v3, s12\n{_STORE}", "global_store_dword", "v3"),
        (f"s_cmp_eq_u32 s6, 0\ns_cselect_b32 s12, s6, s13\nv_mov_b32_e32 v3, s12\n{_STORE}", "global_store_dword", "v3"),
        (f"v_cmp_gt_u32_e32 vcc, 0, v1\nv_cndmask_b32_e32 v3, v4, v2, vcc\n{_STORE}", "global_store_dword", "v3"),
        (f"v_cndmask_b32_e32 v3, v2, v2, vcc\n{_STORE}", "global_store_dword", "v3"),
    ],
)
def test_uninitialised_registers(text: str, at: str, match: str) -> None:
    reported(text, "uninitialised", at, match, lds=FULL)


@pytest.mark.parametrize("source", ["v_mov_b32_e32 v3, v4", "v_mov_b32_e32 v3, s12", "v_add_u32_e32 v3, v4, v1"])
def test_it_does_not_matter_what_an_uninitialised_register_holds(source: str) -> None:
    """An uninitialised register is reported whether it holds zero, an earlier kernel's value, or a plausible value."""
    y = np.zeros(64, np.uint32)
    s = Snippet(f"{source}\n{_STORE}", v={1: 0}, s={8: y.ctypes.data}, arrays=[y], sanitize=True, registers=8)
    s.group.U[4][...] = 5
    s.group.s[12] = 7
    with pytest.raises(SanitizerError, match="v3 was never written"):
        s.run()


_ODD = 0xAAAAAAAAAAAAAAAA


def _written_in(mask: int) -> str:
    """Returns code that writes v3 in some lanes only."""
    return f"s_mov_b32 exec_lo, {mask & MASK32:#x}\ns_mov_b32 exec_hi, {mask >> 32:#x}\nv_mov_b32_e32 v3, 7\ns_mov_b64 exec, -1\n"


def _lanes_reported(text: str, register: str, waves: int = 1, **state) -> int:
    """Returns the first uninitialised lane that the report names for a store of the register."""
    error = reported(f"{text}\nglobal_store_dword v1, {register}, s[8:9]", "uninitialised", "global_store", waves=waves, **state)
    return int(re.search(r"lane (\d+) of wave 0", str(error))[1])


@pytest.mark.parametrize(
    ("text", "source_of"),
    [
        ("v_mov_b32_e32 v4, v3", lambda lane: lane),
        ("v_not_b32_e32 v4, v3", lambda lane: lane),
        ("v_mov_b32_dpp v4, v3 row_mirror row_mask:0xf bank_mask:0xf", lambda lane: lane // 16 * 16 + 15 - lane % 16),
        (
            "v_mov_b32_e32 v4, 0\nv_mov_b32_dpp v4, v3 row_shr:2 row_mask:0xf bank_mask:0xf bound_ctrl:1",
            lambda lane: lane - 2 if lane % 16 > 1 else None,
        ),
        (
            "v_mov_b32_e32 v4, 0\nv_mov_b32_dpp v4, v3 row_bcast:31 row_mask:0xc bank_mask:0xf",
            lambda lane: 31 if lane > 31 else None,
        ),
        ("v_mov_b32_e32 v4, 0\nv_permlane32_swap_b32_e32 v4, v3", lambda lane: lane - 32 if lane > 31 else None),
        ("v_mov_b32_e32 v4, 0\nv_permlane16_swap_b32_e32 v4, v3", lambda lane: lane - 16 if lane // 16 % 2 else None),
        (
            "v_mov_b32_e32 v4, 0\nv_permlane16_swap_b32_e32 v3, v4\nv_mov_b32_e32 v4, v4",
            lambda lane: None if lane // 16 % 2 else lane + 16,
        ),
        ("v_xor_b32_e32 v5, 252, v1\nds_bpermute_b32 v4, v5, v3\ns_waitcnt lgkmcnt(0)", lambda lane: 63 - lane),
        ("v_xor_b32_e32 v5, 252, v1\nds_permute_b32 v4, v5, v3\ns_waitcnt lgkmcnt(0)", lambda lane: 63 - lane),
        ("ds_swizzle_b32 v4, v3 offset:swizzle(SWAP,8)\ns_waitcnt lgkmcnt(0)", lambda lane: lane ^ 8),
        ("v_xor_b32_e32 v4, 252, v1\nds_bpermute_b32 v4, v4, v3\ns_waitcnt lgkmcnt(0)", lambda lane: 63 - lane),
    ],
)
@pytest.mark.parametrize("mask", [0x00000000FFFFFFFF, 0xFFFF0000FFFF0000, _ODD, MASK64 - (1 << 31), MASK64 - 4])
def test_lanes_are_followed_through_moves(text: str, source_of, mask: int) -> None:
    """A result lane is uninitialised exactly if its source lane is."""
    initialised = [source_of(lane) is None or mask >> source_of(lane) & 1 for lane in range(WAVE)]
    text = _written_in(mask) + text
    if not all(initialised):
        assert _lanes_reported(text, "v4") == initialised.index(0)
    on = sum(1 << lane for lane in range(WAVE) if initialised[lane])
    keep = f"s_mov_b32 exec_lo, {on & MASK32:#x}\ns_mov_b32 exec_hi, {on >> 32:#x}\n"
    run(f"{text}\n{keep}global_store_dword v1, v4, s[8:9]")


def test_lanes_read_to_scalars() -> None:
    text = _written_in(0xF0)
    store = "v_mov_b32_e32 v4, s12\nglobal_store_dword v1, v4, s[8:9]"
    run(f"{text}v_readlane_b32 s12, v3, 5\n{store}")
    reported(f"{text}v_readlane_b32 s12, v3, 3\n{store}", "uninitialised", "global_store_dword")
    run(f"{text}s_mov_b64 exec, 0x90\nv_readfirstlane_b32 s12, v3\n{store}")
    reported(f"{text}s_mov_b64 exec, 0x300\nv_readfirstlane_b32 s12, v3\n{store}", "uninitialised", "global_store_dword")


def test_lanes_of_several_waves() -> None:
    """The report names the right wave if v_readlane's source lanes differ between waves, and so do the uninitialised lanes."""
    text = """
        s_cmp_eq_u32 s13, 0
        s_cbranch_scc1 .Lmeet
        v_mov_b32_e32 v3, 1
        .Lmeet:
        v_readlane_b32 s12, v3, s14
        v_mov_b32_e32 v4, s12
        s_cmp_eq_u32 s15, 0
        s_cbranch_scc1 .Lend
        global_store_dword v1, v4, s[8:9]
        .Lend:
    """
    state = {13: np.array([0, 1, 0, 1]), 14: np.array([3, 4, 5, 6])}
    run(text, waves=4, s={**state, 15: np.array([0, 1, 0, 1])})
    error = reported(text, "uninitialised", "global_store_dword", waves=4, s={**state, 15: np.array([0, 1, 1, 1])})
    assert "of wave 2" in str(error)


def test_spilled_scalars() -> None:
    """A register of which only some lanes are written may be read in these lanes. Reads of other lanes are reported."""
    text = "v_writelane_b32 v3, s4, 0\nv_writelane_b32 v3, s5, 1\n"
    store = "s_mov_b32 exec_lo, -1\nv_mov_b32_e32 v4, s12\nglobal_store_dword v1, v4, s[8:9]"
    run(f"{text}v_readlane_b32 s12, v3, 0\nv_readlane_b32 s13, v3, 1\n{store}")
    run(f"{text}s_mov_b64 s[14:15], exec\ns_mov_b64 exec, 3\nglobal_store_dword v1, v3, s[8:9]\ns_mov_b64 exec, s[14:15]")
    run(
        f"{text}scratch_store_dword off, v3, off\nscratch_load_dword v5, off, off\ns_waitcnt vmcnt(0)\n"
        f"v_readlane_b32 s12, v5, 1\n{store}"
    )
    reported(f"{text}v_readlane_b32 s12, v3, 2\n{store}", "uninitialised", "global_store_dword")
    reported(f"{text}global_store_dword v1, v3, s[8:9]", "uninitialised", "global_store_dword", "lane 2 of")
    reported(f"{text}v_writelane_b32 v3, s20, 1\nv_readlane_b32 s12, v3, 1\n{store}", "uninitialised", "global_store_dword")


def test_registers_that_come_back_from_scratch() -> None:
    text = f"{_written_in(_ODD)}scratch_store_dwordx2 off, v[2:3], off offset:8\n"
    load = "scratch_load_dwordx2 v[4:5], off, off offset:8\ns_waitcnt vmcnt(0)\n"
    run(f"{text}{load}global_store_dword v1, v4, s[8:9]")
    assert _lanes_reported(text + load, "v5") == 0
    again = (
        "s_mov_b32 exec_lo, 0x55555555\ns_mov_b32 exec_hi, 0x55555555\nscratch_store_dword off, v2, off offset:12\n"
        "s_mov_b64 exec, -1\n"
    )
    run(f"{text}{again}{load}global_store_dword v1, v5, s[8:9]")
    assert _lanes_reported("scratch_load_dword v4, off, off offset:32\ns_waitcnt vmcnt(0)", "v4") == 0


@pytest.mark.parametrize(
    "text",
    [
        "s_mov_b32 s12, s6\ns_bfe_i64 s[12:13], s[12:13], 0x100000\nv_mov_b32_e32 v3, s12\n" + _STORE,
        # only active lanes matter
        f"s_mov_b64 exec, 0xff\nv_mov_b32_e32 v3, 1\n{_STORE}",
        "s_mov_b64 exec, 0xff\nv_mov_b32_e32 v3, 4\nds_read_b32 v4, v3",
        # inactive lanes keep their state
        f"v_mov_b32_e32 v3, 0\ns_mov_b64 exec, 0xff\nv_not_b32_e32 v3, v4\ns_mov_b32 exec_lo, 0xff00\n{_STORE}",
        # two halves of the lanes are written separately
        f"{_written_in(_ODD)}s_mov_b32 exec_lo, 0x55555555\ns_mov_b32 exec_hi, 0x55555555\nv_mov_b32_e32 v3, v2\n"
        f"s_mov_b64 exec, -1\n{_STORE}",
        # the uninitialised source is not selected
        f"v_cmp_le_u32_e32 vcc, 0, v1\nv_cndmask_b32_e32 v3, v4, v2, vcc\n{_STORE}",
        f"v_cmp_gt_u32_e32 vcc, 32, v1\nv_cndmask_b32_e32 v3, v4, v2, vcc\nv_cndmask_b32_e32 v3, v1, v3, vcc\n{_STORE}",
        f"s_cmp_eq_u32 s6, s6\ns_cselect_b32 s12, s6, s13\nv_mov_b32_e32 v3, s12\n{_STORE}",
        f"s_cmp_lg_u32 s6, s6\ns_cmov_b32 s6, s13\nv_mov_b32_e32 v3, s6\n{_STORE}",
        "s_cmp_eq_u32 s6, s6\ns_cselect_b64 vcc, exec, s[20:21]\ns_cbranch_vccz .Lend\n.Lend:",
        # one operand determines the bits: an uninitialised mask is combined with zeros, or with EXEC
        "s_mov_b64 exec, 0xff\nv_cmp_eq_u32_e32 vcc, 0, v1\ns_and_b64 s[12:13], s[20:21], 0\ns_or_b64 vcc, vcc, s[12:13]\n"
        "s_cbranch_vccz .Lend\n.Lend:",
        "s_or_b64 s[12:13], s[20:21], exec\ns_andn2_b64 s[14:15], s[20:21], exec\ns_and_saveexec_b64 s[16:17], s[12:13]\n"
        "s_cbranch_execz .Lend\n.Lend:",
        "s_mov_b64 exec, 15\ns_andn2_b64 s[12:13], s[20:21], exec\ns_and_b64 vcc, s[12:13], exec\ns_cbranch_vccnz .Lend\n.Lend:",
        # compare results of inactive lanes are zero
        f"{_written_in(0xFF)}s_mov_b64 exec, 0xff\nv_cmp_eq_u32_e32 vcc, 7, v3\ns_mov_b64 exec, -1\ns_cbranch_vccz .Lend\n.Lend:",
        # row masks and bound_ctrl
        f"v_mov_b32_e32 v3, 0\n{_written_in(0)}v_mov_b32_dpp v3, v4 row_shr:1 row_mask:0x0 bank_mask:0xf\n{_STORE}",
        f"{_written_in(0x00000000FFFF0000)}v_mov_b32_e32 v5, v2\n"
        f"v_add_u32_dpp v5, v3, v5 row_bcast:15 row_mask:0x4 bank_mask:0xf\nv_mov_b32_e32 v3, v5\n{_STORE}",
        # data of lanes that a buffer's range drops is not stored
        "v_mov_b32_e32 v5, 0x80000000\nbuffer_store_dwordx2 v[20:21], v5, s[4:7], 0 offen",
        "s_mov_b32 s6, 8\ns_mov_b64 exec, 7\nv_mov_b32_e32 v3, 1\ns_mov_b64 exec, -1\nbuffer_store_dword v3, v1, s[4:7], 0 offen",
        # an uninitialised result is overwritten, or never used
        f"v_add_u32_e32 v3, v4, v5\nv_mov_b32_e32 v3, v2\n{_STORE}",
        "v_add_u32_e32 v3, v4, v5\nv_mul_lo_u32 v6, v3, v3",
        "ds_write_b32 v1, v4\ns_waitcnt lgkmcnt(0)",
        # the lane's number is in v0 at entry
        "v_lshlrev_b32_e32 v3, 2, v0\nglobal_load_dword v4, v3, s[4:5]",
    ],
)
def test_correct_code_with_uninitialised_registers(text: str) -> None:
    run(text, lds=FULL)


def test_matrix_products_mix_all_lanes() -> None:
    text = "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[6:7], 0\ns_nop 7\nglobal_store_dword v1, v8, s[8:9]"
    run(text, v={4: 0, 5: 0, 6: 0, 7: 0})
    reported(
        f"{_written_in(MASK64 - (1 << 63))}v_mov_b32_e32 v4, v3\n{text}",
        "uninitialised",
        "global_store_dword",
        "lane 0 of",
        v={5: 0, 6: 0, 7: 0},
    )


def test_matrix_products_write_lanes_that_are_off() -> None:
    """An MFMA initialises all lanes of v8, which was never written before, even in inactive lanes."""
    text = "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[6:7], 0"
    some, store = "s_mov_b64 exec, 0xff", "s_mov_b64 exec, -1\ns_nop 7\nglobal_store_dword v1, v8, s[8:9]"
    run(f"{some}\n{text}\n{store}", v={4: 0, 5: 0, 6: 0, 7: 0})
    reported(f"{some}\nv_mov_b32_e32 v8, v2\n{store}", "uninitialised", "global_store_dword")


# Uninitialised LDS


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("ds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)", True),
        ("ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)", False),
        ("ds_write_b32 v1, v4\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)", True),
        ("ds_write_b16 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_u16 v3, v1\ns_waitcnt lgkmcnt(0)", False),
        ("ds_write_b16 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)", True),
        ("ds_write_b8 v1, v2 offset:1\ns_waitcnt lgkmcnt(0)\nds_read_u8 v3, v1\ns_waitcnt lgkmcnt(0)", True),
        # the dwords of a wide read are tracked separately: v5 is initialised, v3 is not
        (
            "v_lshlrev_b32_e32 v10, 2, v1\nds_write_b32 v10, v2 offset:4\ns_waitcnt lgkmcnt(0)\nds_read_b128 v[2:5], v10\n"
            "s_waitcnt lgkmcnt(0)",
            False,
        ),
        (
            "v_lshlrev_b32_e32 v10, 2, v1\nds_write_b32 v10, v2 offset:8\ns_waitcnt lgkmcnt(0)\nds_read_b128 v[2:5], v10\n"
            "s_waitcnt lgkmcnt(0)",
            True,
        ),
        (
            "v_lshlrev_b32_e32 v10, 2, v1\nds_write_b64 v10, v[2:3]\ns_waitcnt lgkmcnt(0)\nds_read_b64 v[2:3], v10\n"
            "s_waitcnt lgkmcnt(0)",
            True,
        ),
        (
            "v_lshlrev_b32_e32 v10, 2, v1\nds_write_b64 v10, v[2:3]\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v10\n"
            "s_waitcnt lgkmcnt(0)",
            False,
        ),
        ("v_mov_b32_e32 v3, 0\ns_mov_b64 exec, 0\nds_read_b32 v3, v1\ns_mov_b64 exec, -1\ns_waitcnt lgkmcnt(0)", False),
        ("v_mov_b32_e32 v3, 0\ns_mov_b64 exec, 4\nds_read_b32 v3, v1\ns_mov_b64 exec, -1\ns_waitcnt lgkmcnt(0)", True),
        ("s_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[4:5]\ns_waitcnt vmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)", False),
        ("s_mov_b32 m0, 4\nglobal_load_lds_dword v1, s[4:5]\ns_waitcnt vmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)", True),
    ],
)
def test_uninitialised_lds(text: str, fails: bool) -> None:
    if fails:
        reported(f"{text}\n{_STORE}", "uninitialised", "global_store_dword", "v3 was never written", lds=1024)
    else:
        run(f"{text}\n{_STORE}", lds=1024)


def test_uninitialised_lds_that_reaches_nothing() -> None:
    run(
        "ds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)\nv_add_u32_e32 v3, 1, v3\nds_write_b32 v1, v3 offset:256\ns_waitcnt lgkmcnt(0)",
        lds=1024,
    )


@pytest.mark.parametrize("mnemonic", ["ds_add_u32 v1, v2", "ds_add_rtn_u32 v3, v1, v2", "ds_cmpst_b32 v1, v2, v2"])
def test_atomics_on_uninitialised_lds(mnemonic: str) -> None:
    reported(mnemonic, "uninitialised", mnemonic.split()[0], "never written", lds=1024)
    run(f"ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\n{mnemonic}\ns_waitcnt lgkmcnt(0)", lds=1024)


@pytest.mark.parametrize(("mnemonic", "bits"), [("ds_read_b64_tr_b16", 16), ("ds_read_b64_tr_b8", 8), ("ds_read_b64_tr_b4", 4)])
def test_transposing_reads_of_uninitialised_lds(mnemonic: str, bits: int) -> None:
    """The 8 bytes of one lane are uninitialised. So the lanes that receive these bytes are uninitialised, each in only one of its
    two registers."""
    missing = 16 + 5
    on = MASK64 - (1 << missing)
    text = f"""
        s_mov_b32 exec_lo, {on & MASK32:#x}
        s_mov_b32 exec_hi, {on >> 32:#x}
        v_lshlrev_b32_e32 v10, 1, v1
        ds_write_b64 v10, v[1:2]
        s_mov_b64 exec, -1
        v_lshlrev_b32_e32 v10, 1, v1
        s_waitcnt lgkmcnt(0)
        {mnemonic} v[4:5], v10
        s_waitcnt lgkmcnt(0)
    """
    per_lane = 64 // bits
    row, first = divmod(5 * per_lane, 16)  # the lane's elements are a part of this row, from this column on
    receivers = range(16 + first, 16 + first + per_lane)
    register = 4 + row * bits // 32
    assert _lanes_reported(text, f"v{register}", lds=1024) == receivers[0]
    run(f"{text}\nglobal_store_dword v1, v{9 - register}, s[8:9]", lds=1024)
    rest = MASK64 - sum(1 << lane for lane in receivers)
    keep = f"s_mov_b32 exec_lo, {rest & MASK32:#x}\ns_mov_b32 exec_hi, {rest >> 32:#x}"
    run(f"{text}\n{keep}\nglobal_store_dword v1, v{register}, s[8:9]", lds=1024)


# The rest


def test_reports_are_emulation_errors_with_kernel_and_line() -> None:
    error = reported("s_nop 0\nds_read_b32 v3, v4", "uninitialised", "ds_read_b32", lds=64)
    assert isinstance(error, EmulationError)
    assert error.kernel == "snippet"
    assert "in kernel snippet (assembly line 3): ds_read_b32 v3, v4" in str(error)


def test_without_the_sanitizer_nothing_but_bounds_is_checked() -> None:
    y = np.zeros(64, np.uint32)
    text = "ds_read_b32 v3, v4 offset:2\nds_write_b32 v4, v3\ns_cbranch_scc1 .Lend\nglobal_store_dword v1, v5, s[8:9]\n.Lend:"
    Snippet(text, v={1: 0}, s={8: y.ctypes.data}, arrays=[y], lds=64).run()
    with pytest.raises(SanitizerError, match="past the end"):
        Snippet("global_load_dword v3, v1, s[8:9] offset:256", v={1: 0}, s={8: y.ctypes.data}, arrays=[y]).run()


def test_the_state_of_waves_that_part_and_meet() -> None:
    """When waves diverge and reconverge, uninitialised lanes, pending registers and outstanding writes stay with their waves."""
    s = Snippet("s_nop 0", v={1: 0}, waves=3, sanitize=True, lds=64, registers=4)
    group, shadow = s.group, s.group.shadow
    lanes = np.concatenate([bits_of(m) for m in (5, 0, 9)])
    shadow._set(2, lanes)
    shadow._set(3, np.repeat([False, True, False], WAVE))
    parts = [group.select(np.array([2])), group.select(np.array([0, 1]))]
    assert np.array_equal(parts[0].shadow.unset[2], bits_of(9))
    assert 3 not in parts[0].shadow.unset
    assert 3 not in parts[0].shadow.watch
    assert parts[1].shadow.watch >= {2, 3}
    whole = type(group).join(parts)
    assert np.array_equal(whole.shadow.unset[2], np.concatenate([bits_of(m) for m in (9, 5, 0)]))
    assert np.array_equal(whole.shadow.unset[3], np.repeat([False, False, True], WAVE))
    assert whole.shadow.watch >= {2, 3}
