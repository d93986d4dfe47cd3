"""The checksum of each tensor, computed in a thread while the next bytes are read or written.

Computing one takes longer than reading the tensor from the operating system's cache; both let
other threads run.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

PIECE = 1 << 22
"""How many bytes to read or write at once: those before them are summed meanwhile."""

# Fewer bytes are summed in less time than it takes to hand them over.
_FEW = 1 << 16
# How many pieces may wait, so that tensors that have been moved on do not stay on the host.
_WAITING = 8


class Checksum:
    """The CRC-32 of a tensor: of what it is, and of its bytes.

    Args:
        dtype: the name of its true dtype.
        shape: that in the file.
    """

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self._value = zlib.crc32(f"{dtype}{list(shape)}".encode())

    def add(self, data: Any) -> None:
        """Go on with these bytes."""
        self._value = zlib.crc32(data, self._value)

    def __str__(self) -> str:
        return f"{self._value:08x}"


class Summing:
    """Adds bytes to checksums, in the order in which they are given; a context.

    The thread is started for the first bytes that are worth it, and has ended after the block.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()
        self._may_start = True

    def __enter__(self) -> Summing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, checksum: Checksum, data: Any) -> None:
        """Have bytes added to a checksum; they may not change until ``finish`` has returned."""
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= _WAITING):
            self._waiting.popleft().result()
        if (self._waiting or len(data) > _FEW) and self._may_start:
            try:
                self._waiting.append(self._started().submit(checksum.add, data))
                return
            except RuntimeError:  # no thread can be had, as when Python is about to exit
                self.finish()
                self._may_start = False
        checksum.add(data)

    def finish(self) -> None:
        """Return when every checksum has all that it was given."""
        while self._waiting:
            self._waiting.popleft().result()

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(1, "d2ldev-checksums")
        return self._pool
