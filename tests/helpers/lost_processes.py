"""One of three processes is lost while they train."""

import random
import time
from pathlib import Path

from launched import run_processes
from several_gpus import CLASSES, FEATURES, flat_batches

from d2ldev import Trainer

TIMEOUT = 5

_TRAIN = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
from d2ldev import Trainer, get_backend
from several_gpus import CLASSES, FEATURES, flat_batches

name, how, delay, shard, path = sys.argv[1:]
backend = get_backend(name)
lost = threading.Timer(float(delay), os.kill, (os.getpid(), getattr(signal, how)))
lost.daemon = True

def begin(epoch, history):
    if epoch == 0 and os.environ["RANK"] == "1":
        lost.start()

trainer = Trainer(10**6, 0, backend=backend, shard=shard or None, callback=begin)
net = backend.mlp([FEATURES, 8, CLASSES])
trainer.fit(net, flat_batches(), loss="cross_entropy", optimizer="adam", checkpoint=path)
"""


def assert_all_end(backend, folder, how, shard=""):
    """Check that two processes end with an error, at whatever instant the third is lost.

    Args:
        backend: of the framework, in this process.
        folder: for the checkpoint, which has to be whole.
        how: the name of the signal.
        shard: of the trainer.
    """
    delay, path = random.uniform(0, 2), folder / "run"
    arguments = backend.name, how, delay, shard, path
    helpers = [Path(__file__).parent]
    begin = time.monotonic()
    ended = run_processes(_TRAIN, *arguments, number=3, timeout=TIMEOUT, lost=1, path=helpers)
    assert time.monotonic() - begin < 90, delay
    for other in (ended[0], ended[2]):
        assert other.returncode == 1, (delay, other.stderr)
        assert "PeerLostError: cannot train in 3 processes: rank 1 on " in other.stderr, delay
    net = backend.mlp([FEATURES, 8, CLASSES])
    options = {"loss": "cross_entropy", "optimizer": "adam", "checkpoint": path}
    Trainer(1, 0, backend=backend).fit(net, flat_batches(), resume=True, **options)
