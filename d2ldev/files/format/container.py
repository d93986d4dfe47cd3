"""Write and read a safetensors file by the ``safetensors`` library.

The library checks the header, and does all of a file but three things:

- NumPy lacks dtypes that ``ml_dtypes`` has. So the bytes of a tensor are read here, from where the
  library says that they are.
- The format lacks dtypes. The bytes of such a tensor are stored as another one.
- The format has no checksums. The metadata has one key of d2ldev's. Its value is the version, a
  checksum of all names, dtypes, shapes and the structure, and the structure. The structure has each
  tensor's own checksum.

A key that is nearly d2ldev's is a damaged one. So two flipped bits cannot turn a file into a file
of another program, which has no checksums. There is one key only, because the library writes
several keys in any order. The same nesting has to give the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from d2ldev.dependencies import import_optional
from d2ldev.errors import quote

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 5
"""The version of the files that ``save`` writes."""
_KEY = "d2ldev.structure"

TAGS = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The format's name of each dtype that NumPy and ``ml_dtypes`` have in the same bytes."""
NAMES = {tag: name for name, tag in TAGS.items()}

MAX_HEADER = 100_000_000
"""The longest header in bytes, by the rules of the format."""
# In bytes; XLA copies memory that does not begin at a multiple of it.
_ALIGNMENT = 64
# How often a file may be replaced during the few microseconds in which it is opened.
_TRIES = 100
# How many bytes are read at once; the checksum then finds them in the cache.
_PIECE = 1 << 20


class FileError(ValueError):
    """A file cannot be read; the message says why, and names no path."""


class Entry(NamedTuple):
    """A tensor in a file.

    Args:
        tag: the format's name of its dtype.
        shape: its shape there.
        begin: where its bytes begin in the file.
    """

    tag: str
    shape: tuple[int, ...]
    begin: int


def check_files(attempted: str) -> None:
    """Check that files can be written and read here, before anything is done.

    Raises:
        PackageNotInstalledError: without ``safetensors`` or ``xxhash``.
    """
    for module in ("safetensors", "xxhash"):
        import_optional(module, attempted, extra="files")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name, from ``ml_dtypes`` if NumPy has none.

    Raises:
        PackageNotInstalledError: if NumPy has none, and ``ml_dtypes`` is missing.
    """
    if name.startswith(("bfloat", "float8")):
        module = import_optional("ml_dtypes", f"hold {name} in NumPy", extra="files")
        dtype: np.dtype[Any] = np.dtype(getattr(module, name))
        return dtype
    return np.dtype(name)


@lru_cache(maxsize=256)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, which NumPy makes anew each time."""
    return str(dtype.name)


def storage_of(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Return how a dtype is stored: its tag, and the sizes that follow the tensor's shape.

    None if it is not a dtype of numbers.

    >>> storage_of("bfloat16"), storage_of("complex128")
    (('BF16', ()), ('F64', (2,)))
    """
    if name == "complex128":  # as real and imaginary parts
        return "F64", (2,)
    if name in TAGS:
        return TAGS[name], ()
    if not re.fullmatch(r"float8_e\dm\d[a-z0-9]*", name):
        return None
    try:
        numpy_dtype(name)
    except AttributeError:
        return None
    return "U8", ()


def normalize(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in C order and the machine's order of bytes; a copy only if it has others."""
    native: np.dtype[Any] = array.dtype.newbyteorder("=")
    return np.ascontiguousarray(array, native).reshape(array.shape)


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """View an array as the bytes that a file has of it."""
    return normalize(array).reshape(-1).view(np.uint8)


def start_checksum(dtype: str, shape: tuple[int, ...]) -> Any:
    """Start the checksum of a tensor: of its dtype and shape, and then of its bytes.

    XXH3 (https://github.com/Cyan4973/xxHash) takes less time than copying the bytes does.
    """
    import xxhash

    return xxhash.xxh3_64(f"{dtype}{list(shape)}".encode())


def compute_checksum(dtype: str, array: NDArray[Any]) -> str:
    """Return the checksum of a tensor with this dtype, whose values an array has."""
    _, suffix = storage_of(name_of(array.dtype)) or ("", ())
    checksum = start_checksum(dtype, (*array.shape, *suffix))
    checksum.update(as_bytes(array))
    return str(checksum.hexdigest())


# -- writing --------------------------------------------------------------------------------------


def make_file(arrays: Mapping[str, NDArray[Any]], structure: str, path: str | None = None) -> bytes:
    """Write a file, or return its bytes where no path is given.

    Args:
        arrays: by their names, each as ``normalize`` returns it.
        structure: the description of the nesting, in ASCII.
        path: where nothing is yet.

    Raises:
        FileError: if the library cannot write it.
    """
    import safetensors

    specs, entries = {}, {}
    for name, array in arrays.items():
        dtype = name_of(array.dtype)
        tag, suffix = storage_of(dtype) or ("", ())
        shape = (*array.shape, *suffix)
        entries[name] = Entry(tag, shape, 0)
        # Where the format has no such dtype, it is stored as one of the same bytes.
        as_dtype = dtype if dtype in TAGS else NAMES[tag]
        specs[name] = safetensors.TensorSpec(
            dtype=as_dtype, shape=shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
    metadata = {_KEY: f"{VERSION} {_sum_of(entries, structure)} {structure}"}
    try:
        if path is None:
            made: bytes = safetensors.serialize(specs, metadata)
        else:
            safetensors.serialize_file(specs, path, metadata)
            with open(path, "rb") as file:
                made = file.read(8)
    except safetensors.SafetensorError as error:
        raise FileError(str(error)) from error
    # The library writes a header that it does not read.
    if int.from_bytes(made[:8], "little") > MAX_HEADER:
        raise FileError("its header is too long: long lists of numbers belong into arrays")
    return made


def _sum_of(entries: Mapping[str, Entry], structure: str) -> str:
    """Return the checksum of the names, dtypes and shapes of tensors, and of the structure."""
    tensors = sorted((name, entry.tag, entry.shape) for name, entry in entries.items())
    import xxhash

    digest: str = xxhash.xxh3_64_hexdigest(json.dumps([VERSION, tensors, structure]).encode())
    return digest


# -- reading --------------------------------------------------------------------------------------


def open_file(path: str) -> tuple[BinaryIO, dict[str, Entry], Mapping[str, str]]:
    """Open a file, unbuffered, and return it with its tensors by their names, and its metadata.

    The names are in the order of the bytes. Others may replace the file meanwhile, as ``save``
    does. All that is returned, and all that is read later, is of one file.

    Raises:
        FileError: if it breaks a rule of the format.
    """
    for _ in range(_TRIES):
        # The caller closes it.
        file = open(path, "rb", buffering=0)  # noqa: SIM115
        try:
            # The library opens the path itself. While this file is open, no other has its number.
            entries, end, metadata = _read_header(path, file)
            status = os.fstat(file.fileno())
            if os.path.samestat(status, os.stat(path)):
                if status.st_size != end:
                    raise FileError("its size has changed while it was read")
                return file, entries, metadata
        except BaseException:
            file.close()
            raise
        file.close()
    raise FileError(f"others have replaced it {_TRIES} times while it was read")


def _read_header(path: str, file: BinaryIO) -> tuple[dict[str, Entry], int, Mapping[str, str]]:
    """Return the tensors of a file, the position of its end, and its metadata."""
    import safetensors

    position = 8 + int.from_bytes(file.read(8), "little")
    entries = {}
    try:
        with safetensors.safe_open(path, framework="numpy", backend="pread") as opened:
            for name in opened.offset_keys():
                entry = opened.get_slice(name)
                tag, shape = entry.get_dtype(), tuple(entry.get_shape())
                entries[name] = Entry(tag, shape, position)
                position += math.prod(shape) * _count_bits(tag) // 8
            return entries, position, opened.metadata() or {}
    except safetensors.SafetensorError as error:
        raise FileError(f"it is not a safetensors file, or is damaged: {error}") from error


def _count_bits(tag: str) -> int:
    """Return the bits of a number in a file: 8 of ``'BOOL'``, 6 of ``'F6_E2M3'``."""
    found = re.search(r"\d+", tag)
    return int(found[0]) if found else 8


def structure_in(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> str | None:
    """Return the description of the nesting in a file; None for the file of another program.

    Args:
        entries, metadata: what ``open_file`` returned.

    Raises:
        FileError: if the checksum differs, or another version wrote the file.
    """
    ours = {key for key in metadata if _is_nearly_ours(key)}
    if not ours:
        return None
    if ours != {_KEY}:
        raise FileError("its description is damaged: the metadata has another key for it")
    version, digits, structure = (*metadata[_KEY].split(" ", 2), "", "")[:3]
    if version != str(VERSION):
        raise FileError(f"it is of version {quote(version)}, and this d2ldev reads {VERSION}")
    if _sum_of(entries, structure) != digits:
        raise FileError("its header is damaged: the checksum differs")
    return structure


def _is_nearly_ours(key: str) -> bool:
    """Return whether two flipped bits, or none, make a key of d2ldev's."""
    # Two of them make "\\r" of "tr", which is one character.
    return abs(len(key) - len(_KEY)) <= 1 and SequenceMatcher(None, key, _KEY).ratio() > 0.8


def read_array(
    file: BinaryIO, begin: int, shape: tuple[int, ...], dtype: str, checksum: Any = None
) -> NDArray[Any]:
    """Read a tensor into new memory that a framework may keep.

    Args:
        file: unbuffered.
        begin: where its bytes begin.
        shape, dtype: of the array.
        checksum: gets all the bytes; None for none.

    Raises:
        FileError: if the file has become shorter, or NumPy has no such array.
    """
    native = numpy_dtype(dtype)
    size = math.prod(shape) * native.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    memory = memory[first : first + size]
    view = memoryview(memory)  # type: ignore[arg-type]
    file.seek(begin)
    while view:
        count = file.readinto(view[:_PIECE])  # type: ignore[attr-defined]
        if not count:
            raise FileError("it has become shorter while it was read")
        if checksum is not None:
            checksum.update(view[:count])
        view = view[count:]
    try:
        return memory.view(native).reshape(shape)
    except ValueError as error:  # NumPy has fewer dimensions than the format
        raise FileError(f"NumPy has no array of the shape {shape}: {error}") from error
