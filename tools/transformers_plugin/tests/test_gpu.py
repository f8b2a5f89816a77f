"""Runs models on an NVIDIA GPU, where kernels run instead of references, and compares the results with transformers' own code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

from tiny_models import generate, make, padding, prompts

from tokenspeed_kernel_transformers import enable

pytestmark = [
    pytest.mark.nvidia,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gemma2", "gemma3", "mixtral", "deepseek_v3"])
def test_generate(name: str, kind: str, cache: str) -> None:
    """The error of the first logits relative to float32 must be at most twice the error of transformers' own code in bf16. Later
    logits are not compared, because the generated tokens may differ."""
    ids = prompts()
    mask = padding(kind, ids)
    model, wide = make(name, torch.bfloat16), make(name)
    wide.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    expected = generate(wide, ids, mask, cache).logits[:, 0]
    model, ids, mask = model.cuda(), ids.cuda(), None if mask is None else mask.cuda()
    own = generate(model, ids, mask, cache).logits[:, 0].float().cpu()
    receipt = enable(model)
    assert receipt.served("attention"), str(receipt)
    assert "reference" not in str(receipt)
    got = generate(model, ids, mask, cache).logits
    assert bool(got.isfinite().all())
    assert (got[:, 0].float().cpu() - expected).abs().mean() < 2 * (own - expected).abs().mean()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize("kind", ["none", "left"])
def test_fp32_decode_steps(name: str, kind: str) -> None:
    """Compares logits and greedy tokens in float32, where our attention differs from eager attention by rounding only."""
    model, ids = make(name).cuda(), prompts().cuda()
    mask = padding(kind, ids)
    expected = generate(model, ids, mask)
    enable(model, experts=False, norms=False, gated_mlps=False)
    got = generate(model, ids, mask)
    torch.testing.assert_close(got.logits, expected.logits, atol=2e-3, rtol=2e-3)
    assert torch.equal(got.tokens, expected.tokens)
