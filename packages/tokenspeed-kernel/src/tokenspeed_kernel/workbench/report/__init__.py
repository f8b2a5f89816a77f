"""Renders benchmark reports as one self-contained HTML file, and its plots as separate files."""

from tokenspeed_kernel.workbench.report.devices import devices_of
from tokenspeed_kernel.workbench.report.page import render_page, write_plots

__all__ = ["devices_of", "render_page", "write_plots"]
