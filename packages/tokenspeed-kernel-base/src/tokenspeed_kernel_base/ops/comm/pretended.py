"""Simulates one rank of a larger group in a single process, for code that only needs the description of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.comm.peers import PeerMemory

# Simulated one_shot_bytes and two_shot_bytes.
_BYTES = 48 << 20


@contextlib.contextmanager
def as_rank_of(world_size: int) -> Iterator[None]:
    """Context manager in which this process builds cases as one of ``world_size`` ranks does.

    The addresses of the peer memory are invented. So use these cases to select or compile kernels, and do not launch any kernel."""
    if world_size == 1:
        yield
        return
    from unittest.mock import patch  # imported here, because the import takes time and is rarely needed

    peers = PeerMemory(1, world_size, torch.device("cpu"), _BYTES, _BYTES)
    peers.found([(rank + 1) << 40 for rank in range(world_size)])
    group = ProcessGroup(None, peers=peers)
    group.rank, group.world_size, group.backend = 1, world_size, "nccl"
    with patch.object(ProcessGroup, "with_peer_memory", return_value=group):
        yield
