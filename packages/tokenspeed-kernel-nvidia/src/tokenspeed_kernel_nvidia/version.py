"""The version of this package and nothing else, so that builds can read it."""

__version__ = "0.3.0+independent"
