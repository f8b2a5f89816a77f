"""Constants of the architecture that several modules need."""

WAVE = 64  # number of lanes of a wave
MASK32 = 0xFFFFFFFF
# Codes of scalar operands ("Scalar operands", CDNA3 ISA document)
VCC, M0, EXEC = 106, 124, 126
SCALARS = 128
# Made-up code addresses, for calls through registers
CODE_BASE, CODE_STEP = 0x100000000, 4


# Flat addresses with these upper 32 bits are LDS and scratch memory. Host addresses, which global memory has, are below 2**47.
SHARED_APERTURE, PRIVATE_APERTURE = 1 << 48, 1 << 49


def code_address(index: int) -> int:
    """Returns the made-up address of the instruction with this index."""
    return CODE_BASE + CODE_STEP * index


# The MODE register ("Mode register", CDNA3 ISA document) as LLVM sets it up: round to nearest even, all denormals kept,
# DX10_CLAMP, IEEE.
MODE_DEFAULT = 0x3F0
FP16_OVFL = 1 << 23  # bit of MODE: conversions to narrow formats saturate instead of overflowing to infinity
