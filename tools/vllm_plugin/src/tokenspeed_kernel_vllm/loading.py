"""Loaded parameters of a layer whose prepared weights replace them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.model_executor.utils import replace_parameter


def release(layer: Any, names: Iterable[str], prepared: Any) -> None:
    """Replaces parameters by empty tensors, to save memory. Keeps parameters whose memory the prepared weights share.

    Args:
        layer: the layer, loaded.
        names: the parameters' names. Names that the layer lacks are skipped.
        prepared: the object that holds the prepared tensors.
    """
    kept = {value.untyped_storage().data_ptr() for value in vars(prepared).values() if isinstance(value, Tensor)}
    for name in names:
        parameter = getattr(layer, name, None)
        if parameter is not None and parameter.data.untyped_storage().data_ptr() not in kept:
            replace_parameter(layer, name, parameter.data.new_empty(0))
