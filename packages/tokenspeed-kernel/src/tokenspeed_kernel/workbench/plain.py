"""Builds dataclasses from plain values, as read from JSON. The inverse is `dataclasses.asdict`."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def from_plain(kind: type[T], value: Any) -> T:
    """Builds an instance of a dataclass. Unknown keys are ignored, because a later release may have written them.

    Args:
        kind: a dataclass. Its fields are dataclasses, numbers, booleans, strings, literals, tuples, mappings with string keys, or
            optional forms of these.
        value: the plain value.

    Raises:
        ValueError: a field is missing or has the wrong type; the message says where.
    """
    made: T = _made(kind, value, kind.__name__.lower())
    return made


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _made(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _made(next(arg for arg in args if arg is not types.NoneType), value, where)
    if origin is Literal and value in args:
        return value
    if origin is tuple and type(value) is list:
        return tuple(_made(args[0], member, f"{where}[{index}]") for index, member in enumerate(value))
    if origin is Mapping and type(value) is dict:
        return {name: _made(args[1], member, f"{where}.{name}") for name, member in value.items()}
    if dataclasses.is_dataclass(kind) and type(value) is dict:
        missing = (dataclasses.MISSING, dataclasses.MISSING)
        for field in dataclasses.fields(kind):
            if field.name not in value and (field.default, field.default_factory) == missing:
                raise ValueError(f"{where}.{field.name} is missing")
        hints = _hints(typing.cast("type", kind))
        return typing.cast("Any", kind)(
            **{name: _made(hints[name], member, f"{where}.{name}") for name, member in value.items() if name in hints}
        )
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, origin or kind) or (isinstance(value, bool) and kind is not bool):
        names = {
            Mapping: "a table",
            tuple: "a list",
            Literal: "one of " + ", ".join(map(str, args)),
            float: "a number",
            int: "an integer",
        }
        wanted = names.get(origin or kind, "a table" if dataclasses.is_dataclass(kind) else f"a {getattr(kind, '__name__', kind)}")
        raise ValueError(f"{where} must be {wanted}, got {reprlib.repr(value)}")
    return value
