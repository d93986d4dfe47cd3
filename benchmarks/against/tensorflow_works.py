"""The work on TensorFlow, and who else can do it.

array-api-compat does not know TensorFlow. TensorLy moves no tensor: it makes a variable through
NumPy; and its backend changes the operators of every tensor when it is imported, so that only its
import is here. Keras has no call that moves a tensor or places a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from against import common
from against.programs import first_tensor_work, import_work
from against.work import NATIVE, Work
from natives import tensorflow_names

_IDENTITY = (
    "d2ldev copies all or nothing, keeps ties, and knows any container; by hand it is one walk "
    "for the containers that one has"
)


def works(backend: Any, folder: Path) -> Iterator[Work]:
    """Yield each piece of work."""
    import tensorflow as tf

    names = {"tf": tf, **tensorflow_names()}
    one, many = {NATIVE: "identity(x, native)"}, {NATIVE: "identity(batch, native)"}
    for source, target in (("cpu", "cpu"), ("gpu:0", "gpu:1"), ("cpu", "gpu:1")):
        yield from common.moves(
            backend,
            source,
            target,
            one,
            many,
            names=names,
            peers=_NAMES,
            reasons={NATIVE: _IDENTITY},
        )
    look_up = {NATIVE: "x.backing_device"}, {"einops": "get_backend(x)"}
    yield from common.look_up(backend, "gpu:0", *look_up, names, _NAMES)
    made = {
        NATIVE: "ones(native)",
        "Keras 3": "with keras.device(native): keras.ops.ones((2, 3))",
    }
    yield from common.creation(backend, "gpu:0", made, names, _NAMES)
    there = {NATIVE: "by_hand(model, native)"}
    moving = {NATIVE: "by_hand(twin, next(natives))"}
    yield from common.compare_placing(backend, "gpu:0", there, moving, names, _NAMES)
    yield from _files(backend, folder, names)
    yield from import_work("Keras 3", "TensorLy", "einops")
    yield from first_tensor_work(
        "tensorflow",
        "import tensorflow as tf; tf.ones((2, 3))",
        {
            "Keras 3": "import keras; keras.ops.ones((2, 3))",
            "TensorLy": "import tensorly as tl; tl.set_backend('tensorflow'); tl.ones((2, 3))",
        },
    )


def _files(backend: Any, folder: Path, names: dict[str, Any]) -> Iterator[Work]:
    checkpoint = "tf.train.Checkpoint(net=net)"
    ways = {
        "safetensors": common.SAFETENSORS,
    }
    model_ways = {
        NATIVE: (
            f"{checkpoint}.write(str(folder / 'net'))",
            f"{checkpoint}.read(str(folder / 'net'))",
        ),
        "Keras 3": (
            "net.save_weights(folder / 'net.weights.h5')",
            "net.load_weights(folder / 'net.weights.h5')",
        ),
    }
    total = "sum(float(tf.reduce_sum(x)) for x in {}.values())"
    yield from common.files(backend, folder, ways, model_ways, names, _NAMES, total=total)


_NAMES = {
    "Keras 3": common.keras_names,
    "einops": common.einops_names,
    "safetensors": partial(common.safetensors_names, "tensorflow"),
}
