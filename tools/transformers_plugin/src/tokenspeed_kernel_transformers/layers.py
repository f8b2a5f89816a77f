"""Norms and gated MLPs that replace a model's own modules, by PyTorch's ``set_submodule``.

The parameters keep their names, so saving and loading work as before. The formula of a module does not follow from its class. So
each module is called once, and its results are compared with our formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_kernel_transformers.kernels import OPS, NotServedError, kernel_of

# For each activation: our operator, the operator's options, and PyTorch's function.
_ACTIVATIONS: tuple[tuple[str, dict[str, str], Callable[[Tensor], Tensor]], ...] = (
    ("silu_and_mul", {}, functional.silu),
    ("gelu_and_mul", {"approximate": "none"}, functional.gelu),
    ("gelu_and_mul", {"approximate": "tanh"}, lambda x: functional.gelu(x, approximate="tanh")),
)
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# The largest number of rows for which PyTorch's functions run outside of graphs. A step with so few rows waits for the host, and a
# kernel that is launched from Python takes more of the host's time than PyTorch's functions.
FEW_ROWS = 256
# The calls whose kernels have been compiled: operator, number of rows, width, dtype and device.
_compiled: set[tuple[object, ...]] = set()


class RMSNorm(torch.nn.Module):
    """An RMS norm that calls the operator `rmsnorm`, which rounds once. Many of transformers' own norms also round before they
    multiply by the weight."""

    def __init__(self, own: Any) -> None:
        """
        Args:
            own: the model's norm. It still runs calls with gradients enabled.

        Raises:
            NotServedError: the module does not compute our formula of an RMS norm, or no kernel is eligible.
        """
        super().__init__()
        self.weight = _parameter(own, "weight")
        self.eps = self.variance_epsilon = _eps(own)
        self.own = [own]  # in a list, because PyTorch would otherwise register its parameter a second time
        # Some norms multiply by 1 + weight instead of weight.
        self.offset = self._offset()
        self.kernel = kernel_of("rmsnorm", x=self.weight.new_empty(1, len(self.weight)), weight=self.weight.data, eps=self.eps)

    def _offset(self) -> float:
        """Returns the number that the model's norm adds to its weight, found by comparing results on random values.

        Raises:
            NotServedError: neither 0 nor 1 gives the results of the model's norm.
        """
        x = torch.randn(2, len(self.weight), generator=torch.Generator().manual_seed(1)).to(self.weight.device)
        with torch.no_grad():
            expected = self.own[0](x).float()
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
            for offset in (0.0, 1.0):
                if torch.allclose(normed * (offset + self.weight.float()), expected, rtol=1e-2, atol=1e-2):
                    return offset
        raise NotServedError("it computes something else than an RMS norm")

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x over its last axis."""
        if torch.is_grad_enabled():
            own: Tensor = self.own[0](x)
            return own
        if not self.offset and x.dtype == self.weight.dtype and few_rows(x):
            if _is_first("rmsnorm", x):
                OPS.rmsnorm(x, self.weight, self.eps)
            # Rounds once, as our norm does.
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        weight = self.offset + self.weight.float() if self.offset else self.weight
        out: Tensor = OPS.rmsnorm(x, weight, self.eps)
        return out


class GatedMLP(torch.nn.Module):
    """``down(act(gate(x)) * up(x))``. Gate and up are written to one tensor, which `silu_and_mul` or `gelu_and_mul` reads."""

    gate_proj: torch.nn.Linear
    up_proj: torch.nn.Linear
    down_proj: torch.nn.Linear
    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, own: Any) -> None:
        """
        Args:
            own: the model's MLP. Its projection modules are used unchanged.

        Raises:
            NotServedError: the module does not compute our formula of a gated MLP, or no kernel is eligible.
        """
        super().__init__()
        for name in _PROJECTIONS:
            projection = getattr(own, name)
            if type(projection) is not torch.nn.Linear:
                raise NotServedError(f"its projections are {type(projection).__name__}, not torch.nn.Linear")
            _parameter(projection, "weight")
            setattr(self, name, projection)
        self.act_fn = own.act_fn
        self.operator, self.options = self._activation()
        gate = self.gate_proj.weight
        x = torch.randn(2, gate.shape[1], generator=torch.Generator().manual_seed(1)).to(gate)
        with torch.no_grad():
            if len(inspect.signature(own.forward).parameters) != 1 or not torch.equal(own(x), self._formula(x)):
                raise NotServedError("it computes something else than a gated MLP")
        self.kernel = kernel_of(self.operator, x=gate.new_empty(1, 2 * len(gate)), **self.options)

    def _activation(self) -> tuple[str, dict[str, str]]:
        """Returns the operator that computes the MLP's activation, and the operator's options, found by comparing values.

        Raises:
            NotServedError: no operator computes this activation.
        """
        x = torch.linspace(-6, 6, 97, dtype=torch.float64)
        with torch.no_grad():
            for operator, options, function in _ACTIVATIONS:
                if torch.allclose(self.act_fn(x), function(x), rtol=1e-7, atol=1e-7):
                    return operator, options
        raise NotServedError(f"it does not run the activation {type(self.act_fn).__name__}")

    def _formula(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., hidden]`` to ``[..., hidden]``."""
        # torch.compile cannot trace the writes to slices of a tensor below, and fuses the activation itself.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._formula(x)
        if few_rows(x):
            if _is_first(self.operator, x):
                self._fused(x)
            return self._formula(x)
        return self._fused(x)

    def _fused(self, x: Tensor) -> Tensor:
        """Runs the operator."""
        rows = x.flatten(0, -2)
        width = len(self.gate_proj.weight)
        gate_up = x.new_empty(len(rows), 2 * width)
        for projection, out in zip((self.gate_proj, self.up_proj), gate_up.split(width, 1), strict=True):
            if projection.bias is None:
                torch.mm(rows, projection.weight.t(), out=out)
            else:
                torch.addmm(projection.bias, rows, projection.weight.t(), out=out)
        hidden = getattr(OPS, self.operator)(gate_up, **self.options)
        down: Tensor = self.down_proj(hidden)
        return down.view(*x.shape[:-1], -1)


def few_rows(x: Tensor) -> bool:
    """Returns whether a call on x takes less time with PyTorch's functions than with our kernel: x has few rows and is on a GPU,
    and no graph is captured or compiled.
    """
    if torch.compiler.is_compiling() or not x.is_cuda or x.numel() > FEW_ROWS * x.shape[-1]:
        return False
    return not torch.cuda.is_current_stream_capturing()


def _is_first(operator: str, x: Tensor) -> bool:
    """Returns whether our kernel must be compiled. A graph that is captured later runs it, and a capture cannot compile kernels."""
    call = (operator, x.numel() // x.shape[-1], x.shape[-1], x.dtype, x.device)
    if call in _compiled:
        return False
    _compiled.add(call)
    return True


def is_norm(module: Any) -> bool:
    """Returns whether a module looks like an RMS norm."""
    return "RMSNorm" in type(module).__name__ and not isinstance(module, RMSNorm)


def is_gated_mlp(module: Any) -> bool:
    """Returns whether a module looks like a gated MLP."""
    return all(hasattr(module, name) for name in (*_PROJECTIONS, "act_fn")) and not isinstance(module, GatedMLP)


def _parameter(module: Any, name: str) -> torch.nn.Parameter:
    """Returns a parameter of a module. Raises NotServedError unless it is an ordinary parameter on a device."""
    parameter = getattr(module, name, None)
    if not isinstance(parameter, torch.nn.Parameter) or type(parameter.data) is not Tensor or parameter.is_meta:
        raise NotServedError(f"its {name} is not an ordinary parameter on a device")
    if hasattr(module, "_hf_hook"):
        raise NotServedError("accelerate moves its weights")
    return parameter


def _eps(norm: Any) -> float:
    """Returns the epsilon of a norm. Raises NotServedError if the norm has none, or if its ``forward`` takes several tensors."""
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(norm, name, None), float) and len(inspect.signature(norm.forward).parameters) == 1:
            return eps
    raise NotServedError("it has no eps, or takes more than one tensor")
