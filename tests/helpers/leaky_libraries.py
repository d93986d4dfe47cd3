"""Small libraries with leaks of devices, whose lines have names: the comments at their ends."""

import importlib
from contextlib import contextmanager

import pytest


@contextmanager
def import_library(folder, name, source):
    """Write a library to a folder, and give its module."""
    (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        yield importlib.import_module(name)


def find_number(source, comment):
    """Return the number of the line of a library that ends in a comment."""
    lines = source.splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"  # {comment}"))
