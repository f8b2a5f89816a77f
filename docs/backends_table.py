"""Makes the table of each operator's backends by hardware, from the kernels' declarations. `hooks.py` inserts the table into a
page."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenspeed_kernel_base.operator import Operator, operators
from tokenspeed_kernel_base.platform import PlatformInfo, named_platform
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.spec import Priority

# The columns of the table, each with the device that it is computed for. No kernel is specialised for the A100, so it represents
# all other GPUs.
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
    """The backends whose best kernel for this platform has at least the priority of portable kernels, best first. If there is none,
    the backend of the best kernel.

    The probes of kernels are ignored, because probes look for software on the machine that builds the site.
    """
    best: dict[str, int] = {}
    for spec in KernelRegistry.get().get_for_operator(op.family, op.mode):
        if dataclasses.replace(spec.capability, probe=None).satisfied_by(platform):
            best[spec.solution] = max(spec.priority, best.get(spec.solution, 0))
    ranked = sorted(best, key=lambda solution: -best[solution])
    return [BACKENDS[name] for name in ranked if best[name] >= Priority.PORTABLE or name == ranked[0]]
