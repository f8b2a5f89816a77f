"""A sampler that draws tokens by the core's operators. SGLang's own sampler, the base class, runs all other batches."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from tokenspeed_kernel_base.served import NotServedError, kernel_for
from tokenspeed_kernel_sglang.record import record

# The type is Any, because calls with options in a dict match no overload of the operators for type checkers.
OPS: Any = import_module("tokenspeed_kernel")
_PART = "sampling"


class TokenspeedSampler(Sampler):
    """Greedy batches run `argmax`. Other batches run `sample_top_k_top_p`, from logits, without a softmax.

    Top-p counts among the tokens that min-p and top-k keep. SGLang's own sampler counts among all tokens, unless FlashInfer runs it
    with min-p. So if a request has top-p and another filter, the two samplers may keep different tokens.

    Random numbers depend on the request's seed and the token's position, if requests have seeds. Otherwise they depend on SGLang's
    random seed and on the number of tokens that were drawn before, so all ranks draw the same tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn = 0
        self.seed = torch.initial_seed() % 2**63

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
        **options: Any,
    ) -> Tensor:
        """Draws a token for each row of the logits. See SGLang's `Sampler` for the arguments.

        Returns:
            ``[rows]``, int64 if all rows are greedy, otherwise int32.
        """
        refused = {
            "log probabilities": return_logprob or any(value is not None for value in options.values()),
            "sampling masks": getattr(sampling_info, "sampling_mask_batch_indices", None) is not None,
            "on-policy training": self.rl_on_policy_target is not None,
        }
        logits = logits_output.next_token_logits
        arguments = None if any(refused.values()) or len(logits) == 0 else self.arguments(logits, sampling_info, positions)
        if arguments is None or not _served(logits.device, logits.dtype, logits.shape[1], tuple(arguments)):
            for feature, asked in refused.items():
                if asked:
                    record(_PART, f"batches with {feature}", reason=f"it does not serve {feature}")
            own: Tensor = super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, **options
            )
            return own
        arguments["logits"] = self._preprocess_logits(logits, sampling_info)
        operator, dtype = _operator(tuple(arguments))
        tokens: Tensor = operator(**arguments, **dtype)
        if not sampling_info.is_all_greedy and sampling_info.sampling_seed is None:
            self.drawn += len(tokens)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    def arguments(self, logits: Tensor, sampling_info: Any, positions: Tensor) -> dict[str, Tensor]:
        """Returns the arguments of the operator for a batch: the logits alone if all rows are greedy."""
        if sampling_info.is_all_greedy:
            return {"logits": logits}
        rows = len(logits)
        if sampling_info.sampling_seed is None:
            seed = torch.full((rows,), self.seed, dtype=torch.int64, device=logits.device)
            offset = torch.arange(self.drawn, self.drawn + rows, device=logits.device)
        else:
            seed, offset = sampling_info.sampling_seed.long(), positions.long()
        # For a greedy row, SGLang sets the temperature to 1 and top-k to 1.
        found = {
            "logits": logits,
            "temperature": sampling_info.temperatures.view(-1),
            "top_k": sampling_info.top_ks,
            "top_p": sampling_info.top_ps,
            "seed": seed,
            "offset": offset,
        }
        return {**found, "min_p": sampling_info.min_ps} if sampling_info.need_min_p_sampling else found


def _operator(arguments: tuple[str, ...]) -> tuple[Any, dict[str, torch.dtype]]:
    """Returns the operator that takes these arguments, and the dtype of its result, which is that of SGLang's own sampler."""
    return (OPS.argmax, {}) if len(arguments) == 1 else (OPS.sample_top_k_top_p, {"out_dtype": torch.int32})


@functools.cache
def _served(device: torch.device, dtype: torch.dtype, vocab: int, arguments: tuple[str, ...]) -> bool:
    """Returns whether a kernel is eligible, by asking for one row. Records the decision."""
    operator, out_dtype = _operator(arguments)
    kind = f"{operator.__name__}, vocabulary of {vocab}{', min-p' if 'min_p' in arguments else ''}"
    dtypes = {"logits": dtype, "top_k": torch.int32, "seed": torch.int64, "offset": torch.int64}
    call = {each: torch.ones(1, dtype=dtypes.get(each, torch.float32), device=device) for each in arguments}
    call["logits"] = torch.zeros(1, vocab, dtype=dtype, device=device)
    try:
        kernel = kernel_for(operator, {**call, **out_dtype}).name
    except NotServedError as error:
        record(_PART, kind, reason=str(error))
        return False
    record(_PART, kind, (kernel,))
    return True
