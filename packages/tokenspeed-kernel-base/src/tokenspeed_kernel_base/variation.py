"""The argument of an operator's ``vary`` hook. The hook returns other values for arguments of a call.

Conformance checks, graph replays and captured calls need values that no case provides. Only the operator knows which values are
consistent (a page table and a cache, lengths and their running sums). So the operator makes such values, in one hook::

    @store.vary
    def _(variation: Variation, k: Tensor, slots: Tensor) -> dict[str, Any]:
        if variation.want is Want.UNUSED:
            return {"k": poisoned(k, slots < 0)}
        if variation.want is Want.CAPTURED:
            return {"slots": variation.draw.permutation(len(slots), slots.dtype)}
        return {}

The hook returns the changed arguments, by name; all others keep their values.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tokenspeed_kernel_base.cases import Draw


class Want(enum.Enum):
    """The purpose of the values that the hook returns."""

    OTHER = "other"
    """Valid values that differ from the call's, in tensors of the same shapes and for the same options: shorter sequences, other
    pages, other experts. A captured graph is replayed with these values.
    """

    UNUSED = "unused"
    """Other values in elements that kernels must not use: NaN in padding and in slots without a token, other page table entries
    past the end of each sequence. The result must not change."""

    CAPTURED = "captured"
    """Values for a captured call, of which only the description is known. The call's tensors are on the meta device: they have
    shapes and dtypes, but no values. The hook returns values of the tensors whose values have a meaning (lengths, indices, tables).
    Float tensors that the hook omits get random values."""


class Variation(NamedTuple):
    """A request to the ``vary`` hook for arguments with other values.

    Attributes:
        want: the purpose of the values.
        draw: makes random tensors on the target device.
        work: for `Want.CAPTURED`, the values that the operator's ``work`` hook read in the call. Empty if the hook was never run
            (in a CUDA graph, say).
    """

    want: Want
    draw: Draw
    work: Mapping[str, Sequence[int]] = MappingProxyType({})

    def values(self, name: str, count: int, default: int) -> list[int]:
        """Returns the first ``count`` values that the ``work`` hook returned for ``name``. Fewer values are repeated cyclically; if
        there are none, ``default`` is repeated.
        """
        found = self.work.get(name) or [default]
        return [found[i % len(found)] for i in range(count)]

    def parts(self, name: str, count: int, total: int, *, padded: bool = False) -> list[int]:
        """Returns ``count`` lengths with the sum ``total``: the lengths that the ``work`` hook returned for ``name``, scaled in
        proportion if their sum differs; equal lengths if there are none. With ``padded``, the sum may be less than ``total``.
        """
        if not count:
            return []
        lengths = self.values(name, count, 1)
        whole = sum(lengths)
        if whole > total or (whole < total and not padded):
            if not whole:
                lengths, whole = [1] * count, count
            ends = [sum(lengths[: i + 1]) * total // whole for i in range(count)]
            lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        return lengths
