"""Tests MFMA instructions against their definition, element by element.

The oracle finds every element by a map from (row, k) to (lane, bit), reads it from Python integers, and adds in exact arithmetic.
The map follows the tables of AMD's Matrix Instruction Calculator, of AMD's article on CDNA4's matrix cores, and of Composable
Kernel's hardware tests. `TRITON` holds the layouts that Triton 3.9 prints for the same instructions.
"""

import math
import operator
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from gfx950_emulator import mfma
from gfx950_emulator.architecture import GFX942, GFX950
from gfx950_emulator.mfma import bind_mfma

NAN = 0x7FC00000
FORMATS = ["fp8", "bf8", "fp6", "bf6", "fp4"]
BITS = {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4, "bf16": 16, "f16": 16, "f32": 32, "i8": 8, "f64": 64}
BITS |= {"fp8_fnuz": 8, "bf8_fnuz": 8}
# exponent bits, mantissa bits, bias
FIELDS = {
    "fp8": (4, 3, 7), "bf8": (5, 2, 15), "fp6": (2, 3, 1), "bf6": (3, 2, 3), "fp4": (2, 1, 1),
    "bf16": (8, 7, 127), "f16": (5, 10, 15), "f32": (8, 23, 127), "f64": (11, 52, 1023),
    "fp8_fnuz": (4, 3, 8), "bf8_fnuz": (5, 2, 16),
}  # fmt: skip

# mnemonic, size, K, type of A, type of B, registers of A, B and C, passes
DENSE = [
    ("v_mfma_f32_32x32x2_f32", 32, 2, "f32", "f32", 1, 1, 16, 16),
    ("v_mfma_f32_16x16x4_f32", 16, 4, "f32", "f32", 1, 1, 4, 8),
    ("v_mfma_f32_32x32x8_f16", 32, 8, "f16", "f16", 2, 2, 16, 8),
    ("v_mfma_f32_16x16x16_f16", 16, 16, "f16", "f16", 2, 2, 4, 4),
    ("v_mfma_f32_32x32x16_f16", 32, 16, "f16", "f16", 4, 4, 16, 8),
    ("v_mfma_f32_16x16x32_f16", 16, 32, "f16", "f16", 4, 4, 4, 4),
    ("v_mfma_f32_32x32x8_bf16", 32, 8, "bf16", "bf16", 2, 2, 16, 8),
    ("v_mfma_f32_16x16x16_bf16", 16, 16, "bf16", "bf16", 2, 2, 4, 4),
    ("v_mfma_f32_32x32x16_bf16", 32, 16, "bf16", "bf16", 4, 4, 16, 8),
    ("v_mfma_f32_16x16x32_bf16", 16, 32, "bf16", "bf16", 4, 4, 4, 4),
    *(
        (f"v_mfma_f32_{size}x{size}x{k}_{a}_{b}", size, k, a, b, 2, 2, size * size // 64, passes)
        for (size, k, passes), a, b in product([(32, 16, 8), (16, 32, 4)], ["fp8", "bf8"], ["fp8", "bf8"])
    ),
    ("v_mfma_i32_32x32x16_i8", 32, 16, "i8", "i8", 2, 2, 16, 8),
    ("v_mfma_i32_16x16x32_i8", 16, 32, "i8", "i8", 2, 2, 4, 4),
    ("v_mfma_i32_32x32x32_i8", 32, 32, "i8", "i8", 4, 4, 16, 8),
    ("v_mfma_i32_16x16x64_i8", 16, 64, "i8", "i8", 4, 4, 4, 4),
    ("v_mfma_f64_16x16x4_f64", 16, 4, "f64", "f64", 2, 2, 8, 16),
]
# gfx942 has the forms with up to 2 registers. Its fp8 and bf8 are FNUZ, and float64 takes half as long.
DENSE_GFX942 = [
    (
        *form[:3],
        *(f"{kind}_fnuz" if kind in ("fp8", "bf8") else kind for kind in form[3:5]),
        *form[5:8],
        form[8] // (1 + (form[3] == "f64")),
    )
    for form in DENSE
    if form[5] <= 2
]
REGISTERS = {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}
F8F6F4 = [
    (f"v_mfma_{scale}f32_{size}x{size}x{k}_f8f6f4", size, k, a, b)
    for scale, (size, k), a, b in product(["", "scale_"], [(16, 128), (32, 64)], FORMATS, FORMATS)
]


def place(kind: str, size: int, total_k: int, row: int, k: int, f8f6f4: bool) -> tuple[int, int]:
    """Returns the lane and the first bit of element (row, k) of A, or of element (k, column) of B."""
    if f8f6f4 and kind in ("fp8", "bf8"):
        half, rest = divmod(k, total_k // 2)
        group, byte = divmod(rest, 16)
        return group * size + row, 8 * (16 * half + byte)
    per_lane = total_k * size // 64
    return k // per_lane * size + row, k % per_lane * BITS[kind]


def place_c(size: int, row: int, column: int) -> tuple[int, int]:
    """Returns the register and the lane of element (row, column) of 32-bit C and D."""
    if size == 32:
        return 4 * (row // 8) + row % 4, 32 * (row // 4 % 2) + column
    return row % 4, 16 * (row // 4) + column


def decoded(kind: str, code: int) -> float:
    if kind == "i8":
        return code - 256 if code > 127 else code
    exponent_bits, mantissa_bits, bias = FIELDS[kind]
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    top = (1 << exponent_bits) - 1
    if kind == "fp8" and exponent == top and mantissa == 7:
        return math.nan
    if kind.endswith("fnuz") and code == 0x80:
        return math.nan
    if kind not in ("fp8", "fp6", "bf6", "fp4", "fp8_fnuz", "bf8_fnuz") and exponent == top:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)


def matrix(kind: str, size: int, total_k: int, registers: np.ndarray, f8f6f4: bool) -> list[list[float]]:
    """Returns the rows of A, or the columns of B, from the registers of one wave."""
    lanes = [sum(int(word) << 32 * at for at, word in enumerate(registers[:, lane])) for lane in range(64)]
    mask = (1 << BITS[kind]) - 1
    rows = []
    for row in range(size):
        places = [place(kind, size, total_k, row, k, f8f6f4) for k in range(total_k)]
        rows.append([decoded(kind, lanes[lane] >> bit & mask) for lane, bit in places])
    return rows


def to_float32(value: Fraction) -> float:
    """Rounds once to float32, to nearest even. The value must not overflow."""
    if value == 0:
        return 0.0
    power = max(math.frexp(float(value))[1] - 1, -126)
    ulp = Fraction(2) ** (power - 23)
    return float(round(value / ulp) * ulp)


def expected_bits(size: int, rows: list, columns: list, c: np.ndarray) -> np.ndarray:
    """Returns D = A B + C of one wave with one rounding, as uint32 [registers, 64]. C is float32 in registers."""
    result = np.zeros((size * size // 64, 64), np.float32)
    for i, j in product(range(size), range(size)):
        register, lane = place_c(size, i, j)
        total = math.fsum([*map(operator.mul, rows[i], columns[j]), float(c[register, lane])])
        result[register, lane] = np.float32(total)
    return result.view(np.uint32)


def random_registers(rng: np.random.Generator, kind: str, count: int, lanes: int) -> np.ndarray:
    """Returns random encodings except NaN and infinity. Floats of 16 bits and more are near 1, so sums do not cancel."""
    if kind == "f64":
        return rng.standard_normal((count // 2, lanes)).view(np.uint32).reshape(-1, lanes, 2).swapaxes(1, 2).reshape(count, lanes)
    if kind == "f32":
        return rng.standard_normal((count, lanes)).astype(np.float32).view(np.uint32)
    if kind in ("bf16", "f16"):
        values = rng.standard_normal((count, lanes, 2)).astype(np.float32)
        halves = (values.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else values.astype(np.float16).view(np.uint16)
        return halves.reshape(count, -1).view(np.uint32)
    words = rng.integers(0, 2**32, (count, lanes), dtype=np.uint32)
    if kind in ("fp8", "bf8"):
        octets = words.view(np.uint8)
        octets[(octets & 0x7F) >= (0x7F if kind == "fp8" else 0x7C)] = 0x35
    if kind.endswith("fnuz"):
        octets = words.view(np.uint8)
        octets[octets == 0x80] = 0x35
    return words


def one_rounding(bits: np.ndarray, wanted: np.ndarray) -> None:
    """Asserts equality. A few results may differ by 1 ulp of float32: rounding the sum to float64 first can change a tie."""
    off = bits.view(np.int32).astype(np.int64) - wanted.view(np.int32)
    assert np.abs(off).max() <= 1, f"{np.count_nonzero(np.abs(off) > 1)} elements differ"
    assert np.count_nonzero(off) <= max(1, off.size // 1000)


@pytest.mark.parametrize(
    ("architecture", "form"),
    [(GFX950, form) for form in DENSE] + [(GFX942, form) for form in DENSE_GFX942],
    ids=lambda value: value[0] if isinstance(value, tuple) else value.name,
)
def test_dense_forms_follow_the_definition(architecture, form):
    mnemonic, size, k, a_kind, b_kind, a_registers, b_registers, c_registers, passes = form
    op = bind_mfma(mnemonic, {}, architecture)
    assert (op.m, op.n, op.k, op.blocks) == (size, size, k, 1)
    assert (op.a_registers, op.b_registers, op.c_registers) == (a_registers, b_registers, c_registers)
    assert op.flops == 2 * size * size * k
    assert op.passes == passes
    rng = np.random.default_rng(len(mnemonic) * k)
    a, b = (random_registers(rng, kind, count, 128) for kind, count in ((a_kind, a_registers), (b_kind, b_registers)))
    c = random_registers(rng, {"i8": "i8", "f64": "f64"}.get(a_kind, "f32"), c_registers, 128)
    copies = [x.copy() for x in (a, b, c)]
    d = op.compute(a, b, c)
    assert d.dtype == np.uint32
    assert d.shape == c.shape
    for before, after in zip(copies, (a, b, c), strict=True):
        np.testing.assert_array_equal(before, after)
    for wave in (slice(0, 64), slice(64, 128)):
        rows, columns = (matrix(kind, size, k, x[:, wave], False) for kind, x in ((a_kind, a), (b_kind, b)))
        if a_kind == "i8":
            for i, j in product(range(size), range(size)):
                register, lane = place_c(size, i, j)
                total = sum(map(operator.mul, rows[i], columns[j])) + int(c[register, wave][lane])
                assert d[register, wave][lane] == total % 2**32
        elif a_kind == "f64":
            for i, j in product(range(16), range(16)):
                pair, lane = 2 * (i // 4), 16 * (i % 4) + j
                c_value, d_value = (
                    decoded("f64", int(x[pair, wave][lane]) | int(x[pair + 1, wave][lane]) << 32) for x in (c, d)
                )  # fmt: skip
                for x, y in zip(rows[i], columns[j], strict=True):
                    c_value += x * y
                assert d_value == c_value
        elif a_kind == "f32":
            for i, j in product(range(size), range(size)):
                register, lane = place_c(size, i, j)
                total = float(c[register, wave][lane : lane + 1].view(np.float32)[0])
                for x, y in zip(rows[i], columns[j], strict=True):
                    total = to_float32(Fraction(x) * Fraction(y) + Fraction(total))
                assert d[register, wave][lane : lane + 1].view(np.float32)[0] == total
        else:
            one_rounding(d[:, wave], expected_bits(size, rows, columns, c[:, wave].view(np.float32)))


@pytest.mark.parametrize("form", F8F6F4, ids=lambda form: f"{form[0][7:-7]}-{form[3]}-{form[4]}")
def test_f8f6f4_forms_follow_the_definition(form):
    mnemonic, size, k, a_kind, b_kind = form
    scaled = "scale" in mnemonic
    rng = np.random.default_rng(FORMATS.index(a_kind) * 10 + FORMATS.index(b_kind) + size)
    selection = {name: (*map(int, rng.integers(0, 2, 2)), 0) for name in ("op_sel", "op_sel_hi")}
    modifiers = {"cbsz": FORMATS.index(a_kind), "blgp": FORMATS.index(b_kind), **(selection if scaled else {})}
    op = bind_mfma(mnemonic, modifiers)
    assert (op.a_registers, op.b_registers, op.c_registers) == (REGISTERS[a_kind], REGISTERS[b_kind], size * size // 64)
    assert op.flops == 2 * size * size * k
    fast = 4 if size == 16 else 8
    assert op.passes == (2 * fast if {"fp8", "bf8"} & {a_kind, b_kind} else fast)
    a, b = random_registers(rng, a_kind, op.a_registers, 64), random_registers(rng, b_kind, op.b_registers, 64)
    c = random_registers(rng, "f32", op.c_registers, 64)
    rows, columns = matrix(a_kind, size, k, a, True), matrix(b_kind, size, k, b, True)
    if not scaled:
        one_rounding(op.compute(a, b, c), expected_bits(size, rows, columns, c.view(np.float32)))
        return
    # The scale bytes are near 127 and differ in all lanes and bytes, so the terms of a sum have similar sizes.
    scales = [rng.integers(120, 135, (64, 4), dtype=np.uint8).view(np.uint32)[:, 0] for _ in "ab"]
    d = op.compute(a, b, c, *scales)
    for elements, scale, index in ((rows, scales[0], 0), (columns, scales[1], 1)):
        byte = selection["op_sel"][index] + 2 * selection["op_sel_hi"][index]
        for row, values in enumerate(elements):
            for at in range(k):
                lane = at // 32 * size + row
                values[at] *= 2.0 ** ((int(scale[lane]) >> 8 * byte & 255) - 127)
    one_rounding(d, expected_bits(size, rows, columns, c.view(np.float32)))


@pytest.mark.parametrize("byte_a", range(4))
@pytest.mark.parametrize("byte_b", range(4))
def test_every_scale_byte_can_be_selected(byte_a, byte_b):
    modifiers = {"cbsz": 4, "blgp": 4, "op_sel": [byte_a & 1, byte_b & 1, 0], "op_sel_hi": [byte_a >> 1, byte_b >> 1, 0]}
    op = bind_mfma("v_mfma_scale_f32_16x16x128_f8f6f4", modifiers)
    ones = np.full((4, 64), 0x22222222, np.uint32)  # fp4 1.0
    scale_a = np.full(64, 0x83817F7E, np.uint32)  # bytes 0 to 3: 126, 127, 129, 131
    scale_b = np.full(64, 0x897D8C7F, np.uint32)  # 127, 140, 125, 137
    power = [126, 127, 129, 131][byte_a] + [127, 140, 125, 137][byte_b] - 254
    d = op.compute(ones, ones, 0, scale_a, scale_b)
    assert (d.view(np.float32) == 128 * 2.0**power).all()


def test_scales_belong_to_blocks_of_32_and_to_their_row():
    """Only one element of A and one of B are not zero. Only the scales of these elements' blocks affect the result."""
    for (size, k), kind in product([(16, 128), (32, 64)], FORMATS):
        op = bind_mfma(f"v_mfma_scale_f32_{size}x{size}x{k}_f8f6f4", {"cbsz": FORMATS.index(kind), "blgp": FORMATS.index(kind)})
        _, mantissa_bits, bias = FIELDS[kind]
        one = bias << mantissa_bits
        for row, at, column in ((0, 0, 0), (3, 17, 9), (5, 31, size - 1), (size - 1, 32, 4), (7, 47, 1), (2, k - 1, 2)):
            lane, bit = place(kind, size, k, row, at, True)
            a = np.zeros((op.a_registers, 64), np.uint32)
            stream = one << bit
            a[:, lane] = [stream >> 32 * word & 0xFFFFFFFF for word in range(op.a_registers)]
            lane, bit = place(kind, size, k, column, at, True)
            b = np.zeros((op.b_registers, 64), np.uint32)
            stream = one << bit
            b[:, lane] = [stream >> 32 * word & 0xFFFFFFFF for word in range(op.b_registers)]
            scale_a, scale_b = np.full(64, 127, np.uint32), np.full(64, 127, np.uint32)
            scale_a[at // 32 * size + row], scale_b[at // 32 * size + column] = 130, 122
            d = op.compute(a, b, 0.0, scale_a, scale_b).view(np.float32)
            register, lane = place_c(size, row, column)
            assert d[register, lane] == 2.0 ** (3 - 5), (kind, size, row, at, column)
            assert np.count_nonzero(d) == 1


def test_extreme_scales():
    op = bind_mfma("v_mfma_scale_f32_16x16x128_f8f6f4", {"cbsz": 4, "blgp": 4})
    ones = np.full((4, 64), 0x22222222, np.uint32)
    unit = np.full(64, 127, np.uint32)

    def with_scales(a: int, b: int) -> np.ndarray:
        return op.compute(ones, ones, 0, np.full(64, a, np.uint32), np.full(64, b, np.uint32))

    assert (with_scales(0, 127).view(np.float32) == 2.0**-120).all()
    assert (with_scales(0, 254).view(np.float32) == 128.0).all()  # 2**-127 times 2**127
    assert (with_scales(0, 105).view(np.float32) == 2.0**-142).all()  # a denormal result
    assert (with_scales(0, 0) == 0).all()
    assert (with_scales(254, 254).view(np.float32) == np.inf).all()
    assert (with_scales(255, 0) == NAN).all()
    # A NaN scale makes only its row (or column) NaN, even if the elements are zero.
    zeros = np.zeros_like(ones)
    scale = unit.copy()
    scale[2 * 16 + 5] = 255
    d = op.compute(zeros, ones, 0, scale, unit)
    rows = np.array([[4 * (lane // 16) + register for lane in range(64)] for register in range(4)])
    np.testing.assert_array_equal(d, np.where(rows == 5, np.uint32(NAN), np.uint32(0)))
    d = op.compute(zeros, ones, 0, unit, scale)
    np.testing.assert_array_equal(d, np.where(np.arange(64) % 16 == 5, np.uint32(NAN), np.uint32(0)) + np.zeros_like(d))


# The layouts of Triton 3.9 for these instructions. A layout has the bases of the register index and of the lane, as (row, column)
# of the tensor. GluonOpBuilder.to_linear_layout printed them for DotOperandLayout(0, AMDMFMALayout(4, [M, M, K], False, [1, 1]),
# k_width=16), for get_mfma_scale_layout, and for AMDMFMALayout. For fp4, the tensor of bytes is half as wide. B's layout is A's
# with the axes exchanged.
TRITON = {
    16: {
        "fp8": ([(0, 1), (0, 2), (0, 4), (0, 8), (0, 64)], [(1, 0), (2, 0), (4, 0), (8, 0), (0, 16), (0, 32)]),
        "fp4": ([(0, 1), (0, 2), (0, 4), (0, 8)], [(1, 0), (2, 0), (4, 0), (8, 0), (0, 16), (0, 32)]),
        "scale": ([], [(1, 0), (2, 0), (4, 0), (8, 0), (0, 1), (0, 2)]),
        "c": ([(1, 0), (2, 0)], [(0, 1), (0, 2), (0, 4), (0, 8), (4, 0), (8, 0)]),
    },
    32: {
        "fp8": ([(0, 1), (0, 2), (0, 4), (0, 8), (0, 32)], [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (0, 16)]),
        "fp4": ([(0, 1), (0, 2), (0, 4), (0, 8)], [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (0, 16)]),
        "scale": ([], [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (0, 1)]),
        "c": ([(1, 0), (2, 0), (8, 0), (16, 0)], [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (4, 0)]),
    },
}


def triton_coordinates(size: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and the column, each as an array [registers of Triton, 64]."""

    def combined(bases: list[tuple[int, int]], axis: int) -> np.ndarray:
        """Returns the coordinate of every index, combined from the bases of the index's bits."""
        return np.array([sum(base[axis] for bit, base in enumerate(bases) if n >> bit & 1) for n in range(1 << len(bases))])

    register_bases, lane_bases = TRITON[size][name]
    return tuple(combined(register_bases, axis)[:, None] + combined(lane_bases, axis) for axis in (0, 1))


def fp_values(kind: str) -> np.ndarray:
    return np.array([decoded(kind, code) for code in range(1 << BITS[kind])])


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("kinds", list(product(["fp8", "fp4"], repeat=2)), ids="-".join)
def test_triton_s_layouts_give_the_product(size, kinds):
    """Operands in Triton's register layouts, with random scales, give the result of a plain matmul of the tensors."""
    k = 2048 // size
    rng = np.random.default_rng(size)
    op = bind_mfma(f"v_mfma_scale_f32_{size}x{size}x{k}_f8f6f4", {"cbsz": FORMATS.index(kinds[0]), "blgp": FORMATS.index(kinds[1])})
    registers, scales, dense = [], [], []
    for kind in kinds:
        octets = rng.integers(0, 256, (size, k * BITS[kind] // 8), dtype=np.uint8)
        if kind == "fp8":
            octets[(octets & 0x7F) == 0x7F] = 0
            values = fp_values("fp8")[octets]
        else:
            values = np.stack([fp_values("fp4")[octets & 15], fp_values("fp4")[octets >> 4]], axis=-1).reshape(size, k)
        rows, columns = triton_coordinates(size, kind)
        registers.append(octets[rows, columns].T.copy().view(np.uint32).T.copy())  # four bytes per register, low byte first
        scale = rng.integers(117, 137, (size, k // 32), dtype=np.uint8)
        rows, columns = triton_coordinates(size, "scale")
        scales.append(scale[rows, columns][0].astype(np.uint32))
        dense.append(values * np.repeat(2.0 ** (scale.astype(np.int64) - 127), 32, axis=1))
    c = rng.standard_normal((size, size)).astype(np.float32)
    rows, columns = triton_coordinates(size, "c")
    d = op.compute(*registers, c[rows, columns].view(np.uint32), *scales).view(np.float32)
    expected = dense[0] @ dense[1].T + c
    np.testing.assert_allclose(d, expected[rows, columns], rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_spellings():
    for spelling in ("16x16x16bf16_1k", "16x16x16_bf16_1k", "16x16x16_bf16", "16x16x16_bf16_e64"):
        op = bind_mfma(f"v_mfma_f32_{spelling}", {"cbsz": 0, "abid": 0, "blgp": 0, "op_sel": (0, 0, 0)})
        assert (op.mnemonic, op.k, op.a_registers) == (f"v_mfma_f32_{spelling}", 16, 2)
    for spelling, k in (("v_mfma_f32_16x16x4f32", 4), ("v_mfma_f32_32x32x8f16", 8), ("v_mfma_i32_16x16x32i8", 32)):
        assert bind_mfma(spelling, {}).k == k
    assert bind_mfma("v_mfma_f64_16x16x4f64", {}).c_registers == 8


@pytest.mark.parametrize(
    ("mnemonic", "message"),
    [
        ("v_mfma_f32_16x16x8_xf32", "gfx950 has no such instruction"),
        ("v_mfma_f32_32x32x4_xf32", "gfx950 has no such instruction"),
        ("v_mfma_f32_16x16x8_bf16", "gfx950 has no such instruction"),
        ("v_mfma_scale_f32_16x16x32_bf16", "gfx950 has no such instruction"),
        ("v_mfma_i32_16x16x32_f16", "gfx950 has no such instruction"),
        ("v_mfma_f32_4x4x4_16b_f16", "one block"),
        ("v_mfma_f32_4x4x4f16", "one block"),
        ("v_mfma_f32_32x32x4_2b_f16", "one block"),
        ("v_smfmac_f32_16x16x64_bf16", "not a matrix instruction"),
        ("v_add_f32", "not a matrix instruction"),
    ],
)
def test_unknown_mnemonics_are_refused(mnemonic, message):
    with pytest.raises(ValueError, match=f"{mnemonic}: .*{message}"):
        bind_mfma(mnemonic, {})


@pytest.mark.parametrize("mnemonic", sorted({form[0] for form in [*DENSE, *F8F6F4]} - {form[0] for form in DENSE_GFX942}))
def test_mfmas_that_gfx942_lacks_are_refused(mnemonic):
    with pytest.raises(ValueError, match=f"{mnemonic}: gfx942 has no such instruction"):
        bind_mfma(mnemonic, {}, GFX942)


@pytest.mark.parametrize(
    ("mnemonic", "modifiers", "message"),
    [
        ("v_mfma_f32_16x16x32_bf16", {"cbsz": 1}, "cbsz:1"),
        ("v_mfma_f32_16x16x32_bf16", {"blgp": 3}, "blgp:3"),
        ("v_mfma_f64_16x16x4_f64", {"neg": (1, 0, 0)}, "neg"),
        ("v_mfma_f32_16x16x128_f8f6f4", {"op_sel": (1, 0, 0)}, "op_sel"),
        ("v_mfma_f32_16x16x128_f8f6f4", {"abid": 1}, "abid"),
        ("v_mfma_f32_16x16x128_f8f6f4", {"cbsz": 5}, "cbsz:5 is no format"),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", {"blgp": 7}, "blgp:7 is no format"),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", {"op_sel": (0, 0, 1)}, "op_sel"),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", {"op_sel_hi": (0, 2)}, "op_sel"),
        ("v_mfma_scale_f32_16x16x128_f8f6f4", {"neg_lo": (1, 0, 0)}, "neg_lo"),
    ],
)
def test_modifiers_without_meaning_are_refused(mnemonic, modifiers, message):
    with pytest.raises(ValueError, match=message):
        bind_mfma(mnemonic, modifiers)


def test_wrong_shapes_are_refused():
    op = bind_mfma("v_mfma_scale_f32_16x16x128_f8f6f4", {"cbsz": 4})
    a, b, c = np.zeros((4, 128), np.uint32), np.zeros((8, 128), np.uint32), np.zeros((4, 128), np.uint32)
    scale = np.full(128, 127, np.uint32)
    assert op.compute(a, b, c, scale, scale).shape == (4, 128)
    with pytest.raises(ValueError, match=r"a: .* \[4, 64 \* waves\], got \[8, 128\]"):
        op.compute(b, b, c, scale, scale)
    with pytest.raises(ValueError, match=r"a: expected shape .*, got \[4, 100\]"):
        op.compute(a[:, :100], b, c, scale, scale)
    with pytest.raises(ValueError, match=r"b: expected shape \[8, 128\], got \[4, 128\]"):
        op.compute(a, a, c, scale, scale)
    with pytest.raises(ValueError, match=r"c: expected shape \[4, 128\], got \[4, 64\]"):
        op.compute(a, b, c[:, :64], scale, scale)
    with pytest.raises(ValueError, match=r"scale_b: expected shape \[128\], got None"):
        op.compute(a, b, c, scale)
    with pytest.raises(ValueError, match="takes no scales"):
        bind_mfma("v_mfma_f32_16x16x128_f8f6f4", {"cbsz": 4}).compute(a, b, c, scale, scale)


# Values


def bf16_operands(a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns one wave's operands for `BF16`: all elements of A are `a`, and all elements of B are `b`."""
    return tuple(np.full((2, 64), int(np.array(x, np.float32).view(np.uint32) >> 16) * 0x10001, np.uint32) for x in (a, b))


BF16 = bind_mfma("v_mfma_f32_16x16x16_bf16", {})


def test_inline_constants_stand_for_the_whole_matrix():
    a, b = bf16_operands(1.5, 2.0)
    assert (BF16.compute(a, b, 0).view(np.float32) == 48).all()
    assert (BF16.compute(a, b, 0.0).view(np.float32) == 48).all()
    assert (BF16.compute(a, b, -4.0).view(np.float32) == 44).all()
    zero = np.zeros_like(a)
    assert (BF16.compute(zero, b, 1) == 1).all()  # integers are bits: here a denormal
    assert (BF16.compute(zero, b, -1) == NAN).all()  # 0xffffffff
    f32 = bind_mfma("v_mfma_f32_16x16x4_f32", {})
    ones = np.full((1, 64), 1.0, np.float32).view(np.uint32)
    assert (f32.compute(ones, ones, 0.5).view(np.float32) == 4.5).all()
    assert (f32.compute(np.zeros_like(ones), ones, 3) == 3).all()
    f64 = bind_mfma("v_mfma_f64_16x16x4_f64", {})
    double = np.tile(np.array([[0], [0x3FF00000]], np.uint32), 64)
    d = f64.compute(double, double, -4.0)
    assert (d == 0).all()
    d = f64.compute(double, double, 1.0)
    assert (d[0::2] == 0).all()
    assert (d[1::2] == 0x40140000).all()  # 5.0
    i8 = bind_mfma("v_mfma_i32_16x16x32_i8", {})
    octets = np.full((2, 64), 0x01010101, np.uint32)
    assert (i8.compute(octets, octets, -3) == 29).all()


def test_integers_wrap_around():
    op = bind_mfma("v_mfma_i32_16x16x64_i8", {})
    lowest = np.full((4, 64), 0x80808080, np.uint32)
    c = np.full((4, 64), 0x7FFFFFFF, np.uint32)
    assert (op.compute(lowest, lowest, c) == (64 * 128 * 128 + 0x7FFFFFFF) % 2**32).all()


def test_16_bit_forms_round_once_and_f32_forms_round_every_step():
    # 2**24 + 1 + 1: each 1 alone is lost in float32.
    a, b = np.zeros((2, 64), np.uint32), np.full((2, 64), 0x3F803F80, np.uint32)
    a[0] = np.where(np.arange(64) < 16, 0x3F803F80, 0)  # k = 0 and 1
    assert (BF16.compute(a, b, 2.0**24).view(np.float32) == 2.0**24 + 2).all()
    f32 = bind_mfma("v_mfma_f32_16x16x4_f32", {})
    ones = np.full((1, 64), 1.0, np.float32).view(np.uint32)
    assert (f32.compute(ones, ones, 2.0**24).view(np.float32) == 2.0**24).all()


def test_the_f32_chain_starts_with_k_0():
    f32 = bind_mfma("v_mfma_f32_16x16x4_f32", {})
    by_k = np.repeat(np.array([2.0**25, 1.0, 1.0, -(2.0**25)], np.float32), 16)[None]
    ones = np.ones((1, 64), np.float32)
    d = f32.compute(by_k.view(np.uint32), ones.view(np.uint32), 0.0)
    assert (d == 0).all()  # both ones are lost
    d = f32.compute(by_k[:, ::-1].copy().view(np.uint32), ones.view(np.uint32), 2.0**25)
    assert (d.view(np.float32) == 2.0**25 + 2).all()  # -2**25 first


def test_f32_multiplies_and_adds_in_one_step():
    f32 = bind_mfma("v_mfma_f32_32x32x2_f32", {})
    a = np.zeros((1, 64), np.float32)
    a[0, :32] = 1 + 2.0**-12
    d = f32.compute(a.view(np.uint32), a.view(np.uint32), -1.0)
    assert (d.view(np.float32) == 2.0**-11 + 2.0**-24).all()  # the product was not rounded


def test_denormals_are_kept():
    a, b = bf16_operands(2.0**-133, 1.0)  # the smallest bfloat16 denormal
    assert (BF16.compute(a, b, 0).view(np.float32) == 2.0**-129).all()
    assert (BF16.compute(*bf16_operands(2.0**-80, 2.0**-70), 0) == 8).all()  # 16 products of 2**-150 are 2**-146
    assert (BF16.compute(*bf16_operands(2.0**-80, 2.0**-73), 0) == 1).all()
    assert (BF16.compute(*bf16_operands(2.0**-80, 2.0**-74), 0) == 0).all()  # 2**-150 is a tie
    f16 = bind_mfma("v_mfma_f32_16x16x16_f16", {})
    smallest = np.full((2, 64), 0x00010001, np.uint32)
    assert (f16.compute(smallest, smallest, 0).view(np.float32) == 2.0**-44).all()
    f32 = bind_mfma("v_mfma_f32_16x16x4_f32", {})
    denormal, ones = np.full((1, 64), 1, np.uint32), np.full((1, 64), 0x3F800000, np.uint32)
    assert (f32.compute(denormal, ones, 0) == 4).all()
    fp8 = bind_mfma("v_mfma_f32_16x16x32_fp8_bf8", {})
    smallest = np.full((2, 64), 0x01010101, np.uint32)
    assert (fp8.compute(smallest, smallest, 0).view(np.float32) == 32 * 2.0**-9 * 2.0**-16).all()


def test_zero_sums():
    negative_zero = np.full((2, 64), 0x80008000, np.uint32)
    _, ones = bf16_operands(0.0, 1.0)
    c = np.full((4, 64), 0x80000000, np.uint32)
    assert (BF16.compute(negative_zero, ones, c) == 0).all()
    f32 = bind_mfma("v_mfma_f32_16x16x4_f32", {})
    a, b = np.full((1, 64), 0x80000000, np.uint32), np.full((1, 64), 0x3F800000, np.uint32)
    assert (f32.compute(a, b, c) == 0x80000000).all()  # IEEE 754: -0 + -0
    assert (f32.compute(a, b, 0.0) == 0).all()


def test_infinity_and_nan():
    infinite, ones = bf16_operands(math.inf, 1.0)
    assert (BF16.compute(infinite, ones, 0).view(np.float32) == np.inf).all()
    assert (BF16.compute(infinite, ones ^ 0x80008000, 5.0).view(np.float32) == -np.inf).all()
    assert (BF16.compute(infinite, np.zeros_like(ones), 0) == NAN).all()  # infinity times zero
    assert (BF16.compute(infinite, ones, -math.inf) == NAN).all()  # infinity minus infinity
    assert (BF16.compute(ones, ones, np.full((4, 64), 0xFF800001, np.uint32)) == NAN).all()  # a signaling NaN in C
    huge, _ = bf16_operands(2.0**127, 1.0)
    assert (BF16.compute(huge, ones, 0).view(np.float32) == np.inf).all()  # the sum overflows
    # NaN in one row of A (row 5, held by lane 16 + 5) stays in that row.
    a = ones.copy()
    a[1, 21] = 0x3F807FC1
    d = BF16.compute(a, ones, 0)
    rows = np.array([[4 * (lane // 16) + register for lane in range(64)] for register in range(4)])
    np.testing.assert_array_equal(d, np.where(rows == 5, np.uint32(NAN), np.float32(16).view(np.uint32)))
    for mnemonic, code in (("fp8", 0xFF), ("bf8", 0x7E)):
        op = bind_mfma(f"v_mfma_f32_16x16x32_{mnemonic}_{mnemonic}", {})
        assert (op.compute(np.full((2, 64), code * 0x01010101, np.uint32), np.zeros((2, 64), np.uint32), 0) == NAN).all()
    op = bind_mfma("v_mfma_f32_16x16x32_bf8_bf8", {})
    d = op.compute(np.full((2, 64), 0xFCFCFCFC, np.uint32), np.full((2, 64), 0x3C3C3C3C, np.uint32), 0)
    assert (d.view(np.float32) == -np.inf).all()
    f32 = bind_mfma("v_mfma_f32_16x16x4_f32", {})
    nan = np.full((1, 64), 0xFFFFFFFF, np.uint32)
    assert (f32.compute(nan, nan, 0) == NAN).all()


def test_largest_values():
    fp8 = bind_mfma("v_mfma_f32_32x32x64_f8f6f4", {})
    largest = np.full((8, 64), 0x7E7E7E7E, np.uint32)
    assert (fp8.compute(largest, largest, 0).view(np.float32) == 64 * 448.0**2).all()
    fp6 = bind_mfma("v_mfma_f32_32x32x64_f8f6f4", {"cbsz": 2, "blgp": 3})
    ones = np.full((6, 64), 0xFFFFFFFF, np.uint32)
    assert (fp6.compute(ones, ones, 0).view(np.float32) == 64 * 7.5 * 28).all()  # -7.5 times -28


# Several waves


@pytest.mark.parametrize("form", ["f32_32x32x16_bf16", "f32_16x16x4_f32", "i32_32x32x32_i8", "f64_16x16x4_f64"])
def test_waves_do_not_mix(form):
    op = bind_mfma(f"v_mfma_{form}", {})
    rng = np.random.default_rng(0)
    kind = form.rsplit("_", 1)[1]
    for waves in (3, 19):
        lanes = 64 * waves
        a, b = (random_registers(rng, kind, count, lanes) for count in (op.a_registers, op.b_registers))
        c = random_registers(rng, {"bf16": "f32"}.get(kind, kind), op.c_registers, lanes)
        d = op.compute(a, b, c)
        d_constant = op.compute(a, b, 0)
        for wave in range(waves):
            part = slice(64 * wave, 64 * wave + 64)
            np.testing.assert_array_equal(d[:, part], op.compute(a[:, part].copy(), b[:, part].copy(), c[:, part].copy()))
            np.testing.assert_array_equal(d_constant[:, part], op.compute(a[:, part], b[:, part], 0))


def test_scaled_waves_do_not_mix():
    op = bind_mfma("v_mfma_scale_f32_16x16x128_f8f6f4", {"cbsz": 4, "op_sel_hi": (1, 0, 0)})
    rng = np.random.default_rng(0)
    lanes = 64 * 11
    a, b = random_registers(rng, "fp4", 4, lanes), random_registers(rng, "fp8", 8, lanes)
    scales = [rng.integers(0x78787878, 0x88888888, lanes, dtype=np.uint32) & 0x8F8F8F8F for _ in "ab"]
    d = op.compute(a, b, 0.0, *scales)
    for wave in range(11):
        part = slice(64 * wave, 64 * wave + 64)
        np.testing.assert_array_equal(d[:, part], op.compute(a[:, part], b[:, part], 0.0, *(scale[part] for scale in scales)))


def test_remembered_operands_are_compared_whole():
    """Between two executions, one word or one scale changes in place. The emulator must not reuse the decoded operands."""
    op = bind_mfma("v_mfma_scale_f32_16x16x128_f8f6f4", {"cbsz": 4, "blgp": 4})
    ones, a = np.full((4, 64), 0x22222222, np.uint32), np.zeros((4, 64), np.uint32)
    unit, scale = np.full(64, 127, np.uint32), np.full(64, 127, np.uint32)
    assert (op.compute(a, ones, 0, scale, unit) == 0).all()
    for word in ((0, 1), (1, 40), (3, 62)):
        a[word] = 0x22222222  # eight ones in row lane % 16
        d = op.compute(a, ones, 0, scale, unit).view(np.float32)
        row = word[1] % 16
        assert (d[row % 4, 16 * (row // 4) : 16 * (row // 4) + 16] == 8).all()
        assert np.count_nonzero(d) == 16
        scale[word[1] // 16 * 16 + row] = 130
        np.testing.assert_array_equal(op.compute(a, ones, 0, scale, unit).view(np.float32), 8 * d)
        a[word], scale[:] = 0, 127
    # Then execute with more operands than the emulator memoises, and with the first operands again.
    rng = np.random.default_rng(0)
    many = [random_registers(rng, "fp4", 4, 64) for _ in range(mfma._Recent.KEPT + 3)]
    first = [op.compute(x, ones, 0, unit, unit) for x in many]
    for x, d in zip(many, first, strict=True):
        np.testing.assert_array_equal(op.compute(x, ones, 0, unit, unit), d)


def test_operations_are_immutable():
    with pytest.raises(AttributeError):
        BF16.k = 4
    assert replace(BF16, passes=5).passes == 5


def test_llvm_takes_these_forms_with_these_registers():
    """LLVM's assembler checks the size of every operand of every gfx950 instruction."""
    compiler = pytest.importorskip("triton.backends.amd.compiler")
    assemble = getattr(compiler, "assemble_amdgcn", None)
    if assemble is None:
        pytest.skip("this Triton has no assembler that takes text")
    lines = []
    for form in DENSE:
        op = bind_mfma(form[0], {})
        lines.append(f"{form[0]} {_operands(op)}")
    for mnemonic, _, _, a, b in F8F6F4:
        cbsz, blgp = FORMATS.index(a), FORMATS.index(b)
        op = bind_mfma(mnemonic, {"cbsz": cbsz, "blgp": blgp})
        lines.append(f"{mnemonic} {_operands(op)}{', v2, v3' if 'scale' in mnemonic else ''} cbsz:{cbsz} blgp:{blgp}")
    text = '.amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n.text\n' + "\n".join(lines) + "\n"
    assert len(assemble(text, "gfx950", "")) > 8 * len(lines)


def _operands(op: mfma.MatrixOp) -> str:
    def span(first: int, count: int) -> str:
        return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"

    return ", ".join([span(64, op.c_registers), span(4, op.a_registers), span(16, op.b_registers), span(32, op.c_registers)])
