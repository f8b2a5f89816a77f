"""Inputs for the cases of collective operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw, recipe
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.variation import Variation, Want


def own_values(draw: Draw, group: ProcessGroup, *shape: int, dtype: torch.dtype) -> Tensor:
    """Draws this rank's tensor. Every rank draws the values of all ranks from the same seed, and keeps its own values."""
    if not dtype.is_floating_point:
        return draw.integers(-100, 100, group.world_size, *shape, dtype=dtype)[group.rank].clone()
    return draw.normal(group.world_size, *shape, dtype=dtype)[group.rank].clone()


@recipe
def rank_inputs(*shape: int, dtype: torch.dtype = torch.bfloat16, for_each_rank: bool = False) -> Callable[[Draw], dict[str, Any]]:
    """Draws x, with the default group. With ``for_each_rank``, x has the given number of rows for every rank."""

    def make(draw: Draw) -> dict[str, Any]:
        group = ProcessGroup.with_peer_memory()
        rows, *rest = shape
        return {"x": own_values(draw, group, rows * (group.world_size if for_each_rank else 1), *rest, dtype=dtype), "group": group}

    return make


def captured_inputs(variation: Variation, x: Tensor) -> dict[str, Any]:
    """Draws the inputs of a captured call, with the default group. Integers are small, so that sums do not overflow."""
    if variation.want is not Want.CAPTURED:
        return {}
    values = {} if x.is_floating_point() else {"x": variation.draw.integers(-100, 100, *x.shape, dtype=x.dtype)}
    return {"group": ProcessGroup.with_peer_memory(), **values}
