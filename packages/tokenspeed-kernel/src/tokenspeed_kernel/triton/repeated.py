"""Launches that repeat: the same launch with other tensors, as a model makes it in each of its layers and passes.

Triton examines every argument of a launch, because sizes and the alignment of addresses select the compiled program. This takes 10
to 16 us of host time, and a launcher takes as long again to compute the arguments. A prefill of few tokens then waits for the host.
`Repeated` remembers the last launches of a kernel. A launch that repeats one of them is made directly with that launch's program,
after one C++ comparison of the tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tokenspeed_kernel_base import memo
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.fast_path import tensor_guards
from tokenspeed_kernel_base.generated import compile_source

_triton_driver = DeviceModule("triton.runtime.driver")
_triton_knobs = DeviceModule("triton.knobs")

# Number of launches that an instance remembers. GPT-OSS launches a kernel in at most three ways per pass.
_REMEMBERED = 6
# The arguments of a compiled program's `run` are not a public interface of Triton. They were compared with Triton's own launches in
# the oldest and in the newest of these releases. With other releases, Triton makes all launches.
_KNOWN_RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")
# Triton compiles another program for addresses that are not multiples of this number of bytes. Such launches are not remembered.
_ALIGNMENT = 16
# On AMD, Triton compiles another program for tensors whose storage has more bytes than this.
_SMALL_STORAGE = (1 << 31) - 1
_KNOWN = "known"


class Launch(NamedTuple):
    """A launch without its tensors.

    Attributes:
        grid: the number of programs along each axis.
        scalars: the kernel's positional arguments after the tensors.
        options: the kernel's further arguments by name, and Triton's launch options.
    """

    grid: tuple[int, ...]
    scalars: tuple[Any, ...]
    options: dict[str, Any]


class _Known(NamedTuple):
    """A remembered launch.

    Attributes:
        key: the key of the call.
        matches: tests whether other tensors lead to the same launch.
        driver, device: Triton's driver, and the device's index, for which the program was compiled.
        program: the compiled program.
        grid: the number of programs along three axes.
        arguments: all arguments of the kernel after the tensors, in order.
    """

    key: Hashable
    matches: Callable[..., bool]
    driver: Any
    device: int
    program: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Repeated:
    """Launches one Triton kernel.

    Args:
        kernel: returns the kernel. It is called at launches that are not remembered, so that no import needs Triton.
    """

    def __init__(self, kernel: Callable[[], Any]) -> None:
        self._kernel = kernel
        self._memo = memo.new_memo()  # cleared whenever the platform or an override changes

    def __call__(self, tensors: tuple[Tensor | None, ...], key: Hashable, describe: Callable[[], Launch]) -> None:
        """Launches the kernel.

        Args:
            tensors: the kernel's first arguments: all its tensors. None for absent tensors.
            key: everything else that the launch depends on, apart from the platform. Equal keys must be of equal types.
            describe: returns the launch. It must be a function of ``key``, of the platform, and of the tensors' dtypes, shapes,
                strides and devices.
        """
        for known in self._memo.get(_KNOWN, ()):
            if known.key == key and known.matches(*tensors):
                if _launched(known, tensors):
                    return
                break
        started = memo.epoch()
        launch = describe()
        kernel = self._kernel()
        compiled = kernel[launch.grid](*tensors, *launch.scalars, **launch.options)
        known = _known(kernel, compiled, tensors, key, launch)
        if known is not None:
            others = (each for each in self._memo.get(_KNOWN, ()) if each.key != key or not each.matches(*tensors))
            memo.remember(self._memo, _KNOWN, (known, *others)[:_REMEMBERED], started)


def _launched(known: _Known, tensors: tuple[Tensor | None, ...]) -> bool:
    """Makes a remembered launch. Returns False, and launches nothing, if Triton's driver, the current device or a hook requires
    that Triton makes the launch."""
    driver, runtime = _triton_driver.driver.active, _triton_knobs.runtime
    if driver is not known.driver or _has_hooks(runtime.launch_enter_hook) or _has_hooks(runtime.launch_exit_hook):
        return False
    device = driver.get_current_device()
    if device != known.device:
        return False
    program = known.program
    stream = driver.get_current_stream(device)
    program.run(*known.grid, stream, program.function, program.packed_metadata, None, None, None, *tensors, *known.arguments)
    return True


def _release() -> str:
    """Returns the version of the imported Triton."""
    return str(importlib.import_module("triton").__version__)


def _has_hooks(hook: Any) -> bool:
    """Whether one of Triton's hooks is set. A hook is a function, or since Triton 3.5 a list of functions."""
    return hook is not None and bool(getattr(hook, "calls", True))


def _known(kernel: Any, compiled: Any, tensors: tuple[Tensor | None, ...], key: Hashable, launch: Launch) -> _Known | None:
    """Returns what is remembered of a launch that Triton has just made; None if the launch can't be repeated without Triton.

    Args:
        compiled: the result of the launch: the compiled program, or None from an interpreter.
    """
    make_guard, names = tensor_guards(), getattr(kernel, "arg_names", None)
    if not _release().startswith(_KNOWN_RELEASES):
        return None
    if make_guard is None or names is None or not hasattr(compiled, "packed_metadata") or kernel.pre_run_hooks:
        return None
    given = len(tensors) + len(launch.scalars)
    if not all(name in launch.options for name in names[given:]):
        return None
    if any(tensor is not None and tensor.data_ptr() % _ALIGNMENT for tensor in tensors):
        return None
    driver = _triton_driver.driver.active
    sized = compiled.metadata.target.backend == "hip"
    x, y, z, *_ = (*launch.grid, 1, 1)
    arguments = *launch.scalars, *(launch.options[name] for name in names[given:])
    return _Known(key, _matching(tensors, make_guard, sized), driver, driver.get_current_device(), compiled, (x, y, z), arguments)


def _matching(tensors: Sequence[Tensor | None], make_guard: Callable[..., Callable[..., bool]], sized: bool) -> Callable[..., bool]:
    """Returns a function of as many tensors: whether they are absent, equal to each other, and described like these tensors, and
    have aligned addresses.

    Args:
        sized: whether the storages must be small or large like those of these tensors.
    """
    first: dict[int, int] = {}
    terms, different = [], []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            terms.append(f"t{index} is None")
        elif id(tensor) in first:
            terms.append(f"t{index} is t{first[id(tensor)]}")
        else:
            first[id(tensor)] = index
            terms.append(f"t{index} is not None")
            different.append(index)
    terms.append(f"_guard({', '.join(f't{index}' for index in different)})")
    terms.append(f"not ({' | '.join(f't{index}.data_ptr()' for index in different)}) & {_ALIGNMENT - 1}")
    for index in different if sized else ():
        small = tensors[index].untyped_storage().nbytes() <= _SMALL_STORAGE  # type: ignore[union-attr]
        terms.append(f"(t{index}.untyped_storage().nbytes() <= {_SMALL_STORAGE}) is {small}")
    source = f"def matches({', '.join(f't{index}' for index in range(len(tensors)))}):\n    return {' and '.join(terms)}\n"
    return compile_source("matches", source, {"_guard": make_guard(*(tensors[index] for index in different))}, "repeated launch")
