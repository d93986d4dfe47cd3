"""Several GPUs of this machine where each one needs a process: ``fit`` starts them for its length.

They train as the processes of a launch do. What rank 0 has learned comes back as the state of a
run, from which this process goes on.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO, NamedTuple

from d2ldev._backend import Backend, framework_of
from d2ldev.areas.parallel import first_failure
from d2ldev.device import gpus_in_words
from d2ldev.errors import PeerLostError, UnsupportedValueError, text_of
from d2ldev.settings import BACKEND, VIRTUAL_GPUS, Peers
from d2ldev.training.interruption import Interruption, shield_processes
from d2ldev.training.order import check_random_states, random_states

# Seconds that the other processes have to end by themselves after one has failed.
PATIENCE = 5.0

# Not "fork": a driver does not go on in a copy of the process that has begun to use it.
START_METHOD = "spawn"

# What IPython runs as a program, and Python cannot import.
_OF_IPYTHON = (".ipynb", ".ipy")

_BEGUN = b"begun"
# That the run ended because somebody had set ``should_stop``, and that this process has set it.
_STOPPED, _STOP = b"stopped", b"stop"

# Seconds between two looks whether the run is to end.
_PERIOD = 0.1

# Where this process, which ``fit`` has started, leaves what it has learned.
_result: Path | None = None


def result() -> Path | None:
    """Return the file for the state of a run in a process that ``fit`` has started."""
    return _result


class Outcome(NamedTuple):
    """How processes have ended that ``fit`` has started.

    Args:
        state: the file with the state of the run.
        error: what was raised in a process, where it can be sent; else a ``RuntimeError``; a
            ``PeerLostError`` if one has ended.
    """

    state: Path
    error: BaseException | None


@contextmanager
def train_in_processes(
    trainer: Any, operands: Sequence[Any], settings: Mapping[str, Any], interruption: Interruption
) -> Iterator[Outcome]:
    """Train in a process for each of a trainer's GPUs; give the state of the run to a block.

    Args:
        trainer: whose ``fit`` is called in each, with one GPU. Its ``should_stop`` ends the run.
        operands, settings: the arguments of ``fit``, by position and by name.
        interruption: Ctrl-C, which ends the run, too.

    Raises:
        UnsupportedValueError: if something cannot be sent to another process.
        BaseException: what was raised in a process before the run has a state.
    """
    number = len(trainer.gpus)
    with tempfile.TemporaryDirectory(prefix="d2ldev-") as folder:
        try:
            # In one pickle, so that an optimizer keeps its model.
            states = random_states(framework_of(trainer.backend), trainer.device)
            work = (trainer, operands, settings, states)
            with open(Path(folder, "work"), "wb") as file:
                _Pickler(trainer.backend, file).dump(work)
        except Exception as error:  # pickle raises many kinds
            name = _unsendable(trainer, operands, settings)
            raise _refuse_sending(number, f"{text_of(error)}, at {name}") from error
        from d2ldev.processes.join import free_port  # few programs train in several processes

        context: Any = multiprocessing.get_context(START_METHOD)
        processes: list[Any] = []
        receivers = []
        try:
            with _environment(trainer.backend), _importable_main(), shield_processes():
                port = free_port()
                for i in range(number):
                    # As torchrun would set them.
                    variables = Peers(i, number, i, number, "127.0.0.1", port).variables()
                    receiver, sender = context.Pipe()
                    process = context.Process(target=_work, args=(variables, folder, sender))
                    process.start()
                    sender.close()  # so that the end of the process is the end of the pipe
                    processes.append(process)
                    receivers.append(receiver)
            failure = _watch(
                processes,
                receivers,
                trainer,
                lambda: trainer.should_stop or interruption.is_pressed,
            )
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for receiver in receivers:
                receiver.close()
        # The first process has written it; another one if that one could not.
        written = [path for i in range(number) if (path := Path(folder, f"result-{i}")).exists()]
        if not written:
            assert failure is not None
            raise failure
        yield Outcome(written[0], failure)


def _unsendable(trainer: Any, operands: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Return the name of what ``pickle`` fails at: of the trainer, or an argument of ``fit``."""
    names = ("model", "train_data", "val_data")
    arguments = {"trainer": trainer, **dict(zip(names, operands, strict=True)), **settings}
    return first_failure(arguments, lambda x: _Pickler(trainer.backend, io.BytesIO()).dump(x))


@contextmanager
def _environment(backend: Backend) -> Iterator[None]:
    """Let processes that are started in the block have the same backend, and as many GPUs."""
    chosen = {BACKEND: backend.name}
    if framework_of(backend).virtual_gpus is not None:
        chosen[VIRTUAL_GPUS] = str(framework_of(backend).virtual_gpus)
    # Processes that each use all cores are slower than one.
    chosen["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _importable_main() -> Iterator[None]:
    """Let processes that are started in the block import nothing for a program without a file.

    Each of them would try to run the file of the program's name: ``<stdin>``, or a notebook.
    """
    main = sys.modules["__main__"]
    name = vars(main).get("__file__")
    if name is None or not _is_without_file():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


def _is_without_file() -> bool:
    """Tell whether no other process can import this program: ``python -c``, a notebook."""
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None:
        return False
    return name is None or name.lower().endswith(_OF_IPYTHON) or not os.path.exists(name)


class _Pickler(pickle.Pickler):
    """Refuses what only a program without a file has, before any process is started for it.

    Args:
        backend: which is asked how its own objects are sent.
        file: where the pickle is written.
    """

    def __init__(self, backend: Backend, file: BinaryIO) -> None:
        super().__init__(file)
        self._reduce = framework_of(backend).parallel.reduce

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and _is_without_file():
            # The book's ``add_to_class`` gives a class of d2ldev's methods of the program's.
            added = vars(obj).values() if isinstance(obj, type) else ()
            for each in (obj, *added):
                if isinstance(each, (type, FunctionType)) and each.__module__ == "__main__":
                    raise pickle.PicklingError(
                        f"{each.__qualname__} is of this session, which no other process can "
                        "import: a notebook, the standard input, or python -c"
                    )
        return self._reduce(obj)


# -- in this process ------------------------------------------------------------------------------


def _watch(
    processes: Sequence[Any],
    receivers: Sequence[Connection],
    trainer: Any,
    is_stop_wanted: Callable[[], bool],
) -> BaseException | None:
    """Wait until all processes have ended; return the error of one."""
    ranks = {receiver: rank for rank, receiver in enumerate(receivers)}
    begun: set[int] = set()
    failures: list[BaseException] = []
    deadline = float("inf")
    is_told = False
    while ranks and time.monotonic() < deadline:
        if not is_told and is_stop_wanted():
            is_told = True
            with suppress(OSError):  # it has ended
                receivers[0].send_bytes(_STOP)
        left = min(max(deadline - time.monotonic(), 0), _PERIOD)
        for receiver in wait(list(ranks), left):
            rank = ranks[receiver]  # type: ignore[index]
            try:
                message = receiver.recv_bytes()  # type: ignore[union-attr]
                if message == _BEGUN:
                    begun.add(rank)
                    continue
                if message == _STOPPED:
                    trainer.should_stop = True
                    continue
                error, text = pickle.loads(message)  # noqa: S301  # of a process of this one
                error.add_note(f"In the process of rank {rank}:\n{text}")
                failures.append(error)
            except (EOFError, ConnectionError):
                del ranks[receiver]  # type: ignore[arg-type]
                processes[rank].join()
                if status := processes[rank].exitcode:
                    ended = _peer_lost if rank in begun else _refuse_beginning
                    failures.append(ended(rank, status, len(processes)))
        if failures:
            deadline = min(deadline, time.monotonic() + PATIENCE)
    # Who has lost another one says less than that one.
    return min(failures, key=lambda error: isinstance(error, PeerLostError), default=None)


def _refuse_beginning(rank: int, status: int, number: int) -> UnsupportedValueError:
    return _refuse_sending(
        number,
        f"the process of rank {rank} ended with status {status} before it began, as where the "
        "part of the program that trains is not guarded by if __name__ == '__main__'",
    )


def _peer_lost(rank: int, status: int, number: int) -> PeerLostError:
    return PeerLostError(
        f"train on {gpus_in_words(number)}",
        f"the process of rank {rank} ended with status {status}",
        "fit again: fit(..., checkpoint='run.safetensors', resume=True) goes on from the last "
        "epoch",
    )


def _refuse_sending(number: int, problem: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"train on {gpus_in_words(number)}, each in a process that fit starts",
        problem,
        "classes and functions of a file that is imported (%%writefile net.py in a notebook, and "
        "from net import Net), and what trains under if __name__ == '__main__'; or d2ldev launch "
        f"--processes {number} train.py, with Trainer(max_epochs, num_gpus=1). The class of an "
        "object that pickle cannot send, such as a lock, leaves it out in its __getstate__",
    )


# -- in the others --------------------------------------------------------------------------------


def _work(variables: Mapping[str, str], folder: str, sender: Connection) -> None:
    global _result
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    # A terminal sends Ctrl-C to all: the process that has started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(variables)
    rank, number = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    try:
        trainer, operands, arguments, states = _receive(folder, number)
        sender.send_bytes(_BEGUN)
        trainer.gpus = [trainer.gpus[rank]]
        check_random_states(framework_of(trainer.backend), states, trainer.device)()
        _result = Path(folder, f"result-{rank}")
        threading.Thread(target=_stop_when_told, args=(sender, trainer), daemon=True).start()
        trainer.fit(*operands, **arguments)
        if rank == 0 and trainer.should_stop:
            sender.send_bytes(_STOPPED)
    except BaseException as error:
        sender.send_bytes(_failure(error))


def _stop_when_told(receiver: Connection, trainer: Any) -> None:
    """Stop the run when the process that has started this one says so."""
    with suppress(EOFError, OSError):
        receiver.recv_bytes()
        trainer.should_stop = True


def _receive(folder: str, number: int) -> Any:
    try:
        return pickle.loads(Path(folder, "work").read_bytes())  # noqa: S301  # of the parent
    except Exception as error:  # such as a class that only a notebook has
        raise _refuse_sending(number, text_of(error)) from error


def _end_with_parent(folder: str) -> None:
    """End this process when the one that has started it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _failure(error: BaseException) -> bytes:
    """Return an error and its traceback for the other process."""
    text = "".join(traceback.format_exception(error))
    with suppress(Exception):  # not every error can be sent
        found = pickle.dumps((error, text))
        pickle.loads(found)  # noqa: S301
        return found
    return pickle.dumps((RuntimeError(f"{type(error).__name__}: {text_of(error)}"), text))
