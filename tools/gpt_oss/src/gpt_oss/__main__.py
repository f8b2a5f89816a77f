"""Command line: ``python -m gpt_oss demo``, ``benchmark`` and ``capture``."""

from __future__ import annotations

import json
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console

from gpt_oss import benchmark as bench
from gpt_oss import demo as demonstration
from gpt_oss.config import PRESETS
from gpt_oss.config import preset as config_of
from gpt_oss.sampling import Sampling
from tokenspeed_kernel.workbench.benchmark import as_text

app = typer.Typer(add_completion=False, no_args_is_help=True, help="GPT-OSS through tokenspeed-kernel's public API.")

# Exit statuses. DISAGREES: the result differs from the reference. UNUSABLE: an option is wrong or the model cannot be run.
DISAGREES = 1
UNUSABLE = 2


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def _checked_device(name: str) -> str:
    """Returns the device's name. Raises ValueError if PyTorch cannot use the device on this machine."""
    try:
        torch.zeros(1, device=name).tolist()
    except (RuntimeError, AssertionError) as error:  # a PyTorch that was built without this device raises AssertionError
        raise ValueError(f"device must be one that PyTorch can use here, got {name!r}: {error}") from error
    return name


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(wanted: Dtype | None, device: str) -> torch.dtype:
    if wanted is not None:
        return getattr(torch, wanted.value)
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


DeviceOption = Annotated[
    str, typer.Option(default_factory=_default_device, help="where to run; left out: cuda if there is a GPU, else cpu")
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="dtype of activations and of weights that are not quantised; left out: float32 on a CPU, else bfloat16"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else, on standard output")]


@app.command()
def demo(
    device: DeviceOption,
    checkpoint: Annotated[Path | None, typer.Option(help="directory of a checkpoint; left out: random weights")] = None,
    preset: Annotated[str, typer.Option(help=f"configuration without a checkpoint: {', '.join(PRESETS)}")] = "tiny",
    layers: Annotated[int | None, typer.Option(min=1, help="number of layers; left out: the preset's")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="text to continue; may be given several times")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="prompts are a user's messages; left out: if the checkpoint has a chat template"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="most tokens generated for each prompt")] = 32,
    temperature: Annotated[float | None, typer.Option(help="0: greedy; left out: every other prompt is sampled at 0.8")] = None,
    top_k: Annotated[int, typer.Option(help="sample from the k most likely tokens; 0: from all")] = 0,
    top_p: Annotated[float, typer.Option(help="sample from the most likely tokens that together reach this probability")] = 1.0,
    seed: Annotated[int, typer.Option(help="seed of random weights and of sampling")] = 0,
    dtype: DtypeOption = None,
    check: Annotated[
        bool | None,
        typer.Option("--check/--no-check", help="compare with the reference; left out: only without a checkpoint"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Generates text tokens, shows which kernel ran each operator and why, and compares the result with the reference.

    Exit status: 0, or 1 if the result disagrees with the reference, or 2 if an option is wrong or the model cannot be run.
    """
    console = _console(as_json)
    try:
        options = demonstration.Options(
            checkpoint=checkpoint,
            preset=preset,
            layers=layers,
            prompts=tuple(prompt) if prompt else demonstration.PROMPTS,
            max_tokens=max_tokens,
            sampling=Sampling(0.8 if temperature is None else temperature, top_k, top_p, seed),
            mixed=temperature is None,
            chat=chat,
            dtype=_dtype(dtype, _checked_device(device)),
            device=device,
            seed=seed,
            check=checkpoint is None if check is None else check,
        )
        result = demonstration.run(options, console)
    except (ValueError, RuntimeError) as error:
        _give_up(error)
    if as_json:
        _print_json(result.to_dict())
    else:
        demonstration.show(result, console)
    if result.agreement is not None and not result.agreement.agrees:
        raise typer.Exit(DISAGREES)


def _counts(text: str) -> tuple[int, ...]:
    """Parses ``"1,4,16"`` to ints. Raises ValueError for any other form."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ValueError(f"a list of numbers must look like 1,4,16, got {text!r}") from None


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parses ``"1x1024,8x1024"`` to pairs of ints. Raises ValueError for any other form."""
    parts = [part.split("x") for part in text.split(",") if part]
    try:
        return tuple((int(batch), int(tokens)) for batch, tokens in parts)
    except ValueError:
        raise ValueError(f"a list of prefills must look like 1x1024,8x1024, got {text!r}") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


@app.command()
def benchmark(
    device: DeviceOption,
    preset: Annotated[str, typer.Option(help=f"configuration: {', '.join(PRESETS)}")] = "gpt-oss-120b",
    layers: Annotated[int | None, typer.Option(min=1, help="number of layers; left out: the preset's")] = None,
    batch: Annotated[str, typer.Option(help="numbers of sequences that decode together; empty: none")] = "1,4,16,64",
    context: Annotated[str, typer.Option(help="tokens of each sequence before the decode steps")] = "1024",
    decode_steps: Annotated[int, typer.Option(min=2, help="number of decode steps that are timed")] = 64,
    prefill: Annotated[str, typer.Option(help="prefills that are timed, prompts x tokens of each; empty: none")] = "1x1024,8x1024",
    repeats: Annotated[int, typer.Option(min=1, help="how often each prefill is timed")] = 5,
    page_size: Annotated[int, typer.Option(min=1, help="tokens that a page of the cache holds")] = 64,
    compare: Annotated[str, typer.Option(help=f"variants, one after the other: {', '.join(bench.VARIANTS)}")] = "optimised",
    temperature: Annotated[float, typer.Option(help="of the tokens that decode steps choose; 0: greedy")] = 1.0,
    bias: Annotated[float, typer.Option(help="standard deviation of random biases; small ones spread tokens over experts")] = 0.5,
    prefer: Annotated[str, typer.Option(help="kernels that serve wherever they can, whatever their priority; empty: none")] = "",
    penalties: Annotated[bool, typer.Option("--penalties", help="requests that decode have penalties")] = False,
    seed: Annotated[int, typer.Option(help="seed of weights, prompts and sampling")] = 0,
    dtype: DtypeOption = None,
    commit: Annotated[
        str, typer.Option(help="of this code, where it is a copy whose checkout says another; empty: the checkout's")
    ] = "",
    output: Annotated[Path | None, typer.Option(help="write the result as JSON to this file")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measures the runtime end to end with random weights: decode steps of the engine, and prefills.

    Exit status: 0, or 2 if an option is wrong or the model cannot be run.
    """
    console = _console(as_json)
    try:
        workload = bench.Workload(
            preset,
            layers,
            _counts(batch),
            _counts(context),
            decode_steps,
            _shapes(prefill),
            repeats,
            page_size,
            seed,
            _names(prefer),
            temperature,
            bias,
            penalties,
        )
        variants = _names(compare)
        command = "python -m gpt_oss " + shlex.join(sys.argv[1:])

        def keep(found: dict[str, Any]) -> None:
            if output is not None:
                output.write_text(as_text(found))

        result = bench.run(workload, _dtype(dtype, _checked_device(device)), device, variants, command, console, commit, keep)
    except (ValueError, RuntimeError) as error:
        _give_up(error)
    keep(result)
    if as_json:
        _print_json(result)
    else:
        bench.show(result, console)


@app.command()
def capture(
    file: Annotated[Path, typer.Argument(help="the file that the calls are added to")],
    arch: Annotated[str, typer.Option(help="the device that will run the engine: h200, mi355x, sm_90a...")],
    preset: Annotated[str, typer.Option(help=f"configuration: {', '.join(PRESETS)}")] = "gpt-oss-120b",
    dtype: Annotated[Dtype, typer.Option(help="dtype of activations and of weights that are not quantised")] = Dtype.bfloat16,
    activation_dtype: Annotated[str, typer.Option(help="format of the experts' activations: none, fp8, mxfp4")] = "none",
    dense_weights: Annotated[str, typer.Option(help="format of the dense weights: none, fp8, mxfp4")] = "none",
    pages: Annotated[int, typer.Option(min=1, help="pages of the cache")] = 4096,
    page_size: Annotated[int, typer.Option(min=1, help="tokens that a page of the cache holds")] = 64,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="the largest number of prompt tokens per step")] = 512,
    max_sequences: Annotated[int, typer.Option(min=1, help="the largest number of sequences that run at a time")] = 64,
    max_positions: Annotated[int | None, typer.Option(min=1, help="tokens of the longest sequence; left out: the preset's")] = None,
) -> None:
    """Captures the calls of an engine, without the device that will run it. ``tokenspeed-kernel pack build`` takes the file.

    Exit status: 0, or 2 if an option is wrong or the file cannot be written.
    """
    # Imported here, because no other command needs the module.
    from gpt_oss.shapes_only import capture_calls

    sizes = (pages, page_size, prefill_tokens, max_sequences, max_positions)
    try:
        made = capture_calls(file, config_of(preset), arch, getattr(torch, dtype.value), *sizes, activation_dtype, dense_weights)
    except (OSError, ValueError) as error:
        _give_up(error)
    typer.echo(f"captured the calls of {made.passes} passes in {file}")


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=132)  # wide enough for the tables in a log


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _give_up(error: Exception) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(UNUSABLE) from error


def main() -> None:
    app()


if __name__ == "__main__":
    main()
