"""The launch of the all-reduces between peers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    common_device,
    for_architecture,
    launch_options,
    may_overlap,
    multiprocessors,
    next_power_of_2,
)
from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT, UNIT, VECTOR, PeerMemory
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX

device_code = DeviceModule(__name__ + "_device")


class Config(NamedTuple):
    """How programs are shaped.

    Attributes:
        warps: of a program.
        pack: vectors that a thread waits for at once; 0 asks for all of a program's until all are there, on any processor.
        programs: on a multiprocessor, at most. They start in order and there are as many on every rank, so that those which do not
            fit at once wait for none that comes later.
        early: whether the launch begins before the previous kernel has ended, to wait for its end on the device.
    """

    warps: int
    pack: int
    programs: int
    early: bool


# Two H200s, all_reduce_rmsnorm with a residual, [rows, 2880] in bf16, one shot, us a call in a graph of 20, by warps/pack/programs:
#    1 row:    8/2/1 2.77, 16/1/1 3.04 (3.49 without an early launch), 4/4/1 3.14, 8/0/1 3.22
#   16 rows:   8/2/1 3.24, 16/1/1 3.41 (3.92), 8/0/1 3.58, 4/4/1 3.61
#   64 rows:   16/1/1 4.47 (4.87), 8/0/1 4.52, 8/2/1 4.70, 4/4/1 5.03
#   256 rows:  16/1/2 7.72, 8/2/2 8.33, 4/4/2 8.56, 16/1/1 9.30
#   1024 rows: 4/4/4 20.86, 8/2/4 21.52, 16/1/2 21.95, 4/1/4 22.30, 4/4/2 22.99
#   8192 rows: 4/4/4 139.7, 4/1/4 141.3, 16/1/2 142.8, 8/2/4 145.1, 16/1/1 185.1
_FEW = Config(8, 2, 1, True)
_SOME = Config(16, 1, 2, True)
_MANY = Config(4, 4, 4, True)
# Rows up to which each is the best.
_FEW_ROWS, _SOME_ROWS = 32, 512
# Vectors of a row up to which few warps have registers enough to quantise it, too.
_QUANTISED_BY_FEW = 512
# Compiled for AMD GPUs, and interpreted on CPUs, one program after another.
_ANYWHERE = Config(4, 0, 1, False)


class _Encoding(NamedTuple):
    """What the kernels are told of results in 8 bits: see `finish` in the device code."""

    GROUP: int
    FORMAT: str
    LIMIT: float
    NATIVE: bool
    INTERPRETED: bool


_NOT_ENCODED = _Encoding(0, "", 0.0, False, False)


def config_for(rows: int, device: torch.device) -> Config:
    """The shape of programs for so many rows on a device."""
    if not for_architecture({"nvidia": True, "any": False}, device):
        return _ANYWHERE
    config = _FEW if rows <= _FEW_ROWS else _SOME if rows <= _SOME_ROWS else _MANY
    return config._replace(early=may_overlap(device))


def threads_of(config: Config, device: torch.device) -> int:
    """Threads of a program. A tile of vectors that are sent or waited for has at least as many, so that none has two threads: what
    one of them sees or sends later than the other would be taken for something else."""
    return config.warps * for_architecture({"amd": 64, "any": 32}, device)


def most_programs(config: Config, device: torch.device) -> int:
    """How many programs a launch has at most; they take rows in turns."""
    return config.programs * for_architecture({"cpu": 2, "any": multiprocessors(device)}, device)  # interpreted one by one


def exchange(
    operator: str,
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
    scale_out: Tensor | None = None,
    group_size: int = 0,
) -> None:
    """Launches one all-reduce, with what follows it.

    Args:
        operator: whose call it is, for messages.
        protocol: `ONE_SHOT` or `TWO_SHOT`.
        x, out, residual, residual_out: contiguous.
        row: elements of a row; the last one may be short.
        weight: scales the normalised sum; None for the sum itself.
        config: how programs are shaped, if not as `config_for` says.
        scale_out: receives the scales, if out is of an 8-bit float.
        group_size: elements of a row that share one, as many as some power of two of vectors has; 0 for the whole row.

    Raises:
        ValueError: the group has no peer memory, or too little; or (at the first call) another rank calls something else.
        RuntimeError: at the first call, not every rank called in time.
    """
    nbytes = x.numel() * x.element_size()
    peers = checked_peers(operator, protocol, group, nbytes, row * x.element_size())
    group.check_agreement(operator, x=x, by=protocol)
    item = VECTOR // x.element_size()
    vectors, total = row // item, x.numel() // item
    rows = -(-total // vectors)
    config = config or config_for(rows, x.device)
    if scale_out is not None and vectors > _QUANTISED_BY_FEW:
        config = config._replace(warps=max(config.warps, 2 * _MANY.warps))
    block = max(next_power_of_2(vectors), threads_of(config, x.device) * max(config.pack, 1))
    encoding = _NOT_ENCODED
    if scale_out is not None:
        able = abilities(x.device)
        group_vectors = min(group_size // item or block, block)
        encoding = _Encoding(group_vectors, FP8_NAMES[out.dtype], FP8_MAX[out.dtype], able.native, able.interpreted)
    most = most_programs(config, x.device)
    kernel = device_code.one_shot_kernel if protocol == ONE_SHOT else device_code.two_shot_kernel
    kernel[(min(rows, most),)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        out if scale_out is None else out.view(torch.uint8),
        out if scale_out is None else scale_out,
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
        **encoding._asdict(),
        num_warps=config.warps,
        **launch_options(config.early),
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


def checked_peers(operator: str, protocol: str, group: ProcessGroup, nbytes: int, row_bytes: int) -> PeerMemory:
    """The memory of a group, which holds a message. Calls that name the kernel come here without having been asked.

    Raises:
        ValueError: the group has no peer memory, or too little.
    """
    if group.peers is None:
        raise ValueError(f"{operator}: group must have peer memory (ProcessGroup.with_peer_memory), got {group}: {group.peer_gap}")
    gap = group.peers.gap(protocol, nbytes, row_bytes)
    if gap is not None:
        raise ValueError(f"{operator}: x must be a message that the peer memory of {group} holds: {gap}")
    return group.peers
