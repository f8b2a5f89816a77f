"""Tests decode passes that run all layers in one call of `decoder_layers`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpt_oss_models import MODES, YARN, make_config, random_prompts, tensors_of

import tokenspeed_kernel
from gpt_oss import Engine, GptOss, PagedKVCache, Request, Sampling, benchmark
from gpt_oss.batch import Piece, make_batch
from gpt_oss.config import alternating
from gpt_oss.divergence import probe
from gpt_oss.kernels import listen, preferring
from tokenspeed_kernel import KernelRegistry, register_kernel

OPERATOR = "decoder.decoder_layers"
FUSED = "fused_for_tests"


def make_model(**options: Any) -> GptOss:
    config = make_config(rope=YARN, layer_types=alternating(3))
    return GptOss(config, tensors_of(config), torch.float32, **options)


def make_cache(model: GptOss) -> PagedKVCache:
    return PagedKVCache(model.config, 40, 4, torch.float32)


@pytest.fixture
def fused() -> Iterator[str]:
    """Registers a kernel that runs the body for one token, as if it were fused."""
    body = tokenspeed_kernel.get_operator("decoder_layers").body
    register_kernel(
        "decoder",
        "decoder_layers",
        name=FUSED,
        solution="testing",
        signatures=None,
        traits={
            "tokens": 1,
            "sinks": True,
            "sliding_window": True,
            "attention_bias": any,
            "router_bias": any,
            "bias": any,
            "w13_interleaved": any,
            "swiglu_limit": any,
            "swiglu_alpha_beta": any,
        },
    )(body)
    yield FUSED
    KernelRegistry.get().unregister(FUSED)


def tokens_of(model: GptOss, **mode: Any) -> list[list[int]]:
    prompts = random_prompts((3, 5, 9), model.config.vocab_size)
    requests = [Request(prompt, 4 + 3 * number, Sampling(0.7, seed=number)) for number, prompt in enumerate(prompts)]
    return [done.tokens for done in Engine(model, make_cache(model), **mode).generate(requests)]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens(mode: str) -> None:
    model = make_model()
    wanted = tokens_of(model, **MODES[mode])
    model.one_call = True
    with listen() as listener:
        assert tokens_of(model, **MODES[mode]) == wanted
    assert OPERATOR in {heard.operator for heard in listener.heard()}


@pytest.mark.parametrize("one_call", [False, True])
def test_logits_have_equal_bits(one_call: bool) -> None:
    """The caches have equal contents, too."""
    found = []
    for choice in (False, one_call):
        model = make_model()
        model.one_call = choice
        cache = make_cache(model)
        model.forward(make_batch([Piece([1, 2, 3, 4, 5], pages=(3, 7))], cache, "cpu"), cache)
        logits = model.forward(make_batch([Piece([6], 5, (3, 7))], cache, "cpu"), cache)
        found.append((logits, cache.all_k.clone(), cache.all_v.clone()))
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


def called(model: GptOss) -> dict[tuple[str, str], int]:
    """Returns the operators and kernels of a decode pass of one token and of a pass of two, with the number of calls."""
    cache = make_cache(model)
    with listen() as listener:
        for pieces in ([Piece([6], 2, (1,))], [Piece([6], 2, (1,)), Piece([7], 3, (2,))]):
            model.forward(make_batch(pieces, cache, "cpu"), cache)
    return {(heard.operator, heard.kernel): heard.calls for heard in listener.heard()}


def test_without_a_fused_kernel_the_operators_are_called_one_by_one() -> None:
    found = called(make_model())
    assert OPERATOR not in {operator for operator, _ in found}
    assert sum(calls for (operator, _), calls in found.items() if operator == "moe.moe_apply") == 6


def test_a_fused_kernel_runs_the_passes_that_it_serves(fused: str) -> None:
    found = called(make_model())
    assert {kernel: calls for (operator, kernel), calls in found.items() if operator == OPERATOR} == {fused: 1}


def test_a_preference_turns_it_off(fused: str) -> None:
    with preferring(["composed_decoder_layers"]):
        assert OPERATOR not in {operator for operator, _ in called(make_model())}


def test_other_caches(fused: str) -> None:
    config = make_config(rope=YARN)
    model = GptOss(config, tensors_of(config, torch.bfloat16), torch.bfloat16)
    cache = PagedKVCache(config, 40, 4, torch.float8_e4m3fn)
    with listen() as listener:
        model.forward(make_batch([Piece([6], 2, (1,))], cache, "cpu"), cache)
    assert OPERATOR not in {heard.operator for heard in listener.heard()}


@pytest.mark.parametrize("dense_weights", ["fp8", "mxfp4"])
def test_quantised_weights_of_attention(dense_weights: str) -> None:
    """The logits have equal bits in one call of all layers and in the layers' own calls."""
    config, found = make_config(rope=YARN), []
    for one_call in (False, True):
        model = GptOss(config, tensors_of(config, torch.bfloat16), torch.bfloat16, dense_weights=dense_weights)
        model.one_call = one_call
        cache = PagedKVCache(config, 40, 4, torch.bfloat16)
        with listen() as listener:
            model.forward(make_batch([Piece([1, 2, 3, 4, 5], pages=(3, 7))], cache, "cpu"), cache)
            found.append(model.forward(make_batch([Piece([6], 5, (3, 7))], cache, "cpu"), cache))
        assert (OPERATOR in {heard.operator for heard in listener.heard()}) == one_call
    assert torch.equal(*found)


@pytest.mark.parametrize("dense_weights", ["none", "fp8"])
def test_the_layers_share_all_weights(dense_weights: str) -> None:
    """Asserts that `DecoderWeights` holds the layers' tensors, not copies."""
    config = make_config()
    model = GptOss(config, tensors_of(config, torch.bfloat16), torch.bfloat16, dense_weights=dense_weights)
    for layer, whole in zip(model.layers, model._decoder_weights.layers, strict=True):
        pairs = [(layer.qkv.weight, whole.qkv), (layer.output.weight, whole.projection), (layer.router.weight, whole.router)]
        if dense_weights != "none":
            pairs += [(layer.qkv.scale, whole.qkv_scale), (layer.output.scale, whole.projection_scale)]
        assert all(mine.data_ptr() == its.data_ptr() for mine, its in pairs)
        assert whole.experts is layer.experts


def test_the_probe_sees_every_choice_of_experts() -> None:
    model = make_model()
    model.one_call = True
    _, chosen = probe(model, make_cache(model), random_prompts((8, 8), model.config.vocab_size), 1)
    assert [tuple(ids.shape) for ids in chosen] == [(2, 4, 2)] * 3
    assert model.one_call is True


def test_the_benchmark_counts_experts(fused: str) -> None:
    """The experts of a decode pass are counted, although the pass calls no operator of experts."""
    sizes = {"layers": 2, "batches": (1,), "contexts": (8,), "decode_steps": 2, "prefills": (), "page_size": 4}
    (found,) = benchmark.run(benchmark.Workload("tiny", **sizes), torch.float32, "cpu", ("optimised",))["variants"].values()
    (row,) = found["decode"]
    assert row["experts_a_layer"] == 4
