"""Train a PyTorch CNN with BatchNorm as an engineer does: AdamW, a schedule, bfloat16, checkpoints.

``python examples/images_torch.py --checkpoint run.safetensors --resume`` goes on where it was
stopped. It uses a GPU if there is one; ``D2LDEV_VIRTUAL_GPUS=1`` makes one that is not there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from d2ldev import ArrayLoader, Schedule, Trainer
from d2ldev import torch as d2l


def images(count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return noisy stripes, float32 of shape ``(count, 1, 12, 12)``, and which way each runs."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=count)
    rows, columns = np.mgrid[:12, :12]
    ways = np.stack([rows, columns, rows + columns, rows - columns])
    phases = rng.uniform(0, 2 * np.pi, size=(count, 1, 1))
    stripes = np.sin(1.5 * ways[labels] + phases) + rng.normal(0, 1, size=(count, 12, 12))
    return stripes[:, None].astype("float32"), labels


class Network(nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 4)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``(n, 4)`` for images of shape ``(n, 1, 12, 12)``."""
        logits: torch.Tensor = self.layers(x)
        return logits


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on noisy stripes, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=min(1, d2l.num_gpus()))
    parser.add_argument("--checkpoint")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)

    torch.manual_seed(0)
    net = Network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch)

    def after_epoch(epoch: int, history: dict[str, list[float]]) -> None:
        numbers = ", ".join(f"{name} {values[-1]:.3f}" for name, values in history.items())
        print(f"epoch {epoch} on {trainer.device}: {numbers}")

    trainer = Trainer(
        given.epochs,
        given.gpus,
        gradient_clip_val=1,
        backend=d2l,
        callbacks=[Schedule(schedule), after_epoch],
        precision="bf16",
    )
    trainer.fit(
        net,
        ArrayLoader(*images(512, seed=1), batch_size=32, shuffle=True),
        ArrayLoader(*images(256, seed=2), batch_size=128),
        loss="cross_entropy",
        optimizer=optimizer,
        metrics=["accuracy"],
        checkpoint=given.checkpoint,
        resume=given.resume,
    )


if __name__ == "__main__":
    main()
