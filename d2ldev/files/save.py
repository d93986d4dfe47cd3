"""``save``: write a nesting into one file, all of it or nothing."""

from __future__ import annotations

import os
from typing import Any

from d2ldev.contract import Framework
from d2ldev.device import CPU
from d2ldev.errors import CheckpointError, OutOfDeviceMemoryError, warn
from d2ldev.files.format.atomic import replace_file
from d2ldev.files.format.container import FileError, check_files, make_file
from d2ldev.files.structure import Structure
from d2ldev.operations.arguments import as_path

_SHOWN = 3
"""How many names a warning has."""


def save(framework: Framework, obj: Any, path: Any) -> None:
    """Write a nesting; see ``Backend.save``."""
    path = as_path(path, "save")
    attempted = f"save to {path}"
    check_files(attempted)
    try:
        structure = Structure(framework, obj, attempted)
        text = structure.to_json()
        # The operating system finds no path in "file/../other", which ``replace_file`` would.
        os.stat(os.path.dirname(path) or os.curdir)
        with replace_file(path) as new:
            make_file(structure.arrays, text, new)
    except OutOfDeviceMemoryError:
        raise
    except MemoryError as error:
        raise OutOfDeviceMemoryError(
            attempted,
            f"the host has no memory for a copy: {error}",
            "save the values of the object in files of their own; the old file is as it was",
            [CPU],
        ) from error
    except (OSError, FileError) as error:
        raise CheckpointError(
            attempted,
            getattr(error, "strerror", None) or str(error),
            "save to a folder that exists, has space, and may be written to; the old file is as "
            "it was",
        ) from error
    if structure.unsaved:
        warn(
            f"{path} has no {' and no '.join(structure.unsaved)}. fix: save it beside the "
            "file, and make the model with it before load_into"
        )
    for cls, names in structure.hidden.items():
        few = ", ".join(names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warn(
            f"{path} has no {few}{more}: the state_dict() of the {cls} does not show it. fix: "
            f"define state_dict() and load_state_dict() in {cls}, unless it never changes"
        )


def to_bytes(framework: Framework, obj: Any) -> bytes:
    """Return what ``save`` writes of a small nesting, for another process."""
    attempted = "send an object to another process"
    structure = Structure(framework, obj, attempted)
    return make_file(structure.arrays, structure.to_json())
