"""The names of the made-up architecture for the compiler and for devices."""

from tokenspeed_kernel_nvidia.capability import between, cutedsl_gap

ARCH = "sm_77"
CUTEDSL_SM77 = between((7, 7), (7, 7), cutedsl_gap)
