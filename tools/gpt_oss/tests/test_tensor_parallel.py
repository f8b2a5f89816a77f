"""Tests that tensor-parallel and expert-parallel models generate the same tokens as the model on one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_models import MODES, YARN, make_config, random_prompts, tensors_of

from gpt_oss.cache import PagedKVCache
from gpt_oss.config import Config, alternating
from gpt_oss.engine import Engine
from gpt_oss.expert_parallel import ExpertParallelGptOss
from gpt_oss.loader import Checkpoint, TensorSource, expected_tensors, save_checkpoint
from gpt_oss.model import GptOss
from gpt_oss.request import Completion, Request
from gpt_oss.sampling import Sampling
from gpt_oss.shards import ShardedGptOss, ShardedSource, filled, shard_of, slices_of
from gpt_oss.tensor_parallel import TensorParallelGptOss
from tokenspeed_kernel import ProcessGroup
from tokenspeed_kernel.workbench.worlds import run_world

# The numbers of features and of vocabulary entries are not divisible by two, so the second rank's shard is padded.
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
    samplings = [Sampling(), Sampling(repetition_penalty=1.3, presence_penalty=0.2), Sampling(logit_bias={5: 0.1})]
    return engine.generate([Request(prompt, 12, samplings[i % 3], keep_logits=True) for i, prompt in enumerate(PROMPTS)])


def on_each_rank(tensor_parallel: bool) -> dict[str, tuple[list[list[int]], float]]:
    """Returns, for each model and mode, the tokens that this rank selected, and the distance of its logits from those of the whole
    model."""
    torch.set_num_threads(1)
    group, found = ProcessGroup.of(), {}
    for name, changes in CONFIGS.items():
        config = make_config(**changes)
        source = tensors_of(config)
        wanted = completions(GptOss(config, source, torch.float32))
        for kind, shared in models(config, source, group, tensor_parallel).items():
            for mode in ("eager", "static, overlapping"):
                got = completions(shared, **MODES[mode])
                far = max(
                    float((torch.stack(mine.logits) - torch.stack(whole.logits)).abs().max())
                    for mine, whole in zip(got, wanted, strict=True)
                )
                assert [c.tokens for c in got] == [c.tokens for c in wanted], f"{name}, {kind}, {mode}"
                found[f"{name}, {kind}, {mode}"] = [c.tokens for c in got], far
    return found


def models(config: Config, source: TensorSource, group: ProcessGroup, tensor_parallel: bool) -> dict[str, ShardedGptOss]:
    if tensor_parallel:
        made: dict[str, ShardedGptOss] = {}
        kinds = {
            "parts": {},
            "parts, decode passes in one call": {"one_call": True},
            "parts, a separate sum before the router": {"routed_tokens": range(5, 20)},
        }
        for kind, changes in kinds.items():
            made[kind] = model = TensorParallelGptOss(config, source, group, torch.float32)
            for name, value in changes.items():
                setattr(model, name, value)
        return made
    made = {}
    # With a dispatch threshold of 1 token, a pass of a single token leaves one rank without tokens.
    for tokens in (1, 8):
        made[f"dispatched from {tokens} tokens on"] = model = ExpertParallelGptOss(config, source, group, torch.float32)
        model.dispatched_tokens = tokens
    return made


@pytest.mark.parametrize(("tensor_parallel", "count"), [(True, 12), (False, 8)], ids=["tensor parallel", "expert parallel"])
def test_two_ranks_give_the_tokens_of_one(tensor_parallel: bool, count: int) -> None:
    first, second = run_world(on_each_rank, 2, (tensor_parallel,))
    assert first == second
    assert len(first) == count
    assert all(0 < far < 2e-4 for _, far in first.values()), {name: far for name, (_, far) in first.items()}


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_shares_put_together_are_the_whole(changes: dict[str, Any], whole_experts: bool, tmp_path: Path) -> None:
    config = make_config(**changes)
    whole = tensors_of(config)
    checkpoint = Checkpoint(save_checkpoint(tmp_path, config, whole))
    parts = [ShardedSource(config, whole, rank, 2, whole_experts) for rank in range(2)]
    from_files = [ShardedSource(config, checkpoint, rank, 2, whole_experts) for rank in range(2)]
    expected = expected_tensors(shard_of(config, 2, whole_experts))
    for name, shape in parts[0].shapes().items():
        tensor, left, right = whole.get(name), parts[0].get(name), parts[1].get(name)
        assert left.shape == right.shape == shape, name
        assert all(torch.equal(source.get(name), part) for source, part in zip(from_files, (left, right), strict=True)), name
        if name != "lm_head.weight" and "router" not in name:  # these shapes may differ from the shard's configuration
            assert shape == expected[name]
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


def test_only_the_share_of_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    checkpoint = Checkpoint(save_checkpoint(tmp_path, config, tensors_of(config)))
    monkeypatch.setattr(checkpoint, "get", lambda name: pytest.fail(f"{name} is read whole"))
    part = ShardedSource(config, checkpoint, 1, 2).get("model.layers.0.mlp.experts.down_proj")
    assert part.shape == (4, 12, 32)


def test_slices_beyond_the_end() -> None:
    x = torch.arange(10.0).view(2, 5)
    assert filled(x[:, 3:], 1, 3, filling=7).tolist() == [[3, 4, 7], [8, 9, 7]]
    assert filled(x[2:], 0, 2, filling=7).tolist() == [[7] * 5] * 2
    assert filled(x, 0, 2) is x
    assert [slices_of(5, 3, rank) for rank in range(3)] == [(0, 3), (3, 5), (5, 5)]


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"num_key_value_heads .* multiple of 4, .* got 2"):
        shard_of(make_config(), 4)
    with pytest.raises(ValueError, match=r"num_attention_heads .* multiple of 3, .* got 4"):
        shard_of(make_config(), 3)


def test_experts_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"num_local_experts .* multiple of 2, .* got 5"):
        shard_of(make_config(num_local_experts=5), 2, whole_experts=True)
    with pytest.raises(ValueError, match=r"num_local_experts must be at least 2.*4 and 3"):
        shard_of(make_config(num_experts_per_tok=3), 2, whole_experts=True)
