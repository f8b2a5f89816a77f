"""The command ``tokenspeed-kernel``. Its help and version come at once; everything else is done by the package.

This module lies beside the package, because importing any part of that imports PyTorch, which takes seconds.
"""

from __future__ import annotations

import sys

# What each command's docstring begins with.
COMMANDS = {
    "doctor": "Show platform, versions, settings and plugins, and what to do about what is wrong.",
    "ops": "List the operators, or show one: signature, contract, kernels and cases.",
    "explain": "Say which kernel would serve a call, and why not the others.",
    "verify": "Run kernels against their operators' references.",
    "bench": "Time kernels, after checking their results.",
    "tune": "Measure kernels and their configurations, and keep the quickest that is right for the selector.",
    "profile": "Run a program and show what its operator calls took, by kernel and shape.",
    "report": "Make one HTML file of benchmark reports: rooflines, solutions case by case, history over commits, and all numbers.",
    "warmup": "Let plugins compile ahead of time what they would compile when it is first called.",
    "plugins": "Packages that bring kernels.",
    "capture": "What was really called.",
}
_HELP = """Usage: tokenspeed-kernel [OPTIONS] COMMAND [ARGS]...

  Operators for LLM inference, and the kernel that serves each best on the machine at hand.

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit. After a command: show its arguments and options.

Commands:
"""


def main() -> None:
    """Runs the command line and exits."""
    words = sys.argv[1:]
    if words in ([], ["-h"], ["--help"]):
        print(_HELP + "\n".join(f"  {name:<7}  {does}" for name, does in COMMANDS.items()))
    elif words == ["--version"]:
        print(f"tokenspeed-kernel {_version()}")
    else:
        from tokenspeed_kernel.__main__ import main as run

        run()


def _version() -> str:
    """That of the package, which is found and not imported."""
    from importlib.util import find_spec
    from runpy import run_path

    spec = find_spec("tokenspeed_kernel")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(run_path(f"{spec.submodule_search_locations[0]}/version.py")["__version__"])


if __name__ == "__main__":
    main()
