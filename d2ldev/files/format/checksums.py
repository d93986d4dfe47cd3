"""Compute the checksum of each tensor, by the algorithm that the file names.

XXH3 (https://github.com/Cyan4973/xxHash) takes less time than copying the bytes does, and lets
other threads run. CRC-32 is that of files that were written before version 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from d2ldev.dependencies import import_optional

if TYPE_CHECKING:
    from typing import Protocol

    from typing_extensions import Buffer

    class Checksum(Protocol):
        """A checksum to which bytes are added."""

        def update(self, data: Buffer, /) -> None:
            """Add bytes."""

        def hexdigest(self) -> str:
            """Return the checksum of all bytes so far."""


PIECE = 1 << 20
"""How many bytes to read or write at once; the checksum then finds them in the cache."""

OLDEST = "crc32"
"""The algorithm of files that name none."""
NEWEST = "xxh3_64"
"""The algorithm of files that are written now."""
DIGITS = 16
"""How many characters a checksum of the newest algorithm has."""


class Crc32:
    """CRC-32 with the methods of ``xxhash``."""

    def __init__(self, data: Buffer) -> None:
        self._value = zlib.crc32(data)

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def xxh3_64(data: Buffer) -> Checksum:
    """Start a checksum of the newest algorithm.

    Raises:
        PackageNotInstalledError: without ``xxhash``.
    """
    checksum: Checksum = _import_xxhash("compute a checksum").xxh3_64(data)
    return checksum


def check_files(attempted: str) -> None:
    """Check that files can be written and read here, before anything is done.

    Raises:
        PackageNotInstalledError: without ``xxhash``.
    """
    _import_xxhash(attempted)


def _import_xxhash(attempted: str) -> ModuleType:
    return import_optional("xxhash", attempted, extra="files")


ALGORITHMS: dict[str, Callable[[Buffer], Checksum]] = {OLDEST: Crc32, NEWEST: xxh3_64}
"""The algorithms by the names that files have for them."""


def checksum_of(dtype: str, shape: Sequence[int], algorithm: str = NEWEST) -> Checksum:
    """Start the checksum of a tensor: of its dtype and shape, and then of its bytes.

    Args:
        dtype: the name of its true dtype.
        shape: its shape in the file.
        algorithm: one of ``ALGORITHMS``.
    """
    return ALGORITHMS[algorithm](f"{dtype}{list(shape)}".encode())
