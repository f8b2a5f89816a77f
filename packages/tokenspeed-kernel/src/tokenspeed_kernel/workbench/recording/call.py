"""One captured call, as an operator's ``replay`` hook sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class CapturedCall:
    """What is known of a call: descriptions of its arguments, and the values that decided how much work it was.

    Attributes:
        arguments: by name, as `tokenspeed_kernel.workbench.recording.described` made them.
        work: what the operator's ``work`` hook read, of one call; empty if it was never read (in a CUDA graph, say).
    """

    arguments: Mapping[str, Any]
    work: Mapping[str, Sequence[int]]

    def given(self, name: str) -> bool:
        """Whether an argument was not None."""
        return self.arguments.get(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that was given."""
        return tuple(self.arguments[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that was given."""
        found = getattr(torch, self.arguments[name]["dtype"])
        assert isinstance(found, torch.dtype)
        return found

    def options(self, *names: str) -> dict[str, Any]:
        """Arguments that are numbers, flags or text, as they were."""
        return {name: self.arguments[name] for name in names}

    def values(self, name: str, count: int, default: int) -> list[int]:
        """``count`` of the values that were read; repeated where a sample holds fewer, ``default`` where it holds none."""
        found = self.work.get(name) or [default]
        return [found[i % len(found)] for i in range(count)]

    def parts(self, name: str, count: int, total: int) -> list[int]:
        """``count`` lengths that add up to ``total``: those that were read, if they do; else like them, or all alike."""
        if not count:
            return []
        shares = self.values(name, count, 1)
        whole = sum(shares)
        if whole != total:
            if not whole:
                shares, whole = [1] * count, count
            ends = [sum(shares[: i + 1]) * total // whole for i in range(count)]
            shares = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return shares
