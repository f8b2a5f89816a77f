"""The metadata of a batch over SGLang's paged KV cache, also in CUDA graphs: what our attention backends share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor


@dataclass
class Metadata:
    """The metadata of a batch.

    Attributes:
        seq_lens: int32 ``[batch]``, the length of each sequence, including new tokens.
        max_seq_len: an upper bound of seq_lens.
        page_table: int32 ``[batch, pages]``, page indices in the KV pool of layers without a window (the full pool).
        window_table: int32 ``[batch, pages]``, page indices in the KV pool of sliding-window layers; equals page_table if there is
            only one pool.
        window_slots: ``[tokens]``, the slots of new tokens in the KV pool of sliding-window layers; None if there is only one pool.
        slots: int64 ``[tokens]``, the slots of new tokens in the KV pool of layers without a window; None if they are the batch's
            ``out_cache_loc``. The slots of padding are -1 in both tensors, and are not written.
        cu_seqlens_q: int32 ``[batch + 1]``, the first query row of each sequence; None for decode batches.
        max_query_len: the largest number of new tokens of any sequence.
    """

    seq_lens: Tensor
    max_seq_len: int
    page_table: Tensor
    window_table: Tensor
    window_slots: Tensor | None
    slots: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_query_len: int = 1


class PagedBackend(AttentionBackend):
    """Metadata of batches that extend sequences after a cached prefix, or decode. Decode batches can be captured in CUDA graphs."""

    def __init__(self, runner: Any) -> None:
        """
        Args:
            runner: SGLang's `ModelRunner`, with the loaded model and its cache.
        """
        # SGLang's models read the pools under these names.
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.pool = self.token_to_kv_pool
        self.req_to_token: Tensor = self.req_to_token_pool.req_to_token
        self.page_size = int(runner.page_size)
        self.context_len = int(runner.model_config.context_len)
        self.two_pools = hasattr(self.pool, "translate_loc_from_full_to_swa")
        self.forward_metadata: Metadata | None = None
        self._graph: Metadata | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Makes the metadata of a batch that runs without a CUDA graph."""
        batch = len(forward_batch.seq_lens)
        if batch == 0 or forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        longest = int(forward_batch.seq_lens_cpu.max())
        table, window_table = self._tables(forward_batch.req_pool_indices, longest)
        metadata = Metadata(
            seq_lens=forward_batch.seq_lens.int(),
            max_seq_len=longest,
            page_table=table,
            window_table=window_table,
            window_slots=self._window_slots(forward_batch.out_cache_loc),
        )
        if not forward_batch.forward_mode.is_decode():
            _check_mode(forward_batch)
            new = forward_batch.extend_seq_lens
            metadata.cu_seqlens_q = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
            metadata.max_query_len = int(max(forward_batch.extend_seq_lens_cpu))
        self.forward_metadata = metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the metadata buffers that captured graphs read."""
        device = self.req_to_token.device
        pages = -(-self.context_len // self.page_size)
        table = torch.zeros(max_bs, pages, dtype=torch.int32, device=device)
        self._graph = Metadata(
            seq_lens=torch.ones(max_bs, dtype=torch.int32, device=device),
            max_seq_len=self.context_len,
            page_table=table,
            window_table=torch.zeros_like(table) if self.two_pools else table,
            window_slots=torch.zeros(max_num_tokens, dtype=torch.int64, device=device) if self.two_pools else None,
            slots=torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Writes a decode batch's metadata to the buffers that captured graphs read. SGLang calls this method before a capture and
        before each replay. Does not wait for the device.

        Before a replay, SGLang pads the lengths and the requests to the batch size of the graph, but not ``out_cache_loc``.
        SGLang's own buffer of slots has slot 0 for all padding, but our operators write to distinct slots. So graphs read the
        slots of the metadata.

        Raises:
            ValueError: the graph is for prefills or for speculative decoding. The message names the option to change.
        """
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise ValueError(
                "tokenspeed_kernel_sglang captures decode batches only; "
                "choose the prefill graph backend 'breakable' or 'disabled', and no speculative decoding"
            )
        if self._graph is None:
            raise RuntimeError("init_cuda_graph_state must run before graphs are captured")
        static, batch = self._graph, forward_batch.batch_size
        lengths = forward_batch.seq_lens[:batch]
        # During a capture, the contents of the page tables do not matter, so only the first page of each sequence is written.
        longest = 1 if in_capture else int(forward_batch.seq_lens_cpu[:batch].max())
        static.seq_lens[:batch].copy_(lengths)
        table, window_table = self._tables(forward_batch.req_pool_indices[:batch], longest)
        static.page_table[:batch, : table.shape[1]].copy_(table)
        slots = forward_batch.out_cache_loc[:batch]
        _pad(static.slots[:batch], slots)  # type: ignore[index]
        if self.two_pools:
            static.window_table[:batch, : table.shape[1]].copy_(window_table)
            _pad(static.window_slots[:batch], self.pool.translate_loc_from_full_to_swa(slots))  # type: ignore[index]
        self.forward_metadata = Metadata(
            seq_lens=static.seq_lens[:batch],
            max_seq_len=static.max_seq_len,
            page_table=static.page_table[:batch],
            window_table=static.window_table[:batch],
            window_slots=None if static.window_slots is None else static.window_slots[:batch],
            slots=static.slots[:batch],  # type: ignore[index]
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Returns the length of a padding sequence: one token, which is in the slot that SGLang reserves for padding."""
        return 1

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> Tensor:
        """Writes the new keys and values to the cache, and runs attention with one new token of each sequence. The arguments are
        those of `run`.
        """
        return self.run(q, k, v, layer, forward_batch, save_kv_cache, options)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> Tensor:
        """Like `forward_decode`, but with several new tokens of each sequence after a cached prefix."""
        return self.run(q, k, v, layer, forward_batch, save_kv_cache, options)

    @abstractmethod
    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save: bool, options: dict[str, Any]) -> Tensor:
        """Writes the new keys and values to the cache, and runs attention.

        Args:
            q: ``[tokens, heads * head_dim]`` or ``[tokens, heads, head_dim]``; may be slices of qkv's rows.
            k, v: ``[tokens, kv_heads, dim]``.
            layer: SGLang's `RadixAttention`.
            forward_batch: the batch.
            save: False if k and v are in the cache already.
            options: further arguments of the layer's call.

        Returns:
            ``[tokens, heads * v_head_dim]``.

        Raises:
            ValueError: the layer was not found when the model was built, or an argument is not supported. The message names the
                layer or the argument.
        """

    def batch(self, options: dict[str, Any]) -> Metadata:
        """Returns the batch's metadata.

        Args:
            options: arguments that no kernel supports.

        Raises:
            ValueError: an argument is not None.
            RuntimeError: there is no metadata.
        """
        unknown = [name for name, value in options.items() if value is not None]
        if unknown:
            raise ValueError(f"tokenspeed_kernel_sglang has no kernel for {', '.join(unknown)}; choose another attention backend")
        if self.forward_metadata is None:
            raise RuntimeError("init_forward_metadata must run before attention")
        return self.forward_metadata

    def slots(self, forward_batch: Any, windowed: bool = False) -> Tensor:
        """Returns the slots of a batch's new tokens in the KV pool of layers with or without a window.

        Raises:
            RuntimeError: there is no metadata.
        """
        metadata = self.batch({})
        found = metadata.window_slots if windowed and self.two_pools else metadata.slots
        return forward_batch.out_cache_loc if found is None else found

    def _tables(self, requests: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Returns two page tables, for layers without and with a window. They cover sequences of at most ``longest`` tokens."""
        slots = self.req_to_token[requests, : longest : self.page_size]
        table = torch.div(slots, self.page_size, rounding_mode="floor").int()
        if not self.two_pools:
            return table, table
        window = torch.div(self.pool.translate_loc_from_full_to_swa(slots), self.page_size, rounding_mode="floor")
        return table, window.int()

    def _window_slots(self, slots: Tensor) -> Tensor | None:
        return self.pool.translate_loc_from_full_to_swa(slots) if self.two_pools else None


def _pad(padded: Tensor, slots: Tensor) -> None:
    """Writes slots, and -1 after them."""
    padded[: len(slots)].copy_(slots)
    padded[len(slots) :].fill_(-1)


def _check_mode(forward_batch: Any) -> None:
    """Raises ValueError if a batch is of a kind that no kernel runs."""
    mode = forward_batch.forward_mode
    if mode.is_target_verify() or mode.is_draft_extend_v2() or mode.is_dllm_extend():
        raise ValueError(f"tokenspeed_kernel_sglang has no kernel for batches of {mode.name}; choose another attention backend")
