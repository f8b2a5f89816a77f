"""Measures the effect of one swapped expert on a token's logits, for GPT-OSS with random weights in float32, on a CPU.

The script takes ten minutes.

    python tools/vllm_plugin/benchmarks/swapped_experts.py

In each of two layers, some tokens are routed to the fifth expert instead of the fourth: the tokens with the smallest margin between
the logits of these two experts. The script prints the margins, and the fraction of tokens for which bf16 makes both experts' logits
equal. It also prints the changes of the tokens' logits in standard deviations.
"""

from __future__ import annotations

import functools
import random

import float32
import torch
from random_gpt_oss import EXPERT_SIZES, EXPERTS, HIDDEN, VOCABULARY, config_of, draw, draw_experts
from torch import Tensor

LAYERS, LENGTHS, ROWS = 2, (5, 17, 40, 90), 24


def shape_of(name: str) -> tuple[int, ...]:
    """Returns the shape of a parameter in vLLM. The parameter must not belong to an expert."""
    sizes = {
        "embedding.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "qkv_proj.weight": (5120, HIDDEN),
        "qkv_proj.bias": (5120,),
        "o_proj.weight": (HIDDEN, 4096),
        "router.weight": (EXPERTS, HIDDEN),
        "router.bias": (EXPERTS,),
        "sinks": (64,),
    }
    return next((size for end, size in sizes.items() if name.endswith(end)), (HIDDEN,))


@functools.cache
def dense(name: str) -> Tensor:
    made = torch.empty(shape_of(name), dtype=torch.bfloat16)
    draw(name, made)
    return made


def weight(name: str) -> Tensor:
    made: Tensor = draw_experts(name, EXPERTS, "cpu") if name.rpartition(".")[2] in EXPERT_SIZES else dense(name)
    return made


def moved(model: float32.Model, before: Tensor, after: Tensor) -> Tensor:
    """Returns the changes of logits from the hidden rows ``before`` to ``after``, in standard deviations of each row of logits."""
    logits = float32.head(model, before)
    return (logits - float32.head(model, after)).abs() / logits.std(-1, keepdim=True)


def main() -> None:
    """Runs the model three times: unchanged, and with swapped experts in each of the two layers. Prints the results."""
    draws = random.Random(0)
    sequences = [torch.tensor([draws.randrange(100, 199000) for _ in range(length)]) for length in LENGTHS]
    angles = torch.outer(torch.arange(256.0), 150000 ** -(torch.arange(0, 64, 2) / 64))
    model = float32.Model(config_of(LAYERS), weight, torch.cat((angles.cos(), angles.sin()), dim=-1))
    exact = float32.run(model, sequences)
    top_k = model.config["num_experts_per_tok"]
    chosen = [float32.best(logits, top_k) for logits in exact.routing]
    for layer, logits in enumerate(exact.routing):
        values = logits.sort(-1, descending=True).values
        gap = (values[:, top_k - 1] - values[:, top_k]) / logits.std(-1)
        rounded = logits.bfloat16().sort(-1, descending=True).values
        ties = (rounded[:, top_k - 1] == rounded[:, top_k]).float().mean()
        shares = [round(share, 4) for share in gap.quantile(torch.tensor([0.05, 0.1, 0.25, 0.5])).tolist()]
        print(f"layer {layer}: gaps of 5, 10, 25, 50%: {shares}; equal in bfloat16: {ties:.1%}")
        near = gap < shares[2]
        others = [experts.clone() for experts in chosen]
        others[layer][near, -1] = float32.best(logits, top_k + 1)[near, -1]
        again = float32.run(model, sequences, others)
        rows = near.nonzero().flatten()[:ROWS]
        difference = moved(model, exact.hidden[rows], again.hidden[rows])
        rms, largest = difference.square().mean(-1).sqrt(), difference.amax(-1)
        print(f"  their rows: rms {rms.min():.2f} to {rms.max():.2f}, largest {largest.min():.1f} to {largest.max():.1f}")


if __name__ == "__main__":
    main()
