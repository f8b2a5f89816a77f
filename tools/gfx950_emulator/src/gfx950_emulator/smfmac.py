"""Sparse MFMA instructions: V_SMFMAC_*, D += A B, where A has two elements of every four along k.

A holds only these elements, in order, and so has K / 2 per row. Another register holds their positions, 2 bits per element.

Element layout
--------------
As for MFMAs (`gfx950_emulator.mfma`), lane l belongs to group g = l // S, and holds row i = l % S of A and column j = l % S of B.

- A: a lane holds E = K / 2 / G elements, packed from bit 0 of its first register upwards. Element e is stored element
  c = g E + e of the row, and belongs to k = 4 (c // 2) .. 4 (c // 2) + 3.
- Positions: bits 2 e and 2 e + 1 of the lane's set are the position of its element e in the four k. A set has 2 E bits. If the
  modifier cbsz is 0, abid selects one of the 32 / (2 E) sets of the register; otherwise it is the first set.
- B: a lane holds K / G elements. In 4 registers, k = g K/G + 0, 1, 2, ... In 8 registers, the first four hold the lower half of K
  and the last four the upper half, each in this way.
- D: as for MFMAs.

Sources: AMD's Matrix Instruction Calculator (github.com/ROCm/amd_matrix_instruction_calculator) for the forms that CDNA3 has. For
the forms with 8 registers of B, which CDNA4 added: one-hot products measured on gfx950 for 16x16x64_f16 and 16x16x128_fp8_fp8
(GFX950 SMFMAC Sparse Trick Notes, published with a benchmark of matrix kernels); 32x32 forms follow the same rule. The positions of
the two elements of a group should differ; with equal positions, both are multiplied by the same element of B here.

The arithmetic is that of MFMAs. Passes: LLVM SISchedule.td, SIDPGFX942FullSpeedModel: 4 for 16x16 and 8 for 32x32; on gfx950 a form
with twice the K has twice the rate, like the dense one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gfx950_emulator.architecture import GFX950, Architecture
from gfx950_emulator.constants import WAVE
from gfx950_emulator.formats import Format
from gfx950_emulator.mfma import canonical, in_registers

_MNEMONIC = re.compile(r"v_smfmac_[fi]32_(?P<size>\d+)x\d+x(?P<k>\d+)_(?P<types>\w+)")
_K = {2: {16: 32, 32: 16}, 1: {16: 64, 32: 32}}  # bytes of an element, size of D -> K of CDNA3's forms
_BYTES = {"f16": 2, "bf16": 2, "i8": 1, "bf8_bf8": 1, "bf8_fp8": 1, "fp8_bf8": 1, "fp8_fp8": 1}
MNEMONICS = tuple(
    f"v_smfmac_{'i32' if types == 'i8' else 'f32'}_{size}x{size}x{factor * _K[octets][size]}_{types}"
    for types, octets in _BYTES.items()
    for size in (16, 32)
    for factor in (1, 2)
)
"""All sparse MFMAs. Those with twice the K of CDNA3's forms exist on CDNA4 only."""


@dataclass(frozen=True)
class SparseOp:
    """A sparse MFMA with its modifiers, ready to execute.

    Attributes:
        mnemonic, m, n, k: as written.
        a_registers, b_registers, c_registers: number of 32-bit registers of an operand; C is D's old value.
        flops: operations per wave, m n k, half of those of a dense product.
        passes: time in the matrix core, in passes of 4 clock cycles.
    """

    mnemonic: str
    m: int
    n: int
    k: int
    a_registers: int
    b_registers: int
    c_registers: int
    flops: int
    passes: int
    a_type: Format | str
    b_type: Format | str
    first_bit: int

    def compute(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns D.

        Args:
            a, b, c: uint32 [registers, 64 * waves].
            positions: uint32 [64 * waves], the register with the positions.
        """
        size = self.m
        stored = _elements(a, self.a_type)
        shifts = np.uint32(self.first_bit) + np.uint32(2) * np.arange(stored.shape[1], dtype=np.uint32)
        place = _by_k((positions[:, None] >> shifts & np.uint32(3)).astype(np.int64), size)
        values = _by_k(stored, size)
        k = 4 * (np.arange(values.shape[2]) // 2) + place
        columns = _by_k(_elements(b, self.b_type), size, chunks=self.b_registers // 4).transpose(0, 2, 1)
        with np.errstate(all="ignore"):
            selected = columns[np.arange(len(columns))[:, None, None], k]  # [wave, row, stored element, column]
            matrix = in_registers(np.matmul(values[:, :, None], selected)[:, :, 0], size)
            if self.a_type == "i8":
                return matrix.astype(np.int32, order="C").reshape(c.shape).view(np.uint32) + c
            result = np.empty(c.shape, np.float32)
            addend = c.view(np.float32).reshape(matrix.shape)
            np.add(matrix, addend, out=result.reshape(matrix.shape), casting="same_kind", dtype=np.float64)
            return canonical(result)


def _elements(raw: np.ndarray, kind: Format | str) -> np.ndarray:
    """Converts an operand's registers to float64 [64 * waves, elements], in the order of the registers' bits."""
    words = np.ascontiguousarray(raw.T)
    if isinstance(kind, Format):
        return kind.values.astype(np.float64).take(words.view(np.uint8))
    if kind == "bf16":
        return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return words.view({"f16": np.float16, "i8": np.int8}[kind]).astype(np.float64)


def _by_k(elements: np.ndarray, size: int, chunks: int = 1) -> np.ndarray:
    """Arranges lanes' elements, [64 * waves, elements], as [waves, size, k]. With ``chunks`` > 1 a lane's elements are divided into
    that many chunks; chunk c of every lane group precedes chunk c + 1."""
    parts = elements.reshape(-1, WAVE // size, size, chunks, elements.shape[1] // chunks)
    return np.ascontiguousarray(parts.transpose(0, 2, 3, 1, 4)).reshape(len(parts), size, -1)


def bind_smfmac(mnemonic: str, modifiers: Mapping[str, Any], architecture: Architecture = GFX950) -> SparseOp:
    """Returns the sparse MFMA with this mnemonic. Arguments: `mfma.bind_mfma`.

    Raises:
        ValueError: the instruction is no sparse MFMA of the architecture, or a modifier does not apply.
    """
    match = _MNEMONIC.fullmatch(mnemonic)
    if match is None or mnemonic not in MNEMONICS:
        raise ValueError(f"{mnemonic}: not a sparse matrix instruction that is known here")
    size, k, types = int(match["size"]), int(match["k"]), match["types"]
    width = 8 * _BYTES[types]
    kinds: tuple[Format | str, Format | str] = (types, types)
    if "8_" in types:
        first, second = types.split("_")
        kinds = architecture.formats[first], architecture.formats[second]
    groups = WAVE // size
    stored = k // 2 // groups
    sets = 32 // (2 * stored)
    cbsz, abid = int(modifiers.get("cbsz", 0)), int(modifiers.get("abid", 0))
    unknown = set(modifiers) - {"cbsz", "abid"}
    if unknown or abid >= 16 or cbsz >= 8:
        raise ValueError(f"{mnemonic}: modifiers {dict(modifiers)} are not implemented for it")
    first_bit = 2 * stored * (abid % sets) if cbsz & 3 == 0 else 0
    return SparseOp(
        mnemonic, size, size, k, stored * width // 32, 2 * stored * width // 32, size * size // WAVE, size * size * k,
        4 if size == 16 else 8, *kinds, first_bit,
    )  # fmt: skip
