"""Tests sparse MFMAs against their definition, element by element.

The oracle places elements by maps from (row, k) to (lane, bit): the Matrix Instruction Calculator's for CDNA3's forms, and what was
measured on gfx950 for the forms with 8 registers of B (`gfx950_emulator.smfmac`).
"""

from __future__ import annotations

import math
import operator
from itertools import product

import numpy as np
import pytest

from gfx950_emulator import UnknownInstruction
from gfx950_emulator.architecture import GFX942, GFX950
from gfx950_emulator.smfmac import MNEMONICS, bind_smfmac
from gfx950_emulator.snippet import Snippet

from .test_mfma import BITS, decoded, expected_bits, place_c, random_registers

EIGHT = ["bf8_bf8", "bf8_fp8", "fp8_bf8", "fp8_fp8"]
# suffix of the mnemonic, size, K, whether CDNA3 has it, registers of A, B and C, passes
SHAPES = {
    "16": [(16, 32, True, 2, 4, 4, 4), (32, 16, True, 2, 4, 16, 8), (16, 64, False, 4, 8, 4, 4), (32, 32, False, 4, 8, 16, 8)],
    "8": [(16, 64, True, 2, 4, 4, 4), (32, 32, True, 2, 4, 16, 8), (16, 128, False, 4, 8, 4, 4), (32, 64, False, 4, 8, 16, 8)],
}
FORMS = [
    (f"v_smfmac_{'i32' if types == 'i8' else 'f32'}_{size}x{size}x{k}_{types}", types, size, k, *rest)
    for types in ["f16", "bf16", "i8", *EIGHT]
    for size, k, *rest in SHAPES["16" if types.endswith("f16") else "8"]
]
IDS = [form[0] for form in FORMS]


def place_stored(kind: str, size: int, total_k: int, row: int, stored: int) -> tuple[int, int]:
    """Returns the lane and the first bit of a stored element of a row of A."""
    per_lane = total_k * size // 128
    return stored // per_lane * size + row, stored % per_lane * BITS[kind]


def place_b(kind: str, size: int, total_k: int, column: int, k: int) -> tuple[int, int]:
    """Returns the lane and the first bit of element (k, column) of B."""
    per_lane = total_k * size // 64
    if per_lane * BITS[kind] == 128:
        return k // per_lane * size + column, k % per_lane * BITS[kind]
    half, rest = divmod(k, total_k // 2)
    return rest // (per_lane // 2) * size + column, 128 * half + rest % (per_lane // 2) * BITS[kind]


def lanes_of(registers: np.ndarray) -> list[int]:
    return [sum(int(word) << 32 * at for at, word in enumerate(registers[:, lane])) for lane in range(64)]


def kinds_of(types: str, fnuz: bool = False) -> tuple[str, str]:
    a, b = types.split("_") if "_" in types else (types, types)
    return (f"{a}_fnuz", f"{b}_fnuz") if fnuz and "_" in types else (a, b)


def dense_a(kind: str, size: int, total_k: int, a: np.ndarray, positions: np.ndarray, first_bit: int) -> list[list[float]]:
    """Returns the rows of A with its zeros."""
    lanes, mask = lanes_of(a), (1 << BITS[kind]) - 1
    rows = [[0.0] * total_k for _ in range(size)]
    for row, stored in product(range(size), range(total_k // 2)):
        lane, bit = place_stored(kind, size, total_k, row, stored)
        element = bit // BITS[kind]
        position = int(positions[lane]) >> (first_bit + 2 * element) & 3
        rows[row][stored // 2 * 4 + position] += decoded(kind, lanes[lane] >> bit & mask)
    return rows


def columns_of(kind: str, size: int, total_k: int, b: np.ndarray) -> list[list[float]]:
    lanes, mask = lanes_of(b), (1 << BITS[kind]) - 1
    places = [[place_b(kind, size, total_k, column, k) for k in range(total_k)] for column in range(size)]
    return [[decoded(kind, lanes[lane] >> bit & mask) for lane, bit in column] for column in places]


def random_positions(rng: np.random.Generator) -> np.ndarray:
    """Returns positions of which every two, from bit 0, are in ascending order: what compilers write."""
    pairs = np.array([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110], np.uint32)
    picked = pairs[rng.integers(0, 6, (8, 64))]
    return np.bitwise_or.reduce(picked << (4 * np.arange(8, dtype=np.uint32))[:, None], axis=0)


def expected(size: int, types: str, rows: list, columns: list, c: np.ndarray) -> np.ndarray:
    if types != "i8":
        return expected_bits(size, rows, columns, c.view(np.float32))
    result = np.zeros_like(c)
    for i, j in product(range(size), range(size)):
        register, lane = place_c(size, i, j)
        total = int(sum(map(operator.mul, rows[i], columns[j]))) + int(c[register, lane])
        result[register, lane] = total & 0xFFFFFFFF
    return result


def operands(rng: np.random.Generator, types: str, counts: tuple[int, int, int], fnuz: bool = False) -> list[np.ndarray]:
    a_kind, b_kind = kinds_of(types)
    a, b = random_registers(rng, a_kind, counts[0], 64), random_registers(rng, b_kind, counts[1], 64)
    if types == "i8":
        return [a, b, rng.integers(0, 2**32, (counts[2], 64), dtype=np.uint32)]
    if fnuz:
        for registers in (a, b):
            octets = registers.view(np.uint8)
            octets[octets == 0x80] = 0x35
    return [a, b, random_registers(rng, "f32", counts[2], 64)]


def test_the_forms_are_all_of_llvm() -> None:
    assert sorted(MNEMONICS) == sorted(IDS)


@pytest.mark.parametrize(("mnemonic", "types", "size", "k", "cdna3", "na", "nb", "nc", "passes"), FORMS, ids=IDS)
def test_products_are_those_of_the_definition(mnemonic, types, size, k, cdna3, na, nb, nc, passes) -> None:
    for architecture in (GFX942, GFX950) if cdna3 else (GFX950,):
        fnuz = architecture is GFX942
        rng = np.random.default_rng(size * k + na)
        operation = bind_smfmac(mnemonic, {}, architecture)
        assert (operation.a_registers, operation.b_registers, operation.c_registers, operation.passes) == (na, nb, nc, passes)
        assert operation.flops == size * size * k
        waves = [(*operands(rng, types, (na, nb, nc), fnuz), random_positions(rng)) for _ in range(2)]
        got = operation.compute(*(np.concatenate(part, axis=-1) for part in zip(*waves, strict=True)))
        a_kind, b_kind = kinds_of(types, fnuz)
        for at, (a, b, c, positions) in enumerate(waves):
            rows, columns = dense_a(a_kind, size, k, a, positions, 0), columns_of(b_kind, size, k, b)
            np.testing.assert_array_equal(got[:, 64 * at : 64 * at + 64], expected(size, types, rows, columns, c))


@pytest.mark.parametrize(
    ("mnemonic", "bits"),
    [("v_smfmac_f32_16x16x32_f16", 8), ("v_smfmac_f32_16x16x64_bf16", 16), ("v_smfmac_i32_32x32x32_i8", 16),
     ("v_smfmac_f32_16x16x128_fp8_fp8", 32)],
)  # fmt: skip
def test_abid_selects_the_set_of_positions(mnemonic: str, bits: int) -> None:
    """cbsz = 0: set abid of the register. Otherwise the first set, whatever abid is."""
    _, types, size, k, _, na, nb, nc, _ = FORMS[IDS.index(mnemonic)]
    rng = np.random.default_rng(1)
    a, b, c = operands(rng, types, (na, nb, nc))
    positions = random_positions(rng)
    a_kind, b_kind = kinds_of(types)
    columns = columns_of(b_kind, size, k, b)
    sets = 32 // bits
    cases = [({"abid": at}, at) for at in range(sets)] + [({"cbsz": 1, "abid": sets - 1}, 0), ({"abid": sets}, 0)]
    for modifiers, chosen in cases:
        got = bind_smfmac(mnemonic, modifiers).compute(a, b, c, positions)
        rows = dense_a(a_kind, size, k, a, positions, bits * chosen)
        np.testing.assert_array_equal(got, expected(size, types, rows, columns, c))


def test_elements_of_b_without_a_partner_do_not_count() -> None:
    """An infinity that no stored element of A selects changes nothing; a selected one makes the row infinite or NaN."""
    operation = bind_smfmac("v_smfmac_f32_16x16x32_f16", {})
    a = np.full((2, 64), 0x3C003C00, np.uint32)  # 1.0
    b = np.zeros((4, 64), np.uint32)
    b[0, 5] = 0x7C00  # k = 0 of column 5: infinity
    zero = np.zeros((4, 64), np.uint32)
    got = operation.compute(a, b, zero, np.full(64, 0b1110_1110, np.uint32)).view(np.float32)  # positions 2 and 3
    assert not got.any()
    got = operation.compute(a, b, zero, np.full(64, 0b0100_0100, np.uint32)).view(np.float32)  # positions 0 and 1
    assert all(math.isinf(got[r, 16 * g + 5]) for r, g in product(range(4), range(4)))
    assert np.isinf(got).sum() == 16


def test_as_an_instruction() -> None:
    """D is also C; registers of all lanes are written, whatever EXEC is."""
    rng = np.random.default_rng(3)
    a, b, c = operands(rng, "f16", (2, 4, 4))
    positions = random_positions(rng)
    snippet = Snippet(
        "s_mov_b64 exec, 1\nv_smfmac_f32_16x16x32_f16 v[0:3], v[4:5], v[6:9], v10 abid:1",
        v=dict(enumerate([*c, *a, *b, positions])),
    ).run()
    wanted = bind_smfmac("v_smfmac_f32_16x16x32_f16", {"abid": 1}).compute(a, b, c, positions)
    np.testing.assert_array_equal(np.stack([snippet.v(at) for at in range(4)]), wanted)


@pytest.mark.parametrize(
    ("line", "arch"),
    [
        ("v_smfmac_f32_16x16x32_f16 v[0:3], v[4:5], v[6:7], v8", "gfx950"),
        ("v_smfmac_f32_16x16x64_f16 v[0:3], v[4:7], v[8:15], v16", "gfx942"),
        ("v_smfmac_f32_16x16x32_f16 v[0:3], v[4:5], v[6:9], v10 blgp:1", "gfx950"),
    ],
)
def test_what_does_not_exist_is_an_error(line: str, arch: str) -> None:
    with pytest.raises(UnknownInstruction):
        Snippet(line, arch=arch).run()


@pytest.mark.parametrize("mnemonic", ["v_smfmac_f32_16x16x48_f16", "v_smfmac_i32_16x16x64_f16", "v_smfmac_f32_16x16x64_i8"])
def test_other_names_are_refused(mnemonic: str) -> None:
    with pytest.raises(ValueError, match="not a sparse matrix instruction"):
        bind_smfmac(mnemonic, {})
