"""MFMA instructions: V_MFMA_* and V_MFMA_SCALE_* with one block, D = A B + C on matrices distributed over a wave's lanes.

Registers are passed as uint32 [registers, 64 * waves], with the lanes of a wave adjacent. All waves compute at once, and all lanes
take part. The caller handles EXEC.

Element layout
--------------
Let S be M (= N, 16 or 32) and G = 64 / S the number of lane groups. Lane l belongs to group g = l // S.

- A[i][k]: lane l holds row i = l % S. B[k][j]: lane l holds column j = l % S, its k exactly as for A.
- k: a lane holds K / G elements, packed from bit 0 of its first register upwards. The k of these elements are consecutive: k = g
  K/G + 0, 1, 2, ... The exception is fp8 and bf8 in the f8f6f4 instructions, where a lane holds 32 bytes in two chunks of 16 from
  the two halves of K: registers 0 to 3 hold k = 16 g + 0..15, registers 4 to 7 hold k = K/2 + 16 g + 0..15. fp6, bf6 and fp4 are
  consecutive there too, 32 elements in 6 or 4 registers; 6-bit elements straddle registers.
- C and D (32 bits): register r, lane l is row 8 (r // 4) + 4 g + r % 4 for S = 32 and 4 g + r for S = 16, column l % S.
- C and D of f64: registers 2v and 2v + 1 are row 4 v + g, column l % 16.
- Scales: lane l's byte belongs to row (or column) l % S and to k = 32 g .. 32 g + 31, whatever the format. Byte ``op_sel[0] + 2 *
  op_sel_hi[0]`` of A's scale register, and byte ``op_sel[1] + 2 * op_sel_hi[1]`` of B's, hold the scale.

Sources of the layouts, and how they were checked:

- The 17 forms that CDNA3 also has (f32, f64, f16 and bf16 with 2 registers, fp8, i8 with 2 registers): AMD's Matrix Instruction
  Calculator (github.com/ROCm/amd_matrix_instruction_calculator). The maps in the tests were compared with its output for CDNA3,
  every element of A, B and D. AMD's article "Matrix Core Programming on AMD CDNA3 and CDNA4" (rocm.blogs.amd.com) has HIP code for
  f32 32x32x2, f16 16x16x16 and fp8 32x32x16 that agrees.
- f16 and bf16 32x32x16 and 16x16x32, i8 32x32x32 and 16x16x64, which are new: the layouts follow the same rule, and Triton 3.9's
  layouts (`DotOperandLayout` with k_width 8 and 16). A and B have the same order of k, so the result D does not depend on that
  order.
- f8f6f4: the same article for fp8 and fp4 with 32x32x64, the tables in Composable Kernel's hardware test ``mx_mfma_op.hpp`` for
  fp8 and fp4 with both shapes, and Triton's layouts (`DotOperandLayout`, `get_mfma_scale_layout`) for both, scales included.
  The tests build registers from Triton's layouts, and compare with a plain matmul of fp8 and fp4. This determines the order of k of
  one format relative to the other, and to the scales. fp6 and bf6 follow the vendor's emulator (rocjitsu in
  github.com/ROCm/rocm-systems, ``mma/layout.h``) only.
- op_sel: LLVM (Triton 3.9's) prints ``op_sel:[i & 1, ...] op_sel_hi:[i >> 1, ...]`` for byte i of its intrinsic, and its assembler
  encodes an omitted op_sel or op_sel_hi as 0.

Arithmetic
----------
- Element products are exact. bf16, f16 and all smaller formats: the products of one instruction and C are added in float64 and
  rounded to float32 once, to nearest even. Hardware rounds more often. On CDNA3 the sum runs in groups of 8 (16-bit) or 16 (8-bit)
  products, aligned to the largest and truncated to 24 fractional bits (arXiv:2511.10909, MMA-Sim). For CDNA4, nothing similar is
  published. Results may differ from hardware in the last bits. Intermediate overflow is not modelled: bf16 products beyond 2**128
  that cancel give a finite number here.
- f32: a chain of fused multiply-adds, k = 0 first, each rounded to float32 (MMA-Sim's finding for CDNA3). The product is exact in
  float64, but the sum is rounded to float64 and then to float32. If the first rounding gives a value halfway between two float32
  values, the second may go the wrong way. At most about one addition in 2**29 differs from a fused multiply-add in this way.
- f64: the same chain, but numpy has no fused multiply-add, so products are rounded to float64 first.
- i8: exact, accumulators wrap around at 32 bits.
- Scales are applied before C is added; scale 0 is 2**-127, and scale 255 makes the whole row or column NaN.
- Denormals are kept, of inputs and outputs, whatever MODE says (MMA-Sim for CDNA3; CDNA2 flushed them).
- NaN and infinity follow IEEE 754. Every NaN of a float32 result is 0x7FC00000. A sum that is zero is +0. In the f32 and f64
  chains, a zero sum has the sign of IEEE 754.

Passes
------
`MatrixOp.passes` counts passes of 4 clock cycles (`gfx950_emulator.architecture`, from llvm/lib/Target/AMDGPU/SISchedule.td); AMD's
article above gives four times the same numbers as cycles. f8f6f4 takes twice as long if either operand has 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gfx950_emulator.architecture import GFX950, Architecture
from gfx950_emulator.constants import WAVE
from gfx950_emulator.formats import BF6, BF8, E8M0, FP4, FP6, FP8, Format

_F8F6F4 = {0: FP8, 1: BF8, 2: FP6, 3: BF6, 4: FP4}
_WIDTHS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16, "i8": 8}

_MNEMONIC = re.compile(
    r"v_mfma_(?P<scale>scale_)?(?P<result>f32|i32|f64)_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_?(?:(?P<blocks>\d+)b_)?"
    r"(?P<types>f8f6f4|(?:fp8|bf8)_(?:fp8|bf8)|x?f32|bf16|f16|f64|i8)(?:_1k)?(?:_e64)?"
)

Compute = Callable[..., np.ndarray]


@dataclass(frozen=True)
class MatrixOp:
    """An MFMA instruction with its modifiers, ready to execute.

    Attributes:
        mnemonic: as written.
        m, n, k, blocks: sizes of the matrices, and number of matrices (blocks), which is 1.
        a_registers, b_registers, c_registers: number of 32-bit registers of an operand; D has the same number as C.
        flops: operations per wave, 2 m n k blocks. Integer forms count in the same way.
        passes: time in the matrix core, in passes of 4 clock cycles.
        compute: ``compute(a, b, c, scale_a=None, scale_b=None)`` returns D.

            a, b: uint32 [a_registers or b_registers, 64 * waves].
            c: uint32 [c_registers, 64 * waves], or an inline constant: a Python float is a value, a Python int is bits.
            scale_a, scale_b: uint32 [64 * waves], only for v_mfma_scale_*. `compute` selects the scale's byte in these registers.
            Returns uint32 [c_registers, 64 * waves]. Operands are not changed. Raises ValueError for wrong shapes.
    """

    mnemonic: str
    m: int
    n: int
    k: int
    blocks: int
    a_registers: int
    b_registers: int
    c_registers: int
    flops: int
    passes: int
    compute: Compute


def bind_mfma(mnemonic: str, modifiers: Mapping[str, object], architecture: Architecture = GFX950) -> MatrixOp:
    """Returns the MFMA instruction with this mnemonic.

    Args:
        mnemonic: any spelling that LLVM's assembler takes: ``v_mfma_f32_16x16x16_bf16``, ``v_mfma_f32_16x16x16bf16_1k``.
        modifiers: as written: ``cbsz`` and ``blgp`` (formats of A and B of f8f6f4), ``op_sel`` and ``op_sel_hi`` (scale bytes).
            All others must be 0.
        architecture: determines which MFMAs exist, their time, and the encodings of fp8 and bf8.

    Raises:
        ValueError: the instruction is no MFMA of the architecture, or has several blocks, or a modifier does not apply.
    """
    match = _MNEMONIC.fullmatch(mnemonic)
    if match is None:
        raise ValueError(f"{mnemonic}: not a matrix instruction that is known here")
    size, k, types = int(match["m"]), int(match["k"]), match["types"]
    if match["blocks"] or int(match["n"]) != size or size == 4:
        raise ValueError(f"{mnemonic}: only matrix instructions with one block are implemented, of 16x16 or 32x32")
    kind = "8-bit" if "8_" in types else types
    passes = architecture.passes.get((match["result"], size, k, kind))
    if passes is None or (match["scale"] and kind != "f8f6f4"):
        raise ValueError(f"{mnemonic}: {architecture.name} has no such instruction")

    given = {name: value for name, value in modifiers.items() if (any(value) if isinstance(value, tuple | list) else value)}
    scale_bytes: tuple[int, int] | None = None
    form_a: Format | None = None
    form_b: Format | None = None
    if kind == "f8f6f4":
        form_a = _format(mnemonic, "cbsz", given.pop("cbsz", 0))
        form_b = _format(mnemonic, "blgp", given.pop("blgp", 0))
        if form_a.bits == 8 or form_b.bits == 8:
            passes *= 2
        if match["scale"]:
            scale_bytes = _scale_bytes(mnemonic, given.pop("op_sel", ()), given.pop("op_sel_hi", ()))
    elif kind == "8-bit":
        form_a, form_b = (architecture.formats[name] for name in types.split("_"))
    if given:
        listed = ", ".join(f"{name}:{value}" for name, value in given.items())
        raise ValueError(f"{mnemonic}: modifiers {listed} are not implemented for it")

    groups = WAVE // size
    a_registers, b_registers = (k // groups * (form.bits if form else _WIDTHS[types]) // 32 for form in (form_a, form_b))
    c_registers = size * size // WAVE * (2 if types == "f64" else 1)
    if kind == "f32":
        compute = _chain_f32(size, k)
    elif kind == "f64":
        compute = _chain_f64(k)
    else:
        unpack_a = _unpacker(form_a or types, size, a_registers, scale_bytes and scale_bytes[0])
        unpack_b = _unpacker(form_b or types, size, b_registers, scale_bytes and scale_bytes[1])
        compute = (_product_i8 if kind == "i8" else _product)(size, unpack_a, unpack_b)
    # Temporary arrays of up to 64 KiB stay in the CPU cache, and malloc keeps them instead of returning them to the system.
    at_once = max(1, 8192 // (size * max(size, k)))
    checked = _checked(compute, mnemonic, (a_registers, b_registers, c_registers), scale_bytes is not None, at_once)
    flops = 2 * size * size * k
    return MatrixOp(mnemonic, size, size, k, 1, a_registers, b_registers, c_registers, flops, passes, checked)


def _format(mnemonic: str, modifier: str, value: Any) -> Format:
    form = _F8F6F4.get(value)
    if form is None:
        raise ValueError(f"{mnemonic}: {modifier}:{value} is no format; 0 to 4 are fp8, bf8, fp6, bf6, fp4")
    return form


def _scale_bytes(mnemonic: str, op_sel: Any, op_sel_hi: Any) -> tuple[int, int]:
    """Returns which byte of the scale registers is selected, for A and for B."""
    low, high = ([*given, 0, 0, 0][:3] for given in (op_sel, op_sel_hi))
    if not {*low, *high} <= {0, 1} or low[2] or high[2]:
        raise ValueError(f"{mnemonic}: op_sel and op_sel_hi select bytes of two scales by 0 and 1, got {op_sel} and {op_sel_hi}")
    return low[0] + 2 * high[0], low[1] + 2 * high[1]


def _checked(compute: Compute, mnemonic: str, registers: tuple[int, int, int], scaled: bool, at_once: int) -> Compute:
    """Wraps `compute`: checks the operands' shapes, and calls it for `at_once` waves at a time."""
    a_registers, b_registers, c_registers = registers
    step = at_once * WAVE

    def checked(
        a: np.ndarray,
        b: np.ndarray,
        c: Any,
        scale_a: np.ndarray | None = None,
        scale_b: np.ndarray | None = None,
    ) -> np.ndarray:
        lanes = a.shape[1]
        if a.shape[0] != a_registers or lanes % WAVE:
            raise ValueError(f"{mnemonic}: a: expected shape [{a_registers}, 64 * waves], got {list(a.shape)}")
        if b.shape != (b_registers, lanes):
            raise ValueError(f"{mnemonic}: b: expected shape [{b_registers}, {lanes}], got {list(b.shape)}")
        constant = type(c) is not np.ndarray
        if not constant and c.shape != (c_registers, lanes):
            raise ValueError(f"{mnemonic}: c: expected shape [{c_registers}, {lanes}], got {list(c.shape)}")
        scales: tuple[Any, ...] = (scale_a, scale_b) if scaled else ()
        if not scaled and (scale_a is not None or scale_b is not None):
            raise ValueError(f"{mnemonic} takes no scales")
        for name, scale in zip("ab", scales):  # noqa: B905 (there may be none)
            if scale is None or scale.shape != (lanes,):
                got = None if scale is None else list(scale.shape)
                raise ValueError(f"{mnemonic}: scale_{name}: expected shape [{lanes}], got {got}")
        if lanes <= step:
            return compute(a, b, c, *scales)
        result = np.empty((c_registers, lanes), np.uint32)
        for first in range(0, lanes, step):
            some = slice(first, first + step)
            addend = c if constant else c[:, some]
            result[:, some] = compute(a[:, some], b[:, some], addend, *(scale[some] for scale in scales))
        return result

    return checked


# Registers to matrices
#
# Both operands become float64 [waves, size, K], rows of A and columns of B, in the same order of k. Formats of up to 8 bits are
# gathered word by word into that order and converted by table lookup. 16-bit formats (and i8) are converted in place, with the row
# or column innermost, which is cheaper for them. Their k axis consists of, from outermost to innermost, the position in the word,
# the register, and the lane group.

Unpack = Callable[[np.ndarray], np.ndarray]


@lru_cache(maxsize=128)
def _gather(registers: int, waves: int, size: int, chunks: int) -> np.ndarray:
    """Returns the indices of an operand's words, int64 [waves, size, words of a row or column] in the order of k.

    With ``chunks`` > 1 a lane's registers are divided into that many chunks; chunk c of every lane group precedes chunk c + 1.
    """
    groups = WAVE // size
    flat = np.arange(registers * waves * WAVE).reshape(chunks, registers // chunks, waves, groups, size)
    index = np.ascontiguousarray(flat.transpose(2, 4, 0, 3, 1)).reshape(waves, size, groups * registers)
    index.setflags(write=False)
    return index


@lru_cache(maxsize=8)
def _by_byte(form: Format) -> np.ndarray:
    """Returns the float64 value of each byte of an 8-bit format; for fp4, the two values of a byte as complex128, low nibble
    first.
    """
    values: np.ndarray = form.values.astype(np.float64)
    if form.bits == 4:
        byte = np.arange(256)
        values = np.stack([values[byte & 15], values[byte >> 4]], axis=1).view(np.complex128).reshape(-1)
    return values


def _narrow_unpacker(form: Format, size: int, registers: int) -> Unpack:
    """Returns the function that unpacks operands in fp8, bf8, fp6, bf6 or fp4."""
    table = _by_byte(form)
    chunks = 2 if registers == 8 else 1  # fp8 and bf8 operands of f8f6f4

    def octets(raw: np.ndarray) -> np.ndarray:
        """Returns the bytes of each row or column: uint8 [waves, size, bytes]."""
        return raw.reshape(-1)[_gather(registers, raw.shape[1] // WAVE, size, chunks)].view(np.uint8)

    def unpack_6(raw: np.ndarray) -> np.ndarray:
        of_row = octets(raw)
        three = of_row.reshape(*of_row.shape[:2], -1, 3).astype(np.uint32)  # three bytes hold four elements
        word = three[..., 0] | three[..., 1] << np.uint32(8) | three[..., 2] << np.uint32(16)
        codes = word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & np.uint32(63)
        return table.take(codes.reshape(*of_row.shape[:2], -1))

    return unpack_6 if form.bits == 6 else lambda raw: table.take(octets(raw)).view(np.float64)


def _wide_unpacker(types: str, size: int) -> Unpack:
    """Returns the function that unpacks operands in bf16, f16 or i8."""
    dtype, per_word = {"bf16": (np.uint16, 2), "f16": (np.float16, 2), "i8": (np.int8, 4)}[types]

    def unpack(raw: np.ndarray) -> np.ndarray:
        elements: np.ndarray = raw.view(dtype).reshape(len(raw), -1, WAVE, per_word).transpose(1, 3, 0, 2)
        if types == "bf16":
            upper = np.zeros((*elements.shape, 2), np.uint16)
            upper[..., 1] = elements
            elements = upper.view(np.float32)
        # A lane's index is (lane group, row). The lane group becomes the innermost part of the k axis.
        return elements.astype(np.float64, order="C").reshape(raw.shape[1] // WAVE, -1, size).transpose(0, 2, 1)

    return unpack


class _Recent:
    """Unpacks operands in narrow, scaled formats, and memoises the results.

    Kernels use every fragment of A and of B in several instructions. Unpacking a fragment costs far more than comparing it with
    cached fragments. v_mfma_scale_f32_16x16x128_f8f6f4 of fp4 with 4 waves takes a third of the time if both operands are cache
    hits.
    """

    KEPT = 32

    def __init__(self, unpack: Unpack, size: int, byte: int | None) -> None:
        self._unpack, self._size = unpack, size
        self._byte: Any = byte
        self._known: dict[tuple[int, ...], tuple[bytes, bytes, np.ndarray]] = {}

    def __call__(self, raw: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
        key = (raw.item(0), raw.item(raw.size // 2), raw.item(-1))  # a quick key; a hit also compares the whole operand
        content, factors = raw.tobytes(), b"" if scale is None else scale.tobytes()
        known = self._known.get(key)
        if known is not None and known[0] == content and known[1] == factors:
            return known[2]
        matrix = self._unpack(raw)
        if scale is not None:
            factor = _scales().take(scale >> np.uint32(8 * self._byte) & np.uint32(255))
            blocks = matrix.reshape(len(matrix), self._size, WAVE // self._size, 32)
            blocks *= factor.reshape(-1, WAVE // self._size, self._size).transpose(0, 2, 1)[..., None]
        while len(self._known) >= self.KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = content, factors, matrix
        return matrix


@lru_cache(maxsize=1)
def _scales() -> np.ndarray:
    return E8M0.astype(np.float64)


@lru_cache(maxsize=64)
def _unpacker(form: Format | str, size: int, registers: int, byte: int | None = None) -> Callable[..., np.ndarray]:
    """Returns a function that converts an operand's registers to float64 [waves, size, K]. If `byte` is given, the values are
    multiplied by the scales in that byte of the scale registers.
    """
    if isinstance(form, str):
        return _wide_unpacker(form, size)
    return _Recent(_narrow_unpacker(form, size, registers), size, byte)


def in_registers(matrix: np.ndarray, size: int) -> np.ndarray:
    """Returns a view of [waves, size, size] with the axes of 32-bit C and D registers: the first axes form the register's index r,
    the last axes the lane."""
    if size == 16:
        return matrix.reshape(-1, 4, 4, 16).transpose(2, 0, 1, 3)
    return matrix.reshape(-1, 4, 2, 4, 32).transpose(1, 3, 0, 2, 4)


def _addend(c: np.ndarray | float, dtype: type[np.floating]) -> np.ndarray | np.floating:
    """Returns C, an array of registers or an inline constant, as values of `dtype`."""
    if type(c) is np.ndarray:
        return c.view(dtype)
    if isinstance(c, int | np.integer):
        width = np.dtype(dtype).itemsize
        return np.array([int(c) & ((1 << 8 * width) - 1)], f"u{width}").view(dtype)[0]
    return dtype(c)


def canonical(result: np.ndarray) -> np.ndarray:
    """Returns the bits of a float32 result, with every NaN replaced by the canonical NaN."""
    flat = result.reshape(-1)
    squares = np.dot(flat, flat)
    if squares != squares:  # a sum of squares cannot cancel, so only a NaN makes it NaN
        result[np.isnan(result)] = np.nan
    return result.view(np.uint32)


# Arithmetic


def _product(size: int, unpack_a: Callable[..., np.ndarray], unpack_b: Callable[..., np.ndarray]) -> Compute:
    registers = size * size // WAVE

    def compute(a: np.ndarray, b: np.ndarray, c: Any, *scales: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            left = unpack_a(a, *scales[:1])
            right = unpack_b(b, *scales[1:])
            matrix = in_registers(np.matmul(left, right.transpose(0, 2, 1)), size)
            addend = _addend(c, np.float32)
            if addend.ndim:
                addend = addend.reshape(matrix.shape)
            result = np.empty((registers, a.shape[1]), np.float32)
            np.add(matrix, addend, out=result.reshape(matrix.shape), casting="same_kind", dtype=np.float64)
            return canonical(result)

    return compute


def _product_i8(size: int, unpack_a: Unpack, unpack_b: Unpack) -> Compute:
    registers = size * size // WAVE

    def compute(a: np.ndarray, b: np.ndarray, c: Any) -> np.ndarray:
        # A sum of at most 64 products below 2**15 is exact in float64.
        matrix = in_registers(np.matmul(unpack_a(a), unpack_b(b).transpose(0, 2, 1)), size)
        result = matrix.astype(np.int32, order="C").reshape(registers, -1).view(np.uint32)
        if type(c) is np.ndarray:
            result += c
        elif isinstance(c, int | np.integer):
            result += np.uint32(int(c) & 0xFFFFFFFF)
        else:
            result += np.float32(c).view(np.uint32)
        return result

    return compute


def _chain_f32(size: int, k: int) -> Compute:
    groups, registers = WAVE // size, size * size // WAVE

    def compute(a: np.ndarray, b: np.ndarray, c: Any) -> np.ndarray:
        waves = a.shape[1] // WAVE
        # [k, waves, row or column]: one element per lane, k is the lane group.
        left, right = (x.view(np.float32).reshape(waves, groups, size).transpose(1, 0, 2) for x in (a, b))
        with np.errstate(all="ignore"):
            wide = right.astype(np.float64)
            columns = wide.reshape(k, *(1,) * (1 if size == 16 else 2), waves, 1, size)
            rows = left.astype(np.float64).reshape(k, waves, *((4, 4) if size == 16 else (4, 2, 4)))
            rows = rows.transpose(0, 3, 1, 2)[..., None] if size == 16 else rows.transpose(0, 2, 4, 1, 3)[..., None]
            products = rows * columns
            total = _addend(c, np.float32)
            if total.ndim:
                total = total.reshape(products.shape[1:])
            result = np.empty((registers, a.shape[1]), np.float32)
            shaped = result.reshape(products.shape[1:])
            for product in products:
                np.add(product, total, out=shaped, casting="same_kind", dtype=np.float64)
                total = shaped
            return canonical(result)

    return compute


def _chain_f64(k: int) -> Compute:
    def doubles(raw: np.ndarray) -> np.ndarray:
        """Combines pairs of registers to float64 [registers / 2, lanes]."""
        return np.ascontiguousarray(raw.reshape(-1, 2, raw.shape[1]).transpose(0, 2, 1)).view(np.float64)[..., 0]

    def compute(a: np.ndarray, b: np.ndarray, c: Any) -> np.ndarray:
        waves = a.shape[1] // WAVE
        left, right = (doubles(x).reshape(waves, k, 16) for x in (a, b))
        rows = left.reshape(waves, k, 4, 4).transpose(1, 2, 0, 3)[..., None]  # k, row // 4, wave, row % 4
        columns = right.transpose(1, 0, 2)[:, None, :, None, :]
        total = doubles(c).reshape(4, waves, 4, 16) if type(c) is np.ndarray else _addend(c, np.float64)
        with np.errstate(all="ignore"):
            for step in range(k):
                total = rows[step] * columns[step] + total
        words = total.reshape(4, -1, 1).view(np.uint32)
        return np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(8, -1)

    return compute
