"""Dataclasses from plain values, as JSON holds them. The other direction is `dataclasses.asdict`."""

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
    """An instance of a dataclass. Keys that it does not know are left out, as a later release may have written them.

    Args:
        kind: a dataclass of dataclasses, numbers, flags, text, literals, tuples, mappings from text, and optional ones of these.
        value: what was read.

    Raises:
        ValueError: something is missing or of another type; the message says where.
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
