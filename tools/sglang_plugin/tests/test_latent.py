"""Compares latent attention, with SGLang's layers and caches on a CPU, with plain attention over expanded keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")

from batches import CONTEXT, SLOTS, Padded, change, make_batch, padded, runner_of, serve_all_modes
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_sglang import parts, receipt
from tokenspeed_kernel_sglang.latent import LatentBackend

HEADS, NOPE, ROPE, VALUE, RANK, LAYERS = 4, 16, 8, 24, 32, 2
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Latent(torch.nn.Module):
    """The two attention layers of one of the model's layers, and its expansion of latents to keys and values."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(layer)
        self.attn_mqa = RadixAttention(HEADS, RANK + ROPE, 0.2, 1, layer, v_head_dim=RANK)
        self.attn_mha = RadixAttention(HEADS, NOPE + ROPE, 0.2, HEADS, layer, v_head_dim=VALUE)
        self.keys = torch.randn(HEADS, RANK, NOPE, generator=draw) / RANK**0.5
        self.values = torch.randn(HEADS, RANK, VALUE, generator=draw) / RANK**0.5


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Latent(layer) for layer in range(LAYERS))


def make_pool(page_size: int, dtype: torch.dtype) -> Any:
    return MLATokenToKVPool(
        SLOTS,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def make_runner(page_size: int = 16, cache: torch.dtype = BF16) -> Any:
    config = SimpleNamespace(context_len=CONTEXT, hf_text_config=SimpleNamespace())
    return runner_of(Model(), make_pool(page_size, cache), page_size, use_mla_backend=True, model_config=config)


class Requests:
    """Makes the calls of SGLang's models, holds the latents of all tokens so far, and computes plain attention over them."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.generator = torch.Generator().manual_seed(1)
        self.known: dict[tuple[int, int], torch.Tensor] = {}
        self.calls: list[str] = []

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(BF16)

    def step(self, backend: LatentBackend, batch: Any) -> None:
        """Runs all layers on a batch, and compares the outputs with plain attention."""
        for layer, one in enumerate(self.runner.model.layers):
            tokens = len(batch.out_cache_loc)
            q, rows = self.draw(tokens, HEADS, NOPE + ROPE), self.draw(tokens, RANK + ROPE)
            got = self.call(backend, batch, one, q, rows)
            assert got.shape == (tokens, HEADS * VALUE)
            expected = self.attend(batch, layer, one, q.float(), rows)
            torch.testing.assert_close(got, expected.flatten(1), rtol=3e-2, atol=3e-2)

    def call(self, backend: LatentBackend, batch: Any, one: Latent, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns a layer's output in float32. SGLang's models call one of two layers."""
        decode = batch.forward_mode.is_decode()
        if not decode and not any(batch.extend_prefix_lens.tolist()):
            self.calls.append("expanded")
            pool = self.runner.token_to_kv_pool
            pool.get_key_buffer(one.attn_mha.layer_id)[batch.out_cache_loc] = rows.unsqueeze(1).to(pool.dtype)
            k, v = self.expanded(one, rows.float())
            return backend.forward_extend(q, k.to(BF16), v.to(BF16), one.attn_mha, batch, save_kv_cache=False).float()
        self.calls.append("decode" if decode else "extend")
        absorbed = torch.einsum("thn,hrn->thr", q[..., :NOPE].float(), one.keys).to(BF16)
        full = torch.cat((absorbed, q[..., NOPE:]), -1).flatten(1)
        forward = backend.forward_decode if decode else backend.forward_extend
        latent = forward(full, rows.unsqueeze(1), rows[:, :RANK].unsqueeze(1), one.attn_mqa, batch)
        return torch.einsum("thr,hrv->thv", latent.view(-1, HEADS, RANK).float(), one.values).flatten(1)

    @staticmethod
    def expanded(one: Latent, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = rows.split([RANK, ROPE], 1)
        k = torch.cat((torch.einsum("tr,hrn->thn", latent, one.keys), rope.unsqueeze(1).expand(-1, HEADS, -1)), -1)
        return k, torch.einsum("tr,hrv->thv", latent, one.values)

    def attend(self, batch: Any, layer: int, one: Latent, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        outs, begin, dtype = [], 0, self.runner.token_to_kv_pool.dtype
        whole = self.calls[-1] == "expanded"  # whole prompts attend to keys that did not pass through the cache
        news = [1] * batch.batch_size if batch.forward_mode.is_decode() else batch.extend_seq_lens_cpu
        for request, length, new in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), news, strict=True):
            fresh = rows[begin : begin + new]
            old = self.known.get((request, layer), fresh[:0])[: length - new]
            self.known[request, layer] = known = torch.cat((old, fresh))
            k, v = self.expanded(one, known.float() if whole else known.to(dtype).float())
            scores = torch.einsum("qhd,khd->hqk", q[begin : begin + new], k) * 0.2
            hidden = torch.arange(length - new, length).unsqueeze(1) < torch.arange(length)
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(2), v))
            begin += new
        return torch.cat(outs)


@torch.inference_mode()
def test_a_batch_replays_the_graph_of_a_larger_batch() -> None:
    runner = make_runner(16, BF16)
    backend, requests = LatentBackend(runner, "tokenspeed"), Requests(runner)
    prefill = make_batch(runner, ForwardMode.EXTEND, [0, 0], [20, 3], [1, 3])
    backend.init_forward_metadata(prefill)
    requests.step(backend, prefill)
    backend.init_cuda_graph_state(4, 4)
    for length in (20, 21):
        batch = make_batch(runner, ForwardMode.DECODE, [length, length - 17], [1, 1], [1, 3])
        backend.init_forward_metadata_out_graph(padded(batch, 4))
        requests.step(Padded(backend, 4), batch)


@pytest.mark.parametrize(
    ("page_size", "cache"), [(16, BF16), (1, BF16), (16, FP8)], ids=["pages", "pages of one token", "fp8 cache"]
)
@torch.inference_mode()
def test_prefill_chunk_prefix_mixed_and_decode(page_size: int, cache: torch.dtype) -> None:
    runner = make_runner(page_size, cache)
    backend, requests = parts._factory("tokenspeed", lambda given: None)(runner), Requests(runner)
    assert isinstance(backend, LatentBackend)
    serve_all_modes(runner, backend, requests)
    assert requests.calls[::LAYERS] == ["expanded", "extend", "extend", "decode", "decode"]
    latent, expanded = receipt().rows
    assert (latent.layers, expanded.layers) == (LAYERS, LAYERS)
    assert latent.kind.startswith(f"latents of {RANK} and {ROPE}: {HEADS} heads, pages of {page_size}")
    assert expanded.kind == f"expanded latents: {HEADS} heads of {NOPE + ROPE} and {VALUE}"
    assert len(latent.kernels) == 3
    assert receipt().served("attention")


@torch.inference_mode()
def test_graphs_read_static_buffers() -> None:
    runner = make_runner()
    backend, requests = LatentBackend(runner, "tokenspeed"), Requests(runner)
    prefill = make_batch(runner, ForwardMode.EXTEND, [0, 0], [20, 3], [1, 3])
    backend.init_forward_metadata(prefill)
    requests.step(backend, prefill)
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(make_batch(runner, ForwardMode.DECODE, [0, 0], [1, 1], [0, 0]), in_capture=True)
    seen = backend.forward_metadata
    for length in (20, 21):
        batch = make_batch(runner, ForwardMode.DECODE, [length, length - 17], [1, 1], [1, 3])
        backend.init_forward_metadata_out_graph(batch)
        backend.forward_metadata = seen  # the captured graph reads the metadata of the capture
        requests.step(backend, batch)


REFUSED = {
    "server_args.speculative_algorithm": ("EAGLE", "speculative decoding"),
    "server_args.dcp_size": (2, "decode context parallelism"),
    "model_config.hf_text_config.index_topk": (2048, r"sparse attention \(an indexer\)"),
    "model.layers.0.attn_mqa.sliding_window_size": (7, "sliding windows of latent attention"),
    "model.layers.0.attn_mqa.logit_cap": (30.0, "soft caps of latent attention"),
    "model.layers.1.attn_mha.tp_k_head_num": (2, "4 heads with 2 KV heads beside latent attention"),
    "model.layers.1.attn_mqa.use_irope": (True, "iRoPE"),
    "token_to_kv_pool": (SimpleNamespace(), "latent attention in SimpleNamespace"),
    "dtype": (torch.int8, "mla_decode_with_kvcache"),
    "model": (torch.nn.Linear(2, 2), "no RadixAttention layers"),
}


@pytest.mark.parametrize("where", REFUSED)
def test_refused_by_name_and_sglangs_own_serves(where: str) -> None:
    runner = make_runner()
    value, message = REFUSED[where]
    change(runner, where, value)
    with pytest.raises(NotServedError, match=message):
        LatentBackend(runner, "tokenspeed")
    assert parts._factory("tokenspeed", lambda given: ("own", given))(runner) == ("own", runner)
    assert not receipt().served("attention")


def test_other_names_make_other_calls() -> None:
    """Under the name fa3, SGLang's models pass the parts of queries apart, and expect log-sum-exps."""
    with pytest.raises(NotServedError, match="latent attention under the name fa3, but under tokenspeed and triton"):
        LatentBackend(make_runner(), "fa3")


def test_it_has_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_SGLANG_MLA", "0")
    with pytest.raises(NotServedError, match="because TOKENSPEED_SGLANG_MLA is 0"):
        LatentBackend(make_runner(), "tokenspeed")


def test_a_packed_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    monkeypatch.setattr(MLATokenToKVPool, "get_key_buffer", lambda self, layer_id: self.kv_buffer[layer_id].clone())
    with pytest.raises(NotServedError, match="the packed cache of MLATokenToKVPool"):
        LatentBackend(runner, "tokenspeed")


def test_calls_that_it_does_not_serve_are_refused_by_name() -> None:
    runner = make_runner()
    backend, one = LatentBackend(runner, "tokenspeed"), runner.model.layers[0]
    batch = make_batch(runner, ForwardMode.EXTEND, [0], [3], [0])
    backend.init_forward_metadata(batch)
    q, k, v = (torch.zeros(3, HEADS, dim, dtype=BF16) for dim in (NOPE + ROPE, NOPE + ROPE, VALUE))
    with pytest.raises(ValueError, match="expanded keys of a cached prefix"):
        backend.forward_extend(q, k.repeat(2, 1, 1), v.repeat(2, 1, 1), one.attn_mha, batch, save_kv_cache=False)
    with pytest.raises(ValueError, match="a cache of expanded keys"):
        backend.forward_extend(q, k, v, one.attn_mha, batch)
    batch.mha_return_lse = True
    with pytest.raises(ValueError, match="a log-sum-exp"):
        backend.forward_extend(q, k, v, one.attn_mha, batch, save_kv_cache=False)
    with pytest.raises(ValueError, match="no kernel for topk_indices"):
        backend.forward_extend(q, k, v, one.attn_mqa, batch, topk_indices=torch.zeros(1))


def test_sglang_dispatches_unknown_names_as_triton() -> None:
    """The calls of SGLang's models follow from the backend's name."""
    handlers = pytest.importorskip("sglang.srt.models.deepseek_common.attention_backend_handler")
    registry = handlers.AttentionBackendRegistry
    assert registry.get_handler("tokenspeed") is registry.get_handler("triton") is handlers.handle_attention_triton
