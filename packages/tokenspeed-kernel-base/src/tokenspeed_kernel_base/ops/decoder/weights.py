"""The weights of decoder layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.moe.weights import MoEWeights
from tokenspeed_kernel_base.planning import layout_of
from tokenspeed_kernel_base.resources import Resource


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one decoder layer: attention and a mixture of experts, each after a norm.

    Weights are stored as in ``torch.nn.Linear``, out-features first. All tensors but those of the experts must be contiguous. H is
    the hidden size, D the width of a head, and ``dtype`` the dtype of the tokens.

    Attributes:
        input_norm: dtype ``[H]``, the norm before attention.
        qkv: dtype ``[(heads + 2 * kv_heads) * D, H]``: the query heads, then the key heads, then the value heads. With float16 or
            bfloat16 tokens it may also be quantised to fp8, mxfp8 or mxfp4, like the weight of `rmsnorm_qkv_rope`. mxfp4 packs two
            elements in a byte.
        projection: dtype ``[H, heads * D]``, the projection of attention's output. It may be quantised like qkv.
        norm: dtype ``[H]``, the norm before the router and the experts.
        router: dtype ``[experts, H]``.
        experts: the result of `moe_apply.prepare`: `MoEWeights`, or any object with its attributes. The layer refers to the
            object's tensors, and copies nothing. Several layers may have the same object.
        window_left: how many tokens to the left a token sees besides itself; -1 means all.
        qkv_bias, projection_bias: dtype ``[(heads + 2 * kv_heads) * D]`` and ``[H]``; both or none.
        sinks: float32 ``[heads]``, one extra logit for each query head, as in `mha_decode_with_kvcache`; or None.
        router_bias: dtype ``[experts]``, or None.
        qkv_scale, projection_scale: the scale of a quantised qkv, and of a quantised projection, as `LinearWeights.weight_scale`:
            for example float32 ``[rows, 1]`` for fp8 with a scale per output channel. None for a weight of dtype.
    """

    input_norm: Tensor
    qkv: Tensor
    projection: Tensor
    norm: Tensor
    router: Tensor
    experts: MoEWeights
    window_left: int = -1
    qkv_bias: Tensor | None = None
    projection_bias: Tensor | None = None
    sinks: Tensor | None = None
    router_bias: Tensor | None = None
    qkv_scale: Tensor | None = None
    projection_scale: Tensor | None = None


# If ranks share a layer, these tensors must be equal on all ranks. All other weights are sharded.
REPLICATED = ("input_norm", "norm", "router", "router_bias")
# The tensors of a layer, and of its experts.
DENSE = tuple(field.name for field in dataclasses.fields(DecoderLayer) if field.name not in ("experts", "window_left"))
EXPERTS = tuple(field.name for field in dataclasses.fields(MoEWeights) if field.name != "layout")


class DecoderWeights(Resource):
    """The weights of consecutive decoder layers, for `decoder_layers`. Layers may differ in the values of tensors and in windows.
    Shapes, dtypes, devices, optional weights and the layout of the experts are the same in all layers.

    This object refers to the layers' tensors and copies nothing. Make it once, when a model is loaded, and keep it as long as calls
    or graphs use it. Do not replace its tensors.

    Args:
        layers: the layers, in order; at least one.
        group: the ranks that share each layer; None if this process has whole layers. Each rank has some of the heads, and a slice
            of every expert's intermediate features. The outputs of the projection and of the experts are summed over ranks. Their
            biases are summed too, so give them to one rank, and zeros to the others. Norms and routers must be the same on every
            rank.

    Attributes:
        layer_class: the class of the layers.
        layers: the layers.
        windows: the ``window_left`` of each layer.
        group: as given.
        world_size: the number of ranks; 1 without a group.

    Raises:
        TypeError: a weight is no tensor.
        ValueError: there is no layer; or a tensor other than the experts' is not contiguous; or layers differ in shapes, dtypes,
            devices, optional weights or the layout of experts; or only one bias of attention is given; or a window is less than -1.
            The message names the layer and the tensor.
    """

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, layers: Sequence[DecoderLayer], group: ProcessGroup | None = None) -> None:
        if not layers:
            raise ValueError("DecoderWeights: layers must hold at least one layer, got none")
        self.layers = tuple(layers)
        first = self.layers[0]
        alike = _described(0, first)
        for index, layer in enumerate(self.layers):
            for (name, value), (_, wanted) in zip(_described(index, layer), alike, strict=True):
                if value != wanted:
                    raise ValueError(f"DecoderWeights: layers[{index}].{name} must be {wanted} as in layers[0], got {value}")
            if layer.window_left < -1:
                raise ValueError(f"DecoderWeights: layers[{index}].window_left must be at least -1, got {layer.window_left}")
        if (first.qkv_bias is None) != (first.projection_bias is None):
            given = "projection_bias" if first.qkv_bias is None else "qkv_bias"
            raise ValueError(f"DecoderWeights: qkv_bias and projection_bias must be given together, got {given} alone")
        self.windows = tuple(layer.window_left for layer in self.layers)
        self.device = first.qkv.device
        # Experts in a kernel's own form may have a key that decides which kernel is eligible.
        keys = tuple(layer.experts.key if isinstance(layer.experts, Resource) else None for layer in self.layers)
        self.group = group
        self.world_size = 1 if group is None else group.world_size
        self.key: Hashable = (alike, self.windows, keys, None if group is None else group.key)

    def converted(self, convert: Callable[[Tensor], Tensor]) -> DecoderWeights:
        """As in the base class. Layers that share experts still do."""
        experts: dict[int, MoEWeights] = {}
        layers = []
        for layer in self.layers:
            if id(layer.experts) not in experts:
                tensors: dict[str, Any] = _converted(layer.experts, EXPERTS, convert)
                experts[id(layer.experts)] = dataclasses.replace(layer.experts, **tensors)
            dense: dict[str, Any] = _converted(layer, DENSE, convert)
            layers.append(dataclasses.replace(layer, **dense, experts=experts[id(layer.experts)]))
        return DecoderWeights(layers, self.group)

    @property
    def card(self) -> str:
        """Says how many layers there are, how many of them have windows, and how many ranks share them."""
        windowed, layout = sum(window >= 0 for window in self.windows), layout_of(self.layers[0].experts)
        shared = "" if self.group is None else f"; shared by {self.world_size} ranks"
        return f"{len(self.layers)} layers, {windowed} of them with a window; experts in the layout {layout}{shared}"


def _converted(holder: Any, names: Sequence[str], convert: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
    tensors = {name: getattr(holder, name) for name in names}
    return {name: None if tensor is None else convert(tensor) for name, tensor in tensors.items()}


def _described(index: int, layer: DecoderLayer) -> tuple[tuple[str, Any], ...]:
    """Returns what must be equal in all layers: the shape, dtype and device of each tensor, and the layout of the experts."""
    experts = ((f"experts.{name}", getattr(layer.experts, name, None), True) for name in EXPERTS)
    tensors = [*((name, getattr(layer, name), False) for name in DENSE), *experts]
    found: list[tuple[str, Any]] = [("experts.layout", layout_of(layer.experts))]
    for name, tensor, of_experts in tensors:
        if tensor is None:
            found.append((name, None))
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"DecoderWeights: layers[{index}].{name} must be a tensor, got {type(tensor).__name__}")
        if not of_experts and not tensor.is_contiguous():
            raise ValueError(f"DecoderWeights: layers[{index}].{name} must be contiguous, got strides {tensor.stride()}")
        found.append((name, (tuple(tensor.shape), tensor.dtype, tensor.device)))
    return tuple(found)
