"""The chunked gated delta rule for prefill, in two steps.

The first step computes two square matrices per chunk and value head, for all chunks in parallel. With per-channel gates, the first
step also writes keys and queries multiplied by their decays. The second step computes states and outputs, one chunk of a sequence
after another. A program keeps the state in registers; only a sequence's first and last state are in global memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, common_device, dense, for_architecture, next_power_of_2, sm_count_of
from tokenspeed_kernel.triton.linear_attention._operands import SIGNATURES, gates_of, rows
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.linear_attention._delta_rule import L2NORM_EPS, scale_of
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most

device_code = DeviceModule(__name__ + "_device")
chunks_device = DeviceModule("tokenspeed_kernel.triton.linear_attention._chunks_device")
channels_device = DeviceModule("tokenspeed_kernel.triton.linear_attention._channels_device")


class Shape(NamedTuple):
    """Sizes and options of a call.

    Attributes:
        k_dim, v_dim: rows and columns of a state.
        v_heads: number of value heads.
        width: channels per key that the second step reads: k_dim rounded up to a multiple of `_ALIGNMENT`. The added channels are
            zeros.
        group: value heads per query/key head.
        gates: what the argument g holds: 0 for log decays, 1 for raw gates, 2 for raw gates with a bias, see
            `_gates_device.log_decay`.
        per_channel: whether there is one gate per channel rather than per token.
        l2norm, eps: whether queries and keys are L2-normalised, and the epsilon added to their sums of squares.
        initial: whether some sequences start from a given state.
    """

    k_dim: int
    v_dim: int
    v_heads: int
    width: int
    group: int
    gates: int
    per_channel: bool
    l2norm: bool
    eps: float
    initial: bool


class Tile(NamedTuple):
    """Sizes of chunks and tiles, and dtypes of the MMAs.

    Attributes:
        chunk, levels: tokens per chunk, and their log2.
        block, block_levels: tokens per block of a chunk, and their log2; see `_channels_device`.
        k, v: key channels and state columns per program, powers of two.
        at_once: how many sequences a program compares at a time when it searches for its chunk's sequence.
        dtype, precision: operand dtype and input precision of MMAs.
        pairs: operand dtype of the MMAs over token pairs within a block, with per-channel gates.
        solver: operand dtype of the MMAs that solve a chunk's system.
    """

    chunk: int
    levels: int
    block: int
    block_levels: int
    k: int
    v: int
    at_once: int
    dtype: Any
    precision: str
    pairs: Any
    solver: Any


# log2 of the tokens per chunk. The work to solve a chunk's linear system grows with the square of the chunk's length; shorter
# chunks add steps to the sequential loop over chunks. 64 rows are the M of a Hopper warpgroup MMA. GPUs whose MMA reads both
# operands from registers have room for 32 rows. float32 also has 32 rows, because its tf32 parts take registers too.
_LEVELS = {"sm_90": 6, "sm_100": 6, "sm_103": 6, "nvidia": 5, "any": 6}
_LEVELS_OF_FLOAT32 = 5
# With per-channel gates and more key channels than this, chunks are half as long. With longer chunks, shared memory would hold the
# operands of a single chunk only. There would be no pipeline of async copies, and results would be wrong, see `_ALIGNMENT`.
_WIDEST = 128
# NVIDIA's tensor cores compute float32 as three tf32 MMAs, with errors of 2^-21. Other devices have float32 MMAs.
_PRECISION = {"nvidia": "tf32x3", "any": "ieee"}
# For 16-bit operands, a chunk's linear system is solved in float16. The solver's rounding errors of 2^-12 are smaller than the
# operands'.
# With normalised keys and beta up to 2, no entry of the inverse exceeds 2. An entry is beta times two keys with factors I - beta k
# k.T between them, and such a factor lengthens no vector.
_SOLVER = torch.float16
# log2 of the tokens per block: 16 rows, the smallest M of an MMA.
_BLOCK_LEVELS = 4
# Channels per loop step of a program of the block kernel, and of the chunk kernel (`_channels_device`).
_BLOCK_CHANNELS, _CHANNELS = 32, 32
# The largest and the smallest number of state columns per program of the second step. A sequence has v_heads * v_dim / columns
# programs. Fewer columns mean more parallelism, but every program reads all queries and keys. More than 32 columns would not fit in
# registers for float32, or on GPUs whose MMA reads both operands from registers.
_COLUMNS, _FEWEST_COLUMNS = {"sm_90": 32, "sm_100": 64, "sm_103": 64, "nvidia": 32, "any": 64}, 16
_COLUMNS_OF_FLOAT32 = 32
_LONGEST = 256
# Warps per program. A block's tile is small, and a program of one warp needs no barriers. On an H200, 8192 tokens of kimi linear
# take 198 us with one warp per block, and 220 us with two warps. On Blackwell, MMAs leave fewer registers for other values, so the
# program of a chunk has 8 warps.
_WARPS, _BLOCK_WARPS, _CHUNK_WARPS = 4, 1, {"sm_100": 8, "sm_103": 8, "any": 4}
# Pipeline stages of the chunk kernel's loop over channels, with per-channel gates. On an H200 the pipeline saves 47 of 340 us for
# 8192 tokens of kimi linear.
_CHUNK_STAGES = {"sm_90": 3, "any": 1}
# Limit of registers per thread for the first step's kernels with 16-bit operands. With one gate per token and head, three
# programs fit on an SM. Without the limit the compiler uses 190 registers, and only two programs fit. On an H200, 8192 tokens of
# qwen3-next take 144 us rather than 155, although some registers spill. With per-channel gates, 12 programs of the block kernel fit
# rather than 10. 8192 tokens of kimi linear take 179 us rather than 198; with 128 registers, 209 us.
_REGISTERS: dict[str, dict[str, int]] = {"sm_90": {"maxnreg": 168}, "any": {}}
# With more columns than this, four warps of an NVIDIA GPU have too few registers for the second step: they hold the state and four
# tiles that are computed with it.
_FEW, _WARPS_OF_MORE = 32, {"nvidia": 8, "any": 4}
# Pipeline stages of the loop over chunks: with at most one program per SM/CU, and with more. With two stages, two programs fit on
# an SM of Hopper. On an H200, the second step of qwen3-next takes 257 us for 8192 tokens with 4 stages, and 276 us with 3 stages.
# For 8 x 1024 tokens it takes 196 us, and 229 us with 64 columns, 8 warps and 3 stages.
_STAGES = {"sm_90": (4, 2), "sm_100": (3, 3), "sm_80": (2, 2), "gfx950": (2, 2), "any": (1, 1)}
# Bytes of shared memory for these stages. Layout conversions use the remaining shared memory.
_SHARED = {"sm_90": 208 << 10, "sm_100": 208 << 10, "any": 128 << 10}
# Rows of keys and queries start at multiples of this many channels. Triton then copies them to shared memory asynchronously.
# Correctness requires these async copies too. If keys of 32 or 64 channels pass through registers instead, ptxas of CUDA 12.8 (in
# Triton 3.6) computes shared-memory descriptors from an uninitialised register. The MMAs then read all but the first 16 rows of
# their right operand from arbitrary addresses. `ci/compile_triton.py` looks for such machine code.
_ALIGNMENT = 16


def aligned(x: Tensor) -> Tensor:
    """Returns x ``[tokens, heads, channels]`` if its rows are aligned to `_ALIGNMENT` channels, else a copy padded with zero
    channels.
    """
    if x.shape[-1] % _ALIGNMENT == x.data_ptr() % 16 == x.stride(0) % _ALIGNMENT == x.stride(1) % _ALIGNMENT == 0:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % _ALIGNMENT)).contiguous()


@functools.cache
def columns_for(v_dim: int, most: int, sequence_heads: int, sm_count: int) -> int:
    """Returns the state columns per program, at most ``most``. ``sequence_heads``: the number of sequences times the number of
    value heads.
    """
    columns = min(most, max(_FEWEST_COLUMNS, next_power_of_2(v_dim)))
    while columns > _FEWEST_COLUMNS and 2 * sequence_heads * cdiv(v_dim, columns) <= sm_count:
        columns //= 2
    return columns


@register_kernel(
    "linear_attention",
    "gated_delta_rule_prefill",
    solution="triton",
    capability=TRITON,
    signatures=SIGNATURES,
    traits={
        "k_dim": at_most(_LONGEST),
        "gate": {"head", "channel"},
        "raw_gates": any,
        "dt_bias": any,
        "qk_l2norm": any,
        "has_initial_state": any,
    },
    priority=Priority.PORTABLE,
    tags={"determinism"},
)
def gated_delta_rule_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
    scale: float | None,
    out: Tensor | None,
) -> Tensor:
    """Implements the operator `tokenspeed_kernel.gated_delta_rule_prefill`, which documents the arguments."""
    tokens, heads, k_dim = q.shape
    v_heads, v_dim = v.shape[1:]
    batch = len(state_slots)
    result = out if out is not None and out.is_contiguous() else torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if batch * v_heads * v_dim:
        q, k, v = rows(q), rows(k), rows(v)
        per_channel = g.dim() == 3
        width = k_dim + -k_dim % _ALIGNMENT
        if not per_channel:
            q, k = aligned(q), aligned(k)
        shape = Shape(
            k_dim,
            v_dim,
            v_heads,
            width,
            v_heads // heads,
            gates_of(A_log, dt_bias),
            per_channel,
            qk_l2norm,
            L2NORM_EPS,
            has_initial_state is not None,
        )
        # The Triton interpreter computes wrong dot products of bfloat16.
        dtype = for_architecture({"cpu": torch.float32, "any": q.dtype}, q.device)
        levels = _LEVELS_OF_FLOAT32 if q.dtype == torch.float32 else for_architecture(_LEVELS, q.device)
        if per_channel and k_dim > _WIDEST:
            levels -= 1
        chunk = 1 << levels
        sm_count = sm_count_of(v.device)
        columns = _COLUMNS_OF_FLOAT32 if q.dtype == torch.float32 else for_architecture(_COLUMNS, q.device)
        tile = Tile(
            chunk,
            levels,
            1 << _BLOCK_LEVELS,
            _BLOCK_LEVELS,
            max(16, next_power_of_2(k_dim)),
            columns_for(v_dim, columns, batch * v_heads, sm_count),
            min(1024, max(16, next_power_of_2(batch))),
            common_device.DTYPES[dtype],
            for_architecture(_PRECISION, q.device),
            common_device.DTYPES[torch.bfloat16 if dtype == torch.bfloat16 else torch.float32],
            common_device.DTYPES[torch.float32 if dtype == torch.float32 else _SOLVER],
        )
        cu_seqlens = cu_seqlens.contiguous()
        chunks = tokens // chunk + batch
        solve, scores = torch.empty(2, tokens, v_heads, chunk, dtype=dtype, device=q.device)
        factors = torch.empty(3, tokens, v_heads, dtype=torch.float32, device=q.device)
        decays = torch.empty(chunks, v_heads, k_dim if per_channel else 1, dtype=torch.float32, device=q.device)
        layer = (dense(A_log), dense(dt_bias), cu_seqlens)
        registers = {} if q.dtype == torch.float32 else for_architecture(_REGISTERS, q.device)
        keys_in, queries_in, keys_out = k, q, k
        if per_channel:
            blocks = chunk >> _BLOCK_LEVELS
            # Passed from the block kernel to the chunk kernel: running sums of log2 decays, and inverses of diagonal blocks.
            sums = torch.empty(tokens, v_heads, k_dim, dtype=torch.float32, device=q.device)
            totals = torch.empty(chunks * blocks, v_heads, k_dim, dtype=torch.float32, device=q.device)
            inverses = torch.empty(tokens, v_heads, 1 << _BLOCK_LEVELS, dtype=torch.float32, device=q.device)
            scaled = torch.empty(3, tokens, v_heads, width, dtype=dtype, device=q.device)
            keys_in, queries_in, keys_out = scaled
            channels_device.channel_blocks_kernel[(chunks * blocks, v_heads)](
                q, k, g, beta, *layer, sums, totals, inverses, scores, factors, scale_of(scale, k_dim), batch, tokens, k_dim,
                *q.stride()[:2], *k.stride()[:2], *g.stride(), *beta.stride(),
                SHAPE=shape, TILE=tile._replace(k=min(_BLOCK_CHANNELS, tile.k)), num_warps=_BLOCK_WARPS, **registers,
            )  # fmt: skip
            channels_device.channel_chunks_kernel[(chunks, v_heads)](
                q, k, beta, cu_seqlens, sums, totals, inverses, solve, scores, factors, decays, scaled, batch, tokens, k_dim,
                *q.stride()[:2], *k.stride()[:2], *beta.stride(),
                SHAPE=shape, TILE=tile._replace(k=min(_CHANNELS, tile.k)),
                num_warps=for_architecture(_CHUNK_WARPS, q.device), num_stages=for_architecture(_CHUNK_STAGES, q.device),
            )  # fmt: skip
            shape = shape._replace(group=1)
        else:
            chunks_device.head_gates_kernel[(chunks, v_heads)](
                q, k, g, beta, *layer, solve, scores, factors, decays, scale_of(scale, k_dim), batch, tokens,
                *q.stride()[:2], *k.stride()[:2], *g.stride(), *beta.stride(), SHAPE=shape, TILE=tile, num_warps=_WARPS,
                **registers,
            )  # fmt: skip
        programs = cdiv(v_dim, tile.v) * v_heads * batch
        operands = chunk * ((3 if per_channel else 2) * tile.k + 2 * chunk + tile.v) * dtype.itemsize
        stages = for_architecture(_STAGES, q.device)[programs > sm_count]
        device_code.chunk_states_kernel[(programs,)](
            keys_in,
            queries_in,
            keys_out,
            v,
            solve,
            scores,
            factors,
            decays,
            states,
            cu_seqlens,
            dense(state_slots),
            dense(has_initial_state),
            result,
            tokens,
            *keys_in.stride()[:2],
            *queries_in.stride()[:2],
            *keys_out.stride()[:2],
            *v.stride()[:2],
            *states.stride(),
            SHAPE=shape,
            TILE=tile,
            num_warps=_WARPS if tile.v <= _FEW else for_architecture(_WARPS_OF_MORE, q.device),
            num_stages=max(1, min(stages, for_architecture(_SHARED, q.device) // operands)),
        )
    if out is not None and out is not result:
        return out.copy_(result)
    return result
