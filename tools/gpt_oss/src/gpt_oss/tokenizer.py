"""Text in, text out: bytes for the tiny model, the checkpoint's own tokenizer for a real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and two tokens more: 256 begins a text, 257 ends it."""

    START, END = 256, 257
    vocab_size = 258

    def encode(self, text: str) -> list[int]:
        return [self.START, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the bytes; those that are no UTF-8 are shown as �, and the two special tokens not at all."""
        return bytes(token for token in tokens if token < self.START).decode(errors="replace")


class CheckpointTokenizer:
    """The tokenizer of a checkpoint's directory, read by transformers."""

    def __init__(self, directory: str | Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise RuntimeError(
                "a checkpoint's tokenizer needs transformers, which is not installed: pip install 'gpt-oss-runtime[tokenizer]'"
            ) from error
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def tokenizer_of(directory: str | Path | None, vocab_size: int) -> Tokenizer:
    """A checkpoint's tokenizer; that of bytes where there is no checkpoint, or none is in it and its vocabulary is bytes."""
    if directory is None or (vocab_size == ByteTokenizer.vocab_size and not list(Path(directory).glob("tokenizer*"))):
        return ByteTokenizer()
    return CheckpointTokenizer(directory)
