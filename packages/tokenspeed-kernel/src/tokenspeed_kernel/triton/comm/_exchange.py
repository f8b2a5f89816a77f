"""The launch of the all-reduces between peers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import common_device, multiprocessors, next_power_of_2
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT, UNIT, VECTOR, PeerMemory

device_code = DeviceModule(__name__ + "_device")


class Config(NamedTuple):
    """How programs are shaped.

    Attributes:
        warps: of a program.
        pack: vectors that a thread waits for at once; 0 asks for all of a program's.
        programs: on a multiprocessor, at most.
        early: whether the launch begins before the previous kernel has ended.
    """

    warps: int
    pack: int
    programs: int
    early: bool


def config_for(rows: int, vectors: int, device: torch.device) -> Config:
    if device.type != "cuda":
        return Config(4, 0, 1, False)
    return Config(16, 1, 1, True) if rows <= 2 * multiprocessors(device) else Config(4, 4, 4, True)


def exchange(
    protocol: str,
    x: Tensor,
    group: ProcessGroup,
    out: Tensor,
    row: int,
    weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Launches one all-reduce, with what follows it.

    Args:
        protocol: `ONE_SHOT` or `TWO_SHOT`.
        x, out, residual, residual_out: contiguous.
        row: elements of a row; the last one may be short.
        weight: scales the normalised sum; None for the sum itself.
    """
    peers = group.peers
    assert peers is not None
    item = VECTOR // x.element_size()
    vectors, total = row // item, x.numel() // item
    rows = -(-total // vectors)
    config = config or config_for(rows, vectors, x.device)
    block = max(next_power_of_2(vectors), 32 * config.warps * max(config.pack, 1))
    most = config.programs * multiprocessors(x.device)
    kernel = device_code.one_shot_kernel if protocol == ONE_SHOT else device_code.two_shot_kernel
    kernel[(min(rows, most),)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        out,
        out if residual_out is None else residual_out,
        *_memory(protocol, peers),
        rows,
        total,
        group.rank,
        row,
        eps,
        int(group.peer_time_limit_s * 1e9),
        WORLD=group.world_size,
        DTYPE=common_device.DTYPES[x.dtype],
        ROW=vectors,
        BLOCK=block,
        NORM=weight is not None,
        RESIDUAL=residual is not None,
        ONCE=rows <= most,
        EARLY=config.early,
        PACK=config.pack,
        num_warps=config.warps,
        **({"launch_pdl": True} if config.early else {}),
    )


def _memory(protocol: str, peers: PeerMemory) -> tuple[object, ...]:
    if protocol == ONE_SHOT:
        return peers.one_shot_uses, peers.one_shot, peers.one_shot_source, peers.one_shot_bytes
    return (
        peers.two_shot_uses,
        peers.sums_uses,
        peers.two_shot,
        peers.sums,
        peers.two_shot_source,
        peers.sums_source,
        peers.share_bytes,
        peers.two_shot_bytes,
        peers.share_bytes // UNIT,
    )
