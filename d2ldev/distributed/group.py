"""``PeerGroup``: the processes of a launch, which go on together or end together.

Every process is connected to rank 0, and a thread in each process gives signs of life. So a killed
process is noticed at once, and a stuck process after ``timeout`` seconds. This does not depend on
the framework's engine. The engine sends tensors; these connections do not.
"""

from __future__ import annotations

import atexit
import os
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from d2ldev.contract.group import Group
from d2ldev.distributed.sequence import DifferentError, Doings, Failure, describe_early_end
from d2ldev.distributed.wire import Connection
from d2ldev.errors import D2LDevError, PeerLostError, UnsupportedValueError, text_of
from d2ldev.locks import Lock
from d2ldev.settings import Peers

# The seconds that a process has for an error of its own after it is told of a failure. Then it is
# ended, because the call of an engine that waits for a lost process may never return.
GRACE = 2.0

# How many seconds at most rank 0 does not know what another process has done.
_TOLD_EVERY = 0.1


class PeerGroup(Group):
    """The processes of a launch: each has a connection to rank 0, and rank 0 has one to each.

    Args:
        peers: the message of the launcher.
        members: the host and the address of each process, by rank.
        connections: by rank. Rank 0 has one to each process, the others only to rank 0.
        timeout: the seconds without a heartbeat after which a process is lost.
    """

    def __init__(
        self,
        peers: Peers,
        members: Sequence[tuple[str, str]],
        connections: dict[int, Connection],
        timeout: float,
    ) -> None:
        self.rank, self.size, self.local_rank = peers.rank, peers.world_size, peers.local_rank
        self.hosts = [host for host, _ in members]
        self.addresses = [address for _, address in members]
        self.timeout = timeout
        self._connections = connections
        self._lock = Lock()
        self._news = threading.Event()  # something was gathered or has failed
        self._failed = threading.Event()
        self._doings = Doings(self.size)  # which rank 0 alone uses
        # The number of actions of this process, and the actions that rank 0 does not know yet.
        self._done = 0
        self._unsent: list[dict[str, Any]] = []
        # How many things rank 0 had done when it ended.
        self._end: int | None = None
        self._gathered: list[list[Any]] = []
        # How often ``stops`` has let this process pass. When a process wants to stop, rank 0 notes
        # how often each process had passed. It decides after how many passes all stop.
        self._passed = 0
        self._is_stopping = False
        self._passed_by: dict[int, int] = {}
        self._last: int | None = None
        self._failure: Failure | None = None
        self._label = "the beginning"
        self._working = 0
        self._has_left = False
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._thread = threading.Thread(target=self._watch, name="d2ldev peers", daemon=True)
        self._thread.start()
        atexit.register(self.leave)
        _groups.add(self)

    # -- together ---------------------------------------------------------------------------------

    def mark(self, label: str, content: str = "") -> None:
        self._do({"do": label, "content": content})
        self.check()

    def gather(self, label: str, value: Any = None, content: str = "") -> list[Any]:
        self._do({"do": label, "content": content, "gather": True, "value": value})
        self._wait_until(lambda: bool(self._gathered))
        return self._gathered.pop(0)

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        while True:
            with self._lock:
                if is_there():
                    return
                self.check()
                self._news.clear()
            self._news.wait(self.timeout)

    def stops(self, is_wanted: bool) -> bool:
        with self._lock:
            if is_wanted and not self._is_stopping:
                if self.rank:
                    self._send(0, {"stop": True})
                self._begin_to_stop()
            if not self._is_stopping:
                self._passed += 1
                return False
        # The others' threads answer, whatever their engines wait for.
        self._wait_until(lambda: self._last is not None)
        if self._passed == self._last:
            return True
        self._passed += 1
        return False

    def renew_stop(self) -> None:
        with self._lock:
            self._is_stopping, self._last = False, None
            self._passed_by.clear()

    def _begin_to_stop(self) -> None:
        """Wait until all processes know the place after which they stop."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self.rank:
            self._send(0, {"passed": self._passed})
        else:
            for other in self._connections:
                self._send(other, {"stop": True})
            self._note_passed(0, self._passed)

    def _note_passed(self, rank: int, passed: int) -> None:
        """Note how far a process is, at rank 0; tell all where to stop when it is known of all."""
        self._passed_by[rank] = passed
        if len(self._passed_by) == self.size:
            self._last = max(self._passed_by.values())
            for other in self._connections:
                self._send(other, {"last": self._last})
            self._news.set()

    def _do(self, doing: dict[str, Any]) -> None:
        with self._lock:
            self._done += 1
            self._label = doing["do"]
            self._compare_with_the_end()
            self.check()
            if self.rank == 0:
                self._note(0, [doing])
            else:
                self._unsent.append(doing)
                if "gather" in doing:
                    self._tell()

    def _tell(self) -> None:
        """Tell rank 0 what this process has done; from time to time, because that takes time."""
        with self._lock:
            if self._unsent:
                unsent, self._unsent = self._unsent, []
                self._send(0, {"did": unsent})

    def _compare_with_the_end(self) -> None:
        if self._end is not None and self._done > self._end:
            self._fail(Failure(describe_early_end(0, self.rank, self._label)))

    def check(self) -> None:
        if self._failure is not None:
            raise self._refusal(self._failure)

    @contextmanager
    def work(self) -> Iterator[None]:
        self.check()
        with self._lock:
            self._working += 1
        try:
            yield
        except BaseException as error:
            is_ours = isinstance(error, D2LDevError)
            if not is_ours:  # the engine may know of a lost process before the group does
                self._failed.wait(GRACE / 2)
            failure = self._failure
            if failure is not None and not is_ours and isinstance(error, Exception):
                raise self._refusal(failure) from error
            self.give_up(f"it ended with {type(error).__name__}: {text_of(error)}")
            raise
        finally:
            with self._lock:
                self._working -= 1

    def give_up(self, problem: str) -> None:
        self._lose(self.rank, problem)

    def make_lost_error(self, rank: int, problem: str) -> D2LDevError:
        return self._refusal(Failure(problem, rank))

    def leave(self) -> None:
        with self._lock:
            if self._has_left:
                return
            if self.rank == 0:
                self._note(0, (), has_ended=True)
            self._tell()
            self._has_left = True
            if self._failure is None:
                for rank in self._connections:
                    self._send(rank, {"bye": self._done})
                self._failure = Failure("it has left the others", self.rank)
        atexit.unregister(self.leave)

    def disown(self) -> None:
        """Close the connections in a forked process, which would hold them open after this one."""
        for connection in self._connections.values():
            connection.close()
        self._has_left = True
        self._failure = Failure("it is a copy of one of them, made by a fork", self.rank)

    # -- from one to another ----------------------------------------------------------------------

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        """Take a message; at rank 0 from any process, elsewhere from rank 0."""
        with self._lock:
            if "failed" in message:
                problem, lost = message["failed"]
                self._fail(Failure(str(problem), lost), but=rank)
            elif "gathered" in message:
                self._gathered.append(message["gathered"])
                self._news.set()
            elif "stop" in message:
                self._begin_to_stop()
            elif "passed" in message:
                self._note_passed(rank, int(message["passed"]))
            elif "last" in message:
                self._last = int(message["last"])
                self._news.set()
            elif self.rank == 0:
                self._note(rank, message.get("did", ()), has_ended="bye" in message)
            elif "bye" in message:
                self._end = int(message["bye"])
                self._compare_with_the_end()

    def _note(self, rank: int, did: Sequence[dict[str, Any]], *, has_ended: bool = False) -> None:
        """Note an action of a process at rank 0; tell all processes what it has gathered."""
        try:
            for doing in did:
                values = self._doings.add(rank, doing["do"], doing["content"], doing.get("value"))
                if values is not None and "gather" in doing:
                    for other in self._connections:
                        self._send(other, {"gathered": values})
                    self._gathered.append(values)
                    self._news.set()
            if has_ended:
                self._doings.leave(rank)
        except DifferentError as error:
            self._fail(Failure(str(error)))

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        try:
            self._connections[rank].send(message)
        except TimeoutError:
            self._lose(rank, f"it has read nothing for {self.timeout:g} s")
        except OSError:
            pass  # the thread that reads notices it, and reads earlier messages

    def _lose(self, rank: int, problem: object) -> None:
        self._fail(Failure(text_of(problem), rank))

    def _fail(self, failure: Failure, but: int | None = None) -> None:
        """Note that the group cannot go on, and tell the others, but one."""
        # To the end under the lock, so that this process does not leave before all are told.
        with self._lock:
            if self._failure is not None or self._has_left:
                return
            self._failure = failure
            # The lost one last, if it is there: it may have been stopped, and go on.
            for rank in sorted(self._connections, key=lambda each: each == failure.rank):
                if rank != but:
                    self._send(rank, {"failed": [failure.problem, failure.rank]})
            self._failed.set()
            self._news.set()

    def _refusal(self, failure: Failure) -> D2LDevError:
        attempted = f"train in {self.size} processes"
        if failure.rank is None:
            return UnsupportedValueError(
                attempted,
                f"they do not do the same: {failure.problem}",
                "start one program on all machines, with the same data, model, versions and seeds",
            )
        host = self.hosts[failure.rank]
        return PeerLostError(
            attempted,
            f"rank {failure.rank} on {host} is lost: {failure.problem}. Rank {self.rank} on "
            f"{self.hosts[self.rank]} was at {self._label}",
            "start the program again: fit(..., checkpoint='run.safetensors', resume=True) goes on "
            "from the last epoch. d2ldev launch --restarts 3 starts it by itself",
        )

    # -- in the thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        period = min(self.timeout / 10, 1.0)
        next_beat = time.monotonic()
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while not self._has_left or self._working:
                for key, _ in selector.select(_TOLD_EVERY):
                    self._read(selector, key.fileobj, key.data)  # type: ignore[arg-type]
                self._tell()
                now = time.monotonic()
                if now >= next_beat:
                    self._beat(now, was_stopped=now - next_beat > self.timeout / 2)
                    next_beat = now + period
                if self._failure is not None:
                    deadline = deadline or now + GRACE
                    if self._working and now > deadline:
                        self._end_process(self._failure)
        for connection in self._connections.values():
            connection.close()

    def _read(self, selector: selectors.BaseSelector, source: Connection, rank: int) -> None:
        try:
            for message in source.receive():
                self._heard[rank] = time.monotonic()
                self._take(rank, message)
        except TimeoutError:
            pass
        except (OSError, TypeError, ValueError, KeyError, IndexError) as error:
            selector.unregister(source)
            self._heard.pop(rank, None)
            if not self._note_exit(rank):
                self._lose(rank, error)

    def _note_exit(self, rank: int) -> bool:
        return rank in self._doings.left if self.rank == 0 else self._end is not None

    def _beat(self, now: float, *, was_stopped: bool) -> None:
        for rank in self._connections:
            self._send(rank, {"beat": True})
        for rank, heard in list(self._heard.items()):
            if was_stopped:  # this process itself was, and the others could not be heard
                self._heard[rank] = now
            elif now - heard > self.timeout and not self._note_exit(rank):
                del self._heard[rank]
                self._lose(rank, f"it has given no sign for {self.timeout:g} s")

    def _end_process(self, failure: Failure) -> None:
        """End a process whose engine waits for one that is lost, and may never return."""
        error = self._refusal(failure)
        text = f"{type(error).__module__}.{type(error).__name__}: {error}\n"
        for stream, last in ((sys.stdout, ""), (sys.stderr, text)):
            # A write that no process reads may wait forever.
            writer = threading.Thread(target=_write, args=(stream, last), daemon=True)
            writer.start()
            writer.join(GRACE / 4)
        os._exit(1)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:  # None without a terminal
        with suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


_groups: weakref.WeakSet[PeerGroup] = weakref.WeakSet()


def _disown() -> None:
    for group in list(_groups):
        group.disown()


if hasattr(os, "register_at_fork"):
    # A forked process, such as one of a loader, is not to hold the connections open.
    os.register_at_fork(after_in_child=_disown)
