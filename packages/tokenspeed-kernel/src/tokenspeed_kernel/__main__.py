"""``python -m tokenspeed_kernel``: the command line. ``tokenspeed-kernel`` runs it for all but its help and version."""

from __future__ import annotations

import sys

from tokenspeed_kernel_base.installation import requirement

_TOOLS = frozenset({"click", "rich", "typer"})


def main(*command: str) -> None:
    """Runs the command line and exits.

    Args:
        command: words put in front of those of ``sys.argv``.
    """
    try:
        from tokenspeed_kernel.workbench.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _TOOLS:
            raise
        # Not to stdout: with --json nothing but JSON belongs there.
        print(f"The command line needs {error.name}: pip install {requirement('tokenspeed-kernel[tools]')}", file=sys.stderr)
        raise SystemExit(1) from None
    app(args=[*command, *sys.argv[1:]], prog_name=" ".join(("tokenspeed-kernel", *command)))


if __name__ == "__main__":
    main()
