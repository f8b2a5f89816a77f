"""The block in which kernels are emulated: its settings, its launches, and the memory that kernels may access."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, get_args

import torch

from kernel_emulation.errors import EmulationError

Bounds = Literal["view", "storage"]
Edit = Callable[[str, str], str]


@dataclass(frozen=True)
class Allocation:
    """A byte range ``[start, end)`` that kernels may access. ``name`` is for messages. ``block`` is the start of the containing
    memory block, or 0 if the range itself is the block."""

    start: int
    end: int
    name: str
    block: int = 0

    def __str__(self) -> str:
        return f"{self.name} of {self.end - self.start} bytes at {self.start:#x}"


def allocation_of(tensor: torch.Tensor, name: str, bounds: Bounds = "view") -> Allocation:
    """Returns the byte range of a tensor's elements, or of all of its storage."""
    storage = tensor.untyped_storage()
    block, size = storage.data_ptr(), tensor.element_size()
    if bounds == "storage":
        return Allocation(block, block + storage.nbytes(), name, block)
    start = block + int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return Allocation(start, start, name)
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Allocation(start, start + (last + 1) * size, name, block)


@dataclass(kw_only=True)
class LaunchReport:
    """One executed kernel launch.

    Attributes:
        kernel: the kernel's name.
        grid: number of workgroups or CTAs in x, y, z.
        instructions: number of instructions that the emulator executed.
    """

    kernel: str
    grid: tuple[int, int, int]
    instructions: int

    @property
    def resources(self) -> str:
        """Describes the resources of each workgroup or CTA, for the report."""
        raise NotImplementedError


Report = TypeVar("Report", bound=LaunchReport)


@dataclass(kw_only=True)
class Emulator(Generic[Report]):
    """The object that an emulator's ``with`` block yields: settings that may be changed between launches, and the list of launches.

    Attributes:
        sanitize, counters, bounds, edit: see the block's function.
        launches: reports of the launches so far.
        extra: the memory ranges that `share` added.
    """

    sanitize: bool = True
    counters: bool = False
    bounds: Bounds = "view"
    edit: Edit | None = None
    launches: list[Report] = field(default_factory=list)
    extra: list[Allocation] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.bounds not in get_args(Bounds):
            raise ValueError(f"bounds must be one of {', '.join(get_args(Bounds))}, got {self.bounds!r}")

    def share(self, tensor: torch.Tensor, name: str = "shared tensor") -> None:
        """Lets kernels access a tensor that is not their argument, for example one whose address is stored in another tensor."""
        self.extra.append(allocation_of(tensor, name, self.bounds))

    def edited(self, kernel: str, text: str) -> str:
        """Returns the text of a kernel's instructions to execute: ``text``, changed by the ``edit`` function of the block if there
        is one.
        """
        return text if self.edit is None else self.edit(kernel, text)


Running = TypeVar("Running", bound=Emulator[Any])


class Block(Generic[Running]):
    """Keeps the emulator of the enclosing ``with`` block, if there is one. Blocks cannot be nested.

    Args:
        name: name of the block's function, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.current: Running | None = None

    def active(self) -> Running:
        """Returns the emulator of the enclosing block.

        Raises:
            EmulationError: the process is not inside such a block.
        """
        if self.current is None:
            raise EmulationError(f"a kernel that was compiled or loaded for the emulator is launched outside `{self._name}()`")
        return self.current

    @contextlib.contextmanager
    def entered(self, emulator: Running) -> Iterator[None]:
        """Inside the block, launches run on this emulator.

        Raises:
            RuntimeError: inside another such block.
        """
        if self.current is not None:
            raise RuntimeError(f"{self._name}() inside {self._name}()")
        self.current = emulator
        try:
            yield
        finally:
            self.current = None


def platform(
    vendor: str, version: tuple[int, int], name: str, arch: str, memory: int, processors: int, features: frozenset[str]
) -> contextlib.AbstractContextManager[Any]:
    """Inside the block, tokenspeed-kernel, if installed, uses an emulated device as its platform.

    Args:
        vendor, version, name, arch, memory, features: as in ``PlatformInfo`` of tokenspeed-kernel-base.
        processors: the number of SMs or CUs.
    """
    if importlib.util.find_spec("tokenspeed_kernel_base") is None:
        return contextlib.nullcontext()
    from tokenspeed_kernel_base.platform import ArchVersion, PlatformInfo, use_platform

    return use_platform(PlatformInfo(vendor, ArchVersion(*version), name, arch, 1, memory, processors, features, emulated=True))
