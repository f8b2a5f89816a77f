"""Code that the emulators of GPUs share: Triton driver, settings, errors, command line, pytest plugin."""

__version__ = "0.1.0"
