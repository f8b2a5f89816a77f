"""The configurations of the fused norm, QKV GEMM and RoPE kernel, and the launch parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import (
    GROUP,
    LOAD_BYTES,
    LOADS,
    ROWS,
    Config,
    Scales,
    Weights,
    layout_of,
    loads_of,
)

HEAD_DIMS = (64, 128)
# The storage formats of weights, with the granularity of their scales.
WEIGHTS: dict[Weights, Scales] = {"dense": "none", "float8_e4m3fn": "row", "mxfp4": "mx"}
MOST_TOKENS = 8  # of the 16 rows of an MMA, which are tokens, the kernel uses eight: a lane's first accumulator row
# The maximum number of tokens of the declared kernels. Decode steps of GPT-OSS-120B on an H200 in ms, with this kernel, then with
# separate kernels: 1 token 2.08, 2.08 to 2.10; 2 tokens 2.50, 2.54; 4 tokens 3.35, 3.38. With more tokens there is no gain,
# because each CTA reads all tokens.
SERVED_TOKENS = 4
MOST_HIDDEN = 8192  # maximum number of elements of a token: eight such tokens leave room for a ring of weights in shared memory
GROUP_PAIRS = GROUP // 2  # number of element pairs whose partial sums are in shared memory together
# Bytes of the ring of weights. The ring must hold the weights that arrive while the tokens are read, so that loads do not stall.
# With one token, a decode step of GPT-OSS-120B on an H200 takes 2.17 ms, and 2.24 ms with a ring of 100 KB.
RING_BYTES = 152 * 1024
SQUARES = 256  # shared-memory byte offset of the warps' sums of squares of the tokens, which follow the barriers


@dataclass(frozen=True)
class QkvConfig:
    """Configuration of one kernel variant.

    Attributes:
        dtype: dtype of tokens, caches and results.
        head_dim: elements of a head. All of them are rotated (RoPE).
        weights: storage format of the weights. fp8 weights have one scale, or one scale per output channel. mxfp4 weights have a
            scale for each 32 of them.
        loads: see `mm.config.Config`.
    """

    dtype: str
    head_dim: int
    weights: Weights = "dense"
    loads: int = LOADS[0]

    @property
    def gemm(self) -> Config:
        """The configuration of `mm` whose ring and MMA mainloop this kernel uses."""
        return Config(self.dtype, self.weights, WEIGHTS[self.weights], self.dtype, MOST_TOKENS, loads=self.loads)

    def row_bytes(self, hidden: Any) -> Any:
        """Returns the bytes of a row of weights; ``hidden`` may be a value in device code."""
        return hidden // self.gemm.elements * LOAD_BYTES

    @property
    def half(self) -> int:
        """The number of element pairs of a head."""
        return self.head_dim // 2


@dataclass(frozen=True)
class LaunchParameters:
    """The launch parameters that depend on the call's sizes.

    Attributes:
        ctas: number of CTAs.
        row_shift: log2 of the number of warps that read one token together.
        chunk_bytes: bytes of a row of weights, padded to a multiple of the bytes that a ring stage holds of a row.
        stages, scales, activations, ring, size: layout of a CTA's shared memory, see `mm.config.Layout`.
    """

    ctas: int
    row_shift: int
    chunk_bytes: int
    stages: int
    scales: int
    activations: int
    ring: int
    size: int


def launch_parameters_of(config: QkvConfig, tokens: int, columns: int, hidden: int, count: int) -> LaunchParameters:
    """Returns the launch parameters for a GPU with ``count`` SMs.

    Args:
        tokens, hidden: number of tokens, and elements of each.
        columns: columns of the output, that is, rows of weights. The CTAs get equal numbers of pairs of them, within one.

    Raises:
        ValueError: the tokens do not fit into shared memory.
    """
    gemm = config.gemm
    row_bytes = config.row_bytes(hidden)
    ctas = min(columns // 2, count)
    rows = 2 * -(-columns // 2 // ctas)
    stages = -(-rows // ROWS) * -(-row_bytes // gemm.part_bytes)
    found = layout_of(gemm, tokens, row_bytes, RING_BYTES, stages)
    if found is None or found.chunk_bytes < row_bytes:
        raise ValueError(f"rmsnorm_qkv_rope: {tokens} tokens of {hidden} elements do not fit into shared memory")
    row_shift = (gemm.warps - 1).bit_length() - (tokens - 1).bit_length()
    return LaunchParameters(
        ctas, row_shift, found.chunk_bytes, found.stages, found.scales, found.activations, found.ring, found.size
    )


def config_of(dtype: str, head_dim: int, weights: Weights, hidden: int) -> QkvConfig:
    """Returns the configuration for tokens of ``hidden`` elements."""
    config = QkvConfig(dtype, head_dim, weights)
    return replace(config, loads=loads_of(weights, WEIGHTS[weights], config.row_bytes(hidden)))


def every_config() -> list[QkvConfig]:
    """Returns all supported configurations."""
    return [
        QkvConfig("bfloat16", head_dim, weights, loads)
        for head_dim in HEAD_DIMS
        for weights in WEIGHTS
        for loads in (LOADS[:1] if weights == "dense" else LOADS)
    ]
