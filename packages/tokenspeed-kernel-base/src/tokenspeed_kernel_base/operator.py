"""One declaration per operator, and everything that follows from it.

::

    @operator("norm", "rmsnorm", formats=("x",), traits={"hidden": int}, varying=("rows",))
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-5, out: Tensor | None = None) -> Tensor:
        \"\"\"What it computes: shapes, dtypes, rounding, errors, source.\"\"\"
        ...plain PyTorch, without a thought for ``out``: the meaning, and the reference...

    @rmsnorm.traits                  # what a request asks of a kernel: values of the traits that are declared, from the arguments
    def _(x): return {"hidden": x.shape[-1]}

    @rmsnorm.check                   # what makes a call wrong; depends on shapes, dtypes, devices and options only
    def _(check, x, weight): ...

    @rmsnorm.check_values(host=("lengths",))   # what makes values wrong, of tensors that lie in host memory
    def _(check, lengths): ...

    @rmsnorm.fake                    # every output, empty: shapes and dtypes, for torch.compile and for checking ``out``
    def _(x): return torch.empty_like(x)

    @rmsnorm.outputs                 # rarely: which of ``outs`` this call makes, in order, where that is not the first ones
    def _(residual): return ("out",) if residual is None else ("out", "residual_out")

    @rmsnorm.cases                   # named inputs, small and large
    def _(): return [Case("gpt-oss-120b prefill 4096", lambda draw: ...)]

    @rmsnorm.cost                    # work that cannot be avoided
    def _(x): return Cost(...)

    @rmsnorm.work                    # the values that decide how much there is to do, for a capture; may wait for the device
    def _(lengths): return {"lengths": lengths.tolist()}

    @rmsnorm.vary                    # arguments with other values, see `tokenspeed_kernel_base.variation`
    def _(variation, x, lengths): return {"x": ...}

    @rmsnorm.decoded                 # rarely: what codes and scales among the outputs stand for; ``outs`` are the outputs here
    def _(out, scale_out): return (Decoded(...),)

    @rmsnorm.intermediates           # rarely: formats that values are rounded to on the way, which a tolerance has to allow for
    def _(): return (fp8_format(...),)

    @rmsnorm.plan                    # rarely: see `tokenspeed_kernel_base.planning`; ``rmsnorm.plan(...)`` then makes plans
    def _(check, hidden): return Plan(...)

    @rmsnorm.prepare                 # likewise; ``rmsnorm.prepare(weight, plan)`` then arranges it for the plan's kernel
    def _(preparation, weight, plan): return ...

Each hook names the parameters that it wants, or takes all of them as ``**arguments``, and is added in the module of the body. The
result is an ordinary function with the body's signature plus the keywords ``override`` (a kernel's name) and ``solution``; it also
carries the hooks, ``bind``, ``explain`` and ``operator``. Operators are for inference: a call whose arguments require gradients
raises RuntimeError.

A parameter is a tensor, a plain option, a dataclass of such, or a resource, which outlives the call: a process group, say
(`tokenspeed_kernel_base.resources`).

The body runs as solution ``reference``. It takes ``out`` in its signature only; writing into it is done here, for every operator
alike. A body that calls other operators runs as solution ``composed``, too, with the best kernel of each
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
    """An operator as its users see it: a function, and what can be asked of it."""

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
        in_place: inputs that an output may be, by the output's name: ``{"out": ("x",)}``. Otherwise what a call writes to must not
            overlap any other argument.
        hints: parameters that repeat on the host what a tensor says; they may spare work, and never decide.
        exact: kernels must match the body bit for bit.
        reference_traits: constraints of the body itself, where it does not serve everything the signature can say.
        composed_traits: the same of the body as it runs with its parts' best kernels, of an operator that is composed: where its
            parts cannot take what is prepared for kernels of this operator alone, say.
        fixed_traits: traits that say what the operands are; an override does not get past them.
        varying: sizes, as the ``check`` hook names them, that change from call to call: tokens, batch, rows. Measured results are
            found by the power of two above them, and by the exact value of every size that is not named here. The first one counts
            the items that a batch consists of: sequences, rows.
        capacity: sizes that only say how much memory there is: the pages of a cache. Nothing is found by them.
        bounds: integer parameters that bound a varying size. They vary, too, and a decision holds for all values that the ``check``
            hook allows with `Checker.bound`; it looks at them in no other way, and the hooks ``traits``, ``formats`` and ``fake``
            in none.
        padded: the parameter with the offsets of a batch's items, where rows behind the last offset are padding: they belong to no
            item, and a call leaves those rows of its outputs as they are.
        unlimited: integer parameters of which -1 means no limit, as of a window. 2^30 and more mean the same: kernels and hooks
            are given -1 for them, so that what they compute with the option does not overflow int32.
        scales: parameters that hold scales of others: positive; uint8 ones are exponents (e8m0).
        planned: the parameter that a plan is given as, for operators whose kernel is chosen before any tensor exists.
        layout: the trait, and the plan's attribute, that says in which layout what is prepared for a kernel lies.
        composed: the body calls other operators. Where no kernel serves a call as a whole, each of them is dispatched to its best
            kernel; see `tokenspeed_kernel_base.composition`.
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
    """An operator as a function of one package: the same signature, docstring and checks, served by that package's kernels alone.

    So a wheel of kernels works without any other, from the same declarations that it registers with. Its kernels are found and
    registered now; who else sees them is for plugins to say.

    Args:
        function: an operator's function.
        package: the name of a package, ``"my_kernels"``; no subpackage.

    Returns:
        A function that raises TypeError and ValueError for wrong arguments, as the operator does, and NoKernelFoundError where none
        of the package's kernels serves a call, with the reason of each. It has ``bind``, ``explain`` and ``operator``, too.
    """
    register_package(package, public=False)  # those that were registered before stay as they are
    return Caller(function.operator, package).function
