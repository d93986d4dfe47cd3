"""Train a Flax CNN with BatchNorm as an engineer does: AdamW, a schedule, bfloat16, checkpoints.

``python examples/images_flax.py --checkpoint run.safetensors --resume`` goes on where it was
stopped. It uses a GPU if there is one; ``D2LDEV_VIRTUAL_GPUS=1`` makes one that is not there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray

from d2ldev import ArrayLoader, Trainer
from d2ldev import jax as d2l


def images(count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return noisy stripes, float32 of shape ``(count, 12, 12, 1)``, and which way each runs."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=count)
    rows, columns = np.mgrid[:12, :12]
    ways = np.stack([rows, columns, rows + columns, rows - columns])
    phases = rng.uniform(0, 2 * np.pi, size=(count, 1, 1))
    stripes = np.sin(1.5 * ways[labels] + phases) + rng.normal(0, 1, size=(count, 12, 12))
    return stripes[..., None].astype("float32"), labels


class Network(nnx.Module):
    """Two convolutions."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        options = {"use_bias": False, "rngs": rngs}
        self.first = nnx.Conv(1, 8, (3, 3), padding="VALID", **options)
        self.first_norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, padding="VALID", **options)
        self.second_norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.output = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits of shape ``(n, 4)`` for images of shape ``(n, 12, 12, 1)``."""
        x = nnx.relu(self.first_norm(self.first(x)))
        x = nnx.relu(self.second_norm(self.second(x)))
        return self.output(self.dropout(x.mean(axis=(1, 2))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on noisy stripes, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=min(1, d2l.num_gpus()))
    parser.add_argument("--checkpoint")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)

    net = Network(nnx.Rngs(0))
    loader = ArrayLoader(*images(512, seed=1), batch_size=32, shuffle=True)
    # The schedule counts the optimizer's steps, which the checkpoint holds.
    schedule = optax.exponential_decay(0.01, len(loader), 0.8, staircase=True)
    optimizer = nnx.Optimizer(net, optax.adamw(schedule, weight_decay=0.01), wrt=nnx.Param)

    def after_epoch(epoch: int, history: dict[str, list[float]]) -> None:
        numbers = ", ".join(f"{name} {values[-1]:.3f}" for name, values in history.items())
        print(f"epoch {epoch} on {trainer.device}: {numbers}")

    trainer = Trainer(
        given.epochs,
        given.gpus,
        gradient_clip_val=1,
        backend=d2l,
        callbacks=after_epoch,
        precision="bf16",
    )
    trainer.fit(
        net,
        loader,
        ArrayLoader(*images(256, seed=2), batch_size=128),
        loss="cross_entropy",
        optimizer=optimizer,
        metrics=["accuracy"],
        checkpoint=given.checkpoint,
        resume=given.resume,
    )


if __name__ == "__main__":
    main()
