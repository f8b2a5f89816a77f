"""Peer memory: each rank of a group writes to memory in the devices of the other ranks.

On GPUs, peer memory is PyTorch's symmetric memory: every rank allocates the same size and gets the addresses of the other ranks'
memory. NVLink multicast is not used. On CPUs, peer memory is a file that the processes of a machine map. There, kernels can be
interpreted.

Kernels implement two protocols:

*One shot*: every rank sends all of its data to every other rank. *Two shots*: each row has an owner rank. The other ranks send
their addends of the row to the owner, and the owner sends the sum to all ranks.

In both protocols, the value of a word shows whether data has arrived. A receive buffer holds `SENTINEL` in each 32-bit word until
data arrives. No rank ever sends `SENTINEL`, and the reader restores it after reading. Receive buffers are double-buffered:
calls alternate between two buffers, so call n + 2 reuses the buffer of call n. The buffer is free by then: call n + 1 has received
data from every other rank, and a rank sends that data only after it has read the data of call n. One use counter per `UNIT` bytes,
on the device, selects the buffer. So graphs may be replayed in any order and calls may have any size. All ranks must make the same
calls in the same order, on one stream or on streams that wait for one another.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SENTINEL = -2147450880
"""0x80008000, two negative zeros of 16 bits, as int32."""

UNIT = 512
"""Bytes of a unit: memory that shares one use counter."""

VECTOR = 16
"""Bytes of one vector store."""

CHUNK = 4096
"""Bytes of a row, for messages that are not made of rows."""

ONE_SHOT, TWO_SHOT = "one_shot", "two_shot"

# Bytes of the largest message that uses one shot, by world size. Larger messages use two shots. Between two H200s, two shots send
# as many bytes as one shot and take 1.1 us longer, so one shot is always better. For more ranks the limits are computed, not
# measured. At a limit, NVLink (372 GB/s) takes 1.1 us for the bytes that two shots save.
ONE_SHOT_MOST = {2: 1 << 40, 3: 1 << 19, 4: 1 << 18, 8: 1 << 16}


def one_shot_most(world_size: int) -> int:
    """Returns the bytes of the largest message that uses one shot rather than two shots."""
    return next(most for size, most in sorted(ONE_SHOT_MOST.items()) if size >= min(world_size, max(ONE_SHOT_MOST)))


class Shared(NamedTuple):
    """Memory of every rank that all ranks may access.

    Attributes:
        addresses: the address of each rank's memory, as this process sees it.
        memory: int32 tensors of the memory in this process: on GPUs the rank's own, on CPUs those of all ranks, in rank order.
        kept: an object that keeps the memory alive.
    """

    addresses: tuple[int, ...]
    memory: tuple[Tensor, ...]
    kept: Any = None


class PeerMemory:
    """This rank's peer memory, and the addresses of all ranks' memory.

    Attributes:
        rank, world_size: this process's rank in the group, and the number of ranks.
        device: the device that the memory belongs to.
        link: the link between the ranks' devices, the same on every rank: ``"nvlink, no multicast"``,
            ``"nvlink, multicast not used"``, ``"pcie"``, ``"mixed"``, ``"unknown"`` if PyTorch cannot tell, ``"host memory"``
            between processes on CPUs.
        one_shot_bytes: bytes of the largest message for one shot, each row padded to a multiple of `UNIT` bytes.
        two_shot_bytes: bytes of the largest message for two shots.
        share_bytes: how many of the two_shot_bytes one rank owns.
        memory: tensors of peer memory in this process: on GPUs the rank's own, on CPUs those of all ranks, in rank order.
        one_shot: the addresses to which this rank sends a one-shot message. The first address belongs to the next rank, and so on.
        one_shot_source: the address at which one-shot messages arrive; messages of rank r arrive at offset ``r * one_shot_bytes``.
        two_shot, two_shot_source: like one_shot and one_shot_source, for the first of two shots. Messages of rank r arrive at
            offset ``r * share_bytes``.
        sums, sums_source: like two_shot and two_shot_source, for the second of two shots, in which only the owner sends a row.
        one_shot_uses, two_shot_uses, sums_uses: int32, one use counter per `UNIT` bytes. The counters in two_shot_uses are grouped
            by owner rank.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, one_shot_bytes: int, two_shot_bytes: int) -> None:
        """Creates the object without its memory. Use `connect` instead, which all ranks call."""
        self.rank, self.world_size, self.device, self.link = rank, world_size, device, "unknown"
        self.one_shot_bytes = -(-one_shot_bytes // UNIT) * UNIT
        self.share_bytes = -(-two_shot_bytes // (UNIT * world_size)) * UNIT
        self.two_shot_bytes = self.share_bytes * world_size
        # The factors of 2 are for double buffering.
        self._two_shot_start = 2 * world_size * self.one_shot_bytes
        self._sums_start = self._two_shot_start + 2 * self.two_shot_bytes
        self.nbytes = self._sums_start + 2 * self.two_shot_bytes
        self.one_shot_uses = torch.zeros(self.one_shot_bytes // UNIT, dtype=torch.int32, device=device)
        self.two_shot_uses = torch.zeros(self.two_shot_bytes // UNIT, dtype=torch.int32, device=device)
        self.sums_uses = torch.zeros_like(self.two_shot_uses)
        self.memory: tuple[Tensor, ...] = ()
        self._kept: Any = None

    def found(self, addresses: Sequence[int], memory: Sequence[Tensor] = (), kept: Any = None) -> None:
        """Sets the addresses and the tensors of all ranks' memory, see `Shared`."""
        self.memory, self._kept = tuple(memory), kept
        others = [addresses[(self.rank + 1 + index) % self.world_size] for index in range(self.world_size - 1)]
        own = addresses[self.rank]
        self.one_shot = tuple(other + self.rank * self.one_shot_bytes for other in others)
        self.one_shot_source = own
        self.two_shot = tuple(other + self._two_shot_start + self.rank * self.share_bytes for other in others)
        self.two_shot_source = own + self._two_shot_start
        self.sums = tuple(other + self._sums_start for other in others)
        self.sums_source = own + self._sums_start

    def protocol(self, nbytes: int, row_bytes: int) -> str:
        """Returns the protocol for a message of rows, `ONE_SHOT` or `TWO_SHOT`, or why it cannot be sent. All ranks get the same
        result."""
        best = ONE_SHOT if nbytes <= one_shot_most(self.world_size) else TWO_SHOT
        for protocol in (best, ONE_SHOT, TWO_SHOT):
            if self.gap(protocol, nbytes, row_bytes) is None:
                return protocol
        return f"none: {self.gap(best, nbytes, row_bytes)}"

    def gap(self, protocol: str, nbytes: int, row_bytes: int) -> str | None:
        """Returns why a protocol cannot send a message of rows, or None if it can."""
        for size in (row_bytes, nbytes):
            if size % VECTOR:
                return f"{size} bytes are not a multiple of {VECTOR}"
        rows, row = -(-nbytes // row_bytes), _whole_units(row_bytes)
        if protocol == TWO_SHOT:
            needed, most = -(-rows // self.world_size) * row, self.share_bytes
        else:
            needed, most = (rows - 1) * row + _whole_units(nbytes - (rows - 1) * row_bytes), self.one_shot_bytes
        return f"{needed} bytes exceed the {most} bytes of peer memory for {protocol}" if needed > most else None


def _whole_units(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


def connect(
    group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device, one_shot_bytes: int, two_shot_bytes: int
) -> PeerMemory | str:
    """Allocates peer memory for the ranks of a group. Every rank must call this function, with the same sizes.

    Args:
        group: the ranks.
        control: a gloo group of the same ranks.
        device: the device of this rank's memory.
        one_shot_bytes, two_shot_bytes: the largest messages of the two protocols.

    Returns:
        The memory; or the reason why there is none, the same text on every rank.
    """
    memory = PeerMemory(dist.get_rank(group), dist.get_world_size(group), device, one_shot_bytes, two_shot_bytes)
    gap = _first_gap(control, _reach_gap(control, device))
    if gap is not None:
        return gap
    shared = allocate(group, control, device, memory.nbytes // 4, SENTINEL)
    if isinstance(shared, str):
        return shared
    memory.found(*shared)
    links: list[str] = [""] * memory.world_size
    dist.all_gather_object(links, _link(control, device), control)
    memory.link = links[0] if len(set(links)) == 1 else "mixed"
    return memory


def allocate(group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device, count: int, value: int) -> Shared | str:
    """Allocates memory of ``count`` 32-bit words for each rank, which all ranks may access, and fills it with a value. Every rank
    must call this function, with the same arguments. When it returns, all memory holds the value.

    Args:
        group, control, device: as for `connect`.

    Returns:
        The memory; or the reason why there is none, the same text on every rank.
    """
    on_gpus = device.type == "cuda"
    shared = _allocate_on_gpus(group, control, device, count, value) if on_gpus else _allocate_in_file(control, count, value)
    if isinstance(shared, str):
        return shared
    if on_gpus:
        torch.cuda.synchronize(device)
    dist.barrier(control)  # no rank may write before all memory holds the value
    return shared


def _first_gap(control: dist.ProcessGroup, gap: str | None) -> str | None:
    """Finds the first rank that has a gap (a reason why peer memory is impossible), and returns that gap; None if no rank has one.
    All ranks get the same result."""
    gaps: list[str | None] = [None] * dist.get_world_size(control)
    dist.all_gather_object(gaps, gap, control)
    return next((f"rank {rank}: {said}" for rank, said in enumerate(gaps) if said is not None), None)


def _reach_gap(control: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why this rank cannot access the other ranks' memory, or None if no reason is known before the memory is mapped."""
    cuda = device.type == "cuda"
    mine = socket.gethostname(), device.type, _uuid(device) if cuda else ""
    all_of: list[tuple[str, str, str]] = [mine] * dist.get_world_size(control)
    dist.all_gather_object(all_of, mine, control)
    hosts = sorted({host for host, _, _ in all_of})
    if len(hosts) > 1:
        return f"the ranks are on several machines: {', '.join(hosts)}"
    if any(kind != device.type for _, kind, _ in all_of):
        return f"some ranks are on {device.type}, some are not"
    if not cuda:
        return None
    if torch.version.hip is not None:
        return "peer memory is off on AMD GPUs: its kernels have run only in the emulator"
    if len({uuid for _, _, uuid in all_of}) < len(all_of):
        return "several ranks share a GPU, where a kernel of one may wait for a kernel of another that cannot start"
    visible = _visible()
    for rank, (_, _, uuid) in enumerate(all_of):
        other = visible.get(uuid)  # memory of a GPU that is invisible to this process is tested later, by mapping it
        if other is not None and other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"its GPU cannot access the memory of rank {rank}'s"
    return None


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _visible() -> dict[str, int]:
    """Returns the device indices of the GPUs that this process sees, by UUID."""
    return {_uuid(index): index for index in range(torch.cuda.device_count())}


def _link(control: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the link between this rank's device and the other ranks' devices, see `PeerMemory`."""
    if device.type != "cuda":
        return "host memory"
    uuids: list[str] = [""] * dist.get_world_size(control)
    dist.all_gather_object(uuids, _uuid(device), control)
    visible = _visible()
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity, _SymmetricMemory  # type: ignore[attr-defined]

        lanes = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[device.index]
        multicast = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index)
        joined = [lanes[visible[uuid]] > 0 for uuid in uuids if visible[uuid] != device.index]
    # PyTorch's private API may have changed, NVML may be missing, or this process may not see a GPU.
    except (ImportError, AttributeError, TypeError, RuntimeError, LookupError):
        return "unknown"
    return ("nvlink, multicast not used" if multicast else "nvlink, no multicast") if all(joined) else "pcie"


def _allocate_on_gpus(
    group: dist.ProcessGroup, control: dist.ProcessGroup, device: torch.device, count: int, value: int
) -> Shared | str:
    from torch.distributed import _symmetric_memory as symmetric

    gap: str | None = None
    try:
        words = symmetric.empty(count, dtype=torch.int32, device=device)
        words.fill_(value)
    except RuntimeError as error:
        gap = f"symmetric memory cannot be allocated: {first_line(error)}"
    gap = _first_gap(control, gap)
    if gap is not None:
        return gap
    try:
        handle = symmetric.rendezvous(words, group)
    except RuntimeError as error:
        gap = f"symmetric memory cannot be mapped: {first_line(error)}"
    gap = _first_gap(control, gap)
    return gap if gap is not None else Shared(tuple(int(address) for address in handle.buffer_ptrs), (words,), handle)


def _allocate_in_file(control: dist.ProcessGroup, count: int, value: int) -> Shared | str:
    """Maps one file for each rank, for processes on CPUs. The files are unlinked before this function returns."""
    own_rank, world_size = dist.get_rank(control), dist.get_world_size(control)
    folders: list[Any] = [tempfile.mkdtemp(prefix="peer_memory_") if own_rank == 0 else None]
    dist.broadcast_object_list(folders, dist.get_global_rank(control, 0), control)
    path, gap = os.path.join(folders[0], "{}"), None
    maps: list[Tensor] = []

    def map_file(rank: int) -> Tensor:
        return torch.from_file(path.format(rank), shared=True, size=count, dtype=torch.int32)

    try:
        own = map_file(own_rank).fill_(value)
    except (OSError, RuntimeError) as error:
        gap = f"a file of {4 * count} bytes cannot be mapped: {first_line(error)}"
    gap = _first_gap(control, gap)
    if gap is None:
        try:
            maps = [own if rank == own_rank else map_file(rank) for rank in range(world_size)]
        except (OSError, RuntimeError) as error:
            gap = f"another rank's file cannot be mapped: {first_line(error)}"
        gap = _first_gap(control, gap)
    if own_rank == 0:
        shutil.rmtree(folders[0], ignore_errors=True)
    return gap if gap is not None else Shared(tuple(each.data_ptr() for each in maps), tuple(maps))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return str(error).partition("\n")[0]
