"""The version of this package. Package builds read this module, so it contains nothing else."""

__version__ = "0.3.0+independent"
