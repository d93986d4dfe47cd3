"""Follow what d2ldev says of a file of another program, as a user would."""

import pytest

from d2ldev import CheckpointError


def convert(backend, path, monkeypatch, **names):
    """Run the line of the error in the file's folder, and return the path of the new file.

    Args:
        backend: the one that is asked to load it.
        path: of the file or folder.
        names: what the line speaks of: ``net``, and modules.
    """
    with pytest.raises(CheckpointError) as caught:
        backend.load(path)
    line, _, rest = caught.value.fix.partition("; then give ")
    assert rest == "'new.safetensors'"
    monkeypatch.chdir(path.parent)
    exec(line, {"backend": backend, "path": str(path), **names})
    return path.parent / "new.safetensors"
