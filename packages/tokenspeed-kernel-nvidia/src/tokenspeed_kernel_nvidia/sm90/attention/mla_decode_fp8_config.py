"""What programs of `mla_decode` with an fp8 cache are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.attention.mla_decode_config import HEADS, LATENT, ROPE, Config
from tokenspeed_kernel_nvidia.sm90.common.launch import DTYPES

STEP = 32  # columns of a product of 8-bit numbers
STEPS = (LATENT + ROPE) // STEP  # products that make scores of a block, of queries that are one e4m3 number each


@dataclass(frozen=True)
class Fp8Config(Config):
    """A program for an e4m3 cache.

    Both products are of e4m3 numbers. Queries of 16 bits become the sum of two of those, which is good to 8 bits like bfloat16: the
    second is what the first one's rounding leaves. A single one would be off by 2.6% rms, scores that spread over several units by
    a tenth of one, and outputs by as many percent. Probabilities are rounded to e4m3, as `mha_prefill` does with fp8 values.

    Attributes:
        dtype: of the output, and of q if that is no e4m3.
        fp8_queries: whether q is e4m3.
        summed: blocks whose products with values are summed in registers. Those sums are then added to others in float32 in memory.
            The tensor cores keep 13 bits behind the binary point of the largest term of a sum of 8-bit products, and drop what is
            below, so that long sums are too small: by 2^-14 for every 32 tokens or more, which is 0.8% for 4096.
    """

    fp8_queries: bool = False
    summed: int = 64

    @property
    def lazy(self) -> float:
        return 4.0

    @property
    def lift(self) -> float:
        """With `lazy` probabilities are up to 2^8: an e4m3 is at most 448."""
        return 8.0 - self.lazy

    @property
    def turned(self) -> int:
        """Tiles of 64 columns whose values are in registers at once: one is loaded while the one before is multiplied."""
        return 1

    @property
    def query_parts(self) -> int:
        """Numbers of e4m3 whose sum a query is."""
        return 1 if self.fp8_queries else 2

    @property
    def query_pieces(self) -> int:
        """Pieces of 128 bytes a row. An e4m3 rotary part goes where those of the cache go."""
        return 4 if self.fp8_queries else 9

    @property
    def tail(self) -> int:
        """How many products of scores, with all parts of the queries' numbers, still run when probabilities are handed over."""
        return 4

    @property
    def low_kept(self) -> int:
        """Products whose queries' second numbers are in registers: those of the rotary part, and of whole pieces."""
        return 0 if self.fp8_queries else 2

    @property
    def kept(self) -> int:
        """Columns of queries in registers; all first numbers are."""
        return (STEPS + self.low_kept) * STEP

    @property
    def others(self) -> int:
        """Columns of second numbers in shared memory."""
        return 0 if self.fp8_queries else (STEPS - self.low_kept) * STEP

    @property
    def pieces(self) -> int:
        return 24 if self.fp8_queries else 21

    @property
    def stages(self) -> int:
        return 6 if self.fp8_queries else 5

    @property
    def load_registers(self) -> int:
        return 32

    @property
    def score_registers(self) -> int:
        """Queries take 72, or 80, and scores 32."""
        return 144

    @property
    def value_registers(self) -> int:
        """The accumulator takes 128, and values 16."""
        return 168


def every_fp8_config() -> list[Fp8Config]:
    """All that is served."""
    kinds = [*((dtype, False) for dtype in DTYPES.values()), ("bfloat16", True)]
    return [Fp8Config(dtype, heads, fp8_queries) for dtype, fp8_queries in kinds for heads in HEADS]
