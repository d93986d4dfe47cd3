"""``load``: check a file, then read each tensor to where it is wanted."""

from __future__ import annotations

import math
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from d2ldev.device import CPU, Device
from d2ldev.errors import (
    CheckpointError,
    PackageNotInstalledError,
    UnsupportedValueError,
    describe,
    warn,
)
from d2ldev.files.description import (
    VERSION,
    Stored,
    built,
    check,
    filled,
    is_record,
    outlined,
    tensors_in,
)
from d2ldev.files.format.checksums import ALGORITHMS, OLDEST, PIECE, check_files, checksum_of
from d2ldev.files.format.dtypes import NAMES, PACKED, bytes_of, numpy_dtype, storages_of
from d2ldev.files.format.header import (
    CHECKSUM,
    HEADER,
    OURS,
    STRUCTURE,
    Entry,
    HeaderError,
    check_sum,
    length_of,
    parse_json,
    quoted,
    read_header,
)
from d2ldev.files.format.other_programs import recognised
from d2ldev.framework import DeviceLike, Framework
from d2ldev.operations import devices
from d2ldev.operations.arguments import as_path, is_iterable
from d2ldev.operations.creation import refusal

if TYPE_CHECKING:
    from numpy.typing import NDArray


# In bytes; XLA asks for it, and ``np.empty`` gives 16.
_ALIGNMENT = 64


class Wanted(NamedTuple):
    """A tensor, or a NumPy array, that is to be read.

    Args:
        stored: what it is in the file.
        device: where to, if it is a tensor.
        convert: a function for its values on the way.
    """

    stored: Stored
    device: Device
    convert: Callable[[NDArray[Any]], NDArray[Any]] = lambda array: array


class Checkpoint:
    """An open, unbuffered file whose header and description have been checked.

    Raises:
        HeaderError: if one of them is wrong.
    """

    called = "the file"
    look = "backend.load(path) shows what is in the file"

    def __init__(self, framework: Framework, file: BinaryIO, attempted: str) -> None:
        self._framework = framework
        self._file = file
        self.attempted = attempted
        size = os.fstat(file.fileno()).st_size
        length = length_of(file.read(8), size)
        text = file.read(length)
        if len(text) < length:
            raise HeaderError("it has become shorter while it was read")
        self._start = 8 + length
        self._entries, metadata = read_header(text, size - self._start)
        told = _description(self._entries, metadata)
        if HEADER in metadata:
            check_sum(text, metadata[HEADER])
        del text, metadata  # their memory is needed for what is made of them
        self.writer: str | None = told["backend"]
        self._algorithm: str = told["checksums"]
        table = [self._checked(row) for row in told.pop("tensors")]
        self._sums = {stored.name: total for stored, total in table}
        used: dict[Stored, None] = {}

        def found(kind: str, number: int) -> Stored:
            check(0 <= number < len(table), "a tensor")
            stored = table[number][0]._replace(kind=kind)
            used[stored] = None
            return stored

        self.outline, self._rows = outlined(told, found)
        names = {stored.name for stored in used}
        if names != set(self._entries) or len(table) != len(names):
            raise HeaderError("its description tells of other tensors than it has")
        if len(used) != len(names):
            raise HeaderError("its description has one tensor as an array, too")
        self.stored = sorted(used, key=lambda stored: self._entries[stored.name].begin)
        """The tensors in the order in which they are in the file."""

    def _checked(self, row: Any) -> tuple[Stored, str | None]:
        check(isinstance(row, list) and len(row) == 3 and isinstance(row[0], str), "a tensor")
        name, dtype, total = row
        entry, known = self._entries.get(name), isinstance(dtype, str)
        numbers = self._framework.files.numbers_dtype(dtype) or dtype if known else ""
        shape = entry.shape if entry else ()
        suffixes = [
            way.suffix
            for way in storages_of(numbers)
            if entry and way == (entry.tag, shape[len(shape) - len(way.suffix) :])
        ]
        if not suffixes:
            raise HeaderError(
                f"its description tells of a tensor {quoted(name)} of {quoted(str(dtype))}, which "
                + (f"is stored as {entry.tag}" if entry else "is not there")
            )
        return Stored("tensor", name, dtype, numbers, shape[: len(shape) - len(suffixes[0])]), total

    def whole(self, device: Device, classes: Mapping[str, type]) -> Any:
        """Read the whole file; see ``part`` and ``built``."""
        return self._filled(self.outline, self.stored, device, classes)

    def part(self, node: Any) -> Any:
        """Read a part of the file, its tensors on the CPU.

        Args:
            node: ``outline``, or a child of it: a plain value, a tensor, or a container.

        Raises:
            CheckpointError: if the framework cannot hold one of the tensors.
            HeaderError: if they are damaged, or if containers that share children make them too
                many.
        """
        return self._filled(node, tensors_in(node), CPU, {})

    def _filled(
        self, node: Any, stored: Sequence[Stored], device: Device, classes: Mapping[str, type]
    ) -> Any:
        tensors = self.read([Wanted(each, device) for each in stored])
        values = dict(zip(stored, tensors, strict=True))
        return filled(node, built(self._rows, values, classes), values)

    def read(self, wanted: Sequence[Wanted]) -> list[Any]:
        """Read tensors and arrays, in new memory, and compare their checksums.

        Raises:
            CheckpointError: if the framework cannot hold one of them; nothing is read then.
            HeaderError: if they are damaged.
        """
        for stored, *_ in wanted:
            if stored.numbers in PACKED or (stored.kind == "tensor" and not self._held(stored)):
                raise self._dtype_refusal(stored, f"which {self._framework.name} has not now")
        made = [self._tensor(each) for each in wanted]
        other = [each.stored for each in wanted if self._is_held_otherwise(each.stored)]
        if other:
            more = f"; {len(other) - 1} more were read likewise" if len(other) > 1 else ""
            name = self._framework.name
            warn(
                f"{self.attempted}: the tensor {quoted(other[0].name)} is of "
                f"{other[0].numbers}, which {name} has not now, and was read as "
                f"{self._held(other[0])}, into which all of its values fit{more}"
            )
        return made

    def _held(self, stored: Stored) -> str:
        """Return the dtype as which the framework holds the numbers of a tensor; empty for none.

        Of the integers, it is one that holds all of their dtype, else the widest.
        """
        name, names = stored.numbers, self._framework.tensors.dtype_names
        if name in names or not name.startswith(("int", "uint")):
            return name if name in names else ""
        wanted, is_signed = np.iinfo(name), name.startswith("int")
        found = sorted(
            (each for each in names if each.startswith(("int", "uint"))),
            key=lambda each: (np.iinfo(each).bits, each.startswith("int") is is_signed),
        )
        for each in found:
            if np.iinfo(each).min <= wanted.min and wanted.max <= np.iinfo(each).max:
                return each
        return found[-1] if found else ""

    def _is_held_otherwise(self, stored: Stored) -> bool:
        return stored.kind == "tensor" and self._held(stored) != stored.numbers

    def _dtype_refusal(self, stored: Stored, problem: str) -> CheckpointError:
        tensors = self._framework.tensors
        fix = "load it with a backend that has, or save it as one of "
        return CheckpointError(
            self.attempted,
            f"its tensor {quoted(stored.name)} is of {stored.dtype}, {problem}",
            tensors.dtype_fix(stored.numbers) or f"{fix}{', '.join(tensors.dtype_names)}",
        )

    def _array(self, stored: Stored) -> NDArray[Any]:
        """Read the values of a tensor."""
        entry, total = self._entries[stored.name], self._sums[stored.name]
        checksum = checksum_of(stored.dtype, entry.shape, self._algorithm)
        dtype = numpy_dtype(stored.numbers)
        is_array = stored.kind == "array"
        array = np.empty(stored.shape, dtype) if is_array else _aligned(stored.shape, dtype)
        view = memoryview(bytes_of(array))  # type: ignore[arg-type]
        self._file.seek(self._start + entry.begin)
        while view:
            count = self._file.readinto(view[:PIECE])  # type: ignore[attr-defined]
            if not count:
                raise HeaderError("it has become shorter while it was read")
            if total is not None:
                checksum.update(view[:count])
            view = view[count:]
        if total not in (None, checksum.hexdigest()):
            raise HeaderError(f"its tensor {quoted(stored.name)} is damaged: the checksum differs")
        return array

    def _narrowed(self, stored: Stored, array: NDArray[Any]) -> NDArray[Any]:
        """Return integers in a dtype that the framework has, if all of them fit."""
        held = np.iinfo(self._held(stored))
        if array.size and not (held.min <= array.min() and array.max() <= held.max):
            name = self._framework.name
            raise self._dtype_refusal(
                stored, f"which {name} has not now, and has values that {held.dtype} does not hold"
            )
        narrowed = _aligned(array.shape, held.dtype)
        narrowed[...] = array
        return narrowed

    def _tensor(self, wanted: Wanted) -> Any:
        framework, stored = self._framework, wanted.stored
        native = devices.native(framework, wanted.device, self.attempted)
        try:
            array = wanted.convert(self._array(stored))
            if stored.kind == "array":
                return array
            if self._is_held_otherwise(stored):
                array = self._narrowed(stored, array)
            made = framework.files.adopt(array, framework.tensors.dtype(array.dtype.name), native)
            has_numbers = stored.numbers == stored.dtype
            return made if has_numbers else framework.files.from_numbers(made, stored.dtype)
        except (HeaderError, CheckpointError, PackageNotInstalledError, OSError):
            raise
        except Exception as error:
            fix = f"backend.load(path), on the CPU, or with another backend than {framework.name}"
            raise refusal(framework, error, self.attempted, native, fix) from error


@contextmanager
def opened(framework: Framework, path: str, attempted: str) -> Iterator[Checkpoint]:
    """Open and check a file; an error in it, now or later, is raised as a ``CheckpointError``."""
    check_files(attempted)
    try:
        # Not by opening the file, because opening a pipe waits for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise HeaderError("it is no regular file")
        with open(path, "rb", buffering=0) as file:
            yield Checkpoint(framework, file, attempted)
    except OSError as error:
        raise _of_another_program(path, attempted) or CheckpointError(
            attempted, error.strerror or str(error), "give the path of a file that can be read"
        ) from error
    except HeaderError as error:
        raise _of_another_program(path, attempted) or CheckpointError(
            attempted,
            str(error),
            "give a file that backend.save or another program has written as safetensors; "
            "of one that is damaged, take a copy",
        ) from error


def _of_another_program(path: str, attempted: str) -> CheckpointError | None:
    """Return the error of a file or a folder of another program; None if nobody knows it."""
    if (found := recognised(path)) is None:
        return None
    fix = f"{found.line}; then give 'new.safetensors'"
    return CheckpointError(attempted, f"it is {found.what}, and no safetensors file", fix)


def load(framework: Framework, path: Any, device: DeviceLike, classes: Iterable[type]) -> Any:
    """Read a nesting; see ``Backend.load``."""
    target = devices.existing(framework, device, "load tensors")
    path = as_path(path, "load")
    attempted = f"load {path}"
    by_name = _by_name(classes, attempted)
    with opened(framework, path, attempted) as checkpoint:
        return checkpoint.whole(target, by_name)


def from_bytes(framework: Framework, data: bytes) -> Any:
    """Return what ``to_bytes`` was given in another process, on the CPU."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        file.seek(0)
        checkpoint = Checkpoint(framework, file, "read what another process has sent")
        return checkpoint.whole(CPU, {})


def _by_name(classes: Any, attempted: str) -> dict[str, type]:
    """Return classes by the names that files have for them."""
    found: dict[str, type] = {}
    for cls in classes if is_iterable(classes) else [classes]:
        if not isinstance(cls, type) or not is_record(cls):
            problem = f"{describe(cls)} is neither a namedtuple nor a dataclass"
            raise UnsupportedValueError(attempted, problem, "classes=[Batch]")
        if found.setdefault(cls.__qualname__, cls) is not cls:
            problem = f"two of the classes are called {cls.__qualname__}"
            raise UnsupportedValueError(attempted, problem, "give one of them")
    return found


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return new memory that a framework may keep: XLA copies memory that is not aligned."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    array: NDArray[Any] = memory[begin : begin + size].view(dtype).reshape(shape)
    return array


def _description(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of a file's nesting; for another program's file, name -> tensor."""
    ours = {key for key in metadata if key.startswith(OURS)}
    if not ours:
        return {
            "backend": None,
            "checksums": OLDEST,
            "root": {"at": 0},
            "containers": [
                {
                    "type": "dict",
                    "labels": list(entries),
                    "items": [{"tensor": i} for i in range(len(entries))],
                }
            ],
            "tensors": [[name, NAMES[entry.tag], None] for name, entry in entries.items()],
        }
    if not ours >= {STRUCTURE, CHECKSUM}:
        raise HeaderError("its description is damaged: the metadata has a part of its keys")
    text = metadata[STRUCTURE]
    if f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}" != metadata[CHECKSUM]:
        raise HeaderError("its description is damaged: the checksum differs")
    told: dict[str, Any] = parse_json(text)
    check(isinstance(told, dict) and type(told.get("version")) is int, "a version")
    version = told["version"]
    if version > VERSION:
        raise HeaderError(
            f"its description is of version {quoted(str(version))}, and this d2ldev reads "
            f"{VERSION}: a newer one wrote it"
        )
    if ours != ({STRUCTURE, CHECKSUM} if version < 4 else {STRUCTURE, CHECKSUM, HEADER}):
        raise HeaderError("its description is damaged: the metadata has a part of its keys")
    algorithm = told.setdefault("checksums", OLDEST)
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise HeaderError(
            f"its checksums are {str(algorithm)[:40]!r}, and this d2ldev computes "
            f"{', '.join(ALGORITHMS)}: a newer one wrote it"
        )
    is_whole = (
        set(told) == {"version", "backend", "root", "containers", "checksums", "tensors"}
        and isinstance(told["backend"], str)
        and isinstance(told["tensors"], list)
        and isinstance(told["containers"], list)
    )
    check(is_whole, "a part")
    return told
