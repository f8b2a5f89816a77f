"""Tests our backend with vLLM's attention layer, metadata and forward context. Results are compared with plain PyTorch."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
core = pytest.importorskip("tokenspeed_kernel", reason="on a CPU the reference of the core attends")

from vllm.v1.attention.backend import AttentionCGSupport
from vllm_batches import HEAD_DIM, KV_HEADS, check, expected, make_batch, make_builder, make_layer, run

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_vllm.attention import builder as builders
from tokenspeed_kernel_vllm.attention import warmup
from tokenspeed_kernel_vllm.attention.backend import TokenspeedBackend
from tokenspeed_kernel_vllm.attention.warmup import Largest, batches

DECODE = ([37, 150, 16, 1], [1, 1, 1, 1])
MIXED = ([37, 16, 150, 33, 40], [1, 1, 20, 33, 1])
PREFILL = ([33, 1, 50], [33, 1, 50])


def package_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Replaces the attention package by a package with only some of the core's functions, like a wheel with few functions."""
    package = ModuleType("wheel_of_some")
    for name in names:
        setattr(package, name, getattr(core, name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setenv("TOKENSPEED_VLLM_PACKAGE", package.__name__)


@pytest.mark.parametrize("batch", [DECODE, MIXED, PREFILL], ids=["decode", "mixed", "prefill"])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("sinks", [True, False])
def test_a_step(vllm_config: Any, batch: tuple[list[int], list[int]], window: int | None, sinks: bool) -> None:
    """The layer writes the cache through slots, then runs attention. Padding rows are NaN and have no effect."""
    layer = make_layer(vllm_config, window=window, sinks=sinks)
    step = make_batch(layer, *batch, rows=96)
    metadata = make_builder(vllm_config, layer).build(0, step.common)
    check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, window))


@pytest.mark.parametrize("batch", [DECODE, MIXED, PREFILL], ids=["decode", "mixed", "prefill"])
def test_a_wheel_without_a_kernel_for_mixed_batches(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, batch: tuple[list[int], list[int]]
) -> None:
    """Decode requests come first in a batch, and are computed separately from the other requests."""
    package_of(monkeypatch, "mha_decode_with_kvcache", "mha_extend_with_kvcache", "store_kv_cache")
    layer = make_layer(vllm_config, window=32)
    assert layer.impl.serving.mixed is None
    step = make_batch(layer, *batch, rows=90)
    metadata = make_builder(vllm_config, layer).build(0, step.common)
    check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, 32))


@dataclasses.dataclass
class Ranked:
    """One of the core's functions, with another priority of its kernel."""

    function: Any
    priority: int

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    def explain(self, **arguments: Any) -> Any:
        said = self.function.explain(**arguments)
        return dataclasses.replace(said, chosen=dataclasses.replace(said.chosen, priority=self.priority))


@pytest.mark.parametrize(("halves", "divided"), [((12, 12), True), ((12, 4), False), ((4, 12), False), ((4, 4), False)])
def test_a_batch_is_divided_where_both_halves_have_better_kernels(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, halves: tuple[int, int], divided: bool
) -> None:
    names = ("mha_decode_with_kvcache", "mha_extend_with_kvcache", "mha_with_kvcache")
    package_of(monkeypatch, *names, "store_kv_cache")
    for name, priority in zip(names, (*halves, 4), strict=True):
        monkeypatch.setattr(sys.modules["wheel_of_some"], name, Ranked(getattr(core, name), priority))
    layer = make_layer(vllm_config, window=32)
    serving = layer.impl.serving
    assert (serving.mixed is None, serving.extend is None) == (divided, not divided)
    assert [name.removeprefix("reference_") for name in serving.kernels] == [
        names[0], names[1] if divided else names[2], "store_kv_cache"
    ]  # fmt: skip
    step = make_batch(layer, *MIXED, rows=90)
    metadata = make_builder(vllm_config, layer).build(0, step.common)
    check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, 32))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_an_fp8_cache(vllm_config: Any, dtype: str) -> None:
    vllm_config.cache_config.cache_dtype = dtype
    layer = make_layer(vllm_config, window=32)
    step = make_batch(layer, *MIXED)
    metadata = make_builder(vllm_config, layer).build(0, step.common)
    got = run(vllm_config, layer, metadata, step)
    assert layer.kv_cache.dtype == torch.uint8
    check(got[: step.tokens], expected(layer, step, 32))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_both_orders_of_the_cache_in_memory(vllm_config: Any, layout: str) -> None:
    from vllm.v1.attention.backends import utils

    if not hasattr(utils, "set_kv_cache_layout"):
        pytest.skip("this vLLM asks no backend for an order")
    utils.set_kv_cache_layout(layout)
    try:
        layer = make_layer(vllm_config)
        step = make_batch(layer, *MIXED)
        heads_first = layer.kv_cache.stride(1) > layer.kv_cache.stride(2)
        assert heads_first == (layout == "HND")
        metadata = make_builder(vllm_config, layer).build(0, step.common)
        check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, None))
    finally:
        utils.set_kv_cache_layout(None)


def test_what_pads_a_captured_batch(vllm_config: Any) -> None:
    """Padding requests decode together with the other requests. They write nothing to the cache, and their rows are zero."""
    layer = make_layer(vllm_config, sinks=False)
    step = make_batch(layer, *DECODE, pad_to=8)
    step.query[step.tokens :] = 1.0
    metadata = make_builder(vllm_config, layer).build(0, step.common)
    assert metadata.all_decode
    before = layer.kv_cache[0].clone()
    got = run(vllm_config, layer, metadata, step)
    check(got[: step.tokens], expected(layer, step, None))
    assert (got[step.tokens :] == 0).all()
    assert torch.equal(layer.kv_cache[0].view(torch.int16), before.view(torch.int16))


def test_a_captured_mixed_batch(vllm_config: Any) -> None:
    """Rows after the last request, and requests without tokens, have no effect."""
    layer = make_layer(vllm_config, window=32)
    builder = make_builder(vllm_config, layer)
    step = make_batch(layer, *MIXED, pad_to=8, pad_rows=5)
    step.query[step.tokens :] = torch.nan
    metadata = builder.build(0, step.common)
    assert not metadata.all_decode
    check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, 32))


def test_a_graph_of_mixed_batches_holds_the_kernel_for_them(vllm_config: Any) -> None:
    """vLLM captures a graph of mixed batches with one token per request. The maximum query length is then the number of all tokens,
    so the graph must contain the kernel for mixed batches.
    """
    layer = make_layer(vllm_config)
    step = make_batch(layer, *DECODE)
    common = dataclasses.replace(step.common, max_query_len=step.tokens)
    metadata = make_builder(vllm_config, layer).build_for_cudagraph_capture(common)
    assert metadata.num_decodes == 0
    check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, None))


def test_drafts_of_speculative_decoding(vllm_config: Any) -> None:
    """A batch of requests with one accepted token and two drafts each is one call of the decode kernel."""
    vllm_config.speculative_config = type("Drafts", (), {"num_speculative_tokens": 2, "parallel_drafting": False})()
    layer = make_layer(vllm_config, window=32)
    builder = make_builder(vllm_config, layer)
    assert builder.reorder_batch_threshold == 3
    assert builder.get_cudagraph_support(vllm_config, builder.kv_cache_spec) is AttentionCGSupport.ALWAYS
    for lens, decodes in (([3, 3, 3], 3), ([3, 3, 20], 0), ([2, 3, 1], 1)):
        step = make_batch(layer, [37, 70, 33], lens)
        metadata = builder.build(0, step.common)
        assert metadata.num_decodes == decodes
        check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, 32))


def test_metadata_is_vllms_own_memory(vllm_config: Any) -> None:
    """A captured graph reads vLLM's buffers, so its inputs must not be copies. Building metadata does not synchronise with the
    device."""
    layer = make_layer(vllm_config)
    step = make_batch(layer, *DECODE, pad_to=8)
    builder = make_builder(vllm_config, layer)
    for metadata in (builder.build_for_cudagraph_capture(step.common), builder.build(0, step.common)):
        assert metadata.seq_lens is step.common.seq_lens
        assert metadata.query_start_loc is step.common.query_start_loc
        assert metadata.block_table is step.common.block_table_tensor
        assert metadata.slot_mapping is step.common.slot_mapping
    on_a_device = {
        name: getattr(step.common, name).to("meta")
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    }
    mixed = make_batch(layer, *MIXED).common
    for common in (step.common, mixed):  # meta tensors: reading a value would fail
        builder.build(0, dataclasses.replace(common, **on_a_device))


def test_other_blocks_for_the_same_batch(vllm_config: Any) -> None:
    """vLLM builds metadata once for several groups of layers, and replaces the block table."""
    layer = make_layer(vllm_config)
    step = make_batch(layer, *MIXED)
    builder = make_builder(vllm_config, layer)
    elsewhere = dataclasses.replace(step.common, block_table_tensor=step.common.block_table_tensor.zero_())
    metadata = builder.build(0, elsewhere)
    other = make_batch(layer, *MIXED)
    updated = builder.update_block_table(metadata, other.common.block_table_tensor, other.common.slot_mapping)
    check(run(vllm_config, layer, updated, other)[: other.tokens], expected(layer, other, None))


def test_the_longest_sequence_of_a_captured_batch_fits_its_blocks(vllm_config: Any) -> None:
    layer = make_layer(vllm_config)
    step = make_batch(layer, *DECODE)
    common = dataclasses.replace(step.common, max_seq_len=10**6)
    metadata = make_builder(vllm_config, layer).build_for_cudagraph_capture(common)
    assert metadata.max_seq_len == common.block_table_tensor.shape[1] * 16
    check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, None))


def test_profiling_gives_zeros(vllm_config: Any) -> None:
    layer = make_layer(vllm_config)
    step = make_batch(layer, *DECODE)
    assert (run(vllm_config, layer, None, step) == 0).all()


def test_vllm_writes_the_cache_where_a_wheel_cannot(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an attention-only wheel, vLLM's own operator writes the cache. It receives a uint8 cache and vLLM's own arguments."""
    from vllm import _custom_ops

    calls: list[str] = []

    def write(key: Any, value: Any, k: Any, v: Any, slots: Any, dtype: str, k_scale: Any, v_scale: Any) -> None:
        calls.append(dtype)
        assert k.dtype == torch.uint8
        assert k.shape[2:] == (KV_HEADS, HEAD_DIM)
        fp8 = torch.float8_e4m3fn
        core.store_kv_cache(key[: len(slots)], value[: len(slots)], k.view(fp8), v.view(fp8), slots, k_scale, v_scale)

    monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", write)
    package_of(monkeypatch, "mha_decode_with_kvcache", "mha_with_kvcache")
    vllm_config.cache_config.cache_dtype = "fp8"
    layer = make_layer(vllm_config)
    step = make_batch(layer, *MIXED, rows=80)
    metadata = make_builder(vllm_config, layer).build(0, step.common)
    check(run(vllm_config, layer, metadata, step)[: step.tokens], expected(layer, step, None))
    assert calls == ["fp8"]


# -- before the first request ---------------------------------------------------------------------------------------------------


def test_sizes_before_the_first_request() -> None:
    """The warm-up uses batches of all powers of two, and of sizes that are not divisible by 16, with short and long sequences. No
    request is longer than the model allows."""
    largest = Largest(requests=5, tokens=100, length=48)
    found = list(batches(torch.device("cpu"), 16, largest))
    decoding = [(batch.num_decodes, batch.max_seq_len) for batch in found if batch.all_decode]
    assert decoding == [(requests, length) for requests in (1, 2, 4, 5) for length in (16, 24, 48)]
    others = [(len(batch.seq_lens), batch.max_query_len) for batch in found if not batch.all_decode]
    assert others == [(1, 2), (1, 4), (1, 8), (1, 15), (1, 16), (1, 31), (1, 32), (2, 31), (2, 32), (3, 33)]
    for batch in found:
        assert batch.block_table.shape[1] * 16 >= batch.max_seq_len
        assert batch.query_start_loc[-1] == batch.num_actual_tokens == len(batch.slot_mapping)
    drafts = Largest(requests=2, tokens=16, length=48, decode_query_len=3)
    assert {batch.num_decode_tokens for batch in batches(torch.device("cpu"), 16, drafts) if batch.all_decode} == {3, 6}
    assert min(batch.max_query_len for batch in batches(torch.device("cpu"), 16, drafts) if not batch.all_decode) == 4


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("names", [("mha_with_kvcache",), ("mha_extend_with_kvcache",)])
def test_layers_attend_before_the_first_request(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, names: tuple[str, ...]
) -> None:
    """The warm-up calls each function once for all layers of the same kind, and all results are finite."""
    monkeypatch.setattr(warmup, "_warmed", set())
    package_of(monkeypatch, "mha_decode_with_kvcache", "store_kv_cache", *names)
    vllm_config.cache_config.cache_dtype = dtype
    windows = (32, None, 32)
    layers = [make_layer(vllm_config, window=window, name=f"model.layers.{i}.attn") for i, window in enumerate(windows)]
    called: list[tuple[str, int, int]] = []
    parts = {
        "mha_decode_with_kvcache": "decode",
        "store_kv_cache": "store",
        "mha_with_kvcache": "mixed",
        "mha_extend_with_kvcache": "extend",
    }
    for name in ("mha_decode_with_kvcache", "store_kv_cache", *names):
        function = getattr(core, name)

        def call(*args: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            called.append((name, options.get("window_left", 0), len(args[0])))
            result = function(*args, **options)
            assert result is None or result.isfinite().all()
            return result

        for layer in layers:
            object.__setattr__(layer.impl.serving, parts[name], call)
    largest = Largest(requests=2, tokens=20, length=40)
    warmup.warm_layers(layers, 16, largest)
    once = len(called)
    assert {(name, window) for name, window, _ in called} == {
        ("store_kv_cache", 0), *((name, window) for name in ("mha_decode_with_kvcache", *names) for window in (31, -1))
    }  # fmt: skip
    assert max(tokens for _, _, tokens in called) == 20
    warmup.warm_layers(layers, 16, largest)
    assert len(called) == once


def test_a_builder_lets_its_layers_attend(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder warms up its own layers, with its block size and the configuration's largest batch. On a CPU nothing is warmed
    up.
    """
    called: list[Any] = []
    monkeypatch.setattr(
        builders, "warm_layers", lambda layers, block_size, largest: called.append((list(layers), block_size, largest))
    )
    layer = make_layer(vllm_config)
    make_layer(vllm_config, name="model.layers.1.attn")  # belongs to another builder
    make_builder(vllm_config, layer)
    assert not called
    vllm_config.model_config = type("Model", (), {"max_model_len": 4096})()
    spec = layer.get_kv_cache_spec(vllm_config)
    for wanted in ("0", "1"):
        monkeypatch.setenv("TOKENSPEED_VLLM_WARMUP", wanted)
        TokenspeedBackend.get_builder_cls()(spec, [layer.layer_name], vllm_config, torch.device("meta"))
    scheduler = vllm_config.scheduler_config
    largest = Largest(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, 4096, 1)
    assert called == [([layer], 16, largest)]


# -- rejected -------------------------------------------------------------------------------------------------------------------


def test_a_layer_that_no_kernel_serves(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package_of(monkeypatch, "mha_decode_with_kvcache")
    with pytest.raises(NotServedError, match=r"has no mha_with_kvcache\n.*no mha_extend_with"):
        make_layer(vllm_config)


def test_a_wheel_says_why_its_kernels_do_not_serve(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message contains the reason of each kernel, in the words of `explain`."""
    wheel = pytest.importorskip("tokenspeed_kernel_amd")
    monkeypatch.setenv("TOKENSPEED_VLLM_PACKAGE", wheel.__name__)
    with pytest.raises(NotServedError, match=f"{wheel.__name__}: .*mha_decode_with_kvcache(.|\n)*needs"):
        make_layer(vllm_config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": [0.5] * 8}, "no kernel for alibi_slopes"),
        ({"attn_type": "encoder_only"}, "not of type encoder_only"),
    ],
)
def test_a_layer_that_is_refused(vllm_config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layer(vllm_config, **options)


def test_a_cache_of_another_dtype(vllm_config: Any) -> None:
    vllm_config.cache_config.cache_dtype = "float16"
    with pytest.raises(ValueError, match=r"caches .*bfloat16 or fp8, not of float16"):
        make_layer(vllm_config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("causal", False),
        ("causal", torch.tensor([True])),
        ("dcp_local_seq_lens", torch.ones(4)),
        ("mm_req_doc_ranges", {0: [(0, 3)]}),
        ("rswa_prefix_lens", torch.ones(4)),
        ("encoder_seq_lens", torch.ones(4)),
    ],
)
def test_a_batch_that_is_refused(vllm_config: Any, field: str, value: Any) -> None:
    layer = make_layer(vllm_config)
    step = make_batch(layer, *DECODE)
    builder = make_builder(vllm_config, layer)
    with pytest.raises(ValueError, match=field):
        builder.build(0, dataclasses.replace(step.common, **{field: value}))


def test_output_is_not_quantised(vllm_config: Any) -> None:
    layer = make_layer(vllm_config)
    step = make_batch(layer, *DECODE)
    metadata = make_builder(vllm_config, layer).build(0, step.common)
    out = torch.empty_like(step.query)
    with pytest.raises(NotImplementedError, match="quantise"):
        layer.impl.forward(layer, step.query, step.key, step.value, layer.kv_cache, metadata, out, output_scale=torch.ones(1))


# -- capabilities ---------------------------------------------------------------------------------------------------------------


def reasons(**options: Any) -> list[str]:
    from vllm.platforms.interface import DeviceCapability

    asked: dict[str, Any] = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "has_sliding_window": True,
    }
    found: list[str] = TokenspeedBackend.validate_configuration(**asked | options)
    return found


def test_what_is_valid() -> None:
    assert not reasons()
    assert not reasons(kv_cache_dtype="fp8", block_size=128, dtype=torch.float16)
    assert reasons(dtype=torch.float32) == ["dtype not supported"]
    assert reasons(kv_cache_dtype="fp8_e5m2") == ["kv_cache_dtype not supported"]
    assert reasons(head_size=72) == ["head_size not supported"]
    assert reasons(use_mla=True) == ["MLA not supported"]
    assert reasons(use_non_causal=True) == ["non-causal attention not supported"]
    assert reasons(use_mm_prefix=True) == ["partial multimodal token full attention not supported"]
    assert reasons(use_batch_invariant=True) == ["batch invariance not supported"]
    assert reasons(attn_type="encoder") == ["attention type encoder not supported"]


@pytest.mark.parametrize(("mixed", "support"), [(True, AttentionCGSupport.ALWAYS), (False, AttentionCGSupport.UNIFORM_BATCH)])
def test_what_is_captured_whole(vllm_config: Any, mixed: bool, support: AttentionCGSupport) -> None:
    """Mixed batches are captured whole if one kernel handles them. Two kernels would need counts of the batch on the host."""
    layer = make_layer(vllm_config)
    if not mixed:
        layer.impl.serving = dataclasses.replace(layer.impl.serving, mixed=None)
    builder = make_builder(vllm_config, layer)
    assert builder.get_cudagraph_support(vllm_config, builder.kv_cache_spec) is support
