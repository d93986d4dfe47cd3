"""Run the README's first command as a stranger does, in the source that a release uploads.

``python tools/first_command.py FOLDER`` unpacks the only ``.tar.gz`` of the folder beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory


def main(arguments: list[str]) -> int:
    """Run the command of the source in a folder, and return its exit status."""
    (source,) = Path(arguments[0]).glob("*.tar.gz")
    with TemporaryDirectory() as folder:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        command = find_command((root / "README.md").read_text(encoding="utf-8"))
        return subprocess.run(["bash", "-c", command], cwd=root, check=False).returncode  # noqa: S603, S607


def find_command(readme: str) -> str:
    """Return the first command of the README, which is the last line of its first bash block."""
    (block, *_) = re.findall(r"^```bash\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    return str(block.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
