"""Train a Gluon CNN with BatchNorm as an engineer does: Adam, a schedule, checkpoints.

``python examples/images_gluon.py --checkpoint run.safetensors --resume`` goes on where it was
stopped. It uses a GPU if there is one; ``D2LDEV_VIRTUAL_GPUS=1`` makes one that is not there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from d2ldev import ArrayLoader, Trainer
from d2ldev import mxnet as d2l

# After d2ldev, which gives MXNet the name that NumPy no longer has.
import mxnet as mx  # isort: skip
from mxnet import gluon  # isort: skip
from mxnet.gluon import nn  # isort: skip


def images(count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return noisy stripes, float32 of shape ``(count, 1, 12, 12)``, and which way each runs."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=count)
    rows, columns = np.mgrid[:12, :12]
    ways = np.stack([rows, columns, rows + columns, rows - columns])
    phases = rng.uniform(0, 2 * np.pi, size=(count, 1, 1))
    stripes = np.sin(1.5 * ways[labels] + phases) + rng.normal(0, 1, size=(count, 12, 12))
    return stripes[:, None].astype("float32"), labels


def network() -> nn.HybridSequential:
    """Make two convolutions; in float32, because MXNet's AMP needs CUDA."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(8, 3, use_bias=False, in_channels=1),
        nn.BatchNorm(in_channels=8),
        nn.Activation("relu"),
        nn.Conv2D(16, 3, strides=2, use_bias=False, in_channels=8),
        nn.BatchNorm(in_channels=16),
        nn.Activation("relu"),
        nn.GlobalAvgPool2D(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Dense(4, in_units=16),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on noisy stripes, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=min(1, d2l.num_gpus()))
    parser.add_argument("--checkpoint")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)

    mx.npx.set_np()
    mx.random.seed(0)
    net = network()
    loader = ArrayLoader(*images(512, seed=1), batch_size=32, shuffle=True)
    # The schedule counts the optimizer's steps, which the checkpoint holds.
    schedule = mx.lr_scheduler.FactorScheduler(len(loader), 0.8, base_lr=0.01)
    settings = {"learning_rate": 0.01, "wd": 0.0001, "lr_scheduler": schedule}
    optimizer = gluon.Trainer(net.collect_params(), "adam", settings)

    def after_epoch(epoch: int, history: dict[str, list[float]]) -> None:
        numbers = ", ".join(f"{name} {values[-1]:.3f}" for name, values in history.items())
        print(f"epoch {epoch} on {trainer.device}: {numbers}")

    trainer = Trainer(
        given.epochs, given.gpus, gradient_clip_val=1, backend=d2l, callbacks=after_epoch
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
