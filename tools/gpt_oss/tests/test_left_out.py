"""Tests the measurement of a pass without the calls of one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpt_oss_models import make_config, random_prompts, tensors_of

from gpt_oss import left_out
from gpt_oss.batch import Piece, make_batch
from gpt_oss.cache import PagedKVCache
from gpt_oss.kernels import listen
from gpt_oss.model import GptOss


def test_earlier_results_stand_in_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    model = GptOss(config, tensors_of(config), torch.float32)
    cache = PagedKVCache(config, 4, 16, torch.float32)
    batch = make_batch([Piece(random_prompts((9,), config.vocab_size)[0], 0, [0])], cache, torch.device("cpu"))
    passes: list[tuple[torch.Tensor, dict[tuple[str, str], int]]] = []

    def run() -> None:
        with listen() as listener:
            logits = model.forward(batch, cache)
        passes.append((logits, {(heard.operator, heard.kernel): heard.calls for heard in listener.heard()}))

    def microseconds(forward: Callable[[], Any], device: torch.device) -> float:
        forward()
        return float(100 - len(passes))

    monkeypatch.setattr(left_out, "_microseconds", microseconds)
    whole, found = left_out.leave_out(run, torch.device("cpu"))
    assert whole == 98  # the time of the second pass; the first pass is recorded
    assert [each.microseconds for each in found] == [float(number) for number in range(len(found), 0, -1)]
    every = passes[0][1]
    assert {(each.operator, each.kernel): each.calls for each in found}.items() <= every.items()
    assert ("moe.moe_apply", 2) in {(each.operator, each.calls) for each in found}
    assert not {each.operator for each in found} & {"attention.rmsnorm_qkv_rope", "moe.rmsnorm_moe_topk"}  # not fused on a CPU
    assert len(passes) == 2 + len(found)
    for each in found:
        logits, heard = passes[1 + int(each.microseconds)]
        # Only a pass without apply_rope has other logits, because apply_rope writes in place.
        assert torch.equal(logits, passes[0][0]) == (each.operator != "embedding.apply_rope"), each
        assert (each.operator, each.kernel) in heard
