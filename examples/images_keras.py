"""Train a Keras CNN with BatchNorm as an engineer does: AdamW, a schedule, bfloat16, checkpoints.

``python examples/images_keras.py --checkpoint run.safetensors --resume`` goes on where it was
stopped. It uses a GPU if there is one; ``D2LDEV_VIRTUAL_GPUS=1`` makes one that is not there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import keras
import numpy as np
from keras import layers
from numpy.typing import NDArray

from d2ldev import ArrayLoader, Trainer
from d2ldev import tensorflow as d2l


def images(count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return noisy stripes, float32 of shape ``(count, 12, 12, 1)``, and which way each runs."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=count)
    rows, columns = np.mgrid[:12, :12]
    ways = np.stack([rows, columns, rows + columns, rows - columns])
    phases = rng.uniform(0, 2 * np.pi, size=(count, 1, 1))
    stripes = np.sin(1.5 * ways[labels] + phases) + rng.normal(0, 1, size=(count, 12, 12))
    return stripes[..., None].astype("float32"), labels


def network() -> keras.Model:
    """Make two convolutions."""
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(16, 3, strides=2, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.1, seed=1),
            layers.Dense(4),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on noisy stripes, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=min(1, d2l.num_gpus()))
    parser.add_argument("--checkpoint")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)

    keras.utils.set_random_seed(0)
    net = network()
    loader = ArrayLoader(*images(512, seed=1), batch_size=32, shuffle=True)
    # The schedule counts the optimizer's steps, which the checkpoint holds.
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, len(loader), 0.8, staircase=True)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01)

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
