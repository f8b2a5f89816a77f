"""Device code of `argmax`."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.triton.sampling._rows_device import best_of_row, token_of


@triton.jit
def best_of_rows_kernel(best, out, out_stride, spans, SPANS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row * out_stride, token_of(best_of_row(best, row, spans, SPANS)))
