"""The device code of `mla_decode` with an fp8 cache: the launch, TMA views, and the loads of queries.

Tile scheduler and warp roles are those of `kernel_device`.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.cutedsl.pipeline_device import Cursor, advance
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.config import LATENT, ROPE, ROWS
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_config import Fp8Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_score_device import Fp8Scorer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.fp8_value_device import Fp8Valuer
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.kernel_device import MlaDecode, slots_first
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.load_device import Loader
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.tile_device import LATENT_CHUNK, Blocks, Call
from tokenspeed_kernel_nvidia.sm90.common.tiles_device import PANEL, gqa_packed, make_tma, tma_load


def host(config: Fp8Config) -> Any:
    """The host function that launches the kernel of a configuration."""
    return MlaDecodeFp8(config)


def fake_arguments(config: Fp8Config) -> tuple[Any, ...]:
    """Placeholder arguments to compile the function of `host` with. e4m3 tensors are passed as bytes."""
    size, rows, byte_rows, ints = arguments.size, arguments.rows, arguments.byte_rows, arguments.ints
    tokens, batch = size(), size()
    shape = tokens, config.heads, LATENT + ROPE
    q = byte_rows(*shape) if config.fp8_queries else rows(config.dtype, *shape)
    out = rows(config.dtype, tokens, config.heads, LATENT)
    kv_cache = byte_rows(size(), size(divisibility=ROWS), LATENT + ROPE)
    page_table = ints(batch, size(), contiguous=False)
    scalars = [*(Int64(0) for _ in range(2)), *(Int32(0) for _ in range(3)), Float32(0), *(Int64(0) for _ in range(2))]
    return q, kv_cache, out, page_table, ints(batch), *scalars, arguments.stream()


class MlaDecodeFp8(Fp8Scorer, Fp8Valuer, MlaDecode):
    """The MLA decode kernel of one configuration for an fp8 cache: `MlaDecode` with fp8 score and value warpgroups."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        out: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        partial: Int64,
        lse: Int64,
        q_len: Int32,
        max_seqlen_k: Int32,
        groups: Int32,
        scale: Float32,
        q_scale: Int64,
        kv_scale: Int64,
        stream: cuda.CUstream,
    ):
        self.launch(
            *self.blocks_of(q, kv_cache), kv_cache, out, page_table, cache_seqlens, partial, lse, q_len, max_seqlen_k, groups,
            scale, q_scale, kv_scale, stream,
        )  # fmt: skip

    def blocks_of(self, q: cute.Tensor, kv_cache: cute.Tensor) -> tuple[Blocks, Blocks]:
        c = self.config
        rows, packed = (c.heads_of_tile, c.tokens_of_tile), gqa_packed(q)
        if c.fp8_queries:
            queries = Blocks(make_tma(self.load_once, packed, (rows, LATENT_CHUNK)), make_tma(self.load_once, packed, (rows, ROPE)))
        else:
            queries = Blocks(make_tma(self.load_once, packed, (rows, PANEL)), None)
        cache = slots_first(kv_cache)
        return queries, Blocks(
            make_tma(self.load_shared, cache, (ROWS, LATENT_CHUNK)), make_tma(self.load_shared, cache, (ROWS, ROPE))
        )

    def load_queries(self, call: Call, q: Blocks, item: Int32, at: Cursor, rope_at: Cursor) -> Cursor:
        load = Loader.load_queries if self.config.fp8_queries else MlaDecodeFp8.load_wide_queries
        return load(self, call, q, item, at, rope_at)

    @cute.jit
    def load_wide_queries(self, call: Call, q: Blocks, item: Int32, at: Cursor, rope_at: Cursor) -> Cursor:
        """Loads a work item's 16-bit queries as chunks of 64 columns. The rotary stage is committed with no bytes."""
        c = self.config
        token, head, _ = self.tile_of(call, item)
        rows = (c.heads_of_tile, c.tokens_of_tile)
        corner = (head, token)
        self.acquire(call.ropes, rope_at, Int32(0))
        targets = self.wide.packed_boxes(call.storage.latent_chunks, *rows, dtype=self.dtype)
        for chunk in cutlass.range_constexpr(c.query_chunks):
            full = self.acquire(call.latent_chunks, at, Int32(self.wide.row_bytes))
            source = cute.domain_offset((corner, chunk * PANEL), q.latents.tensor)
            tma_load(q.latents.atom, source, (rows, PANEL), targets[None, None, 0, 0, at.stage], full)
            at = advance(at, c.latent_chunks)
        return at
