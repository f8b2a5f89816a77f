"""Device code of `mm` with k split over a cluster: the launch, the loads of tokens, and the bias. `tile_device` has the rest."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.registers_device import dtype_of
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import Tma, make_tma, tma_load
from tokenspeed_kernel_nvidia.sm90.gemm.mm.memory_device import Matrix, Table, Vector, store_number
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.config import BLOCK, CLUSTER, THREADS, TILE, Config
from tokenspeed_kernel_nvidia.sm90.gemm.split_k.tile_device import Call, SplitK, weights_tma


def host(config: Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return MmSplitK(config)


def fake_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    m, n, k = (arguments.size() for _ in range(3))
    out = make_fake_tensor(dtype_of(config.dtype), (m, n), (cute.sym_int64(), cute.sym_int64()), assumed_align=2)
    tensors = arguments.rows(config.dtype, m, k), arguments.rows(config.dtype, n, k), out
    return *tensors, Int64(0), Int32(0), Int32(0), arguments.stream()


@dataclass(frozen=True)
class Tokens:
    """The tokens, as TMA loads them."""

    x: Tma


class MmSplitK(SplitK):
    """Launches and runs the kernel of one configuration. TMA loads the tokens unchanged."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        bias: Int64,
        bias_kind: Int32,
        clusters: Int32,
        stream: cuda.CUstream,
    ):
        tokens = make_tma(cpasync.CopyBulkTensorTileG2SOp(), x, (self.config.tokens, BLOCK))
        self.kernel(
            weights_tma(weights), Matrix(weights.iterator.toint(), weights.stride[0] * 2), Vector(bias, bias_kind),
            Table(out.iterator.toint(), out.stride[0], out.stride[1]), x.shape[0], weights.shape[0], x.shape[1], Tokens(tokens),
            self.mma(),
        ).launch(
            grid=(CLUSTER * clusters, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream, use_pdl=True,
            min_blocks_per_mp=1, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        weights: Tma,
        rows: Matrix,
        bias: Vector,
        out: Table,
        m: Int32,
        n: Int32,
        k: Int32,
        given: Tokens,
        mma: cute.TiledMma,
    ):
        storage = SmemAllocator().allocate(self.storage())
        self.run(self.call_of(weights, rows, bias, out, m, n, k, (n + (TILE - 1)) // TILE, mma), storage, given)

    @cute.jit
    def load_columns(self, call: Call, storage: Any, given: Tokens):
        """Loads the CTA's blocks of all tokens, and zeros beyond the last token and element."""
        tokens = self.config.tokens
        boxes = self.columns.boxes(storage.columns, tokens)
        cute.arch.griddepcontrol_wait()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(storage.loaded.data_ptr(), call.blocks * (tokens * BLOCK * 2))
        for block in cutlass.range(call.blocks, unroll=1):
            source = cute.domain_offset((0, (call.first_block + block) * BLOCK), given.x.tensor)
            tma_load(given.x.atom, source, (tokens, BLOCK), boxes[None, None, 0, 0, block], storage.loaded.data_ptr())

    @cute.jit
    def begin(self, call: Call, storage: Any, given: Tokens, warp: Int32):
        self.await_kernel_before(storage, warp)
        cute.arch.mbarrier_wait(storage.loaded.data_ptr(), 0)
        cute.arch.cluster_wait()  # the barriers of all CTAs are initialised

    def prepare(self, call: Call, storage: Any, given: Tokens, kept: Any, row: Int32, other: Int32, token: Int32, turn: int) -> Any:
        """Loads the bias of both rows."""
        return [call.bias.load(each, (each < call.n) & (token < call.m)) for each in (row, other)]

    @cute.jit
    def finish(
        self,
        call: Call,
        given: Tokens,
        kept: Any,
        row: Int32,
        other: Int32,
        token: Int32,
        turn: cutlass.Constexpr[int],
        both: Any,
        operands: Any,
    ):
        """Adds the bias, and writes the results of both rows."""
        for half in cutlass.range_constexpr(2):
            each = other if half else row
            if (each < call.n) & (token < call.m):
                result = both[half] + call.bias.number(operands[half])
                store_number(call.out.at(token, each, 2), result, self.dtype)
