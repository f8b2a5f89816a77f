"""A process group as a resource, for operators in which several processes take part."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from tokenspeed_kernel_base.checks import describe
from tokenspeed_kernel_base.resources import Resource

# The backend of a group of one process, which sends nothing.
ALONE = "none"


class ProcessGroup(Resource):
    """The processes that take part in a call, as `torch.distributed` knows them. `ProcessGroup.of` makes it.

    Every rank of a group must make the same calls with it, in the same order, with tensors of equal shapes and dtypes. On gloo that
    is made sure of at the first call of each kind, see `check_agreement`. Elsewhere a difference hangs, or gives wrong numbers. The
    ranks must also choose the same kernel: with the same packages, settings and tuned tables they do.

    Attributes:
        rank: this process, from 0.
        world_size: how many processes there are.
        backend: ``"gloo"``, ``"nccl"``...; ``"none"`` for a group of one that torch.distributed knows nothing of.
        time_limit_s: how long `check_agreement` waits for the other ranks, in seconds. May be set.
        key: world size and backend, which is all that decisions may depend on: they must be the same on every rank.
        device: a CUDA device for nccl, any for others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Use `ProcessGroup.of`, which makes one for each group."""
        # Weakly, so that this does not keep a group alive that torch.distributed has destroyed.
        self._group = weakref.ref(group) if group is not None else None
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.backend = str(dist.get_backend(group)) if group is not None else ALONE
        self.time_limit_s = 30.0
        self.key = self.world_size, self.backend
        self.device = torch.device("cuda") if self.backend == "nccl" else None
        self._agreed: set[str] = set()

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
        if group is None:
            if not (dist.is_available() and dist.is_initialized()):
                return _alone
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group must be a torch.distributed.ProcessGroup that this rank belongs to, got {describe(group)}")
        known = _known.get(group)
        if known is None:
            known = _known[group] = cls(group)
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

    def check_agreement(self, call: str) -> None:
        """On gloo, makes sure that every rank makes the same call, the first time that this rank makes it; nothing elsewhere.

        Args:
            call: what is called with what, as it must be on every rank: ``"all_reduce(x: float32 [4, 8])"``.

        Raises:
            ValueError: other ranks make another call; the message has each rank's.
            RuntimeError: some rank made no first call within the time limit. It does something else, or a call that it has made
                before. The group is of no more use then.
        """
        if call in self._agreed or self.backend != "gloo" or self.world_size == 1:
            return
        group = self.group
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=self.time_limit_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"{call}: rank {self.rank} of {self.world_size} waited {self.time_limit_s:g} s for all ranks to make this call for "
                f"the first time, and not every one did; all must make the same calls in the same order ({_first_line(error)})"
            ) from error
        calls: list[str] = [""] * self.world_size
        dist.all_gather_object(calls, call, group)
        if any(other != call for other in calls):
            listed = ", ".join(f"{other} on rank {rank}" for rank, other in enumerate(calls))
            raise ValueError(f"every rank must make the same call, got {listed}")
        self._agreed.add(call)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


_alone = ProcessGroup(None)
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
