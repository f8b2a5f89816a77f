"""Device code of `rmsnorm_qkv_rope`: the GEMM of `mm.kernel_device` with residual add and RMSNorm as prologue, RoPE as epilogue.

Weights are loaded through the ring of `mm.kernel_device`, but a CTA computes *pairs* of rows of weights: the two elements of a head
that RoPE rotates together. The rows of a pair are adjacent in a tile, so one thread of the epilogue has both results. Every CTA
reads all tokens and the residual, and adds them. A CTA keeps these sums, times the norm's weights, in shared memory as an operand
of the MMAs. The epilogue divides a token's results by the root mean square, so no MMA waits for the root mean square. It also
multiplies them by the scales of fp8 weights. mxfp4 weights are scaled when they are dequantised.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, store_half, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, Cursor, Pipeline, first_to_fill, first_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, pack, store_floats, store_words, widened
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import GROUP_PAIRS, SQUARES, QkvConfig
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load, prefetch_bulk
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import GROUP, HEAD_BYTES, LOAD_BYTES, PIECE_BYTES, QUAD_BYTES, ROWS, STAGES
from tokenspeed_kernel_nvidia.sm90.gemm.mm.formats_device import COMPUTING
from tokenspeed_kernel_nvidia.sm90.gemm.mm.kernel_device import Mm
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import (
    Call,
    Matrix,
    Places,
    Table,
    Vector,
    load_byte_if,
    load_float_if,
    load_words_if,
    type_of,
    write_byte,
)

_READY = 1  # named barrier of all threads: mbarriers are initialised and tokens are in shared memory
_MADE = 3  # named barrier of the producer warp and warp 0: mbarriers are initialised
_AT_ONCE = 4  # number of 16-byte chunks of a token that a thread loads at once
_SCALES_AT_ONCE = 8  # number of scales of mxfp4 weights that a thread loads at once


def host(config: QkvConfig) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Qkv(config)


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
    """Parameters of prologue and epilogue, which the GEMM of `mm.kernel_device` does not have.

    Attributes:
        residual, total: the rows of the residual, and of the output for token plus residual; address 0 without a residual.
        norm: the RMSNorm's weights.
        eps: the RMSNorm's epsilon, added to the mean square.
        hidden: elements of a token.
        row_shift: log2 of the number of warps that read one token together.
        positions, slots: positions and cache slots of the tokens. The address of ``slots`` is 0 if no cache is written.
        table: cos_sin_cache, the cosines and sines of each position.
        k, v: the caches.
        page_size: slots per page of the caches.
        heads, kv_heads: numbers of query heads and of KV heads.
        pairs, first_pair: the number of pairs of weight rows that this CTA computes, and the first of them.
    """

    residual: Matrix
    total: Matrix
    norm: Vector
    eps: Float32
    hidden: Int32
    row_shift: Int32
    positions: Indices
    table: Table
    k: Cache
    v: Cache
    slots: Indices
    page_size: Int32
    heads: Int32
    kv_heads: Int32
    pairs: Int32
    first_pair: Int32


class Qkv(Mm):
    """The kernel of one configuration. A CTA has the warps of `mm.kernel_device`: one producer warp and ``config.warps`` consumer
    warps.
    """

    def __init__(self, config: QkvConfig) -> None:
        super().__init__(config.gemm)
        self.head_dim = config.head_dim
        self.half = config.half
        self.row_bytes = config.row_bytes

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
        config = self.config
        hidden, pairs = x.shape[1], out.shape[1] // 2
        per_cta = pairs // ctas
        work = Work(
            Matrix(residual, residual_pitch * 2), Matrix(total, Int64(hidden) * 2), Vector(norm, norm_kind), eps, hidden, row_shift,
            Indices(positions, positions_wide, positions_step), Table(table, table_row, Int64(1)),
            Cache(k_cache, k_page, k_slot, k_head, k_number), Cache(v_cache, v_page, v_slot, v_head, v_number),
            Indices(slots, slots_wide, slots_step), page_size, heads, kv_heads, per_cta, pairs - per_cta * ctas,
        )  # fmt: skip
        self.qkv_kernel(
            Matrix(weights.iterator.toint(), weights.stride[1] * (weights.element_type.width // 8)), stages, ring_at,
            Matrix(x.iterator.toint(), x.stride[0] * 2),
            x.shape[0], chunk_bytes, scales_at, activations_at, Table(out.iterator.toint(), out.stride[0], out.stride[1]),
            Vector(bias, bias_kind), Table(scale, Int64(scale_row), Int64(scale_column)), work,
        ).launch(
            grid=(ctas, 1, 1), block=(config.threads + 32, 1, 1), smem=shared_bytes, stream=stream, use_pdl=True,
            min_blocks_per_mp=config.ctas_at_once, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def qkv_kernel(
        self,
        weights: Matrix,
        stages: Int32,
        ring_at: Int32,
        x: Matrix,
        m: Int32,
        chunk_bytes: Int32,
        scales_at: Int32,
        activations_at: Int32,
        out: Table,
        bias: Vector,
        scale: Table,
        given: Work,
    ):
        """Runs the kernel. In ``given``, ``pairs`` is the least number of pairs per CTA, and ``first_pair`` the number of CTAs with
        one pair more."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        more = given.first_pair
        work = Work(
            given.residual, given.total, given.norm, given.eps, given.hidden, given.row_shift, given.positions,
            given.table,
            given.k, given.v, given.slots, given.page_size, given.heads, given.kv_heads,
            given.pairs + cutlass.select_(cta < more, Int32(1), Int32(0)), cta * given.pairs + cutlass.min(cta, more),
        )  # fmt: skip
        barriers = cute.arch.get_dyn_smem(Int64, alignment=128)
        base = barriers.toint()
        none = Table(Int64(0), Int64(0), Int64(0))
        call = Call(
            x, weights, out, Int32(0), self.row_bytes(work.hidden), bias, none, scale, m, Int32(0), Int32(0), 2 * work.pairs,
            cta, Float32(0.0),
            Pipeline(Barriers(barriers), Barriers(barriers + STAGES)), barriers + 2 * STAGES, barriers + 2 * STAGES + 1,
            barriers + 2 * STAGES + 2,
            Places(
                base + HEAD_BYTES, base + scales_at, base + activations_at, base + ring_at, base + SQUARES,
                base + HEAD_BYTES - LOAD_BYTES, chunk_bytes, stages,
            ),
        )  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        if warp == config.warps:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(STAGES):
                    call.pipe.init(stage, config.warps)
                cute.arch.mbarrier_init(call.ended, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=_READY, number_of_threads=config.threads + 32)
            cute.arch.barrier_arrive(barrier_id=_MADE, number_of_threads=64)
            self.prefetch_pairs(call, work)
            self.load_pairs(call, work)
        else:
            if warp == 0:
                if lane < LOAD_BYTES // 4:
                    store_floats("shared", call.at.zeros + lane * 4, [Float32(0.0)])
                cute.arch.barrier(barrier_id=_MADE, number_of_threads=64)
            self.compute_pairs(call, work, warp)

    # -- weights -------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def row_of_pair(self, work: Work, row: Int32):
        """Returns the output column of row ``row`` of a CTA's weights. RoPE rotates rows 2 j and 2 j + 1 together."""
        pair = work.first_pair + row // 2
        return pair // self.half * self.head_dim + pair % self.half + row % 2 * self.half

    def prefetch_pairs(self, call: Call, work: PairWork) -> None:
        """Prefetches the CTA's weights into L2 until the preceding kernel has ended (PDL)."""
        config = self.config
        prefetch_rows(
            call.ended, lambda row: call.weights.row(self.row_of_pair(work, row)), call.rows, call.row_bytes, config.prefetched,
            config.pace,
        )  # fmt: skip

    @cute.jit
    def load_pairs(self, call: Call, work: Work):
        """Loads the CTA's weights into the ring."""
        config = self.config
        at = first_to_fill()
        for tile in cutlass.range(0, call.rows, ROWS, unroll=1):
            count = cutlass.min(call.rows - tile, ROWS)
            for part in cutlass.range(0, call.row_bytes, config.part_bytes, unroll=1):
                size = cutlass.min(call.row_bytes - part, config.part_bytes)
                call.pipe.acquire(at)
                # PDL: the preceding kernel may have written the weights. Everything that does not need the weights precedes this
                # wait.
                cute.arch.griddepcontrol_wait()
                with cute.arch.elect_one():
                    call.pipe.commit(at, count * size)
                    for row in cutlass.range_constexpr(ROWS):
                        if row < count:
                            to = call.at.ring + at.stage * config.stage_bytes + row * config.pitch
                            from_ = call.weights.row(self.row_of_pair(work, tile + row)) + part
                            bulk_load(to, from_, size, call.pipe.full.of(at).toint())
                at = self.advance(call, at)

    # -- tokens --------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def keep_tokens(self, call: Call, work: Work, warp: Int32):
        """Prologue: stores tokens plus residual, times the norm's weights, as MMA operands in shared memory.

        The rows in shared memory are padded with zeros. The tokens' sums of squares go to shared memory too. CTA i also writes
        token i plus residual to ``total``.
        """
        thread, _, _ = cute.arch.thread_idx()
        planes = self.config.planes
        # A chunk is 16 bytes of a token. `planes` consecutive chunks belong to 16 bytes of a row of weights.
        chunks = call.at.chunk_bytes // LOAD_BYTES * planes
        token = warp >> work.row_shift
        first = thread - (token << (work.row_shift + 5))
        step = Int32(32) << work.row_shift
        square = Float32(0.0)
        if token < call.m:
            begin = first
            while begin < chunks:
                raw = cute.make_rmem_tensor((4, _AT_ONCE, 4), Uint32)
                lives = [(begin + turn * step) * (LOAD_BYTES // 2) < work.hidden for turn in range(_AT_ONCE)]
                # Issue all loads before the first use.
                for turn in cutlass.range_constexpr(_AT_ONCE):
                    chunk, live = begin + turn * step, lives[turn]
                    at = Int64(chunk * LOAD_BYTES)
                    size = cutlass.select_(work.norm.kind == 1, Int32(4), Int32(2))
                    norm_at = work.norm.address + Int64(chunk * (LOAD_BYTES // 2) * size)
                    sources = (
                        (call.a.row(token) + at, live),
                        (work.residual.row(token) + at, live & (work.residual.address != 0)),
                        (norm_at, live),
                        (norm_at + LOAD_BYTES, live & (work.norm.kind == 1)),
                    )
                    for which, (from_, wanted) in enumerate(sources):
                        for word, loaded in enumerate(load_words_if(from_, wanted)):
                            raw[which, turn, word] = loaded
                for turn in cutlass.range_constexpr(_AT_ONCE):
                    chunk, live = begin + turn * step, lives[turn]
                    scales = self.norm_weights(work, [raw[2 + word // 4, turn, word % 4] for word in range(8)])
                    scaled, sums = [], []
                    for word in cutlass.range_constexpr(4):
                        pair, other = widened(self.dtype, raw[0, turn, word]), widened(self.dtype, raw[1, turn, word])
                        total = pack(self.dtype, pair[0] + other[0], pair[1] + other[1])
                        pair = widened(self.dtype, total)
                        square += pair[0] * pair[0] + pair[1] * pair[1]
                        scaled.append(pack(self.dtype, pair[0] * scales[2 * word], pair[1] * scales[2 * word + 1]))
                        sums.append(total)
                    if chunk < chunks:
                        row = chunk % planes * call.m + token
                        column = chunk // planes * LOAD_BYTES
                        operands = self.ordered(scaled)
                        store_words_shared(call.at.activations + row * self.activation_pitch(call) + column, operands)
                    if live & (work.total.address != 0) & (call.rank == token):
                        store_words(work.total.row(token) + Int64(chunk * LOAD_BYTES), sums)
                begin += _AT_ONCE * step
        for power in cutlass.range_constexpr(5):
            square += cute.arch.shuffle_sync_bfly(square, offset=1 << power)
        if cute.arch.lane_idx() == 0:
            store_floats("shared", call.at.gathered + warp * 4, [square])

    @cute.jit
    def keep_pair_scales(self, call: Call, work: Work, begin: Int32):
        """Stores the e8m0 scales of a group of rows of weights in shared memory. ``begin``: the group's first row in this CTA."""
        thread, _, _ = cute.arch.thread_idx()
        vectors = call.at.chunk_bytes // LOAD_BYTES
        count = cutlass.min(call.rows - begin, GROUP) * vectors
        for index in cutlass.range(thread, count, _SCALES_AT_ONCE * self.config.threads, unroll=1):
            found = []
            # Issue all loads before the first use.
            for turn in cutlass.range_constexpr(_SCALES_AT_ONCE):
                each = index + turn * self.config.threads
                row = each // vectors
                vector = each - row * vectors
                live = (each < count) & (vector * LOAD_BYTES < call.row_bytes)
                found.append(load_byte_if(call.b_scale.at(vector, self.row_of_pair(work, begin + row), 1), live))
            for turn in cutlass.range_constexpr(_SCALES_AT_ONCE):
                each = index + turn * self.config.threads
                if each < count:
                    write_byte(call.at.scales + each, found[turn])

    def norm_weights(self, work: Work, words: list[Any]) -> list[Any]:
        """Converts eight of the norm's weights to float32. ``words``: eight loaded words; 16-bit weights are in the first four."""
        half = [each for word in words[:4] for each in widened(cutlass.Float16, word)]
        brain = [each for word in words[:4] for each in widened(cutlass.BFloat16, word)]
        return [
            cutlass.select_(
                work.norm.kind == 1, self.as_number(words[at]), cutlass.select_(work.norm.kind == 2, brain[at], half[at])
            )
            for at in range(8)
        ]

    def as_number(self, word: Uint32) -> Float32:
        """Returns the float32 whose bit pattern is ``word``."""
        return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])

    # -- mainloop ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def compute_pairs(self, call: Call, work: Work, warp: Int32):
        """Runs a consumer warp: the prologue, then MMAs and epilogue of one group of weight rows after another."""
        config = self.config
        lane = cute.arch.lane_idx()
        thread, _, _ = cute.arch.thread_idx()
        offset = warp * (QUAD_BYTES * config.loads) + lane % 4 * LOAD_BYTES
        acc = cute.make_rmem_tensor((4,), Float32)
        sums = call.at.sums + ((warp * call.m + lane // 4) * GROUP + lane % 4 * 2) * 4
        own = call.at.ring + lane // 4 * config.pitch + offset
        # The epilogue needs a token's position and slot. Load both here, to hide the latency of the loads.
        token = thread // GROUP_PAIRS
        real = token < call.m
        self.wait_for_kernel_before(call, warp == 0)
        position = work.positions.load(token, real)
        slot = work.slots.load(token, real & (work.slots.address != 0))
        slot = cutlass.select_(work.slots.address != 0, slot, Int64(-1))
        self.keep_tokens(call, work, warp)
        if const_expr(self.config.scales == "mx"):
            self.keep_pair_scales(call, work, Int32(0))
        cute.arch.barrier(barrier_id=_READY, number_of_threads=config.threads + 32)
        square = Float32(0.0)
        for each in cutlass.range_constexpr(config.warps):
            if Int32(each) >> work.row_shift == token:
                square += load_floats("shared", call.at.gathered + each * 4, 1)
        factor = cute.math.rsqrt(square / Float32(work.hidden) + work.eps)
        at = first_to_read()
        for begin in cutlass.range(0, call.rows, GROUP, unroll=1):
            rows = cutlass.min(call.rows - begin, GROUP)
            mine = real & (thread % GROUP_PAIRS * 2 < rows)
            first = self.row_of_pair(work, begin + thread % GROUP_PAIRS * 2)
            stored = [call.bias.load(first + half * self.half, mine) for half in range(2)]
            factors = [factor, factor]
            if const_expr(self.config.scales == "row"):
                scales = [load_float_if(call.b_scale.at(Int32(0), first + half * self.half, 4), mine) for half in range(2)]
                factors = [factor * scale for scale in scales]
            angle = work.table.at(Int32(position), first % self.head_dim, 4)
            rotates = mine & (first // self.head_dim < work.heads + work.kv_heads)
            cosine, sine = (load_float_if(angle + half * (4 * self.half), rotates) for half in range(2))
            for tile in cutlass.range(0, rows, ROWS, unroll=1):
                acc.fill(0.0)
                for part in cutlass.range(0, call.row_bytes, config.part_bytes, unroll=1):
                    call.pipe.wait(at)
                    slot_at = own + at.stage * config.stage_bytes
                    loads = []
                    for each in cutlass.range_constexpr(config.loads):
                        inside = part + offset + each * QUAD_BYTES < call.row_bytes
                        from_ = cutlass.select_(inside, slot_at + each * QUAD_BYTES, call.at.zeros)
                        loads.append([*load_words("shared", from_, 4)])
                    self.multiply(call, acc, tile, Int32(0), part + offset, loads)
                    cute.arch.sync_warp()
                    call.pipe.release(at)
                    at = self.advance(call, at)
                if lane // 4 < call.m:
                    store_floats("shared", sums + tile * 4, [acc[0], acc[1]])
            cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)
            if mine:
                pair = [Float32(0.0), Float32(0.0)]
                for each in cutlass.range_constexpr(config.warps):
                    some = load_floats("shared", call.at.sums + ((each * call.m + token) * GROUP + thread % GROUP_PAIRS * 2) * 4, 2)
                    pair = [pair[half] + some[half] for half in range(2)]
                pair = [pair[half] * factors[half] + call.bias.number(stored[half]) for half in range(2)]
                self.rotate(call, work, token, first, pair, cosine, sine, slot)
            if begin + GROUP < call.rows:  # the next group's partial sums and scales reuse the buffers
                cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)
                if const_expr(self.config.scales == "mx"):
                    self.keep_pair_scales(call, work, begin + GROUP)
                    cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)

    # -- epilogue ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def rotate(
        self,
        call: Call,
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
            first: output column of the pair's first element.
            pair, cosine, sine: the GEMM results, and the rotation.
            slot: the token's cache slot; negative to write no cache.
        """
        head, number = first // self.head_dim, first % self.head_dim
        both = pack(self.dtype, pair[0], pair[1])
        if head < work.heads + work.kv_heads:
            a, b = widened(self.dtype, both)
            both = pack(self.dtype, a * cosine - b * sine, b * cosine + a * sine)
        to = call.out.at(token, first, 2)
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
