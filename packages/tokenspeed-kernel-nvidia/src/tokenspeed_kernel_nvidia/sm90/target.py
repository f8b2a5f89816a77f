"""Hopper (sm_90: H100, H200), as the compiler spells it."""

# The suffix allows wgmma and setmaxnreg. The machine code then runs on no other architecture.
ARCH = "sm_90a"
