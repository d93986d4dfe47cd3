"""Parameters in files: written on one device or framework, read on another.

Source: D2L, section 6.6, "File I/O".
"""

from __future__ import annotations

import os
from typing import Any

from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.operations.creation import Creation
from d2ldev.primitives import DeviceLike


class Saving(Creation):
    """The part of the contract that is about files."""

    def save(self, obj: Any, path: str | os.PathLike[str]) -> None:
        """Write a nesting into a file, all of it or nothing.

        Args:
            obj: a tensor, a model, an optimizer, a NumPy array, a number, text, None, bytes,
                or any nesting of them.
            path: of the file. One that is there is replaced in one step: whenever the process
                dies, it is the old one or the new one.

        The file is a safetensors file: other programs read its tensors, too. Gradients are not
        saved. What is one tensor in two places is written once, and is one tensor afterwards.

        Raises:
            UnsupportedValueError: if ``obj`` holds something else, whose place is named.
            CheckpointError: if the file cannot be written.
        """
        from d2ldev.files.save import save

        save(self, obj, as_path(path, "save"))  # type: ignore[arg-type]

    def load(self, path: str | os.PathLike[str], *, device: DeviceLike = "cpu") -> Any:
        """Read a nesting from a file.

        Args:
            path: of a file that ``save`` has written, with whatever backend, or of any other
                safetensors file, which is a dict from names to tensors.
            device: where the tensors are made, wherever they were.

        Returns:
            What was saved: containers of Python's own as their type; namedtuples and dataclasses
            too, if the program has imported their class and it has the same fields, else as a
            tuple and a dict; subclasses as what they are derived from. A model is a dict from the
            names of its tensors to tensors, and an optimizer a dict of its state: ``load_into``
            gives them back to a model.

        Raises:
            DeviceUnavailableError: before anything is read.
            CheckpointError: if there is no such file, it is damaged, or the framework lacks one of
                its dtypes.
            OutOfDeviceMemoryError: if the device's memory does not suffice.
        """
        target = self._existing(device, "load tensors")[0]
        from d2ldev.files.load import load

        return load(self, as_path(path, "load"), target)  # type: ignore[arg-type]

    def load_into(self, obj: Any, path: str | os.PathLike[str]) -> Any:
        """Read a file into a model, an optimizer, or a nesting of them and of tensors.

        Args:
            obj: what is like what was saved: with the same names, shapes and dtypes. Each tensor
                stays on the device where it is, and is filled in place where ``place`` would.
            path: of a file that ``save`` has written, with whatever backend, or of any other
                safetensors file, whose names are then those of ``named_tensors(obj)``.

        Returns:
            What to use from then on, as with ``place``: the model itself, and new containers
            for those in which a tensor, a number or text is another one now.

        The same layers in another framework have other names, and kernels that are turned. Where
        both are known, as in what ``mlp`` makes, they are converted; else the names and shapes
        have to be the same.

        Raises:
            CheckpointError: if the file cannot be read, or does not fit: with the names that are
                missing, unexpected, or of another shape or dtype. Nothing is changed then.
            UnsupportedValueError: if ``obj`` holds something that no file can.
            OutOfDeviceMemoryError: if the device's memory does not suffice for a second copy.
        """
        from d2ldev.files.load_into import load_into

        return load_into(self, obj, as_path(path, "load"))  # type: ignore[arg-type]


def as_path(path: object, verb: str) -> str:
    """A path as text.

    Raises:
        UnsupportedValueError: if it is none.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        text = ""
    if not text or "\0" in text:
        raise UnsupportedValueError(
            f"{verb} parameters",
            f"{describe(path)} is no path of a file",
            f"backend.{verb}(..., 'net.safetensors')",
        )
    return text
