"""Counts the compilations of kernels' programs. A policy allows, logs or forbids them.

If a program is neither in a pack nor in a cache, the call that needs the program compiles it, and takes seconds. The compile policy
decides about such a call: ``"allow"`` compiles, ``"warn"`` compiles and logs one line, ``"forbid"`` raises
`CompilationForbiddenError` before the compiler starts.

The policy applies to programs in Triton and Gluon, and to programs that vendors' wheels compile. Kernels in PyTorch compile
nothing. The policy does not see libraries that compile their own kernels by other means, such as nvcc.
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
    """A call needs a program that is not compiled yet, and the compile policy is ``"forbid"``. Nothing was launched.

    Attributes:
        missing: the program, and the call that needs it. The error's text is this and the advice.
    """

    def __init__(self, missing: str, advice: str = "") -> None:
        super().__init__(missing, advice)
        self.missing, self._advice = missing, advice

    def __str__(self) -> str:
        return self.missing + self._advice


@dataclass(frozen=True)
class Compilation:
    """One program that this process compiled.

    Attributes:
        program: the program's name, with its configuration if the compiler has configurations.
        compiler: ``"Triton"`` or another compiler's name.
        operator: the operator whose kernel needed the program, ``"family.mode"``; empty outside a kernel's call.
        kernel: the kernel that needed the program. If several kernels have the same launcher, the first kernel's name and the
            number of the others. Empty outside a kernel's call.
        call: shapes, dtypes and options of the kernel's call; empty outside a kernel's call.
        seconds: duration of the compilation in seconds.
        key: the program's key in the compiler's cache, if its name and configuration alone do not identify it.
    """

    program: str
    compiler: str
    operator: str
    kernel: str
    call: str
    seconds: float
    key: str = ""

    def __str__(self) -> str:
        return f"{self.compiler} compiled {self.program}{_during(self.operator, self.kernel, self.call)} in {self.seconds:.1f} s"


def compilations(since: int = 0) -> list[Compilation]:
    """Returns the programs that this process has compiled, in any thread, oldest first. Loading a compiled program does not count.

    Args:
        since: number of compilations to omit, oldest first. To get only the compilations after some moment, store
            ``len(compilations())`` at that moment and pass it later.
    """
    with _lock:
        return _events[since:]


@contextlib.contextmanager
def compile_policy(policy: str) -> Iterator[None]:
    """Sets the compile policy inside the block, for this thread or task, and for tasks that the block creates. Other threads keep
    their policy.

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
        policy: ``"allow"``, ``"warn"`` or ``"forbid"``; None to use the setting ``TOKENSPEED_KERNEL_COMPILE_POLICY``.

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
    """Returns the compile policy of this thread or task."""
    return _block_policy.get() or _process_policy or config.settings().compile_policy


class Started:
    """A compilation in progress, returned by `start`."""

    def __init__(self, program: str, compiler: str, caller: Caller, key: str) -> None:
        self._program, self._compiler, self._caller, self._key = program, compiler, caller, key
        self._begun = time.perf_counter()

    def finish(self) -> None:
        """Records the compilation, and logs it if the policy is ``"warn"``. Callers do not call this method if the compilation
        fails."""
        event = Compilation(self._program, self._compiler, *self._caller, time.perf_counter() - self._begun, self._key)
        with _lock:
            _events.append(event)
        if current_compile_policy() == "warn":
            logger.warning("%s", event)


def start(program: str, compiler: str, key: str = "") -> Started:
    """Announces a compilation. Code that compiles a program calls this function first, and `Started.finish` after the compilation.

    Args:
        program: the program's name in messages.
        compiler: the compiler's name.
        key: see `Compilation`.

    Raises:
        CompilationForbiddenError: the policy is ``"forbid"``.
    """
    return Started(program, compiler, refuse_if_forbidden(program), key)


def refuse_if_forbidden(program: str) -> Caller:
    """Raises an error if the policy forbids the compilation of a program. Otherwise returns the kernel's call that needs the
    program.

    `start` calls this function.

    Raises:
        CompilationForbiddenError: the policy is ``"forbid"``.
    """
    caller = calling_kernel() or Caller("", "", "")
    if current_compile_policy() == "forbid":
        raise CompilationForbiddenError(
            f"{program} is not compiled yet{_during(*caller)}",
            ", and the compile policy is forbid. Build a pack that has this call (tokenspeed-kernel pack build), run the call "
            "before the policy is set, or set the policy to warn or allow",
        )
    return caller


def _during(operator: str, kernel: str, call: str) -> str:
    return f" for {operator} ({kernel}), call {call}" if operator else ""


# -- the call that needs a program -----------------------------------------------------------------------------------------------


class Caller(NamedTuple):
    """A kernel's call in progress: the operator, the kernel and a description of the arguments."""

    operator: str
    kernel: str
    call: str


def calling_kernel() -> Caller | None:
    """Returns the innermost kernel call of this thread; None if no kernel's call is running.

    The function searches the stack for the frame of a registered launcher. The search is slow, but a compilation takes seconds.
    Launchers record nothing, so launches have no extra cost.
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
    """Whether a library was called by a package that has kernels, or during a kernel's call.

    Args:
        inside: the library's name. The library's own stack frames are skipped.
    """
    packages = {spec.package for spec, _ in KernelRegistry.get().launchers()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package_of(frame) in (inside, _package_of(sys._getframe())):
        frame = frame.f_back
    return (frame is not None and _package_of(frame) in packages) or calling_kernel() is not None


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _launchers() -> dict[CodeType, list[KernelSpec]]:
    """Returns the code object of every imported launcher, with the kernels of the launcher. Several kernels may share a
    launcher.
    """
    found: dict[CodeType, list[KernelSpec]] = {}
    for spec, impl in KernelRegistry.get().launchers():
        code = getattr(inspect.unwrap(getattr(impl, "func", impl)), "__code__", None)
        if code is not None:
            found.setdefault(code, []).append(spec)
    return found


def _described(frame: FrameType) -> str:
    """Describes the arguments in a launcher's frame: ``"x bfloat16[4, 2880], eps 1e-05"``. Shows tensors, numbers, flags and texts,
    and omits all other arguments."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    told = ((name, _short(frame.f_locals.get(name))) for name in names)
    return ", ".join(f"{name} {text}" for name, text in told if text)


def _short(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str)) else ""
