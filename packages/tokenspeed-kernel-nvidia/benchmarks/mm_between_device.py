"""The kernel that the benchmark launches between GEMMs: an rmsnorm of one row, in Triton."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def rmsnorm(x, weight, out, n, BLOCK: tl.constexpr):
    """Computes an rmsnorm. Waits for the preceding kernel, then lets the next kernel launch while this kernel still runs (PDL)."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    at = tl.arange(0, BLOCK)
    row = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(row * row, axis=0) / n + 1e-5)
    scale = tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, (row * factor * scale).to(out.dtype.element_ty), mask=at < n)
