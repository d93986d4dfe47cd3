"""Replace a file atomically: whenever the writer dies, it is the old file or the new one.

The new file is written to a temporary file in the same folder. It is synchronised to the disk, then
renamed, and then the folder is synchronised. So a power loss, too, leaves the old file or the new
one.

A temporary file is named ``.<name>.<process>.<token>.d2ldev-partial``. Its writer locks it, and the
operating system releases the lock when the process ends, however it ends. The next writer into the
folder removes those that nobody has locked, and touches no file of any other name.

Held by ``tests/core/files/test_files_atomic.py``.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import fcntl
except ImportError:  # Windows, where no temporary file is removed
    fcntl = None  # type: ignore[assignment]

_SUFFIX = "d2ldev-partial"
_PARTIAL = re.compile(rf"\..+\.[0-9]+\.[0-9a-f]{{16}}\.{_SUFFIX}", re.DOTALL)


@contextmanager
def replacing(path: str) -> Iterator[int]:
    """Yield a file descriptor, and rename its file to ``path`` at the end of the block.

    If the block raises, ``path`` does not change, and the temporary file is removed.

    Args:
        path: the file to replace. A symbolic link is followed. The permissions of an existing
            file are kept.

    Raises:
        OSError: if the file cannot be created or written.
    """
    target = os.path.realpath(path)
    mode = _mode_of(target)
    folder, name = os.path.split(target)
    _remove_abandoned(folder)
    descriptor, temporary = _create(folder, name, mode)
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
            os.replace(temporary, target)
        finally:
            os.close(descriptor)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


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
    return stat.S_IMODE(status.st_mode)


def _create(folder: str, name: str, mode: int | None) -> tuple[int, str]:
    """Create a temporary file and lock it; return its descriptor and its path."""
    # Shortened, so that what stands around it fits into the limit of the file system.
    short = os.fsdecode(os.fsencode(name)[:200])
    while True:
        own = f"{os.getpid()}.{secrets.token_hex(8)}.{_SUFFIX}"
        temporary = os.path.join(folder, f".{short}.{own}")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
        descriptor = os.open(temporary, flags, 0o666 if mode is None else mode & 0o777)
        try:
            if fcntl is not None:
                # On a file system without locks, no other writer can lock and remove it either.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, mode)
            # Another writer may have removed it before it was locked.
            if os.fstat(descriptor).st_nlink:
                return descriptor, temporary
        except BaseException:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        os.close(descriptor)


def _remove_abandoned(folder: str) -> None:
    """Remove the temporary files of writers that were killed."""
    if fcntl is None:
        return
    with suppress(OSError):  # a folder may be writable and not readable
        for found in os.listdir(folder):
            if _PARTIAL.fullmatch(found):
                # It may be locked, belong to another user, or be gone already.
                with suppress(OSError):
                    _remove_if_unlocked(os.path.join(folder, found))


def _remove_if_unlocked(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
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
