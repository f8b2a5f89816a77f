"""Receipts: which kernel serves which operator at which size class, why the next best was not taken, and the predicted time."""

from tokenspeed_kernel.workbench.receipts.differences import Difference, difference_lines, differences
from tokenspeed_kernel.workbench.receipts.making import receipt
from tokenspeed_kernel.workbench.receipts.records import Receipt, ReceiptError, read_receipt
from tokenspeed_kernel.workbench.receipts.rows import Passed, Row

__all__ = ["Difference", "Passed", "Receipt", "ReceiptError", "Row", "difference_lines", "differences", "read_receipt", "receipt"]
