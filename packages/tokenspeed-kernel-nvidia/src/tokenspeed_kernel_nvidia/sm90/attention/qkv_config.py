"""The configurations that programs of `rmsnorm_qkv_rope` are compiled for, and the numbers of a launch."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_kernel_nvidia.sm90.gemm.mm_config import GROUP, ROWS, Config, layout_of

HEAD_DIMS = (64, 128)
MOST_TOKENS = 8  # tokens that an instruction has room for
# Decode steps of GPT-OSS-120B on an H200 in ms, and with its parts instead: 1 token 2.08, 2.08 to 2.10; 2 tokens 2.50, 2.54;
# 4 tokens 3.35, 3.38. Each CTA reads all tokens, so that more of them gain nothing.
SERVED_TOKENS = 4
MOST_HIDDEN = 8192  # numbers of a token; eight such tokens leave room for a ring
GROUP_PAIRS = GROUP // 2  # pairs of elements whose sums are in shared memory together
# The ring's: weights come while the tokens are read, and must not wait for that. A decode step of GPT-OSS-120B on an H200, one
# token, takes 2.17 ms, and 2.24 with 100 KB.
RING_BYTES = 152 * 1024
SQUARES = 256  # where the sums of squares begin, in bytes of shared memory: behind the barriers


@dataclass(frozen=True)
class QkvConfig:
    """Describes a program.

    Attributes:
        dtype: of tokens, weights, caches and results.
        head_dim: elements of a head, all of which turn.
    """

    dtype: str
    head_dim: int

    @property
    def product(self) -> Config:
        """The program of `mm` whose ring and instructions this one has."""
        return Config(self.dtype, "dense", "none", self.dtype, MOST_TOKENS)

    @property
    def half(self) -> int:
        """How many pairs of elements a head has."""
        return self.head_dim // 2


@dataclass(frozen=True)
class Numbers:
    """What a launch needs to know of sizes, see `mm_config.Layout`.

    Attributes:
        ctas: how many there are.
        row_shift: 2 to this power warps share a token when it is read.
        chunk_bytes: a row of weights, in whole parts of stages.
        stages, activations, ring, size: of a CTA's shared memory.
    """

    ctas: int
    row_shift: int
    chunk_bytes: int
    stages: int
    activations: int
    ring: int
    size: int


def numbers_of(config: QkvConfig, tokens: int, columns: int, hidden: int, count: int) -> Numbers:
    """Returns the numbers of a launch on so many multiprocessors.

    Raises:
        ValueError: tokens do not fit into shared memory.
    """
    product = config.product
    row_bytes = 2 * hidden
    ctas = min(columns // 2, count)
    rows = 2 * -(-columns // 2 // ctas)
    stages = -(-rows // ROWS) * -(-row_bytes // product.part_bytes)
    found = layout_of(product, tokens, row_bytes, RING_BYTES, stages)
    if found is None or found.chunk_bytes < row_bytes:
        raise ValueError("wants more shared memory than there is")
    row_shift = (product.warps - 1).bit_length() - (tokens - 1).bit_length()
    return Numbers(ctas, row_shift, found.chunk_bytes, found.stages, found.activations, found.ring, found.size)


def every_config() -> list[QkvConfig]:
    """Returns the configurations that calls are served by."""
    return [QkvConfig("bfloat16", head_dim) for head_dim in HEAD_DIMS]
