"""The configurations of the decode kernel, and the function that chooses one for a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.attention import supported

# Pairs (head_dim, v_head_dim).
WIDTHS = (*((head_dim, head_dim) for head_dim in supported.HEAD_DIMS), *supported.OTHER_WIDTHS)
PAGE_SIZES = (1, *supported.PAGE_SIZES)
CONSUMERS = 4  # consumer warps of a CTA, which also has one producer warp
SHARED_BYTES = 228 * 1024  # shared memory of an SM
# A CTA's shared memory besides the K/V ring and the partial results: 1024 bytes reserved by the system, up to 1024 bytes of
# alignment, and small arrays.
OTHER_BYTES = 3072
ROWS = (8, 16, 32, 64)  # numbers of query rows per KV head for which kernel variants exist
MERGE_BATCH = 16  # partial results of a sequence that are merged per step; registers limit this number
# Class of a call's work. Sequences are split (split-KV) in three classes. "little" and "much" differ in the number of visible keys
# of all sequences together. "long" means few long sequences. In the two other classes, sequences are short and are not split.
Work = Literal["little", "much", "long", "short", "many short"]
SHORT = ("short", "many short")


@dataclass(frozen=True)
class Row:
    """Shared-memory layout of one token's key or value vector. The vector spans several panels, and occupies one row of 128 or 64
    bytes in each.

    Attributes:
        width: elements of the vector.
        element_bytes: bytes per element.
    """

    width: int
    element_bytes: int

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel's row: 64 if 64-byte rows waste less of the last panel, otherwise 128."""
        used = self.width * self.element_bytes
        return 128 if -(-used // 128) * 128 == -(-used // 64) * 64 else 64

    @property
    def panel(self) -> int:
        """The number of elements of each row of a panel of shared memory."""
        return self.panel_bytes // self.element_bytes

    @property
    def panels(self) -> int:
        """Number of panels. The last panel may extend beyond the vector. This padding is never read."""
        return -(-self.width // self.panel)

    @property
    def columns(self) -> int:
        """Elements of the rows of all panels together, padding included."""
        return self.panels * self.panel


@dataclass(frozen=True)
class Config:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of q and the output, and of the caches unless ``fp8``.
        head_dim: elements of a key.
        v_head_dim: elements of a value vector.
        box: number of keys of one TMA box, all of one page. With pages of one token, box is 1, and each key and value vector is
            gathered by cp.async instead.
        rows: query rows per KV head: at least the KV head's query heads times the new tokens of a sequence.
        split: whether sequences are split among CTA groups (split-KV).
        block: keys per K/V tile.
        resident: CTAs per SM.
        heads: KV heads per CTA. Either 1: the consumer warps take the head's K/V tiles round-robin. Or CONSUMERS: each consumer
            warp computes one head.
        fp8: whether the caches are e4m3. K and V are converted to float16 in registers, and queries are converted to float16 too.
        capped: whether scores are capped by ``logit_cap``.
        abreast: number of KV heads whose vectors are side by side in a row of a K/V tile. With two heads of 64 in fp8, a tile's
            rows have 128 bytes instead of 64. Each of the two heads has eight query rows, so the two heads fill the 16 rows of an
            MMA. See `mma_device.Consumers.load_queries`.
        swap_ab: swap-AB: whether keys and values are the A operands of MMAs, see `swap_ab_device`.
    """

    dtype: str
    head_dim: int
    v_head_dim: int
    box: int
    rows: int
    split: bool
    block: int
    resident: int
    heads: int = 1
    fp8: bool = False
    capped: bool = False
    abreast: int = 1
    swap_ab: bool = False

    @property
    def kv_bytes(self) -> int:
        """Bytes of an element of the K and V caches."""
        return 1 if self.fp8 else 2

    @property
    def gathered(self) -> bool:
        """Whether key and value vectors are gathered from the cache one by one, by cp.async instead of TMA."""
        return self.box == 1

    @property
    def k_row(self) -> Row:
        """The shared-memory layout of one token's keys, with ``abreast`` KV heads side by side."""
        return Row(self.abreast * self.head_dim, self.kv_bytes)

    @property
    def v_row(self) -> Row:
        """The shared-memory layout of one token's value vectors, with ``abreast`` KV heads side by side."""
        return Row(self.abreast * self.v_head_dim, self.kv_bytes)

    @property
    def width(self) -> int:
        """Distance between rows of partial results in shared memory, in float32 elements, padded against bank conflicts. A lane
        stores two elements per instruction, four with an fp8 cache."""
        return self.v_head_dim + (16 if self.fp8 else 8)

    @property
    def row_warps(self) -> int:
        """The number of consumer warps among which the query rows are divided. Each of these warps processes all keys of a K/V
        tile. For head dims of at most 128, the division limits a warp's output accumulators to 64 registers per thread.
        """
        return max(1, self.rows // (32 if max(self.head_dim, self.v_head_dim) == 64 else 16))

    @property
    def parts(self) -> int:
        """The number of consumer warps that compute partial results of the same query rows, from different K/V tiles."""
        return CONSUMERS // self.readers

    @property
    def readers(self) -> int:
        """The number of consumer warps that read each ring stage. Each arrives once at the stage's *empty* barrier. The warps read
        the same tile for different query rows, or with ``heads`` > 1 the tiles of different KV heads."""
        return self.row_warps * self.heads

    @property
    def merge_floats(self) -> int:
        """Float32 elements of shared memory in which consumer warps merge their partial results of a KV head."""
        if self.heads > 1:
            return 4  # unused, but an array needs a size, here a multiple of 16 bytes
        return self.parts * self.rows * self.width

    @property
    def stage_elements(self) -> int:
        """Elements of a ring stage: one tile of keys and values, padding of their panels included."""
        return self.heads * self.block * (self.k_row.columns + self.v_row.columns)

    @property
    def stages(self) -> int:
        """Stages of the K/V ring. The number is a multiple of ``parts``, so that a consumer warp always visits the same stages, and
        misses no phase of their barriers.
        """
        room = SHARED_BYTES // self.resident - OTHER_BYTES - 4 * self.merge_floats
        return room // (self.kv_bytes * self.stage_elements) // self.parts * self.parts


def config_of(
    dtype: str,
    widths: tuple[int, int],
    page_size: int,
    rows: int,
    work: Work,
    fp8: bool = False,
    capped: bool = False,
    close: bool = False,
) -> Config:
    """Returns the configuration for a call.

    Figures below are microseconds on an H200 with 64 query heads and 8 KV heads of dimension 64, pages of 64 tokens, in a CUDA
    graph with another kernel between calls. Compare these figures only with each other: the graph held few calls, and the graph's
    launch is included.

    Args:
        dtype, rows, fp8, capped: see `Config`.
        widths: head_dim and v_head_dim.
        page_size: tokens per page of the caches.
        work: the class of the call's work, which decides whether sequences are split, see `Work`.
        close: whether the number of KV heads is even, and the heads of a token are contiguous in the caches. Only then can two KV
            heads be side by side in a K/V tile, see `paired`.
    """
    head_dim, v_head_dim = widths
    if close and paired(head_dim, v_head_dim, page_size, rows, work, fp8):
        return Config(dtype, *widths, min(32, page_size), 16, True, 32, 2, 1, fp8, capped, 2)
    if fp8 and rows == 8 and head_dim > 128:
        # With swap-AB, the registers suffice for two CTAs per SM. Each pair of figures is microseconds with swap-AB, and with
        # queries as the A operand. 64 x 4096 tokens, 2 KV heads of 256: 76.2, 81.9. 32 x 4096, 8 heads: 132.6, 133.0. Head dims
        # 192/128: 91.7, 91.4. With head dims of 96 and 80, swap-AB is no faster: 96: 80.1, 79.3; 80: 82.6, 82.4.
        return Config(dtype, *widths, min(16, page_size), rows, work not in SHORT, 16, 2, 1, fp8, capped, swap_ab=True)
    block, resident, heads = _tile(head_dim, v_head_dim, rows, work, fp8)
    if one_per_sm(head_dim, page_size, rows, work, fp8):
        block, resident = 32, 1
    if page_size == 1 and not fp8 and (rows == 16 or head_dim == 128):
        block = max(16, block // 2)  # gathering by cp.async takes registers, so tiles are smaller
    return Config(dtype, *widths, min(block, page_size), rows, work not in SHORT, block, resident, heads, fp8, capped)


def paired(head_dim: int, v_head_dim: int, page_size: int, rows: int, work: Work, fp8: bool) -> bool:
    """Whether two KV heads are side by side in each row of a K/V tile, with tiles of 32 keys and two CTAs per SM.

    64 x 8192 tokens of 64 query heads and 8 KV heads take 133.7 us. With one KV head per CTA and 64 keys per tile they take 148.5
    us. The loads alone take 132.0 and 141.3 us: loading rows of 64 bytes is slow. Two heads side by side take 138.2 us with tiles
    of 16 keys, 134.3 us with 64 keys, and 141.9 us with three CTAs per SM. One head takes 146.4 us with 128 keys, 155.3 us with 32
    keys, and 155.0 us with three CTAs per SM.
    """
    return fp8 and rows == 8 and head_dim == v_head_dim == 64 and page_size > 1 and work in ("much", "long")


def one_per_sm(head_dim: int, page_size: int, rows: int, work: Work, fp8: bool) -> bool:
    """Whether there is one CTA per SM, with tiles of 32 keys. Its K/V ring then takes nearly all of the SM's shared memory.

    Microseconds back to back with cold caches (`benchmarks/h200_decode_tiles.py`), for 32 keys and one CTA per SM, for 64 keys and
    one CTA, and for 64 keys and two CTAs: 16 x 1088 tokens 11.7, 12.1, 16.6; 20 x 1088 20.3, 20.6, 18.5; 64 x 1088 39.3, 40.1,
    42.5; 256 x 1088 144.6, 147.3, 146.3; 4 x 32768 66.9, 67.6, 69.6; 13 sequences of 1 to 4096 tokens 23.1, 23.2, 20.7; 40 of
    them 54.7, 55.1, 54.4; 8 of 512 to 1536 10.3, 11.2, 12.2. With 8 KV heads there are 16 groups of CTAs instead of 33, so 16
    sequences of equal length are not split.
    """
    return not fp8 and rows == 8 and head_dim == 64 and page_size > 1 and work == "much"


def _tile(head_dim: int, v_head_dim: int, rows: int, work: Work, fp8: bool) -> tuple[int, int, int]:
    """Returns the keys per K/V tile, the CTAs per SM, and the KV heads per CTA. Figures in comments are microseconds with 16-bit
    caches, see `config_of`."""
    if work == "many short" and rows * head_dim <= 2048 and head_dim <= 128:  # limited by registers
        # Microseconds in windows of 128, with four KV heads per CTA, then with one. 128 sequences: 14.4, 15.8; 512 sequences:
        # 43.2, 46.3. But 64 sequences in back-to-back calls: 7.9, 6.9.
        return (32 if head_dim == 64 and rows <= 16 else 16), 2, CONSUMERS
    if head_dim > 128:  # the ring holds one tile per warp; fragments of wide vectors may leave registers for one CTA per SM only
        return 16, 1 if v_head_dim > 128 or (fp8 and rows == 8) else 2, 1
    if head_dim == 128:
        return 32, 2, 1  # limited by registers
    if head_dim > 64:
        return 16 if rows > 8 else 32, 2, 1  # the ring holds one tile per warp, and one tile in flight
    if work in SHORT:
        # 64 sequences in windows of 128 take 9.4 us with 16 keys per tile, and 9.9 us with 32. With an fp8 cache, registers
        # suffice for only three CTAs per SM.
        return 16, (3 if fp8 else 4) if rows == 8 else 2, 1
    if rows > 16 or work == "long":
        # With more than 16 rows, registers limit the tile. Microseconds for "long" with 32 keys per tile, then with 64: 1 x 2K (one
        # sequence of 2048 tokens) 6.50, 6.81; 1 x 8K 9.45, 10.33; 1 x 33K 21.0, 22.1; 1 x 131K 66.2, 70.8. One CTA per SM, with a
        # ring in all of shared memory, is about as fast: 6.43, 9.42, 21.1, 67.1.
        return (16 if fp8 and rows > 16 else 32), 2, 1
    # With 16 keys per tile and with 64 keys: 1 x 1K 6.53, 6.74 us.
    return 16 if work == "little" else 64, 2, 1


def every_config() -> list[Config]:
    """Returns all supported configurations."""
    some = {
        config_of(dtype, widths, page_size, rows, work, fp8, capped, close): None
        for close in (False, True)
        for capped in (False, True)
        for dtype in DTYPES.values()
        for widths in WIDTHS
        for rows in ROWS
        for work in get_args(Work)
        for page_size in PAGE_SIZES
        for fp8 in (False, True)
    }
    return list(some)
