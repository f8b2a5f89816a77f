"""GEMM of mxfp8, mxfp4 and fp8 operands on the scaled MFMA (16 x 16 x 128), and of few rows of nvfp4 and 16-bit floats (16 x 16 x
32).

Scales, by their granularity:

* e8m0 scales of 32 elements are operands of the MFMAs, so nothing is dequantised.
* Scales of tensors, tokens and channels multiply the accumulator.
* Float32 scales of 128 x 128 blocks multiply each step's partial sum, which is then added to the accumulator. With many rows, the
  VALU does this for one group of MFMAs while the next group executes. By the timing model, 2048 x 1024 x 2048 takes 3.3 us; it
  took 5.7 us with 8 waves, each of which waited for its MFMAs. Packed FMAs in inline assembly took 3.9 us, because the compiler
  cannot move them between the MFMAs of a group.
* The scaled MFMA has no e4m3 scales for 16 elements. So `nvfp4_device` multiplies nvfp4's codes by their scales in float16, which
  is exact.

Both operands are read as lines along k: rows of a, and columns of b. Other operands, such as a b whose rows are contiguous, are
copied first.

* LDS: a ring of blocks of k of both operands, filled by asynchronous copies. XORed addresses avoid bank conflicts without padding.
  A chunk of scales goes through registers to LDS, in the order in which MFMAs read it.
* Mainloop: one barrier per block of k. Behind it, the copy of a later block to LDS starts, and a wave reads its part of the block
  as MFMA operands.
* Few rows (at most 64): a tile has few columns, so that most CUs have one. Four waves divide each block of k, and add their
  accumulators at the end. L2 bandwidth limits a workgroup.
* Many rows: waves divide a tile of 128 x 128. The bandwidths of L2 and LDS and the rate of the MFMAs limit such a tile alike. If
  there are more tiles than CUs and k is short, a CU has two workgroups of 4 waves. Otherwise, it has one, whose waves read the next
  block of k from LDS during the MFMAs of a block. 8 waves would read 1.5 times as many bytes from LDS.

Split-K: if there are few tiles and k is long, several workgroups share a tile. Each writes a partial result in fp32. The last
workgroup to arrive at a counter adds them in the order of k. So there is one launch, and results are bitwise reproducible.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd._rows import deliver, rows, rows_to_write
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.gemm.operands import default_out_dtype, logical_k
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8, BLOCK_MX, BLOCK_NVFP4
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format, mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.ops.quantization.mx import MXFP8_DTYPES
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signature, format_signatures
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most, between, multiple_of
from tokenspeed_kernel_base.workspace import keeper

device = DeviceModule(__name__ + "_device")

XCDS = 8  # consecutive workgroups run on different XCDs
QUAD = 512  # a split's length along k is a multiple of this
MOST_K = 1 << 22
FURTHEST = 1 << 22  # elements from one line to the next: offsets within a tile of up to 128 lines have 32 bits
# The least number of blocks of k for which a CU has one workgroup that reads ahead. With fewer blocks, a CU has two workgroups: one
# computes while the other one begins or ends a tile. By the timing model, one workgroup instead of two takes 349 us instead of 399
# for 8192 x 8192 x 8192 in mxfp8 (64 blocks), and 24.1 us instead of 26.4 for 4096 x 2048 x 4096 (16 blocks); in mxfp4 (8 blocks),
# the latter takes 14.9 us instead of 14.2. With float32 block scales, one workgroup takes less time for any k: 4096 x 1024 x 4096
# takes 13.3 us instead of 13.8.
LONG_BLOCKS = 16
RING_BYTES = 144 * 1024  # LDS of the few-row tiles' ring
# The emulator's timing model: bandwidth of a CU, and the time to store, wait, arrive and reload the first partial result.
L2_BYTES_PER_CYCLE = 64
MERGE_CYCLES = 2000

SIGNATURES = frozenset(
    format_signature(a=a, b=b)
    for a in (mxfp4_format(), *map(mxfp8_format, MXFP8_DTYPES))
    for b in (mxfp4_format((BLOCK_MX, 1)), *(mxfp8_format(dtype, (BLOCK_MX, 1)) for dtype in MXFP8_DTYPES))
)
FP8_SIGNATURES = frozenset(
    format_signature(a=fp8_format(a, rows_of), b=fp8_format(b, columns_of))
    for a in MXFP8_DTYPES
    for b in MXFP8_DTYPES
    for rows_of in ("tensor", "token")
    for columns_of in ("tensor", "channel")
)
BLOCK_SIGNATURES = frozenset(
    format_signature(a=fp8_format(a, "block", (1, BLOCK_FP8)), b=fp8_format(b, "block", (BLOCK_FP8, BLOCK_FP8)))
    for a in MXFP8_DTYPES
    for b in MXFP8_DTYPES
)
FORMATS = {
    torch.uint8: "e2m1",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
DENSE_DTYPES = (torch.bfloat16, torch.float16)
PAIR_BYTES = {"e2m1": 1, "nvfp4": 1, "e4m3": 2, "e5m2": 2, "bf16": 4, "fp16": 4}
MOST_DENSE_ROWS = 64  # more rows are compute-bound, and vendor libraries compute them
# nvfp4: with more rows, conversions to 16 bits take longer than the MFMAs, which dequantised operands would not need.
MOST_NVFP4_ROWS = 64


class Config(NamedTuple):
    """The tile of a workgroup: compile-time constants.

    Attributes:
        block_m, block_n: rows and columns of the tile.
        block_k: elements of k per pipeline stage.
        waves_m, waves_n: numbers of waves along rows and columns.
        waves_k: number of waves that divide each block of k, and add their accumulators at the end. If it is not 1, waves_m and
            waves_n are 1.
        stages: pipeline stages: blocks of k in LDS.
        chunk: elements of k whose scales are in LDS, a multiple of block_k and of 512.
        waves_per_simd: the occupancy that the compiler allocates registers for. With 2, it uses no AGPRs: otherwise it would
            reserve half of the registers for them.
        parts_m, parts_n: numbers of parts of the rows and columns whose MFMAs alternate with copies and reads of later blocks of k;
            0: MFMAs of a block follow its reads.
        folds: number of slices of k that are further lines of the tile's operands. The result has a block for each pair of slices;
            the blocks of equal slices are added. Rows of an MFMA that would repeat few tokens then contain other slices of k.
    """

    block_m: int
    block_n: int
    block_k: int
    waves_m: int
    waves_n: int
    waves_k: int
    stages: int
    chunk: int
    waves_per_simd: int = 1
    parts_m: int = 0
    parts_n: int = 0
    folds: int = 1


class Operand(NamedTuple):
    """One operand as the kernel reads it.

    Attributes:
        codes: [lines, elements or bytes]; lines are rows of a or columns of b. 16-bit floats are viewed as uint8.
        scale: uint8 [lines, blocks of 32], or of 16 with nvfp4; float32 [lines, 1], or one float32 for all lines; float32 [blocks
            of lines, blocks of 128], where a block of a is one line, and a block of b has 128 lines; or None.
        alpha: of a in nvfp4: one float32, the factor of the result; otherwise None.
    """

    codes: Tensor
    scale: Tensor | None
    alpha: Tensor | None = None


class Partial(NamedTuple):
    """The splits' partial results.

    Attributes:
        results: float32 [tiles, splits, block_m * block_n], in the order of `result_device.fragment_offsets`.
        arrived: int32 [tiles], how many splits have stored their partial result; 0 before and after a launch.
    """

    results: Tensor
    arrived: Tensor


class Shape(NamedTuple):
    """Compile-time constants: sizes that are fixed by a model, formats and strides. Strides are in elements.

    Attributes:
        split_k: elements of k per split, a multiple of 512.
        splits: number of splits.
        ragged: whether a block of k ends beyond k.
        one_row: whether all rows are in one tile.
        scales: ``"mx"``: e8m0, for blocks of 32; ``"nvfp4"``: e4m3, for blocks of 16; ``"lines"``: float32, of a line, or of all
            lines with a stride of 0; ``"blocks"``: float32, for blocks of 128; ``"none"``.
        a_scale_words, b_scale_words: whether four one-byte scales can be loaded as one aligned word.
    """

    n: int
    k: int
    split_k: int
    splits: int
    ragged: bool
    one_row: bool
    scales: str
    a_format: str
    b_format: str
    a_stride: int
    b_stride: int
    a_scale_stride: int
    b_scale_stride: int
    a_scale_words: bool
    b_scale_words: bool
    out_stride: int


def config_of(m: int, n: int, compute_units: int, pair_bytes: int, block_scales: bool = False, k: int = 0) -> Config:
    """Selects the tile.

    Args:
        pair_bytes: bytes of two elements of the wider operand: 1 if both operands are mxfp4 or nvfp4, otherwise 2; 4 for 16-bit
            floats. 16-bit floats and nvfp4 have at most 64 rows.
        block_scales: whether blocks of 128 elements have float32 scales.
        k: elements along k.
    """
    if m <= 64:
        block_m = max(16, 1 << (m - 1).bit_length())
        # Three stages of 64 rows and 64 columns would not fit into LDS, nor would two rings of 64 columns of 16-bit floats.
        wide = 64 if block_m < 64 and pair_bytes < 4 else 32
        block_n = next((size for size in (16, 32) if n <= size * compute_units), wide)
        block_k = 256 if pair_bytes == 4 and block_m + block_n > 32 else 512
        stages = RING_BYTES // ((block_m + block_n) * block_k // 2 * pair_bytes)
        if n > block_n * compute_units and stages >= 6:
            stages //= 2  # two workgroups per CU: one copies while the other one ends a tile
        return Config(block_m, block_n, block_k, 1, 1, 4, min(8, stages), 4096)
    block_k = 256 // pair_bytes
    tiles = -(-m // 128) * -(-n // 128)
    if tiles > compute_units and not block_scales and k < LONG_BLOCKS * block_k:
        return Config(128, 128, block_k, 2, 2, 1, 2, 1024, 2)
    if 2 * tiles > compute_units:
        return Config(128, 128, block_k, 2, 2, 1, 4, 1024, parts_m=2, parts_n=4)
    return Config(64, 64, block_k, 2, 2, 1, 4, 1024)


def splits_of(config: Config, tiles: int, k: int, compute_units: int, pair_bytes: int) -> tuple[int, int]:
    """Returns the number of splits of k that takes the least time if L2 bandwidth limits a workgroup, and the splits' length."""
    quads = -(-k // QUAD)

    def cycles(splits: int) -> float:
        quad = (config.block_m + config.block_n) * QUAD // 2 * pair_bytes / L2_BYTES_PER_CYCLE
        merge = MERGE_CYCLES + splits * config.block_m * config.block_n * 4 / L2_BYTES_PER_CYCLE
        return -(-quads // splits) * quad + (merge if splits > 1 else 0)

    splits = min(range(1, max(1, min(compute_units // tiles, quads)) + 1), key=cycles)
    each = -(-quads // splits)
    return -(-quads // each), each * QUAD


def mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """See `tokenspeed_kernel_amd.mm`, which checks the arguments first."""
    m, n = a.shape[0], b.shape[1]
    written = rows_to_write(out if is_near(out) else None, a, m, n, dtype=out_dtype or default_out_dtype(a))
    if written.numel():
        of_columns = b_scale.mT if b_scale is not None and b_scale.ndim == 2 else b_scale
        operands = operand_of(a, a_scale), operand_of(b.mT, of_columns)
        launch(*operands, written, bias, logical_k(a), FORMATS[a.dtype], FORMATS[b.dtype])
    return deliver(written, out)


def mm_nvfp4(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """See `tokenspeed_kernel_amd.mm`, which checks the arguments first. Both operands are nvfp4."""
    m, n = a.shape[0], b.shape[1]
    written = rows_to_write(out if is_near(out) else None, a, m, n, dtype=out_dtype or default_out_dtype(a))
    if written.numel():
        operands = operand_of(a, a_scale)._replace(alpha=alpha), operand_of(b.mT, b_scale.mT)
        launch(*operands, written, bias, logical_k(a), "nvfp4", "nvfp4")
    return deliver(written, out)


_K: dict[str, Any] = {"k": between(BLOCK_MX, MOST_K) & multiple_of(BLOCK_MX)}
for _name, _signatures, _traits in (
    ("mx", SIGNATURES, {"k": between(BLOCK_MX, MOST_K)}),
    ("fp8", FP8_SIGNATURES, _K),
    ("fp8_block", BLOCK_SIGNATURES, _K),
    ("few", format_signatures(("a", "b"), "dense", DENSE_DTYPES), {**_K, "m": at_most(MOST_DENSE_ROWS)}),
):
    register_kernel(
        "gemm",
        "mm",
        name=f"gluon_mm_{_name}",
        solution="gluon",
        capability=GLUON_CDNA4,
        signatures=_signatures,
        traits={"bias": any, "wide_bias": any, **_traits},
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
    )(mm)


register_kernel(
    "gemm",
    "mm",
    name="gluon_mm_nvfp4",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures={format_signature(a=nvfp4_format(), b=nvfp4_format((BLOCK_NVFP4, 1)))},
    traits={"bias": any, "wide_bias": any, "m": at_most(MOST_NVFP4_ROWS), **_K},
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)(mm_nvfp4)


def is_near(lines: Tensor | None) -> bool:
    """Whether the distance from one line to the next is within the kernel's limit."""
    return lines is not None and abs(lines.stride(0)) <= FURTHEST


def in_words(scale: Tensor | None) -> bool:
    """Whether every four e8m0 scales of a step are one aligned word."""
    if scale is None or scale.dtype != torch.uint8:
        return False
    return not (scale.shape[1] % 4 or scale.stride(0) % 4 or scale.data_ptr() % 4)


def operand_of(lines: Tensor, scale: Tensor | None) -> Operand:
    """Returns the operand, copied if its lines are not contiguous along k, not aligned, or too far apart."""
    if scale is not None and scale.element_size() == 1:
        scale = scale.view(torch.uint8)
    if scale is not None and scale.ndim == 2 and (scale.dtype == torch.uint8 or scale.shape[1] > 1):
        scale = rows(scale) if is_near(scale) else scale.contiguous()
    codes = aligned(lines) if is_near(lines) else lines.contiguous()
    return Operand(codes.view(torch.uint8) if lines.dtype in DENSE_DTYPES else codes, scale)


def line_stride(scale: Tensor | None) -> int:
    """Returns the stride of the scales from one line, or one block of lines, to the next, in elements; 0 if all lines share the
    scales."""
    return scale.stride(0) if scale is not None and scale.ndim == 2 else 0


def scales_of(a: Operand, b: Operand) -> str:
    """Returns the kind of scales, see `Shape`."""
    if a.scale is None or b.scale is None:
        return "none"
    if a.scale.dtype == torch.uint8:
        return "mx"
    pairs = ((a.scale, a.codes), (b.scale, b.codes))
    of_lines = (scale.ndim < 2 or scale.shape == (len(codes), 1) for scale, codes in pairs)
    return "lines" if all(of_lines) else "blocks"


def launch(a: Operand, b: Operand, out: Tensor, bias: Tensor | None, k: int, a_format: str, b_format: str) -> None:
    """Launches `mm_kernel`. Selects the tile and the splits, and allocates the memory of partial results if there are splits.

    Args:
        a, b: the operands, as lines along k.
        out: receives the result, [m, n], with contiguous rows.
        bias: [n], or None.
        k: number of elements along k.
        a_format, b_format: formats of the elements, values of `FORMATS` or ``"nvfp4"``.
    """
    m, n = out.shape
    compute_units = current_compute_units()
    pair_bytes = max(PAIR_BYTES[a_format], PAIR_BYTES[b_format])
    scales = "nvfp4" if a_format == "nvfp4" else scales_of(a, b)
    config = config_of(m, n, compute_units, pair_bytes, scales == "blocks", k)
    tiles_m = -(-m // config.block_m)
    tiles = tiles_m * -(-n // config.block_n)
    splits, split_k = splits_of(config, tiles, k, compute_units, pair_bytes)
    # nvfp4 has twice as many scales, so LDS has room for the scales of half as many elements.
    chunk = min(config.chunk // (2 if scales == "nvfp4" else 1), 1 << (split_k - 1).bit_length())
    blocks = -(-split_k // config.block_k)
    config = config._replace(chunk=chunk, stages=min(config.stages, blocks))
    shape = Shape(
        n, k, split_k, splits, k % split_k != 0, tiles_m == 1, scales,
        a_format, b_format, a.codes.stride(0), b.codes.stride(0),
        line_stride(a.scale), line_stride(b.scale), in_words(a.scale), in_words(b.scale), out.stride(0),
    )  # fmt: skip
    partial = partial_of(a.codes, config.block_m * config.block_n, tiles, splits) if splits > 1 else None
    per_xcd = -(-tiles // XCDS)
    grid = (tiles if tiles_m == 1 and splits == 1 else per_xcd * XCDS, splits)
    bias = None if bias is None else bias.contiguous()
    device.mm_kernel[grid](
        a, b, m, per_xcd, out, bias, partial, config, shape, num_warps=config.waves_m * config.waves_n * config.waves_k,
        waves_per_eu=config.waves_per_simd, llvm_fn_attrs="amdgpu-agpr-alloc=0" if config.waves_per_simd == 2 else "",
    )  # fmt: skip


def partial_of(like: Tensor, size: int, tiles: int, splits: int) -> Partial:
    """Returns the memory of partial results. It is kept between calls, so that the counters are zeroed only once."""
    index = like.get_device()
    stream = torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
    workspace = keeper.get(index, stream, 4 * size * tiles * splits, tiles)
    return Partial(workspace.memory[: 4 * size * tiles * splits].view(torch.float32), workspace.counters)
