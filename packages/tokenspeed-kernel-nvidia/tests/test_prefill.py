"""Full causal attention: of whole sequences, and of new tokens to a paged cache."""

from __future__ import annotations

import importlib.util
import math
import random

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel_nvidia.sm90.attention import prefill
from tokenspeed_kernel_nvidia.sm90.attention.prefill import Config

BF16, FP16 = torch.bfloat16, torch.float16
# Bytes of shared memory that a CTA of sm_90 may have, and registers of a multiprocessor.
SHARED_MEMORY, REGISTERS = 227 * 1024, 65536


# -- what it should be ---------------------------------------------------------------------------------------------------------


def reference(
    q: Tensor, k: Tensor, v: Tensor, q_lens: list[int], kv_lens: list[int], causal: bool = True, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp in float32, of sequences that lie one after another in q, and in k and v."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    outs, lses = [q.new_zeros(0, heads, q.shape[2], dtype=torch.float32)], [q.new_zeros(0, heads, dtype=torch.float32)]
    for new, keys, values in zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True):
        keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        scores = new.float().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        if causal:
            visible = torch.ones_like(scores[0], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
            scores = scores.masked_fill(~visible, -math.inf)
        sink = torch.full((heads,), -math.inf, device=q.device) if sinks is None else sinks.float()
        lse = torch.logaddexp(scores.logsumexp(2), sink[:, None])
        weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
        outs.append((weights @ values).transpose(0, 1))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def offsets(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens], device="cuda").cumsum(0).to(torch.int32)


def paged(rows: Tensor, lens: list[int], page_size: int, order: list[int]) -> tuple[Tensor, Tensor]:
    """A cache whose other slots hold NaN, and a table whose other entries name no page."""
    cache = torch.full((len(order), page_size, *rows.shape[1:]), math.nan, dtype=rows.dtype, device=rows.device)
    table = torch.full((len(lens), max(-(-length // page_size) for length in lens) + 1), 1 << 28, dtype=torch.int32)
    free = iter(order)
    for b, sequence in enumerate(rows.split(lens)):
        for j, page in enumerate(sequence.split(page_size)):
            if len(page):
                table[b, j] = next(free)
                cache[table[b, j], : len(page)] = page
    return cache, table.to(rows.device)


def random_inputs(
    tokens: int, kv_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and sinks."""
    draw = torch.Generator("cuda").manual_seed(seed)
    shapes = [(tokens, heads, head_dim), (kv_tokens, kv_heads, head_dim), (kv_tokens, kv_heads, head_dim), (heads,)]
    q, k, v, sinks = (torch.randn(*shape, generator=draw, device="cuda").to(dtype) for shape in shapes)
    return q, k, v, 2 * sinks


def assert_right(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (out, lse), (want, want_lse) = result, expected
    assert out.isfinite().all()
    assert (out.float() - want).norm() <= 5e-3 * want.norm()
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-5)


def check_prefill(lens: list[int], heads: int = 64, kv_heads: int = 8, head_dim: int = 64, dtype: torch.dtype = BF16) -> None:
    q, k, v, sinks = random_inputs(sum(lens), sum(lens), heads, kv_heads, head_dim, dtype)
    out = torch.full_like(q, math.nan)
    result = prefill.mha_prefill(q, k, v, offsets(lens), sinks=sinks, return_lse=True, out=out)
    assert result[0] is out
    assert_right(result, reference(q, k, v, lens, lens, sinks=sinks))


def check_extend(
    lens: list[int], kv_lens: list[int], page_size: int, heads: int = 64, kv_heads: int = 8, head_dim: int = 64, causal: bool = True
) -> None:
    q, k, v, sinks = random_inputs(sum(lens), sum(kv_lens), heads, kv_heads, head_dim, BF16)
    order = random.Random(0).sample(range(pages := sum(-(-n // page_size) for n in kv_lens) + 2), pages)
    (k_cache, table), (v_cache, _) = paged(k, kv_lens, page_size, order), paged(v, kv_lens, page_size, order)
    result = prefill.mha_extend_with_kvcache(
        q, offsets(lens), None, k_cache, v_cache, table, torch.tensor(kv_lens, dtype=torch.int32, device="cuda"), max(lens),
        table.shape[1] * page_size, causal, sinks=sinks, return_lse=True,
    )  # fmt: skip
    assert_right(result, reference(q, k, v, lens, kv_lens, causal, sinks))


# -- without a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [Config("bfloat16", head_dim, 8) for head_dim in (64, 128)], ids=str)
def test_a_cta_fits_a_multiprocessor(config: Config) -> None:
    rows = 2 * config.block_m + 2 * config.stages * config.block_n + config.block_m  # q, k and v, out
    assert 2 * config.head_dim * rows + 2048 <= SHARED_MEMORY
    consumers = config.block_m // 64
    assert 128 * (consumers * config.consumer_registers + config.producer_registers) <= REGISTERS
    assert config.consumer_registers % 8 == config.producer_registers % 8 == 0


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16, 64])
def test_a_tile_holds_whole_groups(group: int) -> None:
    config = Config("bfloat16", 64, group)
    assert 0 <= config.block_m - config.positions * group < group


def test_configurations_are_told_apart() -> None:
    configs = prefill.every_config()
    assert len(set(map(repr, configs))) == len(configs)


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("config", [Config("bfloat16", 64, 8), Config("float16", 128, 5, page_size=32)], ids=str)
def test_compiles_without_a_gpu(config: Config) -> None:
    prefill.prefill_program.compile(config)


# -- on a GPU ------------------------------------------------------------------------------------------------------------------


@pytest.mark.nvidia
@pytest.mark.parametrize("lens", [[1], [24], [25, 23], [1000], [3, 0, 130, 700, 1, 24, 0], [2048, 2048], [0, 0]], ids=str)
def test_prefill(lens: list[int]) -> None:
    check_prefill(lens)


@pytest.mark.nvidia
@pytest.mark.parametrize("lens", [[1], [31, 33], [1000], [3, 0, 130, 700, 1, 24, 0]], ids=str)
def test_prefill_of_wide_heads(lens: list[int]) -> None:
    check_prefill(lens, 32, 8, 128)


@pytest.mark.nvidia
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (4, 2), (6, 2), (5, 1), (14, 2), (16, 1), (64, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ratios_of_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    check_prefill([100, 333, 7], heads, kv_heads, head_dim, FP16)


@pytest.mark.nvidia
@pytest.mark.parametrize("seed", range(200))
def test_random_lengths(seed: int) -> None:
    draw = random.Random(seed)
    check_prefill([draw.randint(0, draw.choice((9, 90, 900))) for _ in range(draw.randint(1, 12))])


@pytest.mark.nvidia
def test_thousands_of_sequences() -> None:
    draw = random.Random(0)
    check_prefill([draw.randint(0, 9) for _ in range(3000)] + [700])


@pytest.mark.nvidia
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_grow_rescale_the_output(head_dim: int) -> None:
    """Keys ever longer, so that the maximum rises in most blocks."""
    lens = [900]
    q, k, v, sinks = random_inputs(900, 900, 16, 2, head_dim, BF16)
    q *= 4
    k *= torch.linspace(6, 0.2, 900, device="cuda")[:, None, None]
    result = prefill.mha_prefill(q, k, v, offsets(lens), sinks=sinks, return_lse=True)
    assert_right(result, reference(q, k, v, lens, lens, sinks=sinks))


@pytest.mark.nvidia
@pytest.mark.parametrize("page_size", prefill.PAGE_SIZES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_extend(page_size: int, head_dim: int) -> None:
    check_extend([5, 64, 0, 300, 1, 0], [70, 64, 33, 1000, 129, 0], page_size, 32, 4, head_dim)


@pytest.mark.nvidia
def test_extend_both_ways() -> None:
    check_extend([5, 64, 0, 300, 1], [70, 4, 33, 1000, 0], 64, causal=False)


@pytest.mark.nvidia
def test_a_sequence_does_not_see_the_nan_of_another() -> None:
    q, k, v, _ = random_inputs(300, 300, 8, 1, 64, BF16)
    for x in (q, k, v):
        x[100:200] = math.nan
    out = prefill.mha_prefill(q, k, v, offsets([100, 100, 100]))
    want, _ = reference(*(torch.cat([x[:100], x[200:]]) for x in (q, k, v)), [100, 100], [100, 100])
    got = torch.cat([out[:100], out[200:]])
    assert (got.float() - want).norm() <= 5e-3 * want.norm()


@pytest.mark.nvidia
def test_slices_of_one_tensor_and_default_options() -> None:
    qkv = torch.randn(333, 8 + 2 * 2, 64, device="cuda").to(BF16)
    q, k, v = qkv.split([8, 2, 2], 1)
    out = prefill.mha_prefill(q, k, v, offsets([300, 33]))
    want, _ = reference(q, k, v, [300, 33], [300, 33])
    assert (out.float() - want).norm() <= 5e-3 * want.norm()


@pytest.mark.nvidia
def test_no_sequences() -> None:
    q = torch.zeros(0, 8, 64, dtype=BF16, device="cuda")
    out, lse = prefill.mha_prefill(q, q, q, offsets([]), return_lse=True)
    assert out.shape == (0, 8, 64)
    assert lse.shape == (0, 8)


@pytest.mark.nvidia
def test_a_graph_follows_lengths_that_change() -> None:
    q, k, v, sinks = random_inputs(1000, 1000, 64, 8, 64, BF16)
    lens = offsets([500, 500])
    out = torch.empty_like(q)
    prefill.mha_prefill(q, k, v, lens, sinks=sinks, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.mha_prefill(q, k, v, lens, sinks=sinks, out=out)
    for changed in ([10, 990], [1000, 0], [333, 667]):
        lens.copy_(offsets(changed))
        graph.replay()
        want, _ = reference(q, k, v, changed, changed, sinks=sinks)
        assert (out.float() - want).norm() <= 5e-3 * want.norm()


@pytest.mark.nvidia
def test_streams_side_by_side() -> None:
    inputs = [random_inputs(700, 700, 64, 8, 64, BF16, seed) for seed in range(4)]
    lens = offsets([400, 300])
    wants = [reference(q, k, v, [400, 300], [400, 300])[0] for q, k, v, _ in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[] for _ in inputs]
    for _ in range(20):
        for stream, (q, k, v, _), results in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(prefill.mha_prefill(q, k, v, lens))
    torch.cuda.synchronize()
    for results, want in zip(outs, wants, strict=True):
        for out in results:
            assert (out.float() - want).norm() <= 5e-3 * want.norm()
