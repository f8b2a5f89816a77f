"""Launches all-gather, reduce-scatter, MoE dispatch and MoE combine over peer memory. Each row goes only to ranks that need it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenspeed_kernel.triton.comm._exchange import Config, checked_peers, config_for, most_programs, threads_of
from tokenspeed_kernel.triton.common import cdiv, common_device, launch_options, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import CHUNK, ONE_SHOT, UNIT, VECTOR, PeerMemory

device_code = DeviceModule(__name__ + "_device")


def gather(x: Tensor, group: ProcessGroup, out: Tensor) -> None:
    """Launches `all_gather`. Tensors are contiguous and x is not empty."""
    nbytes = x.numel() * x.element_size()
    peers = checked_peers("all_gather", ONE_SHOT, group, nbytes, CHUNK)
    group.check_agreement("all_gather", x=x, by=ONE_SHOT)
    _launch_chunks(device_code.all_gather_kernel, x, group, peers, out, nbytes)


def scatter_sum(x: Tensor, group: ProcessGroup, out: Tensor) -> None:
    """Launches `reduce_scatter`. Tensors are contiguous and x is not empty."""
    nbytes = out.numel() * out.element_size()
    peers = checked_peers("reduce_scatter", ONE_SHOT, group, nbytes, CHUNK)
    group.check_agreement("reduce_scatter", x=x, by=ONE_SHOT)
    _launch_chunks(device_code.reduce_scatter_kernel, x, group, peers, out, nbytes)


def _launch_chunks(kernel: Any, x: Tensor, group: ProcessGroup, peers: PeerMemory, out: Tensor, nbytes: int) -> None:
    # Launches a kernel that treats each rank's ``nbytes`` bytes as rows of CHUNK bytes, whatever the tensor's own rows are.
    rows, vectors = cdiv(nbytes, CHUNK), CHUNK // VECTOR
    config = config_for(rows, x.device)
    kernel[(min(rows, most_programs(config, x.device)),)](
        x, out, *_memory(peers), rows, nbytes // VECTOR, group.rank, _limit(group), **_options(x, group, config, vectors, vectors)
    )


def dispatch(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    group: ProcessGroup,
    out: Tensor,
    weights_out: Tensor,
    ids_out: Tensor,
    row_bytes: int,
) -> None:
    """Launches `moe_dispatch`. Tensors are contiguous and not empty. ``row_bytes`` counts the header and the token."""
    (tokens, hidden), top_k = x.shape, topk_ids.shape[1]
    peers = checked_peers("moe_dispatch", ONE_SHOT, group, tokens * row_bytes, row_bytes)
    group.check_agreement("moe_dispatch", x=x, topk_ids=topk_ids, num_experts=num_experts, by=ONE_SHOT)
    vectors, config = hidden * x.element_size() // VECTOR, config_for(tokens, x.device)
    header, threads = row_bytes // VECTOR - vectors, threads_of(config, x.device)
    if header > threads:
        raise ValueError(f"moe_dispatch: topk_ids must choose at most {2 * threads} experts for this kernel, got {top_k}")
    device_code.moe_dispatch_kernel[(min(tokens, most_programs(config, x.device)),)](
        x,
        topk_weights,
        topk_ids,
        out,
        weights_out,
        ids_out,
        *_memory(peers),
        tokens,
        group.rank,
        num_experts // group.world_size,
        _limit(group),
        TOP_K=top_k,
        HEADER=header,
        BLOCK_HEADER=max(2, next_power_of_2(header)),
        THREADS=threads,
        **_options(x, group, config, vectors, header + vectors),
    )


def combine(x: Tensor, ids: Tensor, group: ProcessGroup, out: Tensor) -> None:
    """Launches `moe_combine`. Tensors are contiguous and not empty."""
    (tokens, hidden), top_k = out.shape, ids.shape[1]
    vectors, config = hidden * x.element_size() // VECTOR, config_for(tokens, x.device)
    row_bytes = (1 + vectors) * VECTOR
    peers = checked_peers("moe_combine", ONE_SHOT, group, tokens * row_bytes, row_bytes)
    group.check_agreement("moe_combine", x=x, ids=ids, by=ONE_SHOT)
    device_code.moe_combine_kernel[(min(tokens, most_programs(config, x.device)),)](
        x,
        ids,
        out,
        *_memory(peers),
        tokens,
        group.rank,
        _limit(group),
        TOP_K=top_k,
        BLOCK_K=next_power_of_2(top_k),
        THREADS=threads_of(config, x.device),
        **_options(x, group, config, vectors, 1 + vectors),
    )


def _memory(peers: PeerMemory) -> tuple[object, ...]:
    return peers.one_shot_uses, peers.one_shot, peers.one_shot_source, peers.one_shot_bytes


def _limit(group: ProcessGroup) -> int:
    return int(group.peer_time_limit_s * 1e9)


def _options(x: Tensor, group: ProcessGroup, config: Config, vectors: int, whole: int) -> dict[str, Any]:
    """Returns the compile-time parameters that all kernels share.

    ``vectors``: the number of 16-byte vectors of a row's data. ``whole``: this number plus the vectors of the row's header.
    """
    return {
        "WORLD": group.world_size,
        "DTYPE": common_device.DTYPES[x.dtype],
        "ROW": vectors,
        "BLOCK": max(next_power_of_2(vectors), threads_of(config, x.device) * max(config.pack, 1)),
        "BLOCK_UNITS": next_power_of_2(cdiv(whole * VECTOR, UNIT)),
        "EARLY": config.early,
        "PACK": config.pack,
        "num_warps": config.warps,
        **launch_options(config.early),
    }
