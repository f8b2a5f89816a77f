"""The device code of `mla_extend`: the kernel of `mla_decode.kernel_device` with other work items and masks.

The roles of the warps are those of `mla_decode.kernel_device`. Two CTAs form a cluster, with any number of heads. If one tile of 64
rows holds all new tokens of each sequence, a cluster has only one CTA. `scheduler_device` forms the work items, and `mask_device`
has the masks.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute

from tokenspeed_kernel_nvidia.cutedsl import arguments_device as arguments
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import kernel_device as mla_decode_device
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode import merge_device as mla_decode_merge_device
from tokenspeed_kernel_nvidia.sm90.attention.mla_decode.scheduler_device import items_of
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.config import Config, Fp8Config
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.mask_device import hide
from tokenspeed_kernel_nvidia.sm90.attention.mla_extend.scheduler_device import ExtendWork


def host(config: Config | Fp8Config) -> Any:
    """Returns the host function that launches the kernel of a configuration."""
    return MlaExtend(config)


def fake_arguments(config: Config | Fp8Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `host` returns."""
    tensors = mla_decode_device.fake_arguments(config)[:5]
    scalars = [*(Int64(0) for _ in range(2)), *(Int32(0) for _ in range(4)), Float32(0), *(Int64(0) for _ in range(2))]
    return *tensors, arguments.ints(arguments.size()), *scalars, arguments.stream()


def merge_host(config: Config) -> Any:
    """Returns the host function that launches the merge kernel of a configuration."""
    return MlaExtendMerge(config)


def fake_merge_arguments(config: Config) -> tuple[Any, ...]:
    """Returns placeholder arguments, which have types and layouts but no memory, to compile the function that `merge_host`
    returns."""
    out, *scalars, stream = mla_decode_merge_device.fake_arguments(config)
    return out, arguments.ints(arguments.size()), *scalars, stream


class MlaExtend:
    """The host function that launches the attention kernel of one configuration."""

    def __init__(self, config: Config | Fp8Config) -> None:
        self.config = config
        self.mla = mla_decode_device.kernel_of(config, ExtendWork(config), hide)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_cache: cute.Tensor,
        out: cute.Tensor,
        page_table: cute.Tensor,
        cache_seqlens: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        partial: Int64,
        lse: Int64,
        q_len: Int32,
        max_seqlen_k: Int32,
        is_causal: Int32,
        groups: Int32,
        scale: Float32,
        q_scale: Int64,
        kv_scale: Int64,
        stream: cuda.CUstream,
    ):
        self.mla.launch(
            q, kv_cache, out, page_table, cache_seqlens, cache_seqlens.shape[0], items_of(self.config, q_len), partial, lse, q_len,
            max_seqlen_k, groups, scale, q_scale, kv_scale, cu_seqlens_q.iterator.toint(), is_causal, stream,
        )  # fmt: skip


class MlaExtendMerge:
    """The host function that launches the merge kernel of one configuration. There is one record (see `Results.record`) per CTA
    group."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.merge = mla_decode_merge_device.Merge(config, ExtendWork(config))

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        cu_seqlens_q: cute.Tensor,
        partial: Int64,
        lse: Int64,
        q_len: Int32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        items = items_of(self.config, q_len)
        self.merge.launch(out, partial, lse, items, q_len, groups, groups, cu_seqlens_q.iterator.toint(), stream)
