"""A model on several GPUs, each of which holds a part of every layer.

Attention heads, the experts' intermediate features and the rows of the output matrix are shared out among the ranks of a process
group. Each rank runs the model on its share, for the same batch; sums over ranks follow the two products that end a layer's halves,
and the ranks' logits are put together. All ranks have the same bits then, so that each chooses the same tokens. An `Engine` of each
rank must be given the same requests in the same order.

    torchrun --nproc-per-node 2 -m gpt_oss.tensor_parallel --tokens 32
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gpt_oss.cache import PagedKVCache
from gpt_oss.config import PRESETS, Config, preset
from gpt_oss.engine import Engine
from gpt_oss.loader import Checkpoint, RandomTensors, TensorSource, check_source, expected_tensors
from gpt_oss.model import GptOss, Linear
from gpt_oss.request import Request
from tokenspeed_kernel import ProcessGroup

# The scale of blocks that fill a share up: 2 to the power of 0. Their codes are zeros.
_UNIT_SCALE = 127


def share_of(config: Config, size: int) -> Config:
    """The configuration of one rank's share: its heads and its intermediate features, which are filled up where they cannot be
    divided.

    Raises:
        ValueError: the heads cannot be divided among so many ranks.
    """
    for name in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, name) % size:
            raise ValueError(f"{name} must be a multiple of {size}, the number of ranks, got {getattr(config, name)}")
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=config.num_key_value_heads // size,
        intermediate_size=_features(config, size),
    )


def _features(config: Config, size: int) -> int:
    """A rank's intermediate features: whole blocks of 32, if they are quantised in blocks."""
    unit = 32 if config.quantization == "mxfp4" else 1
    return -(-config.intermediate_size // (unit * size)) * unit


class SharedSource:
    """One rank's share of the tensors of a source, as `share_of` describes it. Embedding and output matrix are whole.

    Biases of what is summed over ranks are the first rank's; the others have zeros.

    Args:
        config: of the whole model.
        source: the whole model's tensors.
        rank: whose share.
        size: the number of ranks.

    Raises:
        CheckpointError: the tensors do not fit the configuration.
    """

    def __init__(self, config: Config, source: TensorSource, rank: int, size: int) -> None:
        check_source(config, source)
        self._source, self._rank, self._size = source, rank, size
        self._packed = config.quantization == "mxfp4"
        self._features = _features(config, size)
        self._shapes = expected_tensors(share_of(config, size))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, str]:
        stored = self._source.dtypes()
        return {name: stored[name] for name in self._shapes}

    def get(self, name: str) -> Tensor:
        return self._part(name, self._source.get(name)).contiguous()

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        kind = name.rpartition("experts.")[2] if "experts." in name else name.rpartition("self_attn.")[2]
        # Gates and ups alternate along the outputs of gate_up_proj; the inputs of packed weights lie in blocks of 32.
        outputs, inputs = 2 * self._features, self._features
        match kind:
            case "gate_up_proj":
                return self._cut(tensor, 2, outputs)
            case "gate_up_proj_blocks" | "gate_up_proj_bias":
                return self._cut(tensor, 1, outputs)
            case "gate_up_proj_scales":
                return self._cut(tensor, 1, outputs, _UNIT_SCALE)
            case "down_proj":
                return self._cut(tensor, 1, inputs)
            case "down_proj_blocks":
                return self._cut(tensor, 2, inputs // 32)
            case "down_proj_scales":
                return self._cut(tensor, 2, inputs // 32, _UNIT_SCALE)
            case "down_proj_bias" | "o_proj.bias":
                return tensor if self._rank == 0 else torch.zeros_like(tensor)
            case "q_proj.weight" | "k_proj.weight" | "v_proj.weight" | "q_proj.bias" | "k_proj.bias" | "v_proj.bias" | "sinks":
                return self._cut(tensor, 0, tensor.shape[0] // self._size)
            case "o_proj.weight":
                return self._cut(tensor, 1, tensor.shape[1] // self._size)
        return tensor

    def _cut(self, tensor: Tensor, axis: int, count: int, filling: int = 0) -> Tensor:
        """This rank's slices along an axis, filled up to so many."""
        return shared_slices(tensor, axis, count, self._rank, filling)


def shared_slices(tensor: Tensor, axis: int, count: int, rank: int, filling: int = 0) -> Tensor:
    """The slices of a tensor from ``rank * count`` on, ``count`` of them; those beyond its end are made of one value."""
    start = min(rank * count, tensor.shape[axis])
    part = tensor.narrow(axis, start, min(count, tensor.shape[axis] - start))
    missing = count - part.shape[axis]
    return F.pad(part, (0, 0) * (tensor.dim() - 1 - axis) + (0, missing), value=filling) if missing else part


@dataclass(frozen=True)
class SummedLinear(Linear):
    """A projection whose inputs are shared out: the sum of the ranks' products."""

    group: ProcessGroup

    def __call__(self, ops: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = super().__call__(ops, x, out)
        summed: Tensor = ops.all_reduce(product, self.group, product)
        return summed


@dataclass(frozen=True)
class GatheredLinear(Linear):
    """A projection whose outputs are shared out: the ranks' products side by side.

    Attributes:
        outputs: how many there are; the last ranks' may be filled up.
    """

    group: ProcessGroup
    outputs: int

    def __call__(self, ops: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
        parts = ops.all_gather(super().__call__(ops, x), self.group).unflatten(0, (self.group.world_size, len(x)))
        joined: Tensor = parts.transpose(0, 1).flatten(1)[:, : self.outputs]
        return joined.contiguous() if out is None else out.copy_(joined)


class _SummingExperts:
    """The operators, of which `moe_apply` gives the sum over the ranks."""

    def __init__(self, ops: Any, group: ProcessGroup) -> None:
        self._ops, self._group = ops, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def moe_apply(self, *args: Any, **kwargs: Any) -> Tensor:
        product = self._ops.moe_apply(*args, **kwargs)
        summed: Tensor = self._ops.all_reduce(product, self._group, product)
        return summed


class TensorParallelGptOss(GptOss):
    """One rank's share of a model, which runs like the whole: every rank must run the same batches in the same order.

    Args:
        config: the whole model's configuration.
        source: the whole model's tensors. Of each this rank keeps its share.
        group: the ranks; with peer memory, for kernels that are captured and need no library between processes.
        dtype, device, max_positions, options: as for `GptOss`.

    Attributes:
        config: of this rank's share, which a cache is made for.

    Raises:
        TypeError, ValueError: an argument is not as stated, or heads cannot be divided among the ranks; the message names it.
        CheckpointError: the tensors do not fit the configuration.
    """

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
        rank, size = group.rank, group.world_size
        super().__init__(share_of(config, size), SharedSource(config, source, rank, size), dtype, device, max_positions, **options)
        self.group = group
        self.layers = [replace(layer, output=SummedLinear(layer.output.weight, layer.output.bias, group)) for layer in self.layers]
        rows = -(-config.vocab_size // size)
        # A copy, so that the whole matrix is freed.
        weight = shared_slices(self.unembedding.weight.t(), 0, rows, rank).clone()
        self.unembedding = GatheredLinear(weight.t(), None, group, config.vocab_size)
        self.ops = _SummingExperts(self.ops, group)


def main(arguments: Sequence[str] | None = None) -> None:
    """Generates tokens on the ranks that torchrun started, and says how long each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; random weights without one")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="gpt-oss-20b", help="whose shapes random weights have")
    parser.add_argument("--layers", type=int, help="of random weights: so many")
    parser.add_argument("--prompt", type=int, default=64, help="random tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1, help="prompts")
    parser.add_argument("--tokens", type=int, default=32, help="to generate for each prompt, 3 or more")
    options = parser.parse_args(arguments)
    if options.tokens < 3:
        parser.error(f"--tokens must be 3 or more, got {options.tokens}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        group = ProcessGroup.with_peer_memory()
        source: TensorSource
        if options.model is not None:
            config, source = Config.from_directory(options.model), Checkpoint(options.model)
        else:
            config = preset(options.preset)
            config = config if options.layers is None else config.with_layers(options.layers)
            source = RandomTensors(config, device=device)
        longest = options.prompt + options.tokens
        model = TensorParallelGptOss(config, source, group, torch.bfloat16, device, max_positions=longest)
        pages = options.batch * -(-longest // 64)
        engine = Engine(model, PagedKVCache(model.config, pages, 64, torch.bfloat16, device), max_sequences=options.batch)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(config.vocab_size, (options.batch, options.prompt), generator=generator).tolist()
        engine.generate([Request(prompt, options.tokens) for prompt in prompts])  # compiles what it needs
        few, many = (_seconds(engine, prompts, tokens) for tokens in (2, options.tokens))
        if group.rank == 0:
            memory = group.peer_gap or "yes"
            print(f"{group}, peer memory: {memory}; {options.batch} x {options.prompt} + {options.tokens} tokens")
            step = (many - few) / (options.tokens - 2)
            print(f"{step * 1e3:.3f} ms a step of decoding, {few * 1e3:.1f} ms for prompts and 2 tokens")
    finally:
        dist.destroy_process_group()


def _seconds(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> float:
    began = time.perf_counter()
    engine.generate([Request(prompt, tokens) for prompt in prompts])
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
