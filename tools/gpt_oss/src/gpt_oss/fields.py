"""Validation of the fields of requests, configurations and options, and the errors for invalid values.

The rules are strict, so that a mistake is reported where it is made. An int is a Python int; bools, floats, NumPy scalars and
tensors are not accepted. A number is a Python int or float. Every message has the form ``<field> must be <valid values>, got
<actual value>``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Bounds of values that are stored as float32 on the device; both are normal float32 numbers.
SMALLEST, LARGEST = 1e-37, 1e38


def describe(value: object, with_type: bool = False) -> str:
    """Formats a value for an error message. Long values are shortened; a tensor is described by dtype and shape."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of {dtype_name(value.dtype)} and shape {list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 128:
        text = f"an int of {value.bit_length()} bits"  # Python refuses to print very long ints
    else:
        text = _shortened(value)
    return f"{text} ({type(value).__name__})" if with_type else text


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shortened(value: object) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # a failing __repr__ of the value must not hide the actual error
        return "an object that cannot be printed"


@dataclass(frozen=True)
class Field:
    """The valid values of a field.

    Attributes:
        expected: description of the valid values, for messages.
        has_type: function that returns whether a value has the right type. If not, the error is a TypeError.
        fits: function that returns whether a value of the right type is valid. If not, the error is a ValueError.
    """

    expected: str
    has_type: Callable[[Any], bool]
    fits: Callable[[Any], bool] = lambda value: True

    def problem(self, name: str, value: object) -> TypeError | ValueError | None:
        """Returns (does not raise) the error for an invalid value; None for a valid value."""
        if not self.has_type(value):
            return TypeError(f"{name} must be {self.expected}, got {describe(value, with_type=True)}")
        if not self.fits(value):
            return ValueError(f"{name} must be {self.expected}, got {describe(value)}")
        return None

    def check(self, name: str, value: object) -> None:
        """Raises TypeError or ValueError for an invalid value. The message names the field."""
        problem = self.problem(name, value)
        if problem is not None:
            raise problem


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int | None = None) -> Field:
    """Returns a field for an int from ``low`` to ``high``, both included. If ``high`` is None, there is no upper bound."""
    if high is None:
        return Field(f"an int of at least {low}", is_int, lambda value: value >= low)
    return Field(f"an int from {low} to {high}", is_int, lambda value: low <= value <= high)


def number(low: float, high: float = LARGEST) -> Field:
    """Returns a field for an int or a float from ``low`` to ``high``, both included. NaN and infinities are invalid."""
    expected = f"a number from {low:g} to {high:g}"
    return Field(expected, lambda value: is_int(value) or isinstance(value, float), lambda value: low <= value <= high)


def one_of(*allowed: str) -> Field:
    """Returns a field for one of these strings."""
    return Field(" or ".join(map(repr, allowed)), lambda value: isinstance(value, str), lambda value: value in allowed)


def instance(cls: type, expected: str | None = None) -> Field:
    """Returns a field for an instance of a class. ``expected`` describes the instance; None: by the class's name."""
    return Field(expected or f"a {cls.__name__}", lambda value: isinstance(value, cls))


def optional(field: Field) -> Field:
    """Returns a field for None, or for a valid value of another field."""
    return Field(
        f"{field.expected} or None",
        lambda value: value is None or field.has_type(value),
        lambda value: value is None or field.fits(value),
    )


FLAG = Field("True or False", lambda value: isinstance(value, bool))
INT = Field("an int", is_int)
BOOL = Field("a bool", lambda value: isinstance(value, bool))
COUNT = integer(1)
FLOAT_DTYPE = Field(
    "a floating-point torch.dtype", lambda value: isinstance(value, torch.dtype), lambda value: value.is_floating_point
)


def check_fields(fields: Mapping[str, Field], holder: object) -> None:
    """Checks the attributes named in ``fields`` of an object. Raises TypeError or ValueError for the first invalid attribute."""
    for name, field in fields.items():
        field.check(name, getattr(holder, name))
