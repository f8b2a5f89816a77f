"""Receipts: the kernel that is selected for each call of a model or process, why the next best kernel is not selected, and the
predicted time.
"""

from tokenspeed_kernel.workbench.receipts.differences import Difference, difference_lines, differences
from tokenspeed_kernel.workbench.receipts.making import receipt, row_of
from tokenspeed_kernel.workbench.receipts.records import Receipt, ReceiptError, read_receipt
from tokenspeed_kernel.workbench.receipts.rows import Passed, Row
from tokenspeed_kernel.workbench.receipts.text import reasons_of

__all__ = [
    "Difference",
    "Passed",
    "Receipt",
    "ReceiptError",
    "Row",
    "difference_lines",
    "differences",
    "read_receipt",
    "reasons_of",
    "receipt",
    "row_of",
]
