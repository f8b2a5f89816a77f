"""The version of this package. The build reads this module, so it contains nothing else."""

__version__ = "0.3.0+independent"
