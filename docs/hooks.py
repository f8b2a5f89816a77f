"""Generates parts of the documentation site from the code and from files at the root of the repository.

MkDocs calls the ``on_*`` functions during the build. A comment on a page is replaced with generated content, for example
``<!-- reference: Platforms: platform -->``; `_GENERATORS` lists these comments.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads this file by its path

from backends_table import backends_table
from callers_table import callers_table, idle_table
from coverage_table import coverage_table
from figure_plots import PLOTS, devices_table, stylesheet, table
from served_table import measured_table, served_table

import tokenspeed_kernel
from tokenspeed_kernel.workbench.cli.show import purpose
from tokenspeed_kernel_base import config as settings
from tokenspeed_kernel_base.operator import operators
from tokenspeed_kernel_base.ops.quantization.aliases import ALIASES
from tokenspeed_kernel_base.spec import TAGS

ROOT = Path(__file__).parents[1]
# Page -> the file at the root of the repository that has the page's content.
ROOT_PAGES = {"architecture.md": "ARCHITECTURE.md", "contributing.md": "CONTRIBUTING.md"}
FAMILY_PAGES = "reference/operators"
PLOT_STYLE = "plots.css"

_LOADING = re.compile(
    r"""<(?:script|img|iframe)\s[^>]*src=["']?(?:https?:)?//|<link\s[^>]*rel=["']?stylesheet[^>]*href=["']?https?:"""
)

_described: set[str] = set()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds one page for each family of operators to the navigation, under ``Operators``."""
    _described.clear()
    config.extra_css.insert(0, PLOT_STYLE)
    for section in config.nav:
        for entry in section.get("API reference", ()):
            if isinstance(entry, dict) and "Operators" in entry:
                entry["Operators"] += [{family: f"{FAMILY_PAGES}/{family}.md"} for family in _families()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not files in ``docs``: one page for each family of operators, and files at the root of the
    repository."""
    for family in _families():
        files.append(File.generated(config, f"{FAMILY_PAGES}/{family}.md", content=_family_page(family)))
    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=_root_page(ROOT / source)))
    files.append(File.generated(config, PLOT_STYLE, content=stylesheet()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replaces a page's comments with their generated content."""

    def generate(match: re.Match[str]) -> str:
        return _GENERATORS[match[1]](match[2].strip(), page.file.src_uri)

    return re.sub(rf"<!-- ({'|'.join(_GENERATORS)}):?(.*?)-->", generate, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Replaces comments with plots. MkDocs calls this function after the page's text is indexed, so search does not find the plots'
    text."""
    return re.sub(r"<!-- plot: (.*?) -->", lambda match: PLOTS[match[1]](), output)


@event_priority(-100)  # after the search plugin, which writes the index
def on_post_build(config: MkDocsConfig) -> None:
    """Writes the search index as a script, because a page that is opened from a folder can load only scripts. Then checks the site.

    Raises PluginError for a public name without a description, and for a page that loads resources from another host.
    """
    index = Path(config.site_dir, "search", "search_index.json")
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")
    missing = sorted(set(tokenspeed_kernel.__all__) - _described - {"__version__"} - ALIASES.keys())
    if missing:
        raise PluginError(f"no page of the API reference describes {', '.join(missing)} of tokenspeed_kernel")
    for page in Path(config.site_dir).rglob("*.html"):
        found = _LOADING.search(page.read_text())
        if found:
            raise PluginError(f"{page} loads something from another host: {found[0]}")


# -- generators -----------------------------------------------------------------------------------------------------------------


def _families() -> list[str]:
    return sorted({op.family for op in operators()})


def _family_page(family: str) -> str:
    """The Markdown of a family's page in the reference: every operator of the family."""
    package: ModuleType = importlib.import_module(f"tokenspeed_kernel_base.ops.{family}")
    members = [op for op in operators() if op.family == family]
    _described.update(op.mode for op in members)
    descriptions = [f"::: {op.body.__module__}.{op.mode}\n    options: {{heading_level: 2}}\n" for op in members]
    return "\n".join([f"# {family}", "", package.__doc__ or "", "", *descriptions])


def _root_page(source: Path) -> str:
    """The text of a Markdown file at the root of the repository, with links rewritten for ``docs``."""
    text = source.read_text().replace("](docs/", "](")
    for page, root_file in ROOT_PAGES.items():
        text = text.replace(f"]({root_file}", f"]({page}")
    return text


def _reference(argument: str, page: str) -> str:
    """The Markdown of a section that describes the public names of tokenspeed_kernel that certain modules define.

    The argument ``"Selection: selection, explanation"`` gives the heading and the last parts of the modules' names. ``*`` in place
    of module names means all names that no earlier section describes.
    """
    heading, _, modules = argument.partition(": ")
    operator_names = {op.mode for op in operators()}
    chosen = []
    for name in tokenspeed_kernel.__all__:
        module = getattr(getattr(tokenspeed_kernel, name), "__module__", "")
        if (
            module
            and name not in _described | operator_names | ALIASES.keys()
            and (modules == "*" or module.rpartition(".")[2] in modules.split(", "))
        ):
            chosen.append(f"::: {module}.{name}\n")
            _described.add(name)
    return "\n".join([f"## {heading}", "", *chosen]) if chosen else ""


def _variables(argument: str, page: str) -> str:
    """The environment variables, as a table."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in settings.VARIABLES.items()]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows])


def _tags(argument: str, page: str) -> str:
    """The tags of kernels, as a table."""
    return "\n".join(["| tag | says |", "|---|---|", *(f"| `{tag}` | {meaning} |" for tag, meaning in TAGS.items())])


def _operator_table(argument: str, page: str) -> str:
    """The operators of each family with their purposes, and links into the reference."""
    lines = []
    for family in _families():
        target = posixpath.relpath(f"{FAMILY_PAGES}/{family}.md", posixpath.dirname(page))
        lines += ["", f"## [{family}]({target})", "", "| operator | purpose |", "|---|---|"]
        lines += [f"| [`{op.mode}`][{op.body.__module__}.{op.mode}] | {purpose(op)} |" for op in operators() if op.family == family]
    return "\n".join(lines)


def _coverage(argument: str, page: str) -> str:
    """The features of a family's operators that each backend does not support, as a table."""
    return coverage_table(argument)


def _backends(argument: str, page: str) -> str:
    """The backends of each operator by hardware, as a table."""
    return backends_table()


def _callers(argument: str, page: str) -> str:
    """The engines that call each operator, as a table."""
    return callers_table()


def _idle(argument: str, page: str) -> str:
    """Returns the table of the operators without a caller."""
    return idle_table()


def _served(argument: str, page: str) -> str:
    """The parts of models, with the kernels and the engines that run them, as a table."""
    return served_table()


def _measured(argument: str, page: str) -> str:
    """The measured speed of an engine's plugin beside the engine's own kernels, as a table. ``argument`` is the engine's name."""
    return measured_table(argument)


def _tables(argument: str, page: str) -> str:
    """Measured times, as tables."""
    return str(table.made(argument))


def _devices(argument: str, page: str) -> str:
    """The measured GPUs, as a table."""
    return devices_table()


# Comment name -> ``generate(argument, page)``. The argument is the comment's text after the colon; ``page`` is the page's path.
_GENERATORS: dict[str, Callable[[str, str], str]] = {
    "reference": _reference,
    "environment variables": _variables,
    "operators": _operator_table,
    "tags": _tags,
    "coverage": _coverage,
    "backends": _backends,
    "callers": _callers,
    "idle": _idle,
    "served": _served,
    "measured": _measured,
    "tables": _tables,
    "devices": _devices,
}
