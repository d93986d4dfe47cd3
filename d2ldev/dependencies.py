"""Import the packages that extras of d2ldev bring, where a call needs them.

d2ldev without an extra brings NumPy alone.

Held by ``tests/core/package/test_dependencies.py``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from d2ldev.errors import PackageNotInstalledError, text_of


def import_optional(
    module: str, attempted: str, *, extra: str = "", install: str = ""
) -> ModuleType:
    """Import a module that not everyone has, and return it.

    Args:
        module: its full name.
        attempted: what needs it, for the message.
        extra: the extra of d2ldev that brings it.
        install: the line that installs it; empty is the line of the extra.

    Raises:
        PackageNotInstalledError: if it is missing, or fails to import.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        problem = f"{package} cannot be imported: {text_of(error)}"
        fix = install or write_install(extra)
        raise PackageNotInstalledError(attempted, problem, fix) from error


def write_install(extra: str = "") -> str:
    """Return the line that installs d2ldev from where it came, with an extra.

    Installers record the folder, the archive or the repository of a package in its
    ``direct_url.json``. Without this record it came from an index. A d2ldev that is not installed
    comes from the folder of its source. See
    https://packaging.python.org/en/latest/specifications/direct-url.

    Args:
        extra: its name; empty for none.
    """
    # Only an error needs them.
    import json
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    extras = f"[{extra}]" if extra else ""
    try:
        text = distribution("d2ldev").read_text("direct_url.json")
    except PackageNotFoundError:
        return f"pip install {shlex.quote(f'{Path(__file__).parents[1]}{extras}')}"
    record = json.loads(text) if text else {}
    url = record.get("url", "")
    if (folder := record.get("dir_info")) is not None:
        editable = "-e " if folder.get("editable") else ""
        return f"pip install {editable}{shlex.quote(unquote(urlsplit(url).path) + extras)}"
    if repository := record.get("vcs_info"):
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    if folder := record.get("subdirectory"):
        url += f"#subdirectory={folder}"
    return f"pip install {shlex.quote(f'd2ldev{extras} @ {url}' if url else f'd2ldev{extras}')}"
