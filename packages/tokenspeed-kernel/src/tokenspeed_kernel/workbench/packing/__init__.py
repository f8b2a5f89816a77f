"""Makes kernel packs on a machine without a GPU. Runs calls as on a device, compiles the programs that they need, and launches
nothing.

The calls are those of a capture or of a model. Each call goes through the operator's function, so selection, launchers and
configurations are those of the device. Worker processes share the work.

A compiler is declared by an entry point of the group ``tokenspeed_kernel.packing``. The entry point is a module with ``COMPILER``,
the compiler's name; ``toolchain()``, the compiler's versions; ``is_program(name)``, whether a file belongs in a pack; and
``compiling_into(folder, platform, postpone)``, a context manager in which the compiler compiles into a folder and launches nothing.
`tokenspeed_kernel.workbench.packing.triton` is this module for Triton.

A compiler that takes seconds per program should postpone compilations. Otherwise several processes would wait for one program that
all their calls need, and a call's programs would be compiled one after the other. Such a compiler passes a `Postponed` to
``postpone`` for each program that the folder lacks. The worker processes compile each postponed program once, after the calls. If
``postpone`` is None, nothing may be postponed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import mmap
import multiprocessing
import multiprocessing.connection
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tokenspeed_kernel.workbench import models
from tokenspeed_kernel.workbench.watching import described, load_cases
from tokenspeed_kernel_base import config, packs
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.compilation import Compilation, CompilationForbiddenError, compilations, set_compile_policy
from tokenspeed_kernel_base.composition import COMPOSED
from tokenspeed_kernel_base.declaration import Operator
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.parameters import with_tensors
from tokenspeed_kernel_base.platform import PlatformInfo, named_platform, use_platform
from tokenspeed_kernel_base.resources import Resource
from tokenspeed_kernel_base.spec import KernelSpec

GROUP = "tokenspeed_kernel.packing"
# The number of SMs/CUs of each architecture's largest device. The number only affects a kernel's choice of configuration.
SM_COUNTS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
_OTHER_SM_COUNT = 256
# While a pack is made, its programs are in this subfolder of the pack, so that an interrupted build can be resumed.
BUILDING = ".building"
_JOURNAL = "programs.jsonl"
# With this flag, Linux reserves no memory for a mapping, so a mapping may be larger than the machine's memory. Python has a name
# for the flag since 3.13. The number is the flag's value on x86-64 and Arm.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# Kernels in plain PyTorch, which compile nothing. Running them on a CPU would take long.
_UNCOMPILED = frozenset({"reference", "torch"})

Call = tuple[str, Case]

Postponed = Callable[[], Compilation]
"""Compiles one program into the folder of the pack. It is hashable and can be pickled. Equal values compile the same program."""


def device_of(arch: str) -> PlatformInfo:
    """Returns a pretended device with a number of SMs/CUs. ``arch`` is the name of its architecture or of the device itself."""
    platform = named_platform(arch)
    return dataclasses.replace(platform, sm_count=SM_COUNTS.get(platform.arch, _OTHER_SM_COUNT))


@dataclasses.dataclass(frozen=True)
class Source:
    """The file or model that lists the calls for which a pack has programs.

    Attributes:
        name: a file of captured calls; or a model, as `models.model_of` takes it: a preset, or a config.json or its folder.
        steps: the decode steps and prefills of the model for whose calls the pack has programs.
        ranks: number of ranks for the model's tensor parallelism; the calls are those of one rank, without communication.
    """

    name: str
    steps: tuple[models.Step, ...] = tuple(models.steps_of())
    ranks: int = 1

    def calls(self) -> list[Call]:
        """Returns the operator and the case of each call in the file or of the model.

        Raises:
            OSError, ReplayError: the file cannot be read, or a call in it cannot be recreated.
            ModelError: there is no such model.
        """
        path = Path(self.name)
        if path.is_file() and path.suffix != ".json":
            return [(found.operator, found.case) for found in load_cases(self.name)]
        model = models.model_of(self.name).on_rank(self.ranks)
        return [
            (call.operator, Case(f"{model.name}, {step.phase} {step.size}, {call.role or call.operator}", _Drawn(call), large=True))
            for step in self.steps
            for call in (*models.calls_of(model, step), models.whole_layers_of(model, step))
            if call is not None
        ]


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Makes the arguments of a model's call, with zeros in place of fake tensors."""

    call: models.Call

    def __call__(self, draw: Draw) -> dict[str, Any]:
        op = get_operator(self.call.operator)
        return with_tensors(op.parameters, op.complete(self.call.arguments), _zeros)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Returns zeros in place of a tensor without data, see `untouched`; any other tensor unchanged."""
    if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
        return tensor
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return untouched((elements if tensor.numel() else 0,), tensor.dtype).as_strided(tensor.shape, tensor.stride())


def untouched(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of zeros. The operating system allocates its memory page by page, when a page is first written. So the
    tensor may be larger than the machine's memory, as a KV cache may be. `torch.zeros` would fail.
    """
    elements = math.prod(shape)
    if not elements:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(*shape)


@contextlib.contextmanager
def without_device(arch: str, cache: Path, postpone: Callable[[Postponed], object] | None) -> Iterator[None]:
    """Inside the block, kernels for a device run on CPU tensors, and launch nothing. PyTorch's GEMMs compute nothing either.

    Args:
        arch: the name of the device, or of its architecture.
        cache: the folder into which programs are compiled.
        postpone: receives the compilations that need not be made now; None to make all compilations when a call needs them.
    """
    # On an emulated platform, kernels accept CPU tensors.
    platform = dataclasses.replace(device_of(arch), pretended=False, emulated=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_platform(platform))
        stack.enter_context(torch.no_grad())
        stack.enter_context(mock.patch.object(torch, "mm", _no_mm))
        stack.enter_context(mock.patch.object(torch, "addmm", _no_addmm))
        for compiler in compilers():
            stack.enter_context(compiler.compiling_into(cache / compiler.COMPILER, platform, postpone))
        yield


def _no_mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1])) if out is None else out


def _no_addmm(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return _no_mm(a, b, out=out)


def compilers() -> list[Any]:
    """Returns the modules that compile programs for packs, sorted by the compiler's name."""
    found = [entry.load() for entry in metadata.entry_points(group=GROUP) if not config.settings().plugin_disabled(entry.name)]
    if importlib.util.find_spec("triton") is not None:
        found.append(import_module(f"{__name__}.triton"))
    return sorted(found, key=lambda compiler: compiler.COMPILER)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of running one call while a pack is made or checked.

    Attributes:
        operator, case: names of the call's operator and case.
        kernel: the kernel that was selected.
        compiled: programs that were compiled for the call.
        missing: the program that the call needs and the checked pack does not have, and the call; empty if there is none.
        error: why the call could not be run; empty if it could.
    """

    operator: str
    case: str
    kernel: str = ""
    compiled: tuple[Compilation, ...] = ()
    missing: str = ""
    error: str = ""


def build(source: Source, arch: str, folder: Path, jobs: int) -> Iterator[Outcome]:
    """Makes the pack with the programs that a source's calls need. Yields the outcome of each call as it completes; the pack is
    complete when the iterator is exhausted.

    Raises:
        FileExistsError: the folder has files other than those of an interrupted build.
        ValueError, OSError: the architecture or the source is unknown, see `device_of` and `Source.calls`.
    """
    platform, building = device_of(arch), folder / BUILDING
    if folder.exists() and {path.name for path in folder.iterdir()} - {BUILDING}:
        raise FileExistsError(f"{folder} is not empty: name a new folder, or remove it")
    outcomes = []
    journal = building / _JOURNAL
    for outcome in run(source, arch, building, None, jobs):
        outcomes.append(outcome)
        _note(journal, outcome.compiled)
        yield outcome
    programs = _noted(journal)
    made = compilers()
    for compiler in made:
        _gather(building / compiler.COMPILER, folder / compiler.COMPILER, compiler)
    shutil.rmtree(building)
    packs.write_manifest(
        folder,
        {
            "arch": platform.arch,
            "device": f"{platform.device_name}, {platform.sm_count} SMs or CUs",
            "distributions": _distributions(),
            "toolchains": {each.COMPILER: each.toolchain() for each in made if (folder / each.COMPILER).is_dir()},
            "calls": [{"operator": each.operator, "case": each.case, "kernel": each.kernel} for each in outcomes if not each.error],
            "programs": programs,
        },
    )


def _note(journal: Path, compiled: Sequence[Compilation]) -> None:
    """Appends compiled programs to a file beside the unfinished pack, so that an interrupted build does not forget them."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(each)) + "\n" for each in compiled)


def _noted(journal: Path) -> list[dict[str, Any]]:
    """Returns the programs in the file. If several processes compiled a program at the same time, the program is there once."""
    lines = journal.read_text("utf-8").splitlines() if journal.exists() else []
    programs = [json.loads(line) for line in lines]
    return list({(each["compiler"], each["program"], each["key"]): each for each in programs}.values())


def run(source: Source, arch: str, cache: Path, pack: Path | None, jobs: int) -> Iterator[Outcome]:
    """Runs calls as on a device, in worker processes, and yields their outcomes as they complete. Nothing is launched.

    Args:
        source: the file or model whose calls are run.
        arch: the device, see `device_of`.
        cache: the folder that programs are compiled into.
        pack: a pack to check: nothing is compiled, and outcomes name programs that the pack does not have. None: compile.
        jobs: the number of processes.
    """
    context = multiprocessing.get_context("spawn")  # the compilers' threads do not survive a fork
    work = (source, arch, str(cache), str(pack) if pack else None)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=work) as pool:
        running = [pool.submit(_run, index) for index in range(len(source.calls()))]
        compiling: dict[Postponed, Future[Compilation]] = {}
        unfinished: list[tuple[Outcome, list[Postponed], list[Postponed]]] = []
        try:
            for done in as_completed(running):
                outcome, needed = done.result()
                new = [each for each in needed if each not in compiling]
                compiling |= {each: pool.submit(each) for each in new}
                if needed:
                    unfinished.append((outcome, needed, new))
                else:
                    yield outcome
            for outcome, needed, new in unfinished:
                yield _completed(outcome, [compiling[each] for each in needed], [compiling[each] for each in new])
        except BaseException:  # an interrupt, or the iterator was closed
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _completed(outcome: Outcome, needed: Sequence[Future[Compilation]], new: Sequence[Future[Compilation]]) -> Outcome:
    """Waits for the postponed programs that a call needs. Returns the call's outcome with the programs that were compiled for it,
    or with the first error.

    Args:
        outcome: the outcome of running the call.
        needed: the compilations of all postponed programs that the call needs.
        new: those of them that no earlier call needed.
    """
    error = next((error for error in (compiled.exception() for compiled in needed) if error is not None), None)
    if error is not None:
        return dataclasses.replace(outcome, error=outcome.error or f"{type(error).__name__}: {error}")
    return dataclasses.replace(outcome, compiled=(*outcome.compiled, *(compiled.result() for compiled in new)))


def _gather(source: Path, target: Path, compiler: Any) -> None:
    """Moves a compiler's programs from one folder to another. The compiler's locks and temporary files are not moved."""
    for path in [path for path in source.rglob("*") if path.is_file() and compiler.is_program(path.name)]:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)


def _distributions() -> dict[str, str]:
    """Returns the versions of this project's two distributions, and of all distributions that register kernels."""
    from tokenspeed_kernel_base.registry import KernelRegistry

    packages = {spec.package for spec in KernelRegistry.get().list_kernels()} | {"tokenspeed_kernel_base", "tokenspeed_kernel"}
    versions = {name: packs.installed_version(name) for name in (package.replace("_", "-") for package in sorted(packages))}
    return {name: version for name, version in versions.items() if version is not None}


# -- a worker process --------------------------------------------------------------------------------------------------------------

_calls: list[Call] = []
_postponed: list[Postponed] = []  # by the call that is running
_open = contextlib.ExitStack()  # stays open until the process ends


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker process has a parent"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _begin(source: Source, arch: str, cache: str, pack: str | None) -> None:
    # Ends the worker if its parent is killed. Otherwise the worker would wait for work for ever.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ[config.PREFIX + "PACKS"] = pack or config.OFF
    config.reload_settings()
    set_compile_policy("forbid" if pack else "allow")
    _calls[:] = source.calls()
    _open.enter_context(without_device(arch, Path(cache), None if pack else _postponed.append))


def _run(index: int) -> tuple[Outcome, list[Postponed]]:
    """Runs a call. Returns the outcome, and the postponed programs that the call needs."""
    _postponed.clear()
    outcome = _outcome(*_calls[index])
    return outcome, [*dict.fromkeys(_postponed)]


def _outcome(operator: str, case: Case) -> Outcome:
    outcome = Outcome(operator, case.name)
    begun = len(compilations())
    try:
        op = get_operator(operator)
        arguments = op.complete(case.make(blank_draw()) if case.large else case.build("cpu"))
        chosen = op.consider_prepared(op.request(arguments), arguments, None).chosen
        if chosen is not None:
            outcome = dataclasses.replace(outcome, kernel=chosen.name)
            # A composed kernel's weights are prepared for its parts, whose calls are separate calls of a model or a capture.
            in_parts = chosen.solution == COMPOSED and op.planned is not None
            if chosen.solution not in _UNCOMPILED and not in_parts:
                op.function(**prepared_by_shape(op, arguments, chosen))
    except CompilationForbiddenError as error:
        return dataclasses.replace(outcome, missing=error.missing)
    except Exception as error:  # a call that cannot be run must not stop the other calls
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        outcome = dataclasses.replace(outcome, error=text)
    return dataclasses.replace(outcome, compiled=tuple(compilations(begun)))


def prepared_by_shape(op: Operator[..., Any], arguments: dict[str, Any], spec: KernelSpec) -> dict[str, Any]:
    """Prepares arguments for a kernel as `Operator.prepared` does, but prepared weights are zeros.

    Meta tensors are prepared, because converting a large model's weights takes many seconds. Real tensors are prepared only if the
    conversion reads values. The calls of a model have few different weights, so prepared objects are kept until the process ends.
    """
    if op.planned is None:
        return arguments
    objects = {name: described(value) for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
    key = str(op), spec.name, repr(objects)
    if key not in _prepared:
        _prepared[key] = _objects_by_shape(op, arguments, spec)
    return {**arguments, **_prepared[key]}


_prepared: dict[tuple[str, str, str], dict[str, Any]] = {}


def _objects_by_shape(op: Operator[..., Any], arguments: dict[str, Any], spec: KernelSpec) -> dict[str, Any]:
    try:
        made = op.prepared(with_tensors(op.parameters, arguments, lambda tensor: tensor.to("meta")), spec)
    except NotImplementedError:  # a meta tensor has no values; every other error is raised again below
        made = op.prepared(arguments, spec)
    return {name: _with_zeros(value) for name, value in made.items() if not isinstance(value, torch.Tensor)}


def _with_zeros(value: Any) -> Any:
    """Returns a dataclass or a resource with zeros in place of the meta tensors that it holds; any other argument unchanged."""
    if isinstance(value, Resource) and not dataclasses.is_dataclass(value):
        return value.converted(_zeros)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    tensors = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    metas = {name: _zeros(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    return dataclasses.replace(value, **metas) if metas else value


def blank_draw() -> Draw:
    """Returns a `Draw` whose large random tensors are zeros that take no memory, see `untouched`."""

    class Blank(Draw):
        def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
            return untouched(shape, dtype) if _is_large(shape) else super().normal(*shape, dtype=dtype, scale=scale)

        def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return untouched(shape, dtype) if _is_large(shape) else super().uniform(*shape, low=low, high=high, dtype=dtype)

        def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return untouched(shape, dtype) if _is_large(shape) else super().integers(low, high, *shape, dtype=dtype)

    return Blank("cpu")


def _is_large(shape: Sequence[int]) -> bool:
    return math.prod(shape) > 1 << 20
