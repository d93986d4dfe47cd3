"""``load``: check a file, then read each tensor to where it is wanted."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from d2ldev.contract import DeviceLike, Framework
from d2ldev.device import CPU, Device
from d2ldev.display import replace_unprintable
from d2ldev.errors import (
    CheckpointError,
    PackageNotInstalledError,
    quote,
    warn,
)
from d2ldev.files.format.container import (
    NAMES,
    Entry,
    FileError,
    check_files,
    open_file,
    read_array,
    start_checksum,
    storage_of,
    structure_in,
)
from d2ldev.files.structure import (
    Outline,
    Stored,
    build,
    flatten,
    read_description,
)
from d2ldev.operations import devices
from d2ldev.operations.arguments import as_path
from d2ldev.operations.creation import refusal
from d2ldev.operations.values import find_switch

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The dtypes as which integers of a dtype that the framework lacks are read, the first that it has.
_WIDE = {"int": ("int64", "int32"), "uint": ("int64", "uint32", "int32")}


class Wanted(NamedTuple):
    """A tensor, or a NumPy array, that is to be read.

    Args:
        stored: its description in the file.
        device: where to, if it is a tensor.
        convert: a function for its values on the way.
    """

    stored: Stored
    device: Device
    convert: Callable[[NDArray[Any]], NDArray[Any]] = lambda array: array


class Checkpoint:
    """An open file whose header and description have been checked.

    Args:
        framework: for its tensors.
        opened: what ``open_file`` returned.
        attempted: the current operation, for messages.

    Raises:
        FileError: if one of them is wrong.
    """

    called = "the file"
    look = "backend.load(path) shows what is in the file"

    def __init__(
        self,
        framework: Framework,
        opened: tuple[BinaryIO, Mapping[str, Entry], Mapping[str, str]],
        attempted: str,
    ) -> None:
        self._framework = framework
        self.attempted = attempted
        self._file, self._entries, metadata = opened
        text = structure_in(self._entries, metadata)
        self.writer: str | None = None
        self._sums: Mapping[str, str | None] = {}
        if text is None:
            stored = [self._store_foreign(name) for name in self._entries]
            self.outline: Any = Outline("dict", list(self._entries), stored)
        else:
            self.writer, self.outline, stored, self._sums = read_description(text, self._store)
        self._stored = {each.name: each for each in stored}
        if self._stored.keys() != self._entries.keys() or len(stored) != len(self._stored):
            raise FileError("its description tells of other tensors than it has")

    def _store_foreign(self, name: str) -> Stored:
        """Return the description of a tensor in the file of another program."""
        entry = self._entries[name]
        # A number below a byte, which NumPy does not have, keeps the name of the format.
        dtype = NAMES.get(entry.tag, entry.tag)
        return Stored("tensor", name, dtype, dtype, entry.shape)

    def _store(self, name: str, dtype: str) -> Stored:
        """Return the description in the file of a tensor with a true dtype."""
        entry, numbers = self._entries.get(name), dtype
        if entry is not None and storage_of(dtype) is None:
            numbers = NAMES.get(entry.tag, entry.tag)  # numbers that represent it
        tag, suffix = storage_of(numbers) or ("", ())
        cut = len(entry.shape) - len(suffix) if entry else 0
        if entry is None or (tag, suffix) != (entry.tag, entry.shape[cut:]):
            raise FileError(
                f"its description has a tensor {quote(name)} of {quote(dtype)}, which is "
                + (f"stored as {entry.tag}" if entry else "missing")
            )
        return Stored("tensor", name, dtype, numbers, entry.shape[:cut])

    def whole(self, device: Device) -> Any:
        """Read the whole file, its tensors to a device."""
        # In the order in which they are in the file.
        return self._fill(self.outline, [self._stored[name] for name in self._entries], device)

    def read_node(self, node: Any) -> Any:
        """Read a node of the file, its tensors on the CPU.

        Args:
            node: ``outline``, or a child of it: a plain value, a tensor, or a container.

        Raises:
            CheckpointError: if the framework cannot hold one of the tensors.
            FileError: if they are damaged, or if containers that share children make them too
                many.
        """
        stored = {x: None for x in flatten(node).values() if isinstance(x, Stored)}
        return self._fill(node, list(stored), CPU)

    def _fill(self, node: Any, stored: Sequence[Stored], device: Device) -> Any:
        tensors = self.read([Wanted(each, device) for each in stored])
        return build(node, dict(zip(stored, tensors, strict=True)))

    def read(self, wanted: Sequence[Wanted]) -> list[Any]:
        """Read tensors and arrays, in new memory, and compare their checksums.

        Raises:
            CheckpointError: if the framework cannot hold one of them; nothing is read then.
            FileError: if they are damaged.
        """
        for stored, *_ in wanted:
            if stored.kind == "tensor" and not self._choose_dtype(stored):
                raise self._refuse_dtype(stored, f"which {self._framework.name} does not have here")
        made = [self._read_tensor(each) for each in wanted]
        other = [each.stored for each in wanted if self._is_narrowed(each.stored)]
        if other:
            more = f"; {len(other) - 1} more were read likewise" if len(other) > 1 else ""
            name = self._framework.name
            warn(
                f"{self.attempted}: the tensor {quote(other[0].name)} is of "
                f"{other[0].numbers}, which {name} does not have here, and was read as "
                f"{self._choose_dtype(other[0])}, into which all of its values fit{more}"
            )
        return made

    def _choose_dtype(self, stored: Stored) -> str:
        """Return the dtype as which the framework holds the numbers of a tensor; empty for none."""
        name, names = stored.numbers, self._framework.tensors.dtype_names
        if name in names:
            return name
        wide = _WIDE.get(name.rstrip("0123456789"), ())
        return next((each for each in wide if each in names), "")

    def _is_narrowed(self, stored: Stored) -> bool:
        return stored.kind == "tensor" and self._choose_dtype(stored) != stored.numbers

    def _refuse_dtype(self, stored: Stored, problem: str) -> CheckpointError:
        tensors = self._framework.tensors
        fix = "load it with a backend that has this dtype, or save it as one of "
        return CheckpointError(
            self.attempted,
            f"its tensor {quote(stored.name)} is of {shorten(stored.dtype)}, {problem}",
            find_switch(tensors, stored.numbers) or f"{fix}{', '.join(tensors.dtype_names)}",
        )

    def _read_values(self, stored: Stored) -> NDArray[Any]:
        """Read the values of a tensor, and compare their checksum."""
        entry, total = self._entries[stored.name], self._sums.get(stored.name)
        checksum = None
        if total is not None:
            checksum = start_checksum(stored.dtype, entry.shape)
        array = read_array(self._file, entry.begin, stored.shape, stored.numbers, checksum)
        if checksum is not None and checksum.hexdigest() != total:
            raise FileError(f"its tensor {quote(stored.name)} is damaged: the checksum differs")
        return array

    def _narrow(self, stored: Stored, array: NDArray[Any]) -> NDArray[Any]:
        """Return integers in a dtype that the framework has, if all of them fit."""
        held = np.iinfo(self._choose_dtype(stored))
        if array.size and not (held.min <= array.min() and array.max() <= held.max):
            name = self._framework.name
            problem = f"which {name} does not have here, and has values that {held.dtype} lacks"
            raise self._refuse_dtype(stored, problem)
        return array.astype(held.dtype)

    def _read_tensor(self, wanted: Wanted) -> Any:
        framework, stored = self._framework, wanted.stored
        native = devices.native(framework, wanted.device, self.attempted)
        try:
            array = wanted.convert(self._read_values(stored))
            if stored.kind == "array":
                return array
            dtype = stored.dtype
            if self._is_narrowed(stored):
                array = self._narrow(stored, array)
                dtype = self._choose_dtype(stored)
            made = framework.files.adopt(array, dtype, native)
            if stored.dtype != stored.numbers and framework.tensors.dtype_of(made) != stored.dtype:
                raise self._refuse_dtype(stored, f"which {framework.name} has not")
            return made
        except (FileError, CheckpointError, PackageNotInstalledError, OSError):
            raise
        except Exception as error:
            if stored.dtype != stored.numbers:
                raise self._refuse_dtype(stored, f"which {framework.name} has not") from error
            fix = f"backend.load(path), on the CPU, or with another backend than {framework.name}"
            raise refusal(framework, error, self.attempted, native, fix) from error


@contextmanager
def open_checkpoint(framework: Framework, path: str, attempted: str) -> Iterator[Checkpoint]:
    """Open and check a file; an error in it, now or later, is raised as a ``CheckpointError``."""
    check_files(attempted)
    try:
        # Not by opening the file, because opening a pipe waits for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileError("it is not a regular file")
        opened = open_file(path)
        with opened[0]:
            yield Checkpoint(framework, opened, attempted)
    except OSError as error:
        raise CheckpointError(
            attempted, error.strerror or str(error), "give the path of a file that can be read"
        ) from error
    except FileError as error:
        raise CheckpointError(
            attempted,
            shorten(error),
            "give a safetensors file, or a backup of a damaged one; load_into also takes what "
            "torch.load(path, weights_only=True) and numpy.load(path) return",
        ) from error


def load(framework: Framework, path: Any, device: DeviceLike) -> Any:
    """Read a nesting; see ``Backend.load``."""
    target = devices.resolve(framework, device, "load tensors")
    path = as_path(path, "load")
    attempted = f"load {path}"
    with open_checkpoint(framework, path, attempted) as checkpoint:
        return checkpoint.whole(target)


def from_bytes(framework: Framework, data: bytes) -> Any:
    """Return what ``to_bytes`` was given in another process, on the CPU."""
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        file.write(data)
        with open_checkpoint(framework, file.name, "read what another process has sent") as found:
            return found.whole(CPU)


def shorten(text: object) -> str:
    """Return a text of a file, shortened, and with printable characters only."""
    told = str(text)
    if len(told) > _LONGEST:
        told = f"{told[: _LONGEST // 2]}...{told[-_LONGEST // 2 :]}"
    return replace_unprintable(told)


_LONGEST = 1000
