"""Tests that a kernel receives every argument correctly, whatever the argument's type and its neighbours in the argument
segment."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gfx950_emulator import emulated_gfx950


@triton.jit
def store_each(out_ptr, a, b, c, d, e, f, g, h, also_ptr):
    """out = each argument as float64."""
    tl.store(out_ptr, a.to(tl.float64))
    tl.store(out_ptr + 1, b.to(tl.float64))
    tl.store(out_ptr + 2, c.to(tl.float64))
    tl.store(out_ptr + 3, d.to(tl.float64))
    tl.store(out_ptr + 4, e.to(tl.float64))
    tl.store(out_ptr + 5, f.to(tl.float64))
    tl.store(out_ptr + 6, g.to(tl.float64))
    tl.store(out_ptr + 7, h.to(tl.float64))
    tl.store(also_ptr, 1.0)


def test_each_argument_arrives() -> None:
    """The kernel reads the value of every argument. The arguments have one, four and eight bytes, so some are at odd multiples of
    four."""
    values = [7, 2**40 + 3, -9, 0.375, True, -(2**35) - 5, 11, -2.5]
    out, also = torch.zeros(8, dtype=torch.float64), torch.zeros(1)
    with emulated_gfx950():
        store_each[(1,)](out, *values, also)
    assert out.tolist() == [float(value) for value in values]
    assert also.item() == 1
