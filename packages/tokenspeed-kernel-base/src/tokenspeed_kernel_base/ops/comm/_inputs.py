"""Values for the cases of operators between processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup


def own_values(draw: Draw, group: ProcessGroup, *shape: int, dtype: torch.dtype) -> Tensor:
    """This rank's tensor. Every rank draws all ranks' values, from one seed, and keeps its own."""
    if not dtype.is_floating_point:
        return draw.integers(-100, 100, group.world_size, *shape, dtype=dtype)[group.rank].clone()
    return draw.normal(group.world_size, *shape, dtype=dtype)[group.rank].clone()


def captured_values(draw: Draw, x: Tensor) -> dict[str, Any]:
    """x of a captured call, if it is not drawn without being asked for: integers whose sums stay small."""
    return {} if x.is_floating_point() else {"x": draw.integers(-100, 100, *x.shape, dtype=x.dtype)}
