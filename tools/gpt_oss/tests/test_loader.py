from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_models import YARN, TensorDict, make_config, peer, random_prompts, tensors_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt_oss.batch import Piece, make_batch
from gpt_oss.config import Config, alternating
from gpt_oss.loader import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    CheckpointError,
    RandomTensors,
    _entries_of,
    check_source,
    save_checkpoint,
)
from gpt_oss.model import GptOss
from gpt_oss.transfer import Upload

PACKED = {"hidden_size": 64, "intermediate_size": 32, "quantization": "mxfp4"}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def logits_of(config: Config, source: object, dtype: torch.dtype = torch.float32) -> Tensor:
    model = GptOss(config, source, dtype)  # type: ignore[arg-type]
    prompts = random_prompts((19, 4, 9), config.vocab_size)
    return model.forward(make_batch([Piece(prompt) for prompt in prompts], None, "cpu"), None)


def unpacked(source: TensorDict) -> TensorDict:
    """Returns the tensors of a dense checkpoint with the same values. This function dequantises MXFP4 independently of the
    operators."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        if name.endswith("_scales"):
            continue
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            codes = torch.stack((tensor & 15, tensor >> 4), dim=-1).flatten(-2).long()
            values = E2M1[codes] * torch.exp2(source.tensors[base + "_scales"].float() - 127).unsqueeze(-1)
            tensors[base] = values.flatten(-2).transpose(1, 2).contiguous()
        else:
            tensors[name] = tensor
    return TensorDict(tensors)


@pytest.mark.parametrize("shard_bytes", [None, 4000])
def test_what_transformers_saves(tmp_path: Path, shard_bytes: int | None) -> None:
    pytest.importorskip("transformers")
    config = make_config(rope=YARN, num_local_experts=5, num_experts_per_tok=3)
    source = tensors_of(config, torch.bfloat16)
    theirs = peer(config, source, torch.bfloat16)
    theirs.save_pretrained(tmp_path, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    assert (tmp_path / INDEX_FILE).exists() == (shard_bytes is not None)

    read = Config.from_directory(tmp_path)
    assert read == config
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in source.tensors.items():
        assert torch.equal(checkpoint.get(name), tensor), name
    ours = logits_of(read, checkpoint)
    assert torch.equal(ours, logits_of(config, source))
    prompts = random_prompts((19, 4, 9), config.vocab_size)
    with torch.no_grad():
        expected = [theirs.float()(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    assert (ours - torch.cat(expected)).abs().max() <= 2e-4


def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = make_config(rope=YARN)
    save_checkpoint(tmp_path, config, tensors_of(config))
    model = transformers.GptOssForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    prompt = random_prompts((11,), config.vocab_size)[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    ours = GptOss(config, Checkpoint(tmp_path), torch.float32).forward(make_batch([Piece(prompt)], None, "cpu"), None)
    assert (ours - expected).abs().max() <= 2e-4


@pytest.mark.parametrize("shard_bytes", [None, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_checkpoint(tmp_path: Path, shard_bytes: int | None, dtype: torch.dtype) -> None:
    config = make_config(**PACKED, layer_types=alternating(3))
    source = tensors_of(config, dtype)
    save_checkpoint(tmp_path, config, source, shard_bytes)
    read = Config.from_directory(tmp_path)
    assert read == config
    packed = logits_of(read, Checkpoint(tmp_path), dtype)
    assert torch.equal(packed, logits_of(config, source, dtype))
    dense = logits_of(make_config(**{**PACKED, "quantization": None}, layer_types=alternating(3)), unpacked(source), dtype)
    torch.testing.assert_close(packed, dense)
    assert packed.abs().max() > 0.5


def test_mxfp4_stays_packed() -> None:
    config = make_config(**PACKED)
    experts = GptOss(config, tensors_of(config)).layers[0].experts
    assert experts.w13_weight.dtype == experts.w2_weight_scale.dtype == torch.uint8


def test_tied_embeddings() -> None:
    config = make_config(tie_word_embeddings=True)
    source = tensors_of(config)
    assert "lm_head.weight" not in source.tensors
    untied = TensorDict({**source.tensors, "lm_head.weight": source.tensors["model.embed_tokens.weight"]})
    tied = logits_of(config, source)
    assert torch.equal(tied, logits_of(make_config(), untied))
    assert torch.equal(tied, logits_of(config, untied)), "a tied checkpoint may hold the output matrix all the same"


# -- random tensors -----------------------------------------------------------------------------------------------------------


def test_random_tensors_depend_on_seed_and_name_only() -> None:
    config = make_config(**PACKED)
    names = list(RandomTensors(config).shapes())
    forwards, backwards = RandomTensors(config, 3), RandomTensors(config, 3)
    there = {name: forwards.get(name) for name in names}
    back = {name: backwards.get(name) for name in reversed(names)}
    assert all(torch.equal(there[name], back[name]) for name in names)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(there[name], RandomTensors(config, 4).get(name))
    assert not torch.equal(there[name], there[name.replace("layers.0", "layers.1")])


def test_random_weights_neither_fade_nor_explode() -> None:
    config = make_config(**PACKED, layer_types=alternating(12))
    logits = logits_of(config, RandomTensors(config))
    assert 0.5 < logits.std() < 2


def test_random_mxfp4_weights_have_the_deviation_of_dense_ones() -> None:
    config = make_config(hidden_size=256, intermediate_size=128, quantization="mxfp4")
    experts = unpacked(tensors_of(config)).tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert 0.5 < experts.std() * 256**0.5 < 2


# -- malformed checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = make_config()
    return save_checkpoint(tmp_path, config, tensors_of(config), 8000)


def test_everything_that_is_wrong_with_the_tensors_is_in_one_error() -> None:
    config = make_config()
    tensors = dict(tensors_of(config).tensors)
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.sinks"]
    tensors["model.layers.2.self_attn.sinks"] = torch.zeros(4)
    tensors["lm_head.weight"] = torch.zeros(96, 32)
    with pytest.raises(CheckpointError) as caught:
        GptOss(config, TensorDict(tensors))
    message = str(caught.value)
    assert "2 missing: model.layers.1.self_attn.sinks [4], model.norm.weight [32]" in message
    assert "1 unexpected: model.layers.2.self_attn.sinks" in message
    assert "1 of the wrong shape: lm_head.weight must be [97, 32], got [96, 32]" in message


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_of_a_wrong_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without this check, an fp8 checkpoint that is read without its scales would give wrong logits without any error."""
    config = make_config()
    name = "model.layers.1.self_attn.q_proj.weight"
    source = TensorDict({**tensors_of(config).tensors, name: torch.zeros(32, 32).to(dtype)})
    save_checkpoint(tmp_path, config, source)
    spelled = str(dtype).removeprefix("torch.")
    message = f"1 of the wrong dtype: {name} must be bfloat16 or float16 or float32 or float64, got "
    for broken, got in ((source, spelled), (Checkpoint(tmp_path), "C64" if dtype == torch.complex64 else spelled)):
        with pytest.raises(CheckpointError, match=message + got):
            GptOss(config, broken, torch.float32)


@pytest.mark.parametrize("suffix", ["blocks", "scales"])
def test_mxfp4_experts_are_bytes(suffix: str) -> None:
    config = make_config(**PACKED)
    tensors = dict(tensors_of(config).tensors)
    name = f"model.layers.0.mlp.experts.down_proj_{suffix}"
    tensors[name] = tensors[name].float()
    with pytest.raises(CheckpointError, match=f"1 of the wrong dtype: {name} must be uint8, got float32"):
        GptOss(config, TensorDict(tensors))


def test_dtypes_are_those_of_the_tensors(tmp_path: Path) -> None:
    config = make_config(**PACKED)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        source = tensors_of(config, dtype)
        assert RandomTensors(config, dtype=dtype).dtypes() == source.dtypes()
        assert Checkpoint(save_checkpoint(tmp_path / str(dtype), config, source)).dtypes() == source.dtypes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "config must be a Config, got {}"),
        ((make_config(), 1.5), r"seed must be an int, got 1.5 \(float\)"),
        ((make_config(), None), "seed must be an int, got None"),
        ((make_config(), 0, "float32"), "dtype must be a floating-point torch.dtype, got 'float32'"),
        ((make_config(), 0, torch.int8), "dtype must be a floating-point torch.dtype, got torch.int8"),
    ],
)
def test_impossible_random_tensors(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        RandomTensors(*arguments)


@pytest.mark.parametrize("shard_bytes", [0, -1, 1.5, True, "4"])
def test_impossible_shards(tmp_path: Path, shard_bytes: Any) -> None:
    config = make_config()
    with pytest.raises((TypeError, ValueError), match=r"shard_bytes .* int of at least 1 or None, got "):
        save_checkpoint(tmp_path / "new", config, tensors_of(config), shard_bytes)
    assert not (tmp_path / "new").exists()


def test_a_long_list_is_cut() -> None:
    with pytest.raises(CheckpointError, match=r"37 missing: .* and 25 more"):
        check_source(make_config(), TensorDict({}))


def test_dense_experts_where_mxfp4_is_said() -> None:
    with pytest.raises(CheckpointError, match=r"missing: .*_blocks.*unexpected: .*gate_up_proj"):
        check_source(make_config(**PACKED), tensors_of(make_config(**{**PACKED, "quantization": None})))


def _without_index(path: Path) -> None:
    (path / INDEX_FILE).unlink()


def _broken_index(path: Path) -> None:
    (path / INDEX_FILE).write_text("{")


def _index_without_map(path: Path) -> None:
    (path / INDEX_FILE).write_text("{}")


def _without_a_shard(path: Path) -> None:
    next(path.glob("model-00002*")).unlink()


def _broken_shard(path: Path) -> None:
    next(path.glob("model-00002*")).write_bytes(b"no safetensors")


def _stray_name(path: Path) -> None:
    table = json.loads((path / INDEX_FILE).read_text())
    table["weight_map"]["model.layers.9.bias"] = next(iter(table["weight_map"].values()))
    (path / INDEX_FILE).write_text(json.dumps(table))


def _moved_tensor(path: Path) -> None:
    first = next(path.glob("model-00001*"))
    tensors = load_file(first)
    tensors.popitem()
    save_file(tensors, first)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_index, f"neither {SINGLE_FILE} nor {INDEX_FILE}"),
        (_broken_index, "not an index of shards"),
        (_index_without_map, "not an index of shards: KeyError"),
        (_without_a_shard, "lists model-00002-of-.*, which is not in"),
        (_broken_shard, "model-00002-of-.* is not a readable safetensors file"),
        (_stray_name, "lists tensors that its files lack: model.layers.9.bias"),
        (_moved_tensor, "lists tensors that its files lack: "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damaged_checkpoints(saved: Path, damage: Callable[[Path], None], message: str) -> None:
    Checkpoint(saved)
    damage(saved)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(saved)


class InPieces:
    """Replaces `Upload`, with chunks of seven bytes and without a device."""

    def send(self, count: int, fill: Callable[[Tensor], None]) -> Tensor:
        made = torch.empty(count, dtype=torch.uint8)
        for piece in made.split(7):
            fill(piece)
        return made


def uploads() -> list[Any]:
    on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    gpu = pytest.param(lambda: Upload("cuda", 1000), marks=[pytest.mark.nvidia, pytest.mark.amd, on_gpu], id="to a device")
    return [pytest.param(lambda: None, id="whole"), pytest.param(InPieces, id="in pieces"), gpu]


@pytest.mark.parametrize("make_upload", uploads())
@pytest.mark.parametrize("shard_bytes", [None, 5000])
def test_a_tensor_is_read_as_it_is_mapped(tmp_path: Path, shard_bytes: int | None, make_upload: Callable[[], Any]) -> None:
    config = make_config(quantization="mxfp4", hidden_size=64, intermediate_size=32, head_dim=16)
    save_checkpoint(tmp_path, config, tensors_of(config, torch.bfloat16), shard_bytes)
    checkpoint, upload = Checkpoint(tmp_path), make_upload()
    for name in checkpoint.shapes():
        got, wanted = checkpoint.read(name, upload), checkpoint.get(name)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.nvidia
@pytest.mark.amd
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2000, 12345])
def test_bytes_arrive_while_others_are_made(count: int) -> None:
    """The memory of each sent tensor is freed while the device still reads it."""
    upload, made = Upload("cuda", 1000), torch.randint(256, (50, count), dtype=torch.uint8)
    found = []
    for wanted in made:
        pieces = iter(wanted.split(1000))
        sent = upload.send(count, lambda piece, pieces=pieces: piece.copy_(next(pieces)))
        torch.cuda._sleep(100_000)
        found.append(sent.clone())
        del sent
    assert torch.equal(torch.stack(found).cpu(), made)


def test_a_file_that_became_shorter_cannot_be_read(tmp_path: Path) -> None:
    config = make_config()
    save_checkpoint(tmp_path, config, tensors_of(config))
    checkpoint = Checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    last = max(checkpoint.shapes(), key=lambda name: _entries_of(file)[name][-1])
    checkpoint.read(last)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"ends in the middle of {last}"):
        checkpoint.read(last)
