"""Parameters of MI355X (gfx950, CDNA4) and MI300X (gfx942, CDNA3) for bank conflicts, occupancy and the timing model. Each
parameter has its public source. `Device` has what differs between the two; the other parameters hold for both.

Abbreviations of the sources:

- CDNA4: "AMD CDNA 4 Architecture" white paper (amd.com, amd-cdna-4-architecture-whitepaper.pdf).
- CDNA3: "AMD CDNA 3 Architecture" white paper (amd.com, amd-cdna-3-white-paper.pdf).
- ROCPROF: ROCm Compute Profiler documentation, "Pipeline descriptions" and "Vector L1 cache" (rocm.docs.amd.com/projects/
  rocprofiler-compute). Written for CDNA 1 to 4. Figures for 32-bank LDS are marked as such.
- SPECS: "GPU hardware specifications" (rocm.docs.amd.com/en/latest/reference/gpu-specs.html).
- MT4G: measured by pointer chasing and streaming, on a gfx950 card (MI350P, 2.2 GHz) and on an MI300X; github.com/caps-tum/mt4g,
  sample_results/AMD_Instinct_MI350P.json and "AMD Instinct MI300X VF.json".
- HK: measured on gfx950 with the bank conflict counter; github.com/HazyResearch/HipKittens, analysis/paper_experiments/phases,
  and the paper, arXiv:2511.08083.
- TRITON: github.com/triton-lang/triton, pull requests 9662 and 11365 (by AMD).
- CK: Composable Kernel documentation, "Understanding AMD GPU LDS and Bank Conflicts"
  (rocm.docs.amd.com/projects/composable_kernel).
- LLVM: llvm/lib/Target/AMDGPU, the file is named beside the number.
- CALC: github.com/ROCm/amd_matrix_instruction_calculator.
- STREAM: measured on Azure's ND MI300X v5 by BabelStream; github.com/Azure/AI-benchmarking-guide, Azure_Results.
- MEASURED: measured on MI355X by the authors of the published tokenspeed-kernel-amd; pull requests 165, 191 and 464 of their
  project.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The parameters that differ between devices.

    Attributes:
        name: name of the device.
        compute_units: number of CUs.
        clock_hz: peak engine clock; sustained clocks are lower and depend on power.
        memory_bytes: size of the HBM.
        hbm_bytes_per_second, hbm_achieved_bytes_per_second: peak bandwidth of the HBM, and the bandwidth that kernels achieve.
        lds_bytes, lds_granule: size of a CU's LDS, and the granule in which it is allocated.
        lds_read_banks: number of banks, 4 bytes each, that loads access in a cycle.
        lds_port_load_bytes: bytes per cycle that the port of two SIMDs transfers for loads.
        l2_read_bytes_per_cycle, l2_write_bytes_per_cycle: bytes per cycle and CU to and from L2.
        lds_latency, l2_latency, hbm_latency, scalar_cache_miss: cycles.
        lds_port_store_bytes: bytes per cycle that the port of two SIMDs transfers for stores.
        transcendental_cycles, conversion_cycles: cycles for which a transcendental instruction or a conversion holds the VALU.
        mfma_result_slots: number of issue slots that a dependent instruction waits after the passes of an MFMA.
    """

    name: str
    compute_units: int
    clock_hz: float
    memory_bytes: int
    hbm_bytes_per_second: float
    hbm_achieved_bytes_per_second: float
    lds_bytes: int
    lds_granule: int
    lds_read_banks: int
    lds_port_load_bytes: int
    lds_port_store_bytes: int
    l2_read_bytes_per_cycle: int
    l2_write_bytes_per_cycle: int
    lds_latency: int
    l2_latency: int
    hbm_latency: int
    scalar_cache_miss: int
    transcendental_cycles: int
    conversion_cycles: int
    mfma_result_slots: int


MI355X = Device(
    name="AMD Instinct MI355X",
    compute_units=256,  # SPECS
    clock_hz=2.4e9,  # CDNA4
    memory_bytes=288 * 2**30,  # SPECS
    hbm_bytes_per_second=8e12,  # CDNA4: peak of HBM3E
    # MEASURED: the published decode kernels take 4.7 us + bytes / 6.6 TB/s. They have two launches, and read each key and value
    # once (`timing` has the figures).
    hbm_achieved_bytes_per_second=6.6e12,
    lds_bytes=160 * 1024,  # CDNA4
    lds_granule=1280,  # LLVM Utils/AMDGPUBaseInfo.cpp, getLdsDwGranularity: 320 dwords with 160 KB of LDS
    lds_read_banks=64,  # HK, TRITON; CDNA4: 256 bytes a clock. MT4G streams 220
    lds_port_load_bytes=128,  # ROCPROF has 64 for 32 banks; half of CDNA4's 256 bytes per clock
    lds_port_store_bytes=64,  # ROCPROF
    # CDNA4: 16 channels per XCD, each reads 128 and writes 64 bytes per clock, shared by 32 CUs. MT4G streams 48 and 22.
    l2_read_bytes_per_cycle=64,
    l2_write_bytes_per_cycle=32,
    lds_latency=48,  # for one dword without conflicts, MT4G
    l2_latency=256,  # MT4G
    hbm_latency=768,  # MT4G
    scalar_cache_miss=48 + 119,  # MT4G
    transcendental_cycles=8,  # CDNA4 doubles the rate of CDNA3
    conversion_cycles=16,  # LLVM SISchedule.td, SIDPGFX950FullSpeedModel, WriteFloatCvt: quarter rate
    # LLVM GCNHazardRecognizer.cpp, GFX940_XDL_N_PassWriteVgprVALUMemExpReadWaitStates: passes + 4 wait states on gfx950
    mfma_result_slots=5,
)

MI300X = Device(
    name="AMD Instinct MI300X",
    compute_units=304,  # SPECS
    clock_hz=2.1e9,  # CDNA3
    memory_bytes=192 * 2**30,  # SPECS
    hbm_bytes_per_second=5.3e12,  # CDNA3
    hbm_achieved_bytes_per_second=4.26e12,  # STREAM: 4.26 TB/s for Mul, 4.09 to 4.14 for Copy, Add and Triad. MT4G reads 3.96
    lds_bytes=64 * 1024,  # CDNA3
    lds_granule=512,  # LLVM Utils/AMDGPUBaseInfo.cpp, getLdsDwGranularity: 128 dwords
    lds_read_banks=32,  # CK
    lds_port_load_bytes=64,  # ROCPROF
    lds_port_store_bytes=64,  # ROCPROF
    l2_read_bytes_per_cycle=53,  # CDNA3: the channels of CDNA4, shared by 38 CUs. MT4G streams 24 and 11
    l2_write_bytes_per_cycle=26,
    lds_latency=52,  # MT4G
    l2_latency=288,  # MT4G
    hbm_latency=900,  # MT4G: mean; the median is 876, the 95th percentile 1115
    scalar_cache_miss=48 + 124,  # MT4G
    transcendental_cycles=16,  # LLVM SISchedule.td, SIDPGFX942FullSpeedModel: quarter rate
    conversion_cycles=16,  # the same file, WriteFloatCvt
    mfma_result_slots=4,  # the same function of LLVM: passes + 3 wait states
)

# The whole device

XCDS = 8  # SPECS; CDNA3: workgroups are dispatched to the XCDs in turn
LAUNCH_SECONDS = 2.3e-6  # MEASURED on MI355X, also used for MI300X
CACHE_LINE = 128  # bytes, L1 and L2: MT4G ("lineSize"), CDNA3

# One CU: registers, LDS, waves

SIMDS = 4  # ROCPROF
WAVES_PER_SIMD = 8  # ROCPROF: instruction buffer slots since CDNA2
VGPRS_PER_LANE = 512  # LLVM Utils/AMDGPUBaseInfo.cpp, getTotalNumVGPRs with gfx90a instructions; VGPRs and AGPRs together
VGPR_GRANULE = 8  # LLVM Utils/AMDGPUBaseInfo.cpp, getVGPRAllocGranule with gfx90a instructions
SGPRS_PER_SIMD = 800  # LLVM Utils/AMDGPUBaseInfo.cpp, getTotalNumSGPRs; SPECS: 12.5 KiB per CU
SGPR_GRANULE = 16  # LLVM Utils/AMDGPUBaseInfo.cpp, getSGPRAllocGranule
BARRIERS = 16  # LLVM Utils/AMDGPUBaseInfo.cpp, getMaxWorkGroupsPerCU; only workgroups of several waves need one

# Issue. ROCPROF, "Scheduler": SIMDs issue in rotation, one per cycle. In its cycle, a SIMD issues at most one instruction per
# category, each from a different wave.

SLOT = 4  # cycles between two issue slots of a SIMD

# Vector ALU. ROCPROF: 16 lanes wide, so 4 cycles per wave. LLVM SISchedule.td, SIDPGFX950FullSpeedModel, in multiples of 4 cycles:
# 1 for 32-bit, 64-bit, packed, FMA, integer multiply and double precision operations. `Device` has transcendental instructions and
# conversions.

VALU_CYCLES = 4
TRANSCENDENTAL_F64_CYCLES = 16  # LLVM SISchedule.td, WriteTrans64

# Matrix core. Passes: `gfx950_emulator.mfma`. A dependent instruction waits for the passes, and for `Device.mfma_result_slots`. An
# MFMA that only accumulates (its C is the first MFMA's D) waits for the passes alone. A vector instruction that does not use the
# MFMA's result can issue 4 cycles after the MFMA, while the matrix core is still busy: CALC ("coexec_delay" of CDNA3).

# Scalar side

BRANCH_SLOTS = 8  # LLVM SISchedule.td, WriteBranch
SCALAR_CACHE_HIT = 48  # cycles, MT4G

# LDS

LDS_WRITE_BANKS = 32  # HK for 64-bit writes: 128 bytes a clock. MT4G streams 75
# ROCPROF: two SIMDs share a port. The port transfers a store's addresses and data in turn, 16 addresses or `Device`'s bytes per
# cycle.
LDS_PORTS = 2
LDS_PORT_ADDRESS_CYCLES = 4

# Vector memory

ADDRESS_CYCLES = 4  # ROCPROF: a fully coalesced instruction makes requests of 16 lanes each
VMCNT_LIMIT = 63  # outstanding operations of a wave: width of the counter, CDNA3 ISA document, S_WAITCNT
LGKMCNT_LIMIT = 15
