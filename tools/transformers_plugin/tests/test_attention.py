"""Compares logits and greedy tokens of transformers' own models with those of eager attention, for all kinds of padding and
caches."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers: `nox -s transformers` installs it")
pytest.importorskip("tokenspeed_kernel_transformers", reason="needs the plugin: `nox -s transformers` installs it")

import transformers
from tiny_models import generate, make, padding, prompts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import create_masks_for_generate

import tokenspeed_kernel_transformers
from tokenspeed_kernel import watch_calls
from tokenspeed_kernel_transformers import attention, masks
from tokenspeed_kernel_transformers.attention import _pages, attention_forward
from tokenspeed_kernel_transformers.batch import unpack

# The name of a model's cache argument. transformers 5.23 has changed this name.
CACHE = "cache" if "cache" in inspect.signature(create_masks_for_generate).parameters else "past_key_values"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are smaller than usual, because prompts are short."""
    monkeypatch.setattr(masks, "PAGE_SIZES", (4, 2))
    tokenspeed_kernel_transformers.register()
    masks._say.cache_clear()


def compare(name: str, kind: str, cache: str) -> None:
    model, ids = make(name), prompts()
    mask = padding(kind, ids)
    expected = generate(model, ids, mask, cache)
    model.set_attn_implementation("tokenspeed")
    got = generate(model, ids, mask, cache)
    torch.testing.assert_close(got.logits, expected.logits, atol=2e-5, rtol=2e-5)
    assert torch.equal(got.tokens, expected.tokens)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gemma2", "gemma3", "mistral", "deepseek_v3"])
def test_generate(name: str, kind: str, cache: str, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed_kernel_transformers"):
        compare(name, kind, cache)
    assert not [record.message for record in caplog.records if "transformers' own" in record.message]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_padding_between_tokens_falls_back(name: str, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed_kernel_transformers"):
        compare(name, "middle", "dynamic")
    assert "padding between a row's tokens" in caplog.text


def operators_of(run: Callable[[], object]) -> set[str]:
    """Runs a function, and returns the operators that it calls."""
    seen: set[str] = set()

    def watcher(call: Any, run: Any) -> Any:
        seen.add(call.mode)
        return run

    with watch_calls(watcher):
        run()
    return seen


def logits_of(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, attention_mask=mask, **options).logits


def both(name: str, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of a model with our attention, and with eager attention."""
    model = make(name)
    expected = logits_of(model, *arguments, **options)
    model.set_attn_implementation("tokenspeed")
    return logits_of(model, *arguments, **options), expected


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_decode_steps_read_large_pages(name: str, kind: str, cache: str) -> None:
    """Layers with a window do, too, because all keys that their caches keep are in the window. Layers of a step share one table."""
    model, ids = make(name), prompts()
    model.set_attn_implementation("tokenspeed")
    calls: list[Any] = []

    def watcher(call: Any, run: Any) -> Any:
        if call.mode == "mha_decode_with_kvcache":
            calls.append(call.tensors)
        return run

    with watch_calls(watcher):
        generate(model, ids, padding(kind, ids), cache)
    assert {tensors["k_cache"].shape[1] for tensors in calls} == {4}
    steps = 4
    assert len(calls) == steps * len(model.model.layers)
    assert len({id(tensors["page_table"]) for tensors in calls}) == steps * (2 if name == "gpt_oss" else 1)


class Counter(TorchDispatchMode):
    """Counts PyTorch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_of_a_decode_step_runs_few_operators(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """In eager mode, the host limits a decode step. The mask function and the first layer make what all layers share."""
    monkeypatch.setattr(attention, "OPS", SimpleNamespace(mha_decode_with_kvcache=lambda q, **options: q))
    layer = SimpleNamespace(config=SimpleNamespace(num_key_value_heads=2))
    query, key = torch.zeros(rows, 4, 1, 16), torch.zeros(rows, 2, 9, 16)
    with torch.inference_mode():
        mask = masks.attention_mask(rows, 1, 9, 8, attention_mask=torch.ones(rows, 9, dtype=torch.bool), config=layer.config)
        attention_forward(layer, query, key, key, mask)
        with Counter() as counter:
            attention_forward(layer, query, key, key, mask)
    assert sorted(counter.names) == ["aten.as_strided.default"] * 2 + ["aten.squeeze.dim", "aten.view.default"]


def test_rows_with_few_tokens_before_the_end_have_small_pages() -> None:
    """A page of four tokens that begins in the last three tokens of a row would end outside of the cache."""
    known = torch.ones(2, 9, dtype=torch.bool)
    with torch.inference_mode():
        for first, size in ((0, 4), (5, 4), (6, 2), (7, 2), (8, 1)):
            known[1] = torch.arange(9) >= first
            batch = unpack(masks.attention_mask(2, 1, 9, 8, attention_mask=known))
            assert batch is not None
            assert batch.page_size == size
            lengths, pages = batch.pages_of(2, 0)
            assert lengths.tolist() == [9, 9 - first]
            slots = (pages.unsqueeze(2) + torch.arange(size)).flatten(1)
            for row, begin in enumerate((0, first)):
                assert sorted(slots[row, : lengths[row]].tolist()) == list(range(9 * row + begin, 9 * row + 9))
            assert slots.amax() < 18


def test_operators() -> None:
    model, ids = make("llama"), prompts()
    model.set_attn_implementation("tokenspeed")
    cache = transformers.DynamicCache(config=model.config)
    assert operators_of(lambda: logits_of(model, ids[:, :6], **{CACHE: cache})) == {"mha_prefill"}
    assert operators_of(lambda: logits_of(model, ids[:, 6:7], **{CACHE: cache})) == {"mha_decode_with_kvcache"}
    assert operators_of(lambda: logits_of(model, ids[:, 7:], **{CACHE: cache})) == {"mha_with_kvcache"}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_prompts_in_chunks(name: str, kind: str, static: bool) -> None:
    ids = prompts()
    mask = padding(kind, ids)
    expected = logits_of(make(name), ids, mask)
    model = make(name)
    model.set_attn_implementation("tokenspeed")
    cache = transformers.DynamicCache(config=model.config)
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    got = [
        logits_of(
            model,
            ids[:, begin:end],
            None if mask is None else mask[:, :end],
            position_ids=positions(mask, begin, end),
            **{CACHE: cache},
        )
        for begin, end in ((0, 4), (4, 8), (8, 9), (9, 11))
    ]
    known = torch.ones_like(ids) if mask is None else mask
    expected = logits_of(make(name), ids, mask, position_ids=positions(mask, 0, 11))
    torch.testing.assert_close(torch.cat(got, 1)[known.bool()], expected[known.bool()], atol=2e-5, rtol=2e-5)


def positions(mask: torch.Tensor | None, begin: int, end: int) -> torch.Tensor | None:
    """Returns the positions of the tokens ``begin`` to ``end``, counted from each row's first token that is not padding."""
    return None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3"])
def test_padding_on_the_right(name: str) -> None:
    ids = prompts()
    mask = padding("right", ids)
    assert mask is not None
    got, expected = both(name, ids, mask)
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 11), (3, 1), (1, 1)])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_without_a_cache(name: str, rows: int, tokens: int) -> None:
    got, expected = both(name, prompts(rows, tokens), use_cache=False)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_cache_of_a_strided_view_is_copied() -> None:
    states = torch.randn(2, 3, 5, 8).transpose(1, 2).contiguous().transpose(1, 2)
    pages = _pages(states, 1)
    assert torch.equal(pages[15 + 4, 0], states[1, :, 4])
    same = torch.randn(2, 3, 5, 8)
    assert _pages(same, 1).untyped_storage().data_ptr() == same.untyped_storage().data_ptr()
    assert torch.equal(_pages(same, 1)[15 + 2, 0], same[1, :, 2])


def test_layers_with_other_heads_than_the_configuration() -> None:
    model, ids = make("llama"), prompts()
    expected = generate(model, ids)
    model.set_attn_implementation("tokenspeed")
    model.config.num_key_value_heads = 1  # the mask function reads this wrong number, and the layers must correct the pages
    layers = {layer.self_attn: layer.self_attn.num_key_value_groups for layer in model.model.layers}
    assert set(layers.values()) == {2}
    torch.testing.assert_close(generate(model, ids).logits, expected.logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_mask_of_the_caller_falls_back(name: str) -> None:
    ids = prompts()
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None].expand(3, 1, -1, -1).clone()
    mask[:, :, 5:, 2] = False
    model = make(name)
    model.set_attn_implementation("tokenspeed")
    assert not operators_of(lambda: logits_of(model, ids, mask))
    model.set_attn_implementation("sdpa" if name == "llama" else "eager")
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = logits_of(model, ids, additive)
    model.set_attn_implementation("tokenspeed")
    torch.testing.assert_close(logits_of(model, ids, mask), expected, atol=2e-5, rtol=2e-5)


def test_gradients_fall_back(caplog: Any) -> None:
    model, ids = make("llama"), prompts()
    expected = model(ids).logits
    model.set_attn_implementation("tokenspeed")
    with caplog.at_level(logging.INFO, "tokenspeed_kernel_transformers"):
        got = model(ids).logits
    got.sum().backward()
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    assert "gradients are enabled" in caplog.text


def test_patterns_of_other_functions_fall_back(caplog: Any) -> None:
    def chunks(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & (kv // 4 == q // 4)

    with caplog.at_level(logging.INFO, "tokenspeed_kernel_transformers"), torch.inference_mode():
        for size in (None, 4):
            mask = masks.attention_mask(1, 6, 6, mask_function=chunks, local_size=size)
            assert unpack(mask) is None
            assert mask.dtype == torch.bool
            assert mask[0, 0, 5].tolist() == [False, False, False, False, True, True]
    assert "not plainly causal" in caplog.text
    assert "not a plain sliding window" in caplog.text


def test_position_bias_is_refused() -> None:
    with torch.inference_mode():
        mask = masks.attention_mask(1, 2, 2)
    states = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match="position_bias"):
        attention_forward(torch.nn.Module(), states, states, states, mask, position_bias=states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_narrow_floats(name: str, dtype: torch.dtype) -> None:
    """The error relative to float32 must be at most 1.5 times the error of eager attention."""
    ids = prompts()
    wide, model = make(name), make(name, dtype)
    wide.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    expected = logits_of(wide, ids)
    eager = (logits_of(model, ids).float() - expected).abs().mean()
    model.set_attn_implementation("tokenspeed")
    assert (logits_of(model, ids).float() - expected).abs().mean() < 1.5 * eager


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_compiled_as_one_graph(name: str) -> None:
    """Decode steps with a static cache must compile as one graph. As in `generate`, masks are made outside of the graph."""
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.append(sum("mha_decode_with_kvcache" in str(node.target) for node in graph.graph.nodes))
        return graph

    model, ids = make(name), prompts()
    expected = generate(model, ids, cache="static")
    model.set_attn_implementation("tokenspeed")
    model.set_experts_implementation("batched_mm")  # transformers' eager experts cannot be compiled
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = [logits_of(model, ids, **{CACHE: cache})[:, -1:].argmax(-1)]
    for _ in range(3):
        with torch.inference_mode():
            described = create_masks_for_generate(model.config, torch.empty(3, 1, 32), None, **{CACHE: cache})
        found.append(logits_of(compiled, found[-1], described, **{CACHE: cache}).argmax(-1))
    assert torch.equal(torch.cat(found, 1), expected.tokens[:, :4])
    assert set(calls) == {len(model.model.layers)}
