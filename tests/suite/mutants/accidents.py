"""Find mutants that are caught by an accident: an error of their own code, in place of their fault.

A requirement has to fail with an assertion, or with the error that the fault brings about. It fails
as well for a mutant that calls what it does not have, and says nothing then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module

_OURS = ("d2ldev", "d2ldev_conformance", "d2ldev_reference", "mutants")
_FRAME = re.compile(r'  File "(.+)", line \d+, in ')
# Lines of a process of a launch begin with its rank.
_RANK = re.compile(r"^\[rank \d+\] ")
_ACCIDENT = re.compile(
    r"(AttributeError|ImportError|IndexError|KeyError|ModuleNotFoundError|NameError|RuntimeWarning"
    r"|TypeError|UnboundLocalError)\b"
)


def find_accidents(printed: str) -> Iterator[str]:
    """Yield what shows in the output of pytest that a mutant failed by an accident.

    It is a failure in set-up, where the requirement has asked nothing yet. Or it is an error of
    Python that the code of a mutant raises, also one that another error has replaced.

    Args:
        printed: with ``--tb=native``.
    """
    folders = [(name, folder) for name in _OURS for folder in import_module(name).__path__]
    owners: dict[str, str] = {}
    for line in printed.splitlines():
        rank = found[0] if (found := _RANK.match(line)) else ""
        told, owner = line[len(rank) :], owners.get(rank, "")
        if told.startswith("Traceback "):
            owners[rank] = ""
        elif frame := _FRAME.match(told):
            inside = (name for name, at in folders if frame[1].startswith(at + os.sep))
            owners[rank] = next(inside, owner)
        elif "ERROR at setup of " in told or (owner == "mutants" and _ACCIDENT.match(told)):
            yield told
