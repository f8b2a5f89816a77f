"""The compiler's name for the Hopper architecture (sm_90: H100, H200)."""

# The suffix "a" allows wgmma and setmaxnreg. Machine code that is compiled with it runs on no other architecture.
ARCH = "sm_90a"
