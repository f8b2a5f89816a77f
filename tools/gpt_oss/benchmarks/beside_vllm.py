"""Measures this runtime and vLLM on one GPU, one after the other: the same weights, prompts and lengths, greedy tokens.

    python tools/gpt_oss/benchmarks/beside_vllm.py --output beside_vllm.json
    python tools/gpt_oss/benchmarks/beside_vllm.py --vllm-path /tmp/vllm_site    # vLLM is in a separate folder

Each engine runs in its own process. vLLM receives the tensors of `gpt_oss.RandomTensors` through its own loader of GPT-OSS
checkpoints, under the names of the released files, so it handles these tensors like real weights. vLLM's settings are its defaults
with two exceptions: prefix caching is off, because it would skip repeated prompts, and CUDA graphs have the measured batch sizes.

The time of a vLLM decode step is the difference between two runs of the same prompts, with few and with many generated tokens,
divided by the number of additional tokens. vLLM compiles some kernels on first use, so its runs are repeated until the fastest ones
agree. The time of our decode step is the time that a caller of the engine waits (see `gpt_oss.benchmark`). A prefill is a run that
generates one token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FEW, MANY = 8, 136  # numbers of generated tokens; a step's time comes from the difference
# A measurement is repeated until its fastest runs agree within this part of their median, at most this number of times.
AGREEMENT, MOST_RUNS = 0.05, 12
LOAD_FORMAT = "gpt_oss_random"
# Default environment of vLLM's processes: a single GPU needs no communication, and nothing is downloaded. FlashInfer may be
# missing, and greedy tokens need no sampler.
_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("beside_vllm.json"), help="where the result is written")
    parser.add_argument("--preset", default="gpt-oss-120b")
    parser.add_argument("--layers", type=int, help="the preset's if left out")
    parser.add_argument("--batches", type=_counts, default=(1, 4, 16, 64), help="numbers of sequences that decode together")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt before the decode steps")
    parser.add_argument("--prefills", type=_shapes, default=((8, 1024), (4, 8192)), help="like 8x1024,4x8192")
    parser.add_argument("--repeats", type=int, default=3, help="fastest runs of each that must agree; their median counts")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--bias", type=float, default=0.5, help="standard deviation of the random biases")
    parser.add_argument("--prefer", default="", help="kernels of ours that serve wherever they can")
    parser.add_argument("--commit", default="", help="of this code, where it is a copy whose checkout says another")
    parser.add_argument("--experts", default="auto,marlin", help="what serves vLLM's experts, one after the other; empty: no vLLM")
    parser.add_argument("--vllm-path", type=Path, help="a folder with vLLM, put in front of its process's PYTHONPATH")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter that runs vLLM")
    parser.add_argument("--memory", type=float, default=0.9, help="part of the GPU's memory that vLLM may take")
    parser.add_argument("--only-vllm", help=argparse.SUPPRESS)  # for a child process of this script: the backend of vLLM's experts
    return parser.parse_args(given)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in (part.split("x") for part in text.split(",") if part))


def prompts_of(count: int, tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """Returns random prompts, the same as those of `gpt_oss.benchmark`."""
    import torch

    prompts: list[list[int]] = torch.randint(vocab, (count, tokens), generator=torch.Generator().manual_seed(seed)).tolist()
    return prompts


# -- vLLM, in its own process ---------------------------------------------------------------------------------------------------


def steady(run: Callable[[], float], repeats: int) -> list[float]:
    """Calls ``run``, which returns its seconds, until the fastest ``repeats`` runs agree. Returns the seconds of these runs in
    ascending order.

    The engine of vLLM begins with the first requests that arrive, so repeated runs divide the same prompts into different batches.
    For a new division, vLLM may compile kernels, which takes seconds. This only lengthens a run, so the fastest runs count. After
    `MOST_RUNS` runs, the fastest runs are returned even if they disagree.
    """
    seconds: list[float] = []
    while True:
        seconds.append(run())
        fastest = sorted(seconds)[:repeats]
        middle = statistics.median(fastest)
        agree = all(abs(each - middle) <= AGREEMENT * middle for each in fastest)
        if len(fastest) == repeats and (agree or len(seconds) >= MOST_RUNS):
            return fastest


def register_loader() -> None:
    """Registers a load format with vLLM that reads `RandomTensors` instead of files. Each of vLLM's processes calls this function,
    through the plugin that `entry_point` makes.
    """
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from gpt_oss import Config, RandomTensors

    if find_spec("quack") is None:
        # If CuteDSL is installed, vLLM 0.26 compiles router GEMMs of other models at start-up, and fails if QuACK is missing.
        from vllm.model_executor.kernels.linear.cute_dsl import ll_bf16

        ll_bf16._cutedsl_available = False

    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Does nothing, because there is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            settings = self.load_config.model_loader_extra_config
            config = Config.from_directory(model_config.model)
            device = next(model.parameters()).device
            source = RandomTensors(config, settings["seed"], torch.bfloat16, device, settings["bias"])
            model.load_weights((name, source.get(name)) for name in source.shapes())

    register_model_loader(LOAD_FORMAT)(RandomLoader)


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the ``config.json`` of the model that both engines run, in the format of the released files."""
    from gpt_oss.benchmark import Workload

    config = Workload(options.preset, options.layers, batches=(), contexts=(), prefills=()).config
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {
        **config.to_hf(),
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def longest_of(options: argparse.Namespace) -> int:
    return max([options.context + MANY, *(tokens + 1 for _, tokens in options.prefills)])


def run_vllm(options: argparse.Namespace, folder: Path) -> None:
    """Measures vLLM with one backend for the experts. Writes the results to ``options.output`` after each measurement."""
    import vllm

    config = configuration(options)
    (folder / "config.json").write_text(json.dumps(config))
    started = time.perf_counter()
    llm = vllm.LLM(
        model=str(folder),
        load_format=LOAD_FORMAT,
        model_loader_extra_config={"seed": options.seed, "bias": options.bias},
        skip_tokenizer_init=True,
        max_model_len=longest_of(options) + 1,
        gpu_memory_utilization=options.memory,
        enable_prefix_caching=False,
        dtype="bfloat16",
        seed=options.seed,
        compilation_config={"cudagraph_capture_sizes": sorted({1, 2, 4, 8, *options.batches})},
        **({} if options.only_vllm == "auto" else {"moe_backend": options.only_vllm}),
    )
    ready = time.perf_counter() - started

    def seconds_of(prompts: list[list[int]], tokens: int) -> float:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        if any(len(each.outputs[0].token_ids) != tokens for each in found):
            raise RuntimeError(f"vLLM must generate {tokens} tokens for each prompt")
        return seconds

    def repeated(prompts: list[list[int]], tokens: int) -> list[float]:
        return steady(lambda: seconds_of(prompts, tokens), options.repeats)

    vocab = config["vocab_size"]
    decode: list[dict[str, Any]] = []
    prefill: list[dict[str, Any]] = []
    result = {"vllm": vllm.__version__, "ready_s": ready, "decode": decode, "prefill": prefill}
    for batch in options.batches:
        prompts = prompts_of(batch, options.context, vocab, options.seed)
        few, many = repeated(prompts, FEW), repeated(prompts, MANY)
        step = (statistics.median(many) - statistics.median(few)) / (MANY - FEW)
        decode.append({"batch": batch, "context": options.context, "milliseconds_a_step": 1e3 * step, "few_s": few, "many_s": many})
        options.output.write_text(json.dumps(result))
    for batch, tokens in options.prefills:
        prompts = prompts_of(batch, tokens, vocab, options.seed)
        times = repeated(prompts, 1)
        rate = batch * tokens / statistics.median(times)
        prefill.append({"batch": batch, "tokens": tokens, "tokens_per_second": rate, "all_seconds": times})
        options.output.write_text(json.dumps(result))


# -- both -----------------------------------------------------------------------------------------------------------------------


def run_ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures this runtime with its own benchmark."""
    result = folder / "ours.json"
    sizes = {
        "--preset": options.preset,
        "--batch": ",".join(map(str, options.batches)),
        "--context": options.context,
        "--decode-steps": MANY - FEW,
        "--prefill": ",".join(f"{batch}x{tokens}" for batch, tokens in options.prefills),
        "--repeats": options.repeats,
        "--temperature": 0,
        "--seed": options.seed,
        "--bias": options.bias,
        "--prefer": options.prefer,
        "--commit": options.commit,
        "--output": result,
        **({} if options.layers is None else {"--layers": options.layers}),
    }
    command = [sys.executable, "-m", "gpt_oss", "benchmark", *(str(part) for pair in sizes.items() for part in pair)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def entry_point(folder: Path) -> Path:
    """Makes a folder for PYTHONPATH, and returns it. In this folder vLLM finds `register_loader` as a plugin, as if this script
    were installed.
    """
    made = folder / "plugin" / f"{LOAD_FORMAT}-0.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {LOAD_FORMAT}\nVersion: 0\n")
    (made / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{LOAD_FORMAT} = {Path(__file__).stem}:register_loader\n")
    return made.parent


def run_child(options: argparse.Namespace, experts: str, folder: Path, given: Sequence[str]) -> dict[str, Any]:
    """Measures vLLM in a child process. If the process fails, the result holds the error beside what was measured before."""
    result = folder / f"{experts}.json"
    own = [] if options.vllm_path is None else [str(options.vllm_path)]
    paths = [*own, str(entry_point(folder)), str(Path(__file__).resolve().parent), *sys.path[1:]]
    command = [options.vllm_python, __file__, *given, "--only-vllm", experts, "--output", str(result)]
    # vLLM loads no other plugin, so that unmodified vLLM is measured.
    environment = {**_ENVIRONMENT, **os.environ, "VLLM_PLUGINS": LOAD_FORMAT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=environment, check=False)
    found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    return {**found, "error": f"its process ended with {done.returncode}"} if done.returncode or not found else found


def table_of(result: dict[str, Any]) -> list[str]:
    """Returns table lines with our times, vLLM's times, and their ratio. A ratio above 1 means that this runtime is faster."""
    theirs = {experts: found for experts, found in result["vllm"].items() if "error" not in found}
    lines = [f"{'':22}{'ours':>10}" + "".join(f"{'vLLM, ' + experts:>18}{'over ours':>11}" for experts in theirs)]
    ours = result["ours"]["variants"]["optimised"]
    for index, row in enumerate(ours["decode"]):
        step = row["milliseconds_a_step"]
        others = [found["decode"][index]["milliseconds_a_step"] for found in theirs.values()]
        cells = "".join(f"{other:>15.3f} ms{other / step:>11.2f}" for other in others)
        lines.append(f"{'decode, batch ' + str(row['batch']):22}{step:>7.3f} ms{cells}")
    for index, row in enumerate(ours["prefill"]):
        rate = row["tokens_per_second"]
        others = [found["prefill"][index]["tokens_per_second"] for found in theirs.values()]
        cells = "".join(f"{other / 1e3:>15.1f} K/s{rate / other:>10.2f}" for other in others)
        lines.append(f"{'prefill, {batch} x {tokens}'.format(**row):22}{rate / 1e3:>6.1f} K/s{cells}")
    lines += [f"vLLM, {experts}: {found['error']}" for experts, found in result["vllm"].items() if "error" in found]
    return lines


def main(given: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if given is None else given
    options = arguments(given)
    with tempfile.TemporaryDirectory(prefix="beside-vllm-") as name:
        folder = Path(name)
        if options.only_vllm:
            run_vllm(options, folder)
            return
        from tokenspeed_kernel.workbench.benchmark import as_text

        result: dict[str, Any] = {"ours": run_ours(options, folder), "vllm": {}}
        for experts in ("", *options.experts.split(",")):
            if experts:
                result["vllm"][experts] = run_child(options, experts, folder, given)
            # Written after each measurement, so that results are kept if a later measurement fails.
            options.output.write_text(as_text(result))
    print("\n".join(table_of(result)))


if __name__ == "__main__":
    main()
