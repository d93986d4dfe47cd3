"""Messages between two processes: JSON over TCP, each with its length before it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

from d2ldev.locks import Lock

_LENGTH = struct.Struct(">I")
_LONGEST = 1 << 26


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

    def fileno(self) -> int:
        """Return the number of the socket, for ``selectors``."""
        return self._socket.fileno()

    @property
    def here(self) -> str:
        """Return the address by which the other process reaches this one's machine."""
        return str(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        """Return the address of the other process's machine."""
        return str(self._socket.getpeername()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; any thread may.

        Raises:
            OSError: if the connection has ended, or the other process does not read.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Iterator[dict[str, Any]]:
        """Wait for data, and yield the messages that are complete; one thread may.

        Raises:
            OSError: if the connection has ended, or what came is no message.
        """
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("its connection ended")
        self._unread += data
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            if length > _LONGEST:
                raise OSError("it sent no message")
            end = _LENGTH.size + length
            if len(self._unread) < end:
                return
            text = bytes(self._unread[_LENGTH.size : end])
            del self._unread[:end]
            try:
                message = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise OSError("it sent no message") from error
            if not isinstance(message, dict):
                raise OSError("it sent no message")
            yield message

    def receive_one(self) -> dict[str, Any]:
        """Wait for the next message, before any thread uses ``receive``.

        Raises:
            OSError: as ``receive``, or after the timeout.
        """
        while True:
            for message in self.receive():
                return message

    def wait(self, timeout: float) -> None:
        """Let ``send`` and ``receive`` wait for so many seconds from now on."""
        self._socket.settimeout(max(timeout, 0.01))

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
