"""Compares a kernel's results with the reference's."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics.places import describe_places, relation
from tokenspeed_kernel.workbench.numerics.tolerance import EXACT, Tolerance, tolerance_for
from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.checks import describe
from tokenspeed_kernel_base.operator import Operator
from tokenspeed_kernel_base.signature import Decoded, TensorFormat

# Elements that are converted to float64 and compared at a time; a KV cache may have 10^9 elements.
_CHUNK = 1 << 24
# With fewer elements, comparing the error's norm adds nothing to the elementwise comparison.
_FEWEST_FOR_NORM = 64
# Number of worst elements to report.
_SHOWN = 5
# Upper ends of the buckets of the error histogram, in ulp: 0, 1, 2, 3-4, 5-8 and so on.
_BUCKETS = (0, *(2**n for n in range(21)))


@dataclass(frozen=True)
class Element:
    """One element of an output: the kernel's value and the expected value."""

    index: tuple[int, ...]
    got: float
    expected: float

    def __str__(self) -> str:
        return f"{list(self.index)}: got {self.got:.9g}, expected {self.expected:.9g}"


@dataclass(frozen=True)
class Comparison:
    """The comparison of one output with the reference.

    Attributes:
        name: name of the output, or of the argument that was written to.
        fault: describes the error; empty if the output is correct.
        max_abs_error: largest absolute difference; inf if there is an unexpected NaN or infinity.
        relative_error: Frobenius norm of the difference over the norm of the expected tensor; inf if there is an unexpected NaN or
            infinity.
        beyond: fraction of elements beyond the tolerance.
        worst: the element with the largest error relative to the element's tolerance; None if nothing differs.
        tolerance: the tolerance that was applied.
        cosine: cosine similarity over the elements that are finite in both tensors; 1 if there are no such elements.
        ulps: histogram of distances in ulp, by bucket (``"0"``, ``"1"``, ``"2"``, ``"3-4"``...); nonempty buckets only, and for
            floats only. ``"not finite"``: elements that are NaN or infinite in only one of the two tensors.
        several: the elements with the largest errors beyond the tolerance, at most 5, the worst first. If no element is beyond the
            tolerance, only the worst element.
        places: describes the locations of elements beyond the tolerance; empty if there are none.
        relation: describes a simple relation of the whole result to the expected result, such as a factor; empty if there is none.
    """

    name: str
    fault: str
    max_abs_error: float
    relative_error: float
    beyond: float
    worst: Element | None
    tolerance: Tolerance
    cosine: float = 1.0
    ulps: tuple[tuple[str, int], ...] = ()
    several: tuple[Element, ...] = ()
    places: str = ""
    relation: str = ""

    @property
    def passed(self) -> bool:
        return not self.fault

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain values. Numbers that JSON cannot represent become text."""
        return {**plain_fields(self), "passed": self.passed, "ulps": dict(self.ulps)}


def plain_fields(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance as JSON values, by name."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


ToleranceOf = Callable[[torch.dtype | TensorFormat], Tolerance]
"""A function that returns the tolerance for an output of a dtype, or for values decoded from a format."""


def compare_results(
    op: Operator[Any, Any],
    arguments: Mapping[str, Any],
    got: Any,
    expected: Any,
    tolerance: Tolerance | ToleranceOf,
    written: Mapping[str, tuple[Any, Tensor]] = MappingProxyType({}),
) -> list[Comparison]:
    """Like `compare`, for two results of an operator's call with these arguments. Padding rows are left out.

    If the operator can decode its outputs, decoded values are compared, unless the comparison is exact.
    """
    got, expected = (without_padding(op, arguments, results) for results in (got, expected))
    if op.has_hook("decoded") and tolerance is not EXACT:
        pairs = list(zip(lowering.as_list(got), lowering.as_list(expected), strict=False))
        if len(pairs) == len(lowering.as_list(expected)) and all(_alike(one, other) for one, other in pairs):
            got, expected = (decoded_outputs(op, arguments, [pair[index] for pair in pairs]) for index in (0, 1))
    return compare(got, expected, tolerance, written)


def without_padding(op: Operator[Any, Any], arguments: Mapping[str, Any], results: Any) -> Any:
    """Returns the results of an operator's call with these arguments, without the rows that only pad the batch."""
    listed = _outputs(results)
    if op.padded is None or listed is None or not all(isinstance(t, Tensor) and t.ndim for t in listed):
        return results
    return lowering.from_list([t[: op.counted_rows(arguments)] for t in listed])


def decoded_outputs(op: Operator[Any, Any], arguments: Mapping[str, Any], outputs: list[Tensor]) -> tuple[Any, ...]:
    """Decodes the quantised outputs of a call with these arguments, by the operator's hook ``decoded``."""
    made = {**arguments, **dict.fromkeys(op.outs), **op.named(arguments, outputs)}
    return tuple(op.run_hook("decoded", made))


def compare(
    got: Any,
    expected: Any,
    tolerance: Tolerance | ToleranceOf = tolerance_for,
    written: Mapping[str, tuple[Any, Tensor]] = MappingProxyType({}),
) -> list[Comparison]:
    """Compares two results of an operator, each None, a tensor or a tuple of tensors.

    Args:
        got: the result under test, of any type.
        expected: the expected result.
        tolerance: the tolerance for all outputs, or a function that returns it for an output's dtype.
        written: the tensors that the call wrote to, by name, each with its expected value.

    Returns:
        One comparison per output, then one per tensor that was written to. If the results differ in type or number, a single failed
        comparison replaces those of the outputs.

    Example:
        >>> import torch
        >>> print(compare(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0]))[0].fault)
        1 of 2 elements beyond tolerance, worst at [1]: got 5, expected 2
    """

    def one(name: str, value: Any, wanted: Any) -> Comparison:
        if isinstance(wanted, Decoded):
            allowed = tolerance if isinstance(tolerance, Tolerance) else tolerance(wanted.format)
            return compare_tensors(f"{name}, decoded", value.values, wanted.values, allowed)
        return compare_tensors(name, value, wanted, tolerance if isinstance(tolerance, Tolerance) else tolerance(wanted.dtype))

    others = [one(name, value, should_be) for name, (value, should_be) in written.items()]
    given, wanted = _outputs(got), _outputs(expected)
    assert wanted is not None, f"a reference gives None, a tensor or a tuple of tensors, not {describe(expected)}"
    if given is None or len(given) != len(wanted):
        kind = f"a {type(got).__name__}" if given is None else _count(len(given))
        fault = f"the result is {kind}, expected {_count(len(wanted))}"
        return [Comparison("result", fault, math.inf, math.inf, 1.0, None, EXACT), *others]
    names = ["output"] if len(wanted) == 1 else [f"output {i}" for i in range(len(wanted))]
    return [*map(one, names, given, wanted), *others]


def _outputs(result: Any) -> tuple[Any, ...] | None:
    if result is None:
        return ()
    if isinstance(result, Tensor):
        return (result,)
    return result if isinstance(result, tuple) else None


def _count(outputs: int) -> str:
    return {0: "None", 1: "one tensor"}.get(outputs, f"{outputs} tensors")


def compare_tensors(name: str, got: Any, expected: Tensor, tolerance: Tolerance) -> Comparison:
    """Compares a tensor with its expected value.

    NaNs must be at the same positions in both tensors. Infinities must be at the same positions, with equal signs. With an exact
    tolerance the bits must agree, except for the payload of NaNs.

    Args:
        name: the tensor's name, for the comparison that is returned.
        got: the value under test, of any type.
        expected: the expected tensor.
        tolerance: the allowed difference.
    """
    if not _alike(got, expected):
        fault = f"is {describe(got)}, expected {describe(expected)}"
        return Comparison(name, fault, math.inf, math.inf, 1.0, None, tolerance)
    if expected.numel() == 0:
        return Comparison(name, "", 0.0, 0.0, 0.0, None, tolerance)
    if same_bits(got, expected):
        ulps = (("0", expected.numel()),) if expected.is_floating_point() else ()
        return Comparison(name, "", 0.0, 0.0, 0.0, None, tolerance, 1.0, ulps)
    measured = _measure(got, expected, tolerance)
    relative = _relative_error(measured)
    several = []
    for _, place in measured.worst:
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape))
        several.append(Element(index, got[index].item(), expected[index].item()))
    worst = several[0] if several else None
    fault = _fault(measured, relative, worst, expected.numel(), tolerance)
    return Comparison(
        name,
        fault,
        measured.max_error,
        relative,
        measured.beyond / expected.numel(),
        worst,
        tolerance,
        measured.cosine(),
        measured.histogram(),
        tuple(several[: max(measured.beyond, 1)]),
        describe_places(measured.mask(expected.numel()).view(expected.shape)) if measured.beyond else "",
        relation(got, expected) if fault else "",
    )


def _alike(got: Any, expected: Tensor) -> bool:
    """Returns whether a value is a tensor with the shape, dtype and device of the expected tensor."""
    said = expected.shape, expected.dtype, expected.device
    return isinstance(got, Tensor) and (got.shape, got.dtype, got.device) == said


@dataclass
class _Measured:
    """Statistics of a comparison of two tensors, which accumulate over chunks of elements."""

    beyond: int = 0
    strange: int = 0  # elements that are NaN or infinite in only one of the two tensors
    nan: int = 0  # those of the strange elements that are NaN in the result
    max_error: float = 0.0
    error_squares: float = 0.0
    expected_squares: float = 0.0
    got_squares: float = 0.0  # this sum and the next two: over elements that are finite in both tensors
    paired_squares: float = 0.0
    products: float = 0.0
    worst: list[tuple[float, int]] = field(default_factory=list)  # (score, flat index), the worst first
    masks: list[tuple[int, Tensor]] = field(default_factory=list)  # elements beyond the tolerance, by chunk
    buckets: list[int] = field(default_factory=list)

    def cosine(self) -> float:
        if not self.got_squares or not self.paired_squares:
            return 1.0 if self.got_squares == self.paired_squares else 0.0
        return self.products / math.sqrt(self.got_squares) / math.sqrt(self.paired_squares)

    def mask(self, count: int) -> Tensor:
        made = torch.zeros(count, dtype=torch.bool)
        for start, chunk in self.masks:
            made[start : start + len(chunk)] = chunk
        return made

    def histogram(self) -> tuple[tuple[str, int], ...]:
        names = ["0", "1", "2", *(f"{low + 1}-{high}" for low, high in itertools.pairwise(_BUCKETS[2:]))]
        return tuple((n, c) for n, c in zip([*names, f">{_BUCKETS[-1]}", "not finite"], self.buckets, strict=False) if c)


def _measure(got: Tensor, expected: Tensor, tolerance: Tolerance) -> _Measured:
    total = _Measured()
    finite = 0
    for _, _, e in _chunks(got, expected):
        wide = e.double()
        usable = wide.isfinite()
        finite += int(usable.sum())
        total.expected_squares += float(wide.where(usable, 0.0).square().sum())
    rms = math.sqrt(total.expected_squares / finite) if finite else 0.0

    for start, g, e in _chunks(got, expected):
        got_wide, wide = g.double(), e.double()
        both_nan = got_wide.isnan() & wide.isnan()
        comparable = got_wide.isfinite() & wide.isfinite()
        error = (got_wide - wide).abs()
        if tolerance.exact:
            differs = _bits(g).ne(_bits(e)) & ~both_nan
            beyond = differs
            score = torch.where(comparable, error + 1.0, math.inf).where(differs, 0.0)
        else:
            differs = got_wide.ne(wide) & ~both_nan
            bound = tolerance.relative * wide.abs() + tolerance.absolute * _size(wide, rms, expected.shape[-1:].numel())
            beyond = differs & (~comparable | (error > bound))
            score = torch.where(comparable, error / bound, math.inf).where(differs, 0.0)
        strange = differs & ~comparable
        total.beyond += int(beyond.sum())
        total.strange += int(strange.sum())
        total.nan += int((strange & got_wide.isnan()).sum())
        usable_error = error.where(comparable, 0.0)
        total.max_error = max(total.max_error, float(usable_error.max()))
        total.error_squares += float(usable_error.square().sum())
        if bool(beyond.any()):
            total.masks.append((start, beyond.cpu()))
        total.got_squares += float(got_wide.where(comparable, 0.0).square().sum())
        total.paired_squares += float(wide.where(comparable, 0.0).square().sum())
        total.products += float((got_wide * wide).where(comparable, 0.0).sum())
        counted = _count_ulps(g, e, differs & comparable, strange)
        total.buckets = [a + b for a, b in zip(total.buckets, counted, strict=True)] if total.buckets else counted
        scores, places = score.topk(min(_SHOWN, len(score)))
        found = [(s, start + p) for s, p in zip(scores.tolist(), places.tolist(), strict=True) if s > 0]
        total.worst = sorted(total.worst + found, key=lambda one: (-one[0], one[1]))[:_SHOWN]
    if total.strange:
        total.max_error = math.inf
    return total


def _size(wide: Tensor, rms: float, row: int) -> Tensor | float:
    """Returns the scale of absolute errors: the rms of the tensor, or of the element's row if that is larger.

    The magnitudes of rows may differ a lot (the first tokens of a sequence attend to few others), and rounding errors scale with
    the rounded values.
    """
    if wide.numel() % row:  # the row is longer than a chunk
        return rms
    of_rows = wide.where(wide.isfinite(), 0.0).view(-1, row).square().mean(-1, keepdim=True).sqrt()
    return of_rows.clamp(min=rms).expand(-1, row).reshape(-1)


def _chunks(got: Tensor, expected: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    flat_got, flat_expected = got.detach().reshape(-1), expected.detach().reshape(-1)
    row = expected.shape[-1:].numel()
    size = max(_CHUNK // row, 1) * row if row <= _CHUNK else _CHUNK  # whole rows
    for start in range(0, flat_expected.numel(), size):
        yield start, flat_got[start : start + size], flat_expected[start : start + size]


def _count_ulps(got: Tensor, expected: Tensor, differing: Tensor, strange: Tensor) -> list[int]:
    """Counts elements of two tensors by their distance in ulp.

    The last two counts are elements beyond the largest bucket, and ``strange`` elements, which are finite in only one of the two
    tensors. ``differing``: a mask of elements that are finite and differ.
    """
    if not got.is_floating_point():
        return [0] * (len(_BUCKETS) + 2)
    left, right = _ordered(got[differing]), _ordered(expected[differing])
    # Values of different signs are far apart. Clamping keeps the distance of two float64 values from overflowing an int64.
    apart = torch.where((left < 0) == (right < 0), (left - right).abs(), left.abs().clamp(max=2**61) + right.abs().clamp(max=2**61))
    bounds = torch.tensor(_BUCKETS, device=apart.device, dtype=apart.dtype)
    counts = torch.bincount(torch.bucketize(apart, bounds), minlength=len(_BUCKETS) + 1).tolist()
    apart_or_strange = len(left) + (odd := int(strange.sum()))
    counts[0] += got.numel() - apart_or_strange
    return [*counts, odd]


def _ordered(tensor: Tensor) -> Tensor:
    """Maps finite floats to int64 in the same order. Neighbouring floats map to neighbouring integers, and both zeros to 0."""
    bits = _bits(tensor).long()
    if tensor.element_size() == 1:
        bits = torch.where(bits >= 128, bits - 256, bits)
    lowest = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Returns whether two tensors on one device have the same shape, dtype and bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_bits(left.detach().reshape(-1)), _bits(right.detach().reshape(-1)))


def _relative_error(measured: _Measured) -> float:
    if measured.strange:
        return math.inf
    if measured.error_squares == 0:
        return 0.0
    return math.sqrt(measured.error_squares / measured.expected_squares) if measured.expected_squares else math.inf


def _fault(measured: _Measured, relative: float, worst: Element | None, count: int, tolerance: Tolerance) -> str:
    if measured.beyond:
        what = "differ" if tolerance.exact else "beyond tolerance"
        notes = ""
        if measured.nan:
            notes = f" ({measured.nan} NaN where the reference has none)"
        elif measured.strange:
            notes = f" ({measured.strange} NaN or infinite in one of the two only)"
        return f"{measured.beyond} of {count} elements {what}{notes}, worst at {worst}"
    if count >= _FEWEST_FOR_NORM and relative > tolerance.norm:
        return (
            f"each element is within tolerance, but together they are not: relative Frobenius error {relative:.3g} is above "
            f"{tolerance.norm:.3g}"
        )
    return ""
