"""The first import, and the first tensor, each in an interpreter of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from against.work import NATIVE, PEERS, PROGRAMS, Work

_FILES = ("safetensors", "orbax")


def import_work(*peers: str) -> Iterator[Work]:
    """Compare the import of d2ldev with that of each peer of a framework."""
    theirs = {name: f"import {PEERS[name].module}" for name in peers if name not in _FILES}
    yield Work(
        "first import",
        "import d2ldev",
        theirs,
        rounds=PROGRAMS,
        is_program=True,
    )


def first_tensor_work(name: str, native: str, peers: Mapping[str, str]) -> Iterator[Work]:
    """Compare programs that make one tensor and end."""
    reason = "d2ldev is imported besides, and finds the framework and its devices"
    yield Work(
        "first import and one tensor",
        f"from d2ldev import {name} as d2l; d2l.ones((2, 3))",
        {NATIVE: native, **peers},
        reasons=dict.fromkeys([NATIVE, *peers], reason),
        rounds=PROGRAMS,
        is_program=True,
    )
