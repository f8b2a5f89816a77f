"""Renders a receipt as an HTML page."""

from __future__ import annotations

from tokenspeed_kernel.workbench.receipts.records import Receipt
from tokenspeed_kernel.workbench.receipts.rows import Row
from tokenspeed_kernel.workbench.receipts.text import call_of, sizes_of, times_of, why_not
from tokenspeed_kernel.workbench.report.html import rendered
from tokenspeed_kernel.workbench.report.page import Cell

_COLUMNS = ("phase", "call", "times", "sizes", "kernel", "predicted", "not taken")
_WORDS = frozenset({"call", "kernel", "not taken"})  # columns whose text may wrap


def render_receipt(receipt: Receipt) -> str:
    """Renders a receipt as HTML that needs no other file and no network."""
    facts = {"date": receipt.date, "device": f"{receipt.device} [{receipt.arch}]", **receipt.versions, **receipt.settings}
    return rendered(
        "receipt.html",
        f"Kernels of {receipt.subject}",
        facts=[*facts.items()],
        notes=receipt.notes,
        columns=[{"name": name, "number": name == "times", "room": "words" if name in _WORDS else ""} for name in _COLUMNS],
        rows=[_table_row(receipt, row) for row in receipt.rows],
        choices=[
            ("operator", sorted({row.operator for row in receipt.rows})),
            ("solution", sorted({row.solution for row in receipt.rows} - {""})),
        ],
    )


def _table_row(receipt: Receipt, row: Row) -> dict[str, object]:
    passed = "; ".join(f"{each.kernel}: {why_not(each)}" for each in row.passed)
    cells = (
        Cell(row.phase),
        Cell(call_of(row)),
        Cell(str(row.times or ""), row.times or "", number=True),
        Cell(sizes_of(row)),
        Cell(row.kernel or f"none: {row.reason}", bad=not row.kernel),
        Cell(times_of(row)),
        Cell(passed),
    )
    cells_by_name = dict(zip(_COLUMNS, cells, strict=True))
    return {"device": receipt.device, "operator": row.operator, "solution": row.solution, "cells": cells_by_name}
