"""Arguments and host code of `rmsnorm_qkv_rope`, and the end of its epilogue: RoPE, and the writes to output and cache."""

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
from tokenspeed_kernel_nvidia.cutedsl.registers_device import pack, widened
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import QkvConfig
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table, Vector, type_of
from tokenspeed_kernel_nvidia.sm90.gemm.mm.norm_device import Norm, NormWork


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
class Work(NormWork):
    """Parameters of prologue and epilogue, which a GEMM alone does not have.

    Attributes:
        positions, slots: positions and cache slots of the tokens. The address of ``slots`` is 0 if no cache is written.
        table: cos_sin_cache, the cosines and sines of each position.
        k, v: the caches.
        page_size: slots per page of the caches.
        heads, kv_heads: numbers of query heads and of KV heads.
    """

    positions: Indices
    table: Table
    k: Cache
    v: Cache
    slots: Indices
    page_size: Int32
    heads: Int32
    kv_heads: Int32


class Ends(Norm):
    """The host code and the epilogue.

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
        """Rounds a pair of GEMM results of a token, applies RoPE if the pair belongs to q or k, and writes the pair to the output.
        Writes the pair to the cache too, if it belongs to k or v. Results are rounded before RoPE and after it, as by separate
        kernels.

        Args:
            out: q, k and v of all tokens.
            first: output column of the pair's first element; the second is half a head further.
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
