"""The demo: generates tokens, shows which kernel ran each operator and why, and compares the result with the reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpt_oss.cache import PagedKVCache
from gpt_oss.check import Agreement, compare_with_reference
from gpt_oss.config import PRESETS, Config, preset
from gpt_oss.engine import Engine
from gpt_oss.fields import COUNT, FLAG, FLOAT_DTYPE, INT, Field, check_fields, describe, dtype_name, instance, one_of, optional
from gpt_oss.kernels import Heard, listen
from gpt_oss.loader import Checkpoint, RandomTensors, TensorSource
from gpt_oss.model import GptOss
from gpt_oss.request import Completion, Event, Request, checked_request
from gpt_oss.sampling import Sampling
from gpt_oss.tokenizer import tokenizer_of
from tokenspeed_kernel import compilations

# The lengths of the prompts differ. Most prompts are longer than the tiny model's window of 16 tokens.
PROMPTS = (
    "Hello!",
    "A kernel says what it can do,",
    "an inference runtime asks what it wants, and one selector connects the two.",
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs. How vexingly quick daft zebras jump!",
    "Once upon a time",
    "Sliding layers see the last few tokens only; full layers see them all.",
)

RANDOM_NOTE = (
    "The weights are random and untrained, so GPT-OSS generates text tokens here that make no sense. "
    "A token is a byte; bytes that cannot be printed are shown as dots."
)


_OPTIONS = {
    "checkpoint": optional(instance(Path)),
    "preset": one_of(*PRESETS),
    "layers": optional(COUNT),
    "prompts": Field("a sequence of at least one text", lambda value: isinstance(value, Sequence), lambda value: len(value) > 0),
    "max_tokens": COUNT,
    "sampling": instance(Sampling),
    "mixed": FLAG,
    "chat": optional(FLAG),
    "dtype": FLOAT_DTYPE,
    "device": Field("the name of a device", lambda value: isinstance(value, str)),
    "seed": INT,
    "check": FLAG,
    "prefill_tokens": COUNT,
    "page_size": COUNT,
}


@dataclass(frozen=True)
class Options:
    """The demo's options.

    Attributes:
        checkpoint: directory of a Hugging Face checkpoint; None for random weights of a preset.
        preset: name of the configuration to use if ``checkpoint`` is None.
        layers: number of layers if ``checkpoint`` is None; None for the preset's number.
        prompts: the texts to continue, at least one; by default `PROMPTS`.
        max_tokens: the largest number of tokens to generate per prompt.
        sampling: the sampling parameters. The seed of prompt i is the seed in ``sampling`` plus i.
        mixed: whether every other prompt is continued greedily, whatever ``sampling`` says.
        chat: True: a prompt is a user's message in the checkpoint's chat template. False: a prompt is plain text to continue. None:
            True if the checkpoint has a chat template.
        dtype: floating-point dtype of weights and activations.
        device: the model's device, by PyTorch's name.
        seed: seed of the random weights.
        check: whether the result is compared with the reference.
        prefill_tokens: the largest number of prompt tokens per step of the engine.
        page_size: number of tokens per page of the cache.

    Raises:
        TypeError, ValueError: a field is not as stated; the message names it.
    """

    checkpoint: Path | None = None
    preset: str = "tiny"
    layers: int | None = None
    prompts: Sequence[str] = PROMPTS
    max_tokens: int = 32
    sampling: Sampling = field(default_factory=Sampling)
    mixed: bool = False
    chat: bool | None = None
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    seed: int = 0
    check: bool = True
    prefill_tokens: int = 64
    page_size: int = 16

    def __post_init__(self) -> None:
        check_fields(_OPTIONS, self)
        if isinstance(self.prompts, str) or not all(isinstance(prompt, str) for prompt in self.prompts):
            raise TypeError(f"prompts must be a sequence of strings, got {describe(self.prompts, with_type=True)}")
        if self.checkpoint is not None and self.layers is not None:
            raise ValueError(f"layers must be left out with a checkpoint, got {self.layers}")


@dataclass(frozen=True)
class Result:
    """The results of a run of the demo.

    Attributes:
        seconds: duration of the timed run in seconds, without the untimed run before it that loads all kernels.
        steps: number of passes of the timed run, by phase.
        compilations: the number of programs that were compiled before the timed run, and during the timed run.
    """

    options: Options
    config: Config
    completions: Sequence[Completion]
    texts: Sequence[str]
    seconds: float
    steps: dict[str, int]
    compilations: tuple[int, int]
    kernels: Sequence[Heard]
    agreement: Agreement | None

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    def to_dict(self) -> dict[str, Any]:
        options = self.options
        return {
            "model": str(options.checkpoint or options.preset),
            "random_weights": options.checkpoint is None,
            "config": self.config.to_hf(),
            "dtype": dtype_name(options.dtype),
            "device": options.device,
            "completions": [
                {
                    "prompt": prompt,
                    "text": text,
                    "tokens": completion.tokens,
                    "finish_reason": completion.finish_reason,
                }
                for prompt, text, completion in zip(options.prompts, self.texts, self.completions, strict=True)
            ],
            "generated_tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "steps": self.steps,
            "compilations": dict(zip(("before", "within"), self.compilations, strict=True)),
            "kernels": [heard.to_dict() for heard in self.kernels],
            "check": self.agreement.to_dict() if self.agreement else None,
        }


def run(options: Options, console: Console) -> Result:
    """Runs the demo. Shows its progress on the console; `show` prints the result.

    Raises:
        ConfigError, CheckpointError: the model's configuration or tensors cannot be used.
        TypeError, ValueError: a request can never run on the model, or chat is requested without a template.
        RuntimeError: the tokenizer needs transformers, or the device fails.
    """
    config, source = model_of(options.checkpoint, options.preset, options.layers, options.seed, options.device)
    tokenizer = tokenizer_of(options.checkpoint, config.vocab_size)
    encode = tokenizer.chat if (tokenizer.has_chat if options.chat is None else options.chat) else tokenizer.encode
    stop = frozenset(config.eos_token_ids) if options.checkpoint else frozenset()  # with random weights no token ends a text
    requests = [
        Request(
            encode(prompt),
            options.max_tokens,
            Sampling() if options.mixed and number % 2 == 0 else _with_seed_plus(options.sampling, number),
            stop,
            keep_logits=options.check,
        )
        for number, prompt in enumerate(options.prompts)
    ]
    for request in requests:
        checked_request(request, config.vocab_size, config.max_position_embeddings)  # raises an error before weights are loaded
    longest = max(len(request.prompt) for request in requests) + options.max_tokens
    model = GptOss(config, source, options.dtype, options.device, max_positions=longest, console=console)
    cache = _cache_for(model, requests, options.page_size)
    with listen() as listener:
        # This first run is not timed, because recording makes calls slower, and the first call of a kernel may compile it.
        engine = Engine(model, cache, options.prefill_tokens, len(requests), console=console)
        with console.status("running every kernel once"):
            engine.generate([replace(request, max_tokens=min(2, request.max_tokens), keep_logits=False) for request in requests])
    engine.steps = dict.fromkeys(engine.steps, 0)
    compiled = len(compilations())
    started = time.perf_counter()
    completions = _generate(engine, requests, console)
    seconds = time.perf_counter() - started
    agreement = None
    if options.check:
        with console.status("checking against the reference"):
            agreement = compare_with_reference(config, source, completions, options.dtype, options.device)
    return Result(
        options,
        config,
        completions,
        [tokenizer.decode(completion.tokens) for completion in completions],
        seconds,
        {phase.value: count for phase, count in engine.steps.items()},
        (compiled, len(compilations(compiled))),
        listener.heard(),
        agreement,
    )


def model_of(checkpoint: Path | None, name: str, layers: int | None, seed: int, device: str) -> tuple[Config, TensorSource]:
    """Returns the configuration and tensors of a checkpoint, or of a preset with random tensors. Random tensors are created on the
    model's device."""
    if checkpoint is not None:
        return Config.from_directory(checkpoint), Checkpoint(checkpoint)
    config = preset(name) if layers is None else preset(name).with_layers(layers)
    return config, RandomTensors(config, seed, device=device)


def _with_seed_plus(sampling: Sampling, number: int) -> Sampling:
    """Returns the sampling parameters with ``number`` added to the seed, with wrap-around in int64."""
    return replace(sampling, seed=(sampling.seed + number + 2**63) % 2**64 - 2**63)


def _cache_for(model: GptOss, requests: Sequence[Request], page_size: int) -> PagedKVCache:
    """Creates a cache that holds the tokens of all requests at once."""
    pages = sum(-(-(len(request.prompt) + request.max_tokens) // page_size) for request in requests)
    return PagedKVCache(model.config, pages, page_size, model.dtype, model.device)


def _generate(engine: Engine, requests: Sequence[Request], console: Console) -> list[Completion]:
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(request.max_tokens for request in requests), rate="")
        started = time.perf_counter()

        def advance(_: Event) -> None:
            progress.advance(task)
            done = progress.tasks[0].completed
            progress.update(task, rate=f"{done / (time.perf_counter() - started):.0f} tokens/s")

        return engine.generate(requests, advance)


def show(result: Result, console: Console) -> None:
    """Prints a result as tables and sentences."""
    options, config = result.options, result.config
    console.print()
    if options.checkpoint is None:
        console.print(RANDOM_NOTE, style="yellow")
    texts = Table("prompt", "continuation", "tokens", "chosen", "ends by", title="Generated", title_justify="left")
    for prompt, text, completion in zip(options.prompts, result.texts, result.completions, strict=True):
        sampled = "sampled" if completion.request.sampling.temperature else "greedy"
        texts.add_row(escape(prompt), escape(_printable(text)), str(len(completion.tokens)), sampled, completion.finish_reason)
    console.print(texts)
    kernels = Table(title="Which kernel served which operator, and why", title_justify="left")
    for heading in ("operator", "kernel", "why"):
        kernels.add_column(heading, overflow="fold")
    for heard in result.kernels:
        kernels.add_row(heard.operator, heard.kernel, escape(heard.why))
    console.print(kernels)
    steps = ", ".join(f"{count} {phase}" for phase, count in result.steps.items())
    experts = f"{config.num_local_experts} experts, {config.num_experts_per_tok} a token"
    console.print(
        f"{options.checkpoint or options.preset}: {config.num_hidden_layers} layers, {experts}, {config.quantization or 'dense'} "
        f"weights, {dtype_name(options.dtype)} on {options.device}"
    )
    rate = result.tokens / result.seconds
    console.print(f"{result.tokens} tokens in {result.seconds:.2f} s: {rate:.1f} tokens/s ({steps} passes)")
    console.print("programs compiled: {} before the run, {} in it".format(*result.compilations))
    if result.agreement is not None:
        _show_agreement(result.agreement, console)


def _show_agreement(agreement: Agreement, console: Console) -> None:
    console.print(
        f"Compared with the reference (every operator's PyTorch body, no cache, no batching): "
        f"{agreement.same_tokens} of {agreement.tokens} tokens and {agreement.same_sequences} of {agreement.sequences} texts are "
        f"the same. Logits differ by at most {agreement.max_abs_difference:.2g}; the largest is {agreement.max_abs_logit:.2g}. "
        f"Relative error of a token's logits against the reference in float32: median {agreement.median_error:.1g} "
        f"(limit {agreement.median_allowed:.2g}), mean {agreement.mean_error:.1g} (limit {agreement.mean_allowed:.2g})."
    )
    if not agreement.agrees:
        console.print("It DISAGREES with the reference.", style="bold red")
    elif agreement.same_tokens < agreement.tokens:
        console.print("It agrees with the reference; tokens differ where a rounding error decided a close choice.", style="green")
    else:
        console.print("It agrees with the reference.", style="green")


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() and char != "�" else "·" for char in text)
