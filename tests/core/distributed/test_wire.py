"""Messages between two processes arrive whole and in order, or not at all."""

import json
import socket
import struct
import threading
import time

import pytest

from d2ldev.distributed.wire import Connection


@pytest.fixture
def pair():
    """Two connections over TCP, of which the first one waits for half a second only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Connection(socket.create_connection(server.getsockname()), 0.5)
        other = Connection(server.accept()[0], 5)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw():
    """A connection, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other = Connection(server.accept()[0], 5)
    yield one, other
    one.close()
    other.close()


def pack(value):
    data = json.dumps(value).encode()
    return struct.pack(">I", len(data)) + data


def receive(connection, number):
    found = []
    while len(found) < number:
        found += connection.receive()
    return found


def test_messages_arrive_in_order_however_they_are_cut(raw):
    one, other = raw
    messages = [{"n": i, "x": "y" * i} for i in range(50)]
    data = b"".join(map(pack, messages))

    def send():
        for i in range(0, len(data), 7):
            one.sendall(data[i : i + 7])

    thread = threading.Thread(target=send)
    thread.start()
    assert receive(other, 50) == messages
    thread.join()


def test_many_threads_may_send_at_once(pair):
    one, other = pair
    threads = [
        threading.Thread(target=lambda i=i: [one.send({"n": i, "x": "y" * 999}) for _ in range(50)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    assert sorted(each["n"] for each in receive(other, 200)) == sorted([*range(4)] * 50)
    for thread in threads:
        thread.join()


def test_waiting_for_one_message_leaves_the_next_one(raw):
    one, other = raw
    one.sendall(pack({"n": 1}) + pack({"n": 2}))
    one.shutdown(socket.SHUT_WR)
    assert other.receive_one(time.monotonic() + 5) == {"n": 1}
    assert receive(other, 1) == [{"n": 2}]
    with pytest.raises(ConnectionResetError):
        receive(other, 1)


def test_waiting_for_a_message_ends_at_the_deadline(raw):
    one, other = raw
    stop = threading.Event()

    def drip():
        while not stop.wait(0.05):
            one.sendall(b"\0")  # of a message of 16 MiB

    one.sendall(b"\1\0\0\0")
    thread = threading.Thread(target=drip)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        other.receive_one(begin + 0.3)
    assert time.monotonic() - begin < 30
    stop.set()
    thread.join()


def test_nothing_follows_a_message_that_was_cut_off(pair):
    """The other process would take it for the rest of that message."""
    one, other = pair
    with pytest.raises(TimeoutError):
        one.send({"x": "y" * (1 << 26)})
    data = other.receive()
    assert list(data) == []
    with pytest.raises(BrokenPipeError):
        one.send({"x": 1})


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1{", b"\0\0\0\1\xff", b"\0\0\0\0"]
)
def test_an_invalid_message_is_an_error(raw, data):
    one, other = raw
    one.sendall(data)
    with pytest.raises(OSError, match="not a message"):
        receive(other, 1)


def test_a_message_may_be_bounded(raw):
    one, other = raw
    one.sendall(pack({"x": "y" * 100}))
    with pytest.raises(OSError, match="not a message"):
        list(other.receive(64))
