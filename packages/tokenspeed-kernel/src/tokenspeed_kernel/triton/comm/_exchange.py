"""Launches the all-reduces over peer memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel.triton.common import (
    common_device,
    for_architecture,
    launch_options,
    may_overlap,
    next_power_of_2,
    sm_count_of,
)
from tokenspeed_kernel.triton.quantization._encode import FP8_NAMES, abilities
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import ONE_SHOT, UNIT, VECTOR, PeerMemory
from tokenspeed_kernel_base.ops.quantization.encodings import FP8_MAX

device_code = DeviceModule(__name__ + "_device")


class Config(NamedTuple):
    """The launch configuration of an all-reduce.

    Attributes:
        warps: warps per program.
        pack: 16-byte vectors that a thread polls at once. If 0, the whole program polls all its vectors until all have arrived,
            which works on any processor.
        programs: the largest number of programs per SM/CU. Programs start in order, and every rank launches the same number of
            programs. So a program that is not resident yet never blocks a program that started earlier.
        early: whether the kernel is launched with PDL. With PDL the kernel starts before the preceding kernel has ended, and waits
            on the device for its end.
    """

    warps: int
    pack: int
    programs: int
    early: bool


# Microseconds per call of all_reduce_rmsnorm on two H200s, by `Config`: 8/2/1 is warps 8, pack 2, programs 1 (in parentheses:
# without PDL). One shot, with a residual, [rows, 2880] in bf16, in a graph of 20 calls:
#    1 row:    8/2/1 2.77, 16/1/1 3.04 (3.49), 4/4/1 3.14, 8/0/1 3.22
#   16 rows:   8/2/1 3.24, 16/1/1 3.41 (3.92), 8/0/1 3.58, 4/4/1 3.61
#   64 rows:   16/1/1 4.47 (4.87), 8/0/1 4.52, 8/2/1 4.70, 4/4/1 5.03
#   256 rows:  16/1/2 7.72, 8/2/2 8.33, 4/4/2 8.56, 16/1/1 9.30
#   1024 rows: 4/4/4 20.86, 8/2/4 21.52, 16/1/2 21.95, 4/1/4 22.30, 4/4/2 22.99
#   8192 rows: 4/4/4 139.7, 4/1/4 141.3, 16/1/2 142.8, 8/2/4 145.1, 16/1/1 185.1
_FEW = Config(8, 2, 1, True)
_SOME = Config(16, 1, 2, True)
_MANY = Config(4, 4, 4, True)
# The largest numbers of rows for which _FEW and _SOME are fastest.
_FEW_ROWS, _SOME_ROWS = 32, 512
# The longest row, in 16-byte vectors, that a program with the warps of `config_for` can also quantise without spilling registers.
_QUANTISED_BY_FEW = 512
# For AMD GPUs; and for CPUs, where Triton interprets one program after another.
_ANYWHERE = Config(4, 0, 1, False)


class _Encoding(NamedTuple):
    """Compile-time parameters of the fp8 output: see `finish` in the device code."""

    GROUP: int
    FORMAT: str
    LIMIT: float
    NATIVE: bool
    INTERPRETED: bool


_NOT_ENCODED = _Encoding(0, "", 0.0, False, False)


def config_for(rows: int, device: torch.device) -> Config:
    """Returns the launch configuration for an all-reduce of ``rows`` rows on a device."""
    if not for_architecture({"nvidia": True, "any": False}, device):
        return _ANYWHERE
    config = _FEW if rows <= _FEW_ROWS else _SOME if rows <= _SOME_ROWS else _MANY
    return config._replace(early=may_overlap(device))


def threads_of(config: Config, device: torch.device) -> int:
    """Returns the number of threads of a program.

    A tile of vectors to send or poll has at least this many vectors, so that no vector is replicated across threads. A replica that
    is sent or read late would be mistaken for data of another call.
    """
    return config.warps * for_architecture({"amd": 64, "any": 32}, device)


def most_programs(config: Config, device: torch.device) -> int:
    """Returns the largest grid of a launch, in programs. Programs loop over the rows with a grid stride."""
    return config.programs * for_architecture(
        {"cpu": 2, "any": sm_count_of(device)}, device
    )  # interpreted programs run one after another


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
    """Launches one all-reduce, optionally fused with residual add, RMSNorm and fp8 quantisation.

    Args:
        operator: the operator's name, for error messages.
        protocol: `ONE_SHOT` or `TWO_SHOT`.
        x, out, residual, residual_out: contiguous tensors.
        row: elements per row; the last row may be shorter.
        weight: the RMSNorm weight; None for the plain sum.
        config: overrides the launch configuration of `config_for`.
        scale_out: the output for the scales, if out is fp8.
        group_size: how many elements share a scale, a power of two of 16-byte vectors; 0 for one scale per row.

    Raises:
        ValueError: the group has no peer memory, or too little; or (at the first call) another rank makes a different call.
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
    # Returns the receive buffers, generation counters and capacities of a protocol, in the order of its kernel's arguments.
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
    """Returns a process group's peer memory, after checking that a message fits.

    The selector checks this too, but calls that name the kernel bypass the selector.

    Raises:
        ValueError: the group has no peer memory, or too little.
    """
    if group.peers is None:
        raise ValueError(f"{operator}: group must have peer memory (ProcessGroup.with_peer_memory), got {group}: {group.peer_gap}")
    gap = group.peers.gap(protocol, nbytes, row_bytes)
    if gap is not None:
        raise ValueError(f"{operator}: x must be a message that the peer memory of {group} holds: {gap}")
    return group.peers
