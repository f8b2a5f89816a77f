"""Named inputs of an operator, and what a call costs.

Cases are the one source of inputs: tests, `verify`, benchmarks and tuning all run them. A case is a name and a function that
draws the arguments from a seeded generator on a device; nothing is allocated until it is built.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_SAMPLED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Draw:
    """Random and constant tensors on one device, from one seed."""

    def __init__(self, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Normally distributed with standard deviation ``scale``. Dtypes that cannot be sampled are cast from float32."""
        drawn = dtype if dtype in _SAMPLED else torch.float32
        values = torch.randn(shape, generator=self.generator, device=self.device, dtype=drawn)
        return (values * scale if scale != 1.0 else values).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.rand(shape, generator=self.generator, device=self.device)
        return (values * (high - low) + low).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Uniform in ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def permutation(self, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randperm(n, generator=self.generator, device=self.device).to(dtype)

    def tensor(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def cumulative(self, lengths: Sequence[int]) -> torch.Tensor:
        """int32 ``[len(lengths) + 1]``: 0 and the running sums, as ``cu_seqlens`` wants them."""
        sums = [0]
        for length in lengths:
            sums.append(sums[-1] + length)
        return self.tensor(sums, torch.int32)


@dataclass(frozen=True)
class Case:
    """One named call of an operator.

    Attributes:
        name: what it stands for: ``"gpt-oss-120b decode 64 x 8k"``. Unique within the operator.
        make: draws the arguments, by name.
        large: sized for a GPU: correctness tests on a CPU leave it out.
        tags: free labels to pick cases by.
    """

    name: str
    make: Callable[[Draw], dict[str, Any]]
    large: bool = False
    tags: frozenset[str] = field(default_factory=frozenset)

    def build(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """The arguments on a device. The same name, seed and device give the same values."""
        return self.make(Draw(device, seed + zlib.crc32(self.name.encode())))


@dataclass(frozen=True)
class Cost:
    """Work that a call cannot avoid: floating-point operations (a multiply-add counts 2) and bytes read and written once."""

    flops: float
    bytes: float


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes that these tensors hold; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
