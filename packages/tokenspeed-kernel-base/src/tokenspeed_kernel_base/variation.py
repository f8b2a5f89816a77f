"""The argument of an operator's ``vary`` hook, which returns the arguments of a call with other values.

Conformance checks, graph replays and captured calls need calls that no case provides. Only the operator knows which values are
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
    """Why the hook is asked for other arguments."""

    OTHER = "other"
    """Valid values that differ from the call's, in tensors of the same shapes and for the same options: shorter sequences, other
    pages, other experts. A captured graph is replayed with these values.
    """

    UNUSED = "unused"
    """Other values wherever a value must not matter: NaN in padding and in slots without a token, other page table entries past the
    end of each sequence. The result must not change."""

    CAPTURED = "captured"
    """Values for a call with a known description and unknown values. The call's tensors are on the meta device: they have shapes
    and dtypes, but no values. The hook returns tensors whose values have a meaning (lengths, indices, tables). Omitted float
    tensors are drawn at random."""


class Variation(NamedTuple):
    """A request to the ``vary`` hook for arguments with other values.

    Attributes:
        want: the purpose of the arguments.
        draw: draws random values on the target device.
        work: for `Want.CAPTURED`, the values that the operator's ``work`` hook read in the call. Empty if the hook was never run
            (in a CUDA graph, say).
    """

    want: Want
    draw: Draw
    work: Mapping[str, Sequence[int]] = MappingProxyType({})

    def values(self, name: str, count: int, default: int) -> list[int]:
        """``count`` of the values that the ``work`` hook returned for ``name``. If it returned fewer values, these are repeated; if
        it returned none, ``default`` is repeated.
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
