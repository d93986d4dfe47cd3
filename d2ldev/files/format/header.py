"""Make the header of a safetensors file, and read one that may be damaged or hostile.

A file has eight bytes with the length of the header, the header in JSON, and the bytes of the
tensors without holes or overlaps. Everything is checked against the size of the file before
memory is allocated for it.

The metadata says by three keys that d2ldev wrote the file. A file with some of them is damaged; so
no two flipped bits make it the file of another program, which has no checksums.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from d2ldev.files.format.checksums import xxh3_64
from d2ldev.files.format.dtypes import BITS, NAMES

MAX_LENGTH = 100_000_000
"""The longest header in bytes, by the rules of the format."""
METADATA = "__metadata__"
STRUCTURE = "d2ldev.structure"
CHECKSUM = "d2ldev.checksum"
HEADER = "d2ldev.header"
"""The keys in the metadata: the description of the nesting, its CRC-32, the XXH3 of the header.

The first is CRC-32 in every version, so that a reader can tell a newer file from a damaged one. The
second is of all bytes of the header and its length, with zeros for its own digits. Files have it
since version 4.
"""
OURS = "d2ldev."
"""How the keys of d2ldev begin."""
_ZEROS = "0" * 16
_DIGITS = re.compile("[0-9a-f]{16}")
# Python takes less memory than this for each value of the JSON text and what is made of it.
_COST = 230
# The bytes, and as text, and the description in it. A text with one wide character takes four
# bytes for each of its characters.
_NARROW, _WIDE = 3, 9
# An empty tensor takes up to 5 KB, in JAX, of which its values in the JSON text are a part.
_OF_TENSOR = 3000
_MEMORY = 1 << 27
# The limit of NumPy 1.
_MAX_DIMENSIONS = 32


class HeaderError(ValueError):
    """A file cannot be read; the message says why, and names no path."""


class Entry(NamedTuple):
    """A tensor in a file.

    Args:
        tag: the format's name of its dtype.
        shape: its shape.
        begin, end: the offsets of its bytes from the end of the header.
    """

    tag: str
    shape: tuple[int, ...]
    begin: int
    end: int


def make_header(entries: Mapping[str, Entry], structure: str) -> bytes:
    """Return the first bytes of a file, up to the first tensor; ``structure`` is the description.

    Raises:
        HeaderError: if no reader would take it.
    """
    checksum = f"{zlib.crc32(structure.encode()):08x}"
    metadata = {HEADER: _ZEROS, CHECKSUM: checksum, STRUCTURE: structure}
    told: dict[str, Any] = {METADATA: metadata}
    for name, entry in entries.items():
        offsets = [entry.begin, entry.end]
        told[name] = {"dtype": entry.tag, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(told, separators=(",", ":"), allow_nan=False).encode("ascii")
    text += b" " * (-len(text) % 8)  # aligns the tensors
    if len(text) > MAX_LENGTH:
        raise HeaderError(f"its header has {len(text)} bytes, and at most {MAX_LENGTH} are allowed")
    check_memory(text, max((entry.end for entry in entries.values()), default=0), entries)
    begin = text.index(_ZEROS.encode())
    digits = _sum_of(text, begin).encode()
    return len(text).to_bytes(8, "little") + text[:begin] + digits + text[begin + len(digits) :]


def check_sum(text: bytes, digits: str) -> None:
    """Raise a ``HeaderError`` if a header, without its length, has not the checksum ``digits``."""
    if not _DIGITS.fullmatch(digits):  # the file's own text may be no Unicode
        raise HeaderError("its header is damaged: its checksum is none")
    begin = text.find(f'"{HEADER}":"{digits}"'.encode()) + len(HEADER) + 4
    if _sum_of(text, begin) != digits:
        raise HeaderError("its header is damaged: the checksum differs")


def _sum_of(text: bytes, begin: int) -> str:
    """Return the checksum of a header whose own digits begin at ``begin``."""
    checksum = xxh3_64(len(text).to_bytes(8, "little"))
    view = memoryview(text)
    for part in (view[:begin], _ZEROS.encode(), view[begin + len(_ZEROS) :]):
        checksum.update(part)
    return checksum.hexdigest()


def check_memory(text: bytes, room: int, entries: Mapping[str, Entry]) -> None:
    """Check that reading takes at most four times the memory of the file, or 128 MB.

    Args:
        text, room: see ``read_header``.
        entries: its tensors, as far as they are known. Some frameworks copy one while it is read.

    Raises:
        HeaderError: if it has too many values.
    """
    largest = max((entry.end - entry.begin for entry in entries.values()), default=0)
    values = sum(map(text.count, (b",", b":", b"{", b"[")))
    is_narrow = text.isascii() and b"\\u" not in text
    needed = room + largest + _OF_TENSOR * len(entries)
    needed += _COST * values + (_NARROW if is_narrow else _WIDE) * len(text)
    if needed > max(4 * (len(text) + room), _MEMORY):
        raise HeaderError(
            f"its header has {len(text)} bytes, {len(entries)} tensors and about {values} values, "
            "which take more memory than four times the file: long lists of numbers belong into "
            "arrays"
        )


def length_of(first: bytes, size: int) -> int:
    """Return the length of the header, from the first eight bytes of a file and the file's size.

    Raises:
        HeaderError: if no header of this length fits into the file.
    """
    if len(first) < 8:
        raise HeaderError(
            "it is empty" if not first else f"it ends after {len(first)} bytes: it is truncated"
        )
    length = int.from_bytes(first, "little")
    if length > MAX_LENGTH:
        raise HeaderError(f"it is not a safetensors file: its header would have {length} bytes")
    if 8 + length > size:
        raise HeaderError(f"it ends within its header of {length} bytes: it is truncated")
    return length


def read_header(text: bytes, room: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file in the order of their bytes, and its metadata.

    Args:
        text: the bytes of its header, without the length.
        room: how many bytes follow them in the file.

    Raises:
        HeaderError: if it breaks a rule of the format, or does not fit the file.
    """
    if text[:1] != b"{":
        raise HeaderError("it is not a safetensors file: its header is not a JSON object")
    check_memory(text, room, {})
    try:
        told = parse_json(text.decode("utf-8"))
    except UnicodeDecodeError:
        raise HeaderError("its header is not UTF-8") from None
    metadata = told.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("its metadata does not map text to text")
    # What is read is taken out: its memory is needed for what is made of it.
    entries = {name: _entry(name, told.pop(name)) for name in list(told)}
    ordered = dict(sorted(entries.items(), key=lambda item: item[1][2:]))
    position = 0
    for name, entry in ordered.items():
        if entry.begin != position:
            what = "overlaps another" if entry.begin < position else "leaves a hole before it"
            raise HeaderError(f"its tensor {quoted(name)} {what}")
        position = entry.end
    if position != room:
        state = "truncated, or has been written to" if position > room else "longer than it says"
        raise HeaderError(f"its tensors take {position} bytes and it has {room}: it is {state}")
    check_memory(text, room, entries)
    return ordered, metadata


def parse_json(text: str) -> Any:
    """Parse strict JSON: without NaN and duplicate keys, and no deeper than Python can.

    Raises:
        HeaderError: if it is anything else.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except HeaderError:
        raise
    except RecursionError:
        raise HeaderError("its JSON is nested too deep") from None
    except ValueError as error:
        raise HeaderError(f"its JSON cannot be read: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise HeaderError("its JSON has a duplicate key")
    return made


def _no_number(text: str) -> NoReturn:
    raise HeaderError(f"its JSON has {text}, which is not a number")


def quoted(name: str) -> str:
    """Return a name in a file for a message: never long, and of characters that can be printed."""
    return repr(name if len(name) <= 80 else f"{name[:77]}...")


def is_sizes(values: object) -> bool:
    """Return whether a value can be a shape: a list of integers that are not negative."""
    return (
        isinstance(values, list)
        and len(values) <= _MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _entry(name: str, what: Any) -> Entry:
    shown = quoted(name)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise HeaderError(f"its tensor {shown} has a name that is not Unicode") from None
    if not isinstance(what, dict) or set(what) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"its tensor {shown} lacks a dtype, a shape or offsets")
    tag, shape, offsets = what["dtype"], what["shape"], what["data_offsets"]
    if not isinstance(tag, str) or tag not in NAMES:
        raise HeaderError(f"its tensor {shown} has an unknown dtype: {quoted(str(tag))}")
    # NumPy limits the product of the sizes that are not 0 even if another one is 0.
    if not is_sizes(shape) or math.prod(filter(None, shape)) >= 2**60:
        raise HeaderError(f"its tensor {shown} has an invalid shape")
    if not is_sizes(offsets) or len(offsets) != 2:
        raise HeaderError(f"its tensor {shown} has invalid offsets")
    begin, end = offsets
    if 8 * (end - begin) != math.prod(shape) * BITS[tag]:
        raise HeaderError(f"its tensor {shown} has offsets that do not fit its shape")
    return Entry(tag, tuple(shape), begin, end)
