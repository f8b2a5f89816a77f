"""Tests the compile policy with a real compiler: Triton compiles for sm_90, and kernels run on the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenspeed_kernel as tk
from tokenspeed_kernel_base import config, packs
from tokenspeed_kernel_base.compilation import CompilationForbiddenError, compilations, compile_policy
from tokenspeed_kernel_base.storage import StorageWarning

triton = pytest.importorskip("triton")
emulated_sm90 = pytest.importorskip("sm90_emulator").emulated_sm90

KERNEL = "triton_rmsnorm"


def call() -> Any:
    return tk.rmsnorm(torch.ones(2, 64), torch.ones(64), override=KERNEL)


def forget() -> None:
    """Makes Triton look kernels up on disk again, as in a new process."""
    from tokenspeed_kernel.triton.norm.rmsnorm_device import rmsnorm_kernel

    rmsnorm_kernel.device_caches.clear()


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yields an emulated H200 for Triton, with an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    forget()
    with emulated_sm90(triton=True):
        yield
    forget()


def test_triton_compiles_once_and_loads_from_disk_under_forbid(emulated: None) -> None:
    begun = len(compilations())
    call()
    (event,) = compilations(begun)
    assert (event.program, event.compiler, event.operator, event.kernel) == (
        "rmsnorm_kernel",
        "Triton",
        "norm.rmsnorm",
        KERNEL,
    )
    assert event.call.startswith("x float32[2, 64], weight float32[64]")
    assert event.seconds > 0
    call()
    forget()
    with compile_policy("forbid"):
        assert torch.allclose(call(), torch.ones(2, 64))
    assert len(compilations(begun)) == 1


def test_forbid_stops_triton_before_it_compiles(emulated: None, tmp_path: Path) -> None:
    begun = len(compilations())
    message = r"rmsnorm_kernel is not compiled yet for norm\.rmsnorm \(triton_rmsnorm\), call x float32\[2, 64\]"
    with compile_policy("forbid"), pytest.raises(CompilationForbiddenError, match=message):
        call()
    assert not [*(tmp_path / "triton").rglob("*.json")]
    call()  # the rejected call must have left no state behind
    assert len(compilations(begun)) == 1


def test_kernels_of_others_are_left_alone(emulated: None) -> None:
    """Asserts that the policy applies only to launches by registered kernels. Other uses of a Triton kernel are not affected."""
    from tokenspeed_kernel.triton.norm.rmsnorm_device import rmsnorm_kernel

    call()
    x, begun = torch.ones(2, 128), len(compilations())
    with compile_policy("forbid"):
        compiled = rmsnorm_kernel.warmup(
            x, x, x, x, x, 2, 128, 1e-6, 128, 128, 1, 128, 128,
            HAS_RESIDUAL=False, ROWS=2, BLOCK=128, ONE_PASS=True, INTERPRETED=False, EARLY=False, grid=(1,),
        )  # fmt: skip
    assert compiled is not None
    assert len(compilations()) == begun


def test_a_cache_manager_that_was_set_before_is_used(emulated: None) -> None:
    from triton.runtime.cache import FileCacheManager

    used: list[str] = []

    class Own(FileCacheManager):
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            used.append(key)
            super().__init__(key, override, dump)

    triton.knobs.cache.manager_class = Own
    from tokenspeed_kernel_base.triton_cache_device import install

    install()
    begun = len(compilations())
    call()
    assert used
    assert len(compilations(begun)) == 1
    del triton.knobs.cache.manager_class
    install()


def test_a_pack_of_another_build_of_triton_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wheels of one Triton version, for two Python versions, have different cache keys. So programs of the other wheel would
    never be found. The refusal must say why."""
    from tokenspeed_kernel_base import triton_cache_device

    made = triton_cache_device.toolchain()
    (tmp_path / "triton" / "key").mkdir(parents=True)
    (tmp_path / "triton" / "key" / "kernel.json").write_text("{}")
    packs.write_manifest(tmp_path, {"distributions": {}, "toolchains": {"triton": made}})
    monkeypatch.setenv("TOKENSPEED_KERNEL_PACKS", str(tmp_path))
    config.reload_settings()
    assert packs.find_folder("triton", "key", triton_cache_device.toolchain())
    monkeypatch.setattr(triton_cache_device, "triton_key", lambda: "another wheel")
    with pytest.warns(StorageWarning, match=r"made with triton .*build .*this is triton .*build"):
        assert not packs.find_folder("triton", "key", triton_cache_device.toolchain())


def test_host_code_is_found_in_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles its driver, and in some releases each kernel's launcher, with the system's C compiler."""
    from tokenspeed_kernel_base import triton_cache_device

    module = tmp_path / "pack" / "triton" / "key" / "cuda_utils.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(b"code")
    packs.write_manifest(tmp_path / "pack", {"distributions": {}, "toolchains": {"triton": triton_cache_device.toolchain()}})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENSPEED_KERNEL_PACKS", str(tmp_path / "pack"))
    monkeypatch.setattr(config, "_settings", config.read_settings())
    assert triton_cache_device.PolicyCache("key").get_file("cuda_utils.so") == str(module)
    assert triton_cache_device.PolicyCache("key").get_file("other.so") is None
    assert triton_cache_device.PolicyCache("other").get_file("cuda_utils.so") is None
