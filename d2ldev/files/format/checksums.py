"""Compute the checksum of each tensor.

XXH3 (https://github.com/Cyan4973/xxHash) takes less time than copying the bytes does, and lets
other threads run.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

ALGORITHM = "xxh3_64"
"""The name of the algorithm in files."""
DIGITS = 2 * xxhash.xxh3_64().digest_size
"""How many characters a checksum has."""
PIECE = 1 << 20
"""How many bytes to read or write at once; the checksum then finds them in the cache."""


def checksum_of(dtype: str, shape: Sequence[int]) -> xxhash.xxh3_64:
    """Start the checksum of a tensor: of its dtype and shape, and then of its bytes.

    Args:
        dtype: the name of its true dtype.
        shape: its shape in the file.
    """
    return xxhash.xxh3_64(f"{dtype}{list(shape)}".encode())
