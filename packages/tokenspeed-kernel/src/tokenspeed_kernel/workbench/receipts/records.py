"""The data of a receipt, and its JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed_kernel.workbench.plain import from_plain
from tokenspeed_kernel.workbench.receipts.rows import Row
from tokenspeed_kernel.workbench.receipts.text import table, wrapped
from tokenspeed_kernel_base.storage import replace_file
from tokenspeed_kernel_base.traits import format_traits

FORMAT = 1


class ReceiptError(ValueError):
    """A file is no receipt. The message names the file."""


@dataclass(frozen=True)
class Receipt:
    """The kernels that are selected for the calls of a model or a process.

    Attributes:
        subject: the model's name, or ``"process"``.
        device, arch: the device's name and architecture.
        versions: versions of the distributions that affect selection, and of the device's driver.
        settings: the arguments of `receipt` for a model: context, page size, dtypes...
        notes: messages about settings that have no effect, and about plugins that failed to load.
        rows: the kinds of calls, each with its kernel. Sizes with the same kernel for the same reasons share a row.
        date: the date and time of the selection, in ISO 8601.
    """

    subject: str
    device: str
    arch: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    rows: tuple[Row, ...]
    date: str = ""

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels that are selected in any row, sorted."""
        return sorted({row.kernel for row in self.rows} - {""})

    @property
    def summary(self) -> str:
        """One line for a log: the numbers of rows and kernels, calls without a kernel, and the notes."""
        without = sum(not row.kernel for row in self.rows)
        text = f"receipt of {self.subject} on {self.device}: {len(self.rows)} kinds of calls on {len(self.kernels)} kernels"
        return "; ".join((text, *([f"{without} without a kernel"] if without else []), *self.notes))

    def to_dict(self) -> dict[str, Any]:
        """Returns the receipt as plain values, for JSON."""
        return {"format": FORMAT, **json.loads(json.dumps(dataclasses.asdict(self), default=str))}

    def save(self, path: str | Path) -> None:
        """Writes a JSON file, replacing an existing one.

        Raises:
            OSError: the file cannot be written.
        """
        replace_file(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    def __str__(self) -> str:
        """Formats the receipt as text of at most 100 columns."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{self.subject} on {self.device} [{self.arch}], {self.date}", *wrapped(versions, "  ")]
        lines += wrapped(format_traits(self.settings), "  ")
        for note in self.notes:
            lines += wrapped(f"note: {note}")
        for phase in dict.fromkeys(row.phase for row in self.rows):
            lines += ["", *table([row for row in self.rows if row.phase == phase])]
        return "\n".join(lines)


def read_receipt(path: str | Path) -> Receipt:
    """Reads a file that `Receipt.save` wrote.

    Raises:
        OSError: the file cannot be read.
        ReceiptError: the file is no receipt, or has another format version.
    """
    try:
        table = json.loads(Path(path).read_bytes())
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise ValueError(f"it is no receipt of format {FORMAT}")
        return from_plain(Receipt, table)
    except ValueError as error:
        raise ReceiptError(f"{path}: {error}") from None
