"""A file that is either the old one or the new one, whenever its writer dies.

The new one is written beside the old one under another name, brought to the disk, and given the
name in one step. What a writer that was killed has left behind is removed by the next one: a
writer keeps a lock on its file, which ends with the process, so that one that still writes is let
alone, whatever its process is called and wherever it runs on this machine.
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
except ImportError:  # Windows: nobody's file is known to be abandoned there
    fcntl = None  # type: ignore[assignment]

_TOKEN = "[0-9a-f]{16}"  # noqa: S105  # no password


@contextmanager
def replacing(path: str) -> Iterator[int]:
    """A file descriptor to write to; at the end of the block it is the file at ``path``.

    If the block raises, ``path`` is what it was, and nothing is left of the attempt.

    Args:
        path: a symbolic link is followed, and stays one. The permissions of a file that is
            there are kept.

    Raises:
        OSError: if there cannot be such a file, or it cannot be written.
    """
    target = os.path.realpath(path)
    mode = _mode_of(target)
    folder, name = os.path.split(target)
    _remove_abandoned(folder, name)
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
    """The permissions of the file that is to be replaced; None if there is none."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(status.st_mode):  # /dev/null, a pipe
        raise OSError(errno.EINVAL, "it is no regular file", target)
    return stat.S_IMODE(status.st_mode)


def _create(folder: str, name: str, mode: int | None) -> tuple[int, str]:
    while True:
        temporary = os.path.join(folder, f".{_short(name)}.{secrets.token_hex(8)}.partial")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
        descriptor = os.open(temporary, flags, 0o666 if mode is None else mode & 0o777)
        try:
            if fcntl is not None:
                # Where a file system knows no locks, nobody gets one to remove the file with.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, mode)
            # Before it had its lock, another writer may have taken it for abandoned.
            if os.fstat(descriptor).st_nlink:
                return descriptor, temporary
        except BaseException:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        os.close(descriptor)


def _short(name: str) -> str:
    """A name that is short enough to have something put before and behind it."""
    return os.fsdecode(os.fsencode(name)[:200])


def _remove_abandoned(folder: str, name: str) -> None:
    """Remove what writers of the same file have left behind that are no more."""
    if fcntl is None:
        return
    pattern = re.compile(re.escape(f".{_short(name)}.") + _TOKEN + re.escape(".partial"))
    with suppress(OSError):  # a folder that cannot be listed may still be written to
        for found in os.listdir(folder):
            if pattern.fullmatch(found):
                # One that is somebody else's, or gone meanwhile, is none of our business.
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
    """Bring the new name to the disk, where folders can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder that may be written to, and not listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to bring there
            raise
    finally:
        os.close(descriptor)
