"""Tests SGLang's slot for kernels of a whole decode step, which releases from 0.5.23 have: GPT-OSS's layers in one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")
slot = pytest.importorskip("sglang.kernels.plugin_kernels.nvidia.spec", reason="SGLang has the slot from 0.5.23 on")

from batches import CONTEXT, SLOTS, make_batch, padded, runner_of
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from test_experts import EXPERTS, HIDDEN, TOP_K, load, make_layer, plain

from tokenspeed_kernel_sglang import megakernel, names, parts, receipt, register_decode_step
from tokenspeed_kernel_sglang.experts import GptOssExperts
from tokenspeed_kernel_sglang.paged import PagedBackend

HEADS, KV_HEADS, DIM, PAGE, VOCAB, EPS, WINDOW = 4, 2, 16, 16, 50, 1e-5, 3
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option is set, and pools are made as the registered hook makes them."""
    monkeypatch.setattr(megakernel, "megakernel_enabled", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a PyTorch for CPUs cannot say it
    own = MHATokenToKVPool._create_buffers_normal
    monkeypatch.setattr(MHATokenToKVPool, "_create_buffers_normal", lambda pool: megakernel.stacked_caches(own, pool))


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def linear(features: int, inputs: int, seed: int) -> Any:
    weight = draw(features, inputs, seed=seed, scale=inputs**-0.5)
    return SimpleNamespace(weight=weight, bias=draw(features, seed=seed + 1, scale=0.1))


def angles() -> torch.Tensor:
    steps = torch.arange(CONTEXT).unsqueeze(1) * 100.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    return torch.cat((steps.cos(), steps.sin()), 1)


def make_model(layers: int = 2) -> Any:
    """Returns a model with the attributes of SGLang's `GptOssForCausalLM` that the step reads. Layer 0 has a window."""
    made = []
    for index in range(layers):
        seed = 100 * index
        experts = make_layer()
        experts.quant_method = GptOssExperts(experts)
        dense = load(experts, experts.quant_method)
        experts.quant_method.process_weights_after_loading(experts)
        attention = SimpleNamespace(
            qkv_proj=linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, seed + 1),
            o_proj=linear(HIDDEN, HEADS * DIM, seed + 3),
            sinks=draw(HEADS, seed=seed + 5),
            rotary_emb=SimpleNamespace(cos_sin_cache=angles()),
            attn=SimpleNamespace(sliding_window_size=-1 if index else WINDOW),
        )
        norms = [SimpleNamespace(weight=1 + draw(HIDDEN, seed=seed + at, scale=0.1)) for at in (6, 7)]
        mlp = SimpleNamespace(router=linear(EXPERTS, HIDDEN, seed + 8), experts=experts)
        made.append(
            SimpleNamespace(self_attn=attention, mlp=mlp, input_layernorm=norms[0], post_attention_layernorm=norms[1], dense=dense)
        )
    table = draw(VOCAB, HIDDEN, seed=7)
    inner = SimpleNamespace(layers=made, embed_tokens=lambda ids: table[ids], norm=lambda x: rms(x.float()).to(BF16))
    return SimpleNamespace(
        model=inner,
        table=table,
        lm_head=draw(VOCAB, HIDDEN, seed=8),
        logits_processor=lambda ids, hidden, head, batch, aux: hidden.float() @ head.float().t(),
        capture_aux_hidden_states=False,
    )


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """Returns the logits of a sequence's last token, by plain PyTorch in float32."""
    x, table = model.table[ids].float(), angles()[: len(ids)].unsqueeze(1)
    cos, sin = table[..., : DIM // 2], table[..., DIM // 2 :]

    def rotated(part: torch.Tensor) -> torch.Tensor:
        a, b = part.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    for layer in model.model.layers:
        attention = layer.self_attn
        qkv = rms(x) * layer.input_layernorm.weight.float() @ attention.qkv_proj.weight.float().t()
        qkv = qkv + attention.qkv_proj.bias.float()
        q, k, v = qkv.view(len(ids), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k, v = rotated(q), rotated(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        distance = torch.arange(len(ids)).unsqueeze(1) - torch.arange(len(ids))
        window = attention.attn.sliding_window_size
        scores = scores.masked_fill((distance < 0) | ((distance > window) if window >= 0 else torch.tensor(False)), -math.inf)
        sinks = attention.sinks.float().view(-1, 1, 1).expand(-1, len(ids), 1)
        weights = torch.cat((scores, sinks), 2).softmax(2)[..., :-1]
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        x = x + attended @ attention.o_proj.weight.float().t() + attention.o_proj.bias.float()
        normed = rms(x) * layer.post_attention_layernorm.weight.float()
        logits, chosen = (normed @ layer.mlp.router.weight.float().t() + layer.mlp.router.bias.float()).topk(TOP_K)
        x = x + plain(normed, chosen, logits.softmax(1), layer.dense)
    return rms(x[-1]) @ model.lm_head.float().t()


class Backend(PagedBackend):
    def run(self, *_: Any) -> torch.Tensor:
        raise AssertionError("the layers' own attention ran")


def make_pool(**options: Any) -> Any:
    given = {"size": SLOTS, "page_size": PAGE, "dtype": BF16, "head_num": KV_HEADS, "head_dim": DIM, "layer_num": 2}
    return MHATokenToKVPool(**given, device="cpu", enable_memory_saver=False, enable_alt_stream=False, **options)


def own_forward(*_: Any, **__: Any) -> str:
    return "SGLang's own"


def build(model: Any, monkeypatch: pytest.MonkeyPatch, solution: str = "cutedsl") -> tuple[Any, Callable[..., Any]]:
    """Returns the built step, and the forward that SGLang installs."""
    monkeypatch.setattr(megakernel, "kernel_for", lambda function, arguments: SimpleNamespace(solution=solution, name="a_kernel"))
    state = binding.MegakernelBinding(model=model)
    context = slot.BuildContext(widths=(1, 2, 3, 4), tokens_per_request=1, deadline_s=60.0, binding=state)
    built = megakernel.SPEC.build(model, SimpleNamespace(rms_norm_eps=EPS), context)
    return built, binding._Dispatch(built=built, original=own_forward, binding=state).wrapped()


@torch.inference_mode()
@pytest.mark.parametrize("graph", [False, True])
def test_decode_steps_have_the_logits_of_plain_pytorch(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of other lengths, token by token. With ``graph``, the batch is padded to three rows, as before a replay."""
    model = make_model()
    built, forward = build(model, monkeypatch)
    assert (built.widths, built.summary()) == ((1, 2, 3, 4), "2 layers by a_kernel")
    runner = runner_of(model, make_pool(), PAGE)
    backend = Backend(runner)
    backend.init_cuda_graph_state(4, 4)
    prompts = {2: [3, 14, 15, 9, 26, 5, 35], 0: [8, 9, 7]}
    with forward_context(ForwardContext(backend)):
        for step in range(7):
            which = [request for request, ids in prompts.items() if step < len(ids)]
            batch = make_batch(runner, ForwardMode.DECODE, [step] * len(which), [1] * len(which), which)
            ids = torch.tensor([prompts[request][step] for request in which])
            if graph:
                batch = padded(batch, 3)
                backend.init_forward_metadata_out_graph(batch)
                # SGLang's own buffers have id 0 and slot 0 for padding.
                more = 3 - len(which)
                ids, batch.out_cache_loc = (torch.nn.functional.pad(each, (0, more)) for each in (ids, batch.out_cache_loc))
            else:
                backend.init_forward_metadata(batch)
            found = forward(ids, None, batch)
            for row, request in enumerate(which):
                torch.testing.assert_close(found[row], expected(model, prompts[request][: step + 1]), rtol=0.05, atol=0.1)


def test_other_steps_run_sglangs_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    _, forward = build(model, monkeypatch)
    runner = runner_of(model, make_pool(), PAGE)
    backend = Backend(runner)
    batch = make_batch(runner, ForwardMode.DECODE, [0], [1], [0])
    backend.init_forward_metadata(batch)
    ids = torch.tensor([1])
    with torch.inference_mode(), forward_context(ForwardContext(backend)):
        assert isinstance(forward(ids, None, batch), torch.Tensor)
        assert forward(ids, None, batch, input_embeds=torch.zeros(1, HIDDEN)) == "SGLang's own"
        five = SimpleNamespace(**{**vars(batch), "batch_size": 5})
        assert forward(ids, None, five) == "SGLang's own"
        prefill = make_batch(runner, ForwardMode.EXTEND, [0], [1], [0])
        assert forward(ids, None, prefill) == "SGLang's own"
        # Another pool, whose layers are apart from each other.
        backend.token_to_kv_pool = make_pool()
        backend.token_to_kv_pool.k_buffer = [each.clone() for each in backend.token_to_kv_pool.k_buffer]
        assert forward(ids, None, batch) == "SGLang's own"
        backend.token_to_kv_pool, backend.forward_metadata = runner.token_to_kv_pool, SimpleNamespace()  # another backend's
        assert forward(ids, None, batch) == "SGLang's own"


def test_the_pool_is_laid_out_as_sglangs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_pool()
    monkeypatch.setattr(megakernel, "megakernel_enabled", lambda: False)
    own = make_pool()
    for mine, theirs in zip((*ours.k_buffer, *ours.v_buffer), (*own.k_buffer, *own.v_buffer), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    apart = [[v.data_ptr() - k.data_ptr() for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)] for pool in (ours, own)]
    assert apart[0] == apart[1]
    keys = megakernel.stacked(ours.k_buffer)
    assert keys is not None
    assert keys.shape == (2, SLOTS + PAGE, KV_HEADS, DIM)
    keys[1, 5] = 3.0
    assert ours.k_buffer[1][5].eq(3).all()
    assert not ours.k_buffer[0].any()
    assert megakernel.stacked(own.k_buffer) is None


def test_no_kernel_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    built, _ = build(make_model(), monkeypatch, solution="composed")
    assert built.widths == ()
    assert "no kernel runs all layers in one launch: a_kernel calls several" in str(receipt())


def options(**changes: Any) -> Any:
    """SGLang's resolved options, as its check reads them."""
    off = dict.fromkeys(("enable_dp_attention", "enable_eplb", "enable_prefill_cp", "enable_lora"), False)
    off |= dict.fromkeys(("enable_single_batch_overlap", "lora_paths", "enable_return_routed_experts", "enable_lmcache"), False)
    off |= dict.fromkeys(("enable_return_indexer_topk", "enable_hierarchical_cache", "enable_flexkv", "enable_hisparse"), False)
    off |= dict.fromkeys(("disaggregation_decode_enable_offload_kvcache", "enable_memory_saver", "enable_torch_compile"), False)
    off |= dict.fromkeys(
        ("enable_two_batch_overlap", "enable_weights_cpu_backup", "enable_deterministic_inference", "rl_on_policy_target"), False
    )
    one = dict.fromkeys(("pp_size", "nnodes", "attn_dp_size", "ep_size", "attn_cp_size", "dcp_size", "tp_size"), 1)
    given = {
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
        "cpu_offload_gb": 0,
        "offload_group_size": 0,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full")),
        "watchdog_timeout": 300,
        "disable_hybrid_swa_memory": True,
        "kv_cache_dtype": "auto",
        "page_size": 64,
        "attention_backend": "fa3",
        "decode_attention_backend": None,
        "prefill_attention_backend": None,
    }
    return SimpleNamespace(**{**off, **one, **given, **changes})


REFUSED = {
    "tp_size 2": {"tp_size": 2},
    "disable_hybrid_swa_memory False": {"disable_hybrid_swa_memory": False},
    "page_size 1": {"page_size": 1},
    "kv_cache_dtype 'fp8_e4m3'": {"kv_cache_dtype": "fp8_e4m3"},
    "speculative decoding is in use": {"speculative_algorithm": "EAGLE"},
    "attention backend 'triton' is not this plugin's": {"attention_backend": "triton"},
    "different attention backends, 'fa3' and 'triton'": {"prefill_attention_backend": "fa3", "decode_attention_backend": "triton"},
}


def test_the_slot_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    monkeypatch.setattr(slot, "_REGISTRY", {})
    monkeypatch.setattr(parts, "_hooked", set())
    monkeypatch.setattr(names, "replaced", {"fa3"})
    registry = pytest.importorskip("sglang.srt.plugins.hook_registry").HookRegistry
    monkeypatch.setattr(registry, "register", lambda target, hook, kind: registered.update({target: (hook, kind.value)}))
    for _ in range(2):
        register_decode_step()
    assert registered == {parts.POOL: (megakernel.stacked_caches, "around")}
    config = SimpleNamespace(architectures=["GptOssForCausalLM"])
    spec, reasons = binding.megakernel_disable_reasons(cfg=options(), hf_config=config, isa="sm_90")
    assert (spec, reasons) == (megakernel.SPEC, [])
    _, (reason,) = binding.megakernel_disable_reasons(cfg=options(), hf_config=config, isa="sm_100")
    assert "supports ['sm_90'], not sm_100" in reason
    for reason, changes in REFUSED.items():
        _, reasons = binding.megakernel_disable_reasons(cfg=options(**changes), hf_config=config, isa="sm_90")
        assert any(reason in each for each in reasons), (reason, reasons)


def test_experts_on_sglangs_own_method_are_a_reason() -> None:
    model = make_model()
    assert megakernel.SPEC.model_disable_reasons(model, None) == []
    model.model.layers[1].mlp.experts.quant_method = object()
    (reason,) = megakernel.SPEC.model_disable_reasons(model, None)
    assert "the experts run on GptOssExperts, object" in reason
