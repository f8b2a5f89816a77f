"""Compares our sampler with SGLang's own, in SGLang's classes, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")

from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_sglang import parts, receipt, sampling
from tokenspeed_kernel_sglang.sampling import TokenspeedSampler
from tokenspeed_kernel_sglang.settings import Settings

VOCAB = 48


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our sampler. SGLang's constructor needs an engine's process groups and options, so the fixture sets its attributes."""

    def construct(self: Any) -> None:
        torch.nn.Module.__init__(self)
        self.tp_sync_group = self.rl_on_policy_target = None
        self.enable_deterministic = self.use_log_softmax_logprob = self.use_ascend_backend = False

    monkeypatch.setattr(Sampler, "__init__", construct)
    sampling._served.cache_clear()
    torch.manual_seed(3)
    yield TokenspeedSampler()
    sampling._served.cache_clear()


def draw_logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def info(rows: int, temperature: float = 1.0, top_k: int = TOP_K_ALL, top_p: float = 1.0, min_p: float = 0.0, **more: Any) -> Any:
    """SGLang's settings of a batch whose rows are alike."""
    full = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype)  # noqa: E731
    return SimpleNamespace(
        **{
            "temperatures": full(temperature).view(-1, 1),
            "top_ks": full(top_k, torch.int32),
            "top_ps": full(top_p),
            "min_ps": full(min_p),
            "is_all_greedy": False,
            "need_top_k_sampling": top_k != TOP_K_ALL,
            "need_top_p_sampling": top_p != 1.0,
            "need_min_p_sampling": min_p != 0.0,
            "sampling_seed": None,
            "has_custom_logit_processor": False,
            "grammars": None,
            **more,
        }
    )


def run(sampler: Any, logits: torch.Tensor, batch: Any, return_logprob: bool = False) -> torch.Tensor:
    rows = len(logits)
    output = SimpleNamespace(next_token_logits=logits.clone())
    tokens: torch.Tensor = sampler(output, batch, return_logprob, [0] * rows, [None] * rows, torch.arange(rows))
    return tokens


def test_greedy_batches(sampler: Any) -> None:
    logits = draw_logits(5)
    tokens = run(sampler, logits, info(5, is_all_greedy=True))
    assert torch.equal(tokens, logits.argmax(-1))
    assert receipt().served("sampling")


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "min_p": 0.05}, {}])
def test_tokens_are_those_of_sglang(sampler: Any, options: dict[str, Any]) -> None:
    """With one filter, or with top-k and min-p, both samplers draw from the same tokens with the same frequencies."""
    rows, temperature = 4000, 0.8
    logits = draw_logits(1).expand(rows, -1)
    tokens = run(sampler, logits, info(rows, temperature, **options))
    assert tokens.dtype == torch.int32
    probs = torch.softmax(logits[:1] / temperature, -1)
    batch = info(1, temperature, **options)
    order = probs.sort(descending=True)
    kept = torch.arange(VOCAB) < batch.top_ks.view(-1, 1)
    kept &= order.values.cumsum(-1) - order.values <= batch.top_ps.view(-1, 1)
    kept &= order.values >= order.values[:, :1] * batch.min_ps.view(-1, 1)
    expected = torch.zeros(VOCAB).scatter(0, order.indices[0], torch.where(kept, order.values, 0)[0])
    expected /= expected.sum()
    counts = torch.bincount(tokens.long(), minlength=VOCAB) / rows
    assert (counts[expected == 0] == 0).all()
    assert ((counts - expected).abs() <= 5 * (expected * (1 - expected) / rows).sqrt() + 1e-3).all()


def test_rows_and_steps_have_their_own_random_numbers(sampler: Any) -> None:
    logits = torch.zeros(64, VOCAB)
    first, second = (run(sampler, logits, info(64)) for _ in range(2))
    assert len(set(first.tolist())) > 20
    assert not torch.equal(first, second)
    torch.manual_seed(3)  # another rank
    assert torch.equal(run(TokenspeedSampler(), logits, info(64)), first)


def test_seeds_of_requests_decide(sampler: Any) -> None:
    """A request with a seed gets the same token in any batch."""
    logits = torch.zeros(8, VOCAB)
    seeds = torch.tensor([7, 1, 2, 3, 4, 5, 6, 7])
    tokens = run(sampler, logits, info(8, sampling_seed=seeds))
    output = SimpleNamespace(next_token_logits=logits[:1].clone())
    alone = sampler(output, info(1, sampling_seed=seeds[7:]), False, [0], [None], torch.tensor([7]))
    assert alone.item() == tokens[7].item()


def test_log_probabilities_run_sglangs_own(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "forward", lambda self, *arguments, **options: "SGLang's own")
    assert run(sampler, draw_logits(2), info(2), return_logprob=True) == "SGLang's own"
    (row,) = receipt().rows
    assert (row.kind, row.reason) == ("batches with log probabilities", "it does not serve log probabilities")
    assert run(sampler, draw_logits(2), info(2, sampling_mask_batch_indices=torch.zeros(1))) == "SGLang's own"


def test_without_a_kernel_sglangs_own_runs(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any, arguments: dict[str, Any]) -> Any:
        raise NotServedError(f"no kernel for {arguments['logits'].shape[1]} tokens")

    monkeypatch.setattr(sampling, "kernel_for", refuse)
    monkeypatch.setattr(Sampler, "forward", lambda self, *arguments, **options: "SGLang's own")
    assert run(sampler, draw_logits(2), info(2)) == "SGLang's own"
    assert receipt().rows[0].reason == f"no kernel for {VOCAB} tokens"


def test_the_switch_registers_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our sampler has the names of SGLang's backends, so that its base class runs the batches that it does not serve."""
    monkeypatch.setattr(sglang_sampler, "_CUSTOM_SAMPLER_FACTORIES", {})
    monkeypatch.setattr(parts, "_hooked", set())
    off = dict.fromkeys(("attention", "experts"), False)
    parts.register_parts(Settings(**off))
    assert sglang_sampler._CUSTOM_SAMPLER_FACTORIES == {}
    for _ in range(2):
        parts.register_parts(Settings(**off, sampling=True))
    assert dict.fromkeys(parts.SAMPLERS, TokenspeedSampler) == sglang_sampler._CUSTOM_SAMPLER_FACTORIES
