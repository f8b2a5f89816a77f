"""Renders this folder's templates to HTML that needs no other file and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from tokenspeed_kernel.workbench.report.palette import style

_HERE = Path(__file__).parent


def rendered(template: str, title: str, **values: Any) -> str:
    """Renders a template with the style and the script that all pages share.

    Args:
        template: file name of the template.
        title: title of the page.
        values: values of the template's further variables, by name.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    bright, dark = style()
    return environment.get_template(template).render(
        title=title,
        bright=bright,
        dark=dark,
        css=(_HERE / "page.css").read_text(),
        script=(_HERE / "page.js").read_text(),
        **values,
    )
