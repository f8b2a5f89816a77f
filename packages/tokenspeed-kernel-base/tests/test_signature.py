"""Tests tensor formats and signatures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base.signature import (
    FormatSignature,
    ScaleFormat,
    TensorFormat,
    dense_tensor_format,
    dtype_name,
    format_signature,
    format_signatures,
    tensor_format,
)

BF16 = dense_tensor_format(torch.bfloat16)
MX = tensor_format("mxfp4", torch.uint8, scale=ScaleFormat(torch.uint8, "block", (1, 32)))


def test_signatures_are_equal_whatever_the_order_of_roles() -> None:
    one, other = format_signature(a=BF16, b=MX), format_signature(b=MX, a=BF16)
    assert one == other
    assert hash(one) == hash(other)
    assert one.roles == (("a", BF16), ("b", MX))
    assert FormatSignature((("b", MX), ("a", BF16))) == one
    assert one != format_signature(a=BF16)
    assert one != format_signature(a=MX, b=BF16)


@pytest.mark.parametrize(
    "other",
    [
        tensor_format("mxfp4", torch.uint8),
        tensor_format("mxfp8", torch.uint8, scale=ScaleFormat(torch.uint8, "block", (1, 32))),
        tensor_format("mxfp4", torch.uint8, scale=ScaleFormat(torch.uint8, "block", (1, 16))),
        tensor_format("mxfp4", torch.uint8, scale=ScaleFormat(torch.float32, "block", (1, 32))),
        tensor_format("mxfp4", torch.uint8, scale=ScaleFormat(torch.uint8, "block", dynamic_block_shape=True)),
        tensor_format("mxfp4", torch.int8, scale=ScaleFormat(torch.uint8, "block", (1, 32))),
    ],
)
def test_any_difference_in_a_format_counts(other: TensorFormat) -> None:
    assert format_signature(w=MX) != format_signature(w=other)
    (phrase,) = format_signature(w=other).difference(format_signature(w=MX))
    assert phrase.startswith("w: ")
    assert str(MX) in phrase


def test_how_formats_read() -> None:
    assert str(BF16) == "bfloat16"
    assert str(MX) == "mxfp4<uint8> scaled by uint8/block1x32"
    assert str(ScaleFormat(torch.float32, "token")) == "float32/token"
    assert str(format_signature(b=MX, a=BF16)) == "a: bfloat16, b: mxfp4<uint8> scaled by uint8/block1x32"
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"


def test_differences_name_roles_that_one_side_lacks() -> None:
    offered, wanted = format_signature(a=BF16, c=BF16), format_signature(a=BF16, b=MX)
    assert offered.difference(wanted) == [
        "b: mxfp4<uint8> scaled by uint8/block1x32 wanted, nothing offered",
        "c: nothing wanted, bfloat16 offered",
    ]
    assert offered.difference(offered) == []


def test_looking_up_roles() -> None:
    signature = format_signature(a=BF16, b=MX)
    assert signature.format_for("b") is MX
    assert signature.format_for("b").storage_dtype == torch.uint8
    with pytest.raises(KeyError, match="no role 'c' in a: bfloat16"):
        signature.format_for("c")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: format_signature(a=torch.bfloat16),
            TypeError,
            r"role 'a' must be a TensorFormat, got torch.bfloat16; dense_tensor_format",
        ),
        (lambda: FormatSignature((("a", BF16), ("a", MX))), ValueError, "a role may appear once in a signature, got a, a"),
        (
            lambda: ScaleFormat(torch.uint8, "row"),
            ValueError,
            "granularity must be one of tensor, token, channel, block, got 'row'",
        ),
        (lambda: ScaleFormat(torch.uint8, "block"), ValueError, "block_shape belongs to granularity 'block'"),
        (lambda: ScaleFormat(torch.uint8, "tensor", (1, 32)), ValueError, "block_shape belongs to granularity 'block'"),
        (lambda: ScaleFormat(torch.uint8, "block", (1, 32), True), ValueError, "block_shape is None where it is dynamic"),
    ],
)
def test_wrong_formats(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_format_signatures_makes_one_a_dtype() -> None:
    made = format_signatures(("q", "k"), "dense", [torch.bfloat16, torch.float16])
    assert made == {format_signature(q=dense_tensor_format(t), k=dense_tensor_format(t)) for t in (torch.bfloat16, torch.float16)}
    assert format_signatures("x", "dense", {torch.float32}) == {format_signature(x=dense_tensor_format(torch.float32))}
    scale = ScaleFormat(torch.float32, "tensor")
    assert format_signatures("x", "fp8", {torch.float8_e4m3fn}, scale=scale) == {
        format_signature(x=tensor_format("fp8", torch.float8_e4m3fn, scale=scale))
    }


def test_formats_are_immutable_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BF16.format = "other"  # type: ignore[misc]
    assert ScaleFormat(torch.uint8, "block", [1, 32]) == MX.scale  # type: ignore[arg-type]
