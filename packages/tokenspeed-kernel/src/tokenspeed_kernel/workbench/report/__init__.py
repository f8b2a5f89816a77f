"""Benchmark reports as a page for people: one HTML file that needs nothing else, and its plots as files of their own."""

from tokenspeed_kernel.workbench.report.devices import devices_of
from tokenspeed_kernel.workbench.report.page import render_page, write_plots

__all__ = ["devices_of", "render_page", "write_plots"]
