"""What an operator's ``vary`` hook is asked for: the arguments of a call, with other values.

The checks of conformance, the replay of graphs and captured calls all need calls that they did not get from a case. Only the
operator knows which values go together (a page table and a cache, lengths and their running sums), so it makes them, in one hook::

    @store.vary
    def _(variation: Variation, k: Tensor, slots: Tensor) -> dict[str, Any]:
        if variation.want is Want.UNUSED:
            return {"k": poisoned(k, slots < 0)}
        if variation.want is Want.CAPTURED:
            return {"slots": variation.draw.permutation(len(slots), slots.dtype)}
        return {}

It returns the arguments that change, by name; what it leaves out stays as it is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tokenspeed_kernel_base.cases import Draw


class Want(enum.Enum):
    """What the changed arguments are for."""

    OTHER = "other"
    """Other legal values in tensors of the same shapes, for the same options: shorter sequences, other pages, other experts. A
    captured graph is replayed on them."""

    UNUSED = "unused"
    """Other values wherever a value must not matter: NaN in padding and in slots that hold no token, page table entries that no
    length reaches. The result has to stay the same."""

    CAPTURED = "captured"
    """Values for a call of which only a description is known. Its tensors lie on the meta device: they have shapes and dtypes, and
    no values. The hook gives those whose values mean something (lengths, indices, tables); floats that it leaves out are drawn
    at random."""


class Variation(NamedTuple):
    """One wish for other arguments.

    Attributes:
        want: what they are for.
        draw: random numbers, on the device where the arguments are wanted.
        work: for `Want.CAPTURED`, what the operator's ``work`` hook read of the call; empty if it was never read (in a CUDA graph,
            say).
    """

    want: Want
    draw: Draw
    work: Mapping[str, Sequence[int]] = MappingProxyType({})

    def values(self, name: str, count: int, default: int) -> list[int]:
        """``count`` of the values that were read; repeated where fewer were, ``default`` where none were."""
        found = self.work.get(name) or [default]
        return [found[i % len(found)] for i in range(count)]

    def parts(self, name: str, count: int, total: int, *, padded: bool = False) -> list[int]:
        """``count`` lengths that add up to ``total``: those that were read, if they do; else in proportion, or all alike. Where
        ``padded``, they may add up to less."""
        if not count:
            return []
        shares = self.values(name, count, 1)
        whole = sum(shares)
        if whole > total or (whole < total and not padded):
            if not whole:
                shares, whole = [1] * count, count
            ends = [sum(shares[: i + 1]) * total // whole for i in range(count)]
            shares = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return shares
