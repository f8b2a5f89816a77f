"""The made-up architecture, as the compiler and as devices spell it."""

from tokenspeed_kernel_nvidia.capability import between, cutedsl_gap

ARCH = "sm_77"
CUTEDSL_SM77 = between((7, 7), (7, 7), cutedsl_gap)
