"""Bytes in use on each GPU after a step, with whole and with shared parameters.

    D2LDEV_VIRTUAL_GPUS=4 python benchmarks/sharding.py torch [--json FILE]

The model is a perceptron with 64, 1024, 1024 and 8 units, which Adam trains. PyTorch trains in a
process for each GPU, of which the first tells what it has.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from overhead import document

import d2ldev
from d2ldev import Trainer

_UNITS = (64, 1024, 1024, 8)
_RUNS = ((1, None), (2, None), (2, "parameters"), (4, "parameters"))


class Seen:
    """A callback that notes the bytes in use on the GPUs of its process after each step."""

    def __init__(self, backend: d2ldev.Backend, trainer: Trainer) -> None:
        self.backend, self.trainer = backend, trainer
        self.used: list[int] = []

    def on_step_end(self, step: int, loss: Any) -> None:
        """Note them."""
        self.backend.synchronize()
        self.used = [self.backend.memory(gpu).used or 0 for gpu in self.trainer.gpus]

    def state_dict(self) -> dict[str, Any]:
        """Return them, for the process that has called ``fit``."""
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what the first process has noted."""
        self.used = state["used"]


def measure(backend: d2ldev.Backend, gpus: int, shard: str | None) -> dict[str, Any]:
    """Return the number of GPUs, what is shared, and the bytes on each GPU that was asked."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(16, _UNITS[0])).astype("float32")
    data = [(inputs, np.arange(16, dtype="int32") % _UNITS[-1])] * 3
    net = backend.mlp(_UNITS, seed=0)
    trainer = Trainer(1, gpus, backend=backend, shard=shard)
    seen = trainer.callbacks = Seen(backend, trainer)
    trainer.fit(net, data, loss="cross_entropy", optimizer="adam")
    return {"gpus": gpus, "shard": shard, "used": list(seen.used)}


def main() -> None:
    """Print a line for each way to train, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=("torch", "jax"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    backend = d2ldev.get_backend(arguments.framework)
    rows = []
    for gpus, shard in _RUNS:
        rows.append(measure(backend, gpus, shard))
        gc.collect()  # what is left of a run holds its arrays
        used = ", ".join(f"{each / 1e6:.1f} MB" for each in rows[-1]["used"])
        print(f"{gpus} GPUs, shard={shard}: {used}", flush=True)
    if arguments.json is not None:
        made = document([], arguments.framework, ())
        made["results"] = rows
        arguments.json.write_text(format_lines(made), encoding="utf-8")


if __name__ == "__main__":
    main()
