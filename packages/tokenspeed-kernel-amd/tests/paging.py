"""Helpers for the tests of paged-cache kernels: inputs, the fp32 reference, and the comparisons."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.verify import refusal
from tokenspeed_kernel_amd.gluon.call import CACHES
from tokenspeed_kernel_base.alignment import CacheCopyWarning, _warn_of_copies
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.attention._inputs import paged
from tokenspeed_kernel_base.platform import current_platform
from tokenspeed_kernel_base.registry import KernelRegistry, register_package
from tokenspeed_kernel_base.spec import KernelSpec

ERROR = 5e-3  # limit of the relative error of the whole output
LSE_ERROR = 1e-3


def inputs(device: torch.device, kv_lens: list[int], q_lens: list[int] | None = None, **options: Any) -> dict[str, Any]:
    """Returns the arguments of an operator, with NaN in cache slots without a token."""
    shape = {"heads": 8, "kv_heads": 2, **options}
    return paged(kv_lens, q_lens, stale=True, **shape)(Draw(device, sum(kv_lens)))


def reference(operator: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the output and LSE of the operator's body, computed in fp32."""
    wide = {name: arguments[name].float() for name in ("q", "k_cache", "v_cache")}
    return operator(**{**arguments, **wide, "return_lse": True}, solution="reference")


def check(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], error: float = ERROR) -> None:
    """Compares the whole output, each of its rows, and the LSE, with the tolerances above."""
    (out, lse), (wanted_out, wanted_lse) = got, wanted
    assert (out.float() - wanted_out).norm() <= error * wanted_out.norm()
    rows = (out.float() - wanted_out).norm(dim=-1) - 4 * error * wanted_out.norm(dim=-1)
    assert rows.max() <= 1e-6
    seen = torch.isfinite(wanted_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert (lse[seen] - wanted_lse[seen]).abs().max() <= LSE_ERROR


@contextlib.contextmanager
def nothing_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if the host reads a tensor's value."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a value of a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "__int__", "__bool__", "__index__"):
            patch.setattr(Tensor, name, refuse)
        yield


def pretend_compute_units(monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """Makes launchers divide work as for a device with this many CUs. With few CUs, small inputs are enough work for the whole
    device, like a large batch."""
    from tokenspeed_kernel_amd.gfx950.attention import extend, mixed, mla_decode, mla_extend
    from tokenspeed_kernel_amd.gluon import decode

    for module in (decode, extend, mixed, mla_decode, mla_extend):
        monkeypatch.setattr(module, "current_compute_units", lambda: units)


def check_other_strides(function: Any, operator: Any, arguments: dict[str, Any]) -> None:
    """Calls an operator with other strides. Keys and values are slices of one cache, q and out are slices of wider tensors, and
    page table and sinks are not contiguous. In a second call, out has another axis innermost in memory."""
    heads = arguments["q"].shape[1]
    arguments["sinks"] = torch.linspace(-2, 2, 2 * heads, device=arguments["q"].device)[::2]
    wanted = reference(operator, arguments)
    tokens, heads, head_dim = arguments["q"].shape
    both = torch.cat([arguments["k_cache"], arguments["v_cache"]], 2)
    arguments["k_cache"], arguments["v_cache"] = both.split(arguments["k_cache"].shape[2], 2)
    arguments["q"] = torch.cat([arguments["q"], arguments["q"]], 1)[:, heads:]
    arguments["page_table"] = arguments["page_table"].T.contiguous().T
    wide = torch.full((tokens, heads + 2, head_dim), 7.0, dtype=arguments["q"].dtype, device=arguments["q"].device)
    out = wide[:, 1:-1]
    got = function(**arguments, return_lse=True, out=out)
    assert got[0] is out
    check(got, wanted)
    assert (wide[:, [0, -1]] == 7).all()
    turned = torch.empty_like(out).mT.contiguous().mT
    got = function(**arguments, return_lse=True, out=turned)
    assert got[0] is turned
    check(got, wanted)


def check_padded_slots(function: Any, operator: Any, arguments: dict[str, Any]) -> None:
    """Asserts that a cache is not copied if its slot stride is a multiple of 8 elements, but not of 16. To get this stride, rows of
    one KV head are padded by 8 elements."""
    for name in CACHES:
        arguments[name] = torch.nn.functional.pad(arguments[name][:, :, :1], (0, 8))[..., :-8]
        assert arguments[name].stride(1) % 16 == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheCopyWarning)
        got = function(**arguments, return_lse=True)
    check(got, reference(operator, arguments))


def check_copied_cache(function: Any, operator: Any, arguments: dict[str, Any]) -> None:
    """If a cache's address is not a multiple of 16 bytes, the cache is copied. A warning reports the copy once; `explain` reports
    it each time."""
    k_cache = arguments["k_cache"]
    assert not function.explain(**arguments).cards
    room = torch.empty(k_cache.numel() + 1, dtype=k_cache.dtype, device=k_cache.device)
    arguments["k_cache"] = room[1:].view(k_cache.shape).copy_(k_cache)
    _warn_of_copies.cache_clear()
    with pytest.warns(CacheCopyWarning, match="k_cache is copied whole at every call"):
        got = function(**arguments, return_lse=True)
    check(got, reference(operator, arguments))
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheCopyWarning)
        function(**arguments, return_lse=True)
    said = function.explain(**arguments).cards
    assert said.keys() == {"k_cache"}
    assert f"copied whole at every call, {2 * k_cache.numel()} bytes" in said["k_cache"]


def cases(mode: str) -> list[Any]:
    """Returns the cases of an operator as parameters of a test. Cases that are sized for a GPU have the GPU marker."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow, *([pytest.mark.amd] if case.large else [])])
        for case in get_operator(f"attention.{mode}").all_cases()
    ]


def kernel_of(mode: str, arch: str = "gfx950") -> KernelSpec:
    """Returns the kernel of an operator for an architecture, as its launcher declares it."""
    register_package("tokenspeed_kernel_amd")
    return KernelRegistry.get().get_by_name(f"gluon_{mode}" if arch == "gfx950" else f"gluon_{mode}_{arch}")


def check_case(device: torch.device, mode: str, case: Case) -> None:
    """Runs a case through the operator, on the kernel as its launcher declares it, and checks the result like `verify`."""
    if case.large and device.type == "cpu":
        pytest.skip("is sized for a GPU")
    kernel = kernel_of(mode, current_platform().arch)
    op = get_operator(kernel.operator)
    refused = refusal(op, kernel, op.complete(case.build(device)))
    if refused is not None:
        pytest.skip(f"the kernel does not declare it: {refused}")
    result = verify_case(kernel, case, device)
    assert result.status is Status.PASSED, f"{result.reason}\n{result.traceback}"
    assert result.comparisons


def check_compiled(launch: Any, waves: int, most: int, scalar_spills: int = 0) -> None:
    """Checks that nothing is spilled, that enough waves fit on a SIMD, that there is no bank conflict and no loop around a buffer
    instruction, and that the hot loop has few instructions.

    Args:
        launch: the emulator's record of a launch, with counters.
        most: the largest allowed number of instructions in the loop per 16 MFMAs.
        scalar_spills: the largest allowed number of SGPRs that are spilled to VGPRs.
    """
    from gfx950_emulator.occupancy import occupancy

    text = launch.program.assembly.text
    spilled = spills(text)
    assert spilled.pop("sgpr_spill_count") <= scalar_spills
    assert spilled == {"vgpr_spill_count": 0, "private_segment_fixed_size": 0}
    assert occupancy(launch.program.assembly, launch.waves, launch.lds).waves_per_simd >= waves
    assert launch.counters.total("lds_conflicts") == 0
    assert "s_cbranch_execnz" not in text
    body = longest_loop_without_loops(text)
    assert 16 * len(body) <= most * sum(name.startswith("v_mfma") for name in body)


def spills(text: str) -> dict[str, int]:
    """Returns the number of registers that the compiler spilled, and the bytes of scratch, from a kernel's metadata."""
    found = re.findall(r"\.(sgpr_spill_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", text)
    return {name: int(count) for name, count in found}


def longest_loop_without_loops(text: str) -> list[str]:
    """Returns the mnemonics of the innermost loop with the most MFMAs. If there are several such loops, returns the shortest."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in map(str.strip, text.splitlines()):
        label = re.match(r"(\.L\w+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif re.match(r"[a-z]\w*(\s|$)", line):
            instructions.append(line)
            branch = re.match(r"s_c?branch\w*\s+(\.L\w+)", line)
            if branch and branch[1] in labels:
                loops.append((labels[branch[1]], len(instructions)))
    innermost = [
        loop for loop in loops if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    ]
    bodies = [[line.split()[0] for line in instructions[first:last]] for first, last in innermost]
    return max(bodies, key=lambda body: (sum(name.startswith("v_mfma") for name in body), -len(body)))
