"""Baselines: kernels of other projects, timed beside ours. A small Python file declares how to call them.

::

    # baselines.py:  tokenspeed-kernel bench mha_prefill --baseline baselines.py
    from flash_attn_interface import flash_attn_varlen_func
    from tokenspeed_kernel.workbench.benchmark import Unsupported, baseline

    @baseline("attention.mha_prefill", name="fa3", package="flash-attn-3")
    def fa3(q, k, v, cu_seqlens, max_seqlen, window_left, softmax_scale):
        if q.shape[-1] > 256:
            raise Unsupported("head_dim above 256")
        longest = max_seqlen or q.shape[0]
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True, ...)

The function of a baseline names the operator's parameters that it supports. A case is skipped if it sets any other parameter to a
value other than the default. A function with ``**rest`` receives all other parameters, and must check them itself.

With ``setup=True`` the function is called once before timing. It returns the function to time, which has no parameters. Planning
and weight preparation belong in this first call.

    @baseline("gemm.mm", name="mine", setup=True)
    def mine(a, b):
        packed = pack(b)
        return lambda: multiply(a, packed)

Before timing, a baseline's results are verified against the operator's reference, as a kernel's results are.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tokenspeed_kernel.workbench.benchmark.metadata import package_version
from tokenspeed_kernel.workbench.numerics.compare import compare_results, compare_tensors, same_bits
from tokenspeed_kernel.workbench.numerics.tolerance import tolerance_for
from tokenspeed_kernel.workbench.numerics.verify import CaseResult, Status
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.operator import Operator, get_operator
from tokenspeed_kernel_base.parameters import Kind, Parameter, tensor_arguments

_LONGEST_REASON = 500


class Unsupported(Exception):
    """Raised by a baseline that does not support a case, with the reason."""


def failure_of(step: Callable[[], None], known: Mapping[type[Exception], str] = MappingProxyType({})) -> tuple[str, str] | None:
    """Runs a step of a measurement without gradients. Returns why the step failed, so that other measurements can continue.

    Args:
        step: the step to run.
        known: further exception types, each with the kind of failure to return for it.

    Returns:
        The kind of failure and its reason: ``"skipped"`` if `Unsupported` was raised, ``"absent"`` if an import failed, a name of
        ``known``, else ``"error"``; None if nothing failed.
    """
    try:
        with torch.no_grad():
            step()
    except Exception as error:
        for kind, name in {Unsupported: "skipped", ImportError: "absent", **known}.items():
            if isinstance(error, kind):
                return name, str(error)
        return "error", f"{type(error).__name__}: {str(error)[:_LONGEST_REASON]}"
    return None


@dataclass(frozen=True)
class Baseline:
    """A baseline: a function that calls a kernel of another project for an operator's arguments.

    Attributes:
        name: the baseline's name in tables.
        operator: ``"family.mode"``.
        function: the baseline's function, which takes the operator's parameters that it names.
        wanted: the names of the operator's parameters that ``function`` takes.
        takes_rest: whether the function has ``**rest``, and so receives all parameters.
        setup: whether ``function`` returns the function to time.
        package: the distribution whose version is reported; empty for no distribution.
    """

    name: str
    operator: str
    function: Callable[..., Any]
    wanted: frozenset[str]
    takes_rest: bool
    setup: bool
    package: str

    @property
    def version(self) -> str:
        """The version of the baseline's package; empty if unknown."""
        return package_version(self.package) if self.package else ""

    @property
    def solution(self) -> str:
        """The baseline's name, because tables show each baseline as a separate backend."""
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def refusal(self, op: Operator[Any, Any], arguments: Mapping[str, Any]) -> str | None:
        """Returns why the baseline does not support a call, or None if it does. ``arguments`` has a value for every parameter."""
        if self.takes_rest:
            return None
        others = [p for p in op.parameters if p.name not in self.wanted and p.kind is not Kind.HINT]
        given = [p.name for p in others if _given(p, arguments[p.name])]
        return f"does not take {', '.join(given)}" if given else None

    def bound(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """Returns the call to time, a function without parameters. Errors of the baseline's setup are raised here."""
        chosen = dict(arguments) if self.takes_rest else {name: arguments[name] for name in arguments if name in self.wanted}
        call = functools.partial(self.function, **chosen)
        return call() if self.setup else call


def _given(parameter: Parameter, value: Any) -> bool:
    """Returns whether an argument differs from its parameter's default; true for a required parameter."""
    if parameter.required:
        return True
    return bool(value is not parameter.default and (isinstance(value, torch.Tensor) or value != parameter.default))


def baseline(operator: str, *, name: str = "", setup: bool = False, package: str = "") -> Callable[[Callable[..., Any]], Baseline]:
    """Returns a decorator that declares a function as a baseline. The module's docstring has examples.

    Args:
        operator: ``"mode"`` or ``"family.mode"``.
        name: the baseline's name; the function's name if not given.
        setup: whether the function is called once and returns the function to time.
        package: the distribution whose version reports record.

    Raises:
        KeyError: no such operator exists.
        TypeError: the function has parameters that the operator does not have.
    """

    def declare(function: Callable[..., Any]) -> Baseline:
        op = get_operator(operator)
        called = name or function.__name__
        parameters = inspect.signature(function).parameters.values()
        wanted = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        unknown = wanted - {*op.names}
        if unknown:
            raise TypeError(
                f"baseline {called} takes {', '.join(sorted(unknown))}, which {op} lacks; {op} has {', '.join(op.names)}"
            )
        rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return Baseline(called, str(op), function, frozenset(wanted), rest, setup, package)

    return declare


class BaselineFileError(ValueError):
    """A file of baselines cannot be used; the message names the file and the reason."""


def load_baselines(file: Path | str) -> list[Baseline]:
    """Runs a file and returns the baselines that it declares, in order.

    Raises:
        BaselineFileError: the file cannot be run, or declares no baseline.
    """
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"_baselines_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BaselineFileError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file's code may raise anything
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise BaselineFileError(f"{path}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})") from error
    found = list(dict.fromkeys(value for value in vars(module).values() if isinstance(value, Baseline)))
    if not found:
        raise BaselineFileError(f"{path} declares no baseline: decorate a function with {__package__}.baseline")
    return found


def verify_baseline(foreign: Baseline, case: Case, device: torch.device, *, seed: int = 0) -> CaseResult:
    """Verifies a baseline against its operator's reference on one case. Checks its outputs, and that read-only arguments are
    unchanged.
    """
    op = get_operator(foreign.operator)
    result = functools.partial(CaseResult, foreign.name, foreign.operator, case.name)
    try:
        with torch.no_grad():
            arguments, twin = (op.complete(case.build(device, seed)) for _ in range(2))
            refused = foreign.refusal(op, arguments)
            if refused is not None:
                return result(Status.SKIPPED, refused)
            got = foreign.bound(twin)()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            tolerance = functools.partial(tolerance_for, request=op.request(arguments), exact=op.exact)
            before = dict(tensor_arguments(op.parameters, op.complete(case.build(device, seed))))
            expected = op.reference(*arguments.values())
    except Unsupported as reason:
        return result(Status.SKIPPED, str(reason))
    except Exception as error:  # a baseline may fail in any way; other results must not be lost
        return result(Status.ERROR, f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    comparisons = compare_results(op, twin, got, expected, tolerance)
    written = dict(tensor_arguments(op.parameters, arguments))
    faults = []
    for name, tensor in tensor_arguments(op.parameters, twin):
        if name.partition(".")[0] in op.mutates:
            comparisons.append(compare_tensors(name, tensor, written[name], tolerance(tensor.dtype)))
        elif not same_bits(tensor, before[name]):
            faults.append(f"changes its input {name}")
    faults = [*(f"{c.name}: {c.fault}" for c in comparisons if c.fault), *faults]
    return result(Status.FAILED if faults else Status.PASSED, "; ".join(faults), tuple(comparisons))
