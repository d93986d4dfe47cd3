"""``d2ldev new-backend``: write the package of a backend that installs and runs at once."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from d2ldev.cli.screen import complain
from d2ldev.registry import discovery

_TEMPLATES = Path(__file__).with_name("templates")
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Where a template goes; the others go into the package.
_PLACES = {
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "test_suite.py": "tests/test_suite.py",
    "tests.yml": ".github/workflows/tests.yml",
}
INVALID = 2
FAILED = 1


def run(name: str, folder: Path) -> int:
    """Write the package ``d2ldev_<name>`` into a new folder, and say what to do next.

    Args:
        name: of the backend, as ``D2LDEV_BACKEND`` has it.
        folder: where the new folder ``d2ldev-<name>`` is made.

    Returns:
        0; 2 where the name or the folder cannot be used; 1 where the files cannot be written.
    """
    distribution = f"d2ldev-{name.replace('_', '-')}"
    root = folder / distribution
    if problem := _find_problem(name, root):
        complain(f"cannot write a backend {name!r}: {problem}")
        return INVALID
    try:
        for path, text in _render_files(name, distribution):
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        complain(f"cannot write a backend {name!r}: {error}\n  fix: another folder: --folder DIR")
        return FAILED
    sys.stdout.write(
        f"{root} has a backend whose modules are not begun. Next:\n"
        f"  cd {root}\n"
        "  pip install -e '.[test]'\n"
        f"  d2ldev conformance {name} --only devices\n"
        "It names what to write. Until devices and tensors are written, pytest and CI are red.\n"
    )
    return 0


def _find_problem(name: str, root: Path) -> str:
    """Return why a name or a folder cannot be used, with the fix; empty if both can."""
    package = f"d2ldev_{name}"
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        return "it is not a name of lowercase letters, digits and underscores\n  fix: my_framework"
    if name in discovery.find_backends() or name in discovery.ALIASES:
        return f"a backend of that name is installed\n  fix: another name, such as my_{name}"
    if importlib.util.find_spec(package) is not None:
        return f"a package {package} is installed\n  fix: another name, such as my_{name}"
    if root.exists():
        return f"{root} exists\n  fix: another folder: --folder DIR"
    return ""


def _render_files(name: str, distribution: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each file of the package, and its text."""
    package = f"d2ldev_{name}"
    words = {
        "{name}": name,
        "{package}": package,
        "{distribution}": distribution,
        "{class}": "".join(word.capitalize() for word in name.split("_")),
    }
    for template in sorted(_TEMPLATES.glob("*.txt")):
        file = template.name.removesuffix(".txt")
        text = template.read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        yield _PLACES.get(file, f"{package}/{file}"), text
    yield f"{package}/py.typed", ""
