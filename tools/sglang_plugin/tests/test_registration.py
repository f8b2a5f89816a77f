"""Tests the settings, and the hooks that the entry point registers with SGLang."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")

from sglang.srt.plugins.hook_registry import HookRegistry

from tokenspeed_kernel_sglang import parts, receipt, register_decode_step
from tokenspeed_kernel_sglang.layers import HOOKS
from tokenspeed_kernel_sglang.record import record
from tokenspeed_kernel_sglang.settings import Settings, read_settings


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces SGLang's `HookRegistry.register`. Returns the dictionary in which registrations are collected."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: found.update({target: (hook, kind.value)}))
    monkeypatch.setattr(parts, "_hooked", set())
    return found


def test_settings() -> None:
    assert read_settings({}) == Settings()
    env = {
        "TOKENSPEED_SGLANG_NORMS": "1",
        "TOKENSPEED_SGLANG_EXPERTS": "0",
        "TOKENSPEED_SGLANG_MLA": "0",
        "TOKENSPEED_SGLANG_ATTENTION_REPLACES": "fa3, triton",
        "OTHER": "x",
    }
    assert read_settings(env) == Settings(norms=True, experts=False, mla=False, attention_replaces=("fa3", "triton"))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TOKENSPEED_SGLANG_NORMS": "yes"}, "TOKENSPEED_SGLANG_NORMS must be 1 or 0, got 'yes'"),
        ({"TOKENSPEED_SGLANG_NORM": "1"}, "TOKENSPEED_SGLANG_NORM is no setting; expected one of TOKENSPEED_SGLANG_ACTIVATIONS"),
    ],
)
def test_invalid_settings(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(env)


def test_entry_points() -> None:
    found = {entry.value: entry.name for entry in entry_points(group="sglang.srt.plugins")}
    assert found["tokenspeed_kernel_sglang:register"] == "tokenspeed_kernel"
    assert found["tokenspeed_kernel_sglang:register_decode_step"] == "nvidia_megakernel"  # the name that SGLang asks for


@pytest.mark.skipif(importlib.util.find_spec("sglang.kernels") is not None, reason="SGLang from 0.5.23 on has the slot")
def test_releases_without_the_slot_of_decode_steps(registered: dict[str, Any]) -> None:
    register_decode_step()
    assert registered == {}


def test_importing_the_package_imports_no_engine() -> None:
    program = "import sys, tokenspeed_kernel_sglang; print(sorted({'torch', 'sglang'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("part", sorted(HOOKS))
def test_each_part_has_a_switch(part: str, registered: dict[str, Any]) -> None:
    off = dict.fromkeys(("attention", "experts", *HOOKS), False)
    parts.register_parts(Settings(**{**off, part: True}))
    assert registered == {target: (hook, "around") for target, hook in HOOKS[part].items()}
    registered.clear()
    parts.register_parts(Settings(**{**off, part: True}))
    assert registered == {}


def test_a_missing_hook_is_logged(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(HOOKS, "norms", {"sglang.srt.layers.layernorm.RMSNorm.forward_moved": print})
    with caplog.at_level(logging.ERROR):
        parts.register_parts(Settings(attention=False, experts=False, norms=True, activations=True, rope=True))
    assert "tokenspeed_kernel_sglang: no norms, because a hook of SGLang" in caplog.text
    assert "forward_moved" in caplog.text
    assert len(registered) == 3


def test_a_decision_is_one_line_of_the_log_and_one_row(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        record("norms", "RMSNorm of 64", ("a_kernel",))
        record("norms", "RMSNorm of 64", ("a_kernel",))
        record("rope", "RotaryEmbedding of 64", reason="it does not fit")
    assert [entry.message for entry in caplog.records] == [
        "tokenspeed_kernel_sglang: norms, RMSNorm of 64: a_kernel",
        "tokenspeed_kernel_sglang: rope, RotaryEmbedding of 64: SGLang's own, because it does not fit",
    ]
    assert [(row.part, row.layers) for row in receipt().rows] == [("norms", 2), ("rope", 1)]
