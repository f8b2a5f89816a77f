"""What the kernels of `rmsnorm_qkv_rope` share: arguments, host code, and the elementwise code of prologue and epilogue."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.memory_device import store_half
from tokenspeed_kernel_nvidia.cutedsl.registers_device import float_of, pack, widened
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import QkvConfig
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import LOAD_BYTES
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table, Vector, type_of


def fake_arguments(config: QkvConfig) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    dtype = type_of(config.dtype)
    stored = dtype if config.weights == "dense" else cutlass.Uint8
    tokens, hidden, columns = (arguments.size() for _ in range(3))
    depth = arguments.size() if config.weights == "mxfp4" else hidden
    tensors = (
        make_fake_tensor(dtype, (tokens, hidden), (cute.sym_int64(divisibility=8), 1), assumed_align=16),
        make_fake_tensor(stored, (depth, columns), (1, cute.sym_int64(divisibility=128 // stored.width)), assumed_align=16),
        make_fake_tensor(dtype, (tokens, columns), (cute.sym_int64(), 1), assumed_align=2),
    )
    residual = Int64(0), Int64(0), Int64(0)
    vectors = Int64(0), Int32(0), Int64(0), Int32(0), Int64(0), Int32(0), Int32(0)
    turn = *(Int64(0), Int32(0), Int32(0)), Int64(0), Int64(0)
    caches = *(Int64(0) for _ in range(10)), Int64(0), Int32(0), Int32(0), Int32(0)
    sizes = *(Int32(0) for _ in range(2)), Float32(0), *(Int32(0) for _ in range(8))
    return (*tensors, *residual, *vectors, *turn, *caches, *sizes, arguments.stream())


@dataclass(frozen=True)
class Indices:
    """A vector of integers in global memory: its address, 1 if its elements have 64 bits (otherwise 0), and its stride in
    elements."""

    address: Int64
    wide: Int32
    step: Int32

    def load(self, index: Int32, condition: Boolean) -> Any:
        """Loads element ``index`` as int64, or returns 0 if ``condition`` is false."""
        size = cutlass.select_(self.wide != 0, Int32(8), Int32(4))
        return cute.arch.inline_ptx(
            "{ .reg .pred p, q; .reg .b32 t; setp.eq.s32 p, {$r1}, 1; setp.eq.s32 q, {$r1}, 0; mov.b64 {$w0}, 0; "
            "@p ld.global.b64 {$w0}, [{$r0}]; @q ld.global.b32 t, [{$r0}]; @q cvt.s64.s32 {$w0}, t; }",
            write_only_types=[Int64],
            read_only_args=[
                self.address + Int64(index) * Int64(self.step * size),
                cutlass.select_(condition, self.wide, Int32(2)),
            ],
        )


@dataclass(frozen=True)
class Cache:
    """A K or V cache: its global address, and its strides between pages, slots, heads and elements of a head (``number``), in
    elements."""

    address: Int64
    page: Int64
    slot: Int64
    head: Int64
    number: Int64

    @cute.jit
    def at(self, page: Int32, slot: Int32, head: Int32, number: Int32):
        """Returns the global address of an element of the cache."""
        return self.address + (page * self.page + slot * self.slot + head * self.head + number * self.number) * 2


@dataclass(frozen=True)
class Work:
    """Parameters of prologue and epilogue, which a GEMM alone does not have.

    Attributes:
        residual, total: the rows of the residual, and of the output for token plus residual; address 0 without a residual.
        norm: the RMSNorm's weights.
        eps: the RMSNorm's epsilon, added to the mean square.
        hidden: elements of a token.
        positions, slots: positions and cache slots of the tokens. The address of ``slots`` is 0 if no cache is written.
        table: cos_sin_cache, the cosines and sines of each position.
        k, v: the caches.
        page_size: slots per page of the caches.
        heads, kv_heads: numbers of query heads and of KV heads.
    """

    residual: Matrix
    total: Matrix
    norm: Vector
    eps: Float32
    hidden: Int32
    positions: Indices
    table: Table
    k: Cache
    v: Cache
    slots: Indices
    page_size: Int32
    heads: Int32
    kv_heads: Int32


class Ends:
    """The host code, and the ends of both kernels: prologue and epilogue.

    Attributes:
        dtype: dtype of tokens and results.
        head_dim, half: elements of a head, and half of them.
    """

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        residual: Int64,
        residual_pitch: Int64,
        total: Int64,
        norm: Int64,
        norm_kind: Int32,
        bias: Int64,
        bias_kind: Int32,
        scale: Int64,
        scale_row: Int32,
        scale_column: Int32,
        positions: Int64,
        positions_wide: Int32,
        positions_step: Int32,
        table: Int64,
        table_row: Int64,
        k_cache: Int64,
        k_page: Int64,
        k_slot: Int64,
        k_head: Int64,
        k_number: Int64,
        v_cache: Int64,
        v_page: Int64,
        v_slot: Int64,
        v_head: Int64,
        v_number: Int64,
        slots: Int64,
        slots_wide: Int32,
        slots_step: Int32,
        page_size: Int32,
        heads: Int32,
        kv_heads: Int32,
        eps: Float32,
        ctas: Int32,
        row_shift: Int32,
        chunk_bytes: Int32,
        stages: Int32,
        scales_at: Int32,
        activations_at: Int32,
        ring_at: Int32,
        shared_bytes: Int32,
        stream: cuda.CUstream,
    ):
        work = Work(
            Matrix(residual, residual_pitch * 2), Matrix(total, Int64(x.shape[1]) * 2), Vector(norm, norm_kind), eps, x.shape[1],
            Indices(positions, positions_wide, positions_step), Table(table, table_row, Int64(1)),
            Cache(k_cache, k_page, k_slot, k_head, k_number), Cache(v_cache, v_page, v_slot, v_head, v_number),
            Indices(slots, slots_wide, slots_step), page_size, heads, kv_heads,
        )  # fmt: skip
        sizes = row_shift, chunk_bytes, stages, scales_at, activations_at, ring_at, shared_bytes
        self.start(
            x, weights, Table(out.iterator.toint(), out.stride[0], out.stride[1]), Vector(bias, bias_kind),
            Table(scale, Int64(scale_row), Int64(scale_column)), work, ctas, sizes, stream,
        )  # fmt: skip

    # -- prologue ------------------------------------------------------------------------------------------------------------------

    def norm_weights(self, work: Work, words: list[Any]) -> list[Any]:
        """Converts eight of the norm's weights to float32. ``words``: eight loaded words; 16-bit weights are in the first four."""
        half = [each for word in words[:4] for each in widened(cutlass.Float16, word)]
        brain = [each for word in words[:4] for each in widened(cutlass.BFloat16, word)]
        return [
            cutlass.select_(work.norm.kind == 1, float_of(words[at]), cutlass.select_(work.norm.kind == 2, brain[at], half[at]))
            for at in range(8)
        ]

    def sources_of(self, x: Matrix, work: Work, token: Int32, chunk: Int32, live: Boolean) -> tuple:
        """Returns the global addresses of chunk number ``chunk``, 16 bytes, of a token, of its residual, and of the norm's weights.
        These are two addresses: 16-bit weights are at the first one, float32 weights at both. Each address stands with whether to
        load from it.

        Args:
            live: whether the token and the chunk exist.
        """
        at = Int64(chunk * LOAD_BYTES)
        size = cutlass.select_(work.norm.kind == 1, Int32(4), Int32(2))
        norm_at = work.norm.address + Int64(chunk * (LOAD_BYTES // 2) * size)
        return (
            (x.row(token) + at, live),
            (work.residual.row(token) + at, live & (work.residual.address != 0)),
            (norm_at, live),
            (norm_at + LOAD_BYTES, live & (work.norm.kind == 1)),
        )

    def scaled_chunk(self, raw: cute.Tensor, scales: list, square: Float32) -> tuple:
        """Returns a chunk's words as MMA operands (token plus residual, times the norm's weights), the sums themselves, and
        ``square`` plus their squares.

        Args:
            raw: the chunk's words of the token, ``raw[0, word]``, and of the residual, ``raw[1, word]``.
            scales: the norm's weights, float32.
        """
        scaled, sums = [], []
        for word in range(4):
            pair, other = widened(self.dtype, raw[0, word]), widened(self.dtype, raw[1, word])
            total = pack(self.dtype, pair[0] + other[0], pair[1] + other[1])
            pair = widened(self.dtype, total)
            square += pair[0] * pair[0] + pair[1] * pair[1]
            scaled.append(pack(self.dtype, pair[0] * scales[2 * word], pair[1] * scales[2 * word + 1]))
            sums.append(total)
        return scaled, sums, square

    # -- epilogue ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def rotate(
        self,
        out: Table,
        work: Work,
        token: Int32,
        first: Int32,
        pair: Any,
        cosine: Float32,
        sine: Float32,
        slot: Int64,
    ):
        """Rounds a pair of GEMM results of a token, applies RoPE if the pair belongs to q or k, and writes the pair to the output
        and to the cache.

        Args:
            out: q, k and v of all tokens.
            first: output column of the pair's first element.
            pair, cosine, sine: the GEMM results, and the rotation.
            slot: the token's cache slot; negative to write no cache.
        """
        head, number = first // self.head_dim, first % self.head_dim
        both = pack(self.dtype, pair[0], pair[1])
        if head < work.heads + work.kv_heads:
            a, b = widened(self.dtype, both)
            both = pack(self.dtype, a * cosine - b * sine, b * cosine + a * sine)
        to = out.at(token, first, 2)
        store_half(to, both)
        store_half(to + 2 * self.half, both >> 16)
        if (slot >= 0) & (head >= work.heads):
            slot_index = Int32(slot)
            page = Int32(Uint32(slot_index) // Uint32(work.page_size))
            in_page = slot_index - page * work.page_size
            key = work.k.at(page, in_page, head - work.heads, number)
            value = work.v.at(page, in_page, head - work.heads - work.kv_heads, number)
            keys = head < work.heads + work.kv_heads
            to = cutlass.select_(keys, key, value)
            step = cutlass.select_(keys, work.k.number, work.v.number) * (2 * self.half)
            store_half(to, both)
            store_half(to + step, both >> 16)
