"""Tests ``Engine(warm="all")``, which runs every size class of passes, so that no later request needs a compilation."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_models import MODES, make_config, random_prompts, tensors_of
from test_engine import make_engine

from gpt_oss import penalties
from gpt_oss.batch import Phase
from gpt_oss.config import alternating
from gpt_oss.engine import Engine
from gpt_oss.model import GptOss
from gpt_oss.request import Request
from gpt_oss.sampling import Sampling
from gpt_oss.warmup import shapes, sizes_up_to
from tokenspeed_kernel import CompilationForbiddenError, compile_policy, watch_calls
from tokenspeed_kernel.workbench.receipts import read_receipt
from tokenspeed_kernel_base import compilation, selection

LIMITS = {"prefill_tokens": 5, "max_sequences": 2}


@pytest.fixture(scope="module")
def model() -> GptOss:
    config = make_config(layer_types=alternating(3))
    return GptOss(config, tensors_of(config), torch.float32)


SIZES = ("x", "a", "q", "logits", "positions", "cu_seqlens", "cu_seqlens_q", "cache_seqlens", "max_seqlen_q")


class Compiler:
    """Imitates kernels that compile a program for each size class: of tokens, of sequences, of the longest chunk, and of lists."""

    def __init__(self) -> None:
        self._compiled: set[tuple[Any, ...]] = set()

    def __call__(self, call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        given = call.arguments
        options = (call.mode, given.get("window_left"), given.get("residual") is None)
        for name in SIZES:
            value = given.get(name)
            if value is not None:
                size = value.shape[0] if isinstance(value, torch.Tensor) else value
                program = (*options, name, (size - 1).bit_length())
                self._compile(program)
        if given.get("counts") is not None:  # lists of penalties, whose lengths are powers of two
            self._compile((*options, given["counts"].shape[1]))
        return run

    def _compile(self, program: tuple[Any, ...]) -> None:
        if program not in self._compiled:
            compilation.start(str(program), "Made-up").finish()
            self._compiled.add(program)


@pytest.fixture
def compiler() -> Iterator[None]:
    with watch_calls(Compiler()):
        yield


def random_requests(count: int, vocab: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    prompts = random_prompts([rng.randint(1, 14) for _ in range(count)], vocab, seed)
    choices = [Sampling(), Sampling(1.0, 5, 0.9, seed), Sampling(repetition_penalty=1.2, logit_bias={1: 1.0})]
    return [Request(prompt, rng.randint(1, 6), rng.choice(choices)) for prompt in prompts]


def test_no_request_compiles(model: GptOss, compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "LEAST_WIDTH", 2)
    engine = make_engine(model, warm="all", **LIMITS, **MODES["static, overlapping"])
    assert engine.warmed is not None
    assert engine.warmed.programs > 40
    assert not engine.compilations
    rng = random.Random(0)
    with compile_policy("forbid"):
        for seed in range(4):
            numbers = [engine.add(request) for request in random_requests(rng.randint(1, 5), model.config.vocab_size, seed)]
            while not engine.idle:
                engine.step()
                if rng.random() < 0.1:
                    engine.cancel(rng.choice(numbers))
    assert not engine.compilations
    assert engine.steps[Phase.PREFILL]
    assert engine.steps[Phase.EXTEND]
    assert engine.steps[Phase.MIXED]
    assert engine.steps[Phase.DECODE]


def test_a_warm_up_changes_nothing(model: GptOss) -> None:
    """A warm engine generates the same tokens. The warm-up writes nothing to the cache, which may hold other sequences."""
    requests = random_requests(3, model.config.vocab_size, 7)
    limits = {"prefill_tokens": 4, "max_sequences": 1}
    cold = make_engine(model, **limits)
    for tensor in (*cold.cache.k, *cold.cache.v):
        tensor.fill_(0.5)
    layers, free_pages = model.layers, cold.cache.allocator.free_pages
    warm = Engine(model, cold.cache, warm="all", **limits)
    assert model.layers is layers
    assert cold.cache.allocator.free_pages == free_pages
    assert all((tensor == 0.5).all() for tensor in (*cold.cache.k, *cold.cache.v))
    assert [each.tokens for each in warm.generate(requests)] == [each.tokens for each in cold.generate(requests)]


def test_what_a_warm_up_and_a_step_log(
    model: GptOss, compiler: None, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_made", {})  # other tests may have filled it, and a receipt selects again for each entry
    file = tmp_path / "receipt.json"
    with caplog.at_level(logging.INFO, "gpt_oss"):
        engine = make_engine(model, warm="all", prefill_tokens=1, max_sequences=1, receipt=file)
    receipt = read_receipt(file)
    assert caplog.messages == [str(engine.warmed), f"{receipt.summary}; {file}"]
    assert {"attention.mha_prefill", "attention.mha_decode_with_kvcache"} <= {row.operator for row in receipt.rows if row.kernel}
    assert f"{len(shapes_of(engine))} passes" in caplog.text
    caplog.clear()
    cold = make_engine(model, prefill_tokens=64)
    assert cold.warmed is None
    cold.add(Request([1] * 40, 1))
    cold.step()
    assert f"a prefill pass compiled {len(cold.compilations)} programs in" in caplog.text
    caplog.clear()
    cold.add(Request([1] * 40, 1))
    cold.step()
    assert not caplog.messages


def shapes_of(engine: Engine) -> list[Any]:
    return list(shapes(engine.prefill_tokens, engine.max_sequences, 0, engine.model.max_positions, engine.cache.page_size))


def test_a_warm_up_under_forbid(model: GptOss, compiler: None) -> None:
    with compile_policy("forbid"), pytest.raises(CompilationForbiddenError, match="is not compiled yet"):
        make_engine(model, warm="all", **LIMITS)
    with pytest.raises(ValueError, match="warm must be 'all' or None, got 'some'"):
        make_engine(model, warm="some")


def test_shapes() -> None:
    assert sizes_up_to(1) == [1]
    found = list(shapes(prefill_tokens=8, max_sequences=3, decoded=2, longest=64, page_size=4))
    assert {shape.lengths for shape in found if shape.phase is Phase.PREFILL} >= {(1,), (8,), (3, 3, 2), (1, 1, 6)}
    assert {shape.max_seqlen_k for shape in found if shape.phase is Phase.EXTEND} == {4, 64}
    assert {shape.lengths for shape in found if shape.phase is Phase.DECODE} == {(1, 1, 1)}
    assert {len(shape.lengths) for shape in found if shape.phase is Phase.MIXED} == {2, 3}
    assert (
        max(max(shape.lengths) for shape in shapes(prefill_tokens=256, max_sequences=8, decoded=8, longest=40, page_size=4)) <= 40
    )
    assert len(list(shapes(16384, 64, 64, 32768, 64))) < 400  # a pass takes milliseconds, and so does each first call of a kernel
