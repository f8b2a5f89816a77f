"""Benchmark reports as a page for people: one HTML file that needs nothing else, and its plots as files of their own."""

from tokenspeed_kernel.workbench.report.devices import Bar, CaseBars, Change, Device, Point, Run, devices_of
from tokenspeed_kernel.workbench.report.page import render_page, write_plots

__all__ = ["Bar", "CaseBars", "Change", "Device", "Point", "Run", "devices_of", "render_page", "write_plots"]
