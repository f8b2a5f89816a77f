"""The kernels of the plugin. Their results are wrong on purpose, so a test can tell which kernel ran."""

import torch


def rmsnorm(x, weight, eps, residual, out, residual_out):
    return torch.full_like(x, 42.0)


def mm(a, b, a_scale, b_scale, bias, out_dtype, alpha, out):
    raise AssertionError("a kernel of priority 1 was preferred")
