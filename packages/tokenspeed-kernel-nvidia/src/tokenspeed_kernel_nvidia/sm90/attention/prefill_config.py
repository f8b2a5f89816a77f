"""What programs of `prefill` are compiled for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tokenspeed_kernel_nvidia.sm90.attention.served import GQA_RATIOS, HEAD_DIMS, OTHER_WIDTHS, PAGE_SIZES
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.common.registers import left_by


class Tile(NamedTuple):
    """The shape of a tile.

    Attributes:
        rows: of queries, 64 a warpgroup that computes.
        keys: of a block of keys.
        q_stages: tiles of queries in shared memory. Where there is one, each warpgroup has the next tile's queries loaded when it
            has multiplied those of this tile with their last block of keys, while it computes the weights of that block.
        kv_stages: blocks of keys, and of values, in shared memory.
    """

    rows: int
    keys: int
    q_stages: int
    kv_stages: int


# By the widths of keys and of values, where keys lie in a row, and in pages. They fill the shared memory of a multiprocessor, and
# the accumulators of output and scores fit the registers of a thread. Outputs are stored from registers. On an H200, in TFLOP/s:
# * DeepSeek-V3, 4 x 4096 tokens of 128 heads: 647; (128, 128, 1, 2) 633, (192, 80, 1, 3) 643, (128, 96, 2, 2) 579. 2 x 8192 tokens
#   of 16 heads: 725; 721, 721, 674.
# * Gemma 3 (12B), 4 x 4096: 716; (128, 80, 1, 2) 704. Gemma 2 (9B) from pages of 64, 8 x 1024 new tokens of 8192: 632; 594.
# * Phi-3-mini (96 columns), 4 x 4096: 595; (192, 96, 2, 3) 568, (128, 160, 2, 2) 528, (128, 192, 1, 2) 531.
# * Phi-2 (80 columns), 8 x 2048: 463; 436, 390, 391.
TILES = {
    (192, 128): (Tile(192, 64, 1, 3), Tile(128, 128, 1, 2)),
    (256, 256): (Tile(128, 64, 1, 2), Tile(128, 64, 1, 2)),
    (96, 96): (Tile(128, 128, 2, 3), Tile(128, 128, 2, 3)),
    (80, 80): (Tile(128, 128, 2, 3), Tile(128, 128, 2, 3)),
}
# Of those, the ones that are served from fp8 caches beside 16-bit queries: others fill no panel of shared memory.
FP8_CACHE_WIDTHS = ((256, 256),)

# The same of fp8 operands, wherever keys lie. A block has 128 keys, or 64: values are transposed to rows of so many bytes. On an
# H100, in TFLOP/s:
# * DeepSeek-V3, 2 x 8192 tokens of 16 heads: 872; (192, 64, 2, 4) 865, (128, 128, 2, 2) 863, (128, 64, 2, 5) 719. 8 x 1024: 563;
#   (192, 64, 2, 4) 504.
# * Gemma 3 (12B), 4 x 4096: 771.
# * Phi-3-mini (96 columns), 4 x 4096: 638; (192, 64, 2, 4) 600.
FP8_TILES = {
    (192, 128): Tile(128, 128, 2, 3),
    (256, 256): Tile(128, 64, 2, 3),
    (96, 96): Tile(128, 128, 2, 3),
}


@dataclass(frozen=True)
class Config:
    """What changes the code. Figures are of an H200 with 64 query and 8 key heads (32 and 8 at head_dim 128), in TFLOP/s.

    All but short sequences run at the limit of 700 W, with the clock at 1.6 to 1.8 instead of 1.98 GHz, so what costs energy costs
    time. Tried and slower: one exponential in eight by a polynomial, off the busiest unit (523 instead of 544 at 8192 x 4);
    warpgroups that do not take turns at the tensor cores (equal at head_dim 64, 606 instead of 625 at head_dim 128, 8192 x 4);
    tiles dealt out in turn, to and fro, instead of by a counter (529 instead of 537 at 8192 x 4, 572 instead of 618 at 8192 x 1
    with head_dim 128).

    Attributes:
        dtype: of q, k, v and the output; of the output alone where those are fp8.
        head_dim: columns of q and k: 64 or 128, or one of TILES.
        gqa_ratio: query heads a key head. They are rows of the same tile.
        page_size: tokens of a page; 0 where the keys of a sequence lie in a row.
        section_mib: MiB of keys and values that tiles which run together may read, so that they find them in the L2 cache. With 8
            there are fewer heads at once: 524 instead of 537 at 8192 x 4.
        lazy: how far, as a power of 2, exponentials may exceed 1 before sums are rescaled. The shift of the exponents need not be
            their maximum, and so it seldom changes: 535 instead of 495 (with 0) at 8192 x 1.
        fp8: whether q, keys and values are e4m3. Weights are rounded to e4m3 too, for the product with values.
            Two sequences of 8192 with 64 query heads and 8 key heads of dimension 128 took 2472 us, and 3117 in bfloat16; four
            with head_dim 64 took 3308, and 3676. Polynomials of degree 2 for a few of 64 exponentials gave 2452, 2530 and 2595
            (for 4, 8 and 12 of them; 2509 without any), and 3523, 3482 and 3483 (3613), with turns (see `turns`).
        fp8_cache: whether keys and values alone are. They become float16 on their way to the products. 8 sequences of 1024 new
            and 7168 cached tokens with 64 query heads and 8 key heads of dimension 128 took 5265 us, and 2999 with a bfloat16
            cache; with head_dim 64 2062, and 1836. That was when a warp that converts waited for each of its loads.
        windowed: whether a token sees a window of what is before it. It is causal then.
        v_head_dim: columns of v and the output; 0 for as many as head_dim.
        capped: whether there is a logit cap, with 16-bit operands only.
        own_kv: whether keys in a row have offsets of their own.
    """

    dtype: str
    head_dim: int
    gqa_ratio: int
    page_size: int = 0
    section_mib: int = 24
    lazy: float = 8.0
    fp8: bool = False
    fp8_cache: bool = False
    windowed: bool = False
    v_head_dim: int = 0
    capped: bool = False
    own_kv: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of keys, and of values."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def tile(self) -> Tile | None:
        """The shape of a tile of other widths than 64 and 128."""
        if self.fp8:
            return FP8_TILES.get(self.widths)
        return TILES[self.widths][self.paged] if self.widths in TILES else None

    @property
    def splits_q(self) -> bool:
        """Whether each warpgroup waits for queries of its own, and gives them back as soon as it has used them."""
        return self.q_stages == 1

    @property
    def stores_from_registers(self) -> bool:
        """Whether outputs go to global memory without a tile in shared memory in between."""
        return self.tile is not None

    @property
    def turns(self) -> bool:
        """Whether warpgroups take turns at the tensor cores.

        With fp8 operands that took 2509 us instead of 2472, and 3613 instead of 3308 with head_dim 64. On an H100 it took 687 us
        instead of 646 with head_dim 96, but 713 instead of 756 with 256.
        """
        return not self.fp8 or self.head_dim == 256

    @property
    def converts(self) -> bool:
        """Whether three warps of the producer's convert what is loaded."""
        return self.fp8 or self.fp8_cache

    @property
    def lift(self) -> float:
        """The largest exponential of a tile's first block, as a power of 2.

        That of weights which are rounded to e4m3: 32 of them, what a thread has of a row, may be as large and their sum is still
        less than the largest e4m3, see `prefill_fp8_device`.
        """
        return 3.0 if self.fp8 else 0.0

    @property
    def bytes(self) -> int:
        """Of a number of q, keys and values, as products have them."""
        return 1 if self.fp8 else 2

    @property
    def panel(self) -> int:
        """Columns of q, keys and values that lie side by side in shared memory: rows of 128 bytes, or of 64."""
        if self.fp8:
            return 64 if self.head_dim % 128 == 64 else 128
        return 32 if self.head_dim % 64 else 64

    @property
    def k_columns(self) -> int:
        """Columns of queries and keys in shared memory. Bulk copies fill those beyond head_dim with zeros."""
        return -(-self.head_dim // self.panel) * self.panel

    @property
    def v_columns(self) -> int:
        """Columns of values in shared memory, as products have them."""
        panel = 32 if self.fp8 else self.panel
        return -(-self.widths[1] // panel) * panel

    @property
    def block_m(self) -> int:
        """Rows of a tile, 64 a warpgroup. With head_dim 128, or a cap, the registers are for two of them."""
        if self.tile:
            return self.tile.rows
        return 192 if self.head_dim == 64 and not self.capped else 128

    @property
    def block_n(self) -> int:
        """Keys of a block. The last one of a tile is half as wide where nobody sees more: 537 instead of 533 at 4096 x 4.

        An fp8 cache of head_dim 128 leaves room for 64, as it lies in shared memory before and after it is converted; in windows,
        of head_dim 64 there are no registers for more.
        """
        if self.tile:
            return self.tile.keys
        return 64 if self.fp8_cache and (self.head_dim == 128 or self.windowed) else 128

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute; one more loads."""
        return self.block_m // 64

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def positions(self) -> int:
        """Query positions of a tile. A ratio that does not divide the rows leaves some unused."""
        return self.block_m // self.gqa_ratio

    @property
    def q_stages(self) -> int:
        """Tiles of queries on their way."""
        return self.tile.q_stages if self.tile else 2

    @property
    def q_records(self) -> int:
        """Records of tiles in shared memory: one a stage of queries, or two a warpgroup."""
        return 2 * self.warpgroups if self.splits_q else self.q_stages

    @property
    def q_positions(self) -> int:
        """Query positions of a bulk copy."""
        return 64 // self.gqa_ratio if self.splits_q else self.positions

    @property
    def kv_stages(self) -> int:
        """Blocks of keys, and of values, on their way: what fits beside two tiles of queries and one of output."""
        if self.tile:
            return self.tile.kv_stages
        if self.fp8_cache:
            return 3
        return 4 if self.head_dim == 64 else 3 if self.fp8 else 2

    @property
    def raw_stages(self) -> int:
        """Blocks on their way to be converted: of fp8 values, and of an fp8 cache's keys too; none of others, but an array has a
        size. Beside 16-bit keys and values of 256 columns there is room for two."""
        if not self.converts:
            return 1
        return 2 if self.tile and self.fp8_cache else 3

    @property
    def raw_panel(self) -> int:
        """Columns of such a block that lie side by side in shared memory."""
        return 64 if self.widths[1] <= 64 else 128

    @property
    def raw_columns(self) -> int:
        """Columns of such a block."""
        return -(-self.widths[1] // self.raw_panel) * self.raw_panel

    @property
    def raw_bytes(self) -> int:
        """Of such a block."""
        return self.block_n * self.raw_columns if self.converts else 16

    @property
    def paged(self) -> bool:
        """Whether keys lie in a paged cache."""
        return self.page_size > 0

    @property
    def box(self) -> int:
        """Keys of a bulk copy: all of one page."""
        return math.gcd(self.page_size, self.block_n) if self.paged else self.block_n

    @property
    def q_bytes(self) -> int:
        """Of a tile of queries, or of a warpgroup's rows of it, that are loaded together."""
        return self.gqa_ratio * self.q_positions * self.k_columns * self.bytes

    @property
    def kv_bytes(self) -> int:
        """Of a block of keys."""
        return self.block_n * self.k_columns * self.bytes

    @property
    def v_bytes(self) -> int:
        """Of a block of values."""
        return self.block_n * self.v_columns * self.bytes

    @property
    def store_by_tma(self) -> bool:
        """Whether outputs lie in shared memory, and the rows of a warpgroup are whole positions, which a bulk copy can store."""
        return not self.stores_from_registers and 64 % self.gqa_ratio == 0

    @property
    def _converters_want(self) -> bool:
        """Whether warps that convert want more registers than those that load. Beside 160 of a consumer there are none to give."""
        return self.fp8 or (self.fp8_cache and self.block_n == 64)

    @property
    def consumer_registers(self) -> int:
        """No program of `every_config` spills."""
        if self._converters_want:
            return 152 if self.warpgroups == 3 else 224
        return 160 if self.warpgroups == 3 else 232

    @property
    def producer_registers(self) -> int:
        """What consumers leave. At head_dim 128 and pages of 16, 24 would spill."""
        return left_by(self.threads, self.warpgroups, self.consumer_registers)


def every_config() -> list[Config]:
    """All that is served."""
    of_heads = [
        Config(dtype, head_dim, gqa_ratio, page_size, fp8=fp8, fp8_cache=fp8_cache, windowed=windowed)
        for dtype, fp8 in (*((dtype, False) for dtype in DTYPES.values()), ("bfloat16", True))
        for fp8_cache in ((False,) if fp8 else (False, True))
        for windowed in (False, True)
        for head_dim in HEAD_DIMS
        for gqa_ratio in GQA_RATIOS
        for page_size in (*(() if fp8_cache else (0,)), *PAGE_SIZES)
    ]
    others = [
        Config(
            dtype, head_dim, gqa_ratio, page_size, fp8=fp8, windowed=windowed, v_head_dim=v_head_dim, capped=capped, own_kv=own_kv
        )
        for dtype, fp8 in (*((dtype, False) for dtype in DTYPES.values()), ("bfloat16", True))
        for head_dim, v_head_dim in (*((width, 0) for width in HEAD_DIMS), *OTHER_WIDTHS)
        for capped in ((False,) if fp8 else (False, True))
        if capped or v_head_dim
        if not fp8 or (head_dim, v_head_dim) in FP8_TILES
        for windowed in (False, True)
        for gqa_ratio in GQA_RATIOS
        for page_size in (0, *PAGE_SIZES)
        # Keys have offsets of their own in `mla_prefill` alone.
        for own_kv in ((False, True) if (head_dim, v_head_dim, gqa_ratio, page_size) == (192, 128, 1, 0) else (False,))
    ]
    of_caches = [
        Config(dtype, head_dim, gqa_ratio, page_size, fp8_cache=True, windowed=windowed, v_head_dim=v_head_dim)
        for dtype in DTYPES.values()
        for head_dim, v_head_dim in FP8_CACHE_WIDTHS
        for windowed in (False, True)
        for gqa_ratio in GQA_RATIOS
        for page_size in PAGE_SIZES
    ]
    return of_heads + others + of_caches
