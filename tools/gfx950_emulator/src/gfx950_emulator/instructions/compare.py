"""Vector compares. A compare writes one bit per lane, to VCC, to a pair of scalar registers, or to EXEC (v_cmpx).

Definitions: chapter VOPC of AMD's CDNA4 ISA document. The negated floating-point relations (nge, nlt, ...) are true for NaN. The
relation "o" is true if neither operand is NaN, and "u" if at least one operand is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950_emulator.binding import BINDERS, Bound, Site
from gfx950_emulator.constants import EXEC
from gfx950_emulator.group import Group
from gfx950_emulator.operands import SCALAR_BASE
from gfx950_emulator.vector import (
    F16,
    F32,
    F64,
    I16,
    I32,
    I64,
    MANTISSA_BITS,
    SMALLEST_NORMAL,
    U16,
    U32,
    U64,
    Type,
    VectorOp,
    bind_vector,
)

_INTEGER: dict[str, Callable[..., Any]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ne": np.not_equal, "ge": np.greater_equal,
    "f": lambda a, b: np.zeros(np.broadcast(a, b).shape, bool),
    "t": lambda a, b: np.ones(np.broadcast(a, b).shape, bool),
}  # fmt: skip
_FLOAT: dict[str, Callable[..., Any]] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b), "nlg": lambda a, b: ~((a < b) | (a > b)), "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b), "neq": np.not_equal, "nlt": lambda a, b: ~(a < b),
    "f": _INTEGER["f"], "tru": _INTEGER["t"],
}  # fmt: skip
_EXEC_IDS = (SCALAR_BASE + EXEC, SCALAR_BASE + EXEC + 1)


def float_class(a: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Returns, for each value, whether it is in one of the classes in the mask ``classes``. From bit 0 up the classes are:
    signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf.
    """
    size = a.dtype.itemsize
    quiet = a.view(f"u{size}") >> MANTISSA_BITS[size] - 1 & 1
    magnitude, negative = np.abs(a), np.signbit(a)
    kind = np.select(
        [np.isnan(a), np.isinf(a), magnitude >= SMALLEST_NORMAL[size], magnitude > 0],
        [quiet.astype(np.uint32), np.where(negative, 2, 9), np.where(negative, 3, 8), np.where(negative, 4, 7)],
        np.where(negative, 5, 6),
    ).astype(np.uint32)
    return ((classes >> kind) & np.uint32(1)).astype(bool)


def _declare(name: str, function: Callable[..., Any], *types: Type) -> None:
    op = VectorOp(name, function, None, types)
    if not name.startswith("v_cmpx"):
        BINDERS[name] = lambda site: bind_vector(op, site)
        return

    def bind(site: Site) -> Bound:
        bound, to = bind_vector(op, site), site.operands[0].index

        def run(g: Group) -> None:
            bound.run(g)
            g.set_exec(g.lane_mask(to))

        return Bound(run, (*bound.writes, *_EXEC_IDS), bound.reads)

    BINDERS[name] = bind


for _prefix in ("v_cmp", "v_cmpx"):
    for _suffix, _type in (("i16", I16), ("u16", U16), ("i32", I32), ("u32", U32), ("i64", I64), ("u64", U64)):
        for _relation, _function in _INTEGER.items():
            _declare(f"{_prefix}_{_relation}_{_suffix}", _function, _type, _type)
    for _suffix, _type in (("f16", F16), ("f32", F32), ("f64", F64)):
        for _relation, _function in _FLOAT.items():
            _declare(f"{_prefix}_{_relation}_{_suffix}", _function, _type, _type)
        _declare(f"{_prefix}_class_{_suffix}", float_class, _type, U32)
