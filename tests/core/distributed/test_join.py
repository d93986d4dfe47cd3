"""Processes find each other, or say why not, on every rank and in bounded time."""

import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
from ports import free_port

from d2ldev.distributed import join
from d2ldev.errors import PeerLostError, UnsupportedValueError
from d2ldev.settings import Peers

PROGRAM = {"backend": "reference"}
SOON = 25.0  # seconds; a machine with other work takes some of them
"""Seconds: more than the patience of those who wait in vain, because the machine may be busy."""
LONG = 20.0
"""Seconds that nobody is to be held up."""


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(join, "PATIENCE", 1.0)


def meet(ranks, size=None, port=None, programs=None, sizes=None, address="127.0.0.1", timeout=1.0):
    """Let ranks meet, each in a thread; what each got, a group or an error, by rank."""
    size = size or len(ranks)
    port = port or free_port()
    found = {}

    def come(number, rank):
        peers = Peers(rank, (sizes or {}).get(rank, size), rank, size, address, port)
        try:
            found[number] = join.meet(peers, (programs or {}).get(rank, PROGRAM), timeout)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=come, args=each) for each in enumerate(ranks)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    seconds = time.monotonic() - begin
    return [found[number] for number in range(len(ranks))], seconds


def leave(groups):
    for group in groups:
        group.leave()


def test_a_free_port_is_outside_of_the_systems_ephemeral_range():
    with socket.socket() as given:
        given.bind(("", 0))
        own = given.getsockname()[1]
    assert free_port() < 30000 < own


@pytest.mark.parametrize("taken", [1, 2])
def test_nothing_listens_at_a_free_port(monkeypatch, taken):
    servers = [socket.create_server(("", 0)) for _ in range(2)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers[taken:]:
        server.close()
    monkeypatch.setattr(join, "_PORTS", ports)
    assert free_port() not in ports[:taken]
    for server in servers[:taken]:
        server.close()


@contextmanager
def begin_at(port, size=2):
    """Let rank 0 wait for the others; yields a list, which has its group or its error at last."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(meet([0], size, port, timeout=LONG)[0]))
    thread.start()
    try:
        yield found
    finally:
        thread.join(30)


def call(port, data=b""):
    """Call a port as soon as somebody listens, and send data; the socket."""
    for _ in range(400):
        try:
            caller = socket.create_connection(("127.0.0.1", port), 5)
            break
        except OSError:
            time.sleep(0.005)
    with suppress(OSError):  # the other side has read enough
        caller.sendall(data)
    return caller


def hello_of(rank, size):
    program = {**PROGRAM, "program": os.path.basename(sys.argv[0]), "launch": ""}
    return {"d2ldev": program, "rank": rank, "size": size, "host": "other", "port": 1}


def message(value):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack(">I", len(data)) + data


def test_all_know_all_hosts_and_an_address_of_each():
    groups, _ = meet([0, 1, 2])
    hosts = [socket.gethostname()] * 3
    try:
        assert [group.hosts for group in groups] == [hosts] * 3
        assert len({tuple(group.addresses) for group in groups}) == 1
        assert len({*groups[0].addresses}) == 3
        assert all(each.startswith("127.0.0.1:") for each in groups[0].addresses)
    finally:
        leave(groups)


def test_early_processes_wait():
    groups, _ = meet([2, 1, 0])
    leave(groups)
    assert [group.rank for group in groups] == [2, 1, 0]


STRANGERS = {
    "says nothing": b"",
    "says half a length": b"\0\0",
    "says half a message": message({"rank": 1})[:-2],
    "says rubbish": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "has a message of 4 GiB": b"\xff\xff\xff\xff" + bytes(1000),
    "has a message of 1 MiB": struct.pack(">I", 1 << 20) + bytes(1 << 16),
    "says no JSON": message(b"\xff{]"),
    "says deep JSON": message(b"[" * 50_000),
    "says a long number": message(b"9" * 50_000),
    "says a list": message([1]),
    "says an empty message": message(b""),
    "says nothing of itself": message({}),
    "says other types": message({"d2ldev": [], "rank": "1", "size": None, "host": 1, "port": {}}),
    "has no size": message({"d2ldev": PROGRAM, "rank": 1, "host": "h", "port": 1}),
    "has a rank of true": message(
        {"d2ldev": PROGRAM, "rank": True, "size": 2, "host": "h", "port": 1}
    ),
}


def test_strangers_are_ignored_and_do_not_delay_the_join():
    port = free_port()
    with begin_at(port) as first, ExitStack() as stack:
        for data in STRANGERS.values():
            stack.enter_context(call(port, data))
            call(port, data).close()
        groups, seconds = meet([1], 2, port, timeout=LONG)
    leave([*groups, *first])
    assert seconds < SOON


def test_a_slow_stranger_does_not_delay_the_join():
    port = free_port()
    is_over = threading.Event()

    def drip():
        with call(port) as caller, suppress(OSError):
            for byte in message({"rank": 1, "size": 2, "d2ldev": PROGRAM}):
                caller.sendall(bytes([byte]))
                if is_over.wait(0.1):
                    return

    with begin_at(port) as first:
        dripping = threading.Thread(target=drip)
        dripping.start()
        time.sleep(0.5)
        groups, seconds = meet([1], 2, port, timeout=LONG)
        is_over.set()
        dripping.join()
    leave([*groups, *first])
    assert seconds < SOON


def check_all(errors, kind, *texts):
    for error in errors:
        assert type(error) is kind, error
        for text in texts:
            assert text in str(error), error


def test_all_processes_name_a_missing_rank():
    errors, seconds = meet([0, 1], 3)
    check_all(errors, PeerLostError, "these have not come: 2", "--node-rank")
    assert seconds < SOON


def test_all_processes_name_a_missing_rank_0():
    errors, seconds = meet([1, 2], 3)
    check_all(errors, PeerLostError, "rank 0 does not answer", "--address")
    assert seconds < SOON


@pytest.mark.parametrize("address", ["no-such-host.invalid", "", "x" * 300, "a..b"])
def test_a_host_that_cannot_be_found_is_an_error_in_bounded_time(address):
    errors, seconds = meet([1], 2, address=address)
    check_all(errors, PeerLostError, "rank 0 does not answer")
    assert seconds < 2 * SOON  # its name may be asked for


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", message({}), message({"welcome": 3})])
def test_another_program_that_listens_there_is_an_error(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve():
            connection = server.accept()[0]
            connection.sendall(answer)
            connection.recv(10)
            time.sleep(0.1 if answer else 4)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        errors, seconds = meet([1], 2, port)
        thread.join()
    check_all(errors, PeerLostError, "rank 0 does not answer")
    assert seconds < 2 * SOON


def test_two_world_sizes_are_an_error_on_both():
    errors, seconds = meet([0, 1], sizes={1: 3})
    check_all(errors, UnsupportedValueError, "rank 0 has WORLD_SIZE=2, and rank 1 3")
    assert seconds < SOON


def test_other_versions_or_another_framework_are_an_error_on_all():
    other = {"backend": "torch", "python": "3.9"}
    errors, seconds = meet([0, 1], programs={1: other})
    check_all(
        errors,
        UnsupportedValueError,
        "rank 0 has backend 'reference', python None, and rank 1 backend 'torch', python '3.9'",
    )
    assert seconds < SOON


def test_early_processes_learn_which_process_does_not_fit():
    port = free_port()
    with begin_at(port, 3) as first, call(port, message(hello_of(1, 3))) as waiting:
        errors, _ = meet([2], 3, port, programs={2: {"backend": "other"}})
        answer = waiting.recv(1 << 16)
    assert b"rank 2 backend 'other'" in answer
    check_all([*errors, *first], UnsupportedValueError, "rank 2 backend 'other'")


def test_two_programs_under_one_address_are_an_error_of_the_second_rank_0():
    port = free_port()
    with begin_at(port) as first:
        call(port).close()  # it listens
        errors, seconds = meet([0], 2, port)
        groups, _ = meet([1], 2, port)
    leave([*groups, *first])
    check_all(errors, UnsupportedValueError, f"cannot listen at port {port}", "MASTER_PORT")
    assert seconds < SOON


def test_a_rank_that_comes_twice_is_an_error_on_all():
    errors, seconds = meet([0, 1, 1], 3)
    check_all(errors, UnsupportedValueError, "rank 1 came twice")
    assert seconds < SOON


def test_a_process_that_is_gone_before_all_have_come_is_lost():
    port = free_port()
    with begin_at(port, 3) as first:
        call(port, message(hello_of(1, 3))).close()
    check_all(first, PeerLostError, "rank 1 on other is lost")


def test_the_port_is_free_again_at_once():
    port = free_port()
    for _ in range(3):
        groups, _ = meet([0, 1], port=port)
        assert [group.rank for group in groups] == [0, 1]
        leave(groups)
