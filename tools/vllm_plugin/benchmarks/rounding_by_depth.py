"""Measures how far two roundings of GPT-OSS with random weights diverge, by number of layers, on a CPU.

The script takes minutes.

    python tools/vllm_plugin/benchmarks/rounding_by_depth.py --experts 32 --layers 24
    python tools/vllm_plugin/benchmarks/rounding_by_depth.py --experts 128 --layers 36

Three copies of a prompt run side by side: in float32; with the residual in bf16, as in engines; and with the norms' results in bf16
too. The last two stand for two correct engines, which round in different places. After some of the layers, the script prints the
fraction of tokens that have selected other experts in this layer, and the root mean square of the differences of logits, in
standard deviations.
"""

from __future__ import annotations

import argparse
import functools
import random

import float32
import torch
from random_gpt_oss import EXPERT_SIZES, VOCABULARY, config_of, draw
from swapped_experts import shape_of
from torch import Tensor

# The output matrix has this many rows, because drawing the whole vocabulary takes longer than all layers.
ROWS = 8192
COPIES = ("float32", "bf16 residual", "bf16 residual and norms")


class Experts:
    """An experts' tensor. Each expert is drawn when it is needed, because a few tokens need a fraction of the experts."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, expert: int) -> Tensor:
        rows, columns = EXPERT_SIZES[self.name.rpartition(".")[2]]
        shape, dtype = ((1, rows), torch.bfloat16) if columns is None else ((1, rows, columns), torch.uint8)
        made = torch.empty(shape, dtype=dtype)
        # The last part of the name says how the tensor is drawn, the rest seeds the random numbers.
        draw(f"{expert}.{self.name}", made)
        return made[0]


class Weights:
    """The model's parameters by name in vLLM. Those of one layer are kept."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.dense = functools.lru_cache(maxsize=12)(self.drawn)

    def __call__(self, name: str) -> Tensor:
        found: Tensor = Experts(name) if name.rpartition(".")[2] in EXPERT_SIZES else self.dense(name)  # type: ignore[assignment]
        return found

    def drawn(self, name: str) -> Tensor:
        rows, *columns = shape_of(name)
        rows = {VOCABULARY: ROWS}.get(rows, self.experts if ".router." in name else rows)
        made = torch.empty(rows, *columns, dtype=torch.bfloat16)
        draw(name, made)
        return made


class Rounding:
    """Rounds the copies, and keeps the residual after each layer."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.residuals: list[Tensor] = []

    def __call__(self, place: str, value: Tensor) -> Tensor:
        begin = self.tokens * (1 if place == "residual" else 2)
        value = torch.cat((value[:begin], value[begin:].bfloat16().float()))
        if place == "residual":
            self.residuals.append(value)
        return value


def main() -> None:
    """Runs the copies, and prints the differences after some layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=12)
    given = parser.parse_args()
    draws = random.Random(0)
    prompt = torch.tensor([draws.randrange(ROWS) for _ in range(given.tokens)])
    angles = torch.outer(torch.arange(256.0), 150000 ** -(torch.arange(0, 64, 2) / 64))
    weights, rounding = Weights(given.experts), Rounding(given.tokens)
    model = float32.Model(
        {**config_of(given.layers), "num_local_experts": given.experts}, weights, torch.cat((angles.cos(), angles.sin()), dim=-1)
    )
    found = float32.run(model, [prompt] * len(COPIES), rounded=rounding)
    head = weights("lm_head.weight").float()
    for layer, (routing, residual) in enumerate(zip(found.routing, rounding.residuals[1::2], strict=True), 1):
        if layer not in (1, 2, 4, 8, 12, 18, given.layers):
            continue
        logits = (residual * residual.square().mean(-1, keepdim=True).rsqrt()) @ head.t()
        exact, *others = logits.split(given.tokens)
        chosen = [part.sort(-1).values for part in float32.best(routing, model.config["num_experts_per_tok"]).split(given.tokens)]
        pairs = (
            ("float32 : bf16", chosen[0], chosen[1], exact, others[0]),
            ("bf16 : bf16 elsewhere", chosen[1], chosen[2], others[0], others[1]),
        )
        said = []
        for name, mine, other, a, b in pairs:
            rms = ((a - b) / a.std(-1, keepdim=True)).square().mean(-1).sqrt()
            moved = (mine != other).any(-1).float().mean()
            said.append(f"{name}: {moved:.0%} with other experts, rms median {rms.median():.3f}, largest {rms.max():.3f}")
        print(f"layer {layer}: {'; '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
