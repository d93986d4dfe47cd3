"""Compute the checksum of each tensor, by the algorithm that the file names.

XXH3 (https://github.com/Cyan4973/xxHash) takes less time than copying the bytes does, and lets
other threads run.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import xxhash

from d2ldev.files.format.header import HeaderError

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE = 1 << 20
"""How many bytes to read or write at once; the checksum then finds them in the cache."""

OLDEST = "crc32"
"""The algorithm of files that name none."""
NEWEST = "xxh3_64"
"""The algorithm of files that are written now."""
DIGITS = 2 * xxhash.xxh3_64().digest_size
"""How many characters a checksum of the newest algorithm has."""


class Checksum(Protocol):
    """A checksum that is being computed, as in ``hashlib``."""

    def update(self, data: Buffer, /) -> None:
        """Add these bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""


class _Crc32:
    def __init__(self, data: Buffer) -> None:
        self._value = zlib.crc32(data)

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_ALGORITHMS: dict[str, type[_Crc32] | type[xxhash.xxh3_64]] = {
    OLDEST: _Crc32,
    NEWEST: xxhash.xxh3_64,
}


def check_algorithm(name: object) -> None:
    """Refuse an algorithm that this version does not have.

    Raises:
        HeaderError: if it is unknown, or no name.
    """
    if not isinstance(name, str) or name not in _ALGORITHMS:
        raise HeaderError(
            f"its checksums are {str(name)[:40]!r}, and this d2ldev computes "
            f"{', '.join(_ALGORITHMS)}: a newer one wrote it"
        )


def checksum_of(dtype: str, shape: Sequence[int], algorithm: str = NEWEST) -> Checksum:
    """Start the checksum of a tensor: of its dtype and shape, and then of its bytes.

    Args:
        dtype: the name of its true dtype.
        shape: its shape in the file.
        algorithm: one that ``check_algorithm`` accepts.
    """
    return _ALGORITHMS[algorithm](f"{dtype}{list(shape)}".encode())
