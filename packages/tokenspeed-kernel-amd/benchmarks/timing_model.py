"""Predicts the times of attention kernels at GPT-OSS shapes, ours and the published wheel's, with one model. **For ratios only.**

    python packages/tokenspeed-kernel-amd/benchmarks/timing_model.py --peer peer --output timing_model.json --readme

The published wheel is the baseline; code and tables call this wheel *peer*. ``--peer`` is the folder into which the wheel was
installed: ``pip install --no-deps --target peer tokenspeed-kernel-amd==0.1.4``. Without ``--peer`` only our kernels are measured.
The baseline's package has the same name as ours, so a separate process calls the baseline, through its public functions. The
baseline imports Triton as ``tokenspeed_triton``; here this name is an alias of the installed Triton.

``--kept`` names an earlier report instead: its times of the baseline are kept, and our times of the cases that ``--only`` leaves
out.

The public functions of both sides are called on the gfx950 emulator, with the same inputs. The output of the last sequence is
compared with the fp32 reference. For decode and extend, the emulator executes whole grids and counts instructions.
`gfx950_emulator.timing.predict` computes a time from these counts. The docstring of `predict` describes the model, and the
emulator's README lists what the model omits. The time of a call is the sum of the times of its launches.

Prefill of 64 heads is too much work for the emulator. So the emulator executes one KV head, with at most four sequences of at most
SAMPLED tokens. Every workgroup then computes at most one tile of 128 queries, and some workgroups compute none. The executed
workgroups give the cycles of a tile at every index in its sequence, for one workgroup alone and for several on one CU. They also
give the cycles of a workgroup without a tile. In a longer sequence, tiles with indices beyond the executed ones have more
iterations. Their cycles are extrapolated linearly from the second half of the executed indices. The tiles of the whole call are
then scheduled on 256 CUs (`prefill_seconds`).

ASSUMPTIONS lists the model's assumptions, which are printed with the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import math
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from timing_tiles import prefill_seconds, tiles_of
from torch import Tensor

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
MARKS = ("<!-- predicted times -->", "<!-- end -->")

ERROR = 5e-3  # limit of the relative error of the output that is checked
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, WINDOW = 64, 8, 64, 64, 127
SAMPLED = 15 * 128

ASSUMPTIONS = (
    "Only ratios are meaningful: no time below is a claim about an MI355X. If the baseline's authors published a time on an "
    "MI355X, the table shows it.",
    "Our kernels and the baseline get the same inputs, and run with the same compiler (stock Triton), emulator and timing model.",
    "Decode and extend: whole grids are executed. The cycles of the workgroup with the most work are simulated twice: alone, "
    "and beside as many copies of itself as fit on a CU. The times of other workgroups are proportional to their executed "
    "instructions. Workgroups are assigned to 256 CUs in turn.",
    "Prefill: the cycles of a tile depend on its index in a sequence. They come from one KV head and sequences of up to 1920 "
    "tokens. Beyond these, the cycles grow linearly, as in the second half of the executed tiles. Each workgroup also takes the "
    "cycles of a workgroup without a tile. Our tiles are assigned to workgroups in our kernel's order. The baseline's tiles are "
    "assigned longest first, each to the CU with the least work, which is the best order for the baseline.",
    "The time of a CU is the larger of two times: all its work at full occupancy, and its longest workgroup alone. The time of "
    "a launch is the larger of two times: its slowest CU, and reading or writing every cache line once from or to HBM at 8 "
    "TB/s.",
    "The launches of a call run one after another. Only the achievable times include launch overhead: they count 2.3 us per "
    "launch, and 6.6 TB/s for HBM.",
    "Caches are ideal: no line is loaded from HBM twice in a launch, and L2 delivers 64 bytes per cycle to every CU.",
)


@dataclass(frozen=True)
class Case:
    """A call with sinks.

    Attributes:
        operator: ``"prefill"``, ``"decode"`` or ``"extend"``.
        sequences: number of sequences, all of one length.
        length: number of tokens per sequence, the new tokens included.
        new: number of new tokens per sequence, for extend.
        window_left: number of earlier tokens in the window; -1 without a window.
        bar: whether the pass criteria apply to this call. Other calls are shown for information.
        heads, kv_heads: numbers of query heads and of KV heads.
        fp8: whether the caches are fp8, with one scale each. The baseline is not called then.
        fp16: whether the operands are fp16, for prefill; otherwise bf16. The baseline is not called for fp16.
        peak: every query's score of one key, in nats, for prefill; other scores have a standard deviation of 1. 0: no such key. The
            baseline is not called with such a key.
        peak_at: the position of this key in each sequence.
        measured_us: the baseline's time on an MI355X, as its authors published (pull requests 165, 191 and 464 of their project).
    """

    operator: str
    sequences: int
    length: int
    new: int = 1
    window_left: int = -1
    bar: bool = True
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    fp8: bool = False
    measured_us: float | None = None
    fp16: bool = False
    peak: int = 0
    peak_at: int = 0

    @property
    def compared(self) -> bool:
        """Whether the baseline is called too."""
        return not (self.fp8 or self.fp16 or self.peak)

    @property
    def name(self) -> str:
        size = {
            "prefill": f"{self.sequences} x {self.length}",
            "decode": f"{self.sequences} x {self.length}",
            "extend": f"{self.sequences} x {self.new} new, {self.length - self.new} before",
        }[self.operator]
        window = f", window {self.window_left + 1}" if self.window_left >= 0 else ""
        peak = f", score of key {self.peak_at} = {self.peak}" if self.peak else ""
        return f"{self.operator} {size}{window}{', fp8 cache' if self.fp8 else ''}{', fp16' if self.fp16 else ''}{peak}"

    @property
    def sample(self) -> Case:
        """Returns the smaller prefill that is executed: one KV head and its query heads, for at most four sequences."""
        few = {"sequences": min(self.sequences, 4), "heads": self.heads // self.kv_heads, "kv_heads": 1}
        return dataclasses.replace(self, length=min(self.length, SAMPLED), **few)

    def inputs(self) -> dict[str, Any]:
        """Returns the arguments of our public function."""
        draw = torch.Generator().manual_seed(self.length + self.sequences)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float32).bfloat16()

        new = self.length if self.operator == "prefill" else self.new
        steps = torch.arange(self.sequences + 1, dtype=torch.int32)
        common = {
            "q": normal(self.sequences * new, self.heads, HEAD_DIM),
            "sinks": normal(self.heads),
            "window_left": self.window_left,
        }
        if self.operator == "prefill":
            keys, values = (normal(self.sequences * new, self.kv_heads, HEAD_DIM) for _ in range(2))
            operands = {"q": common["q"], "k": keys, "v": values}
            if self.peak:  # the first column is 4 in every query, and 0 in every key but one
                operands["q"][..., 0] = 4.0
                keys[..., 0] = 0.0
                keys[self.peak_at :: new] = 0.0
                keys[self.peak_at :: new, :, 0] = self.peak / 4 * HEAD_DIM**0.5
            operands = {name: operand.to(torch.float16 if self.fp16 else torch.bfloat16) for name, operand in operands.items()}
            return {**common, **operands, "cu_seqlens": steps * new, "max_seqlen": new}
        pages = -(-self.length // PAGE_SIZE)
        places = torch.randperm(self.sequences * pages, generator=draw).int()
        keys, values = (normal(len(places), PAGE_SIZE, self.kv_heads, HEAD_DIM) for _ in range(2))
        paged = {
            **common,
            "k_cache": keys,
            "v_cache": values,
            "page_table": places.view(self.sequences, pages),
            "cache_seqlens": torch.full((self.sequences,), self.length, dtype=torch.int32),
            "max_seqlen_k": self.length,
        }
        if self.fp8:
            ones = {f"{name}_scale": torch.ones(1) for name in "kv"}
            paged |= {"k_cache": keys.to(torch.float8_e4m3fn), "v_cache": values.to(torch.float8_e4m3fn), **ones}
        if self.operator == "decode":
            return paged
        offsets = {"cu_seqlens_q": steps * new, "cu_seqlens_kv": steps * self.length}
        return {**paged, **offsets, "max_seqlen_q": new, "is_causal": True}


def _cases() -> list[Case]:
    windows = (-1, WINDOW)
    prefill = [Case("prefill", b, s, window_left=w) for w in windows for s in (1024, 4096) for b in (1, 4)]
    decode = [Case("decode", 16, 8192, measured_us=45.3), Case("decode", 16, 8192, window_left=WINDOW)]
    extend = [Case("extend", 64, 1024 + 8, 8, w) for w in windows]
    others = [Case("decode", b, s, bar=False) for b, s in ((1, 1024), (64, 1024), (1, 32768))]
    measured = [Case("decode", 16, s, bar=False, measured_us=us) for s, us in ((1024, 9.74), (2048, 16.2), (4096, 25.3))]
    measured += [Case("prefill", b, s, bar=False, measured_us=us) for b, s, us in ((16, 1024, 317.0), (2, 8192, 1462.0))]
    fp8 = [Case("decode", b, s, bar=False, fp8=True) for b, s in ((16, 1024), (64, 1024), (16, 4096), (16, 8192))]
    fp16 = [Case("prefill", 1, s, bar=False, fp16=True) for s in (1024, 4096)]
    fp16 += [Case("prefill", 1, 1024, bar=False, fp16=True, peak=16, peak_at=at) for at in (0, 300)]
    far = [Case("prefill", 1, 1024, bar=False, peak=peak) for peak in (40, 50)]
    return prefill + decode + extend + others + measured + fp8 + fp16 + far


CASES = _cases()

# -- the two sides -------------------------------------------------------------------------------------------------------------

Function = Callable[[dict[str, Any]], Tensor]


def ours(operator: str) -> Function:
    """Returns our public function of an operator, as a function of a dict of arguments."""
    import tokenspeed_kernel_amd

    names = {"prefill": "mha_prefill", "decode": "mha_decode_with_kvcache", "extend": "mha_extend_with_kvcache"}
    function = getattr(tokenspeed_kernel_amd, names[operator])
    return lambda inputs: function(**inputs)


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that makes ``tokenspeed_triton`` and its submodules aliases of Triton's modules."""

    name = "tokenspeed_triton"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == self.name else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self._real = importlib.import_module("triton" + spec.name.removeprefix(self.name))
        self._spec = self._real.__spec__
        return self._real

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced the module's own spec by the alias's spec


class _Device:
    """A device with the properties that the baseline queries from PyTorch."""

    multi_processor_count = 256
    gcnArchName = "gfx950"
    name = "AMD Instinct MI355X"


def prepare_peer(folder: Path) -> None:
    """Makes the baseline importable in this process, and lets it treat CPU tensors as GPU tensors."""
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, _Alias())
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    torch.cuda.get_device_properties = lambda *_: _Device()  # type: ignore[assignment, return-value]
    torch.cuda.current_device = lambda: 0


def peer(operator: str) -> Function:
    """Returns the baseline's public function of an operator, adapted to our arguments."""
    module = importlib.import_module(f"tokenspeed_kernel_amd.ops.gfx950.attention.mha.{operator}")
    function = getattr(module, f"launch_gluon_mha_{operator}_gfx950")
    if operator != "prefill":
        return lambda inputs: function(**inputs)
    return lambda inputs: function(**inputs, cu_seqlens_cpu=inputs["cu_seqlens"].tolist())


# -- measuring -----------------------------------------------------------------------------------------------------------------


def check(case: Case, inputs: dict[str, Any], out: Tensor) -> float:
    """Returns the relative error of the last sequence's output. Raises RuntimeError if the error is too large."""
    import tokenspeed_kernel as core

    # A long prefill is checked on some heads only, because the reference keeps every score of a head in memory.
    some = slice(0, case.heads if case.operator != "prefill" else case.heads // case.kv_heads)
    some_kv = slice(0, case.kv_heads if case.operator != "prefill" else 1)
    new = case.length if case.operator == "prefill" else case.new
    last = {**inputs, "q": inputs["q"][-new:, some].float(), "sinks": inputs["sinks"][some].float()}
    got = out[-new:, some].float()
    if case.operator == "prefill":
        rows = {name: inputs[name][-new:, some_kv].float() for name in ("k", "v")}
        last |= {**rows, "cu_seqlens": torch.tensor([0, new], dtype=torch.int32)}
        wanted = core.mha_prefill(**last, solution="reference")
    else:
        last |= {name: inputs[name].float() for name in ("k_cache", "v_cache")} | {"k_scale": None, "v_scale": None}
        last |= {name: inputs[name][-1:] for name in ("page_table", "cache_seqlens")}
        if case.operator == "extend":
            last |= {f"cu_seqlens_{of}": torch.tensor([0, n], dtype=torch.int32) for of, n in (("q", new), ("kv", case.length))}
            wanted = core.mha_extend_with_kvcache(**last, solution="reference")
        else:
            wanted = core.mha_decode_with_kvcache(**last, solution="reference")
    error = float((got - wanted).norm() / wanted.norm())
    if not error <= ERROR:
        raise RuntimeError(f"{case.name}: relative error {error:.1e} of the last sequence")
    return error


def measure(case: Case, function: Function, own_order: bool) -> dict[str, Any]:
    """Calls the function, checks its result, and predicts the times of its launches.

    Args:
        case: the call.
        function: the operator's function, see `ours` and `peer`.
        own_order: whether the tiles of prefill are assigned to workgroups in the order of our kernel.
    """
    from gfx950_emulator import emulated_gfx950

    called = case.sample if case.operator == "prefill" else case
    inputs = called.inputs()
    with emulated_gfx950(counters=True, sanitize=False) as emulator:
        out = function(inputs)
    error = check(called, inputs, out)
    if case.operator == "prefill":
        (launch,) = emulator.launches
        launches = [prefill_launch(case, launch, own_order)]
    else:
        launches = list(map(predicted, emulator.launches))
    return {**total(launches), "relative_error": error, "launches": launches}


def predicted(launch: Any) -> dict[str, Any]:
    """Returns the report's row of a launch that was executed whole, with counters."""
    from gfx950_emulator import timing

    found = timing.predict(launch, max_instructions=2_000_000)
    seconds = {
        "us": found.seconds,
        "achievable_us": found.achievable_seconds,
        "compute_us": found.compute_seconds,
        "memory_us": found.memory_seconds,
    }
    return {
        **_facts(launch, found.occupancy),
        **{name: value * 1e6 for name, value in seconds.items()},
        "bound_by": found.bound_by,
        "alone_cycles": found.alone.cycles,
        "together_cycles": found.full.cycles,
        "together": found.full.workgroups,
    }


def total(launches: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the times of a call: the sums of the times of its launches."""
    return {name: sum(launch[name] for launch in launches) for name in ("us", "achievable_us")}


def _facts(launch: Any, fits: Any) -> dict[str, Any]:
    return {
        "kernel": launch.kernel,
        "grid": list(launch.grid),
        "waves": launch.waves,
        "waves_per_simd": fits.waves_per_simd,
        "instructions": launch.counters.instructions,
        "lds_conflicts": launch.counters.total("lds_conflicts"),
    }


def prefill_launch(case: Case, launch: Any, own_order: bool, device: Any = None) -> dict[str, Any]:
    """Returns the report row of a prefill, computed from a launch of the smaller prefill `case.sample`. ``device``: the device with
    the model's constants, by default the MI355X of `gfx950_emulator.hardware`."""
    from gfx950_emulator import hardware as hw
    from gfx950_emulator.occupancy import occupancy

    device = device or hw.MI355X
    fits = occupancy(launch.program.assembly, launch.waves, launch.lds)
    tiles, full = tiles_of(case.sample, launch, fits, device)
    compute = prefill_seconds(case, tiles, own_order, device)
    values = 2 * case.sequences * case.length * HEAD_DIM * (case.heads + case.kv_heads)  # q and out, k and v
    memory = 2 * values / device.hbm_bytes_per_second
    slow_memory = 2 * values / device.hbm_achieved_bytes_per_second
    return {
        **_facts(launch, fits),
        "us": max(compute, memory) * 1e6,
        "achievable_us": (hw.LAUNCH_SECONDS + max(compute, slow_memory)) * 1e6,
        "compute_us": compute * 1e6,
        "memory_us": memory * 1e6,
        "bound_by": "HBM bandwidth" if memory > compute else full.bound_by,
        "rows": tiles.rows,
        "alone_cycles": dataclasses.asdict(tiles.alone),
        "together_cycles": dataclasses.asdict(tiles.together),
        "together": tiles.resident,
    }


def measure_all(cases: list[Case], side: Callable[[str], Function]) -> dict[str, Any]:
    """Measures all cases with the functions of one side, ours or the baseline. Returns the results of `measure` by the case's
    name.
    """
    from gfx950_emulator import emulated_gfx950

    torch.set_num_threads(1)
    rows = {}
    for case in cases:
        start = time.perf_counter()
        with emulated_gfx950(counters=True, sanitize=False):
            function = side(case.operator)  # imported on the emulator, because the baseline queries its device at import
        rows[case.name] = measure(case, function, own_order=side is ours)
        seconds = time.perf_counter() - start
        print(f"{side.__name__}: {case.name}: {rows[case.name]['us']:.2f} us ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return rows


def measure_peer(folder: Path, only: str) -> dict[str, Any]:
    """Measures the baseline in a separate process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--as-peer", str(folder), "--only", only]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring the baseline ended with code {done.returncode}")
    return json.loads(done.stdout)


# -- showing -------------------------------------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the worst and the geometric mean of the ratios, over the rows to which the pass criteria apply."""
    ratios = [row["ratio"] for row in rows if row["bar"] and "ratio" in row]
    if not ratios:
        return {}
    return {"shapes": len(ratios), "worst": max(ratios), "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios))}


def table(report: dict[str, Any]) -> str:
    """Formats the report as Markdown: a row per case, and the two figures that the pass criteria limit."""
    lines = [
        "| call | ours, µs | baseline, µs | ours / baseline | achievable: ours, µs | baseline, µs | baseline measured, µs "
        "| ours is bound by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        mine, other = row["ours"], row.get("peer")
        ideal = [f"{mine['us']:.2f}", *([f"{other['us']:.2f}", f"{row['ratio']:.3f}"] if other else ["", ""])]
        achievable = [f"{mine['achievable_us']:.1f}", f"{other['achievable_us']:.1f}" if other else ""]
        longest = max(mine["launches"], key=lambda launch: launch["us"])
        note = "" if row["bar"] else " (for information)"
        measured = f"{row['measured_us']:g}" if row.get("measured_us") else ""
        lines.append(f"| {' | '.join([row['case'] + note, *ideal, *achievable, measured, longest['bound_by']])} |")
    found = report["summary"]
    if found:
        lines += [
            "",
            f"Over the {found['shapes']} shapes that are not for information, the worst ratio is {found['worst']:.3f}, the "
            f"geometric mean {found['geometric_mean']:.3f}.",
        ]
    return "\n".join(lines)


def publish(report: dict[str, Any], shown: str, options: argparse.Namespace, readme: Path, marks: tuple[str, str] = MARKS) -> None:
    """Prints a report's assumptions and its table. With ``--output`` writes the report, with ``--readme`` the README's section."""
    # Imported here, because the baseline's process must not import the core, which would load our package under the same name.
    from tokenspeed_kernel.workbench.benchmark import as_text
    from tokenspeed_kernel.workbench.benchmark.figures import Marks

    print(*(f"- {assumption}" for assumption in report["assumptions"]), "", shown, sep="\n")
    if options.output:
        options.output.write_text(as_text(report))
    if options.readme:
        metadata = report["metadata"]
        versions = (
            f"\n(Triton {metadata['triton']}, baseline: tokenspeed-kernel-amd {metadata['peer']})" if metadata["peer"] else ""
        )
        versions += f"\nTimes that this run kept are from: `{metadata['kept']}`" if metadata.get("kept") else ""
        assumptions = [textwrap.fill(text, 132, initial_indent="- ", subsequent_indent="  ") for text in report["assumptions"]]
        body = "\n\n".join([shown, f"`{metadata['command']}`" + versions, "\n".join(assumptions)])
        readme.write_text(Marks(*marks).replaced(readme.read_text(), f"\n{body}\n"))


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the options that both scripts of this folder have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="the folder into which the wheel to compare with was installed")
    parser.add_argument("--output", type=Path, help="where to write the report, JSON")
    parser.add_argument("--readme", action="store_true", help="put the table into the package's README")
    return parser


def metadata_of(program: Path, folder: Path | None) -> dict[str, Any]:
    """Returns the metadata of a report that a script of this folder writes. ``folder``: the baseline's folder."""
    from tokenspeed_kernel.workbench.benchmark import collect_metadata

    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = " ".join([f"python packages/tokenspeed-kernel-amd/benchmarks/{program.name}", *words])
    found = dataclasses.asdict(collect_metadata(command, device=torch.device("cpu")))
    found |= {"device": "gfx950, emulated: a model of time, no measurement", "arch": "gfx950"}
    version = ""
    if folder is not None:
        version = next(d.version for d in importlib.metadata.distributions(path=[str(folder)]) if "amd" in d.metadata["Name"])
    return {**found, "peer": version}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--kept", type=Path, metavar="REPORT.json", help="an earlier report, whose other times are kept")
    parser.add_argument("--as-peer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if re.search(options.only, case.name)]
    if options.as_peer is not None:
        prepare_peer(options.as_peer)
        print(json.dumps(measure_all([case for case in cases if case.compared], peer)))
        return
    if options.peer is not None and not (options.peer / "tokenspeed_kernel_amd").is_dir():
        parser.error(f"--peer {options.peer}: there is no package tokenspeed_kernel_amd in this folder")
    kept = json.loads(options.kept.read_text()) if options.kept else {"rows": [], "metadata": {"peer": ""}}
    mine = {row["case"]: row["ours"] for row in kept["rows"]} | measure_all(cases, ours)
    others = {row["case"]: row["peer"] for row in kept["rows"] if "peer" in row}
    others |= measure_peer(options.peer, options.only) if options.peer is not None else {}
    rows = []
    for case in CASES:
        if case.name not in mine:
            continue
        row: dict[str, Any] = {"case": case.name, "bar": case.bar, "measured_us": case.measured_us, "ours": mine[case.name]}
        if case.name in others:
            row |= {"peer": others[case.name], "ratio": mine[case.name]["us"] / others[case.name]["us"]}
        rows.append(row)
    metadata = metadata_of(Path(__file__), options.peer)
    metadata["peer"] = metadata["peer"] or kept["metadata"]["peer"]
    metadata["kept"] = kept["metadata"].get("kept") or kept["metadata"].get("command", "")
    report = {"metadata": metadata, "assumptions": ASSUMPTIONS, "summary": summary(rows), "rows": rows}
    publish(report, table(report), options, README)


if __name__ == "__main__":
    main()
