"""Tests the compile policy: the messages about kernels that compile a program, the effect of each policy, and how long a setting
applies."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from tokenspeed_kernel_base import compilation, config
from tokenspeed_kernel_base.compilation import (
    CompilationForbiddenError,
    compilations,
    compile_policy,
    current_compile_policy,
    set_compile_policy,
)
from tokenspeed_kernel_base.ops.norm.rmsnorm import rmsnorm
from tokenspeed_kernel_base.registry import register_kernel


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_process_policy", None)
    monkeypatch.setattr(compilation, "_events", [])


@pytest.fixture
def compiling_kernel() -> None:
    """Registers a kernel of `rmsnorm`. Each call of this kernel compiles a program."""

    @register_kernel("norm", "rmsnorm", name="compiling_rmsnorm", solution="made_up", signatures=None, traits={"residual": any})
    def launch(x: Any, weight: Any, eps: float, residual: Any, out: Any, residual_out: Any) -> Any:
        compilation.start("scale<4>", "Made-up").finish()
        return torch.zeros_like(x)


def call() -> None:
    rmsnorm(torch.ones(2, 4), torch.ones(4), override="compiling_rmsnorm")


def test_an_event_names_program_operator_and_call(compiling_kernel: None) -> None:
    call()
    (event,) = compilations()
    assert (event.program, event.compiler, event.operator, event.kernel) == (
        "scale<4>",
        "Made-up",
        "norm.rmsnorm",
        "compiling_rmsnorm",
    )
    assert event.call.startswith("x float32[2, 4], weight float32[4], eps 1e-")
    assert event.seconds >= 0
    call()
    assert len(compilations()) == 2
    assert compilations(since=1) == compilations()[1:]


def test_outside_of_a_call_there_is_no_operator() -> None:
    compilation.start("scale<4>", "Made-up").finish()
    (event,) = compilations()
    assert event.operator == event.kernel == event.call == ""
    assert str(event).startswith("Made-up compiled scale<4> in ")


def test_warn_logs_one_line(compiling_kernel: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), compile_policy("warn"):
        call()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("Made-up compiled scale<4> for norm.rmsnorm (compiling_rmsnorm), call x float32[2, 4]")
    caplog.clear()
    call()
    assert not caplog.records


def test_forbid_raises_before_compiling(compiling_kernel: None) -> None:
    with compile_policy("forbid"), pytest.raises(CompilationForbiddenError) as raised:
        call()
    said = str(raised.value)
    assert said.startswith("scale<4> is not compiled yet for norm.rmsnorm (compiling_rmsnorm), call x float32[2, 4]")
    assert "tokenspeed-kernel pack build" in said
    assert not compilations()


def test_a_block_holds_for_its_thread_and_a_process_policy_for_all() -> None:
    seen: list[str] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.append(current_compile_policy()))
        thread.start()
        thread.join()

    with compile_policy("forbid"):
        look()
        set_compile_policy("warn")
        look()
        assert current_compile_policy() == "forbid"
    assert seen == ["allow", "warn"]
    assert current_compile_policy() == "warn"
    set_compile_policy(None)
    assert current_compile_policy() == "allow"


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_KERNEL_COMPILE_POLICY", "forbid")
    config.reload_settings()
    assert current_compile_policy() == "forbid"
    monkeypatch.setenv("TOKENSPEED_KERNEL_COMPILE_POLICY", "never")
    with pytest.raises(config.ConfigurationError, match=r"_POLICY .* allow, warn, forbid, got 'never'"):
        config.reload_settings()


@pytest.mark.parametrize("wrong", ["never", "", None])
def test_a_policy_that_does_not_exist(wrong: Any) -> None:
    with pytest.raises(ValueError, match="policy must be one of allow, warn, forbid"), compile_policy(wrong):
        pass
    with pytest.raises(ValueError, match="policy must be one of"):
        set_compile_policy("Forbid")
