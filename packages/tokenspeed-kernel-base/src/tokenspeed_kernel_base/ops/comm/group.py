"""A process group as a resource, for operators in which several processes take part."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_kernel_base.checks import describe
from tokenspeed_kernel_base.ops.comm.peers import PeerMemory, connect, one_shot_most
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.signature import dtype_name

# The backend of a group of one process, which sends nothing.
ALONE = "none"

# 8192 rows of 2880 in bfloat16, and as much for each row's last unit.
_PEER_BYTES = 48 << 20


class ProcessGroup(Resource):
    """The processes that take part in a call, as `torch.distributed` knows them. `ProcessGroup.of` makes it.

    Every rank of a group must make the same calls with it, in the same order, with tensors of equal shapes and dtypes. On gloo, and
    in a group with peer memory, that is made sure of at the first call of each kind, see `check_agreement`. Elsewhere a difference
    hangs, or gives wrong numbers. The ranks must also choose the same kernel: with the same packages, settings and tuned tables they
    do.

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
        sizes = (self.peers.one_shot_bytes, self.peers.two_shot_bytes) if self.peers is not None else ()
        self.key = self.world_size, self.backend, self.peer_gap, *sizes
        self.device = torch.device("cuda") if self.backend == "nccl" else None
        # Over which ranks tell one another what they call.
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
            one_shot_bytes: the largest message that is sent directly. It takes ``2 * world_size`` times as much memory.
            two_shot_bytes: the largest message that is sent through owners. It takes four times as much memory.

        Raises:
            TypeError: as `of`.
            ValueError: the group has peer memory of other sizes already.
        """
        group = _torch_group(group)
        if group is None:
            return _alone
        known = _connected.get(group)
        sizes = _sizes(dist.get_world_size(group), one_shot_bytes, two_shot_bytes)
        if known is not None:
            if known._wanted != sizes:
                raise ValueError(f"{known} has peer memory for {known._wanted} bytes in one and two shots, got {sizes}")
            return known
        made = _connected[group] = _connect(cls, group, *sizes)
        made._wanted = sizes
        return made

    _wanted: tuple[int, int] = (0, 0)

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

    def protocol(self, row_bytes: int, rows: int) -> str:
        """How kernels send a message over peer memory: ``"one_shot"`` or ``"two_shot"``, or why they do not. The same on every rank.

        Args:
            row_bytes: of a row of the message.
            rows: how many.
        """
        return self.peers.protocol(row_bytes, rows) if self.peers is not None else f"none: {self.peer_gap}"

    def check_agreement(self, call: str, *tensors: Tensor | None, **options: Hashable) -> None:
        """Makes sure that every rank makes the same call, the first time that this rank makes it; nothing where ranks have no way to
        tell one another: without gloo and without peer memory.

        Args:
            call: what is called: ``"all_reduce"``.
            tensors: whose dtypes and shapes must be the same on every rank.
            options: what else must be.

        Raises:
            ValueError: other ranks make another call; the message has each rank's.
            RuntimeError: some rank made no first call within the time limit. It does something else, or a call that it has made
                before. The group is of no more use then.
        """
        if self._control is None or self.world_size == 1:
            return
        key = call, *(None if t is None else (t.dtype, t.shape) for t in tensors), *options.values()
        if key in self._agreed:
            return
        control = self._control()
        if control is None:
            raise RuntimeError(f"{self} was destroyed: make another after torch.distributed is initialised again")
        said = [*("None" if t is None else f"{dtype_name(t.dtype)} {list(t.shape)}" for t in tensors)]
        said += [f"{name}={value}" for name, value in options.items()]
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


def _sizes(world_size: int, one_shot_bytes: int | None, two_shot_bytes: int | None) -> tuple[int, int]:
    one = min(_PEER_BYTES, one_shot_most(world_size)) if one_shot_bytes is None else one_shot_bytes
    two = (0 if one >= _PEER_BYTES else _PEER_BYTES) if two_shot_bytes is None else two_shot_bytes
    for name, value in (("one_shot_bytes", one), ("two_shot_bytes", two)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    return one, two


def _connect(cls: type[ProcessGroup], group: dist.ProcessGroup, one_shot_bytes: int, two_shot_bytes: int) -> ProcessGroup:
    backend = str(dist.get_backend(group))
    if dist.get_world_size(group) == 1:
        return cls(group, peers="the group has one rank")
    if backend not in ("gloo", "nccl"):
        return cls(group, peers=f"peers' memory is reached in groups of gloo and nccl, not of {backend}")
    control = group
    if backend == "nccl":
        control = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return cls(group, control, connect(group, control, device, one_shot_bytes, two_shot_bytes))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


_alone = ProcessGroup(None)
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
