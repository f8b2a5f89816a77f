"""Triton kernels in which lanes and waves exchange values: reductions, scans, sorting, histograms, gathers."""

import triton
import triton.language as tl


@triton.jit
def softmax(x_ptr, out_ptr, columns, block: tl.constexpr):
    """out[row] = softmax of x[row, :columns]. Each program computes one row."""
    row = tl.program_id(0)
    at = tl.arange(0, block)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * columns + at, weights / tl.sum(weights, axis=0), mask=at < columns)


@triton.jit
def layernorm(x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, columns, eps, block: tl.constexpr):
    """out[row] = (x - mean) * rstd * weight + bias over the columns. Also stores mean and rstd (float32)."""
    row = tl.program_id(0)
    total = tl.zeros((block,), tl.float32)
    for first in range(0, columns, block):
        at = first + tl.arange(0, block)
        total += tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros((block,), tl.float32)
    for first in range(0, columns, block):
        at = first + tl.arange(0, block)
        x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
        centred = tl.where(at < columns, x - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for first in range(0, columns, block):
        at = first + tl.arange(0, block)
        inside = at < columns
        x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + at, mask=inside)
        bias = tl.load(bias_ptr + at, mask=inside)
        tl.store(out_ptr + row * columns + at, (x - mean) * rstd * weight + bias, mask=inside)


@triton.jit
def reduce(x_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr, axis: tl.constexpr, name: tl.constexpr):
    """out = x [rows, columns] reduced along an axis by the named operation. Each program reduces one matrix."""
    pid = tl.program_id(0)
    x_at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    x = tl.load(x_ptr + pid * rows * columns + x_at)
    if name == "sum":
        y = tl.sum(x, axis=axis)
    elif name == "max":
        y = tl.max(x, axis=axis)
    elif name == "min":
        y = tl.min(x, axis=axis)
    elif name == "argmax":
        y = tl.argmax(x, axis=axis)
    elif name == "argmin":
        y = tl.argmin(x, axis=axis)
    elif name == "xor":
        y = tl.xor_sum(x, axis=axis)
    else:
        tl.static_assert(False, "no such reduction")
    length: tl.constexpr = columns if axis == 0 else rows
    tl.store(out_ptr + pid * length + tl.arange(0, length), y)


@triton.jit
def _welford(mean_a, m2_a, weight_a, mean_b, m2_b, weight_b):
    delta = mean_b - mean_a
    weight = weight_a + weight_b
    share = weight_b / weight
    return mean_a + delta * share, m2_a + m2_b + delta * delta * weight_a * share, weight


@triton.jit
def mean_and_variance(x_ptr, mean_ptr, variance_ptr, columns: tl.constexpr):
    """Stores the mean and the population variance of each row, by a reduction of three values with a custom combine function."""
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * columns + tl.arange(0, columns))
    mean, m2, weight = tl.reduce((x, tl.zeros_like(x), tl.full((columns,), 1.0, tl.float32)), 0, _welford)
    tl.store(mean_ptr + row, mean)
    tl.store(variance_ptr + row, m2 / weight)


@triton.jit
def _affine(a1, b1, a2, b2):
    return a2 * a1, a2 * b1 + b2


@triton.jit
def scan(x_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr, axis: tl.constexpr, reverse: tl.constexpr, name: tl.constexpr):
    """out = the scan of x [rows, columns] along an axis: cumsum, cumprod, or their running maximum."""
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    x = tl.load(x_ptr + at)
    if name == "cumsum":
        y = tl.cumsum(x, axis=axis, reverse=reverse)
    elif name == "cumprod":
        y = tl.cumprod(x, axis=axis, reverse=reverse)
    elif name == "cummax":
        y = tl.associative_scan(x, axis, tl.standard._elementwise_max, reverse=reverse)
    else:
        tl.static_assert(False, "no such scan")
    tl.store(out_ptr + at, y)


@triton.jit
def recurrence(a_ptr, b_ptr, out_ptr, rows: tl.constexpr, length: tl.constexpr):
    """out[r, t] = a[r, t] out[r, t - 1] + b[r, t]: an associative scan of pairs."""
    at = tl.arange(0, rows)[:, None] * length + tl.arange(0, length)[None, :]
    _, y = tl.associative_scan((tl.load(a_ptr + at), tl.load(b_ptr + at)), 1, _affine)
    tl.store(out_ptr + at, y)


@triton.jit
def sort(x_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr, descending: tl.constexpr):
    """out = x with each row sorted."""
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    tl.store(out_ptr + at, tl.sort(tl.load(x_ptr + at), descending=descending))


@triton.jit
def topk(x_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr, k: tl.constexpr):
    """out [rows, k] = the k largest of each row of x, in descending order."""
    x = tl.load(x_ptr + tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :])
    tl.store(out_ptr + tl.arange(0, rows)[:, None] * k + tl.arange(0, k)[None, :], tl.topk(x, k))


@triton.jit
def flip(x_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr):
    """out = x with the elements of each row reversed."""
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    tl.store(out_ptr + at, tl.flip(tl.load(x_ptr + at), dim=1))


@triton.jit
def transpose(x_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr):
    """out [columns, rows] = x [rows, columns] transposed. Loads and stores both follow the order of memory."""
    x = tl.load(x_ptr + tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :])
    tl.store(out_ptr + tl.arange(0, columns)[:, None] * rows + tl.arange(0, rows)[None, :], tl.trans(x))


@triton.jit
def interleave(x_ptr, y_ptr, out_ptr, low_ptr, n: tl.constexpr):
    """out = x[0], y[0], x[1], y[1], ..., by tl.join. low = the even minus the odd elements of out, by tl.split."""
    at = tl.arange(0, n)
    both = tl.interleave(tl.load(x_ptr + at), tl.load(y_ptr + at))
    tl.store(out_ptr + tl.arange(0, 2 * n), both)
    even, odd = tl.split(tl.reshape(both, (n, 2)))
    tl.store(low_ptr + at, even - odd)


@triton.jit
def histogram(x_ptr, out_ptr, n, block: tl.constexpr, bins: tl.constexpr):
    """out[program, bin] = the number of the block's int32 values, among the first n values, that equal the bin's index."""
    pid = tl.program_id(0)
    at = pid * block + tl.arange(0, block)
    counts = tl.histogram(tl.load(x_ptr + at, mask=at < n, other=0), bins, mask=at < n)
    tl.store(out_ptr + pid * bins + tl.arange(0, bins), counts)


@triton.jit
def gather(x_ptr, index_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr, taken: tl.constexpr, axis: tl.constexpr):
    """out = x [rows, columns] gathered along an axis by an index of `taken` entries along it."""
    x = tl.load(x_ptr + tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :])
    out_rows: tl.constexpr = taken if axis == 0 else rows
    out_columns: tl.constexpr = taken if axis == 1 else columns
    at = tl.arange(0, out_rows)[:, None] * out_columns + tl.arange(0, out_columns)[None, :]
    tl.store(out_ptr + at, tl.gather(x, tl.load(index_ptr + at), axis))
