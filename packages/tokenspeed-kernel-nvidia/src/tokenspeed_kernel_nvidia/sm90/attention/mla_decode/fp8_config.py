"""The configurations of the MLA decode kernel with an fp8 cache."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.cutedsl.launch import DTYPES
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import HEADS, LATENT, ROPE, Config

STEP = 32  # k of an fp8 wgmma
STEPS = (LATENT + ROPE) // STEP  # number of k-steps (MMAs per e4m3 part of q) of a block's q @ k


@dataclass(frozen=True)
class Fp8Config(Config):
    """Configuration of one kernel variant for an e4m3 cache.

    Both GEMMs (q @ k and P @ V) use e4m3 MMAs. A 16-bit query is split into two e4m3 parts: its rounded value (high) and the
    rounding error (low). The sum of the parts is accurate to 8 bits, like bfloat16. A single e4m3 part would have an error of 2.6%
    rms. Scores whose exponentials spread over several powers of e would be off by 0.1, and outputs by several percent.
    Probabilities are rounded to e4m3, as `mha_prefill` does with fp8 V.

    Attributes:
        dtype: dtype of the output, and of q if that is not e4m3.
        fp8_queries: whether q is e4m3.
        summed: the number of blocks for which P @ V is accumulated in registers before the result is added to float32 accumulators
            in global memory. In the sums of an fp8 MMA, the tensor cores keep 13 fractional bits relative to the largest term, and
            truncate the rest. Long sums are thus too small: by 2^-14 or more for every 32 tokens, which is 0.8% for 4096 tokens.
    """

    fp8_queries: bool = False
    summed: int = 64

    @property
    def lazy(self) -> float:
        return 4.0

    @property
    def lift(self) -> float:
        """log2 of the largest probability in a work item's first block. Together with `lazy`, probabilities reach at most 2^8. The
        largest e4m3 value is 448.
        """
        return 8.0 - self.lazy

    @property
    def value_buffers(self) -> int:
        """The number of register buffers for transposed V tiles of 64 columns. With one, the load of a tile waits for the previous
        MMAs."""
        return 1

    @property
    def wide_queries(self) -> bool:
        return not self.fp8_queries

    @property
    def query_parts(self) -> int:
        """The number of e4m3 parts whose sum is a query."""
        return 1 if self.fp8_queries else 2

    @property
    def query_chunks(self) -> int:
        """The number of stages of the latent ring, 128 bytes per row, that a work item's queries occupy while they are loaded. The
        rotary part of e4m3 queries uses a stage of the rotary ring instead."""
        return 4 if self.fp8_queries else 9

    @property
    def tail(self) -> int:
        """The number of k-steps of the next block's q @ k, each with all query parts, that are still in flight when a block's
        probabilities are signalled."""
        return 4

    @property
    def low_kept(self) -> int:
        """The number of k-steps whose low query parts are in registers. These are the steps of the rotary part. Further steps could
        only be added as whole chunks.
        """
        return 0 if self.fp8_queries else 2

    @property
    def kept(self) -> int:
        """The number of columns of Q in registers: all high parts, and `low_kept` k-steps of low parts."""
        return (STEPS + self.low_kept) * STEP

    @property
    def others(self) -> int:
        """The number of columns of low query parts in shared memory."""
        return 0 if self.fp8_queries else (STEPS - self.low_kept) * STEP

    @property
    def latent_chunks(self) -> int:
        return 24 if self.fp8_queries else 21

    @property
    def stages(self) -> int:
        return 6 if self.fp8_queries else 5

    @property
    def load_registers(self) -> int:
        return 32

    @property
    def score_registers(self) -> int:
        """Registers of the score warpgroup. Queries take 72 or 80 registers, scores 32."""
        return 144

    @property
    def value_registers(self) -> int:
        """Registers of each thread of a value warpgroup. The accumulator takes 128 of these registers, a V tile 16."""
        return 168


def every_fp8_config() -> list[Fp8Config]:
    """Returns all supported configurations for an e4m3 cache."""
    kinds = [*((dtype, False) for dtype in DTYPES.values()), ("bfloat16", True)]
    return [Fp8Config(dtype, heads, fp8_queries) for dtype, fp8_queries in kinds for heads in HEADS]
