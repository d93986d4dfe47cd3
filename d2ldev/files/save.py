"""``save``: write a nesting into one file, all of it or nothing."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from d2ldev.device import CPU
from d2ldev.errors import CheckpointError, warn
from d2ldev.files.description import VERSION, Description, Saved
from d2ldev.files.format.atomic import replacing
from d2ldev.files.format.checksums import DIGITS, NEWEST, PIECE, check_files, checksum_of
from d2ldev.files.format.dtypes import bytes_of, numpy_dtype, storage_of
from d2ldev.files.format.header import Entry, HeaderError, make_header
from d2ldev.framework import Framework
from d2ldev.operations.arguments import as_path
from d2ldev.operations.creation import shape_of
from d2ldev.operations.moving import copy_refusal


def save(framework: Framework, obj: Any, path: Any) -> None:
    """Write a nesting; see ``Backend.save``."""
    path = as_path(path, "save")
    attempted = f"save to {path}"
    check_files(attempted)
    description = Description(framework, obj, attempted)
    try:
        # The operating system finds no path in "file/../other", which ``replacing`` would.
        os.stat(os.path.dirname(path) or os.curdir)
        with replacing(path) as descriptor:
            _write(framework, description, descriptor)
        if description.unsaved:
            warn(
                f"{path} has no {' and no '.join(description.unsaved)}. fix: save it beside the "
                "file, and make the model with it before load_into"
            )
    except OSError as error:
        raise CheckpointError(
            attempted,
            error.strerror or str(error),
            "save to a folder that exists, has room, and may be written to; the file that was "
            "there is as it was",
        ) from error
    except HeaderError as error:
        raise CheckpointError(
            attempted,
            str(error),
            "save less in one file: np.asarray(numbers) for a list of numbers",
        ) from error


def to_bytes(framework: Framework, obj: Any) -> bytes:
    """Return what ``save`` writes of a small nesting, for another process."""
    description = Description(framework, obj, "send an object to another process")
    # Without a name, so that nothing is left where the process is killed.
    with tempfile.TemporaryFile(buffering=0) as file:
        _write(framework, description, file.fileno())
        file.seek(0)
        return file.read()


def _write(framework: Framework, description: Description, descriptor: int) -> None:
    saved = description.saved
    # Large elements first, so that each tensor is aligned.
    order = sorted(range(len(saved)), key=lambda i: -numpy_dtype(saved[i].numbers).itemsize)
    entries: dict[str, Entry] = {}
    position = 0
    for i in order:
        entries[saved[i].name] = entry = _entry(framework, saved[i], position)
        position = entry.end
    sums = ["0" * DIGITS] * len(saved)
    os.lseek(descriptor, len(_header(framework, description, entries, sums)), os.SEEK_SET)
    for i in order:
        name, x, dtype, _ = saved[i]
        data = _data(framework, name, x)
        if len(data) != entries[name].end - entries[name].begin:
            raise HeaderError(f"{name} has changed while it was written")
        checksum = checksum_of(dtype, entries[name].shape)
        for begin in range(0, len(data), PIECE):
            checksum.update(data[begin : begin + PIECE])
            _write_all(descriptor, data[begin : begin + PIECE])
        sums[i] = checksum.hexdigest()
    # Last, because it has the checksums.
    os.lseek(descriptor, 0, os.SEEK_SET)
    _write_all(descriptor, memoryview(_header(framework, description, entries, sums)))


def _entry(framework: Framework, saved: Saved, begin: int) -> Entry:
    has_numbers = saved.numbers == saved.dtype
    value = saved.value if has_numbers else framework.tensors.to_numpy(saved.value)
    shape = shape_of(value, f"save {saved.name}")
    storage = storage_of(saved.numbers)
    assert storage is not None
    size = math.prod(shape) * numpy_dtype(saved.numbers).itemsize
    return Entry(storage.tag, (*shape, *storage.suffix), begin, begin + size)


def _data(framework: Framework, name: str, x: Any) -> memoryview:
    """Return the bytes of a tensor or an array."""
    try:
        array = x if isinstance(x, np.ndarray) else framework.files.borrow(x)
        return memoryview(bytes_of(array))  # type: ignore[arg-type]
    except Exception as error:
        native = framework.devices.native(CPU)
        if (ours := copy_refusal(framework, error, f"save {name}", native, x)) is None:
            raise
        raise ours from error


def _header(
    framework: Framework, description: Description, entries: Mapping[str, Entry], sums: list[str]
) -> bytes:
    told = {
        "version": VERSION,
        "backend": framework.name,
        "root": description.root,
        "containers": description.rows,
        "checksums": NEWEST,
        "tensors": [
            [tensor.name, tensor.dtype, total]
            for tensor, total in zip(description.saved, sums, strict=True)
        ],
    }
    return make_header(entries, json.dumps(told, separators=(",", ":"), allow_nan=False))


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
