"""Tests a vendor's wheel without the core: the wheel's kernels run on the emulator, in vLLM's layer with vLLM's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
pytest.importorskip("triton", reason="needs Triton, which compiles the kernels")
wheel = pytest.importorskip("tokenspeed_kernel_amd", reason="needs a wheel that an emulator can run")
emulator = pytest.importorskip("gfx950_emulator", reason="needs the emulator")

from vllm import _custom_ops
from vllm_batches import BLOCK, check, expected, make_batch, make_builder, make_layer, run

from tokenspeed_kernel_base.ops.kvcache.slots import store_slots
from tokenspeed_kernel_vllm.attention import warmup


@pytest.fixture
def alone(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Selects the wheel's functions for attention. vLLM's own cache-write operator needs a GPU, so PyTorch replaces it."""

    def write(key: Any, value: Any, k: Any, v: Any, slots: Any, dtype: str, k_scale: Any, v_scale: Any) -> None:
        narrow = torch.float8_e4m3fn if dtype.startswith("fp8") else k.dtype
        for cache, new, scale in ((k, key, k_scale), (v, value, v_scale)):
            store_slots(cache.view(narrow), new[: len(slots)], slots, scale)

    monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", write)
    monkeypatch.setenv("TOKENSPEED_VLLM_PACKAGE", wheel.__name__)
    with emulator.emulated_gfx950():
        yield vllm_config


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("window", [None, 32])
def test_a_step(alone: Any, window: int | None, cache_dtype: str) -> None:
    alone.cache_config.cache_dtype = cache_dtype
    layer = make_layer(alone, window=window)
    assert layer.impl.serving.package == wheel.__name__
    assert layer.impl.serving.store is None
    builder = make_builder(alone, layer)
    for seq_lens, query_lens in (([37, 70], [1, 1]), ([37, 2 * BLOCK + 1, 33], [1, 9, 33])):
        step = make_batch(layer, seq_lens, query_lens, rows=48)
        metadata = builder.build(0, step.common)
        check(run(alone, layer, metadata, step)[: step.tokens], expected(layer, step, window))


def test_what_is_called_before_the_first_request(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the warm-up, all requests share a block, and no token is written. The emulator would report an out-of-bounds access."""
    monkeypatch.setattr(warmup, "_warmed", set())
    layers = [make_layer(alone, window=window, name=f"model.layers.{i}.attn") for i, window in enumerate((None, 32))]
    written = []
    forward = type(layers[0].impl).forward

    def attend(self: Any, *args: Any) -> torch.Tensor:
        out: torch.Tensor = forward(self, *args)
        written.append(bool(out.isfinite().all()))
        return out

    monkeypatch.setattr(type(layers[0].impl), "forward", attend)
    warmup.warm_layers(layers, BLOCK, warmup.Largest(requests=2, tokens=20, length=40))
    assert len(written) == 2 * (2 * 3 + 6)
    assert all(written)
