"""Tests models whose attention weights and output matrix are quantised when they are loaded."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpt_oss_models import random_prompts

from gpt_oss import benchmark
from gpt_oss.batch import Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.config import preset
from gpt_oss.divergence import divergence_of, probe
from gpt_oss.engine import Engine
from gpt_oss.loader import RandomTensors
from gpt_oss.model import GptOss, Linear
from gpt_oss.request import Request
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands

BF16 = torch.bfloat16
FORMATS = ("fp8", "mxfp4")
CONFIG = preset("tiny").with_layers(2)


def model_of(dense_weights: str = "none") -> GptOss:
    return GptOss(CONFIG, RandomTensors(CONFIG, 0, BF16, "cpu"), BF16, "cpu", 256, dense_weights=dense_weights)


def cache_of(pages: int = 32) -> PagedKVCache:
    return PagedKVCache(CONFIG, pages, 4, BF16, "cpu")


def projections(model: GptOss) -> list[Linear]:
    return [projection for layer in model.layers for projection in (layer.qkv, layer.output)] + [model.unembedding]


def dequantized(linear: Linear) -> Linear:
    """Returns the projection with its weight in bfloat16."""
    rows = torch.zeros(1, linear.scale.shape[0] * 32 if linear.weight.dtype == torch.uint8 else linear.weight.shape[0], dtype=BF16)
    weight = decode_operands("mm", rows, linear.weight, None, linear.scale)[1]
    return Linear(weight.to(BF16), linear.bias)


@pytest.mark.parametrize(("dense_weights", "most"), [("fp8", 2**-4), ("mxfp4", 0.5)])
def test_weights_are_rounded_to_the_format(dense_weights: str, most: float) -> None:
    own, other = model_of(), model_of(dense_weights)
    for linear, rounded in zip(projections(own), projections(other), strict=True):
        weight = dequantized(rounded).weight
        assert rounded.weight.dtype == (torch.float8_e4m3fn if dense_weights == "fp8" else torch.uint8)
        assert rounded.nbytes < 0.6 * linear.nbytes
        largest = linear.weight.abs().amax(0)
        assert float(((weight - linear.weight).abs() / largest).max()) <= most
        assert rounded.bias is linear.bias is None or torch.equal(rounded.bias, linear.bias)
    assert all(layer.router.scale is None and layer.router.weight.dtype == BF16 for layer in other.layers)


@pytest.mark.parametrize("dense_weights", FORMATS)
def test_logits_are_those_of_the_dequantized_weights(dense_weights: str) -> None:
    """Tests prefill and decode against a model whose bfloat16 weights have the same values, with the same experts."""
    model, wide = model_of(dense_weights), model_of()
    wide.layers = [
        dataclasses.replace(layer, qkv=dequantized(layer.qkv), output=dequantized(layer.output)) for layer in model.layers
    ]
    wide.unembedding = dequantized(model.unembedding)
    prompts = random_prompts((32, 32), CONFIG.vocab_size)
    logits, experts = probe(wide, cache_of(), prompts, 8)
    for length in (1, 16):
        found = divergence_of(probe(model, cache_of(), prompts, length, experts)[0], logits)
        assert found["largest_kl"] < 2e-3
    whole = model.forward(make_batch([Piece(prompts[0], 0, [])], None, model.device), None)
    assert whole.isfinite().all()


@pytest.mark.parametrize("dense_weights", FORMATS)
def test_an_engine_generates(dense_weights: str) -> None:
    """Tests an engine's prefills and decode passes in static buffers."""
    prompts = random_prompts((5, 17), CONFIG.vocab_size)
    made = [
        Engine(model_of(dense_weights), cache_of(), 16, 2, decode).generate([Request(prompt, 6) for prompt in prompts])
        for decode in ("static", "eager")
    ]
    assert [completion.tokens for completion in made[0]] == [completion.tokens for completion in made[1]]


def test_variants_are_compared() -> None:
    sizes = {"layers": 2, "batches": (), "contexts": (), "prefills": (), "page_size": 4}
    names = ("optimised", "fp8-dense", "mxfp4-dense")
    found = benchmark.run(benchmark.Workload("tiny", **sizes), BF16, "cpu", names)["variants"]
    own, fp8, mxfp4 = (found[name]["divergence"]["mean_kl_with_the_same_experts"] for name in names)
    assert own < fp8 < mxfp4 < 0.1


def test_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="dense_weights"):
        GptOss(CONFIG, RandomTensors(CONFIG, 0, torch.float32, "cpu"), torch.float32, "cpu", dense_weights="fp8")
    with pytest.raises(ValueError, match="dense_weights"):
        model_of("int4")
