"""Tests corner cases that random operands rarely hit. Each case has a separate test.

Definitions are from the chapters of the instructions in the CDNA4 ISA document. The order of k is from `gfx950_emulator.mfma` and
its sources.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest

from gfx950_emulator.assembly import parse
from gfx950_emulator.hardware import MI355X
from gfx950_emulator.machine import Launch, execute
from gfx950_emulator.memory import GlobalMemory
from gfx950_emulator.mfma import bind_mfma
from gfx950_emulator.program import Program
from gfx950_emulator.snippet import Snippet
from kernel_emulation.emulator import Allocation
from kernel_emulation.errors import SanitizerError

from .oracles import F32, FORMATS, NAN, Binary, fma, read_lanes, same, words


def _chain(terms: list[float], c: float) -> float:
    """Returns c + terms[0] + terms[1] + ..., with every sum rounded to float32."""
    total = np.float32(c)
    for term in terms:
        total = np.float32(total + np.float32(term))
    return float(total)


@pytest.mark.parametrize(("mnemonic", "size", "c"), [("v_mfma_f32_16x16x4_f32", 16, 0.0), ("v_mfma_f32_32x32x2_f32", 32, 3.0)])
def test_f32_products_are_added_in_the_order_of_k(mnemonic: str, size: int, c: float) -> None:
    k = 64 // size
    orders = list(permutations([2.0**24, 1.0, 5.0, -(2.0**24)], k))
    assert any(_chain(list(order), c) != _chain(list(order[::-1]), c) for order in orders)
    op = bind_mfma(mnemonic, {})
    ones = np.ones((1, 64), np.float32).view(np.uint32)
    for order in orders:
        a = np.repeat(np.array(order, np.float32), size)[None].view(np.uint32)
        assert (op.compute(a, ones, c).view(np.float32) == _chain(list(order), c)).all(), order


def test_swizzle_with_masks_that_overlap() -> None:
    """Source = ((lane & and_mask) | or_mask) ^ xor_mask within 32 lanes: the xor comes last."""
    data = np.arange(64, dtype=np.uint32) + 1000
    for and_mask, or_mask, xor_mask in [(0x1F, 0x04, 0x04), (0x18, 0x03, 0x1F), (0x0F, 0x11, 0x10), (0, 0x1F, 0x0A)]:
        offset = xor_mask << 10 | or_mask << 5 | and_mask
        s = Snippet(f"ds_swizzle_b32 v2, v1 offset:{offset:#x}", v={1: data}).run()
        expected = [1000 + (lane & 32 | ((lane & 31 & and_mask) | or_mask) ^ xor_mask) for lane in range(64)]
        assert s.v(2).tolist() == expected


def test_fma_rounds_denormal_results_once() -> None:
    """FMA rounds a denormal result only once. The addend is at least 2**-127, and the product is next to half of the smallest
    denormal. So the first and last bit of the sum are more than 53 bits apart."""
    # 2**46 + 1 and 2**46 - 1 are products of numbers of at most 24 bits.
    above, below = (277 * 30269, 5 * 1013 * 1657), (2**23 - 1, 2**23 + 1)
    assert above[0] * above[1] == 2**46 + 1
    assert below[0] * below[1] == 2**46 - 1
    columns: list[list[int]] = [[], [], []]
    for (x, y), multiple, sign in product((above, below), range(2**22, 2**22 + 16), (1, -1)):
        for column, value in zip(
            columns, (sign * x * Fraction(2) ** -98, y * Fraction(2) ** -98, multiple * Fraction(2) ** -149), strict=True
        ):
            column.append(F32.round(value))
    v = {8 + 4 * i: words(column, 32)[0] for i, column in enumerate(columns)}
    for line in ("v_fma_f32 v0, v8, v12, v16", "v_fmac_f32_e32 v16, v8, v12"):
        s = Snippet(line, v={0: 0, **v}).run()
        expected = [fma(F32, *lane) for lane in zip(*columns, strict=True)]
        assert s.v(0 if "fma_" in line else 16).tolist() == expected
    assert set(expected) - set(columns[2])  # some results are rounded up, and others are not
    assert set(expected) & set(columns[2])


def _quotient(form: Binary, numerator: int, denominator: int) -> int | str | None:
    """Returns IEEE 754's quotient if an operand is zero, infinite or NaN; otherwise None."""
    sign = (numerator ^ denominator) & form.sign_bit
    if form.is_nan(numerator) or form.is_nan(denominator):
        return NAN
    if form.is_infinite(numerator):
        return NAN if form.is_infinite(denominator) else sign | form.infinity
    if form.is_zero(denominator):
        return NAN if form.is_zero(numerator) else sign | form.infinity
    return sign if form.is_infinite(denominator) or form.is_zero(numerator) else None


@pytest.mark.parametrize("type_", FORMATS)
def test_division_of_special_numbers(type_: str) -> None:
    """Tests every pair of zeros, infinities, NaNs and other values, with any intermediate quotient."""
    form = FORMATS[type_]
    positive = [0, 1, form.one, form.largest, form.infinity, form.infinity | 1 << (form.mantissa_bits - 1)]
    numbers = [x | sign for x in positive for sign in (0, form.sign_bit)]
    pairs = [pair for pair in product(numbers, repeat=2) if _quotient(form, *pair) is not None]
    lanes = -(-len(pairs) // 64) * 64
    pairs += pairs[: lanes - len(pairs)]
    columns = ([form.one + 1] * lanes, [b for _, b in pairs], [a for a, _ in pairs])
    v = {8 + 4 * i + j: w for i, column in enumerate(columns) for j, w in enumerate(words(column, form.width))}
    registers = "v[0:1], v[8:9], v[12:13], v[16:17]" if type_ == "f64" else "v0, v8, v12, v16"
    s = Snippet(f"v_div_fixup_{type_} {registers}", v={0: 0, 1: 0, **v}, waves=lanes // 64).run()
    for got, (a, b) in zip(read_lanes(s, 0, max(form.width, 32)), pairs, strict=True):
        assert same(type_, _quotient(form, a, b), got), (hex(a), hex(b), hex(got))


@pytest.mark.parametrize(("type_", "power"), [("f32", 64), ("f64", 128)])
def test_direction_in_which_a_quotient_is_scaled_back(type_: str, power: int) -> None:
    """In lanes whose VCC bit is set, v_div_fmas multiplies by 2**power if S2's exponent is above that of 1.0, otherwise by
    2**-power."""
    form = FORMATS[type_]
    two = form.one + (1 << form.mantissa_bits)
    magnitudes = [form.one, two - 1, two, two + 1]
    numbers = [x | sign for x in magnitudes for sign in (0, form.sign_bit)]
    columns = ([0] * 64, [form.one] * 64, [numbers[lane % 8] for lane in range(64)])
    v = {8 + 4 * i + j: w for i, column in enumerate(columns) for j, w in enumerate(words(column, form.width))}
    registers = "v0, v8, v12, v16" if type_ == "f32" else "v[0:1], v[8:9], v[12:13], v[16:17]"
    s = Snippet(f"v_div_fmas_{type_} {registers}", v={0: 0, 1: 0, **v}, s={"vcc": 0xFFFFFFFF}).run()
    for lane, got in enumerate(read_lanes(s, 0, form.width)):
        up = form.magnitude(columns[2][lane]) >= two
        moved = (power if up else -power) << form.mantissa_bits if lane < 32 else 0
        assert got == columns[2][lane] + moved, (lane, hex(got))


@pytest.mark.parametrize("mnemonic", ["v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32"])
@pytest.mark.parametrize("mask", [2**64 - 1, 0x00FF00FF0F0F3333])
@pytest.mark.parametrize("place", [0, 1])
def test_packed_instructions_whose_result_is_a_source(mnemonic: str, mask: int, place: int) -> None:
    """v[0:1] is the destination, and also source number `place`. Both halves of the result use the old value of v[0:1]."""
    before, other = (np.arange(2, 66, dtype=np.float32), np.arange(100, 164, dtype=np.float32)), (3.0, 5.0)
    on = np.array([mask >> lane & 1 for lane in range(64)], bool)
    sources = ["v[0:1]", "v[2:3]"] if place == 0 else ["v[2:3]", "v[0:1]"]
    for low, high in product(range(2), range(2)):  # the register of v[0:1] that each half uses
        if mnemonic == "v_pk_mov_b32":  # the lower half is of the first source, the upper one of the second
            modifiers = f"op_sel:[{low},{high}]"
            expected = [before[low], np.float32(other[high])] if place == 0 else [np.float32(other[low]), before[high]]
        else:
            chosen = [[low, 0], [high, 1]] if place == 0 else [[0, low], [1, high]]
            values = [(before[low], other[0]), (before[high], other[1])]
            if mnemonic == "v_pk_fma_f32":
                chosen = [[*half, 0] for half in chosen]
                expected = [a * np.float32(b) + np.float32(7) for a, b in values]
            else:
                expected = [a + np.float32(b) if "add" in mnemonic else a * np.float32(b) for a, b in values]
            op_sel, op_sel_hi = (",".join(map(str, half)) for half in chosen)
            modifiers = f"op_sel:[{op_sel}] op_sel_hi:[{op_sel_hi}]"
        listed = ", ".join([*sources, "v[4:5]"] if mnemonic == "v_pk_fma_f32" else sources)
        line = f"{mnemonic} v[0:1], {listed} {modifiers}"
        v = {0: before[0], 1: before[1], 2: other[0], 3: other[1], 4: 7.0, 5: 0.0}
        s = Snippet(line, v=v, s={"exec": mask}).run()
        for register in range(2):
            wanted = np.where(on, expected[register], before[register])
            assert s.v(register, np.float32).tolist() == wanted.tolist(), (line, register)


@pytest.mark.parametrize("mask", [0, 1, 0xFF00FF00FF00FF00])
def test_matrix_instructions_ignore_exec(mask: int) -> None:
    """Inactive lanes contribute their rows and columns to an MFMA, and receive their results."""
    v = {register: np.arange(64, dtype=np.float32) + register for register in range(6)}
    text = "v_mfma_f32_16x16x4_f32 v[2:5], v0, v1, v[2:5]"
    all_, some = (Snippet(text, v=v, s={"exec": on}).run() for on in ((1 << 64) - 1, mask))
    for register in range(2, 6):
        assert some.v(register, np.float32).tolist() == all_.v(register, np.float32).tolist()
        assert some.v(register, np.float32).tolist() != v[register].tolist()


@pytest.mark.parametrize("mnemonic", ["s_bfe_u32", "s_bfe_i32", "s_bfe_u64", "s_bfe_i64"])
@pytest.mark.parametrize("shared", [False, True])
def test_scalar_fields_of_every_width(mnemonic: str, shared: bool) -> None:
    """S1 selects bits [offset, offset + width) of S0: the offset is in S1's low bits, and the width in bits 22:16. Bits beyond S0
    are dropped."""
    bits = int(mnemonic[-2:])
    value, low, high = (0x9ABCDEF0, "s4", "s8") if bits == 32 else (0x9ABCDEF076543210, "s[4:5]", "s[8:9]")
    fields = [
        (offset, width)
        for offset in range(bits)
        for width in (0, 1, 2, bits - offset - 1, bits - offset, bits - offset + 1, bits, 127)
    ]
    fields = fields[:: 19 if shared else 1]
    controls = [width << 16 | offset | 0xFF800000 for offset, width in fields]
    expected = []
    for offset, width in fields:
        kept = min(width, bits - offset)
        field = value >> offset & (1 << kept) - 1
        if "_i" in mnemonic and kept and field >> kept - 1:
            field -= 1 << kept
        expected.append(field & (1 << bits) - 1)
    line = f"{mnemonic} {low}, {high}, s12"
    if shared:
        runs = [Snippet(line, s={8: value, 12: control}, registers=1).run() for control in controls]
        found = [(s.s(4) if bits == 32 else s.s64(4), bool(s.scc)) for s in runs]
    else:
        s = Snippet(line, s={8: value, 12: np.array(controls)}, waves=len(fields), registers=1).run()
        results = (s.s(4) if bits == 32 else s.s64(4)).tolist()
        found = list(zip(results, np.broadcast_to(s.scc, len(fields)).tolist(), strict=True))
    assert found == [(field, field != 0) for field in expected]


def test_lds_addresses_wrap_around() -> None:
    """An address just below 2**32 and the instruction's offset are added modulo 2**32."""
    lds = np.arange(256, dtype=np.uint8)
    below = np.uint32(2**32 - 64) + 4 * np.arange(64, dtype=np.uint32) % 64
    s = Snippet("ds_read_b32 v2, v1 offset:80\nds_read2_b32 v[4:5], v1 offset0:16 offset1:32", v={1: below}, lds=lds).run()
    words_of_lds = lds.view(np.uint32)
    at = 4 * np.arange(64) % 64
    assert s.v(2).tolist() == words_of_lds[(at + 16) // 4].tolist()
    assert s.v(4).tolist() == words_of_lds[at // 4].tolist()
    assert s.v(5).tolist() == words_of_lds[(at + 64) // 4].tolist()
    s = Snippet("ds_write_b32 v1, v3 offset:80", v={1: below, 3: 7}, lds=lds, s={"exec": 1}).run()
    assert s.lds.view(np.uint32).tolist() == [*words_of_lds[:4].tolist(), 7, *words_of_lds[5:].tolist()]


_WHERE = """where:
\ts_load_dwordx2 s[8:9], s[0:1], 0x0
\ts_getreg_b32 s6, hwreg(HW_REG_XCC_ID)
\ts_mul_i32 s7, s4, 2
\ts_add_u32 s7, s7, s3
\ts_mul_i32 s7, s7, 5
\ts_add_u32 s7, s7, s2
\ts_lshl_b32 s7, s7, 2
\tv_mov_b32_e32 v1, s7
\tv_mov_b32_e32 v2, s6
\ts_waitcnt lgkmcnt(0)
\tglobal_store_dword v1, v2, s[8:9]
\ts_endpgm
\t.amdhsa_kernel where
\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t.amdhsa_user_sgpr_count 2
\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.amdhsa_system_sgpr_workgroup_id_y 1
\t.amdhsa_system_sgpr_workgroup_id_z 1
\t.amdhsa_next_free_vgpr 8
\t.amdhsa_accum_offset 4
\t.end_amdhsa_kernel
"""


@pytest.mark.parametrize("batch_lanes", [64, 7 * 64, 4096])
def test_workgroups_go_to_the_xcds_in_turn(batch_lanes: int) -> None:
    """Workgroups are numbered with x varying fastest, then y, then z. Workgroup i runs on XCD i % 8. The assignment does not depend
    on the emulator's batches."""
    x, y, z = 5, 2, 3
    out = np.full(x * y * z, 99, np.uint32)
    kernarg = np.zeros(16, np.uint8)
    kernarg.view(np.uint64)[0] = out.ctypes.data
    memory = GlobalMemory([Allocation(a.ctypes.data, a.ctypes.data + a.nbytes, "array") for a in (out, kernarg)])
    execute(Launch(Program(parse(_WHERE)), (x, y, z), 1, 0, kernarg, memory, batch_lanes=batch_lanes))
    assert out.tolist() == [i % 8 for i in range(x * y * z)]


def _kind(text: str, **state) -> str | None:
    """Returns the kind of the sanitizer's report, or None."""
    try:
        Snippet(text, sanitize=True, registers=8, **state).run()
    except SanitizerError as error:
        return error.kind
    return None


@pytest.mark.parametrize(("width", "size"), [("ubyte", 1), ("ushort", 2), ("dword", 4), ("dwordx4", 16)])
@pytest.mark.parametrize("nbytes", [61, 64])
def test_accesses_that_reach_one_byte_past_a_tensor(width: str, size: int, nbytes: int) -> None:
    """Tests accesses at the last valid address of the tensor, one byte after this address, and one byte before the tensor."""
    data = np.zeros(nbytes, np.uint8)
    registers = "v[4:7]" if size == 16 else "v4"
    v = dict.fromkeys((1, 4, 5, 6, 7), 0)
    for line in (f"global_load_{width} {registers}, v1, s[4:5]", f"global_store_{width.removeprefix('u')} v1, {registers}, s[4:5]"):
        for offset in (nbytes - size, nbytes - size + 1, -1):
            at = data.ctypes.data + offset
            kind = _kind(line, v=v, s={4: at & 0xFFFFFFFF, 5: at >> 32, "exec": 1}, arrays=[data])
            assert kind == (None if offset == nbytes - size else "out-of-bounds"), (line, offset)


@pytest.mark.parametrize(("text", "size"), [("ds_read_u8 v2, v1", 1), ("ds_write_b8 v1, v2", 1), ("ds_write_b16 v1, v2", 2)])
def test_lds_accesses_that_reach_one_byte_past_the_allocation(text: str, size: int) -> None:
    for at, kind in ((64 - size, None), (64, "out-of-bounds")):
        assert _kind(text, v={1: at, 2: 0}, s={"exec": 1}, lds=np.zeros(64, np.uint8)) == kind
    assert _kind(text, v={1: 60, 2: 0}, s={"exec": 1}, lds=np.zeros(60 + size, np.uint8)) is None
    assert _kind(text, v={1: 60, 2: 0}, s={"exec": 1}, lds=np.zeros(60 + size - 1, np.uint8)) == "out-of-bounds"


@pytest.mark.parametrize(
    ("m0", "kind"), [(256, None), (512, "out-of-bounds"), (MI355X.lds_bytes - 4, "out-of-bounds"), (MI355X.lds_bytes, None)]
)
def test_direct_loads_behind_the_allocation(m0: int, kind: str | None) -> None:
    """If a whole wave's load is beyond the workgroup's LDS, it is an error, unless an M0 beyond any LDS disables the load."""
    data = np.zeros(64, np.uint32)
    s = {4: data.ctypes.data & 0xFFFFFFFF, 5: data.ctypes.data >> 32, "m0": m0}
    line = "global_load_lds_dword v1, s[4:5]\ns_waitcnt vmcnt(0)"
    assert _kind(line, v={1: 4 * np.arange(64)}, s=s, arrays=[data], lds=np.zeros(512, np.uint8)) == kind


@pytest.mark.parametrize("lane", [0, 7, 31, 32, 40, 63])
def test_any_lane_that_is_read_to_a_scalar_must_be_initialised(lane: int) -> None:
    data = np.zeros(64, np.uint32)
    store = f"v_readlane_b32 s12, v3, {lane}\nv_mov_b32_e32 v4, s12\nglobal_store_dword v1, v4, s[4:5]"
    s = {4: data.ctypes.data & 0xFFFFFFFF, 5: data.ctypes.data >> 32}
    for mask, kind in ((1 << lane, None), (1 << lane ^ 2**64 - 1, "uninitialised")):
        write = f"s_mov_b32 exec_lo, {mask & 0xFFFFFFFF:#x}\ns_mov_b32 exec_hi, {mask >> 32:#x}\nv_mov_b32_e32 v3, 7\n"
        assert _kind(f"{write}s_mov_b64 exec, -1\n{store}", v={1: 4 * np.arange(64)}, s=s, arrays=[data]) == kind
