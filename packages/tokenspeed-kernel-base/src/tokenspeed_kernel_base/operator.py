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

    @rmsnorm.outputs                 # rarely: the outputs that this call makes, if they are not the first of ``outs``
    def _(residual): return ("out",) if residual is None else ("out", "residual_out")

    @rmsnorm.cases                   # named inputs, small and large
    def _(): return [Case("gpt-oss-120b prefill 4096", lambda draw: ...)]

    @rmsnorm.cost                    # work that cannot be avoided
    def _(x): return Cost(...)

    @rmsnorm.work                    # the values that determine the amount of work, for a capture; may wait for the device
    def _(lengths): return {"lengths": lengths.tolist()}

    @rmsnorm.vary                    # arguments with other values, see `tokenspeed_kernel_base.variation`
    def _(variation, x, lengths): return {"x": ...}

    @rmsnorm.decoded                 # rarely: outputs dequantised with their scales; here ``out`` and ``scale_out`` are the outputs
    def _(out, scale_out): return (Decoded(...),)

    @rmsnorm.intermediates           # rarely: formats that intermediate values are rounded to, which a tolerance must allow for
    def _(): return (fp8_format(...),)

    @rmsnorm.plan                    # rarely, see `tokenspeed_kernel_base.planning`; ``rmsnorm.plan(...)`` then makes plans
    def _(check, hidden): return Plan(...)

    @rmsnorm.prepare                 # likewise; ``rmsnorm.prepare(weight, plan)`` then converts the weight
    def _(preparation, weight, plan): return ...

Each hook names the parameters that it needs, or takes all of them as ``**arguments``. Only the module that declares the operator
can add hooks. The result is an ordinary function with the body's signature plus the keywords ``override`` (a kernel's name) and
``solution``. The function has the hooks, ``bind``, ``explain`` and ``operator`` as attributes. Operators are for inference: a call
whose arguments require gradients raises RuntimeError.

A parameter is a tensor, a plain option, a dataclass of these, or a resource that outlives the call: a process group, say
(`tokenspeed_kernel_base.resources`).

The body runs as solution ``reference``. The body has ``out`` in its signature and ignores it, because the framework copies the
body's results to ``out``. A body that calls other operators, its ``parts``, also runs as solution ``composed``, with the best
kernel of each part (`tokenspeed_kernel_base.composition`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from tokenspeed_kernel_base.calling import Caller
from tokenspeed_kernel_base.declaration import REFERENCE, Operator
from tokenspeed_kernel_base.explanation import Explanation
from tokenspeed_kernel_base.hooks import HOOKS, Hook
from tokenspeed_kernel_base.names import did_you_mean
from tokenspeed_kernel_base.options import Options
from tokenspeed_kernel_base.registry import register_package

__all__ = ["REFERENCE", "Operator", "OperatorFunction", "get_operator", "operator", "operators", "plain_function"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class OperatorFunction(Protocol[P, R_co]):
    """The type of an operator's public function: a function with attributes."""

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
    """Returns all declared operators, sorted by family and mode."""
    return [_operators[key] for key in sorted(_operators)]


def get_operator(name: str) -> Operator[Any, Any]:
    """Finds an operator by ``"mode"`` or ``"family.mode"``. Raises KeyError if there is no such operator; the message suggests a
    near name.
    """
    for op in _operators.values():
        if name in (op.mode, str(op)):
            return op
    raise KeyError(f"no operator {name}{did_you_mean(name, [n for op in _operators.values() for n in (op.mode, str(op))])}")


class operator(Options):  # lower case, because it is used as a decorator
    """Declares an operator; decorates its body. Takes the `Options`. The module's docstring shows a whole declaration."""

    def __call__(self, body: Callable[P, R]) -> OperatorFunction[P, R]:
        taken = next((op for op in _operators.values() if op.mode == self.mode), None)
        if taken is not None:
            raise TypeError(f"operator {self.mode} is declared twice: in {taken.body.__module__} and in {body.__module__}")
        op = Operator(self, body)
        function = op.function = Caller(op).function
        for hook in HOOKS:
            setattr(function, hook, op.hook_adder(hook))
        function.check_values = op.add_check_values
        op.register_reference()
        _operators[op.family, op.mode] = op
        return function  # type: ignore[no-any-return]


def plain_function(function: Any, package: str) -> Any:
    """Makes an operator's function for one package. It has the operator's signature, docstring and checks, and selects among that
    package's kernels only.

    So a wheel of kernels works with the base alone. This call registers the package's kernels as private kernels; plugins make them
    public.

    Args:
        function: an operator's function.
        package: the name of a package, ``"my_kernels"``; no subpackage.

    Returns:
        A function that raises TypeError and ValueError for invalid arguments, as the operator does. It raises NoKernelFoundError,
        with the reason of each kernel, if none of the package's kernels is eligible. It also has the attributes ``bind``,
        ``explain`` and ``operator``.
    """
    register_package(package, public=False)  # kernels that are public already stay public
    return Caller(function.operator, package).function
