"""The gated delta rule over sequences, in chunks of tokens: what a chunk's tokens are to each other first, all chunks at once; then
states and outputs, chunk after chunk.

Two square matrices of each chunk and value head go from the first step to the second; with gates of channels also the keys and
queries with their decays. No state but the first and the last of a sequence leaves a program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import TRITON, cdiv, common_device, dense, for_architecture, multiprocessors, next_power_of_2
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
    """What a call asks for.

    Attributes:
        k_dim, v_dim: rows and columns of a state.
        v_heads: value heads.
        width: channels of the keys that the walk over chunks reads, k_dim or more; those beyond it are zeros.
        group: value heads that share an operand's head.
        gates, per_channel: see `_gates_device.log_decay`.
        l2norm, eps: whether queries and keys are normalised, and what is added to their squares.
        initial: whether some sequences start from a state.
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
    """What one program works on.

    Attributes:
        chunk, levels: tokens of a chunk, 2 to the power of levels.
        block, block_levels: likewise, of a block of a chunk; see `_channels_device`.
        k, v: channels of keys and columns of a state, powers of two.
        at_once: sequences whose starts are compared in one step.
        dtype, precision: of products.
        pairs: dtype of products of a block's pairs, with gates of channels.
        solver: dtype of products that solve a chunk's system.
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


# A chunk has 2 to the power of its levels tokens. Its system takes work with the square of them, and the walk over chunks waits for
# each. 64 rows are what a warpgroup of Hopper multiplies at once. Where both operands of a product lie in registers, half as many
# fit, and so of float32, whose parts are held as well.
_LEVELS = {"sm_90": 6, "sm_100": 6, "sm_103": 6, "nvidia": 5, "any": 6}
_LEVELS_OF_FLOAT32 = 5
# With gates of channels, and more channels than these, chunks are half as long: shared memory would hold the operands of one chunk
# only. They would not be copied ahead then, which is no matter of speed alone, see `_ALIGNMENT`.
_WIDEST = 128
# Matrix units of NVIDIA take float32 as three products of tf32, with errors of 2^-21; others have float32.
_PRECISION = {"nvidia": "tf32x3", "any": "ieee"}
# For operands in half precision a chunk's system is solved in float16, whose errors of 2^-12 are below theirs. With keys of unit
# length and beta up to 2 no entry of an inverse is above 2: between a beta and two keys it has factors I - beta k k.T, which
# lengthen nothing.
_SOLVER = torch.float16
# Tokens of a block: the fewest rows that matrix units multiply.
_BLOCK_LEVELS = 4
# Channels that a program takes at once, of a block and of a chunk.
_BLOCK_CHANNELS, _CHANNELS = 32, 32
# Sequences are long, and each is walked by v_heads * v_dim / columns programs: few columns make many programs, and each of them
# reads all queries and keys.
# Where both operands of a product lie in registers, and of float32, more than 32 columns would not fit there.
_COLUMNS, _FEWEST_COLUMNS = {"sm_90": 32, "sm_100": 64, "sm_103": 64, "nvidia": 32, "any": 64}, 16
_COLUMNS_OF_FLOAT32 = 32
_LONGEST = 256
# Of a program: a block's tile is small, and within one warp nothing waits at barriers. On an H200 198 us for 8192 tokens of kimi
# linear, and 220 with two warps. Blackwell's products leave a chunk fewer registers.
_WARPS, _BLOCK_WARPS, _CHUNK_WARPS = 4, 1, {"sm_100": 8, "sm_103": 8, "any": 4}
# Stages of the loop over channels, with gates of channels: on an H200 293 us for 8192 tokens of kimi linear rather than 340.
_CHUNK_STAGES = {"sm_90": 3, "any": 1}
# Registers of a thread that computes in half precision. A chunk's matrices with gates of heads: three programs fit where two would
# with the 190 that it would take. On an H200 144 us rather than 155 for 8192 tokens of qwen3-next, though some are spilled. With
# gates of channels, a block's: 12 programs rather than 10, 179 us rather than 198 for kimi linear; with 128 registers 209.
_REGISTERS: dict[str, dict[str, int]] = {"sm_90": {"maxnreg": 168}, "any": {}}
# The registers of four warps would not do, of NVIDIA's, for a walk with more columns than these: the state, and four tiles that are
# computed with it.
_FEW, _WARPS_OF_MORE = 32, {"nvidia": 8, "any": 4}
# Chunks whose operands lie in shared memory at once: where each multiprocessor has one program at most, and where it has more, of
# which two fit with two stages each. On an H200 qwen3-next walks through 8192 tokens in 257 us with 4 stages and in 276 with 3, and
# through 8 x 1024 in 196; with 64 columns, 8 warps and 3 stages in 229.
_STAGES = {"sm_90": (4, 2), "sm_100": (3, 3), "sm_80": (2, 2), "gfx950": (2, 2), "any": (1, 1)}
# Bytes that these operands may take. Layouts are converted in the rest.
_SHARED = {"sm_90": 208 << 10, "sm_100": 208 << 10, "any": 128 << 10}
# Rows of keys and queries begin at multiples of so many channels: Triton copies them to shared memory asynchronously then, as the
# walk over chunks wants it. It is no matter of speed alone: with keys of 32 or 64 channels that are loaded to registers first,
# ptxas of CUDA 12.8, which Triton 3.6 has, computes descriptors of shared memory from a register that nothing wrote, and products
# take all but the first 16 rows of their right operand from anywhere. `ci/compile_triton.py` looks for such machine code.
_ALIGNMENT = 16


def aligned(x: Tensor) -> Tensor:
    """The rows ``[tokens, heads, channels]`` as they are if they are aligned, otherwise a copy with zeros behind their channels."""
    if x.shape[-1] % _ALIGNMENT == x.data_ptr() % 16 == x.stride(0) % _ALIGNMENT == x.stride(1) % _ALIGNMENT == 0:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % _ALIGNMENT)).contiguous()


@functools.cache
def columns_for(v_dim: int, most: int, walks: int, multiprocessors: int) -> int:
    """The columns of a state that a program takes through a sequence, at most ``most``, for so many walks."""
    columns = min(most, max(_FEWEST_COLUMNS, next_power_of_2(v_dim)))
    while columns > _FEWEST_COLUMNS and 2 * walks * cdiv(v_dim, columns) <= multiprocessors:
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
    """See `tokenspeed_kernel.gated_delta_rule_prefill`."""
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
        # Interpreted products of bfloat16 are wrong.
        dtype = for_architecture({"cpu": torch.float32, "any": q.dtype}, q.device)
        levels = _LEVELS_OF_FLOAT32 if q.dtype == torch.float32 else for_architecture(_LEVELS, q.device)
        if per_channel and k_dim > _WIDEST:
            levels -= 1
        chunk = 1 << levels
        units = multiprocessors(v.device)
        columns = _COLUMNS_OF_FLOAT32 if q.dtype == torch.float32 else for_architecture(_COLUMNS, q.device)
        tile = Tile(
            chunk,
            levels,
            1 << _BLOCK_LEVELS,
            _BLOCK_LEVELS,
            max(16, next_power_of_2(k_dim)),
            columns_for(v_dim, columns, batch * v_heads, units),
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
            # What block and chunk programs have in common: sums of log decays, and inverses of blocks.
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
        stages = for_architecture(_STAGES, q.device)[programs > units]
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
