"""GPT-OSS in float32 and plain PyTorch, with the weights of ``random_gpt_oss.py``: the reference for an engine's logits.

A router selects the experts with the highest logits. If the logits of the last selected expert and the next one differ by no more
than bf16 rounding, two implementations of the same layer may select different experts. The token's logits then differ by far more
than rounding. So the reference can use the experts that an engine has selected. Then only rounding differences remain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

# The activation is ``(up + 1) * gate * sigmoid(ALPHA * gate)``.
ALPHA = 1.702
# The values of the lower three bits of an e2m1 element; the fourth bit is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The exponent bias of block scales.
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class Model:
    """A model whose weights are read when they are needed.

    Attributes:
        config: the contents of ``config.json``.
        weight: function that returns a parameter by its name in vLLM, in any dtype. It is called once per run for each layer's
            expert weights.
        rotary: float32 ``[positions, head_dim]``: cosines, then sines, with YaRN's scaling.
    """

    config: Mapping[str, Any]
    weight: Callable[[str], Tensor]
    rotary: Tensor

    def float32(self, name: str) -> Tensor:
        """Returns the parameter with this name in float32."""
        return self.weight(name).float()


@dataclass(frozen=True)
class Run:
    """The results of a run of the model.

    Attributes:
        hidden: ``[tokens, hidden]``, the result of the last norm, for the concatenated tokens of all sequences.
        routing: for each layer, the router's logits, ``[tokens, experts]``.
    """

    hidden: Tensor
    routing: list[Tensor]


def best(logits: Tensor, top_k: int) -> Tensor:
    """Returns the experts with the highest logits, ``[tokens, top_k]``, highest first. Among equal logits the lower index comes
    first, as in kernels.
    """
    return logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


@torch.inference_mode()
def run(
    model: Model,
    sequences: Sequence[Tensor],
    experts: Sequence[Tensor] | None = None,
    rounded: Callable[[str, Tensor], Tensor] | None = None,
) -> Run:
    """Runs all layers of the model on some sequences.

    Args:
        model: the model.
        sequences: tokens of each sequence, int64.
        experts: for each layer, the top-k ids to use, ``[tokens, top_k]``; by default the experts with the highest logits. In
            either case the routing weights are computed from the logits of this run.
        rounded: rounds results as an engine does. It is called with ``"residual"`` and the sum ``[tokens, hidden]`` after each
            attention and each MLP, and with ``"norm"`` and the result of each layer's norms. By default nothing is rounded.
    """
    config = model.config
    rounded = rounded or (lambda _, value: value)
    lengths = [len(sequence) for sequence in sequences]
    x = model.weight("model.embedding.weight")[torch.cat(list(sequences))].float()
    routing = []
    for layer, kind in enumerate(config["layer_types"][: config["num_hidden_layers"]]):
        name = f"model.layers.{layer}"
        window = config["sliding_window"] if kind == "sliding_attention" else None
        h = rounded("norm", _norm(model, f"{name}.input_layernorm", x))
        qkv = linear(h, model.float32(f"{name}.attn.qkv_proj.weight"), model.float32(f"{name}.attn.qkv_proj.bias"))
        attended = [_attention(model, part, model.float32(f"{name}.attn.sinks"), window) for part in qkv.split(lengths)]
        projected = linear(
            torch.cat(attended), model.float32(f"{name}.attn.o_proj.weight"), model.float32(f"{name}.attn.o_proj.bias")
        )
        x = rounded("residual", x + projected)
        h = rounded("norm", _norm(model, f"{name}.post_attention_layernorm", x))
        logits = linear(h, model.float32(f"{name}.mlp.router.weight"), model.float32(f"{name}.mlp.router.bias"))
        routing.append(logits)
        chosen = best(logits, config["num_experts_per_tok"]) if experts is None else experts[layer]
        x = rounded("residual", x + _experts(model, name, h, chosen, logits.gather(1, chosen).softmax(-1)))
    return Run(_norm(model, "model.norm", x), routing)


def head(model: Model, hidden: Tensor) -> Tensor:
    """Returns the logits ``[rows, vocabulary]``: the output matrix times rows of the last norm's result."""
    # The output matrix is converted in chunks: a float32 copy of all of it would be large, and engines run on the same device.
    return torch.cat([linear(hidden, part.float()) for part in model.weight("lm_head.weight").split(1 << 15)], dim=-1)


def _norm(model: Model, name: str, x: Tensor) -> Tensor:
    scale = x.square().mean(-1, keepdim=True).add(model.config["rms_norm_eps"]).rsqrt()
    return x * scale * model.float32(f"{name}.weight")


def _attention(model: Model, qkv: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Computes attention of one sequence, from ``[tokens, (heads + 2 * kv_heads) * head_dim]`` to ``[tokens, heads *
    head_dim]``."""
    config = model.config
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    tokens = len(qkv)
    q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = model.rotary[:tokens, None].chunk(2, dim=-1)
    q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
    position = torch.arange(tokens, device=qkv.device)
    back = position[:, None] - position
    hidden = (back < 0) if window is None else (back < 0) | (back >= window)
    group = heads // kv_heads
    out = torch.empty(tokens, heads, dim, device=qkv.device)
    for kv_head in range(kv_heads):
        of_head = slice(kv_head * group, (kv_head + 1) * group)
        scores = torch.einsum("tgd,sd->gts", q[:, of_head], k[:, kv_head]) * dim**-0.5
        scores = scores.masked_fill(hidden, float("-inf"))
        sink = sinks[of_head, None, None].expand(-1, tokens, 1)
        shares = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        out[:, of_head] = torch.einsum("gts,sd->tgd", shares, v[:, kv_head])
    return out.flatten(1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _experts(model: Model, name: str, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    prefix = f"{name}.mlp.experts"
    names = ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias")
    w13, w13_scale, b13, w2, w2_scale, b2 = (model.weight(f"{prefix}.{last}") for last in names)
    limit = model.config["swiglu_limit"]
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        row, slot = (chosen == expert).nonzero(as_tuple=True)
        both = linear(x[row], unpacked(w13[expert], w13_scale[expert]), b13[expert].float())
        gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        between = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
        part = linear(between, unpacked(w2[expert], w2_scale[expert]), b2[expert].float())
        out.index_add_(0, row, part * shares[row, slot, None])
    return out


def unpacked(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantises MXFP4 to float32.

    Args:
        weight: uint8 ``[rows, columns / 2]``, two values per byte, the first in the lower bits.
        scale: uint8 ``[rows, columns / 32]``, biased exponents (e8m0).

    Returns:
        ``[rows, columns]``.
    """
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device=weight.device)
    values = torch.stack((table[(weight & 15).int()], table[(weight >> 4).int()]), dim=-1).flatten(1)
    factor = torch.exp2(scale.float() - _EXPONENT_BIAS)
    return (values.view(*scale.shape, -1) * factor[..., None]).flatten(1)
