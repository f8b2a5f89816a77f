"""Makes the table of the engines that call each operator, from the engines' sources. `hooks.py` inserts the table into a page.

python docs/callers_table.py         # prints the table
python docs/callers_table.py --none  # prints the operators without a caller
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import tokenspeed_kernel  # noqa: F401  # declares the operators
from tokenspeed_kernel_base.operator import operators

ROOT = Path(__file__).parents[1]
ENGINES = {
    "GPT-OSS runtime": "tools/gpt_oss/src",
    "vLLM": "tools/vllm_plugin/src",
    "SGLang": "tools/sglang_plugin/src",
    "transformers": "tools/transformers_plugin/src",
    "the example below": "docs/examples",
}
NAMESPACES = {"ops", "tk", "tokenspeed_kernel"}  # names by which the engines' sources refer to the operators


def callers_table() -> str:
    """A table of all operators, with the engines that call them."""
    files = {engine: (ROOT / folder).rglob("*.py") for engine, folder in ENGINES.items()}
    calls = {engine: {name for file in found for name in _called(file)} for engine, found in files.items()}
    rows = ["| operator | called by |", "|---|---|"]
    for op in operators():
        callers = [engine for engine, names in calls.items() if {op.mode, f"{op.family}.{op.mode}"} & names]
        rows.append(f"| [`{op.mode}`][{op.body.__module__}.{op.mode}] | {', '.join(callers) or 'none'} |")
    return "\n".join(rows)


def _called(file: Path) -> Iterator[str]:
    """Yields the names by which a file may refer to operators: names that it imports from the core, attributes of a namespace of
    operators, and strings, because plugins look operators up by name. A string without an underscore may be no operator's name, so
    it counts only as an argument of a call.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tokenspeed_kernel"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).lower().rpartition(".")[2] in NAMESPACES:
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from (each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value:
            yield node.value


if __name__ == "__main__":
    rows = callers_table().splitlines()
    print(*(row for row in rows if not sys.argv[1:] or row.endswith("| none |")), sep="\n")
