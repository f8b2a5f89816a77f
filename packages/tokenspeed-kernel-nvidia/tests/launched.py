"""Helpers for tests of launchers. They compare kernels with a reference, run kernels on the emulator, or record launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_base.launchers import unchecked
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_nvidia import _programs

# A compiled program, its configuration and its launch arguments.
Launched = tuple[Any, Any, tuple[Any, ...]]


def as_operator(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a launcher with the signature of the operator that has the launcher's name."""
    return unchecked(get_operator(launcher.__name__).function, launcher)


def check(kernel: Callable[..., Any], operator: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Launches a kernel twice, and compares the results with the operator's reference."""
    wanted, wanted_lse = operator(**arguments, solution="reference")
    out = torch.full_like(wanted, torch.nan)
    got, lse = kernel(**{**arguments, "out": out})
    assert got is out
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    again, _ = kernel(**arguments)
    assert torch.equal(again, got)


def check_fp8(kernel: Callable[..., Any], operator: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Launches a kernel that rounds probabilities to e4m3, and compares the results with the reference. The rounding gives each
    probability an rms error of 2.6%."""
    wanted, wanted_lse = operator(**arguments, solution="reference")
    got, lse = kernel(**arguments)
    assert got.dtype == wanted.dtype
    assert not got.isnan().any()
    assert (got.float() - wanted.float()).norm() <= 0.04 * wanted.float().norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=0.01, atol=0.05)
    again, _ = kernel(**arguments)
    assert torch.equal(again, got)


@contextlib.contextmanager
def emulated(cached: Any, sm_count: int, **options: Any) -> Iterator[None]:
    """Context manager in which compiled programs run on the emulator.

    Args:
        cached: the launcher's function, cached by `functools`, that finds programs for a device.
        sm_count: the SM count of the emulated device.
        **options: options of `sm90_emulator.emulated_sm90`. By default, loads of uninitialised shared memory are errors.
    """
    sm90_emulator = pytest.importorskip("sm90_emulator")
    pytest.importorskip("cutlass")
    if torch.cuda.is_available():  # other tests of this process may launch programs on a GPU
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    strict = {"uninitialised": True, **options}
    with fresh(cached), sm90_emulator.emulated_sm90(multiprocessors=sm_count, **strict):
        yield


@contextlib.contextmanager
def fresh(cached: Any) -> Iterator[None]:
    """Context manager that clears the cache of ``cached``, a launcher's function, before and after the block."""
    cached.cache_clear()
    yield
    cached.cache_clear()


def recorded(launcher: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """Records the launches of a launcher's module instead of running them, as on a device with 132 SMs. Yields the list of
    launches."""
    found: list[Launched] = []

    def record(program: Any, config: Any) -> Any:
        def launch(*arguments: Any) -> None:
            for tensor in (given for given in arguments if isinstance(given, Tensor) and given.is_floating_point()):
                if tensor.data_ptr() % 16 or tensor.stride(-1) != 1:
                    raise ValueError("refused")
            found.append((program, config, arguments))

        return launch

    launcher._programs_of.cache_clear()
    monkeypatch.setattr(_programs.Program, "__call__", record)
    monkeypatch.setattr(launcher, "sm_count_of", lambda device: 132)
    monkeypatch.setattr(launcher, "keeper", SimpleNamespace(get=lambda *_: SimpleNamespace(memory_at=0)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    yield found
    launcher._programs_of.cache_clear()
