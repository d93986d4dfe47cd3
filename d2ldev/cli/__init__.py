"""The command line: ``d2ldev doctor``, ``tour``, ``bench``, ``launch`` and ``conformance``.

Nothing in the library imports this package, and typer and rich come with an extra.
"""

from __future__ import annotations

import sys


def run_command() -> None:
    """Run the command ``d2ldev``; without typer and rich, say so in one line with exit status 1."""
    from d2ldev.dependencies import import_optional
    from d2ldev.errors import PackageNotInstalledError

    try:
        for module in ("typer", "rich"):
            import_optional(module, "run the command d2ldev", extra="cli")
    except PackageNotInstalledError as error:
        sys.exit(f"error: cannot {error.attempted}: {error.problem}; fix: {error.fix}")
    from d2ldev.cli.main import app

    app(prog_name="d2ldev")
