"""MXNet's engine between processes: parameter servers, which add up arrays.

Each server is a process of its own. So is the scheduler, which connects workers and servers:
https://mxnet.apache.org/versions/1.9.1/api/faq/distributed_training.html
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import cache
from operator import is_not
from typing import TYPE_CHECKING, Any

import numpy as np

from d2ldev import UnsupportedValueError
from d2ldev_mxnet.framework import NumPySemantics, mx

if TYPE_CHECKING:
    from d2ldev.framework import Group

# ps-lite finds the other processes with these variables. d2ldev sets them from its own launch.
_VARIABLES = (
    "DMLC_ROLE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_NUM_SERVER",
    "DMLC_NUM_WORKER",
    "DMLC_NODE_HOST",
    "DMLC_INTERFACE",
)
# With a DMLC_ROLE, the import of MXNet serves, and never returns. The pipe ends together with the
# parent process, whatever ends it.
_SERVING = """
import os, signal, sys, threading
def end_with_the_pipe():
    sys.stdin.buffer.read()
    os._exit(0)
threading.Thread(target=end_with_the_pipe, daemon=True).start()
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = sys.argv[1:]
import d2ldev_mxnet.framework
"""


class Servers:
    """The servers of a group, and this process as one of their workers.

    There is one on each machine, so that all machines share what is sent.

    Args:
        group: all of its processes make theirs at the same time.

    Raises:
        UnsupportedValueError: if the program has variables of another launch of MXNet's.
    """

    def __init__(self, group: Group) -> None:
        _check_environment(group)
        self._group = group
        self._keys: dict[Any, int] = {}
        self._sent: list[Any] = []
        self._pipes: list[Any] = []
        serves = group.local_rank == 0
        port = group.addresses[0].rpartition(":")[2]
        first, own = _addresses(group)
        variables = {
            "DMLC_PS_ROOT_URI": first,
            "DMLC_PS_ROOT_PORT": port,
            "DMLC_NUM_SERVER": str(sum(group.gather("MXNet's servers", serves))),
            "DMLC_NUM_WORKER": str(group.size),
            "DMLC_NODE_HOST": own,
        }
        if group.rank == 0:
            self._start("scheduler", variables)
        if serves:
            self._start("server", variables)
        os.register_at_fork(after_in_child=self._disown)
        self._store = _make(variables)
        atexit.register(self._close)

    def keys(self, arrays: Sequence[Any]) -> list[int]:
        """Return a key for each of some arrays, by which ``add_up`` knows them.

        All processes call it with arrays of the same shapes and dtypes, and wait for each other.
        Arrays of the next call may have the same keys.
        """
        numbers: Counter[Any] = Counter()
        new, keys = {}, []
        for x in arrays:
            kind = x.shape, x.dtype
            name = *kind, numbers[kind]
            numbers[kind] += 1
            if name not in self._keys:
                self._keys[name] = key = len(self._keys)
                # Parameters may be in another layout: see ``spread``.
                new[key] = mx.np.zeros(x.shape, x.dtype, ctx=mx.cpu())
            keys.append(self._keys[name])
        if new:
            self._store.init(list(new), list(new.values()))
        return keys

    def add_up(self, keys: list[int], arrays: list[Any]) -> None:
        """Give arrays their sums over all processes, without waiting for them.

        A server takes a second array of a process under a key for that of another process. So one
        array has a key until it has its sum, and MXNet lets nothing else happen to it.
        """
        if len(arrays) != len(self._sent) or any(map(is_not, arrays, self._sent)):
            self.wait()
            self._sent = arrays
        if arrays:
            self._store.pushpull(keys, arrays)

    def wait(self) -> None:
        """Wait until arrays have their sums."""
        for x in self._sent:
            x.wait_to_read()

    def spread(self, arrays: Sequence[Any]) -> None:
        """Give arrays the values that they have in rank 0, and wait for them."""
        with NumPySemantics(), mx.autograd.pause():
            given = [x for x in arrays if x.size]
            sent = []
            for x in given:
                # oneDNN keeps weights of convolutions in a layout of its own, which no server
                # takes. And servers add up floats only.
                dtype = x.dtype if np.dtype(x.dtype).kind == "f" else "float64"
                values = np.zeros(x.shape) if self._group.rank else x.asnumpy()
                sent.append(mx.np.array(values, dtype=dtype, ctx=mx.cpu()))
            self.add_up(self.keys(sent), sent)
            for x, value in zip(given, sent, strict=True):
                # The states of an optimizer may be MXNet's old arrays.
                value.astype(x.dtype).as_nd_ndarray().copyto(x.as_nd_ndarray())
            self.wait()

    # -- servers ----------------------------------------------------------------------------------

    def _start(self, role: str, variables: dict[str, str]) -> None:
        # ps-lite takes a PORT for its own.
        inherited = {name: value for name, value in os.environ.items() if name != "PORT"}
        process = subprocess.Popen(  # noqa: S603  # this Python
            [sys.executable, "-c", _SERVING, *sys.path],
            env={**inherited, **variables, "DMLC_ROLE": role},
            stdin=subprocess.PIPE,
        )
        self._pipes.append(process.stdin)

        def watch() -> None:
            status = process.wait()
            self._group.give_up(f"MXNet's {role} has ended with status {status}")

        threading.Thread(target=watch, name=f"d2ldev {role}", daemon=True).start()

    def _disown(self) -> None:
        """Close the pipes in a forked process, which would hold them open after this one."""
        for pipe in self._pipes:
            pipe.close()
        atexit.unregister(self._close)

    def _close(self) -> None:
        """Leave MXNet's engine, without waiting for the other processes."""
        mx.base.check_call(mx.base._LIB.MXKVStoreFree(self._store.handle))
        self._store.handle = mx.base.KVStoreHandle()  # which it would free again


@cache
def servers_of(group: Group) -> Servers:
    """Return the servers of a group, which are started once, by all of its processes."""
    return Servers(group)


def _make(variables: dict[str, str]) -> Any:
    """Return a store that is connected to the servers."""
    # MXNet's threads read the environment in their computations, and crash if it changes then.
    mx.npx.waitall()
    port = os.environ.pop("PORT", None)
    os.environ.update(variables, DMLC_ROLE="worker")
    try:
        store = mx.kv.create("dist_sync")
    finally:
        # Nothing reads them later, and the program's own child processes must not see them.
        for name in ("DMLC_ROLE", *variables):
            del os.environ[name]
        os.unsetenv("DMLC_RANK")  # which ps-lite has set
        if port is not None:
            os.environ["PORT"] = port
    # Otherwise a process waits for all others at its end, also for lost ones.
    mx.base.check_call(mx.base._LIB.MXKVStoreSetBarrierBeforeExit(store.handle, 0))
    return store


def _check_environment(group: Group) -> None:
    given = [name for name in _VARIABLES if name in os.environ]
    if given:
        raise UnsupportedValueError(
            f"start MXNet's servers for {group.size} processes",
            f"{given[0]} is set to {os.environ[given[0]]!r}, by another launch",
            f"unset {' '.join(given)}: d2ldev starts the scheduler and the servers by itself",
        )


def _addresses(group: Group) -> tuple[str, str]:
    """Return the numeric addresses of rank 0 and of this process."""
    hosts = [address.rpartition(":")[0] for address in group.addresses]
    first, own = socket.gethostbyname(hosts[0]), hosts[group.rank]
    is_with_first = group.rank == 0 or own.startswith("127.")
    return first, first if is_with_first else own
