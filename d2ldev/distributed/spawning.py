"""Training on several GPUs of this machine, for a framework that needs a process for each GPU.

``fit`` starts the processes, and they train as the processes of a launch do. The first one saves
the state of the run, and this process resumes from it.
"""

from __future__ import annotations

import gc
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any, BinaryIO, NamedTuple

from d2ldev._backend import Backend, framework_of
from d2ldev.contract.parallel import first_failure
from d2ldev.device import gpus_in_words
from d2ldev.distributed.random_states import check_random_states, random_states
from d2ldev.errors import PeerLostError, UnsupportedValueError, text_of
from d2ldev.settings import BACKEND, VIRTUAL_CUDA, VIRTUAL_GPUS, Peers

# Seconds for the other processes to end by themselves after the failure of one.
PATIENCE = 5.0

# Not "fork": a driver does not work in a copy of the process that initialised it.
START_METHOD = "spawn"

# Programs of IPython that Python cannot import.
_OF_IPYTHON = (".ipynb", ".ipy")

_BEGUN = b"begun"
# To the parent: ``should_stop`` ended the run. From the parent: stop.
_STOPPED, _STOP = b"stopped", b"stop"

# Seconds between two checks whether to end the run.
_PERIOD = 0.1

# Set in a process that ``fit`` started: the file for the state of the run.
_result_path: Path | None = None
# The way to the parent process, and the names of the objects there that this process may call.
_sender: Connection | None = None
_listeners: Collection[str] = ()


def find_result_path() -> Path | None:
    """Return the file for the state of the run in a process that ``fit`` started, else None."""
    return _result_path


def find_sender(listener: str) -> Callable[..., None] | None:
    """Return a function that calls an object of the process whose ``fit`` started this one.

    The function takes the name of a method, and its arguments. It returns at once.

    Args:
        listener: the name of the object in ``train_in_processes``. Without it the result is None.
    """
    return partial(_send, listener) if listener in _listeners else None


def _send(listener: str, method: str, *operands: Any) -> None:
    assert _sender is not None
    with suppress(OSError):  # the parent process may have ended the run
        _sender.send_bytes(pickle.dumps((listener, (method, operands))))


class Outcome(NamedTuple):
    """The outcome of a training in processes of ``fit``.

    Args:
        state: the file with the state of the run.
        error: the error of a process, or a ``RuntimeError`` if it cannot be sent. A
            ``PeerLostError`` for a process that ended. None without an error.
    """

    state: Path
    error: BaseException | None


@contextmanager
def train_in_processes(
    trainer: Any,
    operands: Sequence[Any],
    settings: Mapping[str, Any],
    is_interrupted: Callable[[], bool],
    listeners: Mapping[str, Any],
) -> Iterator[Outcome]:
    """Train in one process for each GPU of a trainer; give the outcome to a block.

    Args:
        trainer: each process calls its ``fit``, with one GPU. Its ``should_stop`` ends the run.
        operands, settings: the arguments of ``fit``, by position and by name.
        is_interrupted: returns whether Ctrl-C ends the run.
        listeners: name -> an object of this process that the first one calls: ``find_sender``.

    Raises:
        UnsupportedValueError: if an object cannot be sent to another process.
        BaseException: the error of a process, if no process has saved a state.
    """
    number = len(trainer.gpus)
    with tempfile.TemporaryDirectory(prefix="d2ldev-") as folder:
        try:
            # In one pickle, so that an optimizer keeps its model.
            states = random_states(framework_of(trainer.backend), trainer.device)
            work = (trainer, operands, settings, states, set(listeners))
            with open(Path(folder, "work"), "wb") as file:
                _Pickler(trainer.backend, file).dump(work)
        except Exception as error:  # pickle raises many kinds
            name = _find_unsendable(trainer, operands, settings)
            raise _refuse_sending(number, f"{text_of(error)}, at {name}") from error
        from d2ldev.distributed.join import free_port  # few programs need it

        context: Any = multiprocessing.get_context(START_METHOD)
        processes: list[Any] = []
        receivers = []
        try:
            with _environment(trainer.backend), _importable_main(), shield_processes():
                port = free_port()
                method = multiprocessing.get_start_method(allow_none=True)
                for i in range(number):
                    # The variables of torchrun.
                    variables = Peers(i, number, i, number, "127.0.0.1", port).variables()
                    receiver, sender = context.Pipe()
                    arguments = variables, folder, method, sender
                    process = context.Process(target=_work, args=arguments)
                    process.start()
                    sender.close()  # the pipe then ends with the process
                    processes.append(process)
                    receivers.append(receiver)
            failure = _watch(processes, receivers, trainer, is_interrupted, listeners)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for receiver in receivers:
                receiver.close()
        # Another process writes its file only if the first one failed.
        results = [path for i in range(number) if (path := Path(folder, f"result-{i}")).exists()]
        if not results:
            assert failure is not None
            raise failure
        yield Outcome(results[0], failure)


def _find_unsendable(trainer: Any, operands: Sequence[Any], settings: Mapping[str, Any]) -> str:
    """Return which object ``pickle`` refuses: the trainer, or an argument of ``fit``."""
    names = ("model", "train_data", "val_data")
    arguments = {"trainer": trainer, **dict(zip(names, operands, strict=True)), **settings}
    return first_failure(arguments, lambda x: _Pickler(trainer.backend, io.BytesIO()).dump(x))


@contextmanager
def _environment(backend: Backend) -> Iterator[None]:
    """Give processes that start in the block the same backend, and as many virtual GPUs."""
    variables = {BACKEND: backend.name}
    if framework_of(backend).virtual_gpus is not None:
        variables[VIRTUAL_GPUS] = str(framework_of(backend).virtual_gpus)
        variables[VIRTUAL_CUDA] = str(int(framework_of(backend).as_cuda))
    # Several processes that each use all cores are slower than one.
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
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
    """Keep processes that start in the block from importing a program without a file.

    Each of them would try to run the file ``<stdin>``, or a notebook.
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
    """Return whether no other process can import this program: ``python -c``, a notebook."""
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None:
        return False
    return name is None or name.lower().endswith(_OF_IPYTHON) or not os.path.exists(name)


class _Pickler(pickle.Pickler):
    """A pickler that refuses classes and functions of a program without a file.

    Args:
        backend: the backend, which reduces its own objects.
        file: the file of the pickle.
    """

    def __init__(self, backend: Backend, file: BinaryIO) -> None:
        super().__init__(file)
        self._reduce = framework_of(backend).parallel.reduce

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and _is_without_file():
            # The book's ``add_to_class`` adds methods of the program to classes of d2ldev.
            methods = vars(obj).values() if isinstance(obj, type) else ()
            for each in (obj, *methods):
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
    is_interrupted: Callable[[], bool],
    listeners: Mapping[str, Any],
) -> BaseException | None:
    """Wait until all processes have ended; return the error of one, or None."""
    ranks = {receiver: rank for rank, receiver in enumerate(receivers)}
    ranks_begun: set[int] = set()
    failures: list[BaseException] = []
    deadline = float("inf")
    is_told = False
    while ranks and time.monotonic() < deadline:
        if not is_told and (trainer.should_stop or is_interrupted()):
            is_told = True
            with suppress(OSError):  # the process may have ended
                receivers[0].send_bytes(_STOP)
        left = min(max(deadline - time.monotonic(), 0), _PERIOD)
        for receiver in wait(list(ranks), left):
            rank = ranks[receiver]  # type: ignore[index]
            try:
                message = receiver.recv_bytes()  # type: ignore[union-attr]
                if message == _BEGUN:
                    ranks_begun.add(rank)
                    continue
                if message == _STOPPED:
                    trainer.should_stop = True
                    continue
                # A listener and its call, or an error and its traceback.
                sent, content = pickle.loads(message)  # noqa: S301  # of a process of this one
                if isinstance(sent, str):
                    failure = _call(listeners[sent], *content)
                    if failure is not None:
                        failures.append(failure)
                        trainer.should_stop = True  # the model comes back, as after any error
                    continue
                sent.add_note(f"In the process of rank {rank}:\n{content}")
                failures.append(sent)
            except (EOFError, ConnectionError):
                del ranks[receiver]  # type: ignore[arg-type]
                processes[rank].join()
                if status := processes[rank].exitcode:
                    make_error = _peer_lost if rank in ranks_begun else _refuse_beginning
                    failures.append(make_error(rank, status, len(processes)))
        if failures:
            deadline = min(deadline, time.monotonic() + PATIENCE)
    # The error of a lost process says more than the errors of the processes that lost it.
    return min(failures, key=lambda error: isinstance(error, PeerLostError), default=None)


def _call(listener: Any, method: str, operands: Sequence[Any]) -> Exception | None:
    """Call a method; return the error, which must not look like the end of a pipe."""
    try:
        getattr(listener, method)(*operands)
    except Exception as error:
        return error
    return None


def _refuse_beginning(rank: int, status: int, number: int) -> UnsupportedValueError:
    return _refuse_sending(
        number,
        f"the process of rank {rank} ended with status {status} before it began; a program has to "
        "train under if __name__ == '__main__'",
    )


def _peer_lost(rank: int, status: int, number: int) -> PeerLostError:
    return PeerLostError(
        f"train on {gpus_in_words(number)}",
        f"the process of rank {rank} ended with status {status}",
        "fit(..., checkpoint='run.safetensors', resume=True), which resumes after the last epoch",
    )


def _refuse_sending(number: int, problem: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"train on {gpus_in_words(number)}, each in a process that fit starts",
        problem,
        "import your classes and functions from a file (in a notebook: %%writefile net.py, and "
        "from net import Net). Train under if __name__ == '__main__'. Or use d2ldev launch "
        f"--processes {number} train.py, with Trainer(max_epochs, num_gpus=1). A class can leave "
        "out an object that pickle cannot send, such as a lock, in its __getstate__",
    )


@contextmanager
def shield_processes() -> Iterator[None]:
    """Let processes that start in a block ignore Ctrl-C, if the system can do it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Processes inherit the mask. A signal in the block waits for its end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the others --------------------------------------------------------------------------------


def _work(
    variables: Mapping[str, str], folder: str, method: str | None, sender: Connection
) -> None:
    """Train in this process.

    Args:
        variables: of the environment.
        folder: has the objects of ``fit``, and gets the result.
        method: how the program starts processes; None is Python's default.
        sender: the pipe to the parent process.
    """
    global _result_path, _sender, _listeners
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    # Python would start the workers of a loader as it started this process: slowly.
    multiprocessing.set_start_method(method, force=True)
    if hasattr(os, "register_at_fork"):  # a worker would keep the pipe open after this process
        os.register_at_fork(after_in_child=sender.close)
    # A terminal sends Ctrl-C to all processes: the parent process ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(variables)
    rank, number = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    try:
        trainer, operands, arguments, states, _listeners = _receive(folder, number)
        sender.send_bytes(_BEGUN)
        trainer.gpus = [trainer.gpus[rank]]
        check_random_states(framework_of(trainer.backend), states, trainer.device)()
        _result_path, _sender = Path(folder, f"result-{rank}"), sender
        threading.Thread(target=_stop_when_told, args=(sender, trainer), daemon=True).start()
        trainer.fit(*operands, **arguments)
        if rank == 0 and trainer.should_stop:
            sender.send_bytes(_STOPPED)
    except BaseException as error:
        sender.send_bytes(_failure(error))
    finally:
        # As it ends, Python looks for cycles among all objects, which takes a second with torch.
        gc.freeze()


def _stop_when_told(receiver: Connection, trainer: Any) -> None:
    """Stop the run at the word of the parent process."""
    with suppress(EOFError, OSError):
        receiver.recv_bytes()
        trainer.should_stop = True


def _receive(folder: str, number: int) -> Any:
    try:
        return pickle.loads(Path(folder, "work").read_bytes())  # noqa: S301  # of the parent
    except Exception as error:  # such as a class of a notebook
        raise _refuse_sending(number, text_of(error)) from error


def _end_with_parent(folder: str) -> None:
    """End this process when its parent process is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _failure(error: BaseException) -> bytes:
    """Return an error and its traceback for the parent process."""
    text = "".join(traceback.format_exception(error))
    with suppress(Exception):  # not every error can be sent
        message = pickle.dumps((error, text))
        pickle.loads(message)  # noqa: S301
        return message
    return pickle.dumps((RuntimeError(f"{type(error).__name__}: {text_of(error)}"), text))
