"""Hooks of operators that quantise the result of another operator, composed of the hooks of both operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenspeed_kernel_base import lowering
from tokenspeed_kernel_base.cases import Cost, Draw, nbytes
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
from tokenspeed_kernel_base.signature import Decoded, TensorFormat, dense_tensor_format
from tokenspeed_kernel_base.traits import TraitKind


def draw_given(
    draw: Draw, scale_shape: tuple[int, ...] | None, global_scale: float | None, to: torch.dtype | None, high: float
) -> dict[str, Any]:
    """Draws the requested arguments of a quantising operator: scales up to ``high``, a global scale, the target dtype."""
    arguments: dict[str, Any] = {} if to is None else {"dtype": to}
    if scale_shape is not None:
        arguments["scale"] = draw.uniform(*scale_shape, low=0.005, high=high)
    if global_scale is not None:
        arguments["global_scale"] = draw.tensor([global_scale], torch.float32)
    return arguments


def kinds_of_both(first: Any, second: Any) -> dict[str, TraitKind]:
    """The traits of an operator that uses the hooks of `Quantised` for these two operators."""
    return {**second.operator.trait_kinds, **first.operator.trait_kinds}


class Quantised:
    """The hooks of an operator that quantises the first output of another operator.

    Its first outputs are those of ``second``. The further outputs of ``first`` follow.

    Args:
        first: the operator whose first output is quantised; its input is x.
        second: the operator that quantises its own x.
        block: elements that share a scale, if ``first`` is a gated activation, whose result must consist of complete blocks.

    Attributes:
        coded: whether a difference in the last bit of the intermediate result may change all quantised values of a block. This is
            so if scales are rounded; the operator then has the hook `decoded`.
    """

    def __init__(self, first: Any, second: Any, block: int = 1) -> None:
        self._first, self._second, self._block = first.operator, second.operator, block
        # Defaults for options of ``second`` that the operator does not have.
        self._defaults = {parameter.name: parameter.default for parameter in self._second.parameters if not parameter.required}
        self.coded = self._second.mode in ("quantize_fp8", "quantize_mxfp8", "quantize_nvfp4")

    def traits(self, **arguments: Any) -> dict[str, object]:
        """The traits of both operators."""
        made = self._on_meta(arguments)
        return {
            **self._second.run_hook("traits", self._for_second(arguments, made)),
            **self._first.run_hook("traits", arguments),
        }

    def check(self, check: Checker, **arguments: Any) -> None:
        """Checks the arguments of ``first``, then those of ``second``."""
        check.dtype("x", arguments["x"], SOURCE_DTYPES)
        self._first.run_hook("check", arguments, check)
        x, made = arguments["x"], self._on_meta(arguments)
        wanted = f"of shape [..., 2 * d] where d is a multiple of {self._block}"
        check.require(made.shape[-1] % self._block == 0, "x", wanted, str(list(x.shape)))
        self._second.run_hook("check", self._for_second(arguments, made), check)

    def fake(self, **arguments: Any) -> Any:
        """The outputs of ``second``, then the further outputs of ``first``."""
        made, *others = lowering.as_list(self._first.run_hook("fake", arguments))
        quantised = self._second.run_hook("fake", self._for_second(arguments, made))
        return lowering.from_list([*lowering.as_list(quantised), *others])

    def intermediates(self, **arguments: Any) -> tuple[TensorFormat, ...]:
        """The intermediate result is rounded to x's dtype before it is quantised."""
        return (dense_tensor_format(arguments["x"].dtype),)

    def decoded(self, **arguments: Any) -> tuple[Any, ...]:
        """The dequantised outputs of ``second``, then the further outputs of ``first``.

        With float32 scales the quantised values and scales are returned unchanged: a last-bit difference of the intermediate
        result changes a scale equally little, and few quantised values."""
        others = [] if arguments.get("residual_out") is None else [arguments["residual_out"]]
        codes, scale = arguments["out"], arguments["scale_out"]
        if "granularity" in arguments:
            if scale.dtype == torch.float32:
                return codes, scale, *others
            return Decoded(*decode_quantised(codes, scale, arguments["granularity"], arguments["block_size"])), *others
        k, block = (2 * codes.shape[-1], BLOCK_NVFP4) if "global_scale" in arguments else (codes.shape[-1], BLOCK_MX)
        if arguments["scale_layout"] == "128x4":
            scale = unswizzle(scale, codes.shape[-2], k // block)
        if "global_scale" in arguments:
            return Decoded(decode_nvfp4(codes, scale, arguments["global_scale"]), nvfp4_format()), *others
        return Decoded(decode_mxfp8(codes, scale), mxfp8_format()), *others

    def cost(self, **arguments: Any) -> Cost:
        """The cost of both operators, minus writing and reading the intermediate result."""
        made = self._on_meta(arguments)
        one, other = self._first.run_hook("cost", arguments), self._second.run_hook("cost", self._for_second(arguments, made))
        return Cost(flops=one.flops + other.flops, bytes=one.bytes + other.bytes - 2 * nbytes(made))

    def _for_second(self, arguments: Mapping[str, Any], made: torch.Tensor) -> dict[str, Any]:
        """The arguments of ``second``."""
        return {**self._defaults, **arguments, "x": made}

    def _on_meta(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """The intermediate result as a meta tensor."""
        described = {**arguments, "x": arguments["x"].to("meta")}
        return lowering.as_list(self._first.run_hook("fake", described))[0]
