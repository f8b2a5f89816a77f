"""Compares the attention backend, with SGLang's layers and caches on a CPU, with plain PyTorch attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")

from batches import CONTEXT, SLOTS, Padded, change, make_batch, padded, runner_of, serve_all_modes
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, get_req_to_token_pool, get_token_to_kv_pool
from sglang.srt.server_args import ServerArgs

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_sglang import names, parts, receipt
from tokenspeed_kernel_sglang.attention import TokenspeedBackend
from tokenspeed_kernel_sglang.serving import OPTIONS
from tokenspeed_kernel_sglang.settings import Settings

HEADS, KV_HEADS, DIM = 4, 2, 32
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Pool:
    """A KV cache of SGLang's layout. With ``shift``, layer 0 has its own slots, as in SGLang's pool of sliding windows. In both
    pools the first page is only for padding."""

    def __init__(self, page_size: int, dtype: torch.dtype, shift: int = 0) -> None:
        self.k, self.v = (torch.zeros(2, SLOTS + page_size, KV_HEADS, DIM, dtype=dtype) for _ in range(2))
        if shift:
            self.translate_loc_from_full_to_swa = lambda slots: torch.where(
                slots < page_size, slots, (slots - page_size + shift) % SLOTS + page_size
            )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v[layer_id]


class Model(torch.nn.Module):
    """A model of two layers. Layer 0 has a window of 8 tokens, which SGLang calls 7, because it does not count the token itself.
    Layer 1 has no window."""

    def __init__(self, sinks: bool, cap: float, **options: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            RadixAttention(HEADS, DIM, 0.2, KV_HEADS, layer, logit_cap=cap, sliding_window_size=window, **options)
            for layer, window in enumerate((7, -1))
        )
        if sinks:
            self.sinks = torch.nn.Parameter(torch.randn(HEADS, dtype=BF16, generator=torch.Generator().manual_seed(9)))


def make_runner(page_size: int = 16, cache: torch.dtype = BF16, sinks: bool = True, cap: float = 0.0, shift: int = 0) -> Any:
    return runner_of(Model(sinks, cap), Pool(page_size, cache, shift), page_size)


class Requests:
    """Holds the keys and values of all tokens so far, and computes plain attention over them."""

    def __init__(self, runner: Any, scale: float = 1.0) -> None:
        self.runner, self.scale = runner, scale
        self.generator = torch.Generator().manual_seed(1)
        self.known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def step(self, backend: TokenspeedBackend, batch: Any) -> None:
        """Runs both layers on a batch, and compares the outputs with plain attention."""
        for layer in self.runner.model.layers:
            tokens = len(batch.out_cache_loc)
            qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM, generator=self.generator).to(BF16)
            q, k, v = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
            if self.scale != 1.0:
                layer.k_scale = layer.v_scale = torch.tensor(self.scale)
            sinks = getattr(self.runner.model, "sinks", None)
            options = {} if sinks is None else {"sinks": sinks.data}
            k, v = (part.view(-1, KV_HEADS, DIM) for part in (k, v))
            forward = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
            out = forward(q, k, v, layer, batch, **options)
            expected = self.attend(batch, layer, q.view(-1, HEADS, DIM), k, v, sinks)
            assert out.shape == (tokens, HEADS * DIM)
            torch.testing.assert_close(out.float(), expected.flatten(1), rtol=2e-2, atol=2e-2)

    def attend(self, batch: Any, layer: Any, q: Any, k: Any, v: Any, sinks: Any) -> torch.Tensor:
        outs, begin = [], 0
        lengths = batch.seq_lens.tolist()
        for request, length, new in zip(batch.req_pool_indices.tolist(), lengths, self.new(batch), strict=True):
            rows = slice(begin, begin + new)
            begin += new
            key = (request, layer.layer_id)
            past = self.known.get(key, (k[:0], v[:0]))
            keys, values = (torch.cat((old[: length - new], fresh[rows])) for old, fresh in zip(past, (k, v), strict=True))
            self.known[key] = keys, values
            cached = [self.through_the_cache(part) for part in (keys, values)]
            outs.append(self.plain(q[rows].float(), *cached, layer, sinks))
        return torch.cat(outs)

    @staticmethod
    def new(batch: Any) -> list[int]:
        return [1] * batch.batch_size if batch.forward_mode.is_decode() else batch.extend_seq_lens_cpu

    def through_the_cache(self, part: torch.Tensor) -> torch.Tensor:
        dtype = self.runner.token_to_kv_pool.k.dtype
        return (part.float() / self.scale).to(dtype).float() * self.scale if dtype == FP8 else part.float()

    @staticmethod
    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, sinks: Any) -> torch.Tensor:
        group = HEADS // KV_HEADS
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
        if layer.logit_cap:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        at = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
        distance = at - torch.arange(len(k))
        hidden = distance < 0
        if layer.sliding_window_size >= 0:
            hidden = hidden | (distance > layer.sliding_window_size)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)), 2)
        weights = scores.softmax(2)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 1.0),
        ({"page_size": 1}, 1.0),
        ({"shift": 16}, 1.0),
        ({"sinks": False, "cap": 20.0}, 1.0),
        ({"cache": FP8}, 0.5),
    ],
    ids=["sinks and windows", "pages of one token", "two pools", "soft cap", "fp8 cache"],
)
@torch.inference_mode()
def test_prefill_chunk_prefix_mixed_and_decode(options: dict[str, Any], scale: float) -> None:
    runner = make_runner(**options)
    backend, requests = TokenspeedBackend(runner), Requests(runner, scale)
    serve_all_modes(runner, backend, requests)
    assert receipt().served("attention")
    assert sum(row.layers for row in receipt().rows) == 2


@torch.inference_mode()
def test_the_numbers_of_new_tokens_may_be_a_tensor() -> None:
    """SGLang's graphs of prefills pass a tensor, other batches a list."""
    runner = make_runner()
    backend, requests = TokenspeedBackend(runner), Requests(runner)
    batch = make_batch(runner, ForwardMode.EXTEND, [0, 0], [20, 3], [2, 0])
    new = batch.extend_seq_lens_cpu
    batch.extend_seq_lens_cpu = torch.tensor(new)
    backend.init_forward_metadata(batch)
    batch.extend_seq_lens_cpu = new
    requests.step(backend, batch)


@pytest.mark.parametrize("shift", [0, 16])
@torch.inference_mode()
def test_graphs_read_static_buffers(shift: int) -> None:
    runner = make_runner(shift=shift)
    backend, requests = TokenspeedBackend(runner), Requests(runner)
    prefill = make_batch(runner, ForwardMode.EXTEND, [0, 0], [20, 3], [1, 3])
    backend.init_forward_metadata(prefill)
    requests.step(backend, prefill)
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    captured = make_batch(runner, ForwardMode.DECODE, [0, 0], [1, 1], [0, 0])
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    seen = backend.forward_metadata
    assert seen is not None
    addresses = [part.data_ptr() for part in (seen.seq_lens, seen.page_table, seen.window_table)]
    for length in (20, 21):
        batch = make_batch(runner, ForwardMode.DECODE, [length, length - 17], [1, 1], [1, 3])
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
        found = backend.forward_metadata
        assert found is not None
        assert [part.data_ptr() for part in (found.seq_lens, found.page_table, found.window_table)] == addresses
        assert found.max_seq_len == CONTEXT  # the bound of a captured graph must be valid for every replay
        # The captured graph reads the metadata of the capture.
        backend.forward_metadata = seen
        requests.step(backend, batch)


@pytest.mark.parametrize("shift", [0, 16])
@torch.inference_mode()
def test_a_batch_replays_the_graph_of_a_larger_batch(shift: int) -> None:
    """SGLang pads the lengths and the requests of a replay, but not its cache slots."""
    runner = make_runner(shift=shift)
    backend, requests = TokenspeedBackend(runner), Requests(runner)
    prefill = make_batch(runner, ForwardMode.EXTEND, [0, 0, 0], [20, 3, 5], [1, 3, 2])
    backend.init_forward_metadata(prefill)
    requests.step(backend, prefill)
    backend.init_cuda_graph_state(5, 5)
    whole = make_batch(runner, ForwardMode.DECODE, [20, 3, 5], [1, 1, 1], [1, 3, 2])
    backend.init_forward_metadata_out_graph(whole)
    requests.step(backend, whole)
    kept = [runner.token_to_kv_pool.k[layer].clone() for layer in range(2)]
    for new in (2, 0):
        batch = make_batch(runner, ForwardMode.DECODE, [21, 4][:new], [1, 1][:new], [1, 3][:new]) if new else None
        backend.init_forward_metadata_out_graph(padded(batch, 5))
        if batch is not None:
            requests.step(Padded(backend, 5), batch)
    # Padding is not written to the slots of the last replay.
    last = whole.out_cache_loc[2]
    for layer, slot in ((1, last), (0, runner.token_to_kv_pool.translate_loc_from_full_to_swa(last) if shift else last)):
        assert torch.equal(runner.token_to_kv_pool.k[layer][slot], kept[layer][slot])


def test_graphs_of_prefills_are_refused() -> None:
    runner = make_runner()
    backend = TokenspeedBackend(runner)
    with pytest.raises(ValueError, match="prefill graph backend 'breakable'"):
        backend.init_forward_metadata_out_graph(make_batch(runner, ForwardMode.EXTEND, [0], [2], [0]))
    with pytest.raises(ValueError, match="batches of TARGET_VERIFY"):
        backend.init_forward_metadata(make_batch(runner, ForwardMode.TARGET_VERIFY, [0], [2], [0]))


def test_sglangs_layers_find_the_pools() -> None:
    """SGLang's models ask the backend for the pools, for example to choose between kernels of rotary embeddings."""
    runner = make_runner()
    with forward_context(ForwardContext(attn_backend=TokenspeedBackend(runner))):
        assert get_token_to_kv_pool() is runner.token_to_kv_pool
        assert get_req_to_token_pool() is runner.req_to_token_pool


@torch.inference_mode()
def test_an_idle_batch_has_no_metadata() -> None:
    runner = make_runner()
    backend = TokenspeedBackend(runner)
    backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE, seq_lens=torch.empty(0)))
    assert backend.forward_metadata is None


REFUSED = {
    "server_args.speculative_algorithm": ("EAGLE", "speculative decoding"),
    "server_args.dcp_size": (2, "decode context parallelism"),
    "server_args.enable_prefill_cp": (True, "prefill context parallelism"),
    "server_args.enable_deterministic_inference": (True, "deterministic inference"),
    "model_config.attention_chunk_size": (8192, "attention in chunks"),
    "model_config.is_encoder_decoder": (True, "encoders"),
    "model.layers.0.is_cross_attention": (True, "cross attention"),
    "model.layers.1.use_irope": (True, "iRoPE"),
    "model.layers.1.xai_temperature_len": (4, "a temperature by position"),
    "model.layers.1.pos_encoding_mode": ("ALIBI", "ALIBI"),
    "model.layers.1.head_dim": (31, "a cache of shape"),
    "dtype": (torch.int8, "mha_decode_with_kvcache"),
    "model": (torch.nn.Linear(2, 2), "no RadixAttention layers"),
}


@pytest.mark.parametrize("where", REFUSED)
def test_refused_by_name_and_sglangs_own_serves(where: str) -> None:
    runner = make_runner()
    value, message = REFUSED[where]
    change(runner, where, value)
    with pytest.raises(NotServedError, match=message):
        TokenspeedBackend(runner)
    assert parts._factory("tokenspeed", lambda given: ("own", given))(runner) == ("own", runner)
    assert message in str(receipt())
    assert not receipt().served("attention")


def test_the_options_that_are_checked_are_sglangs() -> None:
    assert set(OPTIONS) <= set(ServerArgs.__annotations__)


def test_the_layout_of_the_cache_is_checked() -> None:
    runner = make_runner()
    runner.token_to_kv_pool.k = runner.token_to_kv_pool.k.transpose(2, 3)
    with pytest.raises(NotServedError, match=r"expected \[slots, kv_heads, head_dim\]"):
        TokenspeedBackend(runner)


def test_a_cache_that_is_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's pools of packed formats return dequantised copies."""
    runner = make_runner()
    monkeypatch.setattr(Pool, "get_key_buffer", lambda self, layer_id: self.k[layer_id].clone())
    with pytest.raises(NotServedError, match="the packed cache of Pool"):
        TokenspeedBackend(runner)


def test_an_unknown_argument_is_refused() -> None:
    runner = make_runner()
    backend = TokenspeedBackend(runner)
    batch = make_batch(runner, ForwardMode.DECODE, [0], [1], [0])
    q = torch.zeros(1, HEADS * DIM, dtype=BF16)
    kv = torch.zeros(1, KV_HEADS, DIM, dtype=BF16)
    with pytest.raises(RuntimeError, match="init_forward_metadata must run"):
        backend.forward_decode(q, kv, kv, runner.model.layers[0], batch)
    backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="no kernel for q_rope"):
        backend.forward_decode(q, kv, kv, runner.model.layers[0], batch, q_rope=q)
    with pytest.raises(ValueError, match="found no layer"):  # the model has sinks
        backend.forward_decode(q, kv, kv, runner.model.layers[0], batch)


def test_registered_under_its_name_and_over_built_in_names(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    own = dict(ATTENTION_BACKENDS)
    monkeypatch.setattr(names, "replaced", set())
    off = dict.fromkeys(("experts", "norms", "activations", "rope"), False)
    try:
        for _ in range(2):
            parts.register_parts(Settings(attention_replaces=("fa3", "fa7"), **off))
        assert "fa7 is no attention backend of SGLang" in caplog.text
        assert set(ATTENTION_BACKENDS) - set(own) == {"tokenspeed"}
        assert {name for name, factory in own.items() if ATTENTION_BACKENDS[name] is not factory} == {"fa3"}
        assert isinstance(ATTENTION_BACKENDS["tokenspeed"](make_runner()), TokenspeedBackend)
        assert isinstance(ATTENTION_BACKENDS["fa3"](make_runner()), TokenspeedBackend)
    finally:
        ATTENTION_BACKENDS.clear()
        ATTENTION_BACKENDS.update(own)
