"""Replace a file atomically: whenever the writer dies, it is the old file or the new one.

The new file is written in a temporary folder beside the old one. It is synchronised to the disk,
then renamed, and then the folder around it is synchronised. So a power loss, too, leaves the old
file or the new one.

A temporary folder is named ``.<name>.<process>.<token>.d2ldev-partial``. Its writer locks it, and
the operating system releases the lock when the process ends, however it ends. The next writer
removes the unlocked ones, and touches no file of another name.

Held by ``tests/core/files/test_files_atomic.py``.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import fcntl
except ImportError:  # Windows, where no temporary folder is removed
    fcntl = None  # type: ignore[assignment]

_SUFFIX = "d2ldev-partial"
_PARTIAL = re.compile(rf"\..+\.[0-9]+\.[0-9a-f]{{16}}\.{_SUFFIX}", re.DOTALL)


@contextmanager
def replace_file(path: str) -> Iterator[str]:
    """Yield the path where the block writes a new file, which replaces ``path`` at its end.

    If the block raises, ``path`` does not change, and the new file is removed.

    Args:
        path: the file to replace. A symbolic link is followed. The permissions of an existing
            file are kept.

    Raises:
        OSError: if the file cannot be created or written.
    """
    target = os.path.realpath(path)
    mode = _mode_of(target)
    around, name = os.path.split(target)
    _remove_abandoned(around)
    folder, lock = _create(around, name)
    try:
        new = os.path.join(folder, "new")
        yield new
        descriptor = os.open(new, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            # A new file gets what its folder has got by the user's mask.
            os.chmod(new, os.stat(folder).st_mode & 0o666 if mode is None else mode)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(new, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    _sync_folder(around)


def _mode_of(target: str) -> int | None:
    """Return the permissions of the file to replace; None if there is no file."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(status.st_mode):  # /dev/null, a pipe
        raise OSError(errno.EINVAL, "it is not a regular file", target)
    return stat.S_IMODE(status.st_mode) & 0o777


def _create(around: str, name: str) -> tuple[str, int | None]:
    """Create a temporary folder and lock it; return its path and the descriptor of the lock."""
    # Shortened, so that what stands around it fits into the limit of the file system.
    short = os.fsdecode(os.fsencode(name)[:200])
    while True:
        own = f".{short}.{os.getpid()}.{secrets.token_hex(8)}.{_SUFFIX}"
        folder = os.path.join(around, own)
        os.mkdir(folder)
        if fcntl is None:
            return folder, None
        # Another writer may remove it before it is locked.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            # On a file system without locks, no other writer can lock and remove it either.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(folder):
                return folder, lock
            os.close(lock)


def _remove_abandoned(around: str) -> None:
    """Remove the temporary folders of writers that were killed."""
    if fcntl is None:
        return
    with suppress(OSError):  # a folder may be writable and not readable
        for found in os.listdir(around):
            if _PARTIAL.fullmatch(found):
                # It may be locked, belong to another user, or be gone already.
                with suppress(OSError):
                    _remove_if_unlocked(os.path.join(around, found))


def _remove_if_unlocked(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _sync_folder(folder: str) -> None:
    """Synchronise the new name to the disk, where folders can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # the folder is writable and not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot synchronise folders
            raise
    finally:
        os.close(descriptor)
