"""Tests repeated launches: what repeats and what does not, and that a repeated launch has the arguments of Triton's own launch."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernel.triton import repeated
from tokenspeed_kernel.triton.repeated import Launch, Repeated
from tokenspeed_kernel_base.platform import PlatformInfo, named_platform, use_platform

Arguments = tuple[Any, ...]


class _Program:
    """A compiled program that records its launches."""

    def __init__(self, backend: str = "cuda") -> None:
        self.function, self.packed_metadata = "function", "packed"
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend=backend))
        self.launched: list[Arguments] = []

    def run(self, *arguments: Any) -> None:
        self.launched.append(arguments)


class _Kernel:
    """A Triton kernel that records the launches that Triton makes. ``program`` is what a launch returns."""

    def __init__(self, program: _Program | None) -> None:
        self.arg_names = ["x", "y", "rows", "WIDE"]
        self.pre_run_hooks: list[Any] = []
        self.program = program
        self.launched: list[tuple[Arguments, Arguments, dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Program | None]:
        def launch(*arguments: Any, **options: Any) -> _Program | None:
            self.launched.append((grid, arguments, options))
            return self.program

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces Triton's driver and hooks. ``device`` is the current device."""
    fake = SimpleNamespace(device=0, hooks=SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None))
    fake.active = SimpleNamespace(get_current_device=lambda: fake.device, get_current_stream=lambda device: 7 + device)
    monkeypatch.setattr(repeated, "_release", lambda: "3.6.0+rocm7.0.2")
    monkeypatch.setattr(repeated, "_triton_driver", SimpleNamespace(driver=fake))
    monkeypatch.setattr(repeated, "_triton_knobs", SimpleNamespace(runtime=fake.hooks))
    return fake


def _launch(repeats: Repeated, x: Tensor, y: Tensor | None, key: Any = ()) -> None:
    repeats((x, y), key, lambda: Launch((3, 2), (len(x),), {"WIDE": y is not None, "num_warps": 4}))


def _rows(count: int = 4, columns: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, columns, dtype=dtype)


def test_a_launch_with_other_tensors_of_the_same_shapes_repeats(driver: SimpleNamespace) -> None:
    kernel = _Kernel(_Program())
    repeats = Repeated(lambda: kernel)
    _launch(repeats, _rows(), _rows())
    x, y = _rows(), _rows()
    _launch(repeats, x, y)
    assert len(kernel.launched) == 1
    (launched,) = kernel.program.launched
    assert launched[:9] == (3, 2, 1, 7, "function", "packed", None, None, None)
    assert launched[9] is x
    assert launched[10] is y
    assert launched[11:] == (4, True)


_MISALIGNED = torch.zeros(100)[1:33].view(4, 8)
_OTHERS: dict[str, Callable[[], tuple[Tensor, Tensor | None, Any]]] = {
    "shape": lambda: (_rows(5), _rows(), ()),
    "strides": lambda: (_rows(4, 16)[:, :8], _rows(), ()),
    "dtype": lambda: (_rows(dtype=torch.int32), _rows(), ()),
    "address": lambda: (_MISALIGNED, _rows(), ()),
    "absent": lambda: (_rows(), None, ()),
    "same tensor": lambda: (same := _rows(), same, ()),
    "key": lambda: (_rows(), _rows(), (1,)),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_other_launches_are_made_by_triton(name: str, driver: SimpleNamespace) -> None:
    kernel = _Kernel(_Program())
    repeats = Repeated(lambda: kernel)
    x, y, key = _OTHERS[name]()
    _launch(repeats, _rows(), _rows())
    _launch(repeats, x, y, key)
    assert len(kernel.launched) == 2
    assert not kernel.program.launched
    _launch(repeats, _rows(), _rows())  # the first launch is still remembered
    _launch(repeats, *_OTHERS[name]())
    assert len(kernel.program.launched) == (1 if name == "address" else 2)


def test_the_last_launches_are_remembered(driver: SimpleNamespace) -> None:
    kernel = _Kernel(_Program())
    repeats = Repeated(lambda: kernel)
    sizes = range(1, repeated._REMEMBERED + 2)
    for rows in sizes:
        _launch(repeats, _rows(rows), None)
    for rows in reversed(sizes):
        _launch(repeats, _rows(rows), None)
    assert [len(launched[9]) for launched in kernel.program.launched] == [*reversed(sizes)][:-1]


def test_the_device_the_driver_and_hooks_decide(driver: SimpleNamespace) -> None:
    kernel = _Kernel(_Program())
    repeats = Repeated(lambda: kernel)
    _launch(repeats, _rows(), None)
    driver.device = 1
    _launch(repeats, _rows(), None)
    assert len(kernel.launched) == 2
    _launch(repeats, _rows(), None)
    assert len(kernel.launched) == 2
    assert kernel.program.launched[-1][3] == 8
    driver.active = SimpleNamespace(**vars(driver.active))
    _launch(repeats, _rows(), None)
    assert len(kernel.launched) == 3
    driver.hooks.launch_enter_hook = SimpleNamespace(calls=[])  # a list of hooks that is empty
    _launch(repeats, _rows(), None)
    assert len(kernel.launched) == 3
    for name, hook in (("launch_enter_hook", print), ("launch_exit_hook", SimpleNamespace(calls=[print]))):
        setattr(driver.hooks, name, hook)
        _launch(repeats, _rows(), None)
        setattr(driver.hooks, name, None)
    assert len(kernel.launched) == 5


def test_a_change_of_the_platform_forgets(driver: SimpleNamespace) -> None:
    kernel = _Kernel(_Program())
    repeats = Repeated(lambda: kernel)
    _launch(repeats, _rows(), None)
    with use_platform(named_platform("sm_90")):
        _launch(repeats, _rows(), None)
    assert len(kernel.launched) == 2


@pytest.mark.parametrize("why", ["interpreted", "hook", "default"])
def test_some_kernels_do_not_repeat(why: str, driver: SimpleNamespace) -> None:
    kernel = _Kernel(None if why == "interpreted" else _Program())
    kernel.pre_run_hooks = [print] if why == "hook" else []
    kernel.arg_names += ["OTHER"] if why == "default" else []  # an argument that the launch does not state
    repeats = Repeated(lambda: kernel)
    for _ in range(3):
        _launch(repeats, _rows(), None)
    assert len(kernel.launched) == 3


def test_unknown_releases_of_triton_make_all_launches(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_release", lambda: "3.10.0")
    kernel = _Kernel(_Program())
    repeats = Repeated(lambda: kernel)
    for _ in range(3):
        _launch(repeats, _rows(), None)
    assert len(kernel.launched) == 3


def test_on_amd_the_size_of_the_storage_matters(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_SMALL_STORAGE", 4 * 32)
    for backend, expected in (("hip", 2), ("cuda", 1)):
        kernel = _Kernel(_Program(backend))
        repeats = Repeated(lambda kernel=kernel: kernel)
        _launch(repeats, _rows(), None)
        _launch(repeats, _rows(), None)
        _launch(repeats, _rows(8)[:4], None)
        assert len(kernel.launched) == expected


# -- the kernels that repeat -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arguments]]:
    """Inside the test, Triton compiles for an H200. Launches are recorded instead of made."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton's compiler")
    from tokenspeed_kernel.workbench.packing import triton_driver_device as no_device

    launches: list[Arguments] = []
    monkeypatch.setattr(no_device._Launcher, "__call__", lambda self, *arguments: launches.append(arguments))
    platform: PlatformInfo = dataclasses.replace(named_platform("h200"), pretended=False, emulated=True, sm_count=132)
    with use_platform(platform), no_device.no_launches(platform), torch.no_grad():
        yield launches


def _bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _rope() -> tuple[str, dict[str, Any]]:
    cache = _bf16(4, 16, 2, 64)
    positions = torch.arange(8)
    table = torch.zeros(64, 64)
    return "apply_rope", {
        "q": _bf16(8, 4, 64), "k": _bf16(8, 2, 64), "v": _bf16(8, 2, 64), "positions": positions, "cos_sin_cache": table,
        "k_cache": cache, "v_cache": cache.clone(), "slot_mapping": positions.clone(),
    }  # fmt: skip


_CALLS: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "norm": lambda: ("rmsnorm", {"x": _bf16(16, 256), "weight": _bf16(256)}),
    "norm with residual": lambda: ("rmsnorm", {"x": _bf16(16, 256), "weight": _bf16(256), "residual": _bf16(16, 256)}),
    "layer norm": lambda: ("layernorm", {"x": _bf16(16, 256), "weight": _bf16(256), "bias": _bf16(256)}),
    "layer norm without bias": lambda: ("layernorm", {"x": _bf16(16, 256), "weight": _bf16(256)}),
    "rope with cache": _rope,
    "routing": lambda: ("moe_topk", {"logits": _bf16(16, 32), "top_k": 4}),
    "fp8 per row": lambda: (
        "dequantize_fp8",
        {"q": torch.zeros(64, 128).to(torch.float8_e4m3fn), "scale": torch.ones(64, 1), "out_dtype": torch.bfloat16},
    ),
    "GEMM of fp8 weights, k split": lambda: (
        "mm",
        {"a": _bf16(40, 4096), "b": torch.zeros(64, 4096).to(torch.float8_e4m3fn).t(), "b_scale": torch.ones(1, 64)},
    ),
    "GEMM of mxfp4 weights": lambda: (
        "mm",
        {
            "a": _bf16(40, 128),
            "b": torch.zeros(64, 64, dtype=torch.uint8).t(),
            "b_scale": torch.ones(64, 4, dtype=torch.uint8).t(),
            "bias": _bf16(64),
        },
    ),
    "mxfp4": lambda: (
        "dequantize_mxfp4",
        {"q": torch.zeros(64, 64, dtype=torch.uint8), "scale": torch.ones(64, 4, dtype=torch.uint8), "out_dtype": torch.bfloat16},
    ),
}


@pytest.mark.parametrize("name", _CALLS)
def test_a_repeated_launch_has_the_arguments_of_tritons_launch(name: str, hopper_launches: list[Arguments]) -> None:
    from triton.runtime.jit import JITFunction

    import tokenspeed_kernel as tk

    operator, arguments = _CALLS[name]()
    made_by_triton = []
    run = JITFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda self, *a, **k: made_by_triton.append(self) or run(self, *a, **k))
        for _ in range(2):
            getattr(tk, operator)(**arguments, override=f"triton_{operator}")
    count = len(made_by_triton)
    assert count > 0
    assert len(hopper_launches) == 2 * count
    for first, second in zip(hopper_launches[:count], hopper_launches[count:], strict=True):
        for one, other in zip(first, second, strict=True):
            if isinstance(one, Tensor):
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            else:
                assert one == other or other is None  # absent hooks are not passed
