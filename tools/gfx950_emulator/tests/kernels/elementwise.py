"""Triton kernels with one operation per element: arithmetic, conversions, bits, functions."""

import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, block: tl.constexpr):
    """out = x + y for n elements of one dtype; the last block is masked."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x + y, mask=inside)


@triton.jit
def select_with_other(x_ptr, out_ptr, n, limit, block: tl.constexpr):
    """out = x where x < limit, else -7. Elements from n on load as 99, by the load's `other`. All elements are stored."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n, other=99)
    tl.store(out_ptr + at, tl.where(x < limit, x, -7))


@triton.jit
def convert(x_ptr, out_ptr, n, block: tl.constexpr):
    """out = x in out's dtype."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def convert_toward_zero(x_ptr, out_ptr, n, block: tl.constexpr):
    """out = x (float32) in out's dtype, rounded toward zero."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty, fp_downcast_rounding="rtz"), mask=at < n)


@triton.jit
def divide_integers(x_ptr, y_ptr, quotient_ptr, rest_ptr, n, block: tl.constexpr):
    """quotient = x // y, rest = x % y, rounded toward zero as in C. The divisors are known at run time only."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside, other=0)
    y = tl.load(y_ptr + at, mask=inside, other=1)
    tl.store(quotient_ptr + at, x // y, mask=inside)
    tl.store(rest_ptr + at, x % y, mask=inside)


@triton.jit
def divide_by_scalar(x_ptr, quotient_ptr, rest_ptr, divisor, n, block: tl.constexpr):
    """quotient = x // divisor + program // divisor, rest = x % divisor + program % divisor, with one scalar divisor."""
    pid = tl.program_id(0)
    at = pid * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(quotient_ptr + at, x // divisor + pid // divisor, mask=at < n)
    tl.store(rest_ptr + at, x % divisor + pid % divisor, mask=at < n)


@triton.jit
def divide_floats(x_ptr, y_ptr, fast_ptr, rounded_ptr, n, block: tl.constexpr):
    """fast = x / y; rounded = x / y rounded to nearest (float32 only)."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(fast_ptr + at, x / y, mask=inside)
    tl.store(rounded_ptr + at, tl.math.div_rn(x, y), mask=inside)


@triton.jit
def function(x_ptr, out_ptr, n, name: tl.constexpr, block: tl.constexpr):
    """out = the function `name` of x."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    if name == "exp":
        y = tl.exp(x)
    elif name == "exp2":
        y = tl.exp2(x)
    elif name == "log":
        y = tl.log(x)
    elif name == "log2":
        y = tl.log2(x)
    elif name == "sqrt":
        y = tl.sqrt(x)
    elif name == "sqrt_rn":
        y = tl.sqrt_rn(x)
    elif name == "rsqrt":
        y = tl.rsqrt(x)
    elif name == "sin":
        y = tl.sin(x)
    elif name == "cos":
        y = tl.cos(x)
    elif name == "erf":
        y = tl.erf(x)
    elif name == "sigmoid":
        y = tl.sigmoid(x)
    elif name == "floor":
        y = tl.floor(x)
    elif name == "ceil":
        y = tl.ceil(x)
    elif name == "abs":
        y = tl.abs(x)
    elif name == "fma":
        y = tl.fma(x, x, x)
    elif name == "clamp":
        y = tl.clamp(x, -0.5, 0.75)
    elif name == "maximum_nan":
        y = tl.maximum(x, 0.25, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(False, "no such function")
    tl.store(out_ptr + at, y, mask=at < n)


@triton.jit
def integer64(x_ptr, y_ptr, out_ptr, n, block: tl.constexpr):
    """out[0:6] = rows of x * y, x - y, x << (y & 63), x >> (y & 63), the larger, and the high half of the unsigned product."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x * y, mask=inside)
    tl.store(out_ptr + n + at, x - y, mask=inside)
    tl.store(out_ptr + 2 * n + at, x << (y & 63), mask=inside)
    tl.store(out_ptr + 3 * n + at, x >> (y & 63), mask=inside)
    tl.store(out_ptr + 4 * n + at, tl.maximum(x, y), mask=inside)
    tl.store(out_ptr + 5 * n + at, tl.umulhi(x, y), mask=inside)


@triton.jit
def bits(x_ptr, y_ptr, out_ptr, n, block: tl.constexpr):
    """out[0:7] = rows of x & y, x | y, x ^ y, ~x, x << (y & 31), x >> (y & 31), and (x & ~y) | (y ^ 0x55) of 32-bit integers."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x & y, mask=inside)
    tl.store(out_ptr + n + at, x | y, mask=inside)
    tl.store(out_ptr + 2 * n + at, x ^ y, mask=inside)
    tl.store(out_ptr + 3 * n + at, ~x, mask=inside)
    tl.store(out_ptr + 4 * n + at, x << (y & 31), mask=inside)
    tl.store(out_ptr + 5 * n + at, x >> (y & 31), mask=inside)
    tl.store(out_ptr + 6 * n + at, (x & ~y) | (y ^ 0x55), mask=inside)


@triton.jit
def reinterpret(x_ptr, out_ptr, n, block: tl.constexpr):
    """Bitcasts float32 x to int32, flips the sign bit, sets the lowest mantissa bit, and bitcasts back."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.int32, bitcast=True)
    tl.store(out_ptr + at, ((x ^ -0x80000000) | 1).to(tl.float32, bitcast=True), mask=at < n)


@triton.jit
def random_numbers(out_ptr, seed, n, block: tl.constexpr):
    """out = uniform random numbers in [0, 1) by Philox, from `seed` and each element's index."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out_ptr + at, tl.rand(seed, at), mask=at < n)
