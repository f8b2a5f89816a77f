"""Hooks of operators that quantise another operator's result. These hooks combine the other operator's hooks with those of
`quantize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Cost, nbytes
from tokenspeed_kernel_base.checks import Checker
from tokenspeed_kernel_base.ops.quantization.encodings import (
    BLOCK_MX,
    BLOCK_NVFP4,
    SOURCE_DTYPES,
    decode_mxfp8,
    decode_nvfp4,
    unswizzle,
)
from tokenspeed_kernel_base.ops.quantization.formats import mxfp8_format, nvfp4_format
from tokenspeed_kernel_base.ops.quantization.fp8 import decode_quantised
from tokenspeed_kernel_base.ops.quantization.quantize import quantize, vary_quantization
from tokenspeed_kernel_base.ops.quantization.value import Quantization, kind_of
from tokenspeed_kernel_base.signature import Decoded, TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.traits import TraitKind
from tokenspeed_kernel_base.variation import Variation

_BLOCKS = {"mxfp8": BLOCK_MX, "nvfp4": BLOCK_NVFP4}


def traits_with_quantize(first: Any) -> dict[str, TraitKind]:
    """Returns the traits that an operator declares if its hooks are those of `Quantised` for ``first``."""
    return {**quantize.operator.traits, **first.operator.traits}


class Quantised:
    """The hooks of an operator that quantises the first output of another operator.

    The composed operator's first outputs are those of `quantize`. If there is a residual, the sum of x and the residual, from
    ``first``, follows.

    Args:
        first: the operator whose first output is quantised. Its input is x.
        gated: whether x is twice as wide as the output of ``first``.
    """

    hooks = ("traits", "check", "fake", "outputs", "intermediates", "decoded", "cost", "vary")

    def __init__(self, first: Any, gated: bool = False) -> None:
        self._first, self._gated = first.operator, gated

    def traits(self, **arguments: Any) -> dict[str, object]:
        """Returns the traits of ``first`` and of `quantize`."""
        return {**self._of_quantize("traits", arguments), **self._first.run_hook("traits", arguments)}

    def check(self, check: Checker, **arguments: Any) -> None:
        """Checks the arguments of ``first``, then those of `quantize`."""
        x = arguments["x"]
        check.dtype("x", x, SOURCE_DTYPES)
        self._first.run_hook("check", arguments, check)
        if self._gated:
            block = _BLOCKS.get(kind_of(arguments["quantization"]), 1)
            wanted = f"of shape [..., 2 * d] where d is a multiple of {block}"
            check.require(x.shape[-1] // 2 % block == 0, "x", wanted, str(list(x.shape)))
        self._of_quantize("check", arguments, check)

    def fake(self, **arguments: Any) -> Any:
        """Returns the outputs of `quantize`, then the further outputs of ``first``."""
        made, *others = lowering.as_list(self._first.run_hook("fake", arguments))
        quantised = quantize.operator.run_hook("fake", {"x": made, "quantization": arguments["quantization"]})
        return lowering.from_list([*lowering.as_list(quantised), *others])

    def outputs(self, **arguments: Any) -> list[str]:
        """Returns the names of the outputs that `fake` makes."""
        return [*quantize.operator.outputs_of(arguments), *["residual_out"] * (arguments.get("residual") is not None)]

    def intermediates(self, **arguments: Any) -> tuple[TensorFormat, ...]:
        """Returns the format of the intermediate result: x's dtype, to which the result of ``first`` is rounded before it is
        quantised."""
        return (dense_tensor_format(arguments["x"].dtype),)

    def decoded(self, **arguments: Any) -> tuple[Any, ...]:
        """Returns the dequantised outputs of `quantize`, then the further outputs of ``first``.

        With given or float32 scales, quantised values and scales are returned as they are. A difference of the intermediate result
        in the last bit then changes a scale only slightly, and changes few quantised values."""
        others = [] if arguments.get("residual_out") is None else [arguments["residual_out"]]
        quantization: Quantization = arguments["quantization"]
        codes, scale, kind = arguments["out"], arguments["scale_out"], kind_of(quantization)
        if kind not in _BLOCKS:
            if scale is None or scale.dtype == torch.float32:
                return (codes, *others) if scale is None else (codes, scale, *others)
            return Decoded(*decode_quantised(codes, scale, quantization.granularity, quantization.block_size)), *others
        k = 2 * codes.shape[-1] if kind == "nvfp4" else codes.shape[-1]
        if quantization.scale_layout == "128x4":
            scale = unswizzle(scale, codes.shape[-2], k // _BLOCKS[kind])
        if kind == "mxfp8":
            return Decoded(decode_mxfp8(codes, scale), mxfp8_format()), *others
        assert quantization.scale is not None
        return Decoded(decode_nvfp4(codes, scale, quantization.scale), nvfp4_format()), *others

    def cost(self, **arguments: Any) -> Cost:
        """Returns the cost of ``first`` and of `quantize`, minus writing and reading the intermediate result."""
        one, other = self._first.run_hook("cost", arguments), self._of_quantize("cost", arguments)
        return Cost(flops=one.flops + other.flops, bytes=one.bytes + other.bytes - 2 * nbytes(self._between(arguments)))

    def vary(self, variation: Variation, **arguments: Any) -> dict[str, Any]:
        """Returns the arguments that the ``vary`` hooks of ``first`` and of `quantize` change."""
        changed = self._first.varied(arguments, variation)
        return {**changed, **vary_quantization(variation, arguments["quantization"])}

    def _of_quantize(self, hook: str, arguments: Mapping[str, Any], *leading: Any) -> Any:
        """Runs a hook of `quantize` on the intermediate result."""
        given = {"x": self._between(arguments), "quantization": arguments["quantization"]}
        return quantize.operator.run_hook(hook, given, *leading)

    def _between(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Returns the intermediate result as a meta tensor."""
        described = {**arguments, "x": arguments["x"].to("meta")}
        return lowering.as_list(self._first.run_hook("fake", described))[0]
