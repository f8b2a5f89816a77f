"""Named inputs of an operator, and the cost of a call.

Tests, `verify`, benchmarks and tuning take their inputs from cases only. A case is a name and a function that makes the arguments
on a device, with a seeded random generator. Nothing is allocated until the case is built.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import torch

P = ParamSpec("P")

_SAMPLED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Draw:
    """Makes random and constant tensors on one device, from one seed."""

    def __init__(self, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.device = torch.device(device)
        # Meta tensors have no values, and the meta device has no generator.
        self.generator = torch.Generator("cpu" if self.device.type == "meta" else self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """A normally distributed tensor with standard deviation ``scale``. Dtypes other than float64, float32, float16 and bfloat16
        are sampled in float32 and cast."""
        drawn = dtype if dtype in _SAMPLED else torch.float32
        values = torch.randn(shape, generator=self.generator, device=self.device, dtype=drawn)
        return (values * scale if scale != 1.0 else values).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of values that are uniformly distributed from ``low`` to ``high``, sampled in float32 and cast."""
        values = torch.rand(shape, generator=self.generator, device=self.device)
        return (values * (high - low) + low).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A tensor of random integers from ``low`` to ``high - 1``, uniformly distributed."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def permutation(self, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """The integers 0 to ``n - 1`` in random order, ``[n]``. `order` returns such an order as a list in host memory."""
        return torch.randperm(n, generator=self.generator, device=self.device).to(dtype)

    def order(self, n: int) -> list[int]:
        """A random order of 0 to ``n - 1`` as a list in host memory, on the meta device and under ``FakeTensorMode`` too."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():  # a fake tensor has no values, and a page table's shape depends on none of them
            return torch.randperm(n, generator=self.generator, device=self.generator.device).tolist()

    def tensor(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with the given values, which may be nested lists."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def cumulative(self, lengths: Sequence[int]) -> torch.Tensor:
        """int32 ``[len(lengths) + 1]``: 0 followed by the running sums of ``lengths``, the form of ``cu_seqlens``."""
        sums = [0]
        for length in lengths:
            sums.append(sums[-1] + length)
        return self.tensor(sums, torch.int32)


@dataclass(frozen=True)
class Recipe:
    """A callable that makes a case's arguments from plain values, and keeps these values: shapes, lengths, dtypes.

    Tests make variants of a case by changing the values, for example to shrink a failing case or to respect a kernel's limits.
    Functions decorated with `recipe` return recipes.

    Attributes:
        maker: the undecorated function.
        values: the maker's arguments by parameter name. A variadic ``*shape`` is one tuple; each keyword of ``**options`` has its
            own item.
    """

    maker: Callable[..., Callable[[Draw], dict[str, Any]]]
    values: Mapping[str, Any]

    def __call__(self, draw: Draw) -> dict[str, Any]:
        args, kwargs = self._arguments()
        return self.maker(*args, **kwargs)(draw)

    def __hash__(self) -> int:
        return hash((self.maker, str(self)))

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """``values`` as positional and keyword arguments: leading parameters without a default by position, the rest by keyword."""
        args, kwargs = [], dict(self.values)
        by_position = True
        for parameter in inspect.signature(self.maker).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                args.extend(kwargs.pop(parameter.name, ()))
            by_position = by_position and parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
            if by_position and parameter.name in kwargs:
                args.append(kwargs.pop(parameter.name))
        return args, kwargs

    def vary(self, **changes: Any) -> Recipe:
        """A copy of the recipe with changed values. Drops values that are `DEFAULT` or equal to a parameter's default."""
        defaults = {name: p.default for name, p in inspect.signature(self.maker).parameters.items()}
        values = {**self.values, **changes}
        kept = {n: v for n, v in values.items() if v is not DEFAULT and not (n in defaults and _equal(v, defaults[n]))}
        return Recipe(self.maker, kept)

    def __str__(self) -> str:
        """The call of the maker that makes this recipe, as Python source."""
        args, kwargs = self._arguments()
        parts = [*(_text(value) for value in args), *(f"{name}={_text(value)}" for name, value in kwargs.items())]
        return f"{self.maker.__name__}({', '.join(parts)})"


DEFAULT = inspect.Parameter.empty


def _equal(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)


def _text(value: Any) -> str:
    return str(value) if isinstance(value, Recipe) else repr(value)


def recipe(maker: Callable[P, Callable[[Draw], dict[str, Any]]]) -> Callable[P, Recipe]:
    """Decorates a function that takes plain values (numbers, lengths, dtypes, other recipes) and returns the ``make`` function of a
    `Case`. The decorated function returns a `Recipe` instead."""

    @functools.wraps(maker)
    def make(*args: P.args, **kwargs: P.kwargs) -> Recipe:
        signature = inspect.signature(maker)
        values = dict(signature.bind(*args, **kwargs).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                values.update(values.pop(parameter.name, {}))
        return Recipe(maker, values)

    return make


@dataclass(frozen=True)
class Case:
    """One named call of an operator.

    Attributes:
        name: what the case represents: ``"gpt-oss-120b decode 64 x 8k"``. Unique within the operator.
        make: makes the arguments, by name, with a `Draw`; a `Recipe` or any function.
        large: whether the case is sized for a GPU; correctness tests on a CPU skip it.
        tags: free labels to select cases by.
        world_size: number of processes, each a rank of torch.distributed's default group. ``make`` runs on every rank with the same
            seed. In a process without a default group, ``make`` returns arguments for a group of one rank.
    """

    name: str
    make: Callable[[Draw], dict[str, Any]]
    large: bool = False
    tags: frozenset[str] = field(default_factory=frozenset)
    world_size: int = 1

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """The arguments on a device. The same name, seed and device give the same values."""
        return self.make(Draw(device, seed + zlib.crc32(self.name.encode())))


@dataclass(frozen=True)
class Cost:
    """The minimum work of a call: floating-point operations (a multiply-add counts as 2), and bytes read and written, where each
    byte counts once."""

    flops: float
    bytes: float


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Total size of the tensors in bytes; None counts as 0."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def absent_ids(ids: torch.Tensor, absent: torch.Tensor, bound: int | None = None) -> torch.Tensor:
    """A copy of ``ids``. The ids under the mask ``absent`` are replaced by invalid ids from the dtype's whole range.

    Negative ids are invalid. With a ``bound``, ids equal to or above ``bound`` are also invalid. Some of these int64 ids become
    small valid ids when truncated to 32 bits. They catch kernels that narrow ids to 32 bits before the range check.
    """
    info = torch.iinfo(ids.dtype)
    wide = info.bits > 32
    outside = [*([-(2**32) + 1, -(2**31) - 1, -(2**32)] if wide else []), info.min, -(2**31), -2, -1]
    if bound is not None:
        outside += [*([2**32 + 1, 2**31, 2**32] if wide else []), bound, info.max]
    others = torch.tensor(outside, dtype=ids.dtype, device=ids.device)
    position = absent.flatten().cumsum(0).view(absent.shape) % len(outside)
    return torch.where(absent, others[position], ids)


def poisoned(tensor: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """A copy of a float tensor with NaN wherever the mask ``where`` is True. The mask covers the leading axes."""
    made = tensor.clone()
    nan = torch.full((1,), torch.nan, device=tensor.device).to(tensor.dtype)
    narrow = tensor.element_size() == 1  # some backends can index 1-byte floats only as bytes
    (made.view(torch.uint8) if narrow else made)[where] = nan.view(torch.uint8) if narrow else nan
    return made
