"""Tests that on an emulated H200, a decode pass of one token runs all layers in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt_oss_models import make_config, random_prompts

from gpt_oss import Engine, GptOss, PagedKVCache, Request
from gpt_oss.kernels import listen
from gpt_oss.loader import RandomTensors

OPERATOR = "decoder.decoder_layers"


@pytest.fixture
def hopper() -> Any:
    for name in ("cutlass", "tokenspeed_kernel_nvidia"):
        pytest.importorskip(name)
    emulator = pytest.importorskip("sm90_emulator")
    if torch.cuda.is_available():
        pytest.skip("the emulator stands in for CuteDSL's runtime in the whole process")
    return emulator.emulated_sm90


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense_weights", "kernel"), [("none", "cutedsl_decoder_layers"), ("fp8", "cutedsl_decoder_layers_fp8_weights")]
)
def test_all_layers_in_one_launch(hopper: Any, dense_weights: str, kernel: str) -> None:
    """The tokens are those of the layers' own kernels."""
    config = make_config(
        hidden_size=128, intermediate_size=64, num_attention_heads=3, num_key_value_heads=1, head_dim=64, num_local_experts=8,
        num_experts_per_tok=4, sliding_window=16, quantization="mxfp4",
    )  # fmt: skip
    prompts = random_prompts((5, 3), config.vocab_size)
    with hopper(seed=1):
        model = GptOss(config, RandomTensors(config, 0, torch.bfloat16), torch.bfloat16, dense_weights=dense_weights)
        found = {}
        for one_call in (False, None):
            model.one_call = one_call
            engine = Engine(model, PagedKVCache(config, 20, 16, torch.bfloat16), decode="static", decode_sizes=(1, 2))
            with listen() as listener:
                # The first sequence ends two passes before the second.
                completions = engine.generate([Request(prompt, 2 + 2 * index) for index, prompt in enumerate(prompts)])
            found[one_call] = [done.tokens for done in completions]
            kernels = {heard.kernel: heard.calls for heard in listener.heard() if heard.operator == OPERATOR}
            assert kernels == ({} if one_call is False else {kernel: 3})
    assert found[None] == found[False]
