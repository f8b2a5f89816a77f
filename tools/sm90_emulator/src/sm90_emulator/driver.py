"""The ``with`` block in which kernels for sm_90 run on the emulator."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from kernel_emulation.emulator import Bounds, Edit, platform
from sm90_emulator import addresses, cutedsl
from sm90_emulator.emulator import BLOCK, Emulator
from sm90_emulator.machine import PATIENCE, Settings

DEVICE_NAME = "NVIDIA H200"
_MEMORY = 141 * 10**9


@contextlib.contextmanager
def emulated_sm90(
    *,
    seed: int = 0,
    copies: str | None = None,
    uninitialised: bool = False,
    limited_fp8_accumulation: bool = False,
    resident: int = 132,
    together: int | None = None,
    multiprocessors: int = 132,
    patience: int = PATIENCE,
    sanitize: bool = True,
    counters: bool = False,
    bounds: Bounds = "storage",
    edit: Edit | None = None,
    triton: bool = False,
) -> Iterator[Emulator]:
    """Inside the block, CuteDSL programs for sm_90a, and optionally Triton kernels, are executed on CPU tensors.

    If tokenspeed-kernel-base is installed, its platform is an emulated H200. Operators then select and run the same kernels as on
    an H200.

    Args:
        seed: 0 runs warps in order. Any other seed schedules warps randomly, for a random number of instructions.
        copies: when asynchronous copies and wgmma are performed: ``"early"``, at issue; ``"late"``, as late as permitted; or
            ``"random"``. None means "early" with seed 0, and "random" with other seeds.
        uninitialised: whether loads of shared memory that was never written are errors. If not, such loads return all ones, which
            is NaN in all float types. Tensor-core loads always return NaN instead of an error, because kernels load more than they
            use.
        limited_fp8_accumulation: whether FP8 wgmma accumulates as Hopper's tensor cores do: products are aligned to the largest
            exponent and keep 13 fraction bits.
        resident: the largest number of CTAs that are resident together. Another CTA starts when no running CTA can proceed.
        together: number of CTAs that start together; None means 1 with seed 0, otherwise 4.
        multiprocessors: the number of SMs that the device reports.
        patience: after this many instructions without a visible change, a launch is said to hang. Choose more if a launch waits for
            another process that emulates another GPU: both may access the same shared memory of the host, and atomics work.
        sanitize: whether an access of a PDL launch, before its `griddepcontrol.wait`, to memory that the preceding kernel wrote is
            an error. Other errors are found regardless of this setting.
        counters: whether to count how often each instruction is executed, for `LaunchReport.counts`.
        bounds: which bytes of a tensor a kernel may access: ``"view"``, from its first to its last element, or ``"storage"``, all
            of the underlying memory, as on a GPU.
        edit: ``edit(kernel_name, text)`` returns the PTX to execute instead.
        triton: whether Triton compiles for the emulator too. Triton must be installed.

    Raises:
        RuntimeError: this block is inside another such block; or this process uses a GPU. CuteDSL programs that are loaded later
            would then use the emulator instead of CuteDSL's runtime.
        ValueError: ``copies`` or ``bounds`` is invalid.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("emulated_sm90() in a process that uses a GPU: its programs would find the emulator's runtime")
    when = copies or ("random" if seed else "early")
    if when not in ("early", "late", "random"):
        raise ValueError(f'copies must be "early", "late" or "random", got {copies!r}')
    first = together if together is not None else 4 if seed else 1
    settings = Settings(
        seed, when, uninitialised, limited_fp8_accumulation, resident, first, multiprocessors, patience=patience,
    )  # fmt: skip
    running = Emulator(sanitize=sanitize, counters=counters, bounds=bounds, edit=edit, machine=settings)
    features = frozenset({"triton"} if triton else ())
    with contextlib.ExitStack() as stack:
        stack.enter_context(BLOCK.entered(running))
        cutedsl.replace_runtime(multiprocessors)
        stack.enter_context(_device(multiprocessors))
        stack.enter_context(addresses.recorded())
        stack.enter_context(platform("nvidia", (9, 0), DEVICE_NAME, "sm_90", _MEMORY, multiprocessors, features))
        if importlib.util.find_spec("tokenspeed_kernel_nvidia") is not None:
            from sm90_emulator.programs import EMULATOR
            from tokenspeed_kernel_nvidia.program_backend import use_backend

            stack.enter_context(use_backend(EMULATOR))
        if triton:
            from sm90_emulator import triton_driver

            stack.enter_context(triton_driver.installed(multiprocessors))
        yield running


@contextlib.contextmanager
def _device(multiprocessors: int) -> Iterator[None]:
    """Inside the block, PyTorch reports the properties of an H200."""

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=DEVICE_NAME, major=9, minor=0, multi_processor_count=multiprocessors, total_memory=_MEMORY, uuid="emulated"
        )

    def capability(device: Any = None) -> tuple[int, int]:
        return 9, 0

    def stream(device: int) -> int:
        return 0

    queries = mock.patch.multiple(torch.cuda, get_device_properties=properties, get_device_capability=capability)
    with queries, mock.patch.object(torch._C, "_cuda_getCurrentRawStream", stream, create=True):
        yield
