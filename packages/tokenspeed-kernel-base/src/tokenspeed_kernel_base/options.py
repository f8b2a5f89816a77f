"""The options of an operator's declaration, which complement its body and hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.parameters import Kind, Parameter
from tokenspeed_kernel_base.traits import TraitKind


@dataclass(eq=False, repr=False)
class Options:
    """An operator's name and options, as passed to the decorator `operator`. The name and options are also attributes of the
    operator.

    Attributes:
        family, mode: the two parts of the operator's name; ``mode`` alone is unique.
        formats: parameters whose dtypes form the format signature. With a ``formats`` hook, which is needed where scales matter,
            the operands and the names of their possible formats: ``{"a": ("dense", "fp8")}``.
        traits: the traits that the ``traits`` hook may return, with the values of each: ``{"hidden": int, "residual": bool}``.
            Registration rejects a kernel that constrains any other trait, or that requires a value of another kind.
        outs: the parameters in the body's signature that receive outputs, in the order of the outputs. A call may make only the
            first few outputs. If calls may make other subsets, the ``outputs`` hook names the outputs that a call makes.
        mutates: other parameters that the operator writes to.
        in_place: output parameter -> the inputs that may be the same tensor as this output: ``{"out": ("x",)}``. All other memory
            that a call writes to must not overlap any other argument.
        hints: parameters that repeat a tensor's values on the host. Kernels may use hints to save work. Decisions do not depend on
            hints.
        exact: whether kernels must match the body bit for bit, except for the payload of NaNs.
        reference_traits: constraints of the reference (the body), if it does not support every call that the signature allows.
        composed_traits: constraints of the composed kernel, which runs the operator's parts one after another. Such constraints are
            needed, for example, if the parts cannot read objects that are prepared for this operator's own kernels.
        fixed_traits: traits that describe the operands; an override cannot bypass them.
        varying: sizes that change from call to call, by their names in the ``check`` hook: tokens, batch, rows. Keys of measured
            results contain these sizes rounded up to a power of two, and the exact value of every other size. The first varying
            size counts the items of a batch: sequences, rows.
        capacity: sizes that only give the amount of memory: the pages of a cache. No key contains them.
        bounds: integer parameters that bound a varying size. Bounds change from call to call, too. A decision holds for all values
            that the ``check`` hook allows with `Checker.bound`. The hook must use a bound for nothing else. The hooks ``traits``,
            ``formats`` and ``fake`` must not use bounds.
        padded: the parameter with the offsets of a batch's items, if rows past the last offset are padding. A call leaves those
            rows of its outputs unchanged.
        unlimited: integer parameters for which -1 means no limit, such as a window. Values of 2^30 and more also mean no limit.
            Kernels and hooks always receive -1 instead, so that arithmetic with the option does not overflow int32.
        scales: parameters that hold scales of other parameters. The scales are positive; uint8 scales are e8m0 exponents.
        planned: the parameter that takes a plan, for operators whose kernel is selected before any tensor exists.
        layout: the trait, and the plan's attribute, that gives the layout of objects prepared for a kernel.
        parts: the operators that the body calls. If only the reference is eligible, each part is dispatched to its best kernel; see
            `tokenspeed_kernel_base.composition`.
    """

    family: str
    mode: str
    _: KW_ONLY
    formats: Sequence[str] | Mapping[str, Sequence[str]] = ()
    traits: Mapping[str, TraitKind] = field(default_factory=dict)
    outs: Sequence[str] = ("out",)
    mutates: Sequence[str] = ()
    in_place: Mapping[str, Sequence[str]] = field(default_factory=dict)
    hints: Sequence[str] = ()
    exact: bool = False
    reference_traits: Mapping[str, Any] = field(default_factory=dict)
    composed_traits: Mapping[str, Any] = field(default_factory=dict)
    fixed_traits: Collection[str] = ()
    varying: Sequence[str] = ()
    capacity: Collection[str] = ()
    bounds: Sequence[str] = ()
    padded: str | None = None
    unlimited: Sequence[str] = ()
    scales: Collection[str] = ()
    planned: str | None = None
    layout: str | None = None
    parts: Sequence[Any] = ()

    def __str__(self) -> str:
        return f"{self.family}.{self.mode}"

    def check_options(self, body: Callable[..., Any], parameters: Sequence[Parameter]) -> None:
        """Raises TypeError for options that contradict one another or the body's parameters."""
        named = {*self.outs, *self.mutates, *self.hints, *self.bounds, *self.unlimited, *self.scales, *self.in_place}
        named.update(*self.in_place.values(), () if isinstance(self.formats, Mapping) else self.formats)
        unknown = named - {parameter.name for parameter in parameters}
        if unknown:
            raise TypeError(f"{self}: {', '.join(sorted(unknown))} of the declaration are not parameters of {body.__name__}")
        if not any(t.required and not t.optional for p in parameters if not p.optional for t in p.tensors()):
            raise TypeError(f"{self} ({body.__name__}): an operator takes at least one tensor that may not be absent")
        capacity = {*self.capacity}
        twice = capacity.intersection(self.varying) | capacity.union(self.varying).intersection(self.bounds)
        if twice:
            raise TypeError(f"{self}: {', '.join(sorted(twice))} must be declared as one of varying, capacity and bounds")
        self._check_planned(parameters)
        for trait in sorted({*self.fixed_traits, *([self.layout] if self.layout else [])} - self.traits.keys()):
            raise TypeError(f"{self}: {trait} is not among the traits of the declaration{did_you_mean(trait, self.traits)}")

    def _check_planned(self, parameters: Sequence[Parameter]) -> None:
        if self.planned is None:
            if self.layout is not None:
                raise TypeError(f"{self}: layout={self.layout!r} is for operators that are planned")
            return
        parameter = next((p for p in parameters if p.name == self.planned), None)
        attributes = {field.attribute for field in parameter.fields} if parameter is not None else set()
        wanted = ["kernel", *([self.layout] if self.layout else [])]
        if parameter is None or parameter.kind is not Kind.VALUE or not attributes.issuperset(wanted):
            needs = f"a parameter that is a dataclass with {' and '.join(wanted)}, of no tensors"
            raise TypeError(f"{self}: planned={self.planned!r} must name {needs}")
