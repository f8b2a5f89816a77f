"""Tests control flow: branches, divergence and reconvergence of waves, barriers, wait counters, the MODE register.

Waves with the same control flow run in lockstep. Results must not depend on this, so random programs are compared with a
wave-by-wave interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import EmulationError, UnknownInstruction

from .isa import MASK32, MASK64, WAVE, implemented, random_lanes, random_words

CONDITIONAL = {"s_cbranch_scc0", "s_cbranch_scc1", "s_cbranch_vccz", "s_cbranch_vccnz", "s_cbranch_execz", "s_cbranch_execnz"}
NO_OPERATION = {
    "s_nop 3", "s_setprio 1", "s_sleep 2", "s_sethalt 0", "s_setkill 0", "s_icache_inv", "s_dcache_inv", "s_dcache_wb",
    "s_code_end", "s_inst_prefetch 1", "s_ttracedata", "s_incperflevel 1", "s_decperflevel 1", "s_sched_barrier 0", "s_wakeup",
    "v_nop",
    "buffer_inv sc1", "buffer_wbl2 sc0 sc1", "buffer_wbinvl1", "buffer_wbinvl1_vol",
}  # fmt: skip
TESTED_BELOW = {
    "s_branch", "s_getpc_b64", "s_setpc_b64", "s_swappc_b64", "s_endpgm", "s_barrier", "s_waitcnt", "s_trap", "s_memtime",
    "s_memrealtime", "s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32",
}  # fmt: skip

# Stores s10 of every wave to its element of an array: s[2:3] is the address, v0 the lane's number in the workgroup.
_STORE = """
v_mov_b32_e32 v2, s10
v_lshrrev_b32_e32 v3, 6, v0
v_lshlrev_b32_e32 v3, 2, v3
global_store_dword v3, v2, s[2:3]
"""


def test_every_control_instruction_is_tested() -> None:
    assert implemented("control") == CONDITIONAL | {text.split()[0] for text in NO_OPERATION} | TESTED_BELOW


def _run(text: str, waves: int, **state) -> tuple[list[int], Snippet]:
    """Runs the text, and returns every wave's s10 after all waves have reconverged."""
    out = np.zeros(waves, np.uint32)
    scalars = {2: out.ctypes.data, **state.pop("s", {})}
    s = Snippet(f"{text}\ns_mov_b64 exec, -1\n{_STORE}", s=scalars, waves=waves, arrays=[out], registers=4, **state).run()
    return out.tolist(), s


# Branches

_MASKS = [0, MASK64, 1, 1 << 63, 1 << 31, 1 << 32, MASK32, MASK64 - MASK32]


@pytest.mark.parametrize("mnemonic", sorted(CONDITIONAL))
@pytest.mark.parametrize("waves", [[0], [1], [0, 0], [1, 1], [0, 1], [1, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 0, 0, 0, 2, 1]])
def test_conditional_branches(mnemonic: str, waves: list[int]) -> None:
    masks = np.array([_MASKS[i] for i in waves], object)
    state: dict = {"s": {4: np.array([int(_MASKS[i] != 0) for i in waves])}}
    prepare, holds = "s_cmp_lg_u32 s4, 0", [_MASKS[i] != 0 for i in waves]  # whether SCC is 1
    if "vcc" in mnemonic or "exec" in mnemonic:
        state["s"]["vcc" if "vcc" in mnemonic else "exec"] = masks
        prepare = "s_nop 0"
    if mnemonic.endswith(("scc0", "vccz", "execz")):
        holds = [not h for h in holds]
    result, _ = _run(
        f"s_mov_b32 s10, 1\n{prepare}\n{mnemonic} .Lthere\ns_add_u32 s10, s10, 4\ns_branch .Lend\n.Lthere:\n"
        f"s_add_u32 s10, s10, 8\n.Lend:",
        len(waves),
        **state,
    )
    assert result == [9 if h else 5 for h in holds]


@pytest.mark.parametrize("mnemonic", ["s_cbranch_vccz", "s_cbranch_vccnz"])
def test_vcc_is_looked_at_whether_or_not_lanes_are_on(mnemonic: str) -> None:
    result, _ = _run(f"s_mov_b32 s10, 0\ns_mov_b64 exec, 0\n{mnemonic} .Lend\ns_mov_b32 s10, 1\n.Lend:", 1, s={"vcc": 1 << 40})
    assert result == [int(mnemonic == "s_cbranch_vccz")]


def test_lanes_from_compares_decide_branches() -> None:
    """Tests branches on VCC and EXEC when these are stored as lane masks."""
    values = np.zeros(4 * WAVE, np.uint32)
    values[[WAVE + 17, 3 * WAVE + 63]] = 1
    result, _ = _run(
        """
        s_mov_b32 s10, 0
        v_cmp_ne_u32_e32 vcc, 0, v1
        s_cbranch_vccz .Lnone
        s_or_b32 s10, s10, 1
        .Lnone:
        s_and_saveexec_b64 s[8:9], vcc
        s_cbranch_execz .Lskip
        s_or_b32 s10, s10, 2
        .Lskip:
        s_or_b64 exec, exec, s[8:9]
        s_cbranch_execnz .Lend
        s_or_b32 s10, s10, 4
        .Lend:
        """,
        4,
        v={1: values},
    )
    assert result == [0, 3, 0, 3]


@pytest.mark.parametrize("trips", [[1], [5, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8], [9, 1, 1, 9], [1, 100]])
def test_loops_with_different_trip_counts(trips: list[int]) -> None:
    text = "s_mov_b32 s10, 0\n.Lloop:\ns_add_u32 s10, s10, s4\ns_sub_u32 s4, s4, 1\ns_cmp_lg_u32 s4, 0\ns_cbranch_scc1 .Lloop"
    result, s = _run(text, len(trips), s={4: np.array(trips)})
    assert result == [n * (n + 1) // 2 for n in trips]
    assert s.machine.executed == 1 + 4 * max(trips) + 6, "waves that leave the loop early wait for the others, and go on with them"


def test_waves_meet_behind_an_if_without_else() -> None:
    """The group that runs the body is joined with the other group at the label where that group waits."""
    body = "s_add_u32 s10, s10, 1\n" * 10
    result, s = _run(f"s_mov_b32 s10, 0\ns_cmp_eq_u32 s4, 0\ns_cbranch_scc1 .Lend\n{body}.Lend:", 4, s={4: np.array([0, 1, 0, 1])})
    assert result == [0, 10, 0, 10]
    assert s.machine.executed == 3 + 10 + 6


def test_waves_meet_behind_an_if_with_else() -> None:
    one, other = "s_add_u32 s10, s10, 1\n" * 7, "s_add_u32 s10, s10, 3\n" * 5
    text = f"s_mov_b32 s10, 0\ns_cmp_eq_u32 s4, 0\ns_cbranch_scc1 .Lelse\n{one}s_branch .Lend\n.Lelse:\n{other}.Lend:"
    result, s = _run(text, 4, s={4: np.array([0, 1, 0, 1])})
    assert result == [15, 7, 15, 7]
    assert s.machine.executed == 3 + 7 + 1 + 5 + 6


def test_loop_in_a_loop_with_early_exits() -> None:
    text = """
        s_mov_b32 s10, 0
        s_mov_b32 s5, 0
        .Louter:
        s_mov_b32 s6, 0
        .Linner:
        s_add_u32 s10, s10, 1
        s_cmp_eq_u32 s10, s7
        s_cbranch_scc1 .Lend
        s_add_u32 s6, s6, 1
        s_cmp_le_u32 s6, s5
        s_cbranch_scc1 .Linner
        s_add_u32 s5, s5, 1
        s_cmp_lt_u32 s5, s4
        s_cbranch_scc1 .Louter
        s_add_u32 s10, s10, 1000
        .Lend:
    """
    outer, stops = [1, 4, 2, 7, 7, 3], [99, 99, 2, 11, 99, 6]

    def walk(trips: int, stop: int) -> int:
        count = 0
        for i in range(trips):
            for _ in range(i + 1):
                count += 1
                if count == stop:
                    return count
        return count + 1000

    result, _ = _run(text, len(outer), s={4: np.array(outer), 7: np.array(stops)})
    assert result == [walk(*pair) for pair in zip(outer, stops, strict=True)]


def _random_program(rng: np.random.Generator, blocks: int) -> tuple[str, list[tuple]]:
    """Returns a random program of blocks that change s10 and branch on one of its bits, forwards and backwards. s11 counts the
    remaining steps."""
    text, plan = ["s_mov_b32 s10, s4"], []
    for i in range(blocks):
        add, turn, bit = int(rng.integers(1, 1 << 30)), int(rng.integers(1, 32)), int(rng.integers(32))
        to, otherwise = int(rng.integers(blocks)), int(rng.integers(blocks))
        falls = bool(rng.integers(2))
        plan.append((add, turn, bit, to, i + 1 if falls else otherwise))
        text += [
            f".L{i}:", "s_sub_u32 s11, s11, 1", "s_cmp_eq_u32 s11, 0", "s_cbranch_scc1 .Lend", f"s_add_u32 s10, s10, {add:#x}",
            f"s_lshl_b32 s12, s10, {turn}", f"s_lshr_b32 s13, s10, {32 - turn}", "s_or_b32 s10, s12, s13",
            f"s_bitcmp1_b32 s10, {bit}", f"s_cbranch_scc1 .L{to}",
        ]  # fmt: skip
        if not falls:
            text.append(f"s_branch .L{otherwise}")
    return "\n".join([*text, ".Lend:"]), plan


def _walk(plan: list[tuple], value: int, steps: int) -> int:
    block = 0
    while block < len(plan):
        steps -= 1
        if steps == 0:
            break
        add, turn, bit, to, following = plan[block]
        value = (value + add) & MASK32
        value = (value << turn | value >> 32 - turn) & MASK32
        block = to if value >> bit & 1 else following
    return value


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text, plan = _random_program(rng, int(rng.integers(2, 9)))
    starts, steps = random_words(rng, 6), [int(x) for x in rng.integers(1, 60, 6)]
    result, _ = _run(text, 6, s={4: np.array(starts), 11: np.array(steps)})
    assert result == [_walk(plan, *pair) for pair in zip(starts, steps, strict=True)]


def test_waves_that_end_early() -> None:
    result, _ = _run("s_mov_b32 s10, 7\ns_cmp_eq_u32 s4, 0\ns_cbranch_scc0 .Lgo\ns_endpgm\n.Lgo:", 4, s={4: np.array([0, 1, 1, 0])})
    assert result == [0, 7, 7, 0]


def test_branch_to_no_label() -> None:
    with pytest.raises(UnknownInstruction, match=r"\.Lnowhere, which is no label"):
        Snippet("s_branch .Lnowhere")


# Calls


def _address_of(label: str, pair: int) -> str:
    """Returns the code that computes a function's address as compilers do: from the distance to the instruction after
    s_getpc_b64."""
    return f"""
        s_getpc_b64 s[{pair}:{pair + 1}]
        s_add_u32 s{pair}, s{pair}, {label}@rel32@lo+4
        s_addc_u32 s{pair + 1}, s{pair + 1}, {label}@rel32@hi+12
    """


@pytest.mark.parametrize("sanitize", [False, True])
def test_calls(sanitize: bool) -> None:
    """Results are correct if a function that is called in a loop calls another function. One function is placed before its caller,
    the other after its caller."""
    text = f"""
        s_branch .Lmain
        twice:
        s_lshl_b32 s10, s10, 1
        s_setpc_b64 s[30:31]
        .Lmain:
        s_mov_b32 s10, s4
        s_mov_b32 s11, 3
        .Lloop:
        {_address_of("outer", 12)}
        s_swappc_b64 s[34:35], s[12:13]
        s_sub_u32 s11, s11, 1
        s_cmp_lg_u32 s11, 0
        s_cbranch_scc1 .Lloop
        s_branch .Lend
        outer:
        {_address_of("twice", 14)}
        s_swappc_b64 s[30:31], s[14:15]
        s_add_u32 s10, s10, 1
        s_setpc_b64 s[34:35]
        .Lend:
    """
    starts = [5, 0, 77]
    out = np.zeros(3, np.uint32)
    address = out.ctypes.data
    state = {2: address, 3: address >> 32, 4: np.array(starts)}
    Snippet(text + _STORE, s=state, waves=3, arrays=[out], registers=4, sanitize=sanitize).run()
    assert out.tolist() == [8 * n + 7 for n in starts]


def test_calls_of_different_functions() -> None:
    """Every wave calls the function that it chose. All waves reconverge after the return."""
    text = f"""
        {_address_of("first", 12)}
        {_address_of("second", 14)}
        s_cmp_lg_u32 s4, 0
        s_cselect_b64 s[12:13], s[12:13], s[14:15]
        s_swappc_b64 s[30:31], s[12:13]
        s_add_u32 s10, s10, 100
        s_branch .Lend
        first:
        s_mov_b32 s10, 1
        s_setpc_b64 s[30:31]
        second:
        s_mov_b32 s10, 2
        s_nop 0
        s_setpc_b64 s[30:31]
        .Lend:
    """
    result, s = _run(text, 4, s={4: np.array([0, 1, 1, 0])})
    assert result == [102, 101, 101, 102]
    assert s.machine.executed == 9 + (2 + 2) + (3 + 2) + 6


@pytest.mark.parametrize("address", [0, 12345, MASK64])
def test_jump_to_nowhere(address: int) -> None:
    with pytest.raises(EmulationError, match="jump to where no code begins"):
        Snippet("s_setpc_b64 s[4:5]", s={4: np.array([address | 1 << 64], object)}).run()


# Barriers

# Every wave writes its index at 4 * wave (v3), then reads the next wave's index (v4).
_EXCHANGE = """
    v_lshrrev_b32_e32 v2, 6, v0
    v_lshlrev_b32_e32 v3, 2, v2
    v_add_u32_e32 v4, 4, v3
    v_and_b32_e32 v4, 15, v4
"""


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("delays", [[0, 0, 0, 0], [5, 0, 9, 2], [0, 1, 2, 3]])
def test_barrier_waits_for_all_waves(delays: list[int], sanitize: bool) -> None:
    """Waves that arrive at a barrier at different times see the other waves' writes from before the barrier."""
    out = np.zeros(4, np.uint32)
    text = f"""
        {_EXCHANGE}
        s_mov_b32 s10, 0
        .Lround:
        s_mov_b32 s6, s5
        s_cmp_eq_u32 s6, 0
        s_cbranch_scc1 .Lready
        .Ldelay:
        s_sub_u32 s6, s6, 1
        s_cmp_lg_u32 s6, 0
        s_cbranch_scc1 .Ldelay
        .Lready:
        v_mov_b32_e32 v5, s10
        v_add_u32_e32 v5, v5, v2
        ds_write_b32 v3, v5
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_read_b32 v6, v4
        s_waitcnt lgkmcnt(0)
        s_barrier
        v_readfirstlane_b32 s7, v6
        s_add_u32 s10, s10, s7
        s_sub_u32 s4, s4, 1
        s_cmp_lg_u32 s4, 0
        s_cbranch_scc1 .Lround
        {_STORE}
    """
    Snippet(text, s={2: out.ctypes.data, 3: out.ctypes.data >> 32, 4: 5, 5: np.array(delays)}, waves=4, lds=16, arrays=[out],
            sanitize=sanitize, registers=8).run()  # fmt: skip
    sums = [0] * 4
    for _ in range(5):
        written = [sums[w] + w for w in range(4)]
        sums = [sums[w] + written[(w + 1) % 4] for w in range(4)]
    assert out.tolist() == sums


@pytest.mark.parametrize("late", [[0, 1], [1, 0], [0, 0, 1], [1, 0, 1, 0]])
def test_barrier_waits_for_waves_that_are_elsewhere(late: list[int]) -> None:
    """Late waves run code that follows the barrier in program order, and write there while the other waves already wait."""
    waves = len(late)
    out = np.zeros(waves, np.uint32)
    text = f"""
        v_lshrrev_b32_e32 v2, 6, v0
        v_lshlrev_b32_e32 v3, 2, v2
        s_cmp_lg_u32 s4, 0
        s_cbranch_scc1 .Llate
        ds_write_b32 v3, v2
        .Lmeet:
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_read_b32 v4, v5
        s_waitcnt lgkmcnt(0)
        v_readfirstlane_b32 s10, v4
        {_STORE}
        s_branch .Lend
        .Llate:
        ds_write_b32 v3, v2
        s_branch .Lmeet
        .Lend:
    """
    for reads in range(waves):
        s = {2: out.ctypes.data, 3: out.ctypes.data >> 32, 4: np.array(late)}
        lds = np.full(16, 0xEE, np.uint8)
        Snippet(text, v={5: 4 * reads}, s=s, waves=waves, lds=lds, arrays=[out], sanitize=True, registers=8).run()
        assert out.tolist() == [reads] * waves


def test_waves_that_ended_are_not_waited_for() -> None:
    result, _ = _run(
        "s_mov_b32 s10, 1\ns_cmp_eq_u32 s4, 0\ns_cbranch_scc0 .Lgo\ns_endpgm\n.Lgo:\ns_barrier", 3, s={4: np.array([1, 0, 1])}
    )
    assert result == [1, 0, 1]


# MODE and other hardware registers


def test_mode_as_kernels_begin() -> None:
    """At a kernel's start, MODE has rounding to nearest even [3:0], denormals kept [7:4], DX10_CLAMP [8] and IEEE [9]; FP16_OVFL
    [23] is off."""
    s = Snippet(
        """
        s_getreg_b32 s4, hwreg(HW_REG_MODE)
        s_getreg_b32 s5, hwreg(HW_REG_MODE, 0, 4)
        s_getreg_b32 s6, hwreg(HW_REG_MODE, 4, 4)
        s_getreg_b32 s7, hwreg(HW_REG_MODE, 8, 2)
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
        s_getreg_b32 s8, hwreg(HW_REG_MODE, 20, 6)
        s_getreg_b32 s9, hwreg(HW_REG_MODE)
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 8), 0xf0
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 22, 2), 0
        s_getreg_b32 s10, hwreg(HW_REG_MODE)
        """
    ).run()
    assert [s.s(i) for i in range(4, 11)] == [0x3F0, 0, 15, 3, 8, 0x8003F0, 0x3F0]


@pytest.mark.parametrize(
    "text",
    [
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0",
        "s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s4", "s_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS, 0, 1), 1",
        "s_getreg_b32 s4, hwreg(HW_REG_TRAPSTS)", "s_getreg_b32 s4, 0x1234",
    ],
)  # fmt: skip
def test_modes_that_are_not_modelled(text: str) -> None:
    with pytest.raises(UnknownInstruction):
        Snippet(text)


def test_setreg_with_a_number() -> None:
    assert Snippet("s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), 1\ns_getreg_b32 s4, hwreg(HW_REG_MODE, 23, 1)").run().s(4) == 1


def test_mode_belongs_to_the_wave() -> None:
    """Waves that set FP16_OVFL saturate, and other waves do not, even after reconvergence. The value 1000 exceeds fp8 (448 is 0x7e,
    NaN 0x7f)."""
    result, _ = _run(
        """
        v_mov_b32_e32 v1, 0x447a0000
        s_cmp_eq_u32 s4, 0
        s_cbranch_scc1 .Lmeet
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
        .Lmeet:
        v_cvt_pk_fp8_f32 v2, v1, v1
        v_readfirstlane_b32 s10, v2
        s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0
        v_cvt_pk_fp8_f32 v2, v1, v1
        v_readfirstlane_b32 s11, v2
        s_lshl_b32 s11, s11, 16
        s_and_b32 s10, s10, 0xffff
        s_or_b32 s10, s10, s11
        """,
        4,
        s={4: np.array([0, 1, 1, 0])},
    )
    assert result == [0x7F7F7F7F, 0x7F7F7E7E, 0x7F7F7E7E, 0x7F7F7F7F]


def test_xcc_of_the_only_workgroup() -> None:
    assert Snippet("s_getreg_b32 s4, hwreg(HW_REG_XCC_ID)").run().s(4) == 0


# Instructions that only affect timing, and the end of a kernel


@pytest.mark.parametrize("text", sorted(NO_OPERATION))
def test_instructions_without_effect(text: str) -> None:
    v, s = random_lanes(np.random.default_rng(5)), {4: 5, "vcc": 77, "m0": 3}
    before = Snippet("s_nop 0", v={1: v}, s=s, scc=True).run()
    after = Snippet(text, v={1: v}, s=s, scc=True).run()
    assert (after.group.registers == before.group.registers).all()
    assert [after.s(i) for i in (4, "vcc", "m0")] == [5, 77, 3]
    assert after.scc is True
    assert after.group.full


def test_trap() -> None:
    with pytest.raises(EmulationError, match="trapped"):
        Snippet("s_trap 2").run()


@pytest.mark.parametrize("mnemonic", ["s_memtime", "s_memrealtime"])
def test_clocks_go_on(mnemonic: str) -> None:
    s = Snippet(f"{mnemonic} s[4:5]\ns_branch .Lnext\n.Lnext:\ns_nop 0\n{mnemonic} s[6:7]\ns_waitcnt lgkmcnt(0)").run()
    assert s.s64(6) > s.s64(4) >= 0
