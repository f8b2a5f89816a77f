"""RMS norm kernels in plain PyTorch: a correct kernel, and kernels with one fault each."""

import itertools

import torch


def right_rmsnorm(x, weight, eps, residual, out, residual_out):
    total = x if residual is None else x + residual
    wide = total.double() if x.dtype == torch.float64 else total.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)).to(x.dtype)
    normed = normed.contiguous() if out is None else out.copy_(normed)
    if residual is None:
        return normed
    return normed, total.contiguous() if residual_out is None else residual_out.copy_(total)


def ignored_out(x, weight, eps, residual, out, residual_out):
    return right_rmsnorm(x, weight, eps, residual, None, None)


def ignored_eps(x, weight, eps, residual, out, residual_out):
    """Uses the default eps, which is also the eps of most cases."""
    return right_rmsnorm(x, weight, 1e-5, residual, out, residual_out)


def mutated_input(x, weight, eps, residual, out, residual_out):
    """Adds the residual to x in place, which overwrites an input."""
    if residual is None:
        return right_rmsnorm(x, weight, eps, None, out, None)
    total = x.add_(residual)
    normed = right_rmsnorm(total, weight, eps, None, out, None)
    return normed, total.clone() if residual_out is None else residual_out.copy_(total)


_calls = itertools.count()


def not_deterministic(x, weight, eps, residual, out, residual_out):
    """Multiplies in an order that changes from call to call, as the order of atomic additions would."""
    total = x if residual is None else x + residual
    wide = total.double() if x.dtype == torch.float64 else total.float()
    scale, weight = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps), weight.to(wide.dtype)
    normed = (wide * scale * weight if next(_calls) % 2 else wide * (scale * weight)).to(x.dtype)
    normed = normed.contiguous() if out is None else out.copy_(normed)
    if residual is None:
        return normed
    return normed, total.contiguous() if residual_out is None else residual_out.copy_(total)
