"""Tests decode passes in static buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt_oss_models import YARN, make_config, random_prompts, tensors_of
from torch import Tensor

from gpt_oss import Engine, GptOss, PagedKVCache, Request, Sampling, decoder
from gpt_oss.decoder import Decoder, batch_sizes
from gpt_oss.sequences import Running


@pytest.fixture(scope="module")
def model() -> GptOss:
    config = make_config(rope=YARN)
    return GptOss(config, tensors_of(config), torch.float32)


def make_engine(model: GptOss, **options: Any) -> Engine:
    return Engine(model, PagedKVCache(model.config, 40, 4, torch.float32), decode="static", **options)


def test_batch_sizes() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(5) == (1, 2, 4, 5)
    assert batch_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert batch_sizes(130)[-5:] == (80, 96, 112, 128, 130)


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_sent_while_the_same_sequences_go_on(model: GptOss, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    loads: list[int] = []
    load = Decoder._load

    def counted(self: Decoder, sequences: Any, *rest: Any) -> None:
        loads.append(len(sequences))
        load(self, sequences, *rest)

    monkeypatch.setattr(Decoder, "_load", counted)
    engine = make_engine(model, overlap=overlap)
    prompts = random_prompts((3, 5, 9), model.config.vocab_size)
    engine.generate([Request(prompt, 8 + 5 * (number == 1)) for number, prompt in enumerate(prompts)])
    assert loads == [3, 1], "once for all three, and once when only one is left"


def test_a_pass_ahead(model: GptOss) -> None:
    engine = make_engine(model, overlap=True)
    engine.add(Request([1, 2, 3], 3))
    counts = []
    while not engine.idle:
        counts.append((len(engine.step()), sum(engine.steps.values())))
    assert counts == [(0, 1), (1, 2), (1, 3), (1, 3)], "events of a step, and passes launched by then"


def test_passes_write_to_the_pages_of_their_sequences(model: GptOss) -> None:
    """Nothing is written beyond a sequence's pages, whichever sequence used the row before."""
    cache = PagedKVCache(model.config, 20, 4, torch.float32)
    passes = Decoder(model, cache, (1, 2, 4), capture=False)
    held = [
        Running(n, Request([1]), tuple(range(first, last)), 1, 1, 5) for n, (first, last) in enumerate([(0, 9), (12, 14), (14, 15)])
    ]
    for sequences in (held[:2], held[1:], held[1:2]):
        size = next(size for size in passes.sizes if size >= len(sequences))
        passes.launch(sequences, None)
        for row, sequence in enumerate(sequences):
            beyond = passes._written_pages.shape[1] - len(sequence.pages)
            assert passes._written_pages[row].tolist() == [*sequence.pages, *[-1] * beyond]
        assert (passes._written_pages[len(sequences) : size] == -1).all()
        assert (passes._page_table >= 0).all()


def test_repetitions_write_nothing_and_choose_no_other_experts(model: GptOss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sequences run in a batch of eight. The padding rows repeat a sequence, write no cache slot, and select the experts of
    that sequence."""
    prompts = random_prompts((3, 5, 9, 2, 7), model.config.vocab_size)
    requests = [Request(prompt, 6, Sampling(0.7, seed=number)) for number, prompt in enumerate(prompts)]
    engine = make_engine(model, max_sequences=8)
    slots: list[Tensor] = []
    routed: list[Tensor] = []

    class Watching:
        def __getattr__(self, name: str) -> Any:
            function = getattr(ops, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                if name == "rmsnorm_qkv_rope":
                    slots.append(kwargs["slot_mapping"].clone())
                if name == "rmsnorm_moe_topk":
                    routed.append(result[2].clone())
                return result

            return call

    ops = model.ops
    monkeypatch.setattr(model, "ops", Watching())
    completions = engine.generate(requests)
    passes = [index for index, its in enumerate(slots) if len(its) == 8]
    assert len(passes) == 5 * len(model.layers)
    for index in passes:
        assert (slots[index][:5] >= 0).all()
        assert (slots[index][5:] == -1).all()
        assert (routed[index][5:] == routed[index][0]).all()
    monkeypatch.setattr(model, "ops", ops)
    alone = [make_engine(model).generate([request])[0] for request in requests]
    assert [c.tokens for c in completions] == [c.tokens for c in alone]


@pytest.mark.parametrize("sizes", [(2,), (1, 3), (2, 5, 7)])
def test_chosen_sizes(model: GptOss, sizes: tuple[int, ...]) -> None:
    """Batches that are larger than the largest chosen size run as eager passes."""
    prompts = random_prompts((3, 5, 9, 2, 7), model.config.vocab_size)
    requests = [Request(prompt, 3 + number, Sampling(0.7, seed=number)) for number, prompt in enumerate(prompts)]
    engine = make_engine(model, decode_sizes=sizes)
    completions = engine.generate(requests)
    assert [c.tokens for c in completions] == [make_engine(model).generate([request])[0].tokens for request in requests]
    assert engine.decoder is not None
    assert engine.decoder.sizes == sizes


def test_graphs_need_a_gpu(model: GptOss) -> None:
    with pytest.raises(ValueError, match=r"decode must be .*without graphs, got 'graphs'"):
        Engine(model, PagedKVCache(model.config, 4), decode="graphs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": "lazy"}, "decode must be"),
        ({"overlap": 1}, "overlap must be"),
        ({"decode_sizes": ()}, "decode_sizes must be at least one size, ascending, got \\[\\]"),
        ({"decode_sizes": (4, 2)}, "decode_sizes must be at least one size, ascending, got \\[4, 2\\]"),
        ({"decode_sizes": (0, 2)}, r"decode_sizes\[0\] must be an int of at least 1, got 0"),
    ],
)
def test_impossible_modes(model: GptOss, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Engine(model, PagedKVCache(model.config, 4), **options)


def test_a_pass_that_cannot_be_captured_says_so(model: GptOss, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", Refused)
    with pytest.raises(RuntimeError, match=r'8 sequences cannot be captured .* decode="eager"'):
        decoder.Decoder(model, PagedKVCache(model.config, 4, 4, torch.float32), (1, 8), capture=True)
