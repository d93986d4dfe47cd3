"""Bytes in use on each GPU after a step, with whole and with shared parameters.

    D2LDEV_VIRTUAL_GPUS=4 python benchmarks/sharding.py torch

The model is a perceptron with 64, 1024, 1024 and 8 units, which Adam trains. The table of
``docs/several-gpus.md`` has what this prints for PyTorch and JAX. PyTorch trains in a process for
each GPU, of which the first tells what it has.
"""

import gc
import os
import sys

import numpy as np

import d2ldev
from d2ldev import Trainer

UNITS = [64, 1024, 1024, 8]
RUNS = ((1, None), (2, None), (2, "parameters"), (4, "parameters"))


class Seen:
    """A callback that notes the bytes in use on the GPUs of its process after each step."""

    def __init__(self, backend, trainer):
        self.backend, self.trainer, self.used = backend, trainer, []

    def on_step_end(self, step, loss):
        """Note them."""
        self.backend.synchronize()
        self.used = [self.backend.memory(gpu).used for gpu in self.trainer.gpus]

    def state_dict(self):
        """Return them, for the process that has called ``fit``."""
        return {"used": self.used}

    def load_state_dict(self, state):
        """Take what the first process has noted."""
        self.used = state["used"]


def main():
    """Print a row for each way to train."""
    backend = d2ldev.get_backend(sys.argv[1])
    random = np.random.default_rng(0)
    inputs = random.normal(size=(16, UNITS[0])).astype("float32")
    data = [(inputs, np.arange(16, dtype="int32") % UNITS[-1])] * 3
    print(f"{backend.name} on {os.environ.get('D2LDEV_VIRTUAL_GPUS', 'no')} virtual GPUs")
    for number, shard in RUNS:
        net = backend.mlp(UNITS, seed=0)
        trainer = Trainer(1, number, backend=backend, shard=shard)
        seen = trainer.callback = Seen(backend, trainer)
        trainer.fit(net, data, loss="cross_entropy", optimizer="adam")
        used = ", ".join(f"{n / 1e6:.1f} MB" for n in seen.used)
        print(f"{number} GPUs, shard={shard}: {used}", flush=True)
        del net, trainer, seen
        gc.collect()  # what is left of a run holds its arrays


if __name__ == "__main__":
    main()
