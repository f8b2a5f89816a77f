"""Process groups as resources, for collective operators."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_kernel_base.checks import describe
from tokenspeed_kernel_base.ops.comm.peers import CHUNK, ONE_SHOT, PeerMemory, Shared, allocate, connect, first_line, one_shot_most
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_base.traits import TraitKind

# The backend of a group of one process, which does not communicate.
ALONE = "none"

# The default size of the largest message, in bytes, by backend. nccl: 8192 rows of 2880 bfloat16 elements, each row rounded up to a
# multiple of `UNIT` bytes. gloo: less, because kernels on CPUs run only in an interpreter.
_PEER_BYTES = {"nccl": 48 << 20, "gloo": 1 << 20}
# The least default of one_shot_bytes. So operators that have only the one-shot protocol can send 4 MiB to each rank.
_LEAST_BYTES = 4 << 20


class ProcessGroup(Resource):
    """The processes that take part in a collective call: a group of `torch.distributed`. Made by `ProcessGroup.of`.

    Every rank of a group must make the same calls with it, in the same order, with tensors of equal shapes and dtypes. With gloo or
    peer memory, the ranks compare their first calls of each kind, see `check_agreement`. Without gloo or peer memory, a mismatch
    causes a hang or wrong results. The ranks must also select the same kernel. They do so if packages, settings and tuned tables
    are the same.

    Attributes:
        rank: the rank of this process, from 0.
        world_size: the number of processes.
        backend: ``"gloo"``, ``"nccl"``...; ``"none"`` for a group of one process without torch.distributed.
        time_limit_s: how long `check_agreement` waits for the other ranks, in seconds. May be set.
        peers: the peer memory through which ranks write to one another's devices; None without peer memory.
        peer_gap: why there is no peer memory; empty with peer memory.
        peer_time_limit_s: how long a kernel waits for another rank, in seconds. After that the launch fails, and with it the
            device's context. May be set; captured graphs keep the value of their capture.
        key: the properties that kernel selection may depend on, equal on every rank: world size, backend, and peer memory.
        device: the CUDA device type for nccl, None (any device) otherwise.
    """

    trait_kinds: ClassVar[Mapping[str, TraitKind]] = {"world_size": int, "backend": str, "link": str}

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None = None,
        peers: PeerMemory | str = "made by ProcessGroup.of, without peer memory",
    ) -> None:
        """Use `ProcessGroup.of` and `ProcessGroup.with_peer_memory` instead, which make one resource for each group."""
        # A weak reference, so that a group that torch.distributed has destroyed is not kept alive.
        self._group = weakref.ref(group) if group is not None else None
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.backend = str(dist.get_backend(group)) if group is not None else ALONE
        self.time_limit_s = 30.0
        self.peer_time_limit_s = 600.0
        self.peers = peers if isinstance(peers, PeerMemory) else None
        self.peer_gap = peers if isinstance(peers, str) else ""
        known = (self.peers.one_shot_bytes, self.peers.two_shot_bytes, self.peers.link) if self.peers is not None else ()
        self.key = self.world_size, self.backend, self.peer_gap, *known
        self.device = torch.device("cuda") if self.backend == "nccl" else None
        # The group over which ranks compare their calls.
        self._control = weakref.ref(control) if control is not None else self._group if self.backend == "gloo" else None
        self._agreed: set[Hashable] = set()
        self._words: dict[Hashable, Shared] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> ProcessGroup:
        """Returns the resource of a group. All calls for one group return the same object.

        Args:
            group: a group of torch.distributed. Default: torch.distributed's default group, or a group of this process alone if
                torch.distributed is not initialised.

        Raises:
            TypeError: group is not a process group, or this rank does not belong to it.

        Example:
            >>> from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
            >>> ProcessGroup.of().world_size
            1
        """
        group = _torch_group(group)
        if group is None:
            return _alone
        known = _known.get(group)
        if known is None:
            known = _known[group] = cls(group)
        return known

    @classmethod
    def with_peer_memory(
        cls, group: dist.ProcessGroup | None = None, *, one_shot_bytes: int | None = None, two_shot_bytes: int | None = None
    ) -> ProcessGroup:
        """Returns the resource of a group with peer memory, for kernels that write to other ranks' memory directly.

        Every rank of the group must call this function, with the same sizes. The first call allocates the memory and waits for the
        other ranks; later calls return the same resource. Operators with this group must run on one stream, or on streams that wait
        for one another.

        If the ranks cannot access one another's memory (several machines, no peer access, one process), the resource has no peer
        memory, and kernels that need it are not eligible. ``peer_gap`` and ``explain`` state the reason.

        Args:
            group: the process group, as for `of`.
            one_shot_bytes: the largest message of the one-shot protocol, in which every rank sends to all others. The protocol
                takes ``2 * world_size`` times this many bytes of memory.
            two_shot_bytes: the largest message of the two-shot protocol, in which each row has an owner rank. The protocol takes
                four times this many bytes of memory. By default, one of the protocols can send messages of up to 48 MiB, or up to
                1 MiB on CPUs.

        Raises:
            TypeError: as for `of`.
            ValueError: an earlier call has made less peer memory for the group.
        """
        group = _torch_group(group)
        if group is None:
            return _alone
        known = _connected.get(group)
        if known is None:
            known = _connected[group] = _connect(cls, group, one_shot_bytes, two_shot_bytes)
        if known.peers is not None:
            for name, wanted in (("one_shot_bytes", one_shot_bytes), ("two_shot_bytes", two_shot_bytes)):
                there = getattr(known.peers, name)
                if wanted is not None and wanted > there:
                    raise ValueError(f"{name} must be at most {there}, the size in the first call for {known}, got {wanted}")
        return known

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of torch.distributed; None for a group of this process alone.

        Raises:
            RuntimeError: the group was destroyed.
        """
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"{self} was destroyed: make another with ProcessGroup.of after torch.distributed is initialised again"
            )
        return group

    def __repr__(self) -> str:
        return f"ProcessGroup(rank {self.rank} of {self.world_size}, {self.backend})"

    @property
    def traits(self) -> dict[str, object]:
        """The group's traits in an operator's request: the number of ranks, the communication library, and the link between the
        ranks' devices. The link is ``"none"`` without peer memory."""
        link = self.peers.link if self.peers is not None else "none"
        return {"world_size": self.world_size, "backend": self.backend, "link": link}

    def protocol(self, nbytes: int, row_bytes: int = CHUNK) -> str:
        """Returns the protocol for a message over peer memory, ``"one_shot"`` or ``"two_shot"``; otherwise the reason why neither
        is possible. All ranks get the same result.

        Args:
            nbytes: bytes of the message.
            row_bytes: bytes of each row of the message; the last row may be shorter.
        """
        return self.peers.protocol(nbytes, row_bytes) if self.peers is not None else f"none: {self.peer_gap}"

    def direct(self, nbytes: int, row_bytes: int = CHUNK) -> str:
        """Returns ``"one_shot"`` if kernels can send a message to every other rank over peer memory, otherwise the reason why they
        cannot. All ranks get the same result.

        Args:
            nbytes: bytes of the message for each rank.
            row_bytes: bytes of each row of the message; the last row may be shorter.
        """
        gap = self.peers.gap(ONE_SHOT, nbytes, row_bytes) if self.peers is not None else self.peer_gap
        return ONE_SHOT if gap is None else f"none: {gap}"

    def shared_words(self, name: str, count: int) -> Shared:
        """Returns memory of every rank that all ranks may access, for kernels that have protocols of their own.

        The first call with a name and a count allocates zeroed memory and waits for the other ranks, which must make the same call.
        Later calls return the same memory.

        Args:
            name: the memory's name, such as the operator's.
            count: the number of 32-bit words.

        Raises:
            ValueError: the group has no peer memory; or another rank makes a different call.
            RuntimeError: the memory cannot be allocated; or some rank did not make the first call within the time limit; or a first
                call is made while a graph is captured.
        """
        known = self._words.get((name, count))
        if known is not None:
            return known
        group, control = self.group, None if self._control is None else self._control()
        if self.peers is None or group is None or control is None:
            raise ValueError(f"{name}: group must have peer memory (ProcessGroup.with_peer_memory), got {self}: {self.peer_gap}")
        if self.device is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{name}: make the call once outside of a graph: it allocates memory with the other ranks")
        self.check_agreement("shared_words", name=name, count=count)
        found = allocate(group, control, self.peers.device, count, 0)
        if isinstance(found, str):
            raise RuntimeError(f"{name}: {found}")
        self._words[name, count] = found
        return found

    def check_agreement(self, call: str, **arguments: Tensor | Hashable) -> None:
        """Compares a call with the other ranks' calls, the first time that this rank makes it.

        Without gloo and without peer memory the ranks cannot compare calls, and nothing is checked.

        Args:
            call: the name of the call, for example ``"all_reduce"``.
            arguments: values that must be the same on every rank. For tensors, only dtypes and shapes are compared.

        Raises:
            ValueError: another rank makes a different call; the message lists every rank's call.
            RuntimeError: some rank did not make a first call of this kind within the time limit. That rank does something else or
                repeats an earlier call. The group is then unusable.
        """
        if self._control is None or self.world_size == 1:
            return
        key = call, *((a.dtype, a.shape) if isinstance(a, Tensor) else a for a in arguments.values())
        if key in self._agreed:
            return
        control = self._control()
        if control is None:
            raise RuntimeError(f"{self} was destroyed: make another after torch.distributed is initialised again")
        said = (
            f"{name}: {dtype_name(a.dtype)} {list(a.shape)}" if isinstance(a, Tensor) else f"{name}={a}"
            for name, a in arguments.items()
        )
        self._agree(control, f"{call}({', '.join(said)})")
        self._agreed.add(key)

    def _agree(self, control: dist.ProcessGroup, call: str) -> None:
        try:
            dist.monitored_barrier(control, timeout=timedelta(seconds=self.time_limit_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"{call}: rank {self.rank} of {self.world_size} waited {self.time_limit_s:g} s for all ranks to make this call for "
                f"the first time, and not every one did; all must make the same calls in the same order ({first_line(error)})"
            ) from error
        calls: list[str] = [""] * self.world_size
        dist.all_gather_object(calls, call, control)
        if any(other != call for other in calls):
            listed = ", ".join(f"{other} on rank {rank}" for rank, other in enumerate(calls))
            raise ValueError(f"every rank must make the same call, got {listed}")


def _torch_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the given group, or by default torch.distributed's default group. The result None stands for a group of this process
    alone."""
    if group is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup that this rank belongs to, got {describe(group)}")
    return group


def _sizes(world_size: int, most: int, one_shot_bytes: int | None, two_shot_bytes: int | None) -> tuple[int, int]:
    one = min(most, max(one_shot_most(world_size), _LEAST_BYTES)) if one_shot_bytes is None else one_shot_bytes
    two = (0 if one >= most else most) if two_shot_bytes is None else two_shot_bytes
    for name, value in (("one_shot_bytes", one), ("two_shot_bytes", two)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    return one, two


def _connect(
    cls: type[ProcessGroup], group: dist.ProcessGroup, one_shot_bytes: int | None, two_shot_bytes: int | None
) -> ProcessGroup:
    backend, world_size = str(dist.get_backend(group)), dist.get_world_size(group)
    if world_size == 1:
        return cls(group, peers="the group has one rank")
    if backend not in _PEER_BYTES:
        return cls(group, peers=f"peer memory needs the backend gloo or nccl, the group has {backend}")
    sizes = _sizes(world_size, _PEER_BYTES[backend], one_shot_bytes, two_shot_bytes)
    control = group
    if backend == "nccl":
        control = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return cls(group, control, connect(group, control, device, *sizes))


_alone = ProcessGroup(None, peers="the group has one rank")
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
