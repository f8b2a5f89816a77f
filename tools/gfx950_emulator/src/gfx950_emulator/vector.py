"""Binds vector instructions: operands become Python expressions over a group, from which a small function is generated.

Instructions of one *form* have the same operation and the same kinds of operands. Their functions differ only in register numbers
and constants. The source of a form is generated and compiled once; binding an instruction fills in the numbers. The generated
function for ``v_add_f32 v3, s2, v1`` is::

    def run(g):
        if g.full:
            fn(g.broadcast_f32(p1), g.F[p2], out=g.F[d])
        else:
            fn(g.broadcast_f32(p1), g.F[p2], out=g.F[d], where=g.mask)

Encodings and modifiers: chapter "Vector ALU Operations" of AMD's CDNA4 ISA document, and "AMDGPU Operand Syntax" and "AMDGPU
Instruction Modifiers" of LLVM's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gfx950_emulator.binding import BINDERS, Bound, Site
from gfx950_emulator.crosslane import dpp_plan, dpp_read
from gfx950_emulator.group import Group
from gfx950_emulator.operands import SCALAR_BASE, Operand


@dataclass(frozen=True)
class Type:
    """A register operand's type: its dtype, its width, and, if 32 bits wide, the name of the group's view with this dtype."""

    dtype: np.dtype
    rows: str = ""

    @property
    def bits(self) -> int:
        return self.dtype.itemsize * 8

    @property
    def floating(self) -> bool:
        return self.dtype.kind == "f"


U32, I32, F32 = Type(np.dtype(np.uint32), "U"), Type(np.dtype(np.int32), "I"), Type(np.dtype(np.float32), "F")
U16, I16, F16 = Type(np.dtype(np.uint16)), Type(np.dtype(np.int16)), Type(np.dtype(np.float16))
U64, I64, F64 = Type(np.dtype(np.uint64)), Type(np.dtype(np.int64)), Type(np.dtype(np.float64))

# Constants of floating-point types, by the type's size in bytes
SMALLEST_NORMAL = {2: np.float16(2.0**-14), 4: np.float32(2.0**-126), 8: np.float64(2.0**-1022)}
MANTISSA_BITS = {2: 10, 4: 23, 8: 52}


class Form:
    """Collects the constants that a generated function closes over, so that the source text of a form contains no numbers."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = dict(values)

    def add(self, value: Any) -> str:
        name = f"p{len(self.values)}"
        self.values[name] = value
        return name

    def function(self, body: str) -> Callable[[Group], Any]:
        """Returns the function with this body and with this form's constants."""
        return _factory(body, tuple(self.values))(*self.values.values())


_HELPERS: dict[str, Any] = {"np": np, "u16": np.uint16, "u32": np.uint32, "dpp_read": dpp_read}


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function callable from generated code (a decorator)."""
    _HELPERS[function.__name__] = function
    return function


@cache
def _factory(body: str, names: tuple[str, ...]) -> Callable[..., Callable[[Group], Any]]:
    lines = "\n".join("        " + line for line in body.strip("\n").split("\n"))
    source = f"def make({', '.join(names)}):\n    def run(g):\n{lines}\n    return run\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "<gfx950 form>", "exec"), _HELPERS, scope)
    return scope["make"]


# Parts of registers

_SIXTEEN, _LOW_HALF, _HIGH_HALF = np.uint32(16), np.uint32(0xFFFF), np.uint32(0xFFFF0000)


@helper
def low16(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return bits.astype(np.uint16).view(dtype)


@helper
def high16(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return (bits >> _SIXTEEN).astype(np.uint16).view(dtype)


@helper
def sdwa_read(bits: np.ndarray, shift: int, width: int, signed: bool) -> np.ndarray:
    """Extracts bits [shift, shift + width) of a register, extended to 32 bits by their sign or by zeros."""
    if signed:
        up = 32 - shift - width
        return ((bits << np.uint32(up)).view(np.int32) >> np.int32(32 - width)).view(np.uint32)
    return (bits >> np.uint32(shift)) & np.uint32((1 << width) - 1)


@helper
def sdwa_write(group: Group, row: int, bits: np.ndarray, shift: int, width: int, unused: str) -> None:
    """Writes bits [shift, shift + width) of a register. The other bits are zeroed, or kept, or (above these bits) filled with the
    sign.
    """
    field_ = np.uint32((1 << width) - 1)
    placed = (bits & field_) << np.uint32(shift)
    if unused == "UNUSED_PRESERVE":
        placed = placed | (group.U[row] & ~(field_ << np.uint32(shift)))
    elif unused == "UNUSED_SEXT":
        up = 32 - shift - width
        extended = (placed << np.uint32(up)).view(np.int32) >> np.int32(up)
        placed = extended.view(np.uint32)
    group_write(group, row, placed)


@helper
def group_write(group: Group, row: int, bits: np.ndarray) -> None:
    if group.full:
        group.U[row][...] = bits
    else:
        np.copyto(group.U[row], bits, where=group.mask)


@helper
def write_high16(group: Group, row: int, bits: np.ndarray) -> None:
    group_write(group, row, (group.U[row] & _LOW_HALF) | bits.astype(np.uint32) << _SIXTEEN)


@helper
def write_low16(group: Group, row: int, bits: np.ndarray) -> None:
    """Writes the lower half of a register and keeps the upper half, as do conversion and mixed-precision instructions that write a
    half.
    """
    group_write(group, row, (group.U[row] & _HIGH_HALF) | bits.astype(np.uint32))


@helper
def join_pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def per_lane(group: Group, value: np.ndarray) -> np.ndarray:
    """Broadcasts a scalar value to one value per lane; returns an array unchanged."""
    return value if value.ndim else np.full(group.lanes, value)


@helper
def write_pair64(group: Group, row: int, value: np.ndarray) -> None:
    group.set_pair(row, per_lane(group, value))


@helper
def write_pair_where(group: Group, row: int, value: np.ndarray, where: np.ndarray) -> None:
    halves = np.ascontiguousarray(per_lane(group, value)).view(np.uint32).reshape(-1, 2)
    np.copyto(group.U[row], halves[:, 0], where=where)
    np.copyto(group.U[row + 1], halves[:, 1], where=where)


@helper
def set_compare(group: Group, index: int, result: np.ndarray) -> None:
    """Writes the result of a compare to a pair of scalar registers; the bits of inactive lanes are zero."""
    if result.shape != group.mask.shape:
        result = np.broadcast_to(result, group.mask.shape)
    group.set_lane_mask(index, result if group.full else result & group.mask)


# Modifiers of results


@helper
def clamp_result(value: np.ndarray) -> np.ndarray:
    """Clamps floating-point values to [0, 1]; -0 and NaN become 0 (DX10_CLAMP is on in every kernel that LLVM compiles)."""
    one, zero = value.dtype.type(1), value.dtype.type(0)
    return np.where(value > zero, np.minimum(value, one), zero)


@helper
def scale_result(value: np.ndarray, factor: np.generic) -> np.ndarray:
    """Applies the output modifier: multiplies by 2, 4 or 0.5. Denormal results and -0 become +0."""
    scaled = value * factor
    return np.where(np.abs(scaled) < SMALLEST_NORMAL[scaled.dtype.itemsize], scaled.dtype.type(0), scaled)


@helper
def limited(group: Group, function: Callable[..., Any], *sources: np.ndarray) -> np.ndarray:
    """Returns the function's float16 result. If MODE.FP16_OVFL is set, an overflowing result is limited to the largest finite
    number, unless a source is infinite.
    """
    result = function(*sources)
    if group.saturate:
        overflowed = np.isinf(result)
        for source_ in sources:
            overflowed = overflowed & np.isfinite(source_)
        result = np.where(overflowed, np.copysign(np.float16(65504), result), result)
    return result


def saturating(function: Callable[..., Any], type_: Type) -> Callable[..., Any]:
    """Returns a function that saturates the exact integer result of ``function`` to the type's range, as clamp does. Results must
    be below 2**63."""
    limits = np.iinfo(type_.dtype)

    def run(*sources: Any) -> Any:
        exact = function(*(x.astype(np.int64) for x in sources))
        return np.clip(exact, limits.min, limits.max).astype(type_.dtype)

    return run


def _output_modifier(site: Site, type_: Type) -> float | None:
    """Returns the factor of the modifier mul:2, mul:4 or div:2. Returns None without such a modifier, and if hardware ignores it
    because MODE.IEEE is set or denormal results are kept.
    """
    multiply, divide = site.take("mul"), site.take("div")
    if multiply is None and divide is None:
        return None
    descriptor = site.assembly.descriptor
    name, default = ("float_denorm_mode_32", 0) if type_.bits == 32 else ("float_denorm_mode_16_64", 3)
    if descriptor.get("ieee_mode", 1) or descriptor.get(name, default) > 1 or not type_.floating:
        return None
    return float(multiply) if multiply is not None else 1 / float(divide)


# Sources

_SELECT = {
    "DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16),
    "BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8),
}  # fmt: skip
_BROADCAST = {"U": "broadcast_u32", "I": "broadcast_i32", "F": "broadcast_f32"}


def source(site: Site, form: Form, type_: Type, operand: Operand, *, select: str = "", high: int = 0, moved: str = "") -> str:
    """Returns the Python expression that reads one source operand.

    Args:
        select: the part of the register that SDWA selects: ``"BYTE_1"``.
        high: op_sel; 1 for the upper half of a 16-bit type.
        moved: an expression for the source's bits, already moved across lanes (DPP).
    """
    if (operand.absolute or operand.negate) and not type_.floating:
        raise site.unknown(f"{operand.text} has a modifier of floating point, which {site.mnemonic} does not take there")
    if operand.file == "literal":
        value: Any = operand.bits(type_.dtype)
        value = abs(value) if operand.absolute else value
        return form.add(-value if operand.negate else value)
    text = _register(site, form, type_, operand, select, high, moved)
    if operand.absolute:
        text = f"np.abs({text})"
    return f"np.negative({text})" if operand.negate else text


def _register(site: Site, form: Form, type_: Type, operand: Operand, select: str, high: int, moved: str) -> str:
    if operand.file not in ("s", "v"):
        raise site.unknown(f"operand {operand.text!r} cannot be read by {site.mnemonic}")
    if type_.bits == 64 and operand.count != 2:
        raise site.unknown(f"operand {operand.text} is not the pair of registers that {site.mnemonic} takes")
    scalar = operand.file == "s"
    index = form.add(operand.index)
    if type_.bits == 64:
        pair = moved or (f"g.broadcast_u64({index})" if scalar else f"g.pair({index})")
        return f"{pair}.view({form.add(type_.dtype)})"
    row = moved or (f"g.broadcast_u32({index})" if scalar else f"g.U[{index}]")
    if select not in ("", "DWORD"):
        shift, width = _SELECT[select]
        row = f"sdwa_read({row}, {shift}, {width}, {operand.sign_extend})"
        return f"low16({row}, {form.add(type_.dtype)})" if type_.bits == 16 else f"{row}.view({form.add(type_.dtype)})"
    if type_.bits == 16:
        return f"{'high16' if high else 'low16'}({row}, {form.add(type_.dtype)})"
    if moved:
        return f"{moved}.view({form.add(type_.dtype)})"
    return f"g.{_BROADCAST[type_.rows]}({index})" if scalar else f"g.{type_.rows}[{index}]"


def moved_source(site: Site, form: Form, lines: list[str], operand: Operand, type_: Type) -> str:
    """Handles DPP's first source, which is moved across lanes. Adds the statements that move the source, and returns the expression
    for its bits.
    """
    form.values["plan"] = dpp_plan(site)
    lines.append(f"moved, written = dpp_read(g, g.U[{form.add(operand.index)}], plan)")
    if type_.bits != 64:
        return "moved"
    lines.append(f"moved_high, written = dpp_read(g, g.U[{form.add(operand.index + 1)}], plan)")
    return "join_pair(moved, moved_high)"


def getter(site: Site, operand: Operand, type_: Type, *, high: int = 0) -> Callable[[Group], Any]:
    """Returns a function that reads a source operand from a group: one value per lane, or one value for all lanes."""
    form = Form()
    return form.function(f"return {source(site, form, type_, operand, high=high)}")


# Instructions


@dataclass(frozen=True)
class VectorOp:
    """A vector operation and its operand types.

    Attributes:
        function: computes the result from the sources, on numpy arrays. A ufunc may write in place.
        destination, sources: the operands' types. A destination of None means a compare, which writes a bool per lane to scalar
            registers.
        unit: ``"valu"`` or ``"trans"``.
        accumulates: whether the destination is also the last source (v_fmac).
        keeps_high: whether a 16-bit result leaves the upper half of the register unchanged.
        moves: see `Bound.moves`.
        saturates: whether clamp limits the exact integer result; `function` must then accept int64 sources.
        overflows: whether a float16 result that overflows obeys MODE.FP16_OVFL.
    """

    name: str
    function: Callable[..., Any]
    destination: Type | None
    sources: tuple[Type, ...]
    unit: str = "valu"
    accumulates: bool = False
    keeps_high: bool = False
    moves: bool = False
    saturates: bool = False
    overflows: bool = False


def vector_op(name: str, function: Callable[..., Any], destination: Type | None, *sources: Type, **flags: Any) -> None:
    """Declares a vector instruction; the arguments are those of `VectorOp`."""
    op = VectorOp(name, function, destination, sources, **flags)
    if name in BINDERS:
        raise ValueError(f"{name} has two binders")
    BINDERS[name] = lambda site: bind_vector(op, site)


def bind_vector(op: VectorOp, site: Site, lanes: Operand | int | None = None) -> Bound:
    """Binds an instruction with one destination, in any encoding: VOP1, VOP2, VOP3, VOPC, DPP, SDWA.

    Args:
        op: the operation.
        site: the instruction. `Site.operands` must hold the destination and the sources that `op` declares, and nothing else.
        lanes: a pair of scalar registers, as an operand or as the number of the first register. The pair's bits are passed to
            `op.function` as the last argument, one bool per lane.
    """
    destination, *sources = site.operands
    if op.accumulates and len(sources) == len(op.sources) - 1:
        sources.append(Operand("v", destination.index, destination.count, text=destination.text))
    if len(sources) != len(op.sources):
        raise site.unknown(f"{site.mnemonic} takes {len(op.sources)} sources, not {len(sources)}")
    form = Form(fn=op.function)
    lines: list[str] = []
    moved = moved_source(site, form, lines, sources[0], op.sources[0]) if site.encoding.endswith("dpp") else ""
    op_sel = tuple(site.take("op_sel", ()))
    high_result = len(op_sel) > len(sources) and bool(op_sel[len(sources)])
    arguments = []
    for i, (type_, operand) in enumerate(zip(op.sources, sources, strict=True)):
        select = str(site.take(f"src{i}_sel", "")) if site.encoding == "sdwa" else ""
        high = op_sel[i] if i < len(op_sel) else 0
        arguments.append(source(site, form, type_, operand, select=select, high=high, moved=moved if i == 0 else ""))
    mask_ids: tuple[int, ...] = ()
    if lanes is not None:
        index = lanes if isinstance(lanes, int) else lanes.index
        arguments.append(f"g.lane_mask({form.add(index)})")
        mask_ids = (SCALAR_BASE + index, SCALAR_BASE + index + 1)
    reads, writes = (*site.ids(sources), *mask_ids), site.ids([destination])
    form.values["d"] = destination.index
    clamp = bool(site.take("clamp", False))
    call = ", ".join(arguments)
    if op.destination is None:  # the clamp of a compare only controls exceptions
        lines.append(f"set_compare(g, d, fn({call}))")
    else:
        result = f"fn({call})"
        if op.overflows and op.destination is F16:
            result = f"limited(g, fn, {call})"
        factor = _output_modifier(site, op.destination)
        if factor is not None:
            result = f"scale_result({result}, {form.add(op.destination.dtype.type(factor))})"
        if clamp and op.destination.floating:
            result = f"clamp_result({result})"
        elif clamp and op.saturates:
            form.values["fn"] = saturating(op.function, op.destination)
        elif clamp:
            raise site.unknown(f"clamp of {site.mnemonic} is not implemented")
        in_place = call if isinstance(op.function, np.ufunc) and result == f"fn({call})" and not clamp else ""
        lines.append(_store(op, site, result, in_place, bool(moved), high_result))
        # A register with one written half counts as written. Only lanes that a DPP control excludes keep their old value.
        if moved and not form.values["plan"].overwrites:
            reads = (*reads, *writes)
    bound = Bound(form.function("\n".join(lines)), writes, reads, op.unit, moves=op.moves)
    if moved:
        bound.extra["dpp"] = (form.values["plan"], tuple(sources[0].ids), (*site.ids(sources[1:]), *mask_ids))
    return bound


def _store(op: VectorOp, site: Site, result: str, in_place: str, dpp: bool, high: bool) -> str:
    """Returns the statements that write the result. `in_place`: the arguments with which a ufunc writes directly to the destination
    register.
    """
    type_ = op.destination
    if site.encoding == "sdwa":
        shift, width = _SELECT[str(site.take("dst_sel", "DWORD"))]
        unused = str(site.take("dst_unused", "UNUSED_PAD"))
        bits = f"np.asarray({result}).view(u{type_.bits}).astype(u32)"
        return f"sdwa_write(g, d, {bits}, {shift}, {width}, {unused!r})"
    if type_.bits == 64:
        return f"write_pair_where(g, d, {result}, written)" if dpp else f"write_pair64(g, d, {result})"
    if type_.bits == 16:
        bits = f"np.asarray({result}).view(u16)"
        if dpp:
            return f"np.copyto(g.U[d], {bits}.astype(u32), where=written)"
        if high:
            return f"write_high16(g, d, {bits})"
        return f"write_low16(g, d, {bits})" if op.keeps_high else f"group_write(g, d, {bits}.astype(u32))"
    row = f"g.{type_.rows}[d]"
    if dpp:
        return f"np.copyto({row}, {result}, where=written)"
    if in_place:
        return f"if g.full:\n    fn({in_place}, out={row})\nelse:\n    fn({in_place}, out={row}, where=g.mask)"
    return f"r = {result}\nif g.full:\n    {row}[...] = r\nelse:\n    np.copyto({row}, r, where=g.mask)"
