"""One epoch of training, by the native loops and by those of the peers, on the CPU.

Ours and theirs train in turn, epoch by epoch, as in ``training.py``: the trainers are entered once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from against.work import AIM, AIM_OF_WORK, NATIVE, PEERS, Against, compare, not_installed
from loops import FRAMEWORKS, LEARNING_RATE, Batches, Epoch, keras_lenet
from training import WARM_UP, cases, epochs

Loop = Callable[[Any], Epoch]

_EPOCHS = 10  # of each side, with each pair of models
_OURS = "Trainer(epochs).fit(net, batches)"
_REASON = (
    "the trainer adds a few calls of Python to a step, for its callbacks, hooks and log, which "
    "steps of less than a millisecond feel"
)


def results(backend: Any, only: str = "") -> Iterator[Against]:
    """Compare an epoch of an MLP and one of LeNet, with each loop, if the name has ``only``."""
    framework = FRAMEWORKS[backend.name]()
    for (case, make_model, batches), make_keras in zip(
        cases(backend, framework), _keras_models(backend.name), strict=True
    ):
        if only not in case:
            continue
        loops = [(NATIVE, described, loop) for described, loop in framework.loops.items()]
        loops += _PEERS[backend.name](make_keras)
        for peer, described, loop in loops:
            what = (case, _OURS, described)
            aim = AIM if peer in PEERS else AIM_OF_WORK
            if peer in PEERS and not PEERS[peer].is_installed:
                yield not_installed(what, peer, aim)
                continue
            samples = epochs(backend, make_model, batches, loop, _EPOCHS)
            reason = _REASON if peer == NATIVE and "MLP" in case else ""
            # Where a framework has several loops of its own, a row says which.
            several = peer == NATIVE and len(framework.loops) > 1
            shown = f"{peer}, {described}" if several else peer
            yield compare(what, shown, samples, aim, reason)


def _fabric(model: Any) -> Epoch:
    """Follow https://lightning.ai/docs/fabric/stable/fundamentals/convert.html."""
    import torch
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = fabric.setup(model, optimizer)
    return _epoch_of_torch(model, optimizer, fabric.to_device, fabric.backward)


def _accelerate(model: Any) -> Epoch:
    """Follow https://huggingface.co/docs/accelerate/basic_tutorials/migration."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import send_to_device

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    move = partial(send_to_device, device=accelerator.device)
    return _epoch_of_torch(model, optimizer, move, accelerator.backward)


def _epoch_of_torch(
    model: Any,
    optimizer: Any,
    move: Callable[[Any], Any],
    backward: Callable[[Any], object],
) -> Epoch:
    """Return the loop of both tutorials."""
    import torch

    loss_fn = torch.nn.CrossEntropyLoss()

    def epoch(batches: Batches) -> object:
        model.train()
        for batch in batches:
            x, y = move(batch)
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            backward(loss)
            optimizer.step()
        return loss.item()

    return epoch


class Fit:
    """Keras' ``fit``, entered once, in a thread of its own that trains one epoch for each call.

    Entering it for each epoch would set up its callbacks and its data again, which ours does once.
    """

    def __init__(self, model: Any, number: int) -> None:
        self._model = model
        self._number = number
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __call__(self, batches: Batches) -> None:
        """Train for one epoch; at most for as many as were announced."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._fit, args=(batches,), daemon=True)
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def _fit(self, batches: Batches) -> None:
        import keras

        go, done = self._go, self._done

        class Turns(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
                go.acquire()

            def on_epoch_end(self, epoch: int, logs: object = None) -> None:
                done.release()

        try:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self._model.compile(keras.optimizers.SGD(LEARNING_RATE), loss)
            data = _keras_data(batches)
            self._model.fit(**data, epochs=self._number, verbose=0, callbacks=[Turns()])
        except BaseException as error:
            self._error = error
            done.release()


def _keras_data(batches: Batches) -> dict[str, Any]:
    """Return batches as ``fit`` takes them fastest: arrays, and a ``Dataset`` on TensorFlow."""
    import keras
    import numpy as np

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        stacked = tuple(tf.stack(column) for column in zip(*batches, strict=True))
        return {"x": tf.data.Dataset.from_tensor_slices(stacked), "shuffle": False}
    x, y = (
        np.concatenate([np.asarray(x) for x in column]) for column in zip(*batches, strict=True)
    )
    return {"x": x, "y": y, "batch_size": len(batches[0][1]), "shuffle": False}


def _keras_models(framework: str) -> list[Callable[[], Any]]:
    """Return what makes an MLP and LeNet in Keras, with the images of the framework's batches."""
    shape = (1, 28, 28) if framework == "torch" else (28, 28, 1)

    def mlp() -> Any:
        import keras
        from keras import layers

        inputs = keras.Input((784,))
        return keras.Sequential([inputs, layers.Dense(256, activation="relu"), layers.Dense(10)])

    def lenet() -> Any:
        import keras

        keras.config.set_image_data_format(
            "channels_first" if framework == "torch" else "channels_last"
        )
        return keras_lenet(shape)

    return [mlp, lenet]


def _keras(make_keras: Callable[[], Any]) -> list[tuple[str, str, Loop]]:
    def loop(_model: Any) -> Epoch:
        return Fit(make_keras(), WARM_UP + _EPOCHS)

    return [("Keras 3", "model.fit(batches)", loop)]


def _of_torch(make_keras: Callable[[], Any]) -> list[tuple[str, str, Loop]]:
    return [
        ("Lightning Fabric", "fabric.setup, fabric.backward", _fabric),
        ("accelerate", "accelerator.prepare, accelerator.backward", _accelerate),
        *_keras(make_keras),
    ]


_PEERS: dict[str, Callable[[Callable[[], Any]], list[tuple[str, str, Loop]]]] = {
    "torch": _of_torch,
    "jax": _keras,
    "tensorflow": _keras,
    "mxnet": lambda _make_keras: [],
}
