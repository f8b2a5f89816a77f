"""Device code of `rmsnorm_qkv_rope`: the GEMM of `mm.kernel_device` with residual add and RMSNorm as prologue, RoPE as epilogue.

Weights are loaded through the ring of `mm.kernel_device`. A CTA computes *pairs* of rows of weights: the two elements of a head
that RoPE rotates together. The rows of a pair are adjacent in a tile, so one thread of the epilogue has both results.

* Prologue: every CTA reads all tokens and the residual, and adds them. It keeps these sums, times the norm's weights, in shared
  memory as the A operand of the MMAs.
* Mainloop: the MMA warps split k of every ring stage. At the end of a group of 40 rows of weights, their partial sums are added
  through shared memory, in a fixed order.
* Epilogue: one thread per token and pair divides the results by the token's root mean square, so no MMA waits for the root mean
  square. The thread also multiplies the results by the scales of fp8 weights, and adds the bias. Then it applies RoPE, and writes
  to the output and the cache. mxfp4 weights are scaled when they are dequantised.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import load_words, store_words_shared
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Barriers, Pipeline, first_to_fill, first_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import load_floats, store_floats, store_words
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.config import GROUP_PAIRS, SQUARES, QkvConfig
from tokenspeed_kernel_nvidia.sm90.attention.rmsnorm_qkv_rope.ends_device import Ends, Work, fake_arguments
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import bulk_load
from tokenspeed_kernel_nvidia.sm90.gemm.mm.config import GROUP, HEAD_BYTES, LOAD_BYTES, QUAD_BYTES, ROWS, STAGES
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
    write_byte,
)
from tokenspeed_kernel_nvidia.sm90.gemm.mm.prefetch_device import prefetch_rows

_READY = 1  # named barrier of all threads: mbarriers are initialised and tokens are in shared memory
_MADE = 3  # named barrier of the producer warp and warp 0: mbarriers are initialised
_AT_ONCE = 4  # number of 16-byte chunks of a token that a thread loads at once
_SCALES_AT_ONCE = 8  # number of scales of mxfp4 weights that a thread loads at once


__all__ = ["fake_arguments", "host"]


def host(config: QkvConfig) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return Qkv(config)


@dataclass(frozen=True)
class PairWork(Work):
    """The parameters of prologue and epilogue, and a CTA's share.

    Attributes:
        row_shift: log2 of the number of warps that read one token together.
        pairs, first_pair: the number of pairs of weight rows that this CTA computes, and the first of them.
    """

    row_shift: Int32
    pairs: Int32
    first_pair: Int32


class Qkv(Ends, Mm):
    """The kernel of one configuration. A CTA has the warps of `mm.kernel_device`: one producer warp and ``config.warps`` consumer
    warps.
    """

    def __init__(self, config: QkvConfig) -> None:
        super().__init__(config.gemm)
        self.head_dim = config.head_dim
        self.half = config.half
        self.row_bytes = config.row_bytes

    @cute.jit
    def start(
        self,
        x: cute.Tensor,
        weights: cute.Tensor,
        out: Table,
        bias: Vector,
        scale: Table,
        work: Work,
        ctas: Int32,
        sizes: Any,
        stream: cuda.CUstream,
    ):
        """Launches the kernel. ``sizes``: the fields of `LaunchParameters` after the number of CTAs."""
        config = self.config
        row_shift, chunk_bytes, stages, scales_at, activations_at, ring_at, shared_bytes = sizes
        pairs = weights.shape[1] // 2
        per_cta = pairs // ctas
        self.qkv_kernel(
            Matrix(weights.iterator.toint(), weights.stride[1] * (weights.element_type.width // 8)), stages, ring_at,
            Matrix(x.iterator.toint(), x.stride[0] * 2),
            x.shape[0], chunk_bytes, scales_at, activations_at, out, bias, scale, work, row_shift, per_cta, pairs - per_cta * ctas,
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
        row_shift: Int32,
        pairs: Int32,
        more: Int32,
    ):
        """Runs the kernel. ``pairs``: the minimum number of pairs per CTA; ``more``: the number of CTAs with one pair more."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        own, first = pairs + cutlass.select_(cta < more, Int32(1), Int32(0)), cta * pairs + cutlass.min(cta, more)
        work = PairWork(**vars(given), row_shift=row_shift, pairs=own, first_pair=first)
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
    def row_of_pair(self, work: PairWork, row: Int32):
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
    def load_pairs(self, call: Call, work: PairWork):
        """Loads the CTA's weights into the ring, by one bulk copy per row and stage, because the rows of a tile are not contiguous
        in memory."""
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
    def keep_tokens(self, call: Call, work: PairWork, warp: Int32):
        """Prologue: stores tokens plus residual, times the norm's weights, as MMA operands in shared memory.

        The rows in shared memory are padded with zeros. Each warp stores its sum of squares of its token in shared memory too. CTA
        i also writes token i plus residual to ``total``.
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
                    for which, (from_, wanted) in enumerate(self.sources_of(call.a, work, token, chunk, live)):
                        for word, loaded in enumerate(load_words_if(from_, wanted)):
                            raw[which, turn, word] = loaded
                for turn in cutlass.range_constexpr(_AT_ONCE):
                    chunk, live = begin + turn * step, lives[turn]
                    scales = self.norm_weights(work, [raw[2 + word // 4, turn, word % 4] for word in range(8)])
                    scaled, sums, square = self.scaled_chunk(raw[None, turn, None], scales, square)
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
    def keep_pair_scales(self, call: Call, work: PairWork, begin: Int32):
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

    # -- mainloop ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def compute_pairs(self, call: Call, work: PairWork, warp: Int32):
        """Runs a consumer warp: the prologue, then MMAs and epilogue of one group of weight rows after another."""
        config = self.config
        lane = cute.arch.lane_idx()
        thread, _, _ = cute.arch.thread_idx()
        offset = warp * (QUAD_BYTES * config.loads) + lane % 4 * LOAD_BYTES
        acc = cute.make_rmem_tensor((4,), Float32)
        sums = call.at.sums + ((warp * call.m + lane // 4) * GROUP + lane % 4 * 2) * 4
        own = call.at.ring + lane // 4 * config.pitch + offset
        # The epilogue needs the position and slot of this thread's token. Load both here, to hide the latency of the loads.
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
                self.rotate(call.out, work, token, first, pair, cosine, sine, slot)
            # The next group's partial sums and scales overwrite those of this group.
            if begin + GROUP < call.rows:
                cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)
                if const_expr(self.config.scales == "mx"):
                    self.keep_pair_scales(call, work, begin + GROUP)
                    cute.arch.barrier(barrier_id=COMPUTING, number_of_threads=config.threads)
