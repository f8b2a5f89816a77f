"""On a GPU, compiled kernels serve every operator, and the result agrees with the reference."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from gpt_oss import demo

pytestmark = [
    pytest.mark.nvidia,
    pytest.mark.amd,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    ("preset", "layers", "dtype"),
    [
        ("tiny", None, torch.bfloat16),
        ("tiny", None, torch.float16),
        ("tiny", None, torch.float32),
        ("gpt-oss-120b", 4, torch.bfloat16),
    ],
    ids=["tiny bfloat16", "tiny float16", "tiny float32", "four layers of 120b"],
)
def test_every_operator_has_a_kernel_and_agrees(preset: str, layers: int | None, dtype: torch.dtype) -> None:
    options = demo.Options(preset=preset, layers=layers, dtype=dtype, device="cuda", max_tokens=16, mixed=True)
    result = demo.run(options, Console(quiet=True))
    on_the_reference = [heard.explanation for heard in result.kernels if heard.kernel.startswith("reference_")]
    assert not on_the_reference, "\n".join(map(str, on_the_reference))
    assert result.agreement is not None
    assert result.agreement.agrees, result.agreement
