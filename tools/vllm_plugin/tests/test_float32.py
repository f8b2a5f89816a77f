"""Tests that the float32 reference model equals Transformers' model, and tests the comparison of engines with this reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import against_float32
import float32

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, EXPERTS, TOP_K, VOCABULARY, WINDOW = 2, 64, 96, 4, 2, 32, 8, 2, 97, 6
CONFIG: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": LAYERS,
    "sliding_window": WINDOW,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_experts_per_tok": TOP_K,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 7.0,
}
SHAPES: dict[str, tuple[int, ...]] = {"model.embedding.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
SHAPES["lm_head.weight"] = (VOCABULARY, HIDDEN)
for _layer in range(LAYERS):
    _name = f"model.layers.{_layer}"
    SHAPES |= {
        f"{_name}.input_layernorm.weight": (HIDDEN,),
        f"{_name}.post_attention_layernorm.weight": (HIDDEN,),
        f"{_name}.attn.sinks": (HEADS,),
        f"{_name}.attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        f"{_name}.attn.qkv_proj.bias": ((HEADS + 2 * KV_HEADS) * DIM,),
        f"{_name}.attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{_name}.attn.o_proj.bias": (HIDDEN,),
        f"{_name}.mlp.router.weight": (EXPERTS, HIDDEN),
        f"{_name}.mlp.router.bias": (EXPERTS,),
        f"{_name}.mlp.experts.w13_weight": (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2),
        f"{_name}.mlp.experts.w13_weight_scale": (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32),
        f"{_name}.mlp.experts.w13_bias": (EXPERTS, 2 * INTERMEDIATE),
        f"{_name}.mlp.experts.w2_weight": (EXPERTS, HIDDEN, INTERMEDIATE // 2),
        f"{_name}.mlp.experts.w2_weight_scale": (EXPERTS, HIDDEN, INTERMEDIATE // 32),
        f"{_name}.mlp.experts.w2_bias": (EXPERTS, HIDDEN),
    }


def drawn_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in SHAPES.items():
        if name.endswith("_scale"):
            made[name] = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        elif name.endswith(("w13_weight", "w2_weight")):
            made[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        elif name.endswith("norm.weight"):
            made[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            made[name] = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.5)
    return made


def model_of(weights: dict[str, Tensor]) -> float32.Model:
    angles = torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(0, DIM, 2) / DIM))
    return float32.Model(CONFIG, weights.__getitem__, torch.cat((angles.cos(), angles.sin()), dim=-1))


def test_it_computes_what_transformers_does() -> None:
    """The reference equals Transformers' model, whose weights are unpacked by Transformers' own function."""
    transformers = pytest.importorskip("transformers", reason="needs the dependency group `peers`")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.GptOssConfig(
        **{name: value for name, value in CONFIG.items() if name != "swiglu_limit"},
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        vocab_size=VOCABULARY,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_implementation="eager",
    )
    theirs = transformers.GptOssForCausalLM(config).eval()
    weights = drawn_weights()

    def unpacked(name: str) -> Tensor:
        blocks = weights[name].unflatten(-1, (-1, 16))
        made: Tensor = convert_moe_packed_tensors(blocks, weights[name + "_scale"], dtype=torch.float32)
        return made

    state = {
        "model.embed_tokens.weight": weights["model.embedding.weight"],
        "model.norm.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        a, b = f"model.layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            q, k, v = weights[f"{a}.attn.qkv_proj.{kind}"].split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM])
            state |= {f"{b}.self_attn.q_proj.{kind}": q, f"{b}.self_attn.k_proj.{kind}": k, f"{b}.self_attn.v_proj.{kind}": v}
            state[f"{b}.self_attn.o_proj.{kind}"] = weights[f"{a}.attn.o_proj.{kind}"]
            state[f"{b}.mlp.router.{kind}"] = weights[f"{a}.mlp.router.{kind}"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{b}.{norm}.weight"] = weights[f"{a}.{norm}.weight"]
        state[f"{b}.self_attn.sinks"] = weights[f"{a}.attn.sinks"]
        state[f"{b}.mlp.experts.gate_up_proj"] = unpacked(f"{a}.mlp.experts.w13_weight")
        state[f"{b}.mlp.experts.gate_up_proj_bias"] = weights[f"{a}.mlp.experts.w13_bias"]
        state[f"{b}.mlp.experts.down_proj"] = unpacked(f"{a}.mlp.experts.w2_weight")
        state[f"{b}.mlp.experts.down_proj_bias"] = weights[f"{a}.mlp.experts.w2_bias"]
    theirs.load_state_dict(state, strict=True)
    sequences = [torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)) for length in (1, 5, 23)]
    model = model_of(weights)
    ours = float32.head(model, float32.run(model, sequences).hidden)
    with torch.no_grad():
        for sequence, found in zip(sequences, ours.split([len(sequence) for sequence in sequences]), strict=True):
            expected = theirs(input_ids=sequence[None]).logits[0]
            assert expected.std() > 0.3
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def engine_run(model: float32.Model, prompts: list[list[int]], change: Callable[[int, Tensor], Tensor]) -> Any:
    """Generates greedily with router logits ``change(layer, logits)``. Returns the tokens, the rows of logits, and the routing of
    each step."""
    ids: list[list[int]] = [[] for _ in prompts]
    steps, routing = [], [[] for _ in range(LAYERS)]  # type: ignore[var-annotated]
    for step in range(3):
        sequences = [torch.tensor(prompt + more) for prompt, more in zip(prompts, ids, strict=True)]
        experts: list[Tensor] = []
        for layer in range(LAYERS):  # later routers depend on the experts of earlier layers
            filled = [*experts, *[torch.zeros(sum(map(len, sequences)), TOP_K, dtype=torch.int64)] * (LAYERS - layer)]
            said = change(layer, float32.run(model, sequences, filled).routing[layer])
            experts.append(float32.best(said, TOP_K))
            ends = torch.tensor([len(s) for s in sequences]).cumsum(0)
            routing[layer].append(said if step == 0 else said[ends - 1])
        hidden = float32.run(model, sequences, experts).hidden
        logits = float32.head(model, hidden[torch.tensor([len(s) for s in sequences]).cumsum(0) - 1])
        steps.append(logits)
        for row, more in zip(logits, ids, strict=True):
            more.append(int(row.argmax()))
    return ids, against_float32.rows_of(steps, ids), routing


def test_an_engine_that_chooses_the_same_experts_is_exact() -> None:
    model, prompts = model_of(drawn_weights()), [[1, 2, 3, 4, 5], [9, 8], list(range(20))]
    ids, rows, routing = engine_run(model, prompts, lambda layer, logits: logits)
    found, saved = against_float32.compare(model, prompts, ids, rows, routing)
    assert (found["rows"], found["free"]["far"], found["given_experts"]["far"]) == (9, 0, 0)
    assert found["given_experts"]["largest"][1.0] < 1e-3
    assert [part["moved"] for part in found["moved"]] == [0, 0]
    assert [part["tokens"] for part in found["moved"]] == [33, 33]
    assert saved["experts"].shape == (9, LAYERS, TOP_K)


def test_rows_with_other_experts_are_told_apart() -> None:
    """For some tokens, the last selected expert and the next expert are swapped. The rows are far from float32, but exact if the
    reference uses the engine's choice."""
    model, prompts = model_of(drawn_weights()), [[1, 2, 3, 4, 5], [9, 8], list(range(20))]

    def change(layer: int, logits: Tensor) -> Tensor:
        if layer == 0:
            return logits
        order = float32.best(logits, TOP_K + 1)
        last, after = order[:, -2:-1], order[:, -1:]
        said = logits.clone()
        rows = torch.arange(0, len(logits), 2)
        said[rows] = logits.scatter(1, last, logits.gather(1, after)).scatter(1, after, logits.gather(1, last))[rows]
        return said

    ids, rows, routing = engine_run(model, prompts, change)
    found, _ = against_float32.compare(model, prompts, ids, rows, routing)
    assert found["moved"][0]["moved"] == 0
    assert found["moved"][1]["moved"] > 3
    assert found["moved"][1]["largest_gap_of_moved"] > 0
    assert found["free"]["far"] == found["far_rows"]["all"] == found["far_rows"]["with_other_experts"] > 0
    assert found["given_experts"]["far"] == 0
    assert against_float32.compare(model, prompts, ids, rows, [])[0].keys() == {"rows", "free"}


def test_rows_must_be_in_the_order_of_the_requests() -> None:
    steps = [torch.tensor([[0.0, 1.0], [1.0, 0.0]])]
    assert against_float32.rows_of(steps, [[1], [0]]).shape == (2, 1, 2)
    with pytest.raises(RuntimeError, match="order"):
        against_float32.rows_of(steps, [[0], [1]])
    with pytest.raises(RuntimeError, match="expected 2 steps"):
        against_float32.rows_of(steps, [[1, 0], [0, 1]])
