"""The portable kernels, in Triton: declared beside their launchers, which import no compiler."""
