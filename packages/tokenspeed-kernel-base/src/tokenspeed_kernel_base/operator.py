"""The decorator that declares an operator, and an example of a whole declaration.

::

    @operator("norm", "rmsnorm", formats=("x",), traits={"hidden": int}, varying=("rows",))
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-5, out: Tensor | None = None) -> Tensor:
        \"\"\"What it computes: shapes, dtypes, rounding, errors, source.\"\"\"
        ...plain PyTorch that ignores ``out``: the meaning, and the reference...

    @rmsnorm.traits                  # a request's traits: values of the declared traits, from the arguments
    def _(x): return {"hidden": x.shape[-1]}

    @rmsnorm.check                   # raises for invalid calls; depends on shapes, dtypes, devices and options only
    def _(check, x, weight): ...

    @rmsnorm.check_values(host=("lengths",))   # raises for invalid values of tensors in host memory
    def _(check, lengths): ...

    @rmsnorm.fake                    # every output, empty: shapes and dtypes, for torch.compile and for checking ``out``
    def _(x): return torch.empty_like(x)

    @rmsnorm.outputs                 # rarely: which of ``outs`` this call makes, in order, where that is not the first ones
    def _(residual): return ("out",) if residual is None else ("out", "residual_out")

    @rmsnorm.cases                   # named inputs, small and large
    def _(): return [Case("gpt-oss-120b prefill 4096", lambda draw: ...)]

    @rmsnorm.cost                    # work that cannot be avoided
    def _(x): return Cost(...)

    @rmsnorm.work                    # the values that decide the amount of work, for a capture; may wait for the device
    def _(lengths): return {"lengths": lengths.tolist()}

    @rmsnorm.vary                    # arguments with other values, see `tokenspeed_kernel_base.variation`
    def _(variation, x, lengths): return {"x": ...}

    @rmsnorm.decoded                 # rarely: outputs dequantised with their scales; parameters of ``outs`` are the outputs here
    def _(out, scale_out): return (Decoded(...),)

    @rmsnorm.intermediates           # rarely: formats that intermediate values are rounded to, which a tolerance must allow for
    def _(): return (fp8_format(...),)

    @rmsnorm.plan                    # rarely, see `tokenspeed_kernel_base.planning`; ``rmsnorm.plan(...)`` then makes plans
    def _(check, hidden): return Plan(...)

    @rmsnorm.prepare                 # likewise; ``rmsnorm.prepare(weight, plan)`` then converts it for the plan's kernel
    def _(preparation, weight, plan): return ...

Each hook names the parameters that it needs, or takes all of them as ``**arguments``. It is added in the module of the body. The
result is an ordinary function with the body's signature plus the keywords ``override`` (a kernel's name) and ``solution``. The
function has the hooks, ``bind``, ``explain`` and ``operator`` as attributes. Operators are for inference: a call whose arguments
require gradients raises RuntimeError.

A parameter is a tensor, a plain option, a dataclass of these, or a resource that outlives the call: a process group, say
(`tokenspeed_kernel_base.resources`).

The body runs as solution ``reference``. It has ``out`` in its signature but ignores it: the framework copies results to ``out``,
for every operator. A body that calls other operators also runs as solution ``composed``, with the best kernel of each
(`tokenspeed_kernel_base.composition`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from tokenspeed_kernel_base.calling import Caller
from tokenspeed_kernel_base.declaration import HOOKS, REFERENCE, Operator
from tokenspeed_kernel_base.explanation import Explanation
from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.registry import register_package
from tokenspeed_kernel_base.traits import TraitKind

__all__ = ["REFERENCE", "Operator", "OperatorFunction", "get_operator", "operator", "operators", "plain_function"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Hook = TypeVar("Hook", bound=Callable[..., Any])


class OperatorFunction(Protocol[P, R_co]):
    """An operator as its users see it: a function with attributes."""

    __name__: str
    __qualname__: str
    operator: Operator[Any, Any]
    caller: Caller

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, override: str | None, solution: str | None = ..., **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: Any, solution: str | None, **kwargs: Any) -> R_co: ...

    def traits(self, hook: Hook) -> Hook: ...
    def check(self, hook: Hook) -> Hook: ...
    def check_values(self, *, host: Iterable[str]) -> Callable[[Hook], Hook]: ...
    def formats(self, hook: Hook) -> Hook: ...
    def fake(self, hook: Hook) -> Hook: ...
    def outputs(self, hook: Hook) -> Hook: ...
    def cases(self, hook: Hook) -> Hook: ...
    def cost(self, hook: Hook) -> Hook: ...
    def work(self, hook: Hook) -> Hook: ...
    def vary(self, hook: Hook) -> Hook: ...
    def intermediates(self, hook: Hook) -> Hook: ...
    def decoded(self, hook: Hook) -> Hook: ...
    def plan(self, *args: Any, **facts: Any) -> Any: ...
    def prepare(self, *args: Any, **kwargs: Any) -> Any: ...
    def bind(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Callable[..., R_co]: ...
    def explain(self, *args: Any, override: str | None = None, solution: str | None = None, **kwargs: Any) -> Explanation: ...


_operators: dict[tuple[str, str], Operator[Any, Any]] = {}


def operators() -> list[Operator[Any, Any]]:
    """Every declared operator, by family and mode."""
    return [_operators[key] for key in sorted(_operators)]


def get_operator(name: str) -> Operator[Any, Any]:
    """An operator by ``"mode"`` or ``"family.mode"``. Raises KeyError, naming the nearest, if there is none."""
    for op in _operators.values():
        if name in (op.mode, str(op)):
            return op
    raise KeyError(f"no operator {name}{did_you_mean(name, [n for op in _operators.values() for n in (op.mode, str(op))])}")


def operator(
    family: str,
    mode: str,
    *,
    formats: Sequence[str] | Mapping[str, Sequence[str]] = (),
    traits: Mapping[str, TraitKind] | None = None,
    outs: Sequence[str] = ("out",),
    mutates: Sequence[str] = (),
    in_place: Mapping[str, Sequence[str]] | None = None,
    hints: Sequence[str] = (),
    exact: bool = False,
    reference_traits: Mapping[str, Any] | None = None,
    composed_traits: Mapping[str, Any] | None = None,
    fixed_traits: Iterable[str] = (),
    varying: Sequence[str] = (),
    capacity: Iterable[str] = (),
    bounds: Sequence[str] = (),
    padded: str | None = None,
    unlimited: Sequence[str] = (),
    scales: Iterable[str] = (),
    planned: str | None = None,
    layout: str | None = None,
    composed: bool = False,
) -> Callable[[Callable[P, R]], OperatorFunction[P, R]]:
    """Declares an operator; decorates its body. The module's docstring shows a whole declaration.

    Args:
        family, mode: its name; ``mode`` is unique.
        formats: parameters whose dtypes make the format signature. Where scales matter, the ``formats`` hook makes it instead, and
            these are its operands with the names of the formats that each may have: ``{"a": ("dense", "fp8")}``.
        traits: what the ``traits`` hook may give, with the values of each: ``{"hidden": int, "residual": bool}``. A kernel that
            constrains any other trait is refused when it is registered, and so is one that asks for a value of another kind.
        outs: parameters into which outputs are written when given, in the order of the outputs. A call may make the first of them
            alone; where it makes others, the ``outputs`` hook names them.
        mutates: other parameters that it writes to.
        in_place: inputs that may be the same tensor as an output, by the output's name: ``{"out": ("x",)}``. Otherwise written
            memory must not overlap any other argument.
        hints: parameters that repeat a tensor's values on the host. They may save work, and are no part of a decision.
        exact: kernels must match the body bit for bit.
        reference_traits: constraints of the body itself, if it does not support every call that the signature allows.
        composed_traits: constraints of the composed kernel of a composed operator: if its parts cannot read objects that are
            prepared for this operator's kernels, say.
        fixed_traits: traits that describe the operands; an override cannot bypass them.
        varying: sizes, as the ``check`` hook names them, that change from call to call: tokens, batch, rows. Measured results are
            keyed by these sizes rounded up to a power of two, and by the exact value of every other size. The first one counts the
            items of a batch: sequences, rows.
        capacity: sizes that only give the amount of memory: the pages of a cache. They are not part of any key.
        bounds: integer parameters that bound a varying size. They vary, too. A decision holds for all values that the ``check``
            hook allows with `Checker.bound`. The hook must use a bound in no other way, and the hooks ``traits``, ``formats`` and
            ``fake`` must not use it.
        padded: the parameter with the offsets of a batch's items, if rows past the last offset are padding. A call leaves those
            rows of its outputs unchanged.
        unlimited: integer parameters for which -1 means no limit, such as a window. Values from 2^30 on mean the same. Kernels and
            hooks receive -1 for them, so that arithmetic with the option does not overflow int32.
        scales: parameters that hold scales of others: positive; uint8 ones are exponents (e8m0).
        planned: the parameter that takes a plan, for operators whose kernel is selected before any tensor exists.
        layout: the trait, and the plan's attribute, that gives the layout of objects prepared for a kernel.
        composed: the body calls other operators. If no other kernel but the reference is eligible, each called operator is
            dispatched to its best kernel; see `tokenspeed_kernel_base.composition`.
    """

    def declare(body: Callable[P, R]) -> OperatorFunction[P, R]:
        taken = next((op for op in _operators.values() if op.mode == mode), None)
        if taken is not None:
            raise TypeError(f"operator {mode} is declared twice: in {taken.body.__module__} and in {body.__module__}")
        op = Operator(
            family,
            mode,
            body,
            formats=formats,
            traits=traits or {},
            outs=[out for out in outs if out in body.__annotations__],
            mutates=mutates,
            in_place=in_place or {},
            hints=hints,
            exact=exact,
            reference_traits=reference_traits or {},
            composed_traits=composed_traits or {},
            fixed_traits=fixed_traits,
            varying=varying,
            capacity=capacity,
            bounds=bounds,
            padded=padded,
            unlimited=unlimited,
            scales=scales,
            planned=planned,
            layout=layout,
            composed=composed,
        )
        function = op.function = Caller(op).function
        for hook in HOOKS:
            setattr(function, hook, op.hook_adder(hook))
        function.check_values = op.add_check_values
        op.register_reference()
        _operators[family, mode] = op
        return function  # type: ignore[no-any-return]

    return declare


def plain_function(function: Any, package: str) -> Any:
    """An operator as a function of one package: the same signature, docstring and checks, dispatched to that package's kernels
    alone.

    So a wheel of kernels works without any other wheel, from the declarations that it registers. Its kernels are discovered and
    registered now, as private ones; plugins make them public.

    Args:
        function: an operator's function.
        package: the name of a package, ``"my_kernels"``; no subpackage.

    Returns:
        A function that raises TypeError and ValueError for invalid arguments, as the operator does. It raises NoKernelFoundError,
        with the reason of each kernel, if none of the package's kernels is eligible. It has ``bind``, ``explain`` and ``operator``,
        too.
    """
    register_package(package, public=False)  # kernels that are public already stay public
    return Caller(function.operator, package).function
