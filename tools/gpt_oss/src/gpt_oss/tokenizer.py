"""Converts text to token ids and back: bytes for the tiny model, a checkpoint's own tokenizer for a real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    Attributes:
        has_chat: whether `chat` can be called.
    """

    has_chat: bool

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def chat(self, message: str) -> list[int]:
        """Returns the tokens of a chat with one user message, up to the start of the model's answer."""


class ByteTokenizer:
    """Tokens 0 to 255 are the bytes of the text in UTF-8; 256 begins a text and 257 ends it."""

    START, END = 256, 257
    vocab_size = 258
    has_chat = False

    def encode(self, text: str) -> list[int]:
        return [self.START, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text for these tokens. Invalid UTF-8 bytes become �, and the two special tokens are omitted."""
        return bytes(token for token in tokens if token < self.START).decode(errors="replace")

    def chat(self, message: str) -> list[int]:
        raise ValueError("chat needs a checkpoint with a chat template; bytes have none")


class CheckpointTokenizer:
    """The tokenizer in a checkpoint's directory, read by transformers, with its chat template.

    Raises:
        RuntimeError: transformers is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise RuntimeError("a checkpoint's tokenizer needs transformers: pip install 'transformers>=4.55'") from error
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        self.has_chat = bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def chat(self, message: str) -> list[int]:
        if not self.has_chat:
            raise ValueError("chat needs a checkpoint with a chat template; this one has none")
        conversation = [{"role": "user", "content": message}]
        return list(self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))


def tokenizer_of(directory: str | Path | None, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of a checkpoint.

    The result is `ByteTokenizer` if there is no checkpoint, or if the checkpoint has no tokenizer and its vocabulary has the size
    of `ByteTokenizer`'s.
    """
    if directory is None or (vocab_size == ByteTokenizer.vocab_size and not list(Path(directory).glob("tokenizer*"))):
        return ByteTokenizer()
    return CheckpointTokenizer(directory)
