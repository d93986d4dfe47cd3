"""Recognise the files and folders of other programs, which ``load`` does not read.

A file is recognised by its bytes and not by its name. Nothing is unpacked, and a few kilobytes are
read, whatever a file says of itself.

Held by ``tests/core/files/test_files_of_other_programs.py`` and each backend's tests of files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

_HEAD, _TAIL = 4096, 1 << 16


class Recognised(NamedTuple):
    """The kind of a file or a folder.

    Args:
        what: its name, in a few words.
        line: a program that converts it for ``backend.load_into(net, 'new.safetensors')``. In the
            program ``path`` is its path.
    """

    what: str
    line: str


def _format_save(name: str, obj: str) -> str:
    return f"d2ldev.get_backend({name!r}).save({obj}, 'new.safetensors')"


_TORCH = Recognised(
    "a file of torch.save",
    _format_save("torch", "torch.load(path, map_location='cpu', weights_only=True)"),
)
_TORCHSCRIPT = Recognised(
    "a TorchScript file",
    _format_save("torch", "torch.jit.load(path, map_location='cpu').state_dict()"),
)
_TORCH_FOLDER = Recognised(
    "a folder of torch.distributed.checkpoint",
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(path, 'new.pt'); "
    + _format_save("torch", "torch.load('new.pt', weights_only=True)"),
)
_NPY = Recognised("an array of NumPy", "backend.save(numpy.load(path), 'new.safetensors')")
_NPZ = Recognised("a .npz file of NumPy", "backend.save(dict(numpy.load(path)), 'new.safetensors')")
_HDF5 = Recognised(
    "an HDF5 file, as Keras writes", f"net.load_weights(path); {_format_save('tensorflow', 'net')}"
)
_KERAS = Recognised(
    "a model of Keras", f"net = keras.models.load_model(path); {_format_save('tensorflow', 'net')}"
)
_MXNET = Recognised(
    "a file of parameters of MXNet", f"net.load_parameters(path); {_format_save('mxnet', 'net')}"
)
_FLAX = Recognised(
    "a file of flax.serialization",
    _format_save("jax", "flax.serialization.msgpack_restore(open(path, 'rb').read())"),
)
_ORBAX = Recognised(
    "a checkpoint of Orbax",
    _format_save("jax", "orbax.checkpoint.StandardCheckpointer().restore(os.path.abspath(path))"),
)
_TENSORFLOW = Recognised(
    "a checkpoint of TensorFlow",
    "tf.train.Checkpoint(model=net).restore({start}).expect_partial(); "
    + _format_save("tensorflow", "net"),
)
_SAVED_MODEL = Recognised(
    "a SavedModel of TensorFlow",
    "read = tf.train.load_checkpoint(os.path.join(path, 'variables', 'variables')); "
    + _format_save(
        "tensorflow",
        "{name: read.get_tensor(name) for name in read.get_variable_to_shape_map() "
        "if name.endswith('VARIABLE_VALUE')}",
    ),
)
_PICKLE = Recognised(
    "a pickle, which may run any program when it is read",
    "with open(path, 'rb') as file: backend.save(pickle.load(file), 'new.safetensors')",
)


def recognise(path: str) -> Recognised | None:
    """Return the kind of a file or a folder that ``load`` cannot read; None if it is unknown."""
    with suppress(OSError):
        if os.path.isdir(path):
            return _of_folder(path)
        if not os.path.exists(path):
            # TensorFlow names a checkpoint by the beginning of the names of its files.
            is_start = os.path.isfile(f"{path}.index")
            return _of_tensorflow("path") if is_start else None
        if os.path.isfile(path):
            return _of_file(path)
    return None


def _of_folder(path: str) -> Recognised | None:
    names = set(os.listdir(path))
    if "saved_model.pb" in names:
        return _SAVED_MODEL
    if names & {"_METADATA", "manifest.ocdbt"}:
        return _ORBAX
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return _TORCH_FOLDER
    if "checkpoint" in names and any(name.endswith(".index") for name in names):
        return _of_tensorflow("tf.train.latest_checkpoint(path)")
    # A manager of Orbax keeps each item of a step in a folder of its own.
    for below in ("default", *sorted(filter(str.isdigit, names), key=int, reverse=True)):
        for inner in (below, os.path.join(below, "default")):
            if os.path.isfile(os.path.join(path, inner, "_METADATA")):
                line = _ORBAX.line.replace("(path)", f"({os.path.join(path, inner)!r})")
                return Recognised("a folder with checkpoints of Orbax", line)
    return None


def _of_file(path: str) -> Recognised | None:
    with open(path, "rb") as file:
        head = file.read(_HEAD)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        tail = file.read(_TAIL)
    if head[8:9] == b"{":  # a damaged file of the format itself
        return None
    if head.startswith(b"PK\x03\x04"):
        return _of_archive(head, tail)
    if tail.endswith(b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"):
        return _of_tensorflow("path.removesuffix('.index')")
    if re.search(r"\.data-\d{5}-of-\d{5}$", path) and os.path.isfile(f"{_start(path)}.index"):
        return _of_tensorflow("path.rpartition('.data-')[0]")
    if head.startswith(b"model_checkpoint_path: "):
        return _of_tensorflow("tf.train.latest_checkpoint(os.path.dirname(path))")
    for begins, found in _BEGINNINGS:
        if begins(head):
            return found
    return None


def _of_archive(head: bytes, tail: bytes) -> Recognised | None:
    """Return whose a zip file is, by the names of its first member and of those in its end."""
    length = int.from_bytes(head[26:28], "little")
    first = head[30 : 30 + length]
    if first.endswith(b".npy"):
        return _NPZ
    if b"/constants.pkl" in tail:
        return _TORCHSCRIPT
    if first.endswith((b"/data.pkl", b"/.format_version", b"/byteorder")):
        return _TORCH
    return _KERAS if first in (b"metadata.json", b"config.json") else None


def _of_tensorflow(start: str) -> Recognised:
    return _TENSORFLOW._replace(line=_TENSORFLOW.line.format(start=start))


def _start(path: str) -> str:
    return path.rpartition(".data-")[0]


# ``torch.save`` before version 1.6 wrote a number first; protocol 2 is its default.
_BEGINNINGS: tuple[tuple[Callable[[bytes], object], Recognised], ...] = (
    (re.compile(rb"\x80.\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", re.DOTALL).match, _TORCH),
    (re.compile(rb"\x93NUMPY").match, _NPY),
    (re.compile(rb"\x89HDF\r\n\x1a\n").match, _HDF5),
    (re.compile(rb"\x12\x01\0{14}").match, _MXNET),
    (re.compile(rb"\x80[\x02-\x05][\x95c}\](\x8a\x8c\x8dXK]").match, _PICKLE),
    # A map whose first key is text, in msgpack.
    (re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa0-\xbf]|\xd9)", re.DOTALL).match, _FLAX),
)
