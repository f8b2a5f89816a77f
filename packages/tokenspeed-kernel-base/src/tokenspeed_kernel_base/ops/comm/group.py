"""A process group as a resource, for operators in which several processes take part."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_kernel_base.checks import describe
from tokenspeed_kernel_base.ops.comm.peers import CHUNK, ONE_SHOT, PeerMemory, connect, one_shot_most
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_base.traits import TraitKind

# The backend of a group of one process, which sends nothing.
ALONE = "none"

# The largest message by default, by backend: 8192 rows of 2880 in bfloat16, whose last units are not full; on CPUs, where kernels
# are only interpreted, less.
_PEER_BYTES = {"nccl": 48 << 20, "gloo": 1 << 20}
# Some operators have no protocol but one shot: they can send each rank at least so many bytes.
_LEAST_BYTES = 4 << 20


class ProcessGroup(Resource):
    """The processes that take part in a call, as `torch.distributed` knows them. `ProcessGroup.of` makes it.

    Every rank of a group must make the same calls with it, in the same order, with tensors of equal shapes and dtypes. On gloo, and
    in a group with peer memory, that is made sure of at the first call of each kind, see `check_agreement`. Elsewhere a difference
    hangs, or gives wrong numbers. The ranks must also choose the same kernel: with the same packages, settings and tuned tables
    they do.

    Attributes:
        rank: this process, from 0.
        world_size: how many processes there are.
        backend: ``"gloo"``, ``"nccl"``...; ``"none"`` for a group of one that torch.distributed knows nothing of.
        time_limit_s: how long `check_agreement` waits for the other ranks, in seconds. May be set.
        peers: memory that the ranks write to in one another's devices; None without.
        peer_gap: why there is none; empty where there is.
        peer_time_limit_s: how long a kernel waits for another rank, in seconds, before the launch fails and with it the device's
            context. May be set; graphs keep what they were captured with.
        key: what decisions may depend on, which must be the same on every rank: world size, backend, and peer memory.
        device: a CUDA device for nccl, any for others.
    """

    trait_kinds: ClassVar[Mapping[str, TraitKind]] = {"world_size": int, "backend": str, "link": str}

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None = None,
        peers: PeerMemory | str = "made by ProcessGroup.of, without peer memory",
    ) -> None:
        """Use `ProcessGroup.of` or `ProcessGroup.with_peer_memory`, which make one for each group."""
        # Weakly, so that this does not keep a group alive that torch.distributed has destroyed.
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
        # The group over which ranks compare what they call.
        self._control = weakref.ref(control) if control is not None else self._group if self.backend == "gloo" else None
        self._agreed: set[Hashable] = set()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> ProcessGroup:
        """The resource of a group, the same one each time.

        Args:
            group: of torch.distributed; the default group if not given, or a group of this process alone where torch.distributed is
                not initialised.

        Raises:
            TypeError: it is no group, or this rank does not belong to it.

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
        """The resource of a group whose ranks write to one another's memory, for kernels that need no library between processes.

        Every rank of the group must call this, with the same sizes. The first call allocates and waits for the others; later ones
        give the same resource. Its operators must be called on one stream, or on streams that wait for one another.

        Where the ranks cannot reach one another's memory (several machines, no peer access, one process) the resource has none, and
        kernels that need it are not chosen; ``peer_gap``, and so ``explain``, says why.

        Args:
            group: as for `of`.
            one_shot_bytes: the largest message that every rank sends to all others. It takes ``2 * world_size`` times as much
                memory.
            two_shot_bytes: the largest message that is sent through owners of rows. It takes four times as much memory. By default
                there is memory for 48 MiB in all, on CPUs for 1 MiB.

        Raises:
            TypeError: as `of`.
            ValueError: the group has less peer memory already.
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
                    raise ValueError(f"{name} must be at most {there}, with which {known} was made first, got {wanted}")
        return known

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of torch.distributed; None for a group of this process alone.

        Raises:
            RuntimeError: it was destroyed.
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
        """What a request of any operator says of its group: how many ranks there are, the library between them, and what lies
        between their devices, ``"none"`` without peer memory."""
        link = self.peers.link if self.peers is not None else "none"
        return {"world_size": self.world_size, "backend": self.backend, "link": link}

    def protocol(self, nbytes: int, row_bytes: int = CHUNK) -> str:
        """How kernels send a message over peer memory: ``"one_shot"`` or ``"two_shot"``, or why they do not. The same on every
        rank.

        Args:
            nbytes: of the message.
            row_bytes: of each of its rows; the last one may be shorter.
        """
        return self.peers.protocol(nbytes, row_bytes) if self.peers is not None else f"none: {self.peer_gap}"

    def direct(self, nbytes: int, row_bytes: int = CHUNK) -> str:
        """``"one_shot"`` if kernels can send every other rank so many bytes over peer memory, or why not. The same on every rank.

        Args:
            nbytes: for each rank.
            row_bytes: of each row of that; the last one may be shorter.
        """
        gap = self.peers.gap(ONE_SHOT, nbytes, row_bytes) if self.peers is not None else self.peer_gap
        return ONE_SHOT if gap is None else f"none: {gap}"

    def check_agreement(self, call: str, **arguments: Tensor | Hashable) -> None:
        """Makes sure that every rank makes the same call, the first time that this rank makes it; nothing where ranks have no way
        to tell one another: without gloo and without peer memory.

        Args:
            call: what is called: ``"all_reduce"``.
            arguments: what must be the same on every rank: of tensors dtypes and shapes.

        Raises:
            ValueError: other ranks make another call; the message has each rank's.
            RuntimeError: some rank made no first call within the time limit. It does something else, or a call that it has made
                before. The group is of no more use then.
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
                f"the first time, and not every one did; all must make the same calls in the same order ({_first_line(error)})"
            ) from error
        calls: list[str] = [""] * self.world_size
        dist.all_gather_object(calls, call, control)
        if any(other != call for other in calls):
            listed = ", ".join(f"{other} on rank {rank}" for rank, other in enumerate(calls))
            raise ValueError(f"every rank must make the same call, got {listed}")


def _torch_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that is meant; None for this process alone."""
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
        return cls(group, peers=f"peers' memory is reached in groups of gloo and nccl, not of {backend}")
    sizes = _sizes(world_size, _PEER_BYTES[backend], one_shot_bytes, two_shot_bytes)
    control = group
    if backend == "nccl":
        control = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return cls(group, control, connect(group, control, device, *sizes))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


_alone = ProcessGroup(None, peers="the group has one rank")
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
