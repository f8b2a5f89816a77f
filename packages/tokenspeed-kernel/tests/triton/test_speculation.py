"""Tests the kernels of speculative decoding beyond the shared cases: sizes, layouts, depths of trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel.workbench.numerics.verify import default_device
from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.attention._inputs import paged
from tokenspeed_kernel_base.ops.speculation import build_draft_tree as building
from tokenspeed_kernel_base.ops.speculation import verify_draft_probs as sampling
from tokenspeed_kernel_base.ops.speculation import verify_draft_tokens as following

DEVICE = default_device()


def _same(operator: Any, arguments: dict[str, Any]) -> None:
    got = operator(**arguments, solution="triton")
    wanted = operator(**arguments, solution="reference")
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 3, 17, 64, 130])
def test_tokens_are_followed_in_trees_of_any_size(nodes: int, dtype: torch.dtype) -> None:
    for tree in (True, False):
        arguments = following._inputs(7, nodes, 2, tree, dtype)(Draw(DEVICE, nodes))
        _same(tk.verify_draft_tokens, arguments)
        _same(tk.verify_draft_tokens, {name: x.t().contiguous().t() for name, x in arguments.items()})


@pytest.mark.parametrize(("nodes", "vocab"), [(1, 100), (2, 5000), (7, 1), (7, 1025), (20, 2)])
def test_probabilities_in_trees_and_vocabularies_of_any_size(nodes: int, vocab: int) -> None:
    for tree in (True, False):
        for warmth in (0.3, 5.0):
            arguments = sampling._inputs(6, nodes, vocab, tree, warmth)(Draw(DEVICE, nodes * vocab))
            _same(tk.verify_draft_probs, arguments)
    arguments["target_probs"] = torch.cat((arguments["target_probs"],) * 2, dim=1)[:, ::2].clone()
    arguments["draft_probs"] = arguments["draft_probs"].transpose(0, 1).contiguous().transpose(0, 1)
    arguments["draft_tokens"] = arguments["draft_tokens"].t().contiguous().t()
    _same(tk.verify_draft_probs, arguments)


@pytest.mark.parametrize(("seed", "offset"), [(0, 2**31), (-1, -7), (2**63 - 1, 0), (-(2**63), 2**33 + 5)])
def test_random_numbers_of_any_seed_and_offset(seed: int, offset: int) -> None:
    arguments = sampling._inputs(9, 5, 300)(Draw(DEVICE))
    arguments["seed"], arguments["offset"] = torch.full_like(arguments["seed"], seed), torch.full_like(arguments["offset"], offset)
    _same(tk.verify_draft_probs, arguments)


def test_many_children_of_a_node_are_rejected() -> None:
    """A node has five drafts that the target cannot emit, then one that it can. After each rejection, the kernel computes the row
    sum again."""
    arguments = sampling._inputs(8, 9, 2500, warmth=1.0)(Draw(DEVICE))
    arguments["parents"][:] = torch.tensor([-1, 0, 0, 0, 0, 0, 0, 6, 6], device=DEVICE)
    arguments["draft_tokens"][:, 1:6] = torch.arange(5, device=DEVICE)
    target = arguments["target_probs"]
    target[..., :5] = 0
    target /= target.sum(-1, keepdim=True)
    _, path, _ = tk.verify_draft_probs(**arguments, solution="triton")
    assert not torch.isin(path, torch.arange(1, 6, device=DEVICE)).any()
    assert (path[:, 1] == 6).any()
    _same(tk.verify_draft_probs, arguments)


@pytest.mark.parametrize("nodes", [1, 2, 33, 64])
@pytest.mark.parametrize(("branching", "depth"), [(1, 1), (1, 70), (4, 3), (12, 9)])
def test_trees_of_any_shape(branching: int, depth: int, nodes: int) -> None:
    arguments = building._inputs(5, branching, depth, nodes)(Draw(DEVICE, depth))
    _same(tk.build_draft_tree, arguments)
    strided = {n: x.t().contiguous().t() if isinstance(x, torch.Tensor) and x.dim() == 2 else x for n, x in arguments.items()}
    _same(tk.build_draft_tree, strided)


@pytest.mark.parametrize(("heads", "page_size"), [((1, 1), 5), ((8, 1), 64)], ids=str)
def test_attention_of_trees_beside_others(heads: tuple[int, int], page_size: int) -> None:
    """Tests trees, single tokens and prefills in one batch, with and without windows, with and without split-KV."""
    kv_lens, q_lens = [400, 9, 64, 33, 130], [64, 9, 17, 1, 70]
    options: dict[str, Any] = {"trees": True, "stale": True, "running_sums": False, "return_lse": True}
    for window_left, freed in ((-1, False), (63, True)):
        window = {"window_left": window_left, "freed": freed, "stale": not freed}
        recipe = paged(kv_lens, q_lens, *heads, 32, page_size=page_size, dtype=torch.float16, **{**options, **window})
        arguments = recipe(Draw(DEVICE))
        arguments.pop("cu_seqlens_kv", None)
        got, lse = tk.mha_with_kvcache(**arguments, solution="triton")
        wanted, wanted_lse = tk.mha_with_kvcache(**arguments, solution="reference")
        torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("nodes", [2, 64])
def test_latent_attention_of_trees(nodes: int) -> None:
    sizes: dict[str, Any] = {"heads": 2, "head_dim": 80, "kv_lora_rank": 64, "softmax_scale": 0.1, "page_size": 16}
    for window_left in (-1, 63):
        recipe = paged([300, 90, 64], **sizes, max_seqlen_q=nodes, window_left=window_left, trees=True, return_lse=True)
        arguments = recipe(Draw(DEVICE))
        got, lse = tk.mla_decode_with_kvcache(**arguments, solution="triton")
        wanted, wanted_lse = tk.mla_decode_with_kvcache(**arguments, solution="reference")
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-3)
