"""A rank among others that are not there, for those who only want the description of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import PeerMemory

# Memory that it seems to have, in one shot and in two.
_BYTES = 48 << 20


@contextlib.contextmanager
def as_rank_of(world_size: int) -> Iterator[None]:
    """Inside, cases are built in this process as by one rank of so many, with peer memory whose addresses are invented: to see what
    kernels say of such calls, and to compile them. Nothing may be launched."""
    if world_size == 1:
        yield
        return
    from unittest.mock import patch  # importing it takes time, and it is rarely wanted

    peers = PeerMemory(1, world_size, torch.device("cpu"), _BYTES, _BYTES)
    peers.found([(rank + 1) << 40 for rank in range(world_size)])
    group = ProcessGroup(None, peers=peers)
    group.rank, group.world_size, group.backend = 1, world_size, "nccl"
    with patch.object(ProcessGroup, "with_peer_memory", return_value=group):
        yield
