"""Memory that a call writes to: outputs that the caller provides, and the tensors that these outputs must not overlap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from tokenspeed_kernel_base import memory
from tokenspeed_kernel_base.checks import describe


def named(names: Sequence[str], outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Maps names to a call's outputs; both are in the same order. Outputs beyond the last name are left out."""
    return dict(zip(names, outputs, strict=False))


def check_provided(mode: str, outs: Iterable[str], arguments: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    """Raises TypeError or ValueError if a provided output differs from the call's output in dtype or shape.

    Args:
        mode: the operator's name, for the message.
        outs: the parameters that receive outputs.
        arguments: the arguments of the call, by name.
        expected: the outputs that the call makes, by name, on the meta device.
    """
    for name in outs:
        given, wanted = arguments[name], expected.get(name)
        if given is None:
            continue
        if wanted is None:
            raise ValueError(f"{mode}: {name} must be None, because this call has no such output, got {describe(given)}")
        if given.dtype != wanted.dtype:
            raise TypeError(f"{mode}: {name} must be {describe(wanted.dtype)}, got {describe(given)}")
        if given.shape != wanted.shape:
            raise ValueError(f"{mode}: {name} must have shape {list(wanted.shape)}, got {describe(given)}")


def overlap_pairs(
    written: Sequence[str], tensors: Iterable[str], in_place: Mapping[str, Collection[str]]
) -> list[tuple[str, str, bool]]:
    """Pairs of parameters whose memory must not overlap: a parameter that the call writes to, and another. The third item tells
    whether both may be the same tensor.
    """
    others = list(tensors)
    return [
        (name, other, other in in_place.get(name, ()))
        for index, name in enumerate(written)
        for other in others
        if other != name and other not in written[:index]
    ]


def check_overlaps(
    mode: str, written: Iterable[str], pairs: Iterable[tuple[str, str, bool]], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raises ValueError if a tensor that a call writes to overlaps another argument, or if several elements of this tensor share an
    address.

    Args:
        mode: the operator's name, for the message.
        written: names of the parameters that the call writes to.
        pairs: the result of `overlap_pairs`.
        tensors: all tensors of the call, by name.
    """
    for name in written:
        if name in tensors and memory.repeats_itself(tensors[name]):
            strides = f"strides {list(tensors[name].stride())}"
            raise ValueError(f"{mode}: {name} must not have several elements at one address, got {strides}")
    for name, other, may_be_one in pairs:
        one, two = tensors.get(name), tensors[other]
        if one is None or one.is_meta or not memory.overlap(one, two):
            continue
        if may_be_one and one.data_ptr() == two.data_ptr() and memory.lies_like(one, two):
            continue
        allowed = f"; it may only be {other} itself" if may_be_one else ""
        raise ValueError(f"{mode}: {name} must not overlap {other}, got tensors that share memory{allowed}")
