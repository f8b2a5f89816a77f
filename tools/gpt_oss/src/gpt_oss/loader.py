"""Tensors of a model, from a Hugging Face checkpoint or drawn at random, under the names that Hugging Face gives them.

Both kinds of source are read the same way, tensor by tensor, so that a model never lies in memory twice; and either can be
written as a checkpoint.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt_oss.config import Config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LISTED = 12  # how many tensors of a kind an error names


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as the model that its configuration describes; the message names every tensor at fault."""


class TensorSource(Protocol):
    """Where a model's tensors come from."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and shape, without reading it."""

    def get(self, name: str) -> Tensor:
        """One tensor, in the dtype it is stored in."""


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint and their shapes.

    Dense experts are stored input-first (``[experts, hidden, 2 * intermediate]``); MXFP4 ones output-first, in blocks of 32
    elements (16 bytes) along the input, with one scale byte for each. Gate and up rows alternate in both.
    """
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = layer_prefix(layer)
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        for name, rows, columns in (
            ("q_proj", config.q_size, hidden),
            ("k_proj", config.kv_size, hidden),
            ("v_proj", config.kv_size, hidden),
            ("o_proj", hidden, config.q_size),
        ):
            tensors[f"{attention}{name}.weight"] = (rows, columns)
            if config.attention_bias:
                tensors[f"{attention}{name}.bias"] = (rows,)
        tensors[attention + "sinks"] = (config.num_attention_heads,)
        tensors[prefix + "input_layernorm.weight"] = (hidden,)
        tensors[prefix + "post_attention_layernorm.weight"] = (hidden,)
        tensors[mlp + "router.weight"] = (experts, hidden)
        tensors[mlp + "router.bias"] = (experts,)
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            tensors[f"{mlp}experts.{name}_bias"] = (experts, rows)
            if config.quantization == "mxfp4":
                tensors[f"{mlp}experts.{name}_blocks"] = (experts, rows, columns // 32, 16)
                tensors[f"{mlp}experts.{name}_scales"] = (experts, rows, columns // 32)
            else:
                tensors[f"{mlp}experts.{name}"] = (experts, columns, rows)
    return tensors


def check_source(config: Config, source: TensorSource) -> None:
    """Raises CheckpointError, naming them all, if tensors are missing, unexpected, or of the wrong shape."""
    expected, found = expected_tensors(config), source.shapes()
    missing = [f"{name} {list(expected[name])}" for name in sorted(expected.keys() - found.keys())]
    # A tied checkpoint may hold the output matrix all the same.
    unexpected = sorted(found.keys() - expected.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set()))
    wrong = [
        f"{name} is {list(found[name])}, should be {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if tuple(found[name]) != expected[name]
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_LISTED])}" + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", wrong))
        if names
    ]
    if problems:
        raise CheckpointError("the tensors do not fit the configuration. " + "; ".join(problems))


class Checkpoint:
    """The tensors of a directory with ``model.safetensors``, or with shards and the index that names them.

    Raises:
        CheckpointError: there is neither, a shard is missing or unreadable, or the index disagrees with the shards.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        index = self.directory / INDEX_FILE
        if index.exists():
            self._file_of = self._read_index(index)
        elif (self.directory / SINGLE_FILE).exists():
            self._file_of = {}
        else:
            raise CheckpointError(f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        self._files = {name: self._open(name) for name in sorted({*self._file_of.values()} or {SINGLE_FILE})}
        if not self._file_of:
            self._file_of = dict.fromkeys(self._files[SINGLE_FILE].keys(), SINGLE_FILE)
        held = {file: set(handle.keys()) for file, handle in self._files.items()}
        absent = [f"{name} ({file})" for name, file in self._file_of.items() if name not in held[file]]
        if absent:
            raise CheckpointError(f"{index} names tensors that its files lack: {', '.join(absent[:_LISTED])}")

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            table = json.loads(index.read_text())["weight_map"]
            return {str(name): str(file) for name, file in table.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error

    def _open(self, name: str) -> safe_open:
        path = self.directory / name
        if not path.exists():
            raise CheckpointError(f"{INDEX_FILE} names {name}, which is not in {self.directory}")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._files[file].get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def get(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(name)


class RandomTensors:
    """Random tensors of a configuration's shapes: the same for the same seed, whatever the order in which they are read.

    Matrices keep the size of what passes through them (their standard deviation is the inverse square root of their inputs),
    so that a deep stack neither fades nor explodes; MXFP4 experts are random codes under scales that make up for it.

    Args:
        config: the model.
        seed: of the generator.
        dtype: of everything but the MXFP4 codes.
        device: where they are drawn. The values depend on it.
    """

    def __init__(
        self, config: Config, seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.seed, self.dtype, self.device = config, seed, dtype, torch.device(device)
        self._shapes = expected_tensors(config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        # One number of 32 bits, because a CPU's generator ignores the others.
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

        def normal(scale: float, mean: float = 0.0) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
            return drawn.mul_(scale).add_(mean).to(self.dtype)

        if name.endswith("_blocks"):
            return torch.randint(0, 256, shape, generator=generator, device=self.device, dtype=torch.uint8)
        if name.endswith("_scales"):
            inputs = 32 * shape[-1]
            # Uniform e2m1 codes have a standard deviation of 2.93.
            middle = 127 + round(math.log2(1 / (2.93 * math.sqrt(inputs))))
            return torch.randint(middle - 1, middle + 2, shape, generator=generator, device=self.device, dtype=torch.uint8)
        if "norm.weight" in name:
            return normal(0.1, mean=1.0)
        if name.endswith(("bias", "sinks")):
            return normal(0.5)
        if name == "model.embed_tokens.weight":
            return normal(1.0)
        inputs = shape[1]  # of dense experts [experts, inputs, outputs] as of matrices [outputs, inputs]
        return normal(1 / math.sqrt(inputs))


def save_checkpoint(directory: str | Path, config: Config, source: TensorSource, shard_bytes: int | None = None) -> Path:
    """Writes a checkpoint in Hugging Face's layout and returns its directory.

    Args:
        directory: made if need be.
        config: written as ``config.json``.
        source: the tensors.
        shard_bytes: a file is closed once it holds as many; None writes a single file.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    shards = list(_shards(source, shard_bytes))
    if len(shards) == 1:
        save_file(shards[0], target / SINGLE_FILE, metadata={"format": "pt"})
        return target
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    (target / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    return target


def _shards(source: TensorSource, shard_bytes: int | None) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name in source.shapes():
        tensor = source.get(name).cpu().contiguous()
        shard[name] = tensor
        held += tensor.numel() * tensor.element_size()
        if shard_bytes is not None and held >= shard_bytes:
            yield shard
            shard, held = {}, 0
    if shard:
        yield shard
