"""Print the notes of the version as the message of its tag.

``python tools/release.py v1.2.3 >notes.txt && git tag -a v1.2.3 -F notes.txt`` tags version 1.2.3.
An error names what is missing: the version, its notes, or changes that the notes lack. Without the
file, git would make a tag with an empty message.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = "README.md"


def main(arguments: list[str]) -> int:
    """Print the notes for the tag that is named."""
    if len(arguments) != 1:
        raise SystemExit("name one tag, such as v1.2.3")
    sys.stdout.write(make_message(arguments[0]))
    return 0


def make_message(tag: str) -> str:
    """Return the message of a tag: a title, and the notes without headings.

    ``git tag -F`` leaves out lines that begin with ``#``.
    """
    version = read_version()
    if tag != f"v{version}":
        raise SystemExit(
            f"{tag} is not the tag of {version}: set __version__ in d2ldev/__init__.py"
        )
    left = sorted(path.name for path in (ROOT / "changelog.d").iterdir() if path.name != README)
    if left:
        command = f"towncrier build --version {version}"
        raise SystemExit(f"changelog.d has {', '.join(left)}: run '{command}' and commit")
    notes = re.sub(r"^#+ (.+)$", r"\1:", find_notes(version), flags=re.MULTILINE)
    return f"d2ldev {version}\n\n{notes}\n"


def read_version() -> str:
    """Return the version, which stands in one place."""
    source = (ROOT / "d2ldev" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return version


def find_notes(version: str) -> str:
    """Return the section of a version in the changelog, without its title."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    title = rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)"
    section = re.search(title, text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise SystemExit(f"CHANGELOG.md has no section '## {version} - YYYY-MM-DD'")
    return section[1].strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
