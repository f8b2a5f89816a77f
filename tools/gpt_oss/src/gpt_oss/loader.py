"""The tensors of a model, with Hugging Face's names: from a Hugging Face checkpoint, or random.

Tensors of both sources are read one at a time, so that a model is never in memory twice. Both sources can be saved as a checkpoint.
"""

from __future__ import annotations

import ctypes
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
from gpt_oss.fields import COUNT, FLOAT_DTYPE, INT, dtype_name, instance, optional
from gpt_oss.fields import number as number_from
from gpt_oss.transfer import Upload

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LISTED = 12  # an error names at most this many tensors for each kind of problem

# Maps safetensors' dtype names to PyTorch's: dtypes that weights may have, and some unsupported dtypes for messages.
_SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_DENSE_DTYPES = ("bfloat16", "float16", "float32", "float64")
_PACKED_DTYPES = ("uint8",)


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or its tensors do not match its configuration. The message names the tensors."""


class TensorSource(Protocol):
    """A source of a model's tensors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of each tensor, by name. Reads no tensor."""

    def dtypes(self) -> Mapping[str, str]:
        """Returns the dtype of each tensor, by name, in PyTorch's spelling: ``"bfloat16"``. Reads no tensor."""

    def get(self, name: str) -> Tensor:
        """Returns one tensor, in its stored dtype."""


def from_files(source: TensorSource) -> bool:
    """Returns whether a source reads its tensors from files, so that reading ahead saves time."""
    return bool(getattr(source, "from_files", False))


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_tensors(config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of a model's tensors in a checkpoint.

    Dense experts are stored ``[experts, inputs, outputs]``. MXFP4 experts are stored ``[experts, outputs, inputs]``, in blocks of
    32 elements (16 bytes) along the inputs, with one scale byte per block. In both formats, gate and up are interleaved along the
    outputs of ``gate_up_proj``.
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


def reading_order(config: Config) -> list[str]:
    """Returns the names of a model's tensors in approximately the order in which the model reads them. The output matrix and the
    final norm are last.
    """
    late = ("model.norm.weight", "lm_head.weight")
    names = expected_tensors(config)
    return [*(name for name in names if name not in late), *(name for name in late if name in names)]


def allowed_dtypes(name: str) -> tuple[str, ...]:
    """Returns the dtypes that a tensor of this name may have: uint8 for MXFP4 experts, floating point otherwise."""
    return _PACKED_DTYPES if name.endswith(("_blocks", "_scales")) else _DENSE_DTYPES


def check_source(config: Config, source: TensorSource) -> None:
    """Checks that a source has the tensors of a configuration.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of the wrong shape or dtype. The message names them.
    """
    expected, found, dtypes = expected_tensors(config), source.shapes(), source.dtypes()
    both = sorted(expected.keys() & found.keys())
    missing = [f"{name} {list(expected[name])}" for name in sorted(expected.keys() - found.keys())]
    # A checkpoint with tied embeddings may also contain the output matrix.
    unexpected = sorted(found.keys() - expected.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set()))
    shapes = [
        f"{name} must be {list(expected[name])}, got {list(found[name])}" for name in both if tuple(found[name]) != expected[name]
    ]
    types = [
        f"{name} must be {' or '.join(allowed_dtypes(name))}, got {dtypes[name]}"
        for name in both
        if dtypes[name] not in allowed_dtypes(name)
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_LISTED])}" + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of the wrong shape", shapes),
            ("of the wrong dtype", types),
        )
        if names
    ]
    if problems:
        raise CheckpointError("the tensors do not fit the configuration. " + "; ".join(problems))


class Checkpoint:
    """The tensors of a directory with ``model.safetensors``, or with shards and their index.

    Raises:
        CheckpointError: the directory has no tensors, a file is missing or unreadable, or the index and the shards disagree.
    """

    from_files = True

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
        self._entries: dict[str, dict[str, tuple[str, tuple[int, ...], int, int]]] = {}
        if not self._file_of:
            self._file_of = dict.fromkeys(self._files[SINGLE_FILE].keys(), SINGLE_FILE)
        held = {file: set(handle.keys()) for file, handle in self._files.items()}
        absent = [f"{name} ({file})" for name, file in self._file_of.items() if name not in held[file]]
        if absent:
            raise CheckpointError(f"{index} lists tensors that its files lack: {', '.join(absent[:_LISTED])}")

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            table = json.loads(index.read_text())["weight_map"]
            return {str(name): str(file) for name, file in table.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error

    def _open(self, name: str) -> safe_open:
        path = self.directory / name
        if not path.exists():
            raise CheckpointError(f"{INDEX_FILE} lists {name}, which is not in {self.directory}")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._files[file].get_slice(name).get_shape()) for name, file in self._file_of.items()}

    def dtypes(self) -> dict[str, str]:
        stored = {name: self._files[file].get_slice(name).get_dtype() for name, file in self._file_of.items()}
        return {name: _SAFETENSORS_DTYPES.get(dtype, dtype) for name, dtype in stored.items()}

    def get(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(name)

    def read(self, name: str, upload: Upload | None = None) -> Tensor:
        """Reads one tensor into new memory. This is faster than `get`, which maps the file so that the system reads it page by
        page.

        Args:
            name: the tensor's name.
            upload: copies the tensor to a device while the file is read. None: the tensor stays in host memory.

        Raises:
            CheckpointError: the file is too short for the tensor.
        """
        file = self._file_of[name]
        path = self.directory / file
        if file not in self._entries:
            self._entries[file] = _entries_of(path)
        dtype, shape, begin, end = self._entries[file][name]
        with path.open("rb", buffering=0) as opened:
            opened.seek(begin)

            def fill(held: Tensor) -> None:
                room = memoryview((ctypes.c_char * held.numel()).from_address(held.data_ptr())).cast("B")
                while room:
                    count = opened.readinto(room)
                    if not count:
                        raise CheckpointError(f"{path} ends in the middle of {name}")
                    room = room[count:]

            if upload is not None:
                held = upload.send(end - begin, fill)
            else:
                held = torch.empty(end - begin, dtype=torch.uint8)
                if held.numel():
                    fill(held)
        return held.view(getattr(torch, dtype)).view(shape)

    def get_part(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Returns the slices ``start`` to ``stop - 1`` of one tensor along an axis. Reads only these slices."""
        whole = self._files[self._file_of[name]].get_slice(name)
        part: Tensor = whole[(*[slice(None)] * axis, slice(start, stop))]
        return part


def _entries_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Returns the dtype, the shape and the range of bytes of each tensor in a safetensors file.

    The first 8 bytes of a file are the length of its header. The header follows, in JSON. Offsets count from the header's end.
    """
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = (_SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]), begin, end)
    return found


class RandomTensors:
    """Random tensors with the shapes of a configuration. The same seed gives the same tensors, in any order of reading.

    The standard deviation of a matrix is one over the square root of its number of inputs, so that activations keep their magnitude
    through many layers. MXFP4 experts are random e2m1 values with scales that give the same deviation.

    Args:
        config: the model's configuration.
        seed: seed of the random generator; any int.
        dtype: floating-point dtype of all tensors except packed MXFP4 tensors.
        device: the device on which the tensors are created. The values differ between device types.
        bias: standard deviation of biases.

    Raises:
        TypeError, ValueError: an argument is not as stated; the message names it.
    """

    def __init__(
        self,
        config: Config,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        bias: float = 0.5,
    ) -> None:
        instance(Config).check("config", config)
        INT.check("seed", seed)
        FLOAT_DTYPE.check("dtype", dtype)
        number_from(0).check("bias", bias)
        self.config, self.seed, self.dtype, self.device, self.bias = config, seed, dtype, torch.device(device), bias
        self._shapes = expected_tensors(config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> dict[str, str]:
        packed = {name: _PACKED_DTYPES[0] for name in self._shapes if allowed_dtypes(name) == _PACKED_DTYPES}
        return {**dict.fromkeys(self._shapes, dtype_name(self.dtype)), **packed}

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        # The seed has 32 bits, because the CPU generator ignores the upper bits of a longer seed.
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

        def normal(scale: float, mean: float = 0.0) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
            return drawn.mul_(scale).add_(mean).to(self.dtype)

        if name.endswith("_blocks"):
            return torch.randint(0, 256, shape, generator=generator, device=self.device, dtype=torch.uint8)
        if name.endswith("_scales"):
            inputs = 32 * shape[-1]
            # Uniformly random e2m1 bit patterns have a standard deviation of 2.93.
            middle = 127 + round(math.log2(1 / (2.93 * math.sqrt(inputs))))
            return torch.randint(middle - 1, middle + 2, shape, generator=generator, device=self.device, dtype=torch.uint8)
        if "norm.weight" in name:
            return normal(0.1, mean=1.0)
        if name.endswith("bias"):
            return normal(self.bias)
        if name.endswith("sinks"):
            return normal(0.5)
        if name == "model.embed_tokens.weight":
            return normal(1.0)
        inputs = shape[1]  # dense experts are [experts, inputs, outputs], matrices are [outputs, inputs]
        return normal(1 / math.sqrt(inputs))


def save_checkpoint(directory: str | Path, config: Config, source: TensorSource, shard_bytes: int | None = None) -> Path:
    """Writes a checkpoint in Hugging Face's layout and returns its directory.

    Args:
        directory: the target; created if it does not exist.
        config: the configuration, written as ``config.json``.
        source: the tensors.
        shard_bytes: a new file is started when a file has at least this many bytes; None writes a single file.

    Raises:
        TypeError, ValueError: shard_bytes is not an int of at least 1. In this case nothing has been written.
    """
    optional(COUNT).check("shard_bytes", shard_bytes)
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
