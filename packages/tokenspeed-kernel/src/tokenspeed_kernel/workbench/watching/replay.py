"""Recreates captured calls: with the same shapes, strides, dtypes, options and sequence lengths, the same skew of expert loads, and
new random values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.watching.records import Record, load
from tokenspeed_kernel_base.cases import Case, Draw, recipe
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import Kind, Parameter
from tokenspeed_kernel_base.variation import Variation, Want

# Cases whose tensors have more bytes are marked as sized for a GPU.
_LARGE_BYTES = 64 << 20
TAG = "captured"

Make = Callable[[Draw], dict[str, Any]]


class ReplayError(ValueError):
    """A captured call cannot be recreated; the message has the reason."""


@dataclass(frozen=True)
class CapturedCase:
    """A case that recreates equal captured calls.

    Attributes:
        operator: ``"family.mode"``.
        case: the case, tagged ``"captured"`` and named after the calls.
        count: the number of captured calls.
        kernel: the kernel that ran the calls; if several did, the one that ran most of them.
    """

    operator: str
    case: Case
    count: int
    kernel: str


def load_cases(path: str | Path, operator: str | None = None) -> list[CapturedCase]:
    """Returns cases for the calls in a capture, those with the most calls first. Equal calls share a case, even if different
    kernels ran them.

    Args:
        path: the capture's file.
        operator: return only this operator's cases, ``"mode"`` or ``"family.mode"``.

    Raises:
        FileNotFoundError, UnreadableCaptureError: see `load`.
        ReplayError: a call cannot be recreated: its operator does not exist here, or has changed.
    """
    wanted = None if operator is None else str(get_operator(operator))
    cases: dict[tuple[str, str], CapturedCase] = {}
    for record in load(path).records:
        if wanted not in (None, record["operator"]):
            continue
        case = replay(record)
        known = cases.get((record["operator"], case.name))
        count = record["count"] + (known.count if known else 0)
        kernel = known.kernel if known else record["kernel"]
        cases[record["operator"], case.name] = CapturedCase(record["operator"], known.case if known else case, count, kernel)
    return sorted(cases.values(), key=lambda captured: -captured.count)


def replay(record: Record) -> Case:
    """Returns a case for one record of a capture. It has the lengths and expert loads of the record's largest sample.

    Raises:
        ReplayError: see `load_cases`.
    """
    try:
        op = get_operator(record["operator"])
    except KeyError as error:
        raise ReplayError(f"a call of {record['operator']} was captured: {error.args[0]}") from None
    arguments = record["arguments"]
    if arguments.keys() != set(op.names):
        differing = ", ".join(sorted(arguments.keys() ^ set(op.names)))
        raise ReplayError(f"{op} was captured with other parameters than it has here: {differing}")
    work: Mapping[str, Sequence[int]] = max(record["work"]["samples"], key=_amount, default={})
    make = captured(op.mode, arguments, work)
    return Case(_name(op, arguments, work), make, large=_nbytes(arguments) > _LARGE_BYTES, tags=frozenset({TAG}))


def _amount(sample: Mapping[str, Sequence[int]]) -> int:
    return sum(sum(values) for values in sample.values())


@recipe
def captured(operator: str, arguments: Mapping[str, Any], work: Mapping[str, Sequence[int]]) -> Make:
    """Recreates the arguments of a captured call. The operator's ``vary`` hook makes arguments with the captured work. Other
    tensors get random values, and have the captured shapes, strides and dtypes.

    Args:
        operator: name of the operator.
        arguments: the description of each of the call's arguments, by name (see `described`).
        work: the values that determined the call's work, by name (see `merged_work`).
    """
    op = get_operator(operator)

    def make(draw: Draw) -> dict[str, Any]:
        known = {p.name: _described(p, arguments[p.name]) for p in op.parameters}
        made = op.varied(known, Variation(Want.CAPTURED, draw, work))
        for parameter in op.parameters:
            name, told = parameter.name, arguments[parameter.name]
            if told is None or name in op.outs:
                made[name] = None
            elif _is_tensor(told):
                tensor = made[name] if name in made else _drawn(op, draw, name, known[name])
                made[name] = _strided(tensor, told.get("stride"))
            elif parameter.kind is Kind.VALUE and parameter.cls is None:
                made[name] = known[name]
            elif name not in made:
                if parameter.kind is not Kind.HINT:
                    raise ReplayError(f"{op}: {name} of a captured call cannot be recreated: it is no tensor or plain value")
                made[name] = None
        return made

    return make


def _described(parameter: Parameter, told: Any) -> Any:
    """Returns an argument made from its description. A tensor is on the meta device; None stands for an object whose fields are
    not described."""
    if _is_tensor(told):
        return torch.empty(told["shape"], dtype=_dtype(told["dtype"]), device="meta")
    if told is None or parameter.kind is Kind.HINT:
        return told
    if parameter.cls is not None:
        if not isinstance(told, dict) or told.keys() != {field.attribute for field in parameter.fields}:
            return None
        return parameter.cls(**{field.attribute: _described(field, told[field.attribute]) for field in parameter.fields})
    if torch.dtype in parameter.types:
        return _dtype(told)
    return tuple(told) if isinstance(told, list) else told


def _is_tensor(told: Any) -> bool:
    return isinstance(told, dict) and told.keys() >= {"dtype", "shape", "device"}


def _nbytes(told: Any) -> int:
    """Returns the number of bytes of all tensors in a description: of a tensor, or of the fields of an object."""
    if _is_tensor(told):
        count: int = math.prod(told["shape"])
        return count * _dtype(told["dtype"]).itemsize
    return sum(map(_nbytes, told.values())) if isinstance(told, dict) else 0


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ReplayError(f"this PyTorch has no dtype {name}")
    return found


def _drawn(op: Operator[Any, Any], draw: Draw, name: str, like: Tensor) -> Tensor:
    """Draws a tensor whose values may be arbitrary: activations, weights or scales, but not indices."""
    scales = name in op.scales
    if like.dtype == torch.uint8:  # pairs of fp4 values, or e8m0 scales
        return draw.integers(*((120, 128) if scales else (0, 256)), *like.shape, dtype=like.dtype)
    if not like.is_floating_point():
        raise ReplayError(f"{op}: {name} of a captured call cannot be recreated: the vary hook does not make its values")
    return draw.uniform(*like.shape, low=0.5, high=1.5, dtype=like.dtype) if scales else draw.normal(*like.shape, dtype=like.dtype)


def _strided(tensor: Tensor, stride: Sequence[int] | None) -> Tensor:
    """Copies a tensor so that it has the captured strides. The tensor's first axis may be smaller than the captured one, for
    example because the recreated cache has fewer pages."""
    if stride is None or tuple(stride) == tensor.stride() or not tensor.numel():
        return tensor
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    room = torch.zeros(reach, dtype=tensor.dtype, device=tensor.device)
    if 0 in stride:  # an expanded axis: one value is repeated
        index = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
        room.as_strided(tensor[index].shape, stride).copy_(tensor[index])
    else:
        room.as_strided(tensor.shape, stride).copy_(tensor)
    return room.as_strided(tensor.shape, stride)


def _name(op: Operator[Any, Any], arguments: Mapping[str, Any], work: Mapping[str, Sequence[int]]) -> str:
    """Summarises a call in one line: shapes of the operands, options that differ from the default, and the values that determined
    its work."""
    words = []
    for parameter in op.parameters:
        told = arguments[parameter.name]
        if _is_tensor(told):
            words.append(f"{parameter.name} {told['dtype']}{told['shape']}" + (f" by {told['stride']}" if "stride" in told else ""))
        elif told is not None and parameter.kind is Kind.VALUE and told != parameter.default:
            words.append(f"{parameter.name} {_plain(told)}")
    words += [f"{name} {_summary(values)}" for name, values in sorted(work.items())]
    return ", ".join(words).replace("'", "")


def _plain(told: Any) -> str:
    return "/".join(_plain(value) for value in told.values()) if isinstance(told, dict) else str(told)


def _summary(values: Sequence[int]) -> str:
    if not values:
        return "none"
    if len(values) == 1:
        return str(values[0])
    low, high = min(values), max(values)
    return f"{len(values)} x {low}" if low == high else f"{len(values)} of {low} to {high}, {sum(values)} in all"
