"""The backends of each operator by hardware, from the kernels' declarations. `hooks.py` inserts the table into a page."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenspeed_kernel_base.operator import Operator, operators
from tokenspeed_kernel_base.platform import PlatformInfo, named_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import Priority

# Each column is computed for one device. No kernel is specialised for an A100, so the A100 represents all other GPUs.
HARDWARE = {
    "NVIDIA Hopper<br>H100, H200": "h100",
    "NVIDIA Blackwell<br>B200, B300": "b200",
    "AMD CDNA4<br>MI350X, MI355X": "mi355x",
    "other GPUs": "a100",
    "CPU": "cpu",
}
BACKENDS = {
    "cutedsl": "CuteDSL",
    "gluon": "Gluon",
    "flashinfer": "FlashInfer",
    "aiter": "AITER",
    "triton": "Triton",
    "torch": "PyTorch",
    "composed": "composed",
    "reference": "reference",
}


def backends_table() -> str:
    """The Markdown table: one row per operator, one column per kind of hardware, with backends in the order in which selection
    prefers them.
    """
    platforms = [_platform(name) for name in HARDWARE.values()]
    rows = [f"| operator | {' | '.join(HARDWARE)} |", "|---|" + "---|" * len(HARDWARE)]
    for op in operators():
        cells = (", ".join(_backends(op, platform)) for platform in platforms)
        rows.append(f"| [`{op.mode}`][{op.body.__module__}.{op.mode}] | {' | '.join(cells)} |")
    return "\n".join(rows)


def _platform(name: str) -> PlatformInfo:
    """The platform of a named device. A GPU has Triton, even if the machine that builds the site lacks it; a CPU has no Triton."""
    platform = named_platform(name)
    return platform if platform.is_cpu else dataclasses.replace(platform, features=platform.features | {"triton"})


def _backends(op: Operator[Any, Any], platform: PlatformInfo) -> list[str]:
    """The backends of an operator that have a kernel for this platform with at least the priority of the portable kernels. If no
    backend has such a kernel, the result is the backend of the best kernel.

    Kernels' probes are ignored, because they look for software on this machine.
    """
    best: dict[str, int] = {}
    for spec in KernelRegistry.get().get_for_operator(op.family, op.mode):
        if dataclasses.replace(spec.capability, probe=None).satisfied_by(platform):
            best[spec.solution] = max(spec.priority, best.get(spec.solution, 0))
    ranked = sorted(best, key=lambda solution: -best[solution])
    return [BACKENDS[name] for name in ranked if best[name] >= Priority.PORTABLE or name == ranked[0]]
