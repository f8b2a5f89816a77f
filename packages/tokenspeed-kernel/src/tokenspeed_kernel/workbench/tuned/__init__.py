"""What was measured on this machine, or on one like it: tables of tuned results, and which of them still hold.

A table says, for one operator, formats, traits and bucket of sizes on one device, how long each kernel takes with its best
configuration. Tables lie in three places, asked in this order: what this process measured, the user's cache directory, and the
tables that wheels ship for devices they know. Selection reads them through `find`; the package `tuning` measures and writes.
"""

from tokenspeed_kernel.workbench.tuned.entries import Device, Entry, Result, entry_key
from tokenspeed_kernel.workbench.tuned.fingerprint import source_fingerprint, toolchain
from tokenspeed_kernel.workbench.tuned.store import read_table, remove_entries, save_entry
from tokenspeed_kernel.workbench.tuned.tables import (
    all_entries,
    find,
    record,
    register_tuned_tables,
    tuned_directory,
    user_table,
)

__all__ = [
    "Device",
    "Entry",
    "Result",
    "all_entries",
    "entry_key",
    "find",
    "read_table",
    "record",
    "register_tuned_tables",
    "remove_entries",
    "save_entry",
    "source_fingerprint",
    "toolchain",
    "tuned_directory",
    "user_table",
]
