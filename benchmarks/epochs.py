"""An epoch of torch on a GPU: by hand, with accelerate, with Lightning Fabric, with ``Trainer``.

    python benchmarks/epochs.py [--device gpu:0] [--small] [--json FILE]

All sides take their epochs in turn, in changing order, in one process, and each waits for the
device. Models, optimizers and batches are alike.
The aims are those of hardware: 1.05 of the loop by hand for the small batches, else 1.02, and no
peer is ahead. A line has the ratios of the medians to the loop by hand, as
``conformance/results`` keeps them, and the loop's milliseconds for each step. It takes about a
minute; a peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from natives import pin, pins
from overhead import document
from torch import nn

import d2ldev
from d2ldev.training.trainer import Trainer

Batches = list[tuple[torch.Tensor, torch.Tensor]]
Epoch = Callable[[Batches], object]

_CLASSES = 10
_WARM_UP = 3
# Of an epoch, which repeats them: more would not fit into the processor's caches either.
_DIFFERENT_BATCHES = 8


class Case(NamedTuple):
    """What is trained.

    Args:
        name: of the model and the shape of its batches.
        make_model: makes the model.
        shape: of the inputs of a batch.
        aim: of the ratio to the loop by hand.
    """

    name: str
    make_model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    aim: float


def mlp() -> nn.Module:
    """Return a perceptron with two hidden layers."""
    layers = (nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(1024, _CLASSES))


def cnn() -> nn.Module:
    """Return a network of convolutions for images of 32 x 32."""
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256)):
        convolution = nn.Conv2d(before, after, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, _CLASSES))


CASES = (
    Case("mlp 64x784", mlp, (64, 784), 1.05),
    Case("mlp 4096x784", mlp, (4096, 784), 1.02),
    Case("cnn 256x3x32x32", cnn, (256, 3, 32, 32), 1.02),
)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every side."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


# -- the loops -------------------------------------------------------------------------------------


def by_hand(model: nn.Module, native: torch.device) -> Epoch:
    """Return the loop without any library."""
    model = model.to(native)
    optimizer = optimizer_of(model)
    return _loop(
        model,
        optimizer,
        lambda batch: [x.to(native, non_blocking=True) for x in batch],
        lambda loss: loss.backward(),
    )


def accelerate(model: nn.Module, native: torch.device) -> Epoch:
    """Follow https://huggingface.co/docs/accelerate/basic_tutorials/migration."""
    from accelerate import Accelerator
    from accelerate.utils import send_to_device

    accelerator = Accelerator(cpu=native.type == "cpu")
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    return _loop(
        model,
        optimizer,
        lambda batch: send_to_device(batch, accelerator.device, non_blocking=True),
        accelerator.backward,
    )


def fabric(model: nn.Module, native: torch.device) -> Epoch:
    """Follow https://lightning.ai/docs/fabric/stable/fundamentals/convert.html."""
    try:
        from lightning_fabric import Fabric
    except ImportError:  # in the distribution ``lightning`` it is a part
        from lightning.fabric import Fabric

    made = Fabric(accelerator=native.type, devices=1)
    model, optimizer = made.setup(model, optimizer_of(model))
    return _loop(model, optimizer, made.to_device, made.backward)


def _loop(
    model: nn.Module,
    optimizer: Any,
    move: Callable[[Any], Any],
    backward: Callable[[torch.Tensor], object],
) -> Epoch:
    """Return an epoch, with the mean of its losses at its end."""

    def epoch(batches: Batches) -> float:
        model.train()
        losses = []
        for batch in batches:
            x, y = move(batch)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    return epoch


PEERS: dict[str, Callable[[nn.Module, torch.device], Epoch]] = {
    "accelerate": accelerate,
    "fabric": fabric,
}


# -- measuring -------------------------------------------------------------------------------------


def measure(
    backend: d2ldev.Backend, device: d2ldev.Device, case: Case, batches: Batches, epochs: int
) -> dict[str, list[float]]:
    """Return the seconds of the epochs of each side, of which each round takes one.

    The trainer is entered once, and the others take their turns in its callback.
    """
    native = backend.native(device)
    sides = {"hand": by_hand(case.make_model(), native)}
    for name, make in PEERS.items():
        try:
            sides[name] = make(case.make_model(), native)
        except ImportError:
            continue
    seconds: dict[str, list[float]] = {name: [] for name in (*sides, "d2ldev")}
    began = 0.0

    def time_epoch(name: str, epoch: Epoch) -> None:
        start = time.perf_counter()
        epoch(batches)
        backend.synchronize(device)
        seconds[name].append(time.perf_counter() - start)

    def callback(number: int, _history: object) -> None:
        nonlocal began
        backend.synchronize(device)
        seconds["d2ldev"].append(time.perf_counter() - began)
        for name, epoch in list(sides.items())[:: 1 if number % 2 else -1]:
            time_epoch(name, epoch)
        began = time.perf_counter()

    trainer = Trainer(_WARM_UP + epochs, backend=backend, callbacks=callback)
    trainer.device = device
    model = case.make_model()
    began = time.perf_counter()
    trainer.fit(model, batches, loss="cross_entropy", optimizer=optimizer_of(model))
    return {name: found[_WARM_UP:] for name, found in seconds.items()}


def make_batches(backend: d2ldev.Backend, case: Case, number: int, *, is_pinned: bool) -> Batches:
    """Return the batches of an epoch, in the host's memory."""
    generator = torch.Generator().manual_seed(0)
    different: Batches = [
        (
            torch.randn(case.shape, generator=generator),
            torch.randint(_CLASSES, case.shape[:1], generator=generator),
        )
        for _ in range(min(_DIFFERENT_BATCHES, number))
    ]
    if is_pinned:
        different = pin(backend, different)
    return [different[i % len(different)] for i in range(number)]


def results(
    backend: d2ldev.Backend, device: d2ldev.Device, batches: int, epochs: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case, from pinned memory where there is any, and from pageable."""
    for case in CASES:
        for is_pinned in (True, False) if pins(backend) else (False,):
            data = make_batches(backend, case, batches, is_pinned=is_pinned)
            found = {k: median(v) for k, v in measure(backend, device, case, data, epochs).items()}
            ratios = {name: round(each / found["hand"], 3) for name, each in found.items()}
            step = round(found["hand"] / batches * 1e3, 3)
            yield {
                "name": case.name,
                "pinned": is_pinned,
                "aim": case.aim,
                "ratios": ratios,
                "hand_ms_step": step,
            }


def main() -> None:
    """Measure, print, and write the requested file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="gpu:0", help="the device to train on")
    parser.add_argument("--small", action="store_true", help="do little work, to try it out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    backend = d2ldev.get_backend("torch")
    device = backend.device(arguments.device)
    rows = []
    for row in results(backend, device, *((2, 2) if arguments.small else (60, 15))):
        rows.append(row)
        shown = {**row["ratios"], "hand_ms_step": row["hand_ms_step"]}
        print(row["name"], row["pinned"], shown, f"aim {row['aim']}", flush=True)
    if arguments.json is not None:
        made = document([], "torch", ("accelerate", "lightning", "lightning-fabric"))
        made |= {"results": rows, "device": str(device), "platform": backend.platform(device)}
        arguments.json.write_text(format_lines(made), encoding="utf-8")


if __name__ == "__main__":
    main()
