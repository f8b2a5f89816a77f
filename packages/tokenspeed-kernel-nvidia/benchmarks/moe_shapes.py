"""The MoE benchmarks' inputs: layers in the sizes of models, batches of tokens, and the reference outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import DEFAULT, Cost, Draw, Recipe
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights

# Rates from which the roofline time of a call is computed: the best memory bandwidth of an H200, in bytes per microsecond; and the
# best tensor-core rates by the dtype of activations, in floating-point operations per microsecond.
BYTES_PER_US = 4.35e6
FLOPS_PER_US = {"none": 800e6, "fp8": 1500e6}
# All layers are drawn by the recipe of this case, with other values.
_CASE = "gpt-oss-120b decode 1"
_GPT_OSS_OPTIONS = ("w13_interleaved", "bias", "alpha", "limit", "beta")


@dataclass(frozen=True)
class Model:
    """An MoE layer in the sizes of a model.

    Attributes:
        experts: the number of experts on this rank.
        weight_format: as in `MoEPlan`.
        of: the number of experts of all ranks together; 0 if all experts are on this rank.
        gpt_oss: whether the layer has GPT-OSS's interleaved gates and ups, its biases and its clamped activation.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    weight_format: str = "mxfp4"
    of: int = 0
    gpt_oss: bool = False

    @property
    def routed(self) -> int:
        """The number of experts from which the router selects."""
        return self.of or self.experts


@dataclass(frozen=True)
class Shape:
    """One call, which computes the combined output from router logits and tokens.

    Attributes:
        activation_dtype: as in `MoEPlan`.
        more: whether the shape is measured only with the option ``--more``, and has no bar.
    """

    model: Model
    tokens: int
    activation_dtype: str = "none"
    more: bool = False

    operator = "moe.moe_apply"

    @property
    def group(self) -> str:
        return self.model.name + (f" {self.activation_dtype}" if self.activation_dtype != "none" else "")

    @property
    def name(self) -> str:
        """The unique name, from the model, the number of tokens, and the quantised dtype of activations: ``"gpt-oss-120b 8192
        fp8"``.
        """
        return " ".join([self.model.name, str(self.tokens), *([self.activation_dtype] if self.activation_dtype != "none" else [])])

    def recipe(self) -> Recipe:
        """Returns the recipe of a ``moe_apply`` call with this layer's weights and a canonical plan."""
        (case,) = (case for case in get_operator(self.operator).all_cases() if case.name == _CASE)
        assert isinstance(case.make, Recipe)
        model = self.model
        return case.make.vary(
            tokens=1,
            experts=model.experts,
            top_k=model.top_k,
            hidden=model.hidden,
            intermediate=model.intermediate,
            weight_format=DEFAULT if model.weight_format == "dense" else model.weight_format,
            activation_dtype=DEFAULT if self.activation_dtype == "none" else self.activation_dtype,
            **({} if model.gpt_oss else dict.fromkeys(_GPT_OSS_OPTIONS, DEFAULT)),
        )


GPT_OSS_120B = Model("gpt-oss-120b", 128, 4, 2880, 2880, gpt_oss=True)
# A rank's experts of GPT-OSS-120B on two GPUs: a slice of every expert, or half of the experts.
SLICES = Model("gpt-oss-120b slices", 128, 4, 2880, 1440, gpt_oss=True)
HALF = Model("gpt-oss-120b 64 of 128", 64, 4, 2880, 2880, of=128, gpt_oss=True)
GPT_OSS_20B = Model("gpt-oss-20b", 32, 4, 2880, 2880, gpt_oss=True)
QWEN3 = Model("qwen3-235b", 128, 8, 4096, 1536, "dense")
QWEN3_FP8 = Model("qwen3-235b fp8 blocks", 128, 8, 4096, 1536, "fp8_block")
DEEPSEEK_V3 = Model("deepseek-v3 32 of 256", 32, 8, 7168, 2048, "fp8_block", of=256)


# Numbers of tokens at which GPT-OSS-120B has no bar.
_BESIDE_BARS = (128, 512, 2048)


def _shapes() -> Iterator[Shape]:
    for tokens in (1, 2, 4, 8, 16, 64, 128, 256, 512, 1024, 2048, 8192):
        yield Shape(GPT_OSS_120B, tokens, more=tokens in _BESIDE_BARS)
    for tokens in (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192):
        yield Shape(GPT_OSS_120B, tokens, "fp8", more=tokens in _BESIDE_BARS)
    for model in (SLICES, HALF, GPT_OSS_20B, QWEN3, QWEN3_FP8, DEEPSEEK_V3):
        for activation_dtype in ("none", "fp8") if model.weight_format == "fp8_block" else ("none",):
            for tokens in (1, 4, 16, 64, 256, 1024, 8192):
                yield Shape(model, tokens, activation_dtype, more=True)


SHAPES = tuple(_shapes())


@dataclass
class Layer:
    """The weights of one layer, as in a checkpoint, and the layer's parameters."""

    weights: MoEWeights
    plan: MoEPlan

    @classmethod
    def drawn(cls, shape: Shape, device: torch.device, seed: int) -> Layer:
        made = shape.recipe()(Draw(device, seed))
        return cls(made["weights"], made["plan"])

    def checksum(self) -> int:
        """Returns a checksum of all bytes of the weights."""
        tensors = (getattr(self.weights, f"{name}_weight{part}") for name in ("w13", "w2") for part in ("", "_scale", "_bias"))
        return sum(int(tensor.view(torch.uint8).sum(dtype=torch.int64)) for tensor in tensors if tensor is not None)


@dataclass
class Batch:
    """Tokens and router logits, and the index of the layer that runs on them.

    Attributes:
        x: the tokens.
        logits: the router logits.
        layer: the index of the layer.
        topk_ids: the selected experts, by the operator's definition; negative for experts of other ranks.
    """

    x: Tensor
    logits: Tensor
    layer: int
    topk_weights: Tensor = field(init=False)
    topk_ids: Tensor = field(init=False)

    def routed(self, model: Model) -> Batch:
        """Computes and stores the routing of the batch. Returns the batch."""
        topk = get_operator("moe.moe_topk")
        self.topk_weights, ids = topk.reference(*topk.complete({"logits": self.logits, "top_k": model.top_k}).values())
        self.topk_ids = torch.where(ids < model.experts, ids, -1)
        return self

    @property
    def experts(self) -> int:
        """The number of different experts that the tokens select on this rank."""
        return len({*self.topk_ids.flatten().tolist()} - {-1})

    def arguments(self, layer: Layer) -> dict[str, Any]:
        """Returns the arguments of ``moe_apply``, with weights in the canonical layout."""
        routing = {"topk_weights": self.topk_weights, "topk_ids": self.topk_ids}
        return get_operator(Shape.operator).complete({"x": self.x, "weights": layer.weights, **routing, "plan": layer.plan})


def batches(shape: Shape, count: int, layers: int, device: torch.device, seed: int = 0) -> list[Batch]:
    """Draws batches of tokens with independent uniform routing. The batches are assigned to the layers in rotation."""
    draw, model = Draw(device, seed + shape.tokens), shape.model
    made = []
    for index in range(count):
        x = draw.normal(shape.tokens, model.hidden, dtype=torch.bfloat16)
        made.append(Batch(x, router_logits(draw, shape.tokens, model), index % layers).routed(model))
    return made


def router_logits(draw: Draw, tokens: int, model: Model) -> Tensor:
    """Draws router logits, bfloat16 ``[tokens, experts]``. The last selected expert and the first expert that is not selected never
    have equal logits. Such ties are common in bfloat16, and implementations resolve ties differently.
    """
    logits = draw.normal(tokens, model.routed, dtype=torch.bfloat16)
    if model.routed == model.top_k:
        return logits
    while True:
        best = logits.topk(model.top_k + 1, dim=-1).values
        tied = (best[:, -1] == best[:, -2]).nonzero().flatten()
        if not len(tied):
            return logits
        logits[tied] = draw.normal(len(tied), model.routed, dtype=torch.bfloat16)


def expected(batch: Batch, layer: Layer) -> Tensor:
    """Computes the expected output by the operator's definition in float64, without rounding it: float64 ``[tokens, hidden]``.

    fp8 activations are those of the definition: the scale of a row is float32.
    """
    arguments = batch.arguments(layer)
    # The definition rounds the result to x's dtype. So x is converted to float64, which represents x exactly.
    result = get_operator(Shape.operator).reference(*{**arguments, "x": arguments["x"].double()}.values())
    assert isinstance(result, Tensor)
    return result


def quantization_error(batch: Batch, layer: Layer) -> float:
    """Returns the relative error that quantising the activations causes in the definition; 0 if activations are not quantised."""
    if layer.plan.activation_dtype == "none":
        return 0.0
    exact = expected(batch, Layer(layer.weights, dataclasses.replace(layer.plan, activation_dtype="none")))
    return float((expected(batch, layer) - exact).norm() / exact.norm())


def floor_us(cost: Cost, activation_dtype: str) -> float:
    """Returns the roofline time of a call in microseconds: the time to read and write its bytes, or the time of its arithmetic,
    whichever is longer."""
    return max(cost.bytes / BYTES_PER_US, cost.flops / FLOPS_PER_US[activation_dtype])
