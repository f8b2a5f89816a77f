"""Quantisation to narrow formats, and back."""

from tokenspeed_kernel_base.ops.quantization.fp8 import dequantize_fp8, quantize_fp8, quantize_fp8_with_scale
from tokenspeed_kernel_base.ops.quantization.mx import dequantize_mxfp4, dequantize_mxfp8, quantize_mxfp4, quantize_mxfp8
from tokenspeed_kernel_base.ops.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4

__all__ = [
    "dequantize_fp8",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "quantize_fp8",
    "quantize_fp8_with_scale",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
]
