"""Parameters of an MI355X (gfx950, CDNA4) for bank conflicts, occupancy and the timing model. Each parameter has its public source.

Abbreviations of the sources:

- CDNA4: "AMD CDNA 4 Architecture" white paper (amd.com, amd-cdna-4-architecture-whitepaper.pdf).
- CDNA3: "AMD CDNA 3 Architecture" white paper (amd.com, amd-cdna-3-white-paper.pdf).
- ROCPROF: ROCm Compute Profiler documentation, "Pipeline descriptions" and "Vector L1 cache" (rocm.docs.amd.com/projects/
  rocprofiler-compute). Written for CDNA 1 to 4. Figures for 32-bank LDS are marked as such.
- SPECS: "GPU hardware specifications" (rocm.docs.amd.com/en/latest/reference/gpu-specs.html).
- MT4G: measured on a gfx950 card (MI350P, 2.2 GHz) by pointer chasing and streaming; github.com/caps-tum/mt4g,
  sample_results/AMD_Instinct_MI350P.json.
- HK: measured on gfx950 with the bank conflict counter; github.com/HazyResearch/HipKittens, analysis/paper_experiments/phases,
  and the paper, arXiv:2511.08083.
- TRITON: github.com/triton-lang/triton, pull requests 9662 and 11365 (by AMD).
- CK: Composable Kernel documentation, "Understanding AMD GPU LDS and Bank Conflicts"
  (rocm.docs.amd.com/projects/composable_kernel).
- LLVM: llvm/lib/Target/AMDGPU, the file is named beside the number.
- CALC: github.com/ROCm/amd_matrix_instruction_calculator.
- MEASURED: measured on MI355X by the authors of the published tokenspeed-kernel-amd; pull requests 165, 191 and 464 of their
  project.
"""

from __future__ import annotations

# The whole device

COMPUTE_UNITS = 256  # SPECS
XCDS = 8  # SPECS; CDNA3: workgroups are dispatched to the XCDs in turn
CLOCK_HZ = 2.4e9  # CDNA4: peak engine clock of the MI355X; sustained clocks are lower and depend on power
HBM_BYTES_PER_SECOND = 8e12  # CDNA4: peak of HBM3E
# Achievable bandwidth and launch time. MEASURED: the published decode kernels take 4.7 us + bytes / 6.6 TB/s. They have two
# launches, and read each key and value once (`timing` has the figures).
HBM_ACHIEVED_BYTES_PER_SECOND = 6.6e12
LAUNCH_SECONDS = 2.3e-6
CACHE_LINE = 128  # bytes, L1 and L2: MT4G ("lineSize"), CDNA3

# One CU: registers, LDS, waves

SIMDS = 4  # ROCPROF
WAVES_PER_SIMD = 8  # ROCPROF: instruction buffer slots since CDNA2
VGPRS_PER_LANE = 512  # LLVM Utils/AMDGPUBaseInfo.cpp, getTotalNumVGPRs with gfx90a instructions; VGPRs and AGPRs together
VGPR_GRANULE = 8  # LLVM Utils/AMDGPUBaseInfo.cpp, getVGPRAllocGranule with gfx90a instructions
SGPRS_PER_SIMD = 800  # LLVM Utils/AMDGPUBaseInfo.cpp, getTotalNumSGPRs; SPECS: 12.5 KiB per CU
SGPR_GRANULE = 16  # LLVM Utils/AMDGPUBaseInfo.cpp, getSGPRAllocGranule
LDS_BYTES = 160 * 1024  # CDNA4
LDS_GRANULE = 1280  # LLVM Utils/AMDGPUBaseInfo.cpp, getLdsDwGranularity: 320 dwords with 160 KB of LDS
BARRIERS = 16  # LLVM Utils/AMDGPUBaseInfo.cpp, getMaxWorkGroupsPerCU; only workgroups of several waves need one

# Issue. ROCPROF, "Scheduler": SIMDs issue in rotation, one per cycle. In its cycle, a SIMD issues at most one instruction per
# category, each from a different wave.

SLOT = 4  # cycles between two issue slots of a SIMD

# Vector ALU. ROCPROF: 16 lanes wide, so 4 cycles per wave. LLVM SISchedule.td, SIDPGFX950FullSpeedModel, in multiples of 4 cycles:
# 1 for 32-bit, 64-bit, packed, FMA, integer multiply and double precision operations; 4 for conversions and other quarter-rate
# operations.

VALU_CYCLES = 4
QUARTER_RATE_CYCLES = 16
TRANSCENDENTAL_CYCLES = 8  # CDNA4 doubles the rate of CDNA3; for CDNA3, LLVM has transcendental instructions at quarter rate
TRANSCENDENTAL_F64_CYCLES = 16  # LLVM SISchedule.td, WriteTrans64

# Matrix core. Passes: `gfx950_emulator.mfma`. A dependent instruction needs passes + 4 wait states after an MFMA. So it issues this
# many slots after the passes: LLVM GCNHazardRecognizer.cpp, GFX940_XDL_N_PassWriteVgprVALUMemExpReadWaitStates for gfx950. An MFMA
# that only accumulates (its C is the first MFMA's D) waits for the passes alone. A vector instruction that does not use the MFMA's
# result can issue 4 cycles after the MFMA, while the matrix core is still busy: CALC ("coexec_delay" of CDNA3).

MFMA_RESULT_SLOTS = 5

# Scalar side

BRANCH_SLOTS = 8  # LLVM SISchedule.td, WriteBranch
SCALAR_CACHE_HIT = 48  # cycles, MT4G
SCALAR_CACHE_MISS = 48 + 119  # cycles, MT4G

# LDS

LDS_LATENCY = 48  # cycles for one dword without conflicts, MT4G
LDS_READ_BANKS = 64  # 4 bytes each: HK, TRITON; CDNA4: 256 bytes a clock. MT4G streams 220
LDS_WRITE_BANKS = 32  # HK for 64-bit writes: 128 bytes a clock. MT4G streams 75
# ROCPROF: two SIMDs share a port. The port transfers a store's addresses and data in turn, 16 addresses or 64 bytes per cycle.
LDS_PORTS = 2
LDS_PORT_ADDRESS_CYCLES = 4
LDS_PORT_STORE_BYTES = 64
LDS_PORT_LOAD_BYTES = 128  # ROCPROF has 64 for 32 banks; half of CDNA4's 256 bytes per clock

# Vector memory

ADDRESS_CYCLES = 4  # ROCPROF: a fully coalesced instruction makes requests of 16 lanes each
# Per CU. CDNA4: 16 channels per XCD, each reads 128 and writes 64 bytes per clock, shared by 32 CUs. MT4G streams 48 and 22.
L2_READ_BYTES_PER_CYCLE = 64
L2_WRITE_BYTES_PER_CYCLE = 32
L2_LATENCY = 256  # cycles, MT4G
HBM_LATENCY = 768  # cycles, MT4G
VMCNT_LIMIT = 63  # outstanding operations of a wave: width of the counter, CDNA3 ISA document, S_WAITCNT
LGKMCNT_LIMIT = 15
