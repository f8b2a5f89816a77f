"""Occupancy: how many workgroups of a kernel fit on a CU, and which resource limits them.

The rules are LLVM's (llvm/lib/Target/AMDGPU/Utils/AMDGPUBaseInfo.cpp and GCNSubtarget.cpp) . `gfx950_emulator.hardware` has
the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from gfx950_emulator.assembly import Assembly
from gfx950_emulator.hardware import (
    BARRIERS,
    SGPR_GRANULE,
    SGPRS_PER_SIMD,
    SIMDS,
    VGPR_GRANULE,
    VGPRS_PER_LANE,
    WAVES_PER_SIMD,
)


@dataclass(frozen=True)
class Occupancy:
    """The occupancy of one CU.

    Attributes:
        workgroups: number of workgroups per CU; 0 if not even one fits.
        waves_per_simd: average number of waves per SIMD, fractional if the number of waves is not a multiple of 4.
        limits: the number of workgroups that each resource alone would allow: ``"waves"``, ``"VGPRs"``, ``"SGPRs"``, ``"LDS"``,
            ``"barriers"``.
        limiter: the resource that allows the fewest workgroups.
        vgprs, agprs, sgprs: number of registers that the code uses; vgprs excludes accumulation registers.
        allocated_vgprs: number of registers per lane that the hardware allocates, VGPRs and AGPRs together.
        allocated_lds: number of LDS bytes per workgroup that the hardware allocates.
    """

    workgroups: int
    waves_per_simd: float
    limits: dict[str, int]
    limiter: str
    vgprs: int
    agprs: int
    sgprs: int
    allocated_vgprs: int
    allocated_lds: int


def _up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def occupancy(assembly: Assembly, waves: int, lds: int) -> Occupancy:
    """Computes how many workgroups run on a CU at once.

    Args:
        assembly: the kernel.
        waves: number of waves per workgroup.
        lds: bytes of LDS per workgroup.
    """
    # Accumulation registers begin at the accum offset, a multiple of 4. Registers between the last VGPR and this offset are unused.
    total = assembly.descriptor.get("next_free_vgpr", 0)
    allocated = max(_up(total, VGPR_GRANULE), VGPR_GRANULE)
    # VCC, FLAT_SCRATCH and XNACK_MASK occupy up to 6 SGPRs more than the code names.
    sgprs = assembly.metadata.get("sgpr_count", assembly.descriptor.get("next_free_sgpr", 0) + 6)
    per_simd = {
        "waves": WAVES_PER_SIMD,
        "VGPRs": VGPRS_PER_LANE // allocated,
        "SGPRs": SGPRS_PER_SIMD // max(_up(sgprs, SGPR_GRANULE), SGPR_GRANULE),
    }
    # The waves of a workgroup are distributed over the SIMDs as evenly as possible.
    limits = {name: SIMDS * count // waves for name, count in per_simd.items()}
    device = assembly.architecture.device
    limits["LDS"] = device.lds_bytes // _up(lds, device.lds_granule) if lds else limits["waves"]
    limits["barriers"] = BARRIERS if waves > 1 else limits["waves"]
    limiter = min(limits, key=lambda name: limits[name])
    workgroups = limits[limiter]
    return Occupancy(
        workgroups,
        workgroups * waves / SIMDS,
        limits,
        limiter,
        assembly.vgprs,
        assembly.agprs,
        sgprs,
        allocated,
        _up(lds, device.lds_granule),
    )
