"""Tests the sanitizer, instruction by instruction: missing waits, races in LDS, alignment, barriers, deadlocks."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_emulation.errors import SanitizerError

from .isa import WAVE
from .sanitizing import FULL, LANES, reported, run

_STORE = "global_store_dword v1, v3, s[8:9]"


# Waits


@pytest.mark.parametrize(
    ("load", "use", "counter"),
    [
        ("global_load_dword v3, v1, s[4:5]", "v_add_u32_e32 v4, 1, v3", "vmcnt"),
        ("global_load_dwordx4 v[4:7], v1, s[4:5]", "v_mov_b32_e32 v3, v7", "vmcnt"),
        ("buffer_load_ubyte v3, v1, s[4:7], 0 offen", "global_store_dword v1, v3, s[8:9]", "vmcnt"),
        ("global_load_dword v3, v1, s[4:5]", "v_mov_b32_e32 v3, 0", "vmcnt"),
        ("global_load_dword v3, v1, s[4:5]", "ds_read_b32 v3, v1", "vmcnt"),
        ("global_load_dword a3, v1, s[4:5]", "v_accvgpr_read_b32 v4, a3", "vmcnt"),
        ("global_atomic_add v3, v1, v2, s[8:9] sc0", "v_mov_b32_e32 v4, v3", "vmcnt"),
        ("scratch_store_dword off, v2, off\nscratch_load_dword v3, off, off", "v_mov_b32_e32 v4, v3", "vmcnt"),
        ("ds_read_b32 v3, v1", "v_mov_b32_e32 v4, v3", "lgkmcnt"),
        ("ds_read2_b32 v[4:5], v1 offset1:1", "v_mov_b32_e32 v3, v5", "lgkmcnt"),
        ("ds_read_b64_tr_b16 v[4:5], v9", "v_mov_b32_e32 v3, v5", "lgkmcnt"),
        ("ds_read_b32 v3, v1", "ds_read_b32 v3, v1 offset:4", "lgkmcnt"),
        ("ds_bpermute_b32 v3, v1, v2", "v_mov_b32_e32 v4, v3", "lgkmcnt"),
        ("ds_swizzle_b32 v3, v2 offset:swizzle(SWAP,1)", "v_mov_b32_e32 v4, v3", "lgkmcnt"),
        ("ds_add_rtn_u32 v3, v1, v2", "v_mov_b32_e32 v4, v3", "lgkmcnt"),
        ("s_load_dword s12, s[4:5], 0x0", "s_add_u32 s13, s12, 1", "lgkmcnt"),
        ("s_load_dwordx4 s[12:15], s[4:5], 0x0", "v_mov_b32_e32 v3, s15", "lgkmcnt"),
        ("s_load_dwordx2 s[12:13], s[4:5], 0x0", "s_mov_b64 s[12:13], 0", "lgkmcnt"),
        ("s_buffer_load_dword s12, s[4:7], 0x0", "s_mov_b32 m0, s12", "lgkmcnt"),
        ("s_memtime s[12:13]", "s_mov_b32 s14, s12", "lgkmcnt"),
    ],
)
def test_results_that_were_not_waited_for(load: str, use: str, counter: str) -> None:
    other = "vmcnt" if counter == "lgkmcnt" else "lgkmcnt"
    wait = f"s_waitcnt {counter}(0)"
    state = {"lds": FULL, "v": {9: 8 * LANES[:WAVE]}}
    first = load.splitlines()[-1]
    for text in (f"{load}\n{use}", f"{load}\ns_waitcnt {other}(0)\n{use}", f"{load}\ns_waitcnt {counter}(1)\n{use}"):
        error = reported(text, "wait", use, f"used before an s_waitcnt {counter} covers the load into it", **state)
        assert first in str(error), "the report names the load"
    run(f"{load}\n{wait}\n{use}", **state)
    run(f"{load}\nv_mov_b32_e32 v20, v2\n{wait}\nv_mov_b32_e32 v21, v20\n{use}", **state)


@pytest.mark.parametrize("outstanding", range(4))
def test_loads_complete_in_order(outstanding: int) -> None:
    loads = "\n".join(f"global_load_dword v{3 + i}, v1, s[4:5]" for i in range(4))
    for register in range(4):
        text = f"{loads}\ns_waitcnt vmcnt({outstanding})\nv_mov_b32_e32 v10, v{3 + register}"
        if register < 4 - outstanding:
            run(text)
        else:
            reported(text, "wait", "v_mov_b32_e32 v10")


def test_stores_count_too() -> None:
    text = "global_load_dword v3, v1, s[4:5]\nglobal_store_dword v1, v2, s[8:9]\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v4, v3"
    run(text)
    reported(text.replace("vmcnt(1)", "vmcnt(2)"), "wait", "v_mov_b32_e32")


@pytest.mark.parametrize(
    ("load", "other", "limit"),
    [
        ("global_load_dword v3, v1, s[4:5]", "global_store_dword v1, v2, s[8:9]", 63),
        ("ds_read_b32 v3, v1", "ds_write_b32 v1, v2", 15),
    ],
)
def test_a_counter_that_is_full_waits_for_the_oldest(load: str, other: str, limit: int) -> None:
    """Compilers rely on the counter's maximum: if that many operations follow a load, compilers emit no wait for the load."""
    use = "v_mov_b32_e32 v4, v3"
    run("\n".join([load, *[other] * limit, use]), lds=FULL)
    reported("\n".join([load, *[other] * (limit - 1), use]), "wait", use, lds=FULL)


def test_a_full_counter_says_nothing_of_scalar_loads() -> None:
    """Scalar loads may complete in any order, so the oldest load may still be outstanding."""
    use = "s_add_u32 s13, s12, 1"
    text = "\n".join(["s_load_dword s12, s[4:5], 0x0", *["ds_write_b32 v1, v2"] * 15, use])
    reported(text, "wait", use, lds=FULL)


def test_a_vector_load_may_follow_another_into_its_register() -> None:
    """Vector loads return in order. So the wait for the second load covers both loads, and a wait for the first load alone is not
    enough."""
    text = "global_load_dword v3, v1, s[4:5]\nbuffer_load_dword v3, v1, s[4:7], 0 offen\n"
    run(f"{text}s_waitcnt vmcnt(0)\n{_STORE}")
    reported(f"{text}s_waitcnt vmcnt(1)\n{_STORE}", "wait", "global_store_dword")
    reported(
        "global_load_dword v3, v1, s[4:5]\nbuffer_load_ubyte_d16_hi v3, v1, s[4:7], 0 offen", "wait", "buffer_load_ubyte_d16_hi"
    )


def test_scalar_loads_need_a_wait_for_all() -> None:
    text = "s_load_dword s12, s[4:5], 0x0\ns_load_dword s13, s[4:5], 0x4\n"
    reported(f"{text}s_waitcnt lgkmcnt(1)\ns_mov_b32 s14, s12", "wait", "s_mov_b32 s14")
    run(f"{text}s_waitcnt lgkmcnt(0)\ns_mov_b32 s14, s12")


_PATHS = """
    s_cmp_eq_u32 s13, 0
    s_cbranch_scc1 .Lother
    global_load_dword v3, v1, s[4:5]
    {between}
    s_branch .Lmeet
    .Lother:
    global_load_dword v4, v1, s[4:5]
    .Lmeet:
    s_waitcnt vmcnt({limit})
    v_mov_b32_e32 v5, v3
    v_mov_b32_e32 v6, v4
"""


def test_loads_of_waves_that_met() -> None:
    """Each path issues different loads. One wait must cover the outstanding loads of every wave."""
    state = {"waves": 2, "s": {13: np.array([0, 1])}, "v": {3: 0, 4: 0}}
    run(_PATHS.format(between="", limit=0), **state)
    reported(_PATHS.format(between="", limit=1), "wait", "v_mov_b32_e32 v5", **state)
    between = "global_load_dword v7, v1, s[4:5]"
    reported(_PATHS.format(between=between, limit=1), "wait", "v_mov_b32_e32 v6", **state)
    run(_PATHS.format(between=between, limit=0), **state)


def test_a_register_loaded_on_both_paths() -> None:
    text = _PATHS.replace("v4, v1", "v3, v1").replace("v6, v4", "v6, v3")
    state = {"waves": 2, "s": {13: np.array([0, 1])}, "v": {3: 0}}
    run(text.format(between="", limit=0), **state)
    reported(text.format(between="global_load_dword v7, v1, s[4:5]", limit=1), "wait", "v_mov_b32_e32 v5", **state)


# LDS: races and waits

# There are two waves. s13 is the wave's index, v1 is 4 * lane within the workgroup, and v8 is the corresponding address of the
# other wave.
_TWO = {"waves": 2, "s": {13: np.array([0, 1])}, "v": {8: 4 * (LANES[: 2 * WAVE] ^ np.uint32(WAVE))}}


@pytest.mark.parametrize(
    ("text", "at", "match"),
    [
        (
            "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v8",
            "ds_read_b32",
            "wave 0 reads LDS byte 0x100, which wave 1 wrote with no barrier",
        ),
        (
            "ds_read_b32 v3, v8\ns_waitcnt lgkmcnt(0)\nds_write_b32 v1, v2",
            "ds_write_b32",
            "writes LDS byte 0x.*00?, which wave . read with no barrier",
        ),
        (
            "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_write_b8 v8, v2 offset:3",
            "ds_write_b8",
            "wave 0 writes LDS byte 0x103, which wave 1 wrote",
        ),
        ("v_mov_b32_e32 v9, 64\nds_write_b32 v9, v2", "ds_write_b32", "writes LDS byte 0x40, which wave"),
        ("v_mov_b32_e32 v9, 64\nv_mov_b32_e32 v11, s13\nds_write_b32 v9, v11", "ds_write_b32", "writes LDS byte 0x40, which wave"),
        (
            "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_add_u32 v8, v2",
            "ds_add_u32",
            "wave 0 changes LDS byte 0x100, which wave 1 wrote",
        ),
        ("ds_write2_b32 v1, v2, v2 offset1:64", "ds_write2_b32", "which wave"),
        ("ds_read_u16 v3, v8\ns_waitcnt lgkmcnt(0)\nds_write_b64 v10, v[1:2]", "ds_write_b64", "with no barrier between"),
        (
            "s_lshl_b32 m0, s13, 8\nglobal_load_lds_dword v1, s[4:5]\ns_waitcnt vmcnt(0)\nds_read_b32 v3, v8",
            "ds_read_b32",
            "with no barrier between",
        ),
        (
            "ds_read_b32 v3, v8\ns_lshl_b32 m0, s13, 8\nglobal_load_lds_dword v1, s[4:5]",
            "global_load_lds_dword",
            "which wave . read with no barrier",
        ),
        (
            "s_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[4:5]\nglobal_load_lds_dword v1, s[4:5]",
            "global_load_lds_dword",
            "LDS byte",
        ),
    ],
)
def test_races(text: str, at: str, match: str) -> None:
    state = {**_TWO, "v": {**_TWO["v"], 10: 8 * LANES[: 2 * WAVE]}}
    with pytest.raises(SanitizerError, match=match) as caught:
        run(text, lds=FULL, **state)
    assert caught.value.kind in ("race", "wait")
    assert caught.value.kind == "race" or "covers the direct load" in str(caught.value)
    assert caught.value.instruction.mnemonic == at


@pytest.mark.parametrize("apart", [False, True])
def test_lanes_of_a_wave_may_disagree_where_waves_agree(apart: bool) -> None:
    """16 lanes write different values to one address, and the same lane's value remains in both waves. The waves run together or
    separately."""
    state = {**_TWO, "v": {9: 4 * (LANES[: 2 * WAVE] % WAVE // 16), 10: LANES[: 2 * WAVE] % WAVE}}
    text = "s_cmp_eq_u32 s13, 0\ns_cbranch_scc1 .Lwrite\ns_nop 0\n.Lwrite:\n" if apart else ""
    text += "ds_write_b32 v9, v10\ns_waitcnt lgkmcnt(0)"
    assert run(text, lds=FULL, **state).lds.view(np.uint32)[:4].tolist() == [15, 31, 47, 63]
    state["v"][10] = np.where(LANES[: 2 * WAVE] == WAVE + 15, 7, state["v"][10])
    reported(text, "race", "ds_write_b32", **state, lds=FULL)


_BARRIER = "s_waitcnt lgkmcnt(0)\ns_barrier\n"


@pytest.mark.parametrize(
    "text",
    [
        f"ds_write_b32 v1, v2\n{_BARRIER}ds_read_b32 v3, v8\n{_BARRIER}ds_write_b32 v1, v3\n{_BARRIER}ds_read_b32 v3, v8",
        "ds_read_b32 v3, v1\nds_read_b32 v4, v8",
        "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)\nds_write_b32 v1, v3",
        "ds_add_u32 v1, v2\nds_add_u32 v8, v2\nds_max_u32 v1, v2",
        f"ds_write2_b32 v1, v2, v2 offset1:128\n{_BARRIER}ds_read2_b32 v[4:5], v8 offset1:128",
        f"ds_write2st64_b64 v10, v[1:2], v[1:2] offset1:2\n{_BARRIER}ds_read_b32 v3, v8",
        f"s_mov_b64 exec, 0\nds_write_b32 v1, v2\ns_mov_b64 exec, -1\nds_write_b32 v1, v2\n{_BARRIER}ds_read_b32 v3, v8",
        f"ds_write_b32 v1, v2\nds_read_b32 v3, v1\n{_BARRIER}ds_read_b32 v4, v8",
        "ds_write_b32 v1, v2\nglobal_load_dword v3, v1, s[4:5]\ns_waitcnt lgkmcnt(0)\ns_barrier\nds_read_b32 v4, v8",
    ],
)
def test_lds_shared_correctly(text: str) -> None:
    run(text, lds=np.zeros(4096, np.uint8), **{**_TWO, "v": {**_TWO["v"], 10: 8 * LANES[: 2 * WAVE]}})


def test_writes_that_were_not_waited_for_before_the_barrier() -> None:
    reported(
        "ds_write_b32 v1, v2\ns_barrier\nds_read_b32 v3, v8",
        "wait",
        "ds_read_b32",
        "wave 0 reads LDS byte 0x100, which wave 1 wrote without an s_waitcnt lgkmcnt before the barrier",
        lds=FULL,
        **_TWO,
    )
    text = "ds_write_b32 v1, v2\nds_write_b32 v1, v2 offset:512\ns_waitcnt lgkmcnt(1)\ns_barrier\nds_read_b32 v3, v8"
    run(text, lds=FULL, **_TWO)
    reported(f"{text} offset:512", "wait", "ds_read_b32", lds=FULL, **_TWO)
    for pair in ("ds_write2_b32 v1, v2, v2 offset1:128", "ds_write2_b32 v1, v2, v2 offset0:128"):
        reported(f"{pair}\ns_barrier\nds_read_b32 v3, v8 offset:512", "wait", "ds_read_b32", lds=FULL, **_TWO)


def test_waits_of_waves_that_parted_before_the_barrier() -> None:
    """Only one wave waits for its write before the barrier. After the barrier, this wave's data may be read, but not the other
    wave's data."""
    text = """
        ds_write_b32 v1, v2
        s_cmp_eq_u32 s13, s14
        s_cbranch_scc1 .Lmeet
        s_waitcnt lgkmcnt(0)
        .Lmeet:
        s_barrier
        s_cmp_eq_u32 s13, s15
        s_cbranch_scc0 .Lend
        ds_read_b32 v3, v8
        .Lend:
    """
    for lazy in (0, 1):
        for reader in (0, 1):
            state = {**_TWO, "s": {13: np.array([0, 1]), 14: lazy, 15: reader}}
            if reader == lazy:
                run(text, lds=FULL, **state)
            else:
                reported(text, "wait", "ds_read_b32", f"which wave {lazy} wrote without", lds=FULL, **state)


def test_direct_loads_in_flight() -> None:
    load = "s_lshl_b32 m0, s13, 8\nglobal_load_lds_dword v1, s[4:5]\n"
    reported(
        f"{load}ds_read_b32 v3, v1", "wait", "ds_read_b32", "before an s_waitcnt vmcnt covers the direct load", lds=FULL, **_TWO
    )
    reported(f"{load}s_barrier\nds_read_b32 v3, v8", "wait", "ds_read_b32", "covers the direct load", lds=FULL, **_TWO)
    reported(f"{load}ds_write_b32 v1, v2", "wait", "ds_write_b32", "covers the direct load", lds=FULL, **_TWO)
    reported(f"{load}s_waitcnt vmcnt(1)\ns_barrier\nds_read_b32 v3, v8", "wait", "ds_read_b32", lds=FULL, **_TWO)
    reported(f"{load}s_barrier\ns_waitcnt vmcnt(0)\nds_read_b32 v3, v8", "race", "ds_read_b32", lds=FULL, **_TWO)
    run(f"{load}s_waitcnt vmcnt(0)\ns_barrier\nds_read_b32 v3, v8", lds=FULL, **_TWO)
    run(f"{load}s_barrier\ns_waitcnt vmcnt(0)\ns_barrier\nds_read_b32 v3, v8", lds=FULL, **_TWO)
    run(f"{load}s_waitcnt vmcnt(0)\nds_read_b32 v3, v1", lds=FULL, **_TWO)


def test_pipelined_direct_loads() -> None:
    """With double buffering, the next tile is loaded while the current tile is read. Loads stay in flight across barriers."""
    text = """
        s_mov_b32 s16, 0
        s_mov_b32 s17, 0
        s_lshl_b32 s18, s13, 8
        s_mov_b32 m0, s18
        global_load_lds_dword v1, s[4:5]
        .Lloop:
        s_xor_b32 s17, s17, 0x200
        s_add_u32 m0, s18, s17
        s_cmp_lg_u32 s16, 0
        s_cbranch_scc0 .Lissue
        s_barrier
        .Lissue:
        global_load_lds_dword v1, s[4:5]
        s_waitcnt vmcnt({limit})
        s_barrier
        s_xor_b32 s19, s17, 0x200
        v_add_u32_e32 v9, s19, v8
        ds_read_b32 v3, v9
        s_waitcnt lgkmcnt(0)
        {end}
        s_add_u32 s16, s16, 1
        s_cmp_lt_u32 s16, 5
        s_cbranch_scc1 .Lloop
        s_waitcnt vmcnt(0)
    """
    run(text.format(limit=1, end=""), lds=1024, **_TWO)
    reported(text.format(limit=2, end=""), "wait", "ds_read_b32", lds=1024, **_TWO)
    without_first_barrier = text.replace("s_barrier\n        .Lissue", "s_nop 0\n        .Lissue")
    reported(without_first_barrier.format(limit=1, end=""), "race", "global_load_lds_dword", lds=1024, **_TWO)


# Alignment


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("ds_read_u16 v3, v9", 1),
        ("ds_read_b32 v3, v9", 2),
        ("ds_read_b64 v[4:5], v9", 4),
        ("ds_read_b96 v[4:6], v9", 8),
        ("ds_read_b128 v[4:7], v9", 8),
        ("ds_read2_b64 v[4:7], v9 offset1:1", 4),
        ("ds_read2_b32 v[4:5], v9 offset1:1", 2),
        ("ds_write_b16 v9, v2", 1),
        ("ds_write_b64 v9, v[1:2]", 4),
        ("ds_write_b128 v9, v[20:23]", 8),
        ("ds_read_b64_tr_b16 v[4:5], v9", 4),
        ("ds_add_u32 v9, v2", 2),
        ("ds_add_u64 v9, v[1:2]", 4),
    ],
)
def test_misaligned_lds(text: str, bad: int) -> None:
    aligned = 16 * LANES[:WAVE]
    state = {"lds": FULL, "v": {9: aligned, 20: 0, 21: 0, 22: 0, 23: 0}}
    run(text, **state)
    state["v"] = {**state["v"], 9: np.where(LANES[:WAVE] == 37, aligned + np.uint32(bad), aligned).astype(np.uint32)}
    reported(text, "misaligned", text.split()[0], **state)


# Barriers and deadlocks


def test_barrier_that_a_wave_passes_by() -> None:
    text = "s_cmp_eq_u32 s13, 0\ns_cbranch_scc1 .Lend\ns_barrier\n.Lend:"
    reported(text, "barrier-divergence", "s_barrier", "ended without this barrier", **_TWO)


def test_waves_at_different_barriers() -> None:
    """Hardware counts arrivals, so waves may wait at different barrier instructions. Earlier writes are visible afterwards as with
    any barrier."""
    text = """
        ds_write_b32 v1, v2
        s_waitcnt lgkmcnt(0)
        s_cmp_eq_u32 s13, 0
        s_cbranch_scc1 .Lother
        s_barrier
        s_branch .Lend
        .Lother:
        s_barrier
        .Lend:
        ds_read_b32 v3, v8
    """
    run(text, lds=FULL, **_TWO)


_SPIN = (
    "global_load_dword v3, v1, s[8:9]\ns_waitcnt vmcnt(0)\nv_readfirstlane_b32 s16, v3\ns_cmp_eq_u32 s16, 0\ns_cbranch_scc1 .Lspin"
)


def test_waiting_for_nobody() -> None:
    reported(f"s_nop 0\n.Lspin:\ns_nop 1\n{_SPIN}", "deadlock", "global_load_dword", "1 waves wait for a value that nobody stores")
    atomic = _SPIN.replace("global_load_dword v3, v1, s[8:9]", "v_mov_b32_e32 v4, 0\nglobal_atomic_or v3, v1, v4, s[8:9] sc0")
    reported(f".Lspin:\n{atomic}", "deadlock", "global_atomic_or", "nobody stores")
    swap = _SPIN.replace(
        "global_load_dword v3, v1, s[8:9]",
        "v_mov_b32_e32 v4, 0\nv_mov_b32_e32 v5, 1\nglobal_atomic_cmpswap v3, v1, v[4:5], s[8:9] sc0",
    )
    reported(f".Lspin:\n{swap}", "deadlock", "global_atomic_cmpswap", "nobody stores")


def test_waiting_for_somebody() -> None:
    """Wave 1 sets the flag that wave 0 polls. Wave 1 sets it late, after a long loop, in code that follows wave 0's loop. The
    emulator must not report a deadlock."""
    setter = (
        "s_movk_i32 s17, 0x7fff\n.Ldelay:\ns_sub_u32 s17, s17, 1\ns_cmp_lg_u32 s17, 0\ns_cbranch_scc1 .Ldelay\n"
        "global_store_dword v8, v2, s[8:9]"
    )
    text = f"s_cmp_eq_u32 s13, 0\ns_cbranch_scc0 .Lset\n.Lspin:\n{_SPIN}\ns_branch .Lend\n.Lset:\n{setter}\n.Lend:"
    run(text, **_TWO)


def test_waiting_for_a_wave_at_a_barrier() -> None:
    """A deadlock is reported if wave 0 polls for a value that wave 1 would store after a barrier that wave 0 never reaches."""
    text = f"s_cmp_eq_u32 s13, 0\ns_cbranch_scc0 .Lset\n.Lspin:\n{_SPIN}\n.Lset:\ns_barrier\nglobal_store_dword v8, v2, s[8:9]"
    reported(text, "deadlock", "global_load_dword", **_TWO)


def test_loops_that_only_look_like_waiting() -> None:
    """A loop runs thousands of iterations that change only a counter. The emulator must not mistake the loop for a wait."""
    run("s_movk_i32 s16, 0x2000\n.Lloop:\ns_sub_u32 s16, s16, 1\ns_cmp_lg_u32 s16, 0\ns_cbranch_scc1 .Lloop")
