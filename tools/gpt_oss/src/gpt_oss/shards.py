"""One rank's shard of a model's tensors.

Attention heads and the rows of the output matrix are always divided among ranks. A rank has either a slice of every expert's
intermediate features, or some whole experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_oss.config import Config
from gpt_oss.fields import FLOAT_DTYPE, instance
from gpt_oss.loader import Checkpoint, TensorSource, check_source, from_files
from gpt_oss.model import GptOss, Linear
from tokenspeed_kernel import ProcessGroup

# e8m0 scale byte of padding blocks: 2 to the power of 0. The elements of these blocks are zeros.
_UNIT_SCALE = 127


def shard_of(config: Config, size: int, whole_experts: bool = False) -> Config:
    """Returns the configuration of one rank's shard: its heads, and either its experts or its intermediate features. If the
    features are not divisible by the number of ranks, they are padded.

    Args:
        config: the whole model's configuration.
        size: the number of ranks.
        whole_experts: whether a rank has some whole experts, rather than a slice of each.

    Raises:
        ValueError: heads or experts are not divisible by the number of ranks.
    """
    divided = ["num_attention_heads", "num_key_value_heads", *(["num_local_experts"] if whole_experts else [])]
    for name in divided:
        if getattr(config, name) % size:
            raise ValueError(f"{name} must be a multiple of {size}, the number of ranks, got {getattr(config, name)}")
    shared: dict[str, Any] = {name: getattr(config, name) // size for name in divided}
    if not whole_experts:
        shared["intermediate_size"] = _features(config, size)
    elif shared["num_local_experts"] < config.num_experts_per_tok:
        raise ValueError(
            f"num_local_experts must be at least {size} x num_experts_per_tok, so that all of a token's experts may be one rank's, "
            f"got {config.num_local_experts} and {config.num_experts_per_tok}"
        )
    return replace(config, **shared)


def _features(config: Config, size: int) -> int:
    """Returns the number of intermediate features of a rank: whole blocks of 32, if weights are quantised in blocks."""
    unit = 32 if config.quantization == "mxfp4" else 1
    return -(-config.intermediate_size // (unit * size)) * unit


@dataclass(frozen=True)
class _ShardSlices:
    """A rank's part of a tensor: the axis to slice, the number of slices per rank, and the padding value."""

    axis: int
    count: int
    filling: int = 0


class ShardedSource:
    """One rank's shard of a model's tensors, as `shard_of` describes it. The rows of the output matrix are divided among ranks,
    with padding if necessary. Router and embedding are whole. Only the shard is read from files.

    If an output is summed over ranks, only the first rank has its bias; the other ranks have zeros.

    Args:
        config: the whole model's configuration.
        source: the whole model's tensors.
        rank: the rank.
        size: the number of ranks.
        whole_experts: as for `shard_of`.

    Raises:
        CheckpointError: the tensors do not match the configuration.
    """

    def __init__(self, config: Config, source: TensorSource, rank: int, size: int, whole_experts: bool = False) -> None:
        check_source(config, source)
        self._source, self._rank, self._size, self._whole_experts = source, rank, size, whole_experts
        shard = shard_of(config, size, whole_experts)
        self._experts, self._features = shard.num_local_experts, shard.intermediate_size
        self._shard_slices = {name: self._shard_slices_of(name, shape) for name, shape in source.shapes().items()}
        self.from_files = from_files(source)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._shape(shape, self._shard_slices[name]) for name, shape in self._source.shapes().items()}

    def dtypes(self) -> Mapping[str, str]:
        return self._source.dtypes()

    def get(self, name: str) -> Tensor:
        slices = self._shard_slices[name]
        if slices is not None:
            start, stop = slices_of(self._source.shapes()[name][slices.axis], slices.count, self._rank)
            return filled(self._slices(name, slices.axis, start, stop), slices.axis, slices.count, slices.filling).contiguous()
        tensor = self._source.get(name)
        summed = name.endswith(("o_proj.bias", "down_proj_bias"))
        return torch.zeros_like(tensor) if summed and self._rank else tensor.contiguous()

    def _slices(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        if isinstance(self._source, Checkpoint):
            return self._source.get_part(name, axis, start, stop)
        # The slice is copied, so that the whole tensor is freed.
        return self._source.get(name).narrow(axis, start, stop - start).clone()

    @staticmethod
    def _shape(shape: tuple[int, ...], slices: _ShardSlices | None) -> tuple[int, ...]:
        return shape if slices is None else (*shape[: slices.axis], slices.count, *shape[slices.axis + 1 :])

    def _shard_slices_of(self, name: str, shape: tuple[int, ...]) -> _ShardSlices | None:
        """Describes this rank's slices of a tensor; None if every rank has the whole tensor."""
        if name == "lm_head.weight":
            return _ShardSlices(0, -(-shape[0] // self._size))
        if "experts." in name:
            return _ShardSlices(0, self._experts) if self._whole_experts else self._features_of(name.rpartition("experts.")[2])
        match name.rpartition("self_attn.")[2]:
            case "q_proj.weight" | "k_proj.weight" | "v_proj.weight" | "q_proj.bias" | "k_proj.bias" | "v_proj.bias" | "sinks":
                return _ShardSlices(0, shape[0] // self._size)
            case "o_proj.weight":
                return _ShardSlices(1, shape[1] // self._size)
        return None

    def _features_of(self, kind: str) -> _ShardSlices | None:
        # Gate and up are interleaved along the outputs of gate_up_proj; the inputs of packed weights are in blocks of 32.
        outputs, inputs = 2 * self._features, self._features
        match kind:
            case "gate_up_proj":
                return _ShardSlices(2, outputs)
            case "gate_up_proj_blocks" | "gate_up_proj_bias":
                return _ShardSlices(1, outputs)
            case "gate_up_proj_scales":
                return _ShardSlices(1, outputs, _UNIT_SCALE)
            case "down_proj":
                return _ShardSlices(1, inputs)
            case "down_proj_blocks":
                return _ShardSlices(2, inputs // 32)
            case "down_proj_scales":
                return _ShardSlices(2, inputs // 32, _UNIT_SCALE)
        return None


def slices_of(whole: int, count: int, rank: int) -> tuple[int, int]:
    """Returns the begin and end of a rank's slices of an axis with ``whole`` slices, ``count`` per rank. The last ranks may have
    fewer.
    """
    start = min(rank * count, whole)
    return start, min(start + count, whole)


def filled(tensor: Tensor, axis: int, count: int, filling: int = 0) -> Tensor:
    """Returns a tensor, padded at its end to ``count`` slices along an axis."""
    missing = count - tensor.shape[axis]
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - axis) + (0, missing), value=filling) if missing else tensor


@dataclass(frozen=True)
class GatheredLinear(Linear):
    """A projection whose outputs are divided among ranks and gathered.

    Attributes:
        outputs: number of outputs, without the padding of the last ranks.
    """

    group: ProcessGroup = field(kw_only=True)
    outputs: int = field(kw_only=True)

    def __call__(self, ops: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
        parts = ops.all_gather(super().__call__(ops, x), self.group).unflatten(0, (self.group.world_size, len(x)))
        joined: Tensor = parts.transpose(0, 1).flatten(1)[:, : self.outputs]
        return joined.contiguous() if out is None else out.copy_(joined)


class ShardedGptOss(GptOss):
    """One rank's shard of a model: it has this rank's part of the tensors, and its logits are gathered from all ranks.

    Args:
        config: the whole model's configuration.
        source: the whole model's tensors. This rank reads and keeps only its shard of each.
        group: the ranks. With peer memory, kernels can be captured into graphs and need no communication library.
        dtype, device, max_positions, options: as for `GptOss`.

    Attributes:
        config: the configuration of this rank's shard, from which a cache is created.

    Raises:
        TypeError, ValueError: an argument is not as stated, or a size is not divisible by the number of ranks; the message names
            it.
        CheckpointError: the tensors do not match the configuration.
    """

    whole_experts = False

    def __init__(
        self,
        config: Config,
        source: TensorSource,
        group: ProcessGroup,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
        **options: Any,
    ) -> None:
        instance(Config).check("config", config)
        FLOAT_DTYPE.check("dtype", dtype)
        rank, size = group.rank, group.world_size
        shard = ShardedSource(config, source, rank, size, self.whole_experts)
        self.group = group
        super().__init__(shard_of(config, size, self.whole_experts), shard, dtype, device, max_positions, **options)
        part = self.unembedding
        if config.tie_word_embeddings:
            rows = -(-config.vocab_size // size)
            start, stop = slices_of(config.vocab_size, rows, rank)
            part = self._quantized(filled(self.embedding[start:stop], 0, rows), None)
        self.unembedding = GatheredLinear(part.weight, part.bias, part.scale, group=group, outputs=config.vocab_size)

    def _check_tensors(self, config: Config, source: TensorSource) -> None:
        """Does nothing, because the whole model's tensors were already checked."""
