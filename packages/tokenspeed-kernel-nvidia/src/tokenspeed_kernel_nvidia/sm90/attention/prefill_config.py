"""What programs of `prefill` are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.attention.served import GQA_RATIOS, HEAD_DIMS, PAGE_SIZES
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.common.registers import left_by


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
        head_dim: 64 or 128.
        gqa_ratio: query heads a key head. They are rows of the same tile.
        page_size: tokens of a page; 0 where the keys of a sequence lie in a row.
        section_mib: MiB of keys and values that tiles which run together may read, so that they find them in the L2 cache. With 8
            there are fewer heads at once: 524 instead of 537 at 8192 x 4.
        lazy: how far, as a power of 2, exponentials may exceed 1 before sums are rescaled. The shift of the exponents need not be
            their maximum, and so it seldom changes: 535 instead of 495 (with 0) at 8192 x 1.
        fp8: whether q, keys and values are e4m3. Weights are rounded to e4m3 too, for the product with values.
            Two sequences of 8192 with 64 query heads and 8 key heads of dimension 128 took 2688 us, and 3232 in bfloat16. With 216
            registers for those that compute, and 72 for those that convert, it was no quicker, nor with `fp8_lazy` of 7.
        fp8_cache: whether keys and values alone are. They become ``dtype`` on their way to the products.
        windowed: whether a token sees a window of what is before it. It is causal then.
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

    @property
    def converts(self) -> bool:
        """Whether three warps of the producer's convert what is loaded."""
        return self.fp8 or self.fp8_cache

    @property
    def lift(self) -> float:
        """The largest exponential of a tile's first block, as a power of 2. Later ones are up to 2^8: an e4m3 is at most 448."""
        return 8.0 - self.fp8_lazy if self.fp8 else 0.0

    @property
    def fp8_lazy(self) -> float:
        """`lazy` of weights that are rounded to e4m3."""
        return 4.0

    @property
    def slack(self) -> float:
        """How far, as a power of 2, exponentials may exceed those of the first block before sums are rescaled."""
        return self.fp8_lazy if self.fp8 else self.lazy

    @property
    def bytes(self) -> int:
        """Of a number of q, keys and values, as products have them."""
        return 1 if self.fp8 else 2

    @property
    def panel(self) -> int:
        """Columns of q, keys and values that lie side by side in shared memory: rows of 128 bytes, or of 64."""
        return min(self.head_dim, 128 // self.bytes)

    @property
    def block_m(self) -> int:
        """Rows of a tile, 64 a warpgroup. With head_dim 128 the registers are for two of them."""
        return 192 if self.head_dim == 64 else 128

    @property
    def block_n(self) -> int:
        """Keys of a block. The last one of a tile is half as wide where nobody sees more: 537 instead of 533 at 4096 x 4.

        An fp8 cache of head_dim 128 leaves room for 64, as it lies in shared memory before and after it is converted.
        """
        return 64 if self.fp8_cache and self.head_dim == 128 else 128

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
        return 2

    @property
    def kv_stages(self) -> int:
        """Blocks of keys, and of values, on their way: what fits beside two tiles of queries and one of output."""
        if self.fp8_cache:
            return 3
        return 4 if self.head_dim == 64 else 3 if self.fp8 else 2

    @property
    def raw_stages(self) -> int:
        """Blocks on their way to be converted: of fp8 values, and of an fp8 cache's keys too; none of others, but an array has a
        size."""
        return 3 if self.converts else 1

    @property
    def raw_bytes(self) -> int:
        """Of such a block."""
        return self.block_n * self.head_dim if self.converts else 16

    @property
    def paged(self) -> bool:
        """Whether keys lie in a paged cache."""
        return self.page_size > 0

    @property
    def box(self) -> int:
        """Keys of a bulk copy: all of one page."""
        return min(self.page_size, self.block_n) if self.paged else self.block_n

    @property
    def q_bytes(self) -> int:
        """Of a tile of queries."""
        return self.gqa_ratio * self.positions * self.head_dim * self.bytes

    @property
    def kv_bytes(self) -> int:
        """Of a block of keys, or of values."""
        return self.block_n * self.head_dim * self.bytes

    @property
    def store_by_tma(self) -> bool:
        """Whether the rows of a warpgroup are whole positions, which a bulk copy can store."""
        return 64 % self.gqa_ratio == 0

    @property
    def _converters_want(self) -> bool:
        """Whether warps that convert want more registers than those that load. Beside 160 of a consumer there are none to give."""
        return self.fp8 or (self.fp8_cache and self.head_dim == 128)

    @property
    def consumer_registers(self) -> int:
        """No program of `every_config` spills."""
        if self._converters_want:
            return 152 if self.head_dim == 64 else 224
        return 160 if self.head_dim == 64 else 232

    @property
    def producer_registers(self) -> int:
        """What consumers leave. At head_dim 128 and pages of 16, 24 would spill."""
        return left_by(self.threads, self.warpgroups, self.consumer_registers)


def every_config() -> list[Config]:
    """All that is served."""
    return [
        Config(dtype, head_dim, gqa_ratio, page_size, fp8=fp8, fp8_cache=fp8_cache, windowed=windowed)
        for dtype, fp8 in (*((dtype, False) for dtype in DTYPES.values()), ("bfloat16", True))
        for fp8_cache in ((False,) if fp8 else (False, True))
        for windowed in (False, True)
        for head_dim in HEAD_DIMS
        for gqa_ratio in GQA_RATIOS
        for page_size in (*(() if fp8_cache else (0,)), *PAGE_SIZES)
    ]
