"""One of several processes is lost: at any instant after they have met, or in an epoch."""

import random
import re
import socket
from pathlib import Path

import numpy as np
from launched import environment, launched, left, run_processes
from processes import searched
from several_gpus import CLASSES, FEATURES, flat_batches

from d2ldev import Trainer
from d2ldev.processes.join import free_port

TIMEOUT = 5
LONGEST = 8
"""Seconds in which the instant is drawn: the engine begins, compiles, and trains some epochs."""

GRACE = 15
"""Seconds that the others have after the timeout.

Two are for the call of an engine that does not return, and JAX may wait once more for the timeout
when it ends. The rest is for a machine that is busy.
"""

TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
"""For hundreds of steps in float32, in which processes add up in another order."""

_TRAIN = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
from d2ldev import get_backend
from d2ldev.processes import join
from lost_processes import train

name, how, lost, delay, shard, path, signalled, after = sys.argv[1:]
meet = join.meet

def end():
    with open(signalled, "w") as file:
        file.write(str(time.time()))
    os.kill(os.getpid(), getattr(signal, how))

def end_later():
    if os.environ["RANK"] == lost:
        threading.Timer(float(delay), end).start()

def meet_and_end(*arguments):
    group = meet(*arguments)
    end_later()
    return group

if after == "meeting":
    join.meet = meet_and_end
backend = get_backend(name)
if after == "loading":
    end_later()
train(backend, path, 10**6, shard=shard or None)
"""


def train(backend, path, epochs, **options):
    """Train a small model, or go on with that; return its parameters.

    Args:
        backend: the backend.
        path: of the checkpoint, or None.
        epochs: how many.
        options: of the trainer.
    """
    trainer = Trainer(epochs, 0, backend=backend, **options)
    net = backend.mlp([FEATURES, 8, CLASSES], seed=0)
    given = {"loss": "cross_entropy", "optimizer": "momentum", "lr": 0.01}
    trainer.fit(net, flat_batches(), checkpoint=path, resume=path is not None, **given)
    named = backend.named_tensors(trainer.model)
    return {name: backend.to_numpy(x) for name, x in named.items()}


def assert_all_end(backend, folder, how, lost, shard="", after="meeting"):
    """Check that two processes end in time with an error, and nothing is left but the checkpoint.

    A run that goes on from it ends with the parameters of one that nothing has disturbed.

    Args:
        backend: of the framework, in this process.
        folder: for the checkpoint.
        how: the name of the signal by which the third process is lost.
        lost: its rank.
        shard: of the trainer.
        after: what is over when that may happen: the ``"meeting"`` of the processes, or also the
            ``"loading"`` of the backend.
    """
    delay, path, signalled = random.uniform(0, LONGEST), folder / "run", folder / "signalled"
    port = free_port()
    arguments = backend.name, how, lost, delay, shard, path, signalled, after
    options = {"timeout": TIMEOUT, "path": [Path(__file__).parent]}
    ended = run_processes(_TRAIN, *arguments, number=3, lost=lost, port=port, **options)
    host, begin = re.escape(socket.gethostname()), float(signalled.read_text())
    for rank in {0, 1, 2} - {lost}:
        told = ended[rank].stderr
        assert ended[rank].returncode == 1, (delay, told)
        expected = (
            rf"PeerLostError: cannot train in 3 processes: rank {lost} on {host} is lost: .+\. "
            rf"Rank {rank} on {host} was at [a-zM]"
        )
        assert re.search(expected, told), (delay, told)
        assert ended[rank].time - begin < TIMEOUT + GRACE, (delay, told)
    assert not left(port)
    epochs = 2 + (backend.load(path)["run"]["epoch"] if path.exists() else 0)
    resumed = train(backend, path, epochs)
    for name, values in train(backend, folder / "undisturbed", epochs).items():
        np.testing.assert_allclose(resumed[name], values, **TOLERANCE, err_msg=f"{delay}")


_AGAIN = """
import warnings
warnings.simplefilter("ignore")
from d2ldev import backend
from lost_processes import train

def end(epoch, history):
    with open(f"begun {rank}", "a") as file:
        file.write(f"{epoch} ")
    if rank == 1 and epoch == 2 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

values = train(backend, "run.safetensors", 4, callback=end)
show({name: x.tolist() for name, x in values.items()})
"""


def assert_started_again(backend, folder):
    """Check that a launch goes on by itself when one of two processes has ended itself.

    Args:
        backend: of the framework, in this process.
        folder: for the program and the checkpoint.
    """
    variables = environment(
        D2LDEV_BACKEND=backend.name,
        PYTHONPATH=searched([Path(__file__).parent]),
        OMP_NUM_THREADS="1",
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    options = ["--processes", 2, "--restarts", 1]
    done = launched(_AGAIN, folder, *options, env=variables, timeout=240)
    assert done.status == 0, done.errors
    assert "status 137: all are started again, 0 left" in done.errors
    expected = train(backend, None, 4)
    for (found,) in (done.values[rank] for rank in range(2)):
        assert list(found) == list(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, **TOLERANCE)
    # The epoch whose state was being written is done again at most, and no other.
    assert (folder / "begun 1").read_text() in ("0 1 2 3 ", "0 1 2 2 3 ")
