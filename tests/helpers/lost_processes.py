"""One of three processes is lost, at any instant after they have met."""

import random
import re
import socket
from pathlib import Path

import numpy as np
from launched import left, run_processes
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
    """Train a small model, or go on with that; return its parameters."""
    trainer = Trainer(epochs, 0, backend=backend, **options)
    net = backend.mlp([FEATURES, 8, CLASSES], seed=0)
    given = {"loss": "cross_entropy", "optimizer": "momentum", "lr": 0.01}
    trainer.fit(net, flat_batches(), checkpoint=path, resume=True, **given)
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
