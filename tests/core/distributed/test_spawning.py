"""``fit`` starts a process for each GPU where the framework needs one, and leaves none behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from processes import extend_path, run_interpreter

from d2ldev import ArrayLoader, Backend, Trainer
from d2ldev.errors import PeerLostError, UnsupportedValueError
from d2ldev.framework.testing import framework_of

ALONE = "train on several GPUs in one process"


@pytest.fixture
def backend(reference, monkeypatch):
    """The reference backend with two GPUs, as if it needed a process for each."""
    found = Backend(type(framework_of(reference))(virtual_gpus=2))
    monkeypatch.setattr(framework_of(found), "cannot", {**framework_of(found).cannot, ALONE: "so"})
    return found


class Drawn:
    """Batches in an order that is drawn from NumPy's random numbers."""

    def __iter__(self):
        found = list(batches())
        return iter([found[i] for i in np.random.permutation(len(found))])


def batches():
    inputs = np.linspace(-1, 1, 21, dtype="float32").reshape(7, 3)
    return ArrayLoader(inputs, inputs[:, :1] ** 2, batch_size=3)


class Counting:
    """A callback with a state."""

    def __init__(self):
        self.steps = 0
        self.rank = None

    def on_step_end(self, step, loss):
        self.steps += 1
        self.rank = os.environ.get("RANK")

    def state_dict(self):
        return {"steps": self.steps, "rank": self.rank}

    def load_state_dict(self, state):
        self.steps, self.rank = state["steps"], state["rank"]


def fit(backend, number, **options):
    callback = Counting()
    trainer = Trainer(3, number, backend=backend, callbacks=callback)
    data = Drawn()
    np.random.seed(0)
    history = trainer.fit(backend.mlp([3, 4, 1], seed=0), data, batches(), lr=0.1, **options)
    return trainer, history, callback, [y.tolist() for _, y in data]


def test_model_history_and_random_numbers_equal_those_of_one_process(backend):
    (one, history, _, after), (several, curves, callback, next_batches) = (
        fit(backend, number) for number in (1, 2)
    )
    for (name, x), (_, wanted) in zip(
        backend.named_tensors(several.model).items(),
        backend.named_tensors(one.model).items(),
        strict=True,
    ):
        assert backend.device_of(x) == backend.gpu(0), name
        np.testing.assert_allclose(backend.to_numpy(x), backend.to_numpy(wanted), atol=1e-6)
    for name, curve in history.items():
        assert curves[name] == pytest.approx(curve, abs=1e-6)
    assert (callback.steps, callback.rank) == (9, "0")
    assert next_batches == after


# -- what ends early ------------------------------------------------------------------------------


class Telling:
    """A callback that tells when the first epoch has ended."""

    def __init__(self, path):
        self.path = path

    def on_epoch_end(self, epoch, history):
        self.path.touch()


def test_another_thread_of_this_process_stops_the_others(backend, tmp_path):
    begun = tmp_path / "begun"
    trainer = Trainer(10**6, 2, backend=backend, callbacks=Telling(begun))

    def stop():
        wait_until(begun.exists)
        trainer.should_stop = True

    thread = threading.Thread(target=stop)
    thread.start()
    history = trainer.fit(backend.mlp([3, 1], seed=0), batches(), lr=0.1)
    thread.join()
    assert 1 <= len(history["loss"]) < 10**6
    assert trainer.should_stop is True


# -- what goes wrong ------------------------------------------------------------------------------


class OwnError(Exception):
    pass


class OnlyHereError(Exception):
    def __init__(self, one, two):
        super().__init__(one)


class Raising:
    def on_step_end(self, step, loss):
        if os.environ["RANK"] == "1":
            raise OwnError("of rank 1")


class RaisingWhatCannotBeSent:
    def on_step_end(self, step, loss):
        raise OnlyHereError("by itself", 2)


class Killed:
    def on_step_end(self, step, loss):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


class Unreadable:
    """Data that one process cannot read in the second epoch."""

    def __init__(self, rank):
        self.rank, self.epoch = str(rank), 0

    def __iter__(self):
        self.epoch += 1
        for number, batch in enumerate(batches()):
            if self.epoch == 2 and number == 1 and os.environ.get("RANK") == self.rank:
                raise OwnError("the disk is gone")
            yield batch


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_process_data_keeps_the_trained_parameters(backend, rank):
    model = backend.mlp([3, 1], seed=0)
    trainer = Trainer(3, 2, backend=backend)
    with pytest.raises(OwnError, match="the disk is gone"):
        trainer.fit(model, Unreadable(rank), lr=0.1)
    assert len(trainer.history["loss"]) == 1
    pairs = zip(
        backend.named_tensors(trainer.model).values(),
        backend.named_tensors(model).values(),
        strict=True,
    )
    assert all((backend.to_numpy(x) != backend.to_numpy(y)).all() for x, y in pairs)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the processes")
@pytest.mark.parametrize(
    ("callback", "error", "said"),
    [
        (Raising(), OwnError, "of rank 1"),
        (RaisingWhatCannotBeSent(), RuntimeError, "OnlyHereError: by itself"),
        (Killed(), PeerLostError, "rank 1"),
    ],
    ids=["raised", "not to be sent", "killed"],
)
def test_an_error_in_a_process_is_raised_and_no_process_remains(backend, callback, error, said):
    before = children()
    trainer = Trainer(1, 2, backend=backend, callbacks=callback)
    with pytest.raises(error, match=said):
        trainer.fit(backend.mlp([3, 1]), batches())
    assert children() == before


def children():
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [pid for task in tasks for pid in task.read_text().split()]
    # That which keeps account for multiprocessing lives as long as this process.
    return [pid for pid in pids if b"resource_tracker" not in command(pid)]


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_an_object_that_cannot_be_pickled_is_refused(backend):
    callback = lambda epoch, history: None  # noqa: E731
    with pytest.raises(UnsupportedValueError, match="d2ldev launch --processes 2") as caught:
        Trainer(1, 2, backend=backend, callbacks=callback).fit(backend.mlp([3, 1]), batches())
    assert "lambda" in caught.value.problem


PROGRAM = """
import os, pathlib, sys, time
import numpy as np
import d2ldev
from d2ldev import Trainer
from d2ldev._backend import framework_of

class Steps:
    def on_step_end(self, step, loss):
        pathlib.Path("begun", os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(0.05)

backend = d2ldev.get_backend("reference")
framework_of(backend).cannot = {"train on several GPUs in one process": "so"}
def train():
    data = [(np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))] * 1000
    print(Trainer(9, 2, callbacks=Steps()).fit(backend.mlp([3, 1]), data))
"""


def environment(folder):
    kept = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    chosen = {"D2LDEV_BACKEND": "reference", "D2LDEV_VIRTUAL_GPUS": "2"}
    chosen |= {"TMPDIR": str(folder / "temporary"), "PYTHONPATH": extend_path(())}
    return kept | chosen


def start(folder, source):
    for name in ("begun", "temporary"):
        (folder / name).mkdir()
    (folder / "train.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, "train.py"],
        env=environment(folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def test_the_error_of_an_unguarded_program_has_the_fix(tmp_path):
    said = start(tmp_path, f"{PROGRAM}\ntrain()\n").communicate(timeout=120)[1]
    assert "a program has to train under if __name__ == '__main__'" in said
    assert "d2ldev launch --processes 2 train.py" in said


SESSION = """
import numpy as np
import d2ldev
from d2ldev import Trainer
from d2ldev._backend import framework_of

class Own:
    def on_step_end(self, step, loss):
        pass

backend = d2ldev.get_backend("reference")
framework_of(backend).cannot = {"train on several GPUs in one process": "so"}
data = [(np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))] * 3
def train(callbacks=None):
    return Trainer(2, 2, callbacks=callbacks).fit(backend.mlp([3, 1], seed=0), data)["loss"]

print(train())
try:
    train(Own())
except d2ldev.UnsupportedValueError as error:
    print(error)

from d2ldev.native import reference as d2l

@d2l.add_to_class(d2l.Trainer)
def prepare_batch(self, batch):
    return backend.to(batch, self.device)

try:
    d2l.Trainer(2, 2).fit(backend.mlp([3, 1], seed=0), data)
except d2ldev.UnsupportedValueError as error:
    print(error)
"""


# Jupyter's programs have no file, as that of -c; IPython names that which it runs.
@pytest.mark.parametrize("name", ["stdin", "-c", "train.ipynb", "train.ipy"])
def test_a_program_without_a_file_trains_or_is_refused_with_its_own_objects(
    reference, tmp_path, name
):
    (tmp_path / "temporary").mkdir()
    (tmp_path / name).write_text("%no Python")
    named = f"__file__ = {name!r}\n" if name.startswith("train") else ""
    done = run_interpreter(
        *(["-"] if name == "stdin" else ["-c", named + SESSION]),
        input=SESSION if name == "stdin" else "",
        env=environment(tmp_path),
        cwd=tmp_path,
        timeout=60,
    )
    loss, refusal, fix, refusal_of_added, _ = done.stdout.splitlines()
    data = [(np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))] * 3
    trainer = Trainer(2, 1, backend=Backend(type(framework_of(reference))(virtual_gpus=1)))
    expected = trainer.fit(trainer.backend.mlp([3, 1], seed=0), data)["loss"]
    assert json.loads(loss) == pytest.approx(expected)
    assert "Own is of this session, which no other process can import" in refusal
    assert "d2ldev launch --processes 2 train.py" in fix
    # The other processes have d2ldev's own Trainer, without what the session has added to it.
    assert "prepare_batch is of this session" in refusal_of_added
    assert done.stderr == ""
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_no_process_and_no_file_is_left_where_the_first_one_is_ended(tmp_path, number):
    process = start(tmp_path, f"{PROGRAM}\nif __name__ == '__main__': train()\n")
    begun = tmp_path / "begun"
    try:
        wait_until(lambda: len([path for path in begun.iterdir() if path.read_text()]) == 2)
        pids = [path.read_text() for path in begun.iterdir()]
        # A terminal sends Ctrl-C to all processes.
        (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    wait_until(lambda: not any(b"spawn" in command(pid) for pid in pids))
    wait_until(lambda: not list((tmp_path / "temporary").glob("d2ldev-*")))
    assert said == ("{'loss': [], 'lr': []}\n" if number == signal.SIGINT else "")


def wait_until(is_true, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
