"""Blocks that end in another order, or elsewhere, than they began."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from d2ldev import Backend, Device


def enter(*blocks: AbstractContextManager[Any]) -> Iterator[None]:
    """Return a generator that is inside of blocks."""

    def generate() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block)
            yield

    generator = generate()
    next(generator)
    return generator


def in_a_thread(function: Callable[[], object]) -> Exception | None:
    """Call a function in another thread; return its error."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def places_of(backend: Backend) -> tuple[Device, Device]:
    """Return where d2ldev's calls put a tensor now, and where the framework's own do."""
    return backend.device_of(backend.ones(1)), backend.default_device()
