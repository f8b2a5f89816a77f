"""Code that emulators of GPUs share; see the README."""

__version__ = "0.1.0"
