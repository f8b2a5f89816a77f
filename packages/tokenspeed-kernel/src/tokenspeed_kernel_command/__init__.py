"""The command ``tokenspeed-kernel``: its arguments, its help, and the module that runs each command.

Importing any part of the core imports PyTorch and every operator, which takes seconds. So this package is separate from the core,
and shows help, versions and errors about options without importing the core. `commands` imports a command's module when the
command runs.
"""

from __future__ import annotations

import sys

from tokenspeed_kernel_command.installed import version, without

# The first sentence of each command's docstring.
COMMANDS = {
    "doctor": "Show platform, versions, settings and plugins, and what to do about what is wrong.",
    "ops": "List the operators, or show one: signature, contract, kernels and cases.",
    "explain": "Say which kernel would serve a call, and why not the others.",
    "verify": "Run kernels against their operators' references.",
    "bench": "Time kernels, after checking their results.",
    "tune": "Measure kernels and their configurations, and keep the fastest correct one for selection.",
    "profile": "Run a program and show what its operator calls took, by kernel and shape.",
    "report": "Make one HTML file of benchmark reports: rooflines, cases, history and all figures.",
    "receipt": "Say which kernel serves each call of a model or capture, why not the next, and the time.",
    "warmup": "Let plugins compile ahead of time what they would compile when it is first called.",
    "plugins": "Packages that bring kernels.",
    "pack": "Kernels that are compiled ahead of time, to ship with an image.",
    "capture": "What was really called.",
}
_HELP = """Usage: tokenspeed-kernel [OPTIONS] COMMAND [ARGS]...

  Operators for LLM inference, and the kernel that serves each best on the machine at hand.

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit. After a command: show its arguments and options.

Commands:
"""


def main(*command: str) -> None:
    """Runs the command line and exits.

    Args:
        command: words of a command that are put before the words of ``sys.argv``.
    """
    words = [*command, *sys.argv[1:]]
    if words in ([], ["-h"], ["--help"]):
        print(_HELP + "\n".join(f"  {name:<7}  {does}" for name, does in COMMANDS.items()))
    elif words == ["--version"]:
        print(f"tokenspeed-kernel {version()}")
    else:
        try:
            from tokenspeed_kernel_command.commands import app
        except ModuleNotFoundError as error:
            without(error)
        app(args=words, prog_name="tokenspeed-kernel")
