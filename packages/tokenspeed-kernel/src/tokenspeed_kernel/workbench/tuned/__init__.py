"""Tables of tuned results from this machine or similar machines, and the check whether a result is still valid.

An entry of a table is for one combination of operator, formats, traits, buckets of sizes, and device. The entry has the time of
each kernel with the kernel's best configuration. There are three sources, searched in this order: results of this process, the
user's cache directory, and the tables that wheels ship for known devices. Selection reads the results through `find`. The package
`tuning` measures and writes them.
"""

from tokenspeed_kernel.workbench.tuned.entries import Device, Entry, Result, entry_key
from tokenspeed_kernel.workbench.tuned.fingerprint import source_files, source_fingerprint, toolchain
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
    "source_files",
    "source_fingerprint",
    "toolchain",
    "tuned_directory",
    "user_table",
]
