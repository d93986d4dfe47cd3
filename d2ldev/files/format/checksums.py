"""Compute the checksum of each tensor, by the algorithm that the file names.

XXH3 (https://github.com/Cyan4973/xxHash) takes less time than copying the bytes does, and lets
other threads run. CRC-32 is that of files that were written before version 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

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


class Crc32:
    """CRC-32 with the methods of ``xxhash``."""

    def __init__(self, data: Buffer) -> None:
        self._value = zlib.crc32(data)

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


ALGORITHMS: dict[str, type[Crc32] | type[xxhash.xxh3_64]] = {
    OLDEST: Crc32,
    NEWEST: xxhash.xxh3_64,
}
"""The algorithms by the names that files have for them."""


def checksum_of(
    dtype: str, shape: Sequence[int], algorithm: str = NEWEST
) -> Crc32 | xxhash.xxh3_64:
    """Start the checksum of a tensor: of its dtype and shape, and then of its bytes.

    Args:
        dtype: the name of its true dtype.
        shape: its shape in the file.
        algorithm: one of ``ALGORITHMS``.
    """
    return ALGORITHMS[algorithm](f"{dtype}{list(shape)}".encode())
