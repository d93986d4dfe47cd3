"""Messages between two processes: JSON over TCP, each with its length before it."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from d2ldev.locks import Lock

_LENGTH = struct.Struct(">I")
_LONGEST = 1 << 30
_NO_MESSAGE = "it sent bytes that are not a message"


class Connection:
    """A connection to another process.

    Args:
        connected: the socket, which belongs to it from now on.
        timeout: how many seconds ``send`` waits for the other process to read.
    """

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        connected.settimeout(timeout)
        # A message is small, and waits for no other.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._lock = Lock()
        self._unread = bytearray()
        self._is_broken = False

    def fileno(self) -> int:
        """Return the number of the socket, for ``selectors``."""
        return self._socket.fileno()

    @property
    def there(self) -> str:
        """Return the address of the other process's machine."""
        return str(self._socket.getpeername()[0])

    @property
    def here(self) -> str:
        """Return the address of this machine, as the other process has reached it."""
        return str(self._socket.getsockname()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; any thread may.

        Raises:
            OSError: if the connection has ended, or the other process does not read. Every later
                call raises it, too, because the other process may have got half of a message.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            if self._is_broken:
                raise BrokenPipeError("a message to it was cut off")
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError:
                self._is_broken = True
                raise

    def receive(self, longest: int = _LONGEST) -> Iterator[dict[str, Any]]:
        """Wait for data, and yield the messages that are complete; one thread may.

        Args:
            longest: how many bytes a message may have.

        Raises:
            OSError: if the connection has ended, or what came is not a message.
        """
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("its connection ended")
        self._unread += data
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            if length > longest:
                raise OSError(_NO_MESSAGE)
            end = _LENGTH.size + length
            if len(self._unread) < end:
                return
            text = bytes(self._unread[_LENGTH.size : end])
            del self._unread[:end]
            yield _message(text)

    def receive_one(self, deadline: float) -> dict[str, Any]:
        """Wait for the next message, and read nothing of those after it.

        Args:
            deadline: how long, in the time of ``time.monotonic``.

        Raises:
            OSError: as ``receive``, or after the deadline.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > _LONGEST:
            raise OSError(_NO_MESSAGE)
        return _message(self._exactly(length, deadline))

    def _exactly(self, number: int, deadline: float) -> bytes:
        data = bytearray()
        before = self._socket.gettimeout()
        try:
            while len(data) < number:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.01))
                more = self._socket.recv(min(number - len(data), 1 << 16))
                if not more:
                    raise ConnectionResetError("its connection ended")
                data += more
        finally:
            self._socket.settimeout(before)
        return bytes(data)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _message(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OSError(_NO_MESSAGE) from error
    if not isinstance(message, dict):
        raise OSError(_NO_MESSAGE)
    return message
