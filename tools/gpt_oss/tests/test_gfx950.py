"""Tests that on an emulated MI355X, the AMD wheel's kernels run attention and experts, and the logits agree with the reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpt_oss_models import random_prompts

from gpt_oss.cache import PagedKVCache
from gpt_oss.check import compare_with_reference
from gpt_oss.config import SLIDING, Config, preset
from gpt_oss.engine import Engine
from gpt_oss.kernels import listen
from gpt_oss.loader import RandomTensors
from gpt_oss.model import GptOss
from gpt_oss.request import Request
from gpt_oss.sampling import Sampling
from tokenspeed_kernel import compile_policy

NEEDED = ("triton", "gfx950_emulator", "tokenspeed_kernel_amd")


@pytest.fixture
def gfx950() -> Iterator[None]:
    """Loads the AMD wheel, and runs kernels on the emulator, with its sanitizer."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    from gfx950_emulator import emulated_gfx950

    with emulated_gfx950():
        yield


def served(config: Config, prompts: list[list[int]], max_tokens: int, temperature: float = 0.8) -> dict[str, set[str]]:
    """Generates tokens, compares logits with the reference's, and returns the kernels of each operator.

    ``temperature`` is the temperature of every second request; the other requests are greedy.
    """
    dtype = torch.bfloat16
    source = RandomTensors(config, 0, dtype)
    model = GptOss(config, source, dtype, max_positions=64)
    cache = PagedKVCache(config, 16, 16, dtype, "cpu")
    samplings = [Sampling(temperature * (number % 2), seed=number) for number in range(len(prompts))]
    requests = [Request(p, max_tokens, s, keep_logits=True) for p, s in zip(prompts, samplings, strict=True)]
    engine = Engine(model, cache, prefill_tokens=24, max_sequences=len(prompts))
    with listen() as listener:
        completions = engine.generate(requests)
    compiled = len(engine.compilations)
    with compile_policy("forbid"):  # runs the first pass again
        engine.generate([replace(request, max_tokens=1) for request in requests])
    assert len(engine.compilations) == compiled
    agreement = compare_with_reference(config, source, completions, dtype, "cpu")
    assert agreement.agrees, agreement
    kernels: dict[str, set[str]] = {}
    for heard in listener.heard():
        kernels.setdefault(heard.operator, set()).add(heard.kernel)
    return kernels


def check_kernels(kernels: dict[str, set[str]]) -> None:
    """Checks that the AMD wheel's kernels run attention and experts, and that no reference runs."""
    for operator, names in kernels.items():
        assert not [name for name in names if name.startswith("reference_")], operator
        if operator.startswith("attention.mha") or operator == "moe.moe_apply":
            assert all(name.startswith("gluon_") for name in names), operator


def test_two_layers(gfx950: None) -> None:
    """Runs prefill, extend and decode passes of the tiny model with one layer of each kind. Its heads are as wide as GPT-OSS's."""
    config = preset("tiny")
    config = replace(config, head_dim=64, num_attention_heads=4, num_key_value_heads=1, layer_types=config.layer_types[:2])
    kernels = served(config, random_prompts((27, 3), config.vocab_size), 2, temperature=0.0)
    check_kernels(kernels)
    assert {"attention.mha_prefill", "attention.mha_extend_with_kvcache", "attention.mha_decode_with_kvcache"} <= set(kernels)


@pytest.mark.slow
def test_the_tiny_model(gfx950: None) -> None:
    """Runs the unmodified tiny model. Its head_dim is 32, so a portable kernel runs attention."""
    kernels = served(preset("tiny"), random_prompts((27, 3, 9), 256), 4)
    assert kernels["moe.moe_apply"] == {"gluon_moe_apply_mxfp4"}
    assert not [name for names in kernels.values() for name in names if name.startswith("reference_")]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(3,), (19, 2)])
def test_a_layer_of_120b(gfx950: None, lengths: tuple[int, ...]) -> None:
    """Runs one full-size layer with 128 experts and a small vocabulary, with the kernels for few tokens and the kernels for sorted
    tokens."""
    config = replace(preset("gpt-oss-120b").with_layers(1), vocab_size=512, layer_types=(SLIDING,), eos_token_ids=(0,))
    kernels = served(config, random_prompts(lengths, config.vocab_size), 2)
    check_kernels(kernels)
