"""A model that ranks share gives the tokens of one that is whole."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gpt_oss_models import MODES, YARN, make_config, random_prompts, tensors_of

from gpt_oss.cache import PagedKVCache
from gpt_oss.config import alternating
from gpt_oss.engine import Engine
from gpt_oss.loader import expected_tensors
from gpt_oss.model import GptOss
from gpt_oss.request import Completion, Request
from gpt_oss.tensor_parallel import SharedSource, TensorParallelGptOss, share_of, shared_slices
from tokenspeed_kernel import ProcessGroup
from tokenspeed_kernel.workbench.worlds import run_world

# Features and vocabulary that two cannot divide: the second rank's share is filled up.
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"layer_types": alternating(3), "rope": YARN, "intermediate_size": 25},
    "mxfp4, tied": {"quantization": "mxfp4", "hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True},
}
PROMPTS = random_prompts((3, 29, 8, 17, 1), 97)


@pytest.fixture(autouse=True)
def _processes_find_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


def completions(model: GptOss, **mode: Any) -> list[Completion]:
    engine = Engine(model, PagedKVCache(model.config, 200, 4, torch.float32), **mode)
    return engine.generate([Request(prompt, 12, keep_logits=True) for prompt in PROMPTS])


def on_each_rank() -> dict[str, tuple[list[list[int]], float]]:
    """For each model and mode the tokens that this rank chose, and how far its logits are from those of the whole model."""
    torch.set_num_threads(1)
    group, found = ProcessGroup.of(), {}
    for name, changes in CONFIGS.items():
        config = make_config(**changes)
        source = tensors_of(config)
        wanted = completions(GptOss(config, source, torch.float32))
        shared = TensorParallelGptOss(config, source, group, torch.float32)
        for mode in ("eager", "static, overlapping"):
            got = completions(shared, **MODES[mode])
            far = max(
                float((torch.stack(mine.logits) - torch.stack(whole.logits)).abs().max())
                for mine, whole in zip(got, wanted, strict=True)
            )
            assert [c.tokens for c in got] == [c.tokens for c in wanted], f"{name}, {mode}"
            found[f"{name}, {mode}"] = [c.tokens for c in got], far
    return found


def test_two_ranks_give_the_tokens_of_one() -> None:
    first, second = run_world(on_each_rank, 2)
    assert first == second
    assert len(first) == 4
    assert all(0 < far < 2e-4 for _, far in first.values()), {name: far for name, (_, far) in first.items()}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_shares_put_together_are_the_whole(changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    whole = tensors_of(config)
    parts = [SharedSource(config, whole, rank, 2) for rank in range(2)]
    assert parts[0].shapes() == expected_tensors(share_of(config, 2))
    for name, shape in parts[0].shapes().items():
        tensor, left, right = whole.get(name), parts[0].get(name), parts[1].get(name)
        assert left.shape == right.shape == shape, name
        axes = [axis for axis in range(tensor.dim()) if left.shape[axis] != tensor.shape[axis]]
        if axes:
            (axis,) = axes
            assert torch.equal(torch.cat((left, right), axis).narrow(axis, 0, tensor.shape[axis]), tensor), name
        elif name.endswith(("down_proj_bias", "o_proj.bias")):
            assert torch.equal(left, tensor), name
            assert not right.any(), name
        else:
            assert torch.equal(left, tensor), name
            assert torch.equal(right, tensor), name


def test_slices_beyond_the_end() -> None:
    x = torch.arange(10.0).view(2, 5)
    assert shared_slices(x, 1, 3, 1, filling=7).tolist() == [[3, 4, 7], [8, 9, 7]]
    assert shared_slices(x, 0, 2, 1, filling=7).tolist() == [[7] * 5] * 2
    assert shared_slices(x, 0, 1, 1).tolist() == [[5, 6, 7, 8, 9]]


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads must be a multiple of 4, the number of ranks, got 2"):
        share_of(make_config(), 4)
    with pytest.raises(ValueError, match="num_attention_heads must be a multiple of 3, the number of ranks, got 4"):
        share_of(make_config(), 3)
