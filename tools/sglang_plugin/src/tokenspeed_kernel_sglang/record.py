"""Records which layers run on which kernels. Each new decision is logged in one line. The receipt has all decisions."""

from __future__ import annotations

import logging

from tokenspeed_kernel_base.served import Receipt, Row

logger = logging.getLogger("sglang.plugins.tokenspeed_kernel")

_rows: dict[tuple[str, str, tuple[str, ...], str], Row] = {}


def record(part: str, kind: str, kernels: tuple[str, ...] = (), reason: str = "", layers: int = 1) -> None:
    """Records and logs a decision for layers of one kind. If the decision is recorded already, its number of layers grows, and
    nothing is logged.
    """
    key = (part, kind, kernels, reason)
    known = _rows.get(key)
    _rows[key] = row = Row(part, kind, layers + (known.layers if known else 0), kernels, reason)
    if known is None:
        level = logging.INFO if kernels else logging.WARNING
        logger.log(level, "tokenspeed_kernel_sglang: %s, %s: %s", part, kind, receipt_of_process().outcome(row))


def receipt_of_process() -> Receipt:
    """Returns the decisions of this process so far."""
    return Receipt(tuple(_rows.values()), "SGLang")


def forget() -> None:
    """Removes all recorded decisions. For tests."""
    _rows.clear()
