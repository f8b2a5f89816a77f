"""The MMA warps of `kernel_device`. A *panel* is 64 rows of weights, a *strip* 16 of these rows, and a *block* 64 elements of k.

Weights are dequantised to A fragments of mma.sync m16n8k16 in registers. Tokens are B operands, loaded from shared memory by
ldmatrix. Each CTA sends its partial sums to the CTAs of the cluster that reduce them.

Tokens are stored in shared memory so that `ldmatrix` has no bank conflicts. A core matrix of 128 bytes holds 8 elements of k of
eight tokens. The next eight tokens follow, then the next 8 elements of k.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl.memory_device import copy_piece, load_words
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import BLOCK, CODE_BYTES, PANEL_STRIPS
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, Pipeline, advance, first_to_read
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of, ldmatrix, mma_m16n8k16
from tokenspeed_kernel_nvidia.sm90.common.bulk_device import of_rank
from tokenspeed_kernel_nvidia.sm90.gemm.linear.config import GROUPS, MMA_WARPS, ROWS, SLAB, Config
from tokenspeed_kernel_nvidia.sm90.gemm.linear.decode_device import decode, multipliers_of
from tokenspeed_kernel_nvidia.sm90.gemm.linear.layout import block_bytes
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table

MMA_BARRIER = 1  # named barrier of the MMA warps
CORE_BYTES = 128  # bytes of a core matrix: 8 elements of k of eight tokens
STEPS = 4  # k-steps (MMAs of k = 16) per block; a lane has one word per step


@dataclass(frozen=True)
class WorkSlice:
    """A CTA's slice of the weights: a range of panels by a range of k blocks.

    Attributes:
        rank: rank of the CTA in its cluster.
        first, panels: the first panel and the number of panels; both are the same for all CTAs of the cluster.
        first_block, blocks: the first k block and the number of k blocks of this CTA.
        all_blocks: the number of k blocks of all CTAs together.
    """

    rank: Int32
    first: Int32
    panels: Int32
    first_block: Int32
    blocks: Int32
    all_blocks: Int32


@dataclass(frozen=True)
class Call:
    """The arguments of a launch, and the CTA's shared memory.

    Attributes:
        x: the tokens, in global memory.
        m, k: the number of tokens, and the number of features per token.
        out: the results, with ``n`` columns.
        weights, factors: global addresses of the prepared weights and row factors, see `layout`.
        bias: the global address of the bias; 0 without a bias.
        work: this CTA's slice of the weights.
        ring: the barriers of the ring of weights; the stages of group 0 come first, then those of group 1, and so on.
        sums: the barriers of the buffers of partial sums, one per group of MMA warps.
        columns, buffers, ring_at: shared addresses of the tokens, of the buffers of partial sums, and of the ring of weights.
    """

    x: Matrix
    m: Int32
    k: Int32
    out: Table
    n: Int32
    weights: Int64
    factors: Int64
    bias: Int64
    work: WorkSlice
    ring: Pipeline
    sums: Pipeline
    columns: Int32
    buffers: Int32
    ring_at: Int32


def arrive_at(barrier: Int32, rank: Int32) -> None:
    """Arrives, with release semantics, on a barrier of another CTA of the cluster."""
    cute.arch.inline_ptx("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];", read_only_args=[of_rank(barrier, rank)])


def send_pair(address: Int32, values: Any, barrier: Int32) -> None:
    """Stores two words to another CTA's shared memory; that CTA's ``barrier`` counts the bytes. ``address`` and ``barrier`` are
    results of `of_rank`."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[address, *values, barrier],
    )


class MmaWarps:
    """The MMA warps of the kernel."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.tiles = config.tokens // 8  # tiles of eight tokens
        self.stages = GROUPS * config.stages

    @cute.jit
    def multiply(self, call: Call, warp: Int32):
        """Runs an MMA warp: copies tokens, then computes this CTA's k blocks of the panels of the warp's group. A group computes
        every fourth panel, and each warp of the group computes one strip of each panel.
        """
        self.copy_tokens(call, warp)
        if call.work.blocks > 0:
            self.multiply_panels(call, warp // PANEL_STRIPS, warp % PANEL_STRIPS)

    @cute.jit
    def copy_tokens(self, call: Call, warp: Int32):
        """Copies this CTA's features of all tokens to shared memory, with zeros beyond the last token or feature. A warp copies 32
        features of eight tokens at a time."""
        lane, first = cute.arch.lane_idx(), call.work.first_block * BLOCK
        for turn in cutlass.range(warp, call.work.blocks * (BLOCK // 32 * self.tiles), MMA_WARPS, unroll=1):
            tile, chunk = turn % self.tiles, turn // self.tiles * 4 + lane // 8
            token, feature = tile * 8 + lane % 8, first + chunk * 8
            inside = (token < call.m) & (feature < call.k)
            source = call.x.row(cutlass.select_(inside, token, Int32(0))) + cutlass.select_(inside, feature, Int32(0)) * 2
            to = call.columns + (chunk * self.tiles + tile) * CORE_BYTES + lane % 8 * 16
            copy_piece(to, 0, source, cutlass.select_(inside, Int32(16), Int32(0)))
        cute.arch.inline_ptx("cp.async.wait_all;", read_only_args=[])
        cute.arch.barrier(barrier_id=MMA_BARRIER, number_of_threads=32 * MMA_WARPS)

    # -- MMAs ------------------------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply_panels(self, call: Call, group: Int32, strip: Int32):
        """Computes, and sends, the partial sums of one strip of each panel of an MMA warp group."""
        work, lane = call.work, cute.arch.lane_idx()
        acc = cute.make_rmem_tensor((4 * self.tiles,), Float32)
        at = first_to_read()
        for panel in cutlass.range(group, work.panels, GROUPS, unroll=1):
            acc.fill(0.0)
            for begin in cutlass.range(0, work.blocks, SLAB, unroll=1):
                stage = self.stage_of(at, group)
                call.ring.wait(stage)
                for each in cutlass.range_constexpr(SLAB):
                    if each == 0 or begin + each < work.blocks:
                        columns = call.columns + (begin + each) * (BLOCK // 8 * self.tiles * CORE_BYTES)
                        self.multiply_block(acc, *self.load_block(call, stage, strip, each, lane), columns, lane)
                cute.arch.sync_warp()
                call.ring.release(stage)
                at = advance(at, self.config.stages)
            self.send(call, panel, strip, lane, acc)

    @cute.jit
    def multiply_block(self, acc: cute.Tensor, words: Any, scales: Any, columns: Int32, lane: Int32):
        """Accumulates the MMAs of one k block of a strip. ``columns``: shared address of the block's features of the tokens."""
        left, right = self.decoded(words, scales), []
        for step in cutlass.range_constexpr(STEPS):
            right = self.columns_of(columns, step, lane) if self.tiles > 1 or step % 2 == 0 else right[2:]
            for tile in cutlass.range_constexpr(self.tiles):
                sums = [acc[4 * tile + at] for at in range(4)]
                sums = mma_m16n8k16(self.dtype, sums, left[step], right[2 * tile : 2 * tile + 2])
                for at in cutlass.range_constexpr(4):
                    acc[4 * tile + at] = sums[at]

    def stage_of(self, at: Cursor, group: Int32) -> Cursor:
        """Converts the index of a stage among those of an MMA warp group to its index in the ring buffer."""
        return Cursor(at.stage + group * self.config.stages, at.phase)

    def load_block(self, call: Call, stage: Cursor, strip: Int32, each: int, lane: Int32) -> Any:
        """Loads the lane's words, and the scale words of its two rows, of one block of a strip. ``each``: the block's index in the
        stage."""
        size = block_bytes(self.config.weights)
        block_at = call.ring_at + stage.stage * self.config.stage_bytes + each * self.config.panel_block_bytes + strip * size
        return load_words("shared", block_at + lane * 16, STEPS), self.load_scales(block_at + CODE_BYTES, lane // 4)

    def load_scales(self, scales_at: Int32, row: Int32) -> Any:
        """Loads the scale words of a lane's two rows of a block."""
        if self.config.weights == "mxfp4":
            return [load_words("shared", scales_at + row * 4, 1)]
        return load_words("shared", scales_at + row * 8, 2)

    def decoded(self, words: Any, scales: Any) -> list:
        """Dequantises a lane's words of a block to the A fragments of the block's MMAs."""
        c = self.config
        return [decode(self.dtype, words[step], *multipliers_of(self.dtype, c.weights, scales, step)) for step in range(STEPS)]

    def columns_of(self, columns: Int32, step: int, lane: Int32) -> list:
        """Loads the B fragments of a k-step: two registers for each eight tokens. With only eight tokens, loads the fragments of
        two steps.
        """
        chunk, tile = (2 * step + lane // 8, 0) if self.tiles == 1 else (2 * step + lane // 8 % 2, lane // 16)
        return [*ldmatrix(columns + (chunk * self.tiles + tile) * CORE_BYTES + lane % 8 * 16, False)]

    # -- partial sums ----------------------------------------------------------------------------------------------------------

    @cute.jit
    def send(self, call: Call, panel: Int32, strip: Int32, lane: Int32, acc: cute.Tensor):
        """Sends the partial sums of a strip of a panel to the two CTAs that reduce them, eight rows to each. First waits until all
        CTAs have read the group's previous panel from the buffer."""
        config, group = self.config, panel % GROUPS
        smem_at = call.buffers + group * config.buffer_bytes + (call.work.rank * ROWS + lane // 4) * (config.tokens * 4)
        to = Cursor(group, (panel // GROUPS + 1) % 2)
        call.sums.acquire(to)
        for row in cutlass.range_constexpr(2):
            rank = 2 * strip + row
            there, barrier = of_rank(smem_at + lane % 4 * 8, rank), of_rank(call.sums.full.of(to).toint(), rank)
            for tile in cutlass.range_constexpr(self.tiles):
                at = 4 * tile + 2 * row
                send_pair(there + tile * 32, [acc[at], acc[at + 1]], barrier)
