"""The portable Triton kernels. Each launcher declares its kernel and imports no compiler."""
