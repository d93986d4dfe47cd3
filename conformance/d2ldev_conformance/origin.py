"""The origin of a report: the commit of d2ldev, and the suite that ran."""

from __future__ import annotations

import hashlib
import json
import subprocess
from importlib import metadata
from pathlib import Path

import d2ldev
from d2ldev_conformance.requirement import SUITE


def find_commit() -> str:
    """Return the commit of d2ldev, which ends with ``-dirty`` after further changes.

    It is empty if d2ldev is neither imported from a checkout nor installed from a repository.
    """
    root = Path(d2ldev.__file__).parents[1]
    if not (root / ".git").exists():
        return _find_installed_commit()
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _find_installed_commit() -> str:
    """Return the commit that pip noted when it installed d2ldev from a repository."""
    try:
        noted = metadata.distribution("d2ldev").read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        return ""
    return str(json.loads(noted).get("vcs_info", {}).get("commit_id", ""))[:8]


def digest_suite() -> str:
    """Return eight digits that are the same for two suites only if all their tests are."""
    digest = hashlib.sha256()
    for path in sorted(SUITE.rglob("*.py")):
        name = path.relative_to(SUITE).as_posix()
        digest.update(f"{name}\0{path.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()[:8]
