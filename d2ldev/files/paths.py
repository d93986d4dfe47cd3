"""Paths of files, as the user gave them."""

from __future__ import annotations

import os

from d2ldev.errors import UnsupportedValueError, describe

PathLike = str | os.PathLike[str]


def as_path(path: object, verb: str) -> str:
    """Return a path as text.

    Raises:
        UnsupportedValueError: if it is none.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        text = ""
    if not text or "\0" in text:
        raise UnsupportedValueError(
            f"{verb} parameters",
            f"{describe(path)} is no path of a file",
            f"backend.{verb}(..., 'net.safetensors')",
        )
    return text
