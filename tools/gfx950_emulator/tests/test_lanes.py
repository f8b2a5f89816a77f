"""Tests instructions that move data between lanes, and between lanes and scalar registers, against the ISA documents' definitions,
lane by lane.

Lane maps of DPP: section "DPP_CTRL" of the CDNA3 ISA document. Swaps: V_PERMLANE16_SWAP_B32 and V_PERMLANE32_SWAP_B32 of the CDNA4
ISA document.
"""

from __future__ import annotations

import numpy as np
import pytest

from gfx950_emulator.snippet import Snippet
from kernel_emulation.errors import EmulationError, UnknownInstruction

from .isa import MASK32, MASK64, SPECIAL32, WAVE, bits_of, implemented, random_lanes, random_words

TESTED = {
    "v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32", "v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32", "v_permlane16_swap_b32",
    "v_permlane32_swap_b32",
}  # fmt: skip
_EXECS = [MASK64, 0x00000000FFFFFFFF, 0xFFFF0000FFFF0000, 0x8000000000000000, 0x5A5A5A5AF00F1234, 0]


def test_every_lane_instruction_is_tested() -> None:
    assert implemented("lane") == TESTED


def _values(seed: int, waves: int = 1) -> np.ndarray:
    return random_lanes(np.random.default_rng(seed), waves)


def _per_wave(value: object, waves: int) -> list[int]:
    return [int(x) for x in np.broadcast_to(np.asarray(value), waves)]


# To and from scalar registers


@pytest.mark.parametrize("target", ["s4", "vcc_hi", "m0"])
def test_read_first_lane(target: str) -> None:
    """v_readfirstlane reads the lowest active lane, or lane 0 if no lane is active."""
    values = _values(1, len(_EXECS))
    s = Snippet(f"s_mov_b64 exec, s[8:9]\nv_readfirstlane_b32 {target}, v1", v={1: values},
                s={8: np.array(_EXECS, object), "vcc": 5}, waves=len(_EXECS), registers=4).run()  # fmt: skip
    read = s.s({"s4": 4, "vcc_hi": 107, "m0": "m0"}[target])
    for wave, mask in enumerate(_EXECS):
        first = next((lane for lane in range(WAVE) if mask >> lane & 1), 0)
        assert _per_wave(read, len(_EXECS))[wave] == values[wave * WAVE + first]


def test_read_first_lane_of_equal_waves_is_one_number() -> None:
    s = Snippet("v_readfirstlane_b32 s4, v1", v={1: np.tile(_values(2), 3)}, waves=3, registers=2).run()
    assert type(s.s(4)) is int


@pytest.mark.parametrize("mask", _EXECS)
@pytest.mark.parametrize("lane", [0, 1, 31, 32, 63])
def test_read_lane(lane: int, mask: int) -> None:
    """v_readlane reads the lane whether or not the lane is active."""
    values = _values(3, 2)
    for text in (str(lane), "s6", "m0"):
        s = Snippet(f"v_readlane_b32 s4, v1, {text}", v={1: values}, s={6: lane + 64, "m0": lane, "exec": mask}, waves=2).run()
        assert _per_wave(s.s(4), 2) == [values[lane], values[WAVE + lane]]


def test_read_lanes_that_differ_between_waves() -> None:
    values, lanes = _values(4, 4), np.array([3, 63, 0, 64 + 17])
    s = Snippet("v_readlane_b32 s4, v1, s6", v={1: values}, s={6: lanes}, waves=4, registers=2).run()
    assert s.s(4).tolist() == [values[wave * WAVE + lane % 64] for wave, lane in enumerate(lanes)]


@pytest.mark.parametrize("mask", [MASK64, 0, 0x5A5A5A5AF00F1234])
@pytest.mark.parametrize(
    ("text", "written", "lanes"),
    [
        ("v_writelane_b32 v1, s6, 5", [10, 11, 12], [5, 5, 5]),
        ("v_writelane_b32 v1, s7, 63", [77, 77, 77], [63, 63, 63]),
        ("v_writelane_b32 v1, -3, s8", [MASK32 - 2] * 3, [0, 33, 1]),
        ("v_writelane_b32 v1, s6, s8", [10, 11, 12], [0, 33, 1]),
        ("v_writelane_b32 v1, vcc_lo, m0", [0x89ABCDEF] * 3, [40, 40, 40]),
        ("v_writelane_b32 v1, 1.0, 7", [0x3F800000] * 3, [7, 7, 7]),
    ],
)
def test_write_lane(text: str, written: list[int], lanes: list[int], mask: int) -> None:
    values = _values(5, 3)
    state = {6: np.array([10, 11, 12]), 7: 77, 8: np.array([64, 33, 1]), "vcc": 0x0123456789ABCDEF, "m0": 40, "exec": mask}
    s = Snippet(text, v={1: values}, s=state, waves=3, registers=2).run()
    expected = values.copy()
    for wave in range(3):
        expected[wave * WAVE + lanes[wave]] = written[wave]
    assert np.array_equal(s.v(1), expected)


def test_registers_spilled_to_lanes_come_back() -> None:
    values = random_words(np.random.default_rng(6), WAVE)
    text = "\n".join(f"s_mov_b32 s10, {value:#x}\nv_writelane_b32 v1, s10, {lane}" for lane, value in enumerate(values))
    reads = "\n".join(f"v_readlane_b32 s{20 + lane}, v1, {lane}" for lane in range(64))
    s = Snippet(f"{text}\n{reads}", s={"exec": 0}, registers=2).run()
    assert [s.s(20 + lane) for lane in range(WAVE)] == values
    assert s.v(1).tolist() == values


@pytest.mark.parametrize("mask", _EXECS)
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_masked_bit_count(half: str, mask: int) -> None:
    """The result is the number of set bits of S0 for lanes below this lane, plus S1."""
    add, vector = _values(7, 2) >> np.uint32(3), _values(8, 2)
    bits = np.array([0x89ABCDEF, 0x00010001])
    sources = {
        "-1": [MASK32] * 2, "0x70f0f0f1": [0x70F0F0F1] * 2, "s6": bits.tolist(), "exec_lo": [mask & MASK32] * 2,
        "vcc_hi": [0x01234567] * 2, "v2": None,
    }  # fmt: skip
    for text, scalars in sources.items():
        for addend in ("v1", "0", "s7", "s6"):
            s = Snippet(f"v_mbcnt_{half}_u32_b32 v3, {text}, {addend}", v={1: add, 2: vector, 3: 5},
                        s={"exec": mask, "vcc": 0x0123456789ABCDEF, 6: bits, 7: 1000}, waves=2, registers=4).run()  # fmt: skip
            for n in range(2 * WAVE):
                wave, lane = divmod(n, WAVE)
                source = int(vector[n]) if scalars is None else scalars[wave]
                first = 0 if half == "lo" else 32
                count = sum(source >> bit & 1 for bit in range(32) if first + bit < lane)
                addition = {"v1": int(add[n]), "0": 0, "s7": 1000, "s6": int(bits[wave])}[addend]
                assert s.v(3)[n] == ((count + addition) & MASK32 if mask >> lane & 1 else 5)


def test_lane_number_from_masked_bit_counts() -> None:
    s = Snippet("v_mbcnt_lo_u32_b32 v1, -1, 0\nv_mbcnt_hi_u32_b32 v1, -1, v1").run()
    assert s.v(1).tolist() == list(range(WAVE))


# Swaps of half registers


def test_rows_of_permlane16_swap() -> None:
    """Rows of 16 lanes: D = a0 a1 a2 a3 and S0 = b0 b1 b2 b3 become a0 b0 a2 b2 and a1 b1 a3 b3."""
    lane = np.arange(WAVE)
    s = Snippet("v_permlane16_swap_b32_e32 v1, v2", v={1: 1000 + lane, 2: 2000 + lane}).run()
    a, b = ([list(range(base + 16 * row, base + 16 * row + 16)) for row in range(4)] for base in (1000, 2000))
    assert s.v(1).tolist() == a[0] + b[0] + a[2] + b[2]
    assert s.v(2).tolist() == a[1] + b[1] + a[3] + b[3]


def test_rows_of_permlane32_swap() -> None:
    """D = a0 a1 a2 a3 and S0 = b0 b1 b2 b3 become a0 a1 b0 b1 and a2 a3 b2 b3."""
    lane = np.arange(WAVE)
    s = Snippet("v_permlane32_swap_b32_e32 v1, v2", v={1: 1000 + lane, 2: 2000 + lane}).run()
    a, b = ([list(range(base + 16 * row, base + 16 * row + 16)) for row in range(4)] for base in (1000, 2000))
    assert s.v(1).tolist() == a[0] + a[1] + b[0] + b[1]
    assert s.v(2).tolist() == a[2] + a[3] + b[2] + b[3]


def _swapped(size: int, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
    """Follows the loops in the documents: exchanges the lower lanes of S0 with the lanes of D that are ``size`` higher."""
    first, second = list(first), list(second)
    for block in range(0, WAVE, 2 * size):
        for lane in range(block, block + size):
            second[lane], first[lane + size] = first[lane + size], second[lane]
    return first, second


@pytest.mark.parametrize("size", [16, 32])
def test_swaps(size: int) -> None:
    a, b = _values(9, 3), _values(10, 3)
    mnemonic = f"v_permlane{size}_swap_b32_e32"
    s = Snippet(f"{mnemonic} v1, v2", v={1: a, 2: b}, waves=3, registers=4).run()
    for wave in range(3):
        lanes = slice(wave * WAVE, (wave + 1) * WAVE)
        assert (s.v(1)[lanes].tolist(), s.v(2)[lanes].tolist()) == _swapped(size, a[lanes].tolist(), b[lanes].tolist())
    twice = Snippet(f"{mnemonic} v1, v2\n{mnemonic} v1, v2", v={1: a, 2: b}, waves=3, registers=4).run()
    assert np.array_equal(twice.v(1), a)
    assert np.array_equal(twice.v(2), b)


@pytest.mark.parametrize(("size", "mask"), [(16, 0x00FF00FF12341234), (32, 0x0123456701234567), (16, 0), (32, 0), (16, 0xFFFFFFFF)])
def test_swaps_with_both_partners_off(size: int, mask: int) -> None:
    a, b, on = _values(11), _values(12), bits_of(mask)
    s = Snippet(f"v_permlane{size}_swap_b32_e32 v1, v2", v={1: a, 2: b}, s={"exec": mask}).run()
    first, second = _swapped(size, a.tolist(), b.tolist())
    assert s.v(1).tolist() == np.where(on, first, a).tolist()
    assert s.v(2).tolist() == np.where(on, second, b).tolist()


@pytest.mark.parametrize(("size", "mask"), [(16, MASK64 - 1), (32, 0xFFFFFFFF), (16, 1 << 31)])
def test_swaps_with_one_partner_off(size: int, mask: int) -> None:
    with pytest.raises(EmulationError, match="no defined result"):
        Snippet(f"v_permlane{size}_swap_b32_e32 v1, v2", v={1: 0, 2: 0}, s={"exec": mask}).run()


def test_a_register_swapped_with_itself() -> None:
    """Rows 0 and 1 are exchanged, and so are rows 2 and 3."""
    a = _values(13)
    s = Snippet("v_permlane16_swap_b32_e32 v1, v1", v={1: a}).run()
    assert np.array_equal(s.v(1).reshape(2, 2, 16), a.reshape(2, 2, 16)[:, ::-1])


@pytest.mark.parametrize("modifier", ["bound_ctrl:1", "fi:1"])
def test_swaps_with_modifiers(modifier: str) -> None:
    with pytest.raises(UnknownInstruction, match="bound_ctrl and fi"):
        Snippet(f"v_permlane32_swap_b32_e64 v1, v2 {modifier}")


# DPP


def _source(control: str, lane: int) -> int | None:
    """Returns the lane that DPP_CTRL reads from, or None."""
    name, _, argument = control.partition(":")
    row, at = lane // 16 * 16, lane % 16
    if name == "quad_perm":
        return lane // 4 * 4 + [int(x) for x in argument.strip("[]").split(",")][lane % 4]
    if name == "row_mirror":
        return row + 15 - at
    if name == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8
    number = int(argument)
    if name == "row_shl":
        return lane + number if at + number < 16 else None
    if name == "row_shr":
        return lane - number if at >= number else None
    if name == "row_ror":
        return row + (at - number) % 16
    if name == "wave_shl":
        return lane + 1 if lane < 63 else None
    if name == "wave_shr":
        return lane - 1 if lane > 0 else None
    if name == "wave_rol":
        return (lane + 1) % 64
    if name == "wave_ror":
        return (lane - 1) % 64
    if name == "row_newbcast":
        return row + number
    if control == "row_bcast:15":
        return row - 1 if row else None
    assert control == "row_bcast:31"
    return 31 if lane >= 32 else None


CONTROLS = [
    "quad_perm:[0,1,2,3]", "quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]", "quad_perm:[3,3,3,3]", "quad_perm:[0,0,2,2]",
    *(f"row_{way}:{n}" for way in ("shl", "shr", "ror") for n in (1, 2, 4, 8, 15)), "wave_shl:1", "wave_shr:1", "wave_rol:1",
    "wave_ror:1", "row_mirror", "row_half_mirror", "row_bcast:15", "row_bcast:31", "row_newbcast:0", "row_newbcast:7",
    "row_newbcast:15",
]  # fmt: skip


def _dpp(control: str, lane: int, mask: int, rows: int, banks: int, zero: bool, values: list[int]) -> int | None:
    """Returns the lane's first source value; None if the lane is not written."""
    if not (mask >> lane & 1 and rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1):
        return None
    source = _source(control, lane)
    if source is None or not mask >> source & 1:
        return 0 if zero else None
    return values[source]


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("rows", "banks"), [(15, 15), (0xA, 15), (0xC, 15), (15, 0x5), (0x3, 0xC), (0, 15)])
@pytest.mark.parametrize("control", CONTROLS)
def test_dpp_moves(control: str, rows: int, banks: int, zero: bool) -> None:
    """Inactive lanes and lanes excluded by row_mask or bank_mask keep their values. Lanes without a source also keep their values,
    or read zero with bound_ctrl. An inactive lane is not a source."""
    a, old = _values(20, 2), _values(21, 2)
    modifiers = f"{control} row_mask:{rows:#x} bank_mask:{banks:#x}" + " bound_ctrl:1" * zero
    for mask in (MASK64, 0x5A5A5A5AF00F1234, 0x00000000FFFFFFFF, 0):
        s = Snippet(f"v_mov_b32_dpp v2, v1 {modifiers}", v={1: a, 2: old}, s={"exec": mask}, waves=2, registers=4).run()
        for n in range(2 * WAVE):
            wave = n // WAVE * WAVE
            read = _dpp(control, n % WAVE, mask, rows, banks, zero, a[wave : wave + WAVE].tolist())
            assert s.v(2)[n] == (old[n] if read is None else read), (n, hex(mask))


@pytest.mark.parametrize("control", ["row_shr:1", "row_bcast:31", "quad_perm:[1,0,3,2]", "row_ror:8", "row_half_mirror"])
@pytest.mark.parametrize(("rows", "zero"), [(15, True), (15, False), (0xC, False)])
def test_dpp_of_arithmetic(control: str, rows: int, zero: bool) -> None:
    """DPP applies to the first source only. The test runs integer, floating-point and 16-bit operations, and one operation whose
    destination is also its source."""
    rng = np.random.default_rng(22)
    a, b, old = _values(23), _values(24), _values(25)
    f, g = (rng.normal(size=WAVE).astype(np.float32) for _ in range(2))
    modifiers = f"{control} row_mask:{rows:#x} bank_mask:0xf" + " bound_ctrl:1" * zero
    mask = 0xFFFFFF5AFFFFFFFF
    s = Snippet(
        f"""
        v_add_u32_dpp v10, v1, v2 {modifiers}
        v_sub_u32_dpp v11, v1, v2 {modifiers}
        v_max_i32_dpp v12, v1, v2 {modifiers}
        v_add_f32_dpp v13, v3, v4 {modifiers}
        v_lshlrev_b16_dpp v14, v5, v1 {modifiers}
        v_mov_b32_dpp v1, v1 {modifiers}
        """,
        v={1: a, 2: b, 3: f, 4: g, 5: a & np.uint32(15), **dict.fromkeys(range(10, 15), old)},
        s={"exec": mask},
        registers=20,
    ).run()

    def signed(x: int) -> int:
        return x - (1 << 32) if x >> 31 else x

    def check(register: int, values: list[int], second: list[int], function) -> None:
        for lane in range(WAVE):
            read = _dpp(control, lane, mask, rows, 15, zero, values)
            expected = int(old[lane]) if read is None else function(read, second[lane]) & MASK32
            assert s.v(register)[lane] == expected, lane

    check(10, a.tolist(), b.tolist(), lambda x, y: x + y)
    check(11, a.tolist(), b.tolist(), lambda x, y: x - y)
    check(12, a.tolist(), b.tolist(), lambda x, y: max(signed(x), signed(y)))
    check(13, f.view(np.uint32).tolist(), g.view(np.uint32).tolist(), _add_f32)
    check(14, (a & np.uint32(15)).tolist(), a.tolist(), lambda x, y: y << x & 0xFFFF)
    for lane in range(WAVE):
        read = _dpp(control, lane, mask, rows, 15, zero, a.tolist())
        assert s.v(1)[lane] == (a[lane] if read is None else read)


def _add_f32(x: int, y: int) -> int:
    a, b = (np.array([v], np.uint32).view(np.float32)[0] for v in (x, y))
    return int(np.array([a + b], np.float32).view(np.uint32)[0])


@pytest.mark.parametrize("zero", [False, True])
def test_both_halves_of_row_bcast_31(zero: bool) -> None:
    """Lanes 32 to 63 read lane 31. Lanes 0 to 31 have no source."""
    a, old = np.arange(WAVE) + 100, np.arange(WAVE) + 500
    modifiers = "row_bcast:31 row_mask:0xf bank_mask:0xf" + " bound_ctrl:1" * zero
    s = Snippet(f"v_mov_b32_dpp v2, v1 {modifiers}\nv_add_u32_dpp v3, v1, v1 {modifiers}", v={1: a, 2: old, 3: old}).run()
    assert s.v(2)[:32].tolist() == ([0] * 32 if zero else list(range(500, 532)))
    assert s.v(2)[32:].tolist() == [131] * 32
    assert s.v(3)[:32].tolist() == (list(range(100, 132)) if zero else list(range(500, 532)))
    assert s.v(3)[32:].tolist() == [131 + 100 + lane for lane in range(32, 64)]


@pytest.mark.parametrize("zero", [False, True])
def test_all_rows_of_row_bcast_15(zero: bool) -> None:
    """Rows 1, 2 and 3 read the last lane of the preceding row. Row 0 has no source."""
    a, old = np.arange(WAVE) + 100, np.arange(WAVE) + 500
    modifiers = "row_bcast:15 row_mask:0xf bank_mask:0xf" + " bound_ctrl:1" * zero
    s = Snippet(f"v_mov_b32_dpp v2, v1 {modifiers}", v={1: a, 2: old}).run()
    assert s.v(2)[:16].tolist() == ([0] * 16 if zero else list(range(500, 516)))
    assert s.v(2)[16:].tolist() == [115] * 16 + [131] * 16 + [147] * 16


def test_scan_over_a_wave() -> None:
    """Tests the prefix sum that compilers emit: shifts within rows, then a broadcast of lane 15 to odd rows, and of lane 31 to the
    upper half."""
    values = np.array([(7 * lane * lane + 3) % 101 for lane in range(WAVE)])
    shifts = "\n".join(f"v_add_u32_dpp v1, v1, v1 row_shr:{n} row_mask:0xf bank_mask:0xf" for n in (1, 2, 3))
    text = f"""
        v_mov_b32_e32 v2, v1
        {shifts.replace("v_add_u32_dpp v1, v1, v1", "v_add_u32_dpp v1, v2, v1")}
        v_add_u32_dpp v1, v1, v1 row_shr:4 row_mask:0xf bank_mask:0xe
        v_add_u32_dpp v1, v1, v1 row_shr:8 row_mask:0xf bank_mask:0xc
        v_add_u32_dpp v1, v1, v1 row_bcast:15 row_mask:0xa bank_mask:0xf
        v_add_u32_dpp v1, v1, v1 row_bcast:31 row_mask:0xc bank_mask:0xf
    """
    s = Snippet(text, v={1: values}).run()
    assert s.v(1).tolist() == np.cumsum(values).tolist()


@pytest.mark.parametrize(
    "text", ["v_mov_b32_dpp v2, v1 row_bcast:7", "v_mov_b32_dpp v2, v1", "v_mov_b32_dpp v2, v1 row_shr:1 row_shl:1"]
)
def test_controls_that_do_not_exist(text: str) -> None:
    with pytest.raises(UnknownInstruction):
        Snippet(text)


@pytest.mark.parametrize("value", SPECIAL32)
def test_one_value_for_all_lanes(value: int) -> None:
    s = Snippet("v_readfirstlane_b32 s4, v1\nv_readlane_b32 s5, v1, 40\nv_writelane_b32 v2, s4, 9", v={1: value, 2: 0}).run()
    assert (s.s(4), s.s(5), int(s.v(2)[9])) == (value, value, value)
