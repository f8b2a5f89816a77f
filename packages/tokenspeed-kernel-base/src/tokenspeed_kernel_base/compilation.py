"""Compilations of kernels' programs: counted, and allowed, logged or forbidden by a policy.

A program that is neither in a pack nor in a cache is compiled by the call that needs it, which then takes seconds. The compile
policy decides about such a call: ``"allow"`` compiles, ``"warn"`` compiles and logs one line, ``"forbid"`` raises
`CompilationForbiddenError` before the compiler starts.

Programs of Triton, Gluon and vendors' wheels are covered. Kernels in PyTorch compile nothing. Libraries that compile their own
kernels by other means, such as nvcc, are not covered.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from tokenspeed_kernel_base import config
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.signature import dtype_name
from tokenspeed_kernel_base.spec import KernelSpec

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_events: list[Compilation] = []
_process_policy: str | None = None
_block_policy: contextvars.ContextVar[str | None] = contextvars.ContextVar("compile_policy", default=None)


class CompilationForbiddenError(RuntimeError):
    """A call needs a program that is not compiled yet, and the compile policy is ``"forbid"``. Nothing was launched."""


@dataclass(frozen=True)
class Compilation:
    """One program that this process compiled.

    Attributes:
        program: the program, with its configuration where the compiler has one.
        compiler: ``"Triton"`` or another compiler's name.
        operator: the operator whose kernel needed it, ``"family.mode"``; empty outside of a kernel's call.
        kernel: that kernel; of several kernels with one launcher, the first and the number of others; empty likewise.
        call: shapes, dtypes and options of the call; empty likewise.
        seconds: duration of the compilation.
    """

    program: str
    compiler: str
    operator: str
    kernel: str
    call: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.compiler} compiled {self.program}{_during(self.operator, self.kernel, self.call)} in {self.seconds:.1f} s"


def compilations(since: int = 0) -> list[Compilation]:
    """The programs that this process has compiled, in any thread, oldest first. Loading a compiled program is no compilation.

    Args:
        since: leave out this many. ``len(compilations())`` is the value for "from now on".
    """
    with _lock:
        return _events[since:]


@contextlib.contextmanager
def compile_policy(policy: str) -> Iterator[None]:
    """Sets the compile policy inside the block: in this thread or task only, and in tasks created there until the block ends.

    Args:
        policy: ``"allow"``, ``"warn"`` or ``"forbid"``.

    Raises:
        ValueError: there is no such policy.
    """
    token = _block_policy.set(_checked(policy))
    try:
        yield
    finally:
        _block_policy.reset(token)


def set_compile_policy(policy: str | None) -> None:
    """Sets the compile policy of this process, for all threads. A `compile_policy` block takes precedence.

    Args:
        policy: ``"allow"``, ``"warn"`` or ``"forbid"``; None for the setting ``TOKENSPEED_KERNEL_COMPILE_POLICY``.

    Raises:
        ValueError: there is no such policy.
    """
    global _process_policy
    _process_policy = None if policy is None else _checked(policy)


def _checked(policy: str) -> str:
    if policy not in config.COMPILE_POLICIES:
        raise ValueError(f"policy must be one of {', '.join(config.COMPILE_POLICIES)}, got {policy!r}")
    return policy


def current_compile_policy() -> str:
    """The compile policy for this thread or task."""
    return _block_policy.get() or _process_policy or config.settings().compile_policy


class Started:
    """A compilation in progress, made by `start`."""

    def __init__(self, program: str, compiler: str, caller: Caller) -> None:
        self._program, self._compiler, self._caller = program, compiler, caller
        self._begun = time.perf_counter()

    def finish(self) -> None:
        """Counts the compilation, and logs it if the policy is ``"warn"``. A compilation that fails is not finished."""
        event = Compilation(self._program, self._compiler, *self._caller, time.perf_counter() - self._begun)
        with _lock:
            _events.append(event)
        if current_compile_policy() == "warn":
            logger.warning("%s", event)


def start(program: str, compiler: str) -> Started:
    """Announces a compilation. A compiler's front end calls this before it compiles, and `Started.finish` after.

    Args:
        program: the program, for messages.
        compiler: the compiler's name.

    Raises:
        CompilationForbiddenError: the policy is ``"forbid"``.
    """
    return Started(program, compiler, refuse_if_forbidden(program))


def refuse_if_forbidden(program: str) -> Caller:
    """The kernel's call that needs a program which is not compiled yet. `start` includes this.

    Raises:
        CompilationForbiddenError: the policy is ``"forbid"``.
    """
    caller = calling_kernel() or Caller("", "", "")
    if current_compile_policy() == "forbid":
        raise CompilationForbiddenError(
            f"{program} is not compiled yet{_during(*caller)}, and the compile policy is forbid. Build a pack that has this call "
            "(tokenspeed-kernel pack build), run the call before the policy is set, or set the policy to warn or allow"
        )
    return caller


def _during(operator: str, kernel: str, call: str) -> str:
    return f" for {operator} ({kernel}), call {call}" if operator else ""


# -- the call that needs a program -----------------------------------------------------------------------------------------------


class Caller(NamedTuple):
    """The call of a kernel that is running: operator, kernel and a description of the arguments."""

    operator: str
    kernel: str
    call: str


def calling_kernel() -> Caller | None:
    """The innermost kernel call of this thread; None outside of any.

    Launchers do not announce themselves, so that launches cost nothing. Compiling takes seconds, so this searches the stack for a
    registered launcher instead.
    """
    launchers = _launchers()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        specs = launchers.get(frame.f_code)
        if specs is not None:
            others = f" or {len(specs) - 1} with the same launcher" if len(specs) > 1 else ""
            return Caller(specs[0].operator, specs[0].name + others, _described(frame))
        frame = frame.f_back
    return None


def called_by_kernels(inside: str) -> bool:
    """Whether the code that called into a library belongs to a package with kernels, or runs inside a kernel's call.

    Args:
        inside: the library, whose own frames are skipped.
    """
    packages = {spec.package for spec, _ in KernelRegistry.get().launchers()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package_of(frame) in (inside, _package_of(sys._getframe())):
        frame = frame.f_back
    return (frame is not None and _package_of(frame) in packages) or calling_kernel() is not None


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _launchers() -> dict[CodeType, list[KernelSpec]]:
    """Every imported launcher's code, and its kernels: a launcher may be that of several."""
    found: dict[CodeType, list[KernelSpec]] = {}
    for spec, impl in KernelRegistry.get().launchers():
        code = getattr(inspect.unwrap(getattr(impl, "func", impl)), "__code__", None)
        if code is not None:
            found.setdefault(code, []).append(spec)
    return found


def _described(frame: FrameType) -> str:
    """The arguments of a launcher's frame that have a short description: ``"x bf16[4, 2880], eps 1e-05"``."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    told = ((name, _short(frame.f_locals.get(name))) for name in names)
    return ", ".join(f"{name} {text}" for name, text in told if text)


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else ""
